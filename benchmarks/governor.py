"""What `kvpool.governor` decides on a simulated machine: an editor, a browser and a second model arrive and leave.

``python -m benchmarks.governor --plot docs/governor.png`` draws it. The machine knows nothing of the policy: it has
memory, others that take it, a process with weights and a pool in layers, and a buffer cache that keeps what was freed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import picture
from benchmarks.command import main
from kvpool.governor import KEEP, Decision, Governor, Holder, Machine

GIB = 2**30
OPTIONS = {"plot": ("", "PNG: write the picture there")}
Curve = Callable[[float], float]  # of seconds


class Moment(NamedTuple):
    """One second of the machine; sizes are bytes."""

    seconds: float
    others: int
    size: int
    live: int
    buffers: int
    room: int  # for pool and buffers, if others are to keep their reserve
    decision: Decision


@dataclass
class Computer:
    """A machine with one process that serves a model."""

    governor: Governor
    others: Curve  # bytes that other processes take
    load: Curve  # bytes that all requests need that are there, running or not
    total: int = 24 * GIB
    weights: int = 5 * GIB
    size: int = 8 * GIB
    layers: int = 32
    unit: int = 2 * 2**20
    least: int = GIB
    scratch: int = GIB // 4  # freed by each second of work, and kept by MLX up to eight times that
    live: int = 0
    cached: int = 0
    buffers: int = 0
    moments: list[Moment] = field(default_factory=list)

    def tick(self, now: float) -> Moment:
        """Let a second pass, then look, decide and act."""
        others, load = int(self.others(now)), int(self.load(now))
        ended = max(0, self.live - load)
        self.live = min(load, self.size)
        self.cached = min(self.cached + ended, self.size - self.live)
        if load:
            self.buffers = min(self.buffers + self.scratch, 8 * self.scratch)
        available = max(0, self.total - others - self.weights - self.size - self.buffers)
        machine = Machine(now, available, buffers=self.buffers, active=self.weights + self.size)
        pool = Holder("pool", self.size, self.live, self.cached, load - self.live, self.least, self.unit)
        decision = self.governor.decide(machine, [pool])
        self.resize(decision.size)
        if decision.frees_buffers:
            self.buffers = 0
        room = self.total - others - self.weights - self.governor.reserve
        self.moments.append(Moment(now, others, self.size, self.live, self.buffers, room, decision))
        return self.moments[-1]

    def resize(self, size: int) -> None:
        """Resize the pool. What layers had goes to the buffers."""
        if size != self.size:
            self.buffers += self.size
            self.size, self.live = size, min(self.live, size)
            self.cached = min(self.cached, size - self.live)

    def run(self, seconds: int) -> Computer:
        """Let so many seconds pass."""
        for now in range(seconds):
            self.tick(float(now))
        return self

    @property
    def resizes(self) -> list[Moment]:
        """When the pool was resized."""
        sizes = [moment.size for moment in self.moments]
        return [self.moments[i] for i in range(1, len(sizes)) if sizes[i] != sizes[i - 1]]

    def over(self) -> int:
        """Return by how many bytes pool and buffers exceeded the room, or the least that they need, at most."""
        least = max(self.least, self.governor.floor)
        return max(one.size + one.buffers - max(one.room, least) for one in self.moments)


def day(seed: int = 7) -> tuple[Curve, Curve]:
    """Return what others take and what requests need, in half an hour."""
    noise = random.Random(seed)
    wobble = [noise.gauss(0, 0.06) * GIB for _ in range(3600)]

    def others(now: float) -> float:
        editor = 1.5 * GIB if now >= 150 else 0
        browser = min(max(now - 420, 0) / 120, 1) * 4 * GIB
        model = 6.5 * GIB if 840 <= now < 1260 else 0
        return 4 * GIB + editor + browser + model + wobble[int(now)]

    def load(now: float) -> float:
        return (3.0 if now < 600 else 2.0 if now < 1300 else 7.0 if now < 1560 else 0.0) * GIB

    return others, load


def draw(path: Path, computer: Computer) -> None:
    """Write the picture."""
    shown: dict[str, Any] = {"left": 0.07, "right": 0.97, "bottom": 0.2, "top": 0.85}
    title = "What others need, the pool gives back, and takes again when requests wait"
    about = f"a simulated machine of {computer.total // GIB} GiB; {computer.governor.reserve / GIB:g} GiB stay free"
    figure = picture.Picture((9.6, 4.8), title, about, grid={"nrows": 1, "ncols": 1}, room=shown)
    axes = figure.panels[0, 0]
    minutes = [one.seconds / 60 for one in computer.moments]
    bottoms = [0.0] * len(minutes)
    for name, color, values in (
        ("others", picture.OTHER_LIGHT, [one.others for one in computer.moments]),
        ("weights", picture.GRID, [computer.weights] * len(minutes)),
        ("requests", picture.BLOCKS, [one.live for one in computer.moments]),
        ("cached and blank blocks", picture.BLOCKS_LIGHT, [one.size - one.live for one in computer.moments]),
        ("buffers of MLX", picture.OTHER, [one.buffers for one in computer.moments]),
    ):
        tops = [low + value / GIB for low, value in zip(bottoms, values, strict=True)]
        axes.fill_between(minutes, bottoms, tops, color=color, label=name, linewidth=0)
        bottoms = tops
    free = (computer.total - computer.governor.reserve) / GIB
    axes.axhline(free, color=picture.MUTED, linestyle=picture.DASHED, linewidth=1)
    last = ""
    for one in computer.resizes:
        if one.decision.reason != last:
            at, side = (one.seconds / 60, free + 0.4), "left" if one.seconds < 0.8 * len(minutes) else "center"
            axes.annotate(one.decision.reason, at, ha=side, fontsize=8, color=picture.INK)
        last = one.decision.reason
    axes.set_ylim(0, computer.total / GIB + 1.5)
    axes.set_xlim(0, minutes[-1])
    picture.name(axes, "", "GiB", "minutes")
    picture.legend(axes, loc="upper left", bbox_to_anchor=(0, -0.13), ncols=5)
    figure.save(path)


def run(args: argparse.Namespace) -> int:
    """Print each decision, and draw the picture if asked to."""
    others, load = day()
    governor = Governor(GIB, 10 * GIB, 2 * GIB, idle_release=120)
    computer = Computer(governor, others, load).run(1800)
    for one in computer.moments:
        if one.decision.reason != KEEP and one in computer.resizes:
            print(f"{one.seconds / 60:5.1f} min  {one.size / GIB:5.2f} GiB  {one.decision.reason}")
    if args.plot:
        picture.check("--plot", Path(args.plot))
        draw(Path(args.plot), computer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
