"""Part (d): blocks in use over time against static reservation, as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.cli.demo import picture
from kvpool.cli.demo.report import Claim, Outcome, Part
from kvpool.cli.demo.serving import Timeline, compare
from kvpool.cli.demo.settings import Settings


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Serve the same requests from both and draw what they held; see `kvpool.cli.demo.serving`."""
    say("continuous batching from blocks and from fixed slots")
    comparison = compare(settings.requests, settings.pool_blocks, settings.block_size, settings.max_len, settings.seed)
    slots, blocks = comparison.slots, comparison.blocks
    say("the picture")
    picture.draw(settings.out, comparison)
    claims = {
        "picture_written": Claim(settings.out.stat().st_size > 0, str(settings.out)),
        "more_sequences_fit": Claim(
            max(blocks.running) > max(slots.running),
            f"{max(blocks.running)}; static {max(slots.running)} in the same {settings.pool_blocks} blocks",
        ),
        "served_in_fewer_steps": Claim(
            blocks.steps < slots.steps,
            f"{blocks.steps}, {blocks.preemptions} preemptions; static {slots.steps}",
        ),
        "less_space_wasted": Claim(
            blocks.wasted < slots.wasted,
            f"{blocks.wasted:.0%}; static {slots.wasted:.0%}",
        ),
        "serving_leaks_nothing": Claim(blocks.leaked == 0, f"{blocks.leaked} leaked"),
    }
    numbers = {
        "picture": str(settings.out),
        "blocks": settings.pool_blocks,
        "block_size": settings.block_size,
        "max_len": settings.max_len,
        "requests": settings.requests,
        "kvpool": _summary(blocks),
        "static": _summary(slots),
    }
    return Outcome(claims, numbers, (picture.sketch(comparison), f"Picture: {settings.out}"))


def _summary(timeline: Timeline) -> dict[str, Any]:
    return {
        "steps": timeline.steps,
        "peak_blocks": max(timeline.blocks),
        "peak_running": max(timeline.running),
        "wasted": round(timeline.wasted, 4),
        "preemptions": timeline.preemptions,
    }


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
