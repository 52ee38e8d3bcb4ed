"""Random programs on the core's pools with layer groups, beside the plain Python model, until one call differs.

::

    python -m proof.plain --seconds 60
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

import kvpool
from kvpool.cli.console import CommandError
from kvpool.cli.fuzz import SECONDS, Progress, describe, facts_of, given, limits, seed_of
from proof.plain.programs import hunt_groups


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return 0 without a finding, 1 with one, 2 for a wrong option."""
    parser = argparse.ArgumentParser(prog="python -m proof.plain", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", help=f"how long to run (default {SECONDS:g})")
    parser.add_argument("--ops", help="number of calls, instead of --seconds")
    parser.add_argument("--seed", help="seed of the first run; with --ops 1 only that run (default: random)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    args = parser.parse_args(argv)
    try:
        seed = random.SystemRandom().getrandbits(31) if args.seed is None else seed_of(args.seed)
        limit: dict[str, Any] = limits(args, {"seconds": SECONDS, "calls": None})
    except CommandError as error:
        print(f"python -m proof.plain: {error}", file=sys.stderr)
        return 2
    told = None if args.json else Progress(limit)
    report = hunt_groups((kvpool.Pool, kvpool.Plan), seed, **limit, told=told)
    facts = {"kvpool": kvpool.__version__, "seed": seed}
    facts |= facts_of(report, f"python -m proof.plain --seed {report.seed} --ops 1{given({})}")
    print(json.dumps(facts, indent=2) if args.json else describe(facts))
    return 0 if facts["finding"] is None else 1


if __name__ == "__main__":
    sys.exit(main())
