"""The part with a continuous-batching server without a model: on blocks and on fixed slots, what both held over time.

Time is counted in engine steps. In a step every admitted prompt is prefilled whole and every running sequence gains
one token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from benchmarks import picture
from benchmarks.demo.settings import AllSettings
from kvpool.cli.console import NotRun
from kvpool.cli.demo.report import Claim, Outcome, Part
from kvpool.errors import install_command

HEADROOM = 1.16  # of the axes above the last block


@dataclass(frozen=True)
class Request:
    """A prompt of `prompt` tokens that arrives at step `arrival` and is answered with `answer` tokens."""

    arrival: int
    prompt: int
    answer: int


@dataclass
class Timeline:
    """Blocks and tokens of a server at the end of each step.

    Attributes
    ----------
    blocks : list of int
        Blocks that no other request could use: taken from the pool, or reserved.
    filled : list of float
        Blocks' worth of tokens that they really held: tokens / block_size.
    running : list of int
        Sequences that ran in the step.
    preemptions : int
        Times a running sequence was thrown out and later computed again.
    leaked : int
        Blocks still taken when all requests were finished.
    """

    blocks: list[int] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    preemptions: int = 0
    leaked: int = 0

    def record(self, blocks: int, filled: float, running: int) -> None:
        self.blocks.append(blocks)
        self.filled.append(filled)
        self.running.append(running)

    @property
    def steps(self) -> int:
        """Steps until the last request was finished."""
        return len(self.blocks)

    @property
    def wasted(self) -> float:
        """Share of the held space, summed over all steps, that held no token."""
        return 1.0 - sum(self.filled) / max(1, sum(self.blocks))

    @property
    def numbers(self) -> dict[str, Any]:
        """Its figures, for the JSON object."""
        return {
            **{"steps": self.steps, "peak_blocks": max(self.blocks), "peak_running": max(self.running)},
            **{"wasted": round(self.wasted, 4), "preemptions": self.preemptions},
        }


def make_requests(count: int, max_len: int, seed: int) -> list[Request]:
    """Return requests with exponential gaps and log-normal lengths, most far shorter than `max_len`."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(2.0, count)).astype(int)
    prompts = np.clip(rng.lognormal(4.4, 0.9, count), 4, max_len // 2).astype(int)
    answers = np.clip(rng.lognormal(4.6, 0.5, count), 8, max_len // 2).astype(int)
    return [Request(int(a), int(p), int(n)) for a, p, n in zip(arrivals, prompts, answers, strict=True)]


def serve_from_slots(requests: list[Request], num_blocks: int, block_size: int, max_len: int) -> Timeline:
    """Serve with static reservation: a running sequence owns `max_len` tokens from first step to last."""
    blocks_per_slot = -(-max_len // block_size)
    num_slots = num_blocks // blocks_per_slot
    timeline, waiting = Timeline(), deque(requests)
    running: list[list[int]] = []  # [length now, length when finished]
    while waiting or running:
        while waiting and waiting[0].arrival <= timeline.steps and len(running) < num_slots:
            request = waiting.popleft()
            running.append([request.prompt, request.prompt + request.answer])
        for sequence in running:
            sequence[0] += 1
        filled = sum(length for length, _ in running) / block_size
        timeline.record(len(running) * blocks_per_slot, filled, len(running))
        running = [sequence for sequence in running if sequence[0] < sequence[1]]
    return timeline


def serve_from_blocks(requests: list[Request], num_blocks: int, block_size: int) -> Timeline:
    """Serve by `kvpool.Scheduler` from a pool: a sequence takes a block when it needs one.

    When a step does not fit, the newest sequence is thrown out, and its request waits to be computed again. The pool's
    padding block comes on top of `num_blocks`.
    """
    timeline, waiting, left, tokens = Timeline(), deque(requests), len(requests), num_blocks * block_size
    with kvpool.Pool(num_blocks + 1, block_size, max_seqs=left, watermark=num_blocks // 50) as pool:
        scheduler = kvpool.Scheduler(pool, max_running=left, max_step_tokens=tokens, prefill_chunk=tokens)
        while left:
            while waiting and waiting[0].arrival <= timeline.steps:
                request = waiting.popleft()
                scheduler.add(kvpool.Request(np.zeros(request.prompt, np.int32), request.answer))
            step = scheduler.schedule()
            stats = pool.stats()
            timeline.record(stats.used, stats.tokens / block_size, len(step.handles) if step else 0)
            if step:
                left -= len(scheduler.update(step, np.zeros(len(step.sample_at), np.int32)))
        pool.check()
        timeline.preemptions, timeline.leaked = scheduler.stats().preemptions, pool.stats().used
    return timeline


def draw(path: Path, settings: AllSettings, slots: Timeline, blocks: Timeline) -> None:
    """Write the PNG: what each server held, what of it was filled, and how many sequences ran.

    Raises
    ------
    NotRun
        If matplotlib is missing.
    """
    limit, steps = settings.pool_blocks, max(slots.steps, blocks.steps)
    subtitle = (
        f"{limit} blocks of {settings.block_size} tokens."
        " Light: held by sequences, usable by nobody else. Dark: filled with tokens."
    )
    try:
        drawn = picture.Picture(
            (9, 7.6),
            f"The same {settings.requests} requests in the same memory",
            subtitle,
            grid={"nrows": 3, "sharex": True, "height_ratios": (3, 3, 2)},
            room={"left": 0.085, "right": 0.975, "top": 0.86, "bottom": 0.075, "hspace": 0.3},
        )
    except ImportError:
        raise NotRun(f"needs matplotlib: {install_command('demo')}") from None
    top, middle, bottom = drawn.panels[:, 0]
    static = f"Static reservation of {settings.max_len} tokens per sequence"
    for axes, timeline, dark, light, title, label in (
        (top, slots, picture.OTHER, picture.OTHER_LIGHT, static, "static reservation"),
        (middle, blocks, picture.BLOCKS, picture.BLOCKS_LIGHT, "kvpool", "kvpool"),
    ):
        end = timeline.steps
        for values, color in ((timeline.blocks, light), (timeline.filled, dark)):
            axes.fill_between(range(end + 1), np.append(values, 0), step="post", color=color, linewidth=0)
        axes.axhline(limit, color=picture.INK, linewidth=0.9, linestyle=picture.DASHED)
        axes.text(0, limit * 1.03, f" all {limit} blocks", size=8, color=picture.MUTED)
        axes.axvline(end, ymax=1 / HEADROOM, color=dark, linewidth=1.2)
        side = "left" if end < 0.8 * steps else "right"
        axes.text(end, limit * 0.9, f" all served at step {end} ", ha=side, va="center", size=9, color=dark)
        axes.set_ylim(0, limit * HEADROOM)
        picture.name(axes, f"{title}: {timeline.wasted:.0%} of the held space is empty", "blocks")
        bottom.step(range(end), timeline.running, where="post", color=dark, linewidth=1.6, label=label)
    below = "engine steps (each running sequence gains one token per step)"
    picture.name(bottom, "Sequences running at the same time", "sequences", below)
    bottom.set_xlim(0, steps * 1.02)
    picture.legend(bottom)
    drawn.save(path)


def run(settings: AllSettings, say: Callable[[str], None]) -> Outcome:
    """Serve the same requests from both and draw what they held."""
    say("continuous batching from blocks and from fixed slots")
    requests = make_requests(settings.requests, settings.max_len, settings.seed)
    slots = serve_from_slots(requests, settings.pool_blocks, settings.block_size, settings.max_len)
    blocks = serve_from_blocks(requests, settings.pool_blocks, settings.block_size)
    say("the picture")
    draw(settings.out, settings, slots, blocks)
    claims = {
        "picture_written": Claim(settings.out.stat().st_size > 0, str(settings.out)),
        "more_sequences_fit": Claim(
            max(blocks.running) > max(slots.running),
            f"{max(blocks.running)}; static {max(slots.running)} in the same {settings.pool_blocks} blocks",
        ),
        "served_in_fewer_steps": Claim(
            blocks.steps < slots.steps, f"{blocks.steps}, {blocks.preemptions} preemptions; static {slots.steps}"
        ),
        "less_space_wasted": Claim(blocks.wasted < slots.wasted, f"{blocks.wasted:.0%}; static {slots.wasted:.0%}"),
        "serving_leaks_nothing": Claim(blocks.leaked == 0, f"{blocks.leaked} leaked"),
    }
    numbers = {
        **{"picture": str(settings.out), "blocks": settings.pool_blocks, "block_size": settings.block_size},
        **{"max_len": settings.max_len, "requests": settings.requests},
        **{"kvpool": blocks.numbers, "static": slots.numbers},
    }
    return Outcome(claims, numbers, (f"Picture: {settings.out}",))


PART = Part(
    "occupancy",
    "continuous batching: blocks as needed against static reservation",
    {
        "picture_written": "the picture is written",
        "more_sequences_fit": "more sequences at once",
        "served_in_fewer_steps": "all served in fewer steps",
        "less_space_wasted": "less of the held space is empty",
        "serving_leaks_nothing": "every block is back at the end",
    },
    run,
)
