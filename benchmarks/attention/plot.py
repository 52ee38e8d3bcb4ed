"""Decode over the context as a PNG; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention.bench import Bench
from benchmarks.attention.gates import BLOCK_SIZE, DECODE
from benchmarks.attention.rows import Row, threads_name
from kvpool.cli.bench.options import tokens
from kvpool.cli.machine import cpu_model

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
READ, TORCH = "#9aa5b1", "#c2571a"
BATCHES = ("#9fd3dc", "#5fb0bf", "#2b8ea3", "#12718a", "#0b4a5c")  # from the smallest batch to the largest


def draw(path: Path, bench: Bench, rows: Sequence[Row]) -> None:
    """Write the picture: speed above, time / time of the read below, a column per dtype.

    Disturbed rows are left out, so it shows the number of threads that has the most others.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    block_sizes = bench.settings.block_sizes
    block_size = BLOCK_SIZE if BLOCK_SIZE in block_sizes else block_sizes[0]
    complete = [row for row in rows if row.is_complete and (row.part, row.block_size) == ("decode", block_size)]
    threads = max(bench.settings.threads, key=lambda n: (sum(row.threads == n for row in complete), n))
    shown = [row for row in complete if row.threads == threads]
    dtypes = [dtype for dtype in bench.settings.dtypes if any(row.dtype == dtype for row in shown)]
    columns = max(len(dtypes), 1)
    figure = Figure(figsize=(1.6 + 3.4 * columns, 6.6), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, columns, sharex=True, sharey="row", squeeze=False, height_ratios=(3, 2))
    figure.subplots_adjust(left=0.08, right=0.97, top=0.83, bottom=0.17, hspace=0.14, wspace=0.06)
    s = bench.settings
    shape = f"{s.num_q_heads}/{s.num_kv_heads} heads of {s.head_dim}, blocks of {block_size}"
    title = f"Decode over paged K and V, {shape}"
    figure.text(0.08, 0.945, title, size=14, weight="bold", color=INK)
    machine = f"{cpu_model()}, {bench.isa}, {threads_name(threads)}"
    figure.text(0.08, 0.908, f"{machine}; hollow: K and V below 134 MB, a cache may hold them", size=9, color=MUTED)
    colors = colors_of(bench.settings.batches)
    for column, dtype in enumerate(dtypes):
        draw_dtype(axes[:, column], dtype, [row for row in shown if row.dtype == dtype], colors)
    axes[0, 0].set_ylabel("K and V, GB/s", color=MUTED)
    axes[1, 0].set_ylabel("time / time of the read", color=MUTED)
    axes[0, 0].set_ylim(0, 1.05 * max((max(row.rate, row.yardstick_rate) for row in shown), default=1))
    ratios = [row.ratio for row in shown]
    axes[1, 0].set_ylim(min([0.8, *ratios]), 0.1 + max([1.8, *ratios]))
    named: dict[str, Any] = {}
    for panel in axes.flat:
        named |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    names = sorted(named, key=lambda name: not name.startswith("batch"))  # the batches first
    handles = [named[name] for name in names]
    figure.legend(handles, names, loc="lower center", ncols=5, frameon=False, fontsize=8.5, labelcolor=INK)
    figure.savefig(path, format="png")


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
            speed.plot([r.context for r in against], rates, color=TORCH, linewidth=1.0, label="torch, dense K and V")
    for bound, name, style in zip(DECODE[dtype], ("gate", "goal"), ((0, (5, 3)), (0, (2, 3))), strict=True):
        ratio.axhline(bound, color=INK, linewidth=0.9, linestyle=style, label=name)
    ratio.axhline(1, color=READ, linewidth=1.0)
    speed.set_title(dtype, loc="left", size=10.5, color=INK)
    contexts = sorted({row.context for row in rows})
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(contexts, [tokens(context) for context in contexts])
        panel.minorticks_off()
        panel.grid(axis="y", color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(colors=MUTED, labelsize=8.5, length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.spines["bottom"].set_color(GRID)
    ratio.set_xlabel("context, tokens", color=MUTED)
