"""Decode over the context as a PNG; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention.bench import Bench
from benchmarks.attention.gates import BLOCK_SIZE, DECODE
from benchmarks.attention.rows import Row, threads_name
from kvpool import _picture as picture
from kvpool.cli.bench.options import tokens
from kvpool.cli.machine import cpu_model

READ = "#9aa5b1"
BATCHES = ("#9fd3dc", "#5fb0bf", "#2b8ea3", "#12718a", "#0b4a5c")  # from the smallest batch to the largest


def draw(path: Path, bench: Bench, rows: Sequence[Row]) -> None:
    """Write the picture: speed above, time / time of the read below, a column per dtype.

    Disturbed rows are left out, so it shows the number of threads that has the most others.
    """
    block_sizes = bench.settings.block_sizes
    block_size = BLOCK_SIZE if BLOCK_SIZE in block_sizes else block_sizes[0]
    complete = [row for row in rows if row.is_complete and (row.part, row.block_size) == ("decode", block_size)]
    threads = max(bench.settings.threads, key=lambda n: (sum(row.threads == n for row in complete), n))
    shown = [row for row in complete if row.threads == threads]
    dtypes = [dtype for dtype in bench.settings.dtypes if any(row.dtype == dtype for row in shown)]
    columns, s = max(len(dtypes), 1), bench.settings
    machine = f"{cpu_model()}, {bench.isa}, {threads_name(threads)}"
    drawn = picture.Picture(
        (1.6 + 3.4 * columns, 6.6),
        f"Decode over paged K and V, {s.num_q_heads}/{s.num_kv_heads} heads of {s.head_dim}, blocks of {block_size}",
        f"{machine}; hollow: K and V below 134 MB, a cache may hold them",
        grid={"nrows": 2, "ncols": columns, "sharex": True, "sharey": "row", "height_ratios": (3, 2)},
        room={"left": 0.08, "right": 0.97, "top": 0.83, "bottom": 0.17, "hspace": 0.14, "wspace": 0.06},
    )
    axes = drawn.panels
    colors = colors_of(bench.settings.batches)
    for column, dtype in enumerate(dtypes):
        draw_dtype(axes[:, column], dtype, [row for row in shown if row.dtype == dtype], colors)
    axes[0, 0].set_ylabel("K and V, GB/s", color=picture.MUTED)
    axes[1, 0].set_ylabel("time / time of the read", color=picture.MUTED)
    axes[0, 0].set_ylim(0, 1.05 * max((max(row.rate, row.yardstick_rate) for row in shown), default=1))
    ratios = [row.ratio for row in shown]
    axes[1, 0].set_ylim(min([0.8, *ratios]), 0.1 + max([1.8, *ratios]))
    named: dict[str, Any] = {}
    for panel in axes.flat:
        named |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    names = sorted(named, key=lambda name: not name.startswith("batch"))  # the batches first
    handles = [named[name] for name in names]
    picture.legend(drawn.figure, handles=handles, labels=names, loc="lower center", ncols=5)
    drawn.save(path)


def colors_of(batches: Sequence[int]) -> dict[int, str]:
    """Return the color of each batch, the same in every column."""
    steps = (len(BATCHES) - 1) / max(len(batches) - 1, 1)
    return {batch: BATCHES[round(number * steps)] for number, batch in enumerate(sorted(batches))}


def draw_dtype(panels: Any, dtype: str, rows: Sequence[Row], colors: dict[int, str]) -> None:
    """Draw one dtype: a line per batch, in its color, the read and torch beside them."""
    speed, ratio = panels
    for batch in sorted({row.batch for row in rows}):
        color = colors[batch]
        line = sorted((row for row in rows if row.batch == batch), key=lambda row: row.context)
        contexts = [row.context for row in line]
        faces = ["white" if row.is_cached else color for row in line]
        for panel, values in ((speed, [row.rate for row in line]), (ratio, [row.ratio for row in line])):
            panel.plot(contexts, values, color=color, linewidth=1.6, zorder=3)
            panel.scatter(contexts, values, s=22, color=faces, edgecolors=color, zorder=4)
        speed.plot([], [], color=color, marker="o", markersize=4.5, label=f"batch {batch}")
        rates = [row.yardstick_rate for row in line]
        speed.plot(contexts, rates, color=READ, linewidth=1.0, linestyle=(0, (1, 1.5)), label="read of the same bytes")
        against = [row for row in line if "torch" in row.dense]
        rates = [row.nbytes / row.dense["torch"] / 1e9 for row in against]
        if against:
            speed.plot(
                [r.context for r in against], rates, color=picture.OTHER, linewidth=1.0, label="torch, dense K and V"
            )
    for bound, name, style in zip(DECODE[dtype], ("gate", "goal"), (picture.DASHED, (0, (2, 3))), strict=True):
        ratio.axhline(bound, color=picture.INK, linewidth=0.9, linestyle=style, label=name)
    ratio.axhline(1, color=READ, linewidth=1.0)
    picture.name(speed, dtype)
    picture.name(ratio, "", below="context, tokens")
    contexts = sorted({row.context for row in rows})
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(contexts, [tokens(context) for context in contexts])
        panel.minorticks_off()
