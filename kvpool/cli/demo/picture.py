"""The picture of part (d), as a PNG and as text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.cli.console import NotRun
from kvpool.cli.demo.serving import Comparison, Timeline
from kvpool.errors import install_command

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
SLOTS, SLOTS_LIGHT = "#c2571a", "#f6d5bd"
BLOCKS, BLOCKS_LIGHT = "#12718a", "#bfe0e6"
HEADROOM = 1.16  # of the axes above the last block


def draw(path: Path, comparison: Comparison) -> None:
    """Write the PNG: what each server held, what of it was filled, and how many sequences ran.

    Raises
    ------
    NotRun
        If matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NotRun(f"needs matplotlib: {install_command('demo')}") from None

    slots, blocks = comparison.slots, comparison.blocks
    figure = Figure(figsize=(9, 7.6), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
    figure.subplots_adjust(left=0.085, right=0.975, top=0.86, bottom=0.075, hspace=0.3)
    title = f"The same {comparison.num_requests} requests in the same memory"
    figure.text(0.085, 0.955, title, size=15, weight="bold", color=INK)
    subtitle = (
        f"{comparison.num_blocks} blocks of {comparison.block_size} tokens."
        " Light: held by sequences, usable by nobody else. Dark: filled with tokens."
    )
    figure.text(0.085, 0.918, subtitle, size=9.5, color=MUTED)

    static_name = f"Static reservation of {comparison.max_len} tokens per sequence"
    _draw_occupancy(top, slots, comparison, SLOTS, SLOTS_LIGHT, static_name)
    _draw_occupancy(middle, blocks, comparison, BLOCKS, BLOCKS_LIGHT, "kvpool")
    for timeline, color, name in ((slots, SLOTS, "static reservation"), (blocks, BLOCKS, "kvpool")):
        steps = range(timeline.steps)
        bottom.step(steps, timeline.running, where="post", color=color, linewidth=1.6, label=name)
    bottom.set_title("Sequences running at the same time", loc="left", size=10.5, color=INK)
    bottom.set_ylabel("sequences", color=MUTED)
    bottom.set_xlabel("engine steps (each running sequence gains one token per step)", color=MUTED)
    bottom.set_ylim(0, max(blocks.running + slots.running) * 1.12)
    bottom.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=INK)
    for axes in (top, middle, bottom):
        axes.set_xlim(0, comparison.steps * 1.02)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
    figure.savefig(path, format="png")


def _draw_occupancy(axes: Any, timeline: Timeline, comparison: Comparison, dark: str, light: str, name: str) -> None:
    limit, end = comparison.num_blocks, timeline.steps
    steps = np.arange(end + 1)
    for values, color in ((timeline.blocks, light), (timeline.filled, dark)):
        axes.fill_between(steps, np.append(values, 0), step="post", color=color, linewidth=0)
    axes.axhline(limit, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
    axes.text(0, limit * 1.03, f" all {limit} blocks", size=8, color=MUTED)
    axes.axvline(end, ymax=1 / HEADROOM, color=dark, linewidth=1.2)
    is_early = end < 0.8 * comparison.steps
    axes.annotate(
        f"all served at step {end}",
        (end, limit * 0.9),
        xytext=(6 if is_early else -6, 0),
        textcoords="offset points",
        ha="left" if is_early else "right",
        va="center",
        size=9,
        color=dark,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
    )
    axes.set_ylim(0, limit * HEADROOM)
    axes.set_ylabel("blocks", color=MUTED)
    title = f"{name}: {timeline.wasted:.0%} of the held space is empty"
    axes.set_title(title, loc="left", size=10.5, color=INK)


def sketch(comparison: Comparison, *, width: int = 64, height: int = 5) -> str:
    """Return both occupancy charts as text, `width` columns by `height` lines each, on one time scale."""
    edges = np.linspace(0, comparison.steps, width + 1).astype(int).tolist()
    spans = [slice(a, max(b, a + 1)) for a, b in pairwise(edges)]
    lines = []
    for name, timeline in (("Static reservation", comparison.slots), ("kvpool", comparison.blocks)):
        held, filled = np.zeros((2, comparison.steps))
        held[: timeline.steps], filled[: timeline.steps] = timeline.blocks, timeline.filled
        columns = [(held[span].mean(), filled[span].mean()) for span in spans]
        lines.append(f"{name}: {timeline.wasted:.0%} of the held space is empty")
        for level in range(height, 0, -1):
            threshold = (level - 0.5) / height * comparison.num_blocks
            row = ("█" if f >= threshold else "░" if h >= threshold else " " for h, f in columns)
            label = f"{comparison.num_blocks} blocks" if level == height else ""
            lines.append(f"{label:>11} │" + "".join(row).rstrip())
        lines.append(" " * 12 + "└" + "─" * width)
    lines.append(f"{'step 0':>19}{f'step {comparison.steps}':>{width - 6}}")
    lines.append(" " * 13 + "█ filled with tokens   ░ held, but empty")
    return "\n".join(lines)
