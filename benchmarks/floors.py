"""How far the core is from the C floor, and several layer groups from one: ``python -m benchmarks.floors``.

The rounds of both alternate in one process, and the least of each counts: on a machine that others share, this moves
less than the medians of runs that are minutes apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import kvpool
from benchmarks.baselines import Case, alternate
from benchmarks.bench_alloc import bench_bulk
from benchmarks.bench_fork import CHILDREN, bench_children
from benchmarks.bench_prefix import bench_full_hit, bench_hit_of_groups, bench_insert
from benchmarks.bench_step import CONTEXT, ROUNDS, WIDTH, bench_decode, bench_decode_fenced
from benchmarks.command import main
from benchmarks.gate import Gate

OPTIONS = {"rounds": (ROUNDS - 4, f"of each, at most {ROUNDS - 4}, and at least 3")}


def case_of(bench: Callable[..., None], *args: Any) -> Case:
    """Return what a benchmark would measure: a round, its items, and what is done before it."""
    found: list[Case] = []

    def note(
        run: Callable[[], Any], items: float, *, setup: Callable[[], Any] | None = None, **_others: object
    ) -> None:
        found.append((run, items, setup))

    bench(note, *args)
    return found[0]


def pairs() -> dict[str, tuple[float, Callable[[], list[Case]]]]:
    """Return by name: the limit of the ratio, and what makes the cases of the pool and of the floor."""
    rows: dict[str, tuple[float, Callable[[], list[Case]]]] = {}
    for size, limit in ((1024, 2.0), (256, 1.9)):
        rows[f"step and done, {size} rows"] = limit, lambda size=size: [
            case_of(bench_decode_fenced, size), case_of(bench_decode, size, "floor"),
        ]  # fmt: skip
    window = kvpool.Group.window(CONTEXT // 4, arena=1, num_blocks=256 * WIDTH)
    rows["step and done, 256 rows, full + window / full"] = 1.6, lambda: [
        case_of(bench_decode_fenced, 256, groups) for groups in ([kvpool.Group.full(), window], None)
    ]  # fmt: skip
    rows["step in order, 1024 rows"] = 1.5, lambda: [case_of(bench_decode, 1024, who) for who in ("kvpool", "floor")]
    rows["prefix hit, 100,000 blocks"] = (
        2.5,
        lambda: [case_of(bench_full_hit, who, 100_000) for who in ("kvpool", "floor")],
    )
    rows["prefix insert, 100,000 blocks"] = (
        10.0,
        lambda: [case_of(bench_insert, who, 100_000) for who in ("kvpool", "floor")],
    )
    for blocks in (10_000, 100_000):  # the floor is a pool of one group
        rows[f"prefix hit, 3 groups, {blocks:,} blocks"] = (
            1.5,
            lambda blocks=blocks: [case_of(bench_hit_of_groups, groups, blocks) for groups in ("three", "one")],
        )
    rows[f"fork, {CHILDREN} a call"] = (
        2.0,
        lambda: [case_of(bench_children, who, CHILDREN, "fork") for who in ("kvpool", "floor")],
    )
    rows["alloc+free, 1..64 a call"] = 3.0, lambda: [case_of(bench_bulk, who) for who in ("kvpool", "floor")]
    return rows


def gates(args: argparse.Namespace) -> Iterator[Gate]:
    """Yield the ratios."""
    for name, (limit, make) in pairs().items():
        ours, floor = alternate(make(), min(max(args.rounds, 3), ROUNDS - 4))
        yield Gate(name, round(ours / floor, 2), limit, True, f"{ours:,.1f} / {floor:,.1f} ns")


if __name__ == "__main__":
    sys.exit(main())
