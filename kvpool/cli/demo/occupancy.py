"""Part (d): blocks in use over time against static reservation, as a picture."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.cli.demo import picture
from kvpool.cli.demo.report import Claim, Outcome, Part
from kvpool.cli.demo.serving import Timeline, make_requests, serve_from_blocks, serve_from_slots
from kvpool.cli.demo.settings import Settings


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Serve the same requests from both and draw what they held; see `kvpool.cli.demo.serving`."""
    say("continuous batching from blocks and from fixed slots")
    requests = make_requests(settings.requests, settings.max_len, settings.seed)
    usable = settings.pool_blocks - 1  # block 0 is the pool's padding block
    slots = serve_from_slots(requests, usable, settings.block_size, settings.max_len)
    blocks = serve_from_blocks(requests, settings.pool_blocks, settings.block_size)
    say("the picture")
    picture.draw(settings.out, slots, blocks, usable, settings.block_size)
    claims = {
        "picture_written": Claim(settings.out.stat().st_size > 0, str(settings.out)),
        "more_sequences_fit": Claim(
            max(blocks.running) > max(slots.running),
            f"{max(blocks.running)} at once, {max(slots.running)} with static reservation"
            f" ({usable} blocks of {settings.block_size} tokens)",
        ),
        "served_in_fewer_steps": Claim(
            blocks.steps < slots.steps,
            f"{blocks.steps} steps, {slots.steps} with static reservation"
            f" ({len(requests)} requests, {blocks.preemptions} preemptions)",
        ),
        "less_space_wasted": Claim(
            blocks.wasted < slots.wasted,
            f"{blocks.wasted:.0%} empty, {slots.wasted:.0%} with static reservation",
        ),
        "serving_leaks_nothing": Claim(blocks.leaked == 0, f"{blocks.leaked} blocks still taken"),
    }
    numbers = {"picture": str(settings.out), "blocks": usable, "requests": len(requests)}
    numbers |= {name: _summary(t) for name, t in (("kvpool", blocks), ("static", slots))}
    return Outcome(claims, numbers, (picture.sketch(slots, blocks, usable), f"Picture: {settings.out}"))


def _summary(timeline: Timeline) -> dict[str, float]:
    return {
        "steps": timeline.steps,
        "peak_blocks": max(timeline.blocks),
        "peak_running": max(timeline.running),
        "wasted": round(timeline.wasted, 4),
        "preemptions": timeline.preemptions,
    }


PART = Part(
    "occupancy",
    "blocks in use over time, against static reservation",
    {
        "picture_written": "the picture is written",
        "more_sequences_fit": "more sequences run at once in the same memory",
        "served_in_fewer_steps": "the same requests are served in fewer steps",
        "less_space_wasted": "less of the held space is empty",
        "serving_leaks_nothing": "all blocks are back at the end",
    },
    run,
)
