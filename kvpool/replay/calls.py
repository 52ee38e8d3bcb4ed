"""The calls that a pool recorded (``Pool(..., record=N)``): to a file, from a file, and as calls again.

A file is ``KVCALLS1``, the length of a JSON header (uint32, little-endian), the header (version of kvpool, parameters
of the pool, numbers of calls kept and lost, digest at the end), the bytes of the ring, and the CRC-32 of all of it. A
call is a byte that names it, integers as zigzag varints, and the low 32 bits of the pool's digest after it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvpool
from kvpool.errors import KVPoolError

MAGIC = b"KVCALLS1"
NAMES = {  # the enums of kvpool/_types.pxd and kvpool/_record.pxd
    1: "alloc", 2: "incref", 3: "decref", 4: "free", 5: "commit", 6: "revive", 7: "evict", 8: "take_dropped", 9: "open",
    10: "fork", 11: "truncate", 12: "close", 13: "step", 14: "reserve", 15: "rollback", 16: "done", 18: "compact",
    19: "evict_blocks", 20: "unshare", 32: "start",
    33: "flush", 34: "close_finished", 35: "defer_close",
}  # fmt: skip
SAME_ROWS, PARTIAL = 1, 2
PARAMETERS = (
    *("num_blocks", "block_size", "max_seqs", "max_blocks_per_seq", "reserved_blocks", "watermark", "in_order", "seed"),
)


class RecordError(KVPoolError, ValueError):
    """A file is no record of calls, or is damaged; the message says where."""


@dataclass(frozen=True)
class Call:
    """One call that changed the pool."""

    name: str
    arguments: dict[str, Any]
    digest: int  # low 32 bits, after the call

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.name}({shown if len(shown) <= 100 else shown[:97] + '...'})"


@dataclass(frozen=True)
class Calls:
    """What a file holds. `begins`: the call at which a replay can begin, None when none is left."""

    header: dict[str, Any]
    calls: tuple[Call, ...] = field(repr=False)

    @property
    def begins(self) -> int | None:
        """0 when nothing was lost, else behind the oldest reset that is left."""
        if not self.header["lost"]:
            return 0
        return next((i for i, call in enumerate(self.calls) if call.name == "start"), None)


def save(pool: kvpool.Pool, path: str | Path) -> int:
    """Write what the pool has recorded to a file; returns how many calls that are.

    Raises
    ------
    ValueError
        The pool does not record.
    """
    body, kept, lost = pool._recorded()
    if not body and not lost:
        raise ValueError("[save] the pool has recorded nothing; make it with record=BYTES")
    parameters = {name: getattr(pool, name) for name in PARAMETERS} | {"prefix_cache": pool.index_nbytes > 0}
    header = {
        "kvpool": kvpool.__version__, "pool": parameters, "calls": kept, "lost": lost, "digest": pool.digest(),
    }  # fmt: skip
    text = json.dumps(header).encode()
    data = MAGIC + struct.pack("<I", len(text)) + text + body
    Path(path).write_bytes(data + struct.pack("<I", zlib.crc32(data)))
    return int(kept)


def load(path: str | Path) -> Calls:
    """Read a file of calls.

    Raises
    ------
    RecordError
        The file is none of ours, from another format, cut short or changed; the message says where.
    OSError
        It cannot be read.
    """
    data, name = Path(path).read_bytes(), Path(path).name
    if data[:7] != MAGIC[:7]:
        raise RecordError(f"{name}: not a record of calls (it begins with {data[:8]!r})")
    if data[:8] != MAGIC:
        raise RecordError(f"{name}: format {data[7:8]!r}, this kvpool reads {MAGIC[7:]!r}")
    if len(data) < 16:
        raise RecordError(f"{name}: cut short, {len(data)} bytes")
    (size,) = struct.unpack_from("<I", data, 8)
    if zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
        raise RecordError(f"{name}: cut short or changed: the checksum of its {len(data)} bytes does not agree")
    try:
        header = json.loads(data[12 : 12 + size])
        calls = tuple(parse(data[12 + size : -4], 12 + size, bool(header["pool"]["prefix_cache"])))
        expected, _ = int(header["calls"]), int(header["lost"])
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{name}: its header cannot be read ({error!r})") from None
    if len(calls) != expected:
        raise RecordError(f"{name}: {len(calls)} calls, its header says {expected}")
    return Calls(header, calls)


class _Reader:
    """Integers out of bytes."""

    def __init__(self, data: bytes, offset: int) -> None:
        self.data, self.at, self.offset = data, 0, offset

    def number(self) -> int:
        """The next integer."""
        value = shift = 0
        while True:
            if self.at >= len(self.data) or shift > 63:
                raise RecordError(f"no integer at byte {self.offset + self.at}")
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return (value >> 1) ^ -(value & 1)

    def batch(self) -> int | list[int]:
        """Integers with their number before them, or one for all."""
        size = self.number()
        return self.number() if size < 0 else self.numbers(size)

    def numbers(self, size: int) -> list[int]:
        """So many integers."""
        if not 0 <= size <= len(self.data) - self.at:
            raise RecordError(f"{size} integers at byte {self.offset + self.at}, the record ends before")
        return [self.number() for _ in range(size)]


def parse(data: bytes, offset: int, indexed: bool) -> Iterator[Call]:
    """The calls in the bytes of a ring."""
    read = _Reader(data, offset)
    while read.at < len(data):
        at = read.at
        name = NAMES.get(data[at])
        if name is None:
            raise RecordError(f"no such call ({data[at]}) at byte {offset + at}")
        read.at += 1
        arguments = _arguments(read, name, indexed)
        if read.at + 4 > len(data):
            raise RecordError(f"the call at byte {offset + at} has no end")
        (digest,) = struct.unpack_from("<I", data, read.at)
        read.at += 4
        yield Call(name, arguments, digest)


def _arguments(read: _Reader, name: str, indexed: bool) -> dict[str, Any]:
    """What `kvpool._record` wrote after the name of a call."""
    if name in ("incref", "decref", "free", "revive", "alloc") or (name == "commit" and not indexed):
        return {"ids": read.batch()}
    if name in ("evict", "take_dropped"):
        return {"n": read.number()}
    if name in ("done", "rollback"):
        return {"plan": read.number()}
    if name == "defer_close":
        return {"rows": [read.number()]}
    if name == "close":
        return {"rows": read.batch()}
    if name == "truncate":
        return {"rows": read.batch(), "lens": read.batch()}
    if name == "compact":
        return {"rows": read.batch(), "lens": read.batch(), "first": read.number()}
    if name == "unshare":
        plan = read.number()
        return {"plan": plan, "rows": read.batch(), "lens": read.batch(), "first": read.number()}
    if name == "evict_blocks":
        return {"row": read.number(), "indices": read.batch()}
    if name == "close_finished":
        closing = read.batch()
        return {"rows": closing, "mask": read.numbers(len(closing) if isinstance(closing, list) else 1)}
    if name == "fork":
        parent = read.number()
        return {"row": parent, "children": read.numbers(read.number())}
    if name == "commit":
        return {"rows": read.batch(), "counts": read.batch(), "tokens": read.batch()}
    if name == "flush":
        size = read.number()
        return {"namespace": None if size < 0 else bytes(n & 255 for n in read.numbers(size)).hex()}
    if name == "open":
        row, take = read.number(), read.number()
        namespace = bytes(n & 255 for n in read.numbers(read.number())).hex()
        return {"row": row, "pin": not take, "namespace": namespace, "tokens": read.batch()}
    if name == "start":
        digest, dropped = read.number() & (1 << 64) - 1, read.batch()
        pairs = read.numbers(2 * read.number())
        return {"digest": digest, "dropped": dropped, "generations": list(zip(pairs[::2], pairs[1::2], strict=True))}
    plan, flags = read.number(), read.number()
    named = None if flags & SAME_ROWS else read.batch()
    return {"plan": plan, "rows": named, "num_new": read.batch(), "partial": bool(flags & PARTIAL)}
