"""How a run is shown: tables for people, one JSON object for machines."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np

import kvpool
from benchmarks.attention.bench import Bench
from benchmarks.attention.gates import BLOCK_SIZE
from benchmarks.attention.rows import Row
from benchmarks.gate import Gate, as_text, held
from kvpool.cli.bench.options import tokens
from kvpool.cli.console import cache_nbytes, cpu_model, huge_pages
from kvpool.config import format_nbytes

WIDTH = 200  # of a table where no terminal says: it is not folded

Lines = list[tuple[str, ...]]  # of a table, its head first


def as_json(bench: Bench, rows: Sequence[Row], gates: Sequence[Gate], seconds: float) -> dict[str, Any]:
    """Return everything that was measured, and on what. Times are seconds."""
    return {
        "kvpool": kvpool.__version__,
        "machine": {
            "platform": platform.platform(),
            "cpu": cpu_model(),
            "cache_nbytes": cache_nbytes(),
            "huge_pages": huge_pages(),
            "load_before": bench.load,
        },
        "isa": bench.isa,
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": bench.torch},
        "settings": asdict(bench.settings),
        "rows": [row.as_json() for row in rows],
        "left_out": [{"what": what, "why": why} for what, why in bench.left_out],
        "gates": [gate.as_json() for gate in gates],
        "held": held(gates),
        "seconds": round(seconds, 1),
    }


def show(bench: Bench, rows: Sequence[Row], gates: Sequence[Gate], seconds: float) -> None:
    """Print tables, what was left out, and which gates hold."""
    versions = f"torch {bench.torch}" if bench.torch else ""
    print(f"{cpu_model()}, kernels for {bench.isa}, layout {bench.settings.layout}{versions and f'; {versions}'}")
    print(f"load before: {bench.load:.1f}{', others were at work' if bench.load > 0.5 else ''}\n")
    title = "Decode: time / time to read the same K and V; how many times faster than dense attention"
    print_table(title, decode_lines(rows))
    print_table("Prefill, moving bytes, scores", other_lines(rows))
    reasons: dict[str, list[str]] = {}
    for what, why in bench.left_out:
        reasons.setdefault(why, []).append(what)
    for why, things in reasons.items():
        print(f"left out, {why}: {'; '.join(things)}")
    print(f"{as_text(gates)} ({seconds:.0f} s)")


def decode_lines(rows: Sequence[Row]) -> Lines:
    """Return one line for each size and number of threads, all block sizes beside each other."""
    decode = [row for row in rows if row.part == "decode"]
    if not decode:
        return []
    sizes = sorted({row.block_size for row in decode})
    main = BLOCK_SIZE if BLOCK_SIZE in sizes else sizes[0]
    head = ("dtype", "batch x context", "K+V", "threads", "read", f"blocks of {main}", "")
    lines: Lines = [(*head, *(f"/ read, {size}" for size in sizes), "torch", "")]
    for _, group in groupby(decode, key=lambda row: (row.dtype, row.batch, row.context, row.threads)):
        by_size = {row.block_size: row for row in group}
        row = by_size[main]
        remarks = ["cached"] * row.is_cached + ["disturbed"] * (not row.is_complete)
        lines.append(
            (
                row.dtype,
                f"{row.batch} x {tokens(row.context)}",
                f"{row.nbytes / 1e6:,.0f} MB",
                str(row.threads),
                f"{row.yardstick_rate:.1f} GB/s",
                f"{row.best * 1e3:.2f} ms",
                f"{row.rate:.1f} GB/s",
                *(f"{by_size[size].ratio:.2f}" for size in sizes),
                "" if row.torch is None else f"{row.torch / row.best:.1f}x",
                ", ".join(remarks),
            )
        )
    return lines


def other_lines(rows: Sequence[Row]) -> Lines:
    """Return a line for each row of the other parts."""
    lines: Lines = [("what", "time", "compared", "")]
    for row in rows:
        compared = {
            "prefill": f"{100 / row.ratio:.0f} % of sgemm",
            "write": f"{row.ratio:.2f} x memcpy",
            "copy": f"{row.ratio:.2f} x memcpy",
            "raw": f"{row.median_ratio:.3f} x without scores, which take {format_nbytes(row.scores_nbytes or 0)}",
            "mass": f"{row.median_ratio:.3f} x without scores, which take {format_nbytes(row.scores_nbytes or 0)}",
            "quantized": f"{row.ratio:.2f} x bfloat16, {row.nbytes / 1e6:,.0f} MB",
        }
        if row.part in compared:
            remark = "" if row.is_complete else "disturbed"
            part = f"{row.part} scores" if row.part in ("raw", "mass") else row.part
            lines.append((f"{part} {row.name}", f"{row.best * 1e3:.2f} ms", compared[row.part], remark))
    return lines if len(lines) > 1 else []


def print_table(title: str, lines: Lines) -> None:
    """Print a table, with rich if it is there; its first line is its head."""
    if not lines:
        return
    head, *body = lines
    right = [any(line[column][:1].isdigit() for line in body) for column in range(len(head))]
    if importlib.util.find_spec("rich"):
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for name, is_right in zip(head, right, strict=True):
            table.add_column(name, justify="right" if is_right else "left", no_wrap=True)
        for line in body:
            table.add_row(*line, style="red" if "NO" in line else None)
        Console(width=max(WIDTH, Console().width)).print(table)
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    print(title)
    for line in lines:
        cells = zip(line, widths, right, strict=True)
        print("  ".join(cell.rjust(width) if r else cell.ljust(width) for cell, width, r in cells).rstrip())
    print()
