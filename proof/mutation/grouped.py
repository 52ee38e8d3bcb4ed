"""Pools with layer groups on tapes: random programs beside the plain model, and programs of what is refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import kvpool
from kvpool.groups import Group
from proof.mutation.scenarios import tried
from proof.mutation.tape import Difference, first_tag
from tests.verify.constructors import WRONG, compare_constructors, make_group

CONSTRUCTORS = 150
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "slot_ids", "table_updates")
NAMES = ("block_tables", "slot_mapping", "kv_starts", "copies", "dirty_rows", "state_src", "state_dst")
POOLS: tuple[dict[str, Any], ...] = (
    {"groups": [Group.full(), Group.window(5, keep=2, columns=2), Group.state(6)], "lookahead": 2},
    {"groups": [Group.window(4), Group.chunk(6, arena=1, num_blocks=12), Group.state(6)]},
    {"groups": [Group.full(block_size=6), Group.window(7, block_size=12, arena=1, num_blocks=9)], "in_order": True},
    {"groups": [Group.full(columns=3), Group.state(4), Group.state(5)], "reserved_blocks": 0},
    {"groups": [Group.full(), Group.window(6, keep=4, arena=1, num_blocks=9, columns=2)], "watermark": 2},
    {"groups": [Group.window(5), Group.chunk(4, block_size=12)], "lookahead": 3, "max_blocks_per_seq": 24},
    {"groups": [Group.full(block_size=6), Group.window(9, block_size=12)], "max_blocks_per_seq": 7},
)


class Traced(kvpool.Pool):
    """A pool that notes what it says of itself whenever it is checked."""

    trace: ClassVar[list[tuple[int, int, int]]] = []

    def __new__(cls, *args: Any, **options: Any) -> Traced:
        return super().__new__(cls, *args, **{"seed": 1} | options)

    def check(self) -> None:
        super().check()
        self.trace.append((self.digest(), self.fingerprint(), self.prefix.nbytes if self.prefix else 0))


@dataclass(slots=True)
class GroupTape:
    """A program that is made anew each time it is played; one that is `judged` leaves the pool's counters alone."""

    name: str
    program: Callable[[], Any]
    judged: bool
    trace: list[tuple[int, int, int]] = field(default_factory=list)

    def play(self, *, learn: bool = False, blind: bool = False) -> Iterator[Difference]:
        """Make the calls; `learn` keeps what the pool says of itself, `blind` compares nothing."""
        first_tag()
        Traced.trace.clear()
        try:
            self.program()
        except AssertionError as finding:
            if not blind:
                yield Difference(self.judged, None, finding)
        else:
            if learn:
                self.trace = list(Traced.trace)
            elif self.trace != Traced.trace and not blind:
                yield Difference(False, None, "the pool says something else of itself")


def group_tapes(seed: int) -> Iterator[GroupTape]:
    """Random constructors."""
    make = kvpool.Pool
    yield GroupTape("constructors", lambda: compare_constructors(make, seed, CONSTRUCTORS), True)


class ArenaPool(kvpool.Pool):
    """Arena 1 of a pool with two groups, as a pool: its blocks are what those of a pool of that size are."""

    def __new__(cls, num_blocks: int, block_size: int, **options: Any) -> ArenaPool:
        groups = [Group.full(), Group.full(arena=1, num_blocks=num_blocks)]
        return super().__new__(cls, num_blocks, block_size, **{"seed": 1, "groups": groups} | options)

    @property
    def blocks(self) -> kvpool.BlockAPI:
        return super().blocks.arena(1)

    def stats(self) -> Any:
        return super().stats(1)

    def step(self, plan: ArenaPlan, *args: Any) -> None:
        super().step(plan.plan, *args)

    def done(self, plan: ArenaPlan) -> None:
        super().done(plan.plan)

    def rollback(self, plan: ArenaPlan) -> None:
        super().rollback(plan.plan)


class ArenaPlan:
    """What a plan has for the second of two groups, as a plan of a pool without groups has it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.plan = kvpool.Plan(*args, **options)

    def __getattr__(self, name: str) -> Any:
        """One column is no axis."""
        if name == "block_tables":
            return self.plan.groups[1].block_tables[:, :, 0]
        of_group = name in ("slot_mapping", "copies", "dirty_rows")
        return getattr(self.plan.groups[1] if of_group else self.plan, name)


class Shown:
    """Everything that a plan says of its groups."""

    def arrays(self, plan: Any) -> list:
        """Each array of each group: its numbers, whether they may be written, whether it is the same object again."""
        return [
            (array, array.flags.writeable, getattr(group, name) is array)
            for group in plan.groups
            for name in NAMES
            if (array := getattr(group, name, None)) is not None
        ]

    def updates(self, plan: Any) -> Any:
        """What the last step told of tables, None if there was none or the plan does not tell."""
        return getattr(plan, "table_updates", None) if len(plan.served) else None


class ShownOfModel(Shown):
    """The same of the model; only the core guards its arrays."""

    def arrays(self, plan: Any) -> list:
        return [
            (array, name not in ("copies", "dirty_rows"), True)
            for group in plan.groups
            for name in NAMES
            if (array := getattr(group, name, None)) is not None
        ]


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
        *({"backend": object()}, {"formats": "seq_lens"}, {"formats": ("seq_lens", "table_updates")}),
        *({"pad": {name: 7}} for name in ("block_tables", "slot_mapping", "positions", "seq_lens")),
    ):
        plan = tried(Plan, pool, 2, 8, **options)
        if plan is not None:
            for name in ("block_tables", "slot_mapping", "copies", "dirty_rows", "positions", "seq_lens", "slot_ids"):
                with contextlib.suppress(AttributeError, ValueError):
                    getattr(plan, name)
    pool.shutdown()
    for num_blocks, block_size in ((3, 2**30), (1, 2**31 - 1), (2, 2**30)):
        pool = Pool(num_blocks, block_size, reserved_blocks=0, groups=[Group.full(), Group.window(5)], max_seqs=2)
        for name in ("slot_mapping", "block_tables"):
            tried(Plan, pool, 1, 4, formats=(name,))
        pool.shutdown()
    pool = Pool(4, 1, groups=[Group.state(2)], max_seqs=2)  # with as many positions as there can be
    tried(pool.open, 2**31 - 1)
    tried(pool.open, 2**31)
    pool.shutdown()
    pool = Pool(16, 2, groups=[Group.full(columns=2)], max_seqs=4)
    tried(Plan, pool, 1, 4, table_width=2**30, formats="seq_lens")  # by one id too wide
    pool.shutdown()
    pool = Pool(16, 2, groups=[Group.full()], max_seqs=4)
    tried(Plan, pool, 1, 4, table_width=2**31 - 1, formats="seq_lens")
    pool.shutdown()


def life_with_groups(Pool: Any, Plan: Any, Shown: Any) -> None:
    """Rows that grow far beyond their windows, fork, go back, end and begin again; every array is looked at."""
    shown = Shown()
    for options in POOLS:
        pool = Pool(40, 3, max_seqs=5, **options)
        plans = [Plan(pool, 4, 40, formats=FORMATS), Plan(pool, 2, 12, formats=("block_tables", "slot_mapping"))]
        handles = [pool.open(), pool.open()]
        rng = random.Random("life with groups")
        for turn in range(60):
            grown(pool, plans[turn % 2], handles[: 1 + turn % 2], rng, turn)
            shown.arrays(plans[turn % 2])
            shown.updates(plans[turn % 2])
            if plans[turn % 2].is_pending:
                (pool.rollback if turn % 9 == 4 else pool.done)(plans[turn % 2])
            seen(pool, handles, len(options["groups"]))
            if turn % 10 == 5:
                child = tried(pool.fork, handles[0])
                if child is not None:
                    tried(pool.close, handles[1])
                    handles[1] = int(child[0])
            if turn % 20 == 12:
                tried(pool.close, handles[1])
                handles[1] = tried(pool.open, turn % 13) or pool.open()
            for back in range(10) if turn % 6 == 1 else ():
                tried(pool.truncate, [handles[0]], [max(0, pool.num_tokens(handles[0]) - back)])
        refused_calls(pool, plans[0], handles)
        for handle in handles[2:]:
            tried(pool.close, handle)
        up_to_the_limit(pool, Plan(pool, 2, 200), handles[0])
        refused_steps(pool, (plans[1], Plan(pool, 2, 400, table_width=3)), handles)
        for handle in handles:
            tried(pool.close, handle)
        seen(pool, [], len(options["groups"]))
        pool.shutdown()


def shared_tails(Pool: Any, Plan: Any, Shown: Any) -> None:
    """A row with room for more tokens is forked at each length: in some groups its tail is shared, in others not."""
    shown = Shown()
    for options in POOLS:
        for length in range(1, 15):
            pool = Pool(60, 3, max_seqs=4, **options)
            plans = [Plan(pool, 4, 40, formats=FORMATS) for _ in range(3)]
            row = pool.open()
            for call, new in ((pool.step, length), (pool.reserve, 5 + length % 3)):
                if tried(call, plans[0], [row], new) is None and plans[0].is_pending:
                    pool.done(plans[0])
            one, two, three = pool.fork(row, 3).tolist()
            rows = [row, one, two, three]
            for turn, batch in enumerate(([one], [two], [three, row], rows, rows[::-1], [row])):
                plan = plans[turn % 3]
                tried(pool.step, plan, batch, 1)
                shown.arrays(plan)
                shown.updates(plan)
                seen(pool, rows, len(options["groups"]))
                for pending in plans[:: -1 if length % 3 == 0 else 1] if turn % 3 == 2 else ():
                    if pending.is_pending:
                        (pool.rollback if length % 3 == 0 else pool.done)(pending)
                        pool.check()
            pool.shutdown()


def grown(pool: Any, plan: Any, rows: list[int], rng: random.Random, turn: int) -> None:
    """A step of some rows, or a reservation for them."""
    new = [rng.choice([0, 1, 1, 2, 5]) for _ in rows]
    tried(pool.can, rows, new)
    pad = {"pad_to": (len(rows), sum(new) + turn % 3)} if turn % 4 == 1 else {}
    if turn % 7 == 3:
        tried(pool.reserve, plan, rows, 2)
    else:
        tried(pool.step, plan, rows, new, **pad)
    _ = plan.served, plan.seq_lens if turn % 2 == 0 else None


def refused_calls(pool: Any, plan: Any, handles: list[int]) -> None:
    """What pools with groups refuse, and sequences up to their limit and one token beyond it."""
    tried(pool.unshare, plan, handles, 0)
    tried(pool.compact, handles, 0)
    tried(pool.evict_blocks, handles[0], [0])
    limit = pool.options.max_blocks_per_seq * pool.options.block_size
    for tokens in (limit - 1, limit, limit + 1, 1):
        opened = tried(pool.open, tokens)
        if opened is not None:
            tried(pool.close, opened)
    while (opened := tried(pool.open)) is not None:
        handles.append(opened)
    for new in (limit, limit + 1, 2**62, -1, 41):
        tried(pool.can, handles[0], new)
        tried(pool.step, plan, handles[:1], new)
        if plan.is_pending:
            pool.rollback(plan)


def refused_steps(pool: Any, plans: tuple[Any, ...], handles: list[int]) -> None:
    """Batches with something wrong in them, which the first row has not; some fit a plan and not another."""
    limit = pool.options.max_blocks_per_seq * pool.options.block_size
    a, b = handles[:2]
    for call in (partial(pool.step, plans[0]), partial(pool.reserve, plans[0]), pool.can):
        tried(call, [a, b], [1])
    most = 2**63 - 1
    for rows in ([b, b], [a, b, a], [a, -5], [a, 7], [a, b], [b]):
        for new in (1, 0, 2, [1, 3], [0, 13], [1, -1], 9, 21, limit, most, most - pool.num_tokens(b), [1, 2**31]):
            for plan in plans:
                tried(pool.step, plan, rows, new, partial=len(rows) == 1)
                tried(pool.step, plan, rows, new, pad_to=(2, 12))
                if plan.is_pending:
                    pool.rollback(plan)
            tried(pool.can, rows, new)
            tried(pool.reserve, plans[0], rows, new)
            if plans[0].is_pending:
                pool.done(plans[0])


def up_to_the_limit(pool: Any, plan: Any, row: int) -> None:
    """A sequence that gets all the tokens that it may have, then those that it may not have."""
    left = pool.options.max_blocks_per_seq * pool.options.block_size - pool.num_tokens(row)
    for new in (left - 2, 1, 1, 1, 1):
        tried(pool.step, plan, [row], max(0, new))
        if plan.is_pending:
            pool.done(plan)


def seen(pool: Any, handles: list[int], num_groups: int) -> None:
    """Read everything, and a little more than there is."""
    for arena in range(-1, num_groups + 1):
        tried(pool.stats, arena)
    for handle in handles:
        for group in range(-1, num_groups + 1):
            tried(pool.table, handle, group)
    pool.check()
