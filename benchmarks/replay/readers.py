"""Reads trace files: Mooncake's JSONL as published, JSONL with runs of ids, and the compact ``.npz``.

JSONL, one request per line::

    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]}
    {"timestamp": 5, "input_length": 1100, "output_length": 20, "runs": [[0, 2], [7, 1]]}

A run ``[start, length]`` stands for consecutive ids. A first line ``{"block_size": 64}`` tells the tokens per id;
without it they are Mooncake's 512 (github.com/kvcache-ai/Mooncake, FAST25-release/traces). Other members are
ignored. ``.npz``: see `read_npz`.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.trace import Trace

MOONCAKE_BLOCK_SIZE = 512
LENGTH_MAX = 2**31 - 1
NPZ_MEMBERS = ("block_size", "input_length", "output_length", "run_off", "run_start", "run_len")


class TraceError(ValueError):
    """The file is not a trace. The message names the file, the line and what is wrong there."""


def read_trace(path: str | os.PathLike[str], *, block_size: int | None = None) -> Trace:
    """Read a trace file.

    Parameters
    ----------
    path : path
        ``.npz``, or JSONL with any other name; ``.gz`` is unpacked.
    block_size : int, optional
        Tokens per hash id, where the file does not tell and it is not Mooncake's 512.

    Raises
    ------
    ValueError
        If block_size is below 1.
    OSError
        If the file cannot be read.
    TraceError
        If its contents are not a trace.
    """
    if block_size is None:
        block_size = MOONCAKE_BLOCK_SIZE
    elif block_size < 1:
        raise ValueError(f"[read_trace] block_size is out of range ({block_size}), at least 1")
    path = Path(path)
    trace = read_npz(path) if path.suffix == ".npz" else read_jsonl(path, block_size)
    if len(trace) == 0:
        raise TraceError(f"[read_trace] {path}: no request in it")
    return trace


class _Rows:
    """Collects checked requests until they become a `Trace`."""

    def __init__(self, path: Path, block_size: int) -> None:
        self.path, self.block_size, self.line = path, block_size, 0
        self.columns: dict[str, list[Any]] = {"prompts": [], "outputs": [], "timestamps": [], "sessions": []}
        self.ids: list[list[int]] = []

    def refuse(self, what: str) -> NoReturn:
        raise TraceError(f"[read_trace] {self.path}:{self.line}: {what}")

    def add(self, record: dict[str, Any]) -> None:
        """Check one request and keep it."""
        prompt = self.integer(record, "input_length", 1)
        self.columns["prompts"].append(prompt)
        self.columns["outputs"].append(self.integer(record, "output_length", 0))
        session, timestamp = record.get("session", -1), record.get("timestamp", 0)
        self.columns["sessions"].append(session if _is_integer(session) and abs(session) <= LENGTH_MAX else -1)
        if type(timestamp) not in (int, float) or not abs(timestamp) < 2**63:
            self.refuse(f"timestamp is not a number of 64 bits ({timestamp!r})")
        self.columns["timestamps"].append(timestamp)
        self.ids.append(self.hash_ids(record, -(-prompt // self.block_size)))

    def integer(self, record: dict[str, Any], name: str, least: int) -> int:
        """Return an integer member of a request, checked."""
        value = record.get(name)
        if value is None:
            self.refuse(f"{name} is missing")
        if not _is_integer(value):
            self.refuse(f"{name} is not an integer ({value!r})")
        if not least <= value <= LENGTH_MAX:
            self.refuse(f"{name} is out of range ({value}), {least}..{LENGTH_MAX}")
        return value

    def hash_ids(self, record: dict[str, Any], blocks: int) -> list[int]:
        """Return the ids of a request of `blocks` blocks."""
        name = "runs" if "runs" in record else "hash_ids"
        entries = record.get(name)
        if entries is None:
            self.refuse("hash_ids is missing")
        is_entry = _is_run if name == "runs" else _is_integer
        if not isinstance(entries, list) or not all(map(is_entry, entries)):
            self.refuse(f"{name} is not a list of {'[start, length]' if name == 'runs' else 'integers'}")
        count = sum(length for _, length in entries) if name == "runs" else len(entries)
        if count > blocks:  # checked before runs are spelled out: a wrong one may be longer than memory
            self.refuse(f"more hash ids than the prompt has blocks of {self.block_size} tokens ({count}), {blocks}")
        if name == "hash_ids":
            return entries
        return [value for start, length in entries for value in range(start, start + length)]

    def trace(self) -> Trace:
        """Return everything collected."""
        offsets = np.cumsum([0, *map(len, self.ids)], dtype=np.int64)
        columns = {name: np.asarray(values) for name, values in self.columns.items()}
        return Trace(self.path.name, self.block_size, ids=_flat(self.ids), id_offsets=offsets, **columns)


def read_jsonl(path: Path, block_size: int) -> Trace:
    """Read the JSON lines of a trace, `block_size` tokens per id if they do not tell. Raises as `read_trace`."""
    rows = _Rows(path, block_size)
    for line in _lines(rows):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as exc:
            rows.refuse(f"no JSON ({_reason(exc)})")
        if not isinstance(record, dict):
            rows.refuse("no JSON object")
        if rows.line == 1 and "block_size" in record and "input_length" not in record:
            rows.block_size = rows.integer(record, "block_size", 1)
        else:
            rows.add(record)
    return rows.trace()


def _lines(rows: _Rows) -> Iterator[str]:
    """Yield the lines that are not blank, counting all."""
    opened = gzip.open if rows.path.suffix == ".gz" else open
    try:
        with opened(rows.path, "rt", encoding="utf-8") as file:
            for rows.line, line in enumerate(file, 1):
                if line.strip():
                    yield line
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as exc:
        rows.line += 1
        rows.refuse(f"no text ({_reason(exc)})")


def _reason(exc: Exception) -> str:
    """The message of an exception, in one line."""
    return " ".join(str(exc).split()) or type(exc).__name__


def _is_integer(value: Any) -> bool:
    return type(value) is int  # no bool


def _is_run(run: Any) -> bool:
    return isinstance(run, list) and len(run) == 2 and all(map(_is_integer, run)) and run[1] >= 0


def _flat(ids: list[list[int]]) -> NDArray[np.int64]:
    """Return all ids in one array. Ids beyond 64 bits are renumbered, which keeps what is equal equal."""
    values = [value for row in ids for value in row]
    try:
        return np.array(values, np.int64)
    except OverflowError:
        numbers: dict[int, int] = {}
        return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64)


def read_npz(path: Path) -> Trace:
    """Read the compact form; raises as `read_trace`.

    Members: block_size (scalar, 0 without ids), input_length, output_length ``[R]``, run_off ``[R + 1]``, run_start
    and run_len (the ids of request i are the runs ``run_off[i]:run_off[i + 1]``, each ``start, start + 1, ...``), and,
    if known, t_ms and session ``[R]``.
    """
    members = _npz_members(path)
    block_size, prompts, outputs, run_off, run_start, run_len = (members[name] for name in NPZ_MEMBERS)
    rows = len(prompts)

    def refuse(what: str) -> NoReturn:
        raise TraceError(f"[read_trace] {path}: {what}")

    def refuse_rows(bad: NDArray[np.bool_], what: str) -> None:
        if bad.any():
            refuse(f"row {int(bad.argmax())}: {what}")

    if len(outputs) != rows or len(run_off) != rows + 1 or len(run_start) != len(run_len):
        refuse("members of different lengths")
    if (np.diff(run_off) < 0).any() or run_off[0] != 0 or run_off[-1] != len(run_len):
        refuse("run_off does not divide the runs among the requests")
    if run_len.min(initial=0) < 0 or run_len.max(initial=0) > LENGTH_MAX:
        refuse(f"run_len is out of range, 0..{LENGTH_MAX}")
    refuse_rows((prompts < 1) | (prompts > LENGTH_MAX), f"input_length is out of range, 1..{LENGTH_MAX}")
    refuse_rows((outputs < 0) | (outputs > LENGTH_MAX), f"output_length is out of range, 0..{LENGTH_MAX}")
    id_ends = np.concatenate(([0], np.cumsum(run_len)))  # after each run
    offsets = id_ends[run_off]
    tokens_per_id = int(block_size)
    blocks = -(-prompts // tokens_per_id) if tokens_per_id > 0 else np.zeros(rows, np.int64)
    refuse_rows(np.diff(offsets) > blocks, f"more hash ids than the prompt has blocks of {tokens_per_id} tokens")
    ids = np.repeat(run_start - id_ends[:-1], run_len) + np.arange(id_ends[-1])
    unknown = np.full(rows, -1, np.int64)
    timestamps, sessions = members.get("t_ms", unknown), members.get("session", unknown)
    if not len(timestamps) == len(sessions) == rows:
        refuse("members of different lengths")
    return Trace(path.name, tokens_per_id, prompts, outputs, ids, offsets, timestamps, sessions)


def _npz_members(path: Path) -> dict[str, NDArray[np.int64]]:
    """Return the integer members of an .npz file, as int64."""
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                members = {name: archive[name] for name in (*NPZ_MEMBERS, "t_ms", "session") if name in archive}
        except Exception as exc:  # a damaged archive raises nearly anything
            raise TraceError(f"[read_trace] {path}: no .npz archive of integers ({_reason(exc)})") from None
    for name in NPZ_MEMBERS:
        if name not in members:
            raise TraceError(f"[read_trace] {path}: {name} is missing")
    for name, values in members.items():
        if values.dtype.kind not in "iu" or values.ndim != (name != "block_size"):
            raise TraceError(f"[read_trace] {path}: {name} has the wrong type or shape")
    return {name: values.astype(np.int64) for name, values in members.items()}
