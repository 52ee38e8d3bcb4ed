"""One run over time as a PNG: blocks, sequences, steps, and the phases behind them; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import picture
from benchmarks.picture import BLOCKS, BLOCKS_LIGHT, DASHED, INK, MUTED, OTHER
from benchmarks.serving.phases import Phases
from benchmarks.serving.record import Record
from benchmarks.serving.runs import Bench, Run

PHASES = {"ramp": "#fdf3e1", "steady": "#ffffff", "tail": "#eef0f3"}


def draw(path: Path, bench: Bench, run: Run) -> None:
    """Write the picture of one run of kvpool."""
    record, phases = run.record, run.phases
    steady = run.summary["steady_tokens_per_sec"]
    rate = f"{run.rate:,.0f} tokens/s" + (f", {steady:,.0f} in the steady state" if steady else "")
    drawn = picture.Picture(
        (10, 8.2),
        f"{bench.settings.model}: {bench.workload.name}, {record.num_tokens:,} tokens generated",
        f"kvpool's engine, at most {run.batch} sequences: {rate}",
        grid={"nrows": 3, "sharex": True, "height_ratios": (3, 2, 3)},
        room={"left": 0.085, "right": 0.975, "top": 0.86, "bottom": 0.075, "hspace": 0.32},
    )
    top, middle, bottom = drawn.panels[:, 0]
    edges = np.append(record.column("start"), record.column("end")[-1])
    _blocks(top, record, edges, bench.num_blocks, bench.slot_blocks)
    _sequences(middle, record, edges)
    _steps(bottom, record, phases)
    for axes in (top, middle, bottom):
        _shade(axes, phases, edges)
        axes.set_xlim(min(edges[0], record.arrivals[0]), edges[-1])
    _name_phases(top, phases, edges)
    bottom.set_xlabel("simulated seconds" if bench.settings.is_null else "seconds", color=picture.MUTED)
    drawn.save(path)


def _blocks(axes: Any, record: Record, edges: Any, num_blocks: int, slot_blocks: int) -> None:
    used, reserved = record.column("blocks_in_use"), record.column("running") * slot_blocks
    axes.stairs(used, edges, fill=True, color=BLOCKS_LIGHT)
    axes.stairs(used, edges, color=BLOCKS, linewidth=1.3, baseline=None, label="in use")
    label = f"a static reservation for the running ones, {slot_blocks} each"
    axes.stairs(reserved, edges, color=OTHER, linewidth=1.1, baseline=None, label=label)
    axes.axhline(num_blocks, color=INK, linewidth=0.9, linestyle=DASHED, label=f"the pool, {num_blocks:,}")
    axes.set_ylim(0, 1.3 * max(float(reserved.max()), num_blocks))
    _name(axes, "KV cache", "blocks")


def _sequences(axes: Any, record: Record, edges: Any) -> None:
    waiting = record.column("waiting")
    line: dict[str, Any] = {"baseline": None, "clip_on": False, "zorder": 3}  # a line at zero is drawn whole
    axes.stairs(record.column("running"), edges, color=BLOCKS, linewidth=1.4, label="running", **line)
    axes.stairs(waiting, edges, color=OTHER, linewidth=1.1, label="waiting", **line)
    axes.set_ylim(0, 1.3 * max(float(record.column("running").max()), float(waiting.max()), 1.0))
    _name(axes, "Sequences", "sequences")


def _steps(axes: Any, record: Record, phases: Phases) -> None:
    """Each step as a point at its end; those with a chunk of a prompt in a color of their own."""
    ends, ms = record.column("end"), 1e3 * record.seconds
    has_chunk = record.column("prefill_tokens") > 0
    for chosen, color, label in ((~has_chunk, BLOCKS, "decodes only"), (has_chunk, OTHER, "with a chunk")):
        axes.scatter(ends[chosen], ms[chosen], s=9, color=color, linewidths=0, alpha=0.75, label=label)
    steady = ms[phases.steady.first : phases.steady.last]
    ceiling = float(ms.max())
    if len(steady):
        label = f"steady median, {np.median(steady):.1f} ms"
        axes.axhline(np.median(steady), color=INK, linewidth=0.9, label=label)
    spike = 1e3 * phases.spike_threshold
    if spike < 1.6 * ceiling:
        label = f"{len(phases.spikes)} spikes, above {spike:.1f} ms"
        axes.axhline(spike, color=INK, linewidth=0.9, linestyle=DASHED, label=label)
        ceiling = max(ceiling, spike)
    axes.set_ylim(0, 1.35 * ceiling)
    _name(axes, "Time of each step", "ms")


def _shade(axes: Any, phases: Phases, edges: Any) -> None:
    for name, color in PHASES.items():
        phase = getattr(phases, name)
        if phase.ticks:
            axes.axvspan(edges[phase.first], edges[phase.last], color=color, zorder=0, linewidth=0)


def _name_phases(axes: Any, phases: Phases, edges: Any) -> None:
    """Write each phase above its stretch, where there is room for it."""
    for name, color in PHASES.items():
        phase = getattr(phases, name)
        width = (edges[phase.last] - edges[phase.first]) / (edges[-1] - edges[0]) if phase.ticks else 0
        if width > 0.04:
            middle = (edges[phase.first] + edges[phase.last]) / 2
            axes.annotate(
                name, (middle, 1.0), xycoords=("data", "axes fraction"), xytext=(0, -4), textcoords="offset points",
                ha="center", va="top", size=9, color=MUTED, style="italic",
                bbox={"facecolor": color, "linewidth": 0, "pad": 1.5},
            )  # fmt: skip


def _name(axes: Any, title: str, unit: str) -> None:
    picture.name(axes, title, unit)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    picture.legend(axes, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=4, borderaxespad=0)
