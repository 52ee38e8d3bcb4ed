"""A replay as a PNG; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.picture import BLOCKS, BLOCKS_LIGHT, DASHED, INK, MUTED, OTHER, Picture, legend, name
from benchmarks.replay.results import Result

NUM_SAMPLES = 1200  # points of time drawn
NUM_SPANS = 60  # of time, each with its own hit rate


def draw(path: Path, trace_name: str, result: Result) -> None:
    """Write the picture of one replay: blocks in use over its steps, and the hit rate."""
    steps, used, sequences, hits, looked_up = np.array([(0, 0, 0, 0, 0), *result.occupancy.timeline]).T
    end = int(steps[-1])  # 0 when every request was rejected
    marks = np.linspace(0, end, min(NUM_SAMPLES, end) + 1)
    at = np.minimum(np.searchsorted(steps, marks), len(steps) - 1)
    static = sequences * -(-result.occupancy.reserved_tokens // result.block_size)
    drawn = Picture(
        (9, 6.2),
        f"{trace_name}: {result.num_blocks:,} blocks of {result.block_size} tokens",
        grid={"nrows": 2, "sharex": True, "height_ratios": (3, 2)},
        room={"left": 0.09, "right": 0.97, "top": 0.87, "bottom": 0.09, "hspace": 0.26},
    )
    top, bottom = drawn.panels[:, 0]

    top.fill_between(marks, used[at], step="pre", color=BLOCKS_LIGHT, linewidth=0)
    top.step(marks, used[at], where="pre", color=BLOCKS, linewidth=1.2, label="kvpool")
    label = f"a static reservation of {result.occupancy.reserved_tokens:,} tokens for each of the same sequences"
    top.step(marks, static[at], where="pre", color=OTHER, linewidth=1.0, label=label)
    ceiling = 1.18 * max(int(used.max()), int(static[at].max()), 1)
    if result.num_blocks <= ceiling:
        top.axhline(result.num_blocks, color=INK, linewidth=0.9, linestyle=DASHED, label="all blocks")
    top.set_ylim(0, ceiling)
    _name(top, "Blocks in use", "blocks")
    legend(top, ncols=3)

    edges, rates = _hit_rates(steps, hits, looked_up)
    bottom.stairs(100 * rates, edges, color=BLOCKS, linewidth=1.4, baseline=None)
    bottom.axhline(100 * result.hit_rate, color=MUTED, linewidth=0.9, linestyle=DASHED)
    bottom.set_ylim(0, 109)
    _name(bottom, f"Hit rate over time, {result.hit_rate:.1%} in all", "%")
    for axes in (top, bottom):
        axes.set_xlim(0, max(end, 1))
    bottom.xaxis.set_major_formatter("{x:,.0f}")
    bottom.set_xlabel("engine steps (each running sequence gains one token per step)", color=MUTED)
    drawn.save(path)


def _hit_rates(steps: Any, hits: Any, looked_up: Any) -> tuple[Any, Any]:
    """Return S + 1 times and the S hit rates between them; about as many tokens are looked up in each span."""
    last = np.searchsorted(looked_up, np.linspace(0, looked_up[-1], NUM_SPANS + 1)[1:])
    last = np.unique(np.minimum(last, len(steps) - 1))
    hit, asked = (np.diff(sums[last], prepend=0) for sums in (hits, looked_up))
    edges = np.concatenate(([0], steps[last]))
    edges[-1] = steps[-1]
    return edges, hit / np.maximum(asked, 1)


def _name(axes: Any, title: str, unit: str) -> None:
    name(axes, title, unit)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.get_major_locator().set_params(integer=True)
