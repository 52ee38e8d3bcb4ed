"""``kvpool demo --ranks``: a model's KV heads on several processes, tables on each, eight bytes a step between them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from kvpool.cli.console import NotRun
from kvpool.cli.demo.report import Claim, Outcome, Part, Settings
from kvpool.errors import install_command

TIMEOUT = 180.0  # seconds for one start of all ranks
DIVERGE = 9  # step in which the planted fault happens


def part(num_ranks: int) -> Part:
    """Return the part for so many ranks."""

    def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
        try:
            from kvpool.adapters.launch import launch
        except ImportError as exc:
            raise NotRun(f"needs mlx ({exc}): {install_command('mlx')}") from None
        command = ["-m", "kvpool.cli.demo.rank_worker"]
        shown = json.dumps({"seed": settings.seed, "block_size": settings.block_size})
        say(f"{num_ranks} ranks serve one model")
        served = launch([*command, shown], num_ranks, timeout=TIMEOUT)
        say(f"{num_ranks} ranks, one of which goes astray")
        astray = launch([*command, shown, "--diverge", str(DIVERGE)], num_ranks, timeout=TIMEOUT)
        if not served.held:
            raise RuntimeError(f"the ranks failed:\n{served.output}")
        seen = [json.loads(text) for text in re.findall(r"^rank \d+ saw (.*)$", served.output, re.MULTILINE)]
        stopped = sorted(
            re.findall(rf"^rank (\d+) stopped: \[agree\] pools differ in step {DIVERGE}:", astray.output, re.MULTILINE)
        )
        return outcome(num_ranks, seen, stopped)

    return Part(
        "ranks",
        f"{num_ranks} ranks of mx.distributed: KV heads are shared out, tables are computed by everybody",
        {
            "ranks_tokens_identical": "same tokens as one process",
            "ranks_agree": "equal pools and batches in every step",
            "ranks_share_heads": "each rank holds its share of the KV heads",
            "ranks_divergence_stops_all": "a pool that differs stops every rank",
        },
        run,
    )


def outcome(num_ranks: int, seen: list[dict[str, Any]], stopped: list[str]) -> Outcome:
    """Decide the claims from what each rank saw, and from who stopped when one went astray."""
    first, everybody = seen[0], [str(rank) for rank in range(num_ranks)]
    share = first["whole_kv_heads"] // num_ranks
    return Outcome(
        {
            "ranks_tokens_identical": Claim(
                all(rank["same"] == rank["of"] for rank in seen) and len(seen) == num_ranks,
                f"{first['same']} of {first['of']} requests",
            ),
            "ranks_agree": Claim(
                len({rank["digest"] for rank in seen}) == 1 and not any(rank["leaked"] for rank in seen),
                f"{first['steps']} steps, 8 bytes a rank and step; digest {first['digest']}",
            ),
            "ranks_share_heads": Claim(
                all(rank["kv_heads"] == share for rank in seen),
                f"{first['kv_heads']} of {first['whole_kv_heads']}, all layers together",
            ),
            "ranks_divergence_stops_all": Claim(
                stopped == everybody,
                f"ranks {', '.join(stopped) or 'none'} stopped in step {DIVERGE}, where it happened",
            ),
        },
        {"ranks": seen, "stopped": stopped},
    )
