"""The picture of part (d), as a PNG and as text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from kvpool.cli.demo.report import NotRun
from kvpool.cli.demo.serving import Timeline

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
SLOTS, SLOTS_LIGHT = "#c2571a", "#f6d5bd"
BLOCKS, BLOCKS_LIGHT = "#12718a", "#bfe0e6"


def draw(path: Path, slots: Timeline, blocks: Timeline, pool_blocks: int, block_size: int) -> None:
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
        raise NotRun("needs matplotlib: pip install 'kvpool[demo]'") from None

    figure = Figure(figsize=(9, 7.6), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
    figure.subplots_adjust(left=0.085, right=0.975, top=0.86, bottom=0.075, hspace=0.3)
    figure.text(0.085, 0.955, "The same requests in the same memory", size=15, weight="bold", color=INK)
    figure.text(
        0.085,
        0.918,
        f"{pool_blocks} blocks of {block_size} tokens. Light: held by sequences and usable by nobody else."
        " Dark: really filled with tokens.",
        size=9.5,
        color=MUTED,
    )
    _area(top, slots, SLOTS, SLOTS_LIGHT, "Static reservation", pool_blocks)
    _area(middle, blocks, BLOCKS, BLOCKS_LIGHT, "kvpool", pool_blocks)
    for timeline, color, name in ((slots, SLOTS, "static reservation"), (blocks, BLOCKS, "kvpool")):
        bottom.step(
            range(timeline.steps), timeline.running, where="post", color=color, linewidth=1.6, label=name
        )
    bottom.set_title("Sequences running at the same time", loc="left", size=10.5, color=INK)
    bottom.set_ylabel("sequences", color=MUTED)
    bottom.set_xlabel("engine steps (each running sequence gains one token per step)", color=MUTED)
    bottom.set_ylim(0, max(blocks.running + slots.running) * 1.12)
    bottom.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=INK)
    for axes in (top, middle, bottom):
        axes.set_xlim(0, max(slots.steps, blocks.steps) * 1.02)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
    figure.savefig(path, format="png")


def _area(axes, timeline: Timeline, dark: str, light: str, name: str, pool_blocks: int) -> None:
    steps = np.arange(timeline.steps + 1)
    held, filled = (np.append(values, 0) for values in (timeline.blocks, timeline.filled))
    axes.fill_between(steps, held, step="post", color=light, linewidth=0)
    axes.fill_between(steps, filled, step="post", color=dark, linewidth=0)
    axes.axhline(pool_blocks, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
    axes.text(0, pool_blocks * 1.03, f" all {pool_blocks} blocks", size=8, color=MUTED)
    axes.axvline(timeline.steps, ymax=1 / 1.16, color=dark, linewidth=1.2)
    axes.annotate(
        f"all served\nat step {timeline.steps}",
        (timeline.steps, pool_blocks * 0.5),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        size=8.5,
        color=dark,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )
    axes.set_ylim(0, pool_blocks * 1.16)
    axes.set_ylabel("blocks", color=MUTED)
    axes.set_title(
        f"{name}: {timeline.wasted:.0%} of the held space is empty", loc="left", size=10.5, color=INK
    )


def sketch(slots: Timeline, blocks: Timeline, pool_blocks: int, *, width: int = 64, height: int = 5) -> str:
    """Return both occupancy charts as text, `width` columns by `height` lines each, on one time scale."""
    total = max(slots.steps, blocks.steps)
    edges = np.linspace(0, total, width + 1).astype(int).tolist()
    lines = []
    for name, timeline in (("Static reservation", slots), ("kvpool", blocks)):
        held, filled = np.zeros(total), np.zeros(total)
        held[: timeline.steps], filled[: timeline.steps] = timeline.blocks, timeline.filled
        spans = [slice(a, max(b, a + 1)) for a, b in pairwise(edges)]
        columns = [(held[span].mean(), filled[span].mean()) for span in spans]
        lines.append(
            f"{name}: {timeline.wasted:.0%} of the held space is empty, served at step {timeline.steps}"
        )
        for level in range(height, 0, -1):
            threshold = (level - 0.5) / height * pool_blocks
            row = ("█" if f >= threshold else "░" if h >= threshold else " " for h, f in columns)
            label = f"{pool_blocks} blocks" if level == height else ""
            lines.append(f"{label:>10} │" + "".join(row).rstrip())
        lines.append(" " * 11 + "└" + "─" * width)
    lines.append(f"{'step 0':>17}{f'step {total}':>{width - 5}}")
    lines.append(" " * 11 + " █ filled with tokens   ░ held, but empty")
    return "\n".join(lines)
