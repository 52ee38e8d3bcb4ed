"""Pools with layer groups on tapes: random programs beside the plain model, and programs of what is refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import kvpool
from kvpool.groups import Group
from kvpool.testing.fuzz_groups import WRONG, GroupRun, compare_constructors, make_group, options_of
from kvpool.testing.fuzz_target import TargetFinding
from proof.mutation.scenarios import tried
from proof.mutation.tape import Difference, first_tag

RUNS = 90
CONSTRUCTORS = 150
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "slot_ids")
NAMES = ("block_tables", "slot_mapping", "kv_starts", "copies", "dirty_rows", "state_src", "state_dst")
POOLS: tuple[dict[str, Any], ...] = (
    {"groups": [Group.full(), Group.window(5, keep=2, columns=2), Group.state(6)], "lookahead": 2},
    {"groups": [Group.window(4), Group.chunk(6, arena=1, num_blocks=12), Group.state(6)]},
    {"groups": [Group.full(block_size=6), Group.window(7, block_size=12, arena=1, num_blocks=9)], "in_order": True},
    {"groups": [Group.full(columns=3), Group.state(4), Group.state(5)], "reserved_blocks": 0},
)


@dataclass(slots=True)
class GroupTape:
    """A program that is made anew each time it is played; one that is `judged` leaves the pool's counters alone."""

    name: str
    program: Callable[[], Any]
    judged: bool

    def play(self, *, learn: bool = False, blind: bool = False) -> Iterator[Difference]:
        """Make the calls; there is nothing to `learn`, and `blind` compares nothing."""
        first_tag()
        try:
            self.program()
        except (TargetFinding, AssertionError) as finding:
            if not blind:
                yield Difference(self.judged, None, finding)


def group_tapes(seed: int) -> Iterator[GroupTape]:
    """Random programs, judged without the pool's counters and seen with them; then random constructors."""
    for number in range(RUNS):
        name, judged = f"groups {number}, seed {seed}", number % 3 > 0
        run = GroupRun(options_of(1000 * seed + number), number, (kvpool.Pool, kvpool.Plan), counters=not judged)
        yield GroupTape(name, lambda run=run: run.play(run.words()), judged)
    make = kvpool.Pool
    yield GroupTape("constructors", lambda: compare_constructors(make, seed, CONSTRUCTORS), True)


class Shown:
    """Everything that a plan says of its groups."""

    def arrays(self, plan: Any) -> tuple:
        """The arrays of each group; None where it has none."""
        return tuple(tuple(getattr(group, name, None) for name in NAMES) for group in plan.groups)


def refused_with_groups(Pool: Any, Plan: Any) -> None:
    """Pools and plans that cannot be, with the texts."""
    rng = random.Random("refused with groups")
    for _ in range(150):
        groups = [group for _ in range(rng.choice([1, 2, 3])) if (group := tried(make_group, rng)) is not None]
        pool = tried(Pool, 16, 2, groups=groups, max_seqs=4)
        if pool is not None:
            pool.shutdown()
    for wrong in WRONG:
        options = {"num_blocks": 16, "block_size": 2, "max_seqs": 4, "groups": [Group.full(), Group.window(4)]} | wrong
        pool = tried(Pool, **options)
        if pool is not None:
            pool.shutdown()
    pool = Pool(16, 2, groups=[Group.full(), Group.window(4), Group.state(3)], max_seqs=4)
    for options in (
        *({"formats": (name,)} for name in ("csr", "kv_slots", "page_batch_info", "block_tables", "table_updates")),
        *({"kv_width": 8}, {"table_width": 0}, {"table_width": 99}, {"dtype": "int64"}),
        *({"pad": {name: 7}} for name in ("block_tables", "slot_mapping", "positions", "seq_lens")),
    ):
        plan = tried(Plan, pool, 2, 8, **options)
        if plan is not None:
            for name in ("block_tables", "slot_mapping", "copies", "dirty_rows", "positions", "seq_lens", "slot_ids"):
                with contextlib.suppress(AttributeError, ValueError):
                    getattr(plan, name)
    pool.shutdown()


def life_with_groups(Pool: Any, Plan: Any, Shown: Any) -> None:
    """Rows that grow far beyond their windows, fork, go back and end, in four pools; every array is looked at."""
    shown = Shown()
    for options in POOLS:
        pool = Pool(40, 3, max_seqs=5, **options)
        plans = [Plan(pool, 4, 40, formats=FORMATS), Plan(pool, 2, 12, formats=("block_tables", "slot_mapping"))]
        a, b = pool.open(), pool.open()
        rng = random.Random("life with groups")
        handles = [a, b]
        for turn in range(60):
            plan = plans[turn % 2]
            rows = handles[: 1 + turn % 2]
            new = [rng.choice([0, 1, 1, 2, 5]) for _ in rows]
            tried(pool.can, rows, new)
            if tried(pool.reserve if turn % 7 == 3 else pool.step, plan, rows, new if turn % 7 != 3 else 2) is None:
                shown.arrays(plan)
                _ = plan.served, plan.seq_lens if turn % 2 == 0 else None
                if plan.is_pending:
                    (pool.rollback if turn % 9 == 4 else pool.done)(plan)
            seen(pool, handles, len(options["groups"]))
            if turn % 10 == 5:
                child = tried(pool.fork, handles[0])
                if child is not None:
                    tried(pool.close, handles[1])
                    handles[1] = int(child[0])
            for back in (0, 1, 2, 3, 9) if turn % 6 == 1 else ():
                tried(pool.truncate, [handles[0]], [max(0, pool.num_tokens(handles[0]) - back)])
            for name in ("unshare", "compact", "evict_blocks") if turn == 30 else ():
                tried(getattr(pool, name), handles[0], [0])
        for handle in handles:
            tried(pool.close, handle)
        seen(pool, [], len(options["groups"]))
        pool.shutdown()


def seen(pool: Any, handles: list[int], num_groups: int) -> None:
    """Read everything, and a little more than there is."""
    for arena in range(-1, num_groups + 1):
        tried(pool.stats, arena)
    for handle in handles:
        for group in range(-1, num_groups + 1):
            tried(pool.table, handle, group)
    pool.check()
