"""Layer groups under random calls: `check` holds after each, refusals change nothing, what is readable is there."""

import contextlib
import os
import random

import pytest

from kvpool import Group, KVPoolError, Plan, Pool

if os.environ.get("KVPOOL_CORE") == "model":
    pytest.skip("about the compiled core", allow_module_level=True)

CALLS = (*["open"] * 2, *["step"] * 4, *["done"] * 3, *("reserve", "rollback", "fork", "truncate", "close"))


def random_groups(draw, block_size):
    """Return one to six groups over up to four arenas."""
    groups, arenas = [Group.full(columns=draw.randint(1, 2))], 1
    for _ in range(draw.randint(0, 5)):
        if draw.random() < 0.2:
            groups.append(Group.state(draw.randint(3, 12)))
            continue
        arena = draw.randint(0, arenas)
        options = {
            "block_size": block_size * draw.choice([1, 2, 4]),
            "columns": draw.randint(1, 3),
            "arena": arena,
            "num_blocks": draw.randint(20, 60) if arena == arenas else None,
        }
        arenas = max(arenas, arena + 1)
        size = draw.randint(3, 20)
        keep = draw.choice([0, draw.randint(0, size - 1)])
        groups.append(draw.choice([
            Group.full(**options), Group.chunk(size, **options), Group.window(size, keep=keep, **options)
        ]))  # fmt: skip
    return groups


def first_read(group, length):
    if group.kind == "window":
        return length - group.size + 1
    return length // group.size * group.size if group.kind == "chunk" else 0


def judge(pool, handle):
    """Every entry that a query at the end of the sequence reads is there."""
    length, low = pool.num_tokens(handle), pool.options.reserved_blocks
    for number, group in enumerate(pool.options.groups):
        table = pool.table(handle, number)
        if group.kind == "state":
            assert len(table) == (length > 0)
            continue
        size = group.block_size or pool.block_size
        assert len(table) == -(-pool.capacity(handle) // size)
        for index, ids in enumerate(table):
            if (index + 1) * size > first_read(group, length) or index * size < group.keep:
                assert (ids >= max(low, 0)).all(), (group, length, index, table)


class Run:
    """A random program on a pool with random groups."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        size = draw.randint(1, 4)
        self.pool = Pool(
            draw.randint(30, 120), size, max_seqs=6, max_blocks_per_seq=draw.randint(8, 30),
            in_order=draw.random() < 0.3, reserved_blocks=draw.randint(0, 2), lookahead=draw.randint(0, 2),
            groups=random_groups(draw, size),
        )  # fmt: skip
        self.plans = [Plan(self.pool, 6, 100) for _ in range(3)]
        self.handles, self.steps = [], []

    def call(self, name):
        draw, pool = self.draw, self.pool
        if name == "open":
            self.handles.append(pool.open(draw.choice([0, draw.randint(0, 30)])))
        elif name in ("step", "reserve"):
            plan = next((plan for plan in self.plans if not plan.is_pending), None)
            rows = draw.sample(self.handles, draw.randint(0, len(self.handles)))
            if plan is not None:
                getattr(pool, name)(plan, rows, [draw.choice([0, 1, 1, draw.randint(0, 20)]) for _ in rows])
                self.steps += [plan] if plan.is_pending else []
        elif name in ("done", "rollback") and self.steps:
            getattr(pool, name)(self.steps[-1] if name == "rollback" else draw.choice(self.steps))
            self.steps = [plan for plan in self.steps if plan.is_pending]
        elif name == "fork" and self.handles:
            self.handles += map(int, pool.fork(draw.choice(self.handles), draw.randint(0, 2)))
        elif name == "truncate" and self.handles:
            handle = draw.choice(self.handles)
            length = pool.num_tokens(handle)
            pool.truncate(handle, draw.randint(max(length - draw.choice([2, 20]), 0), length))
        elif name == "close" and len(self.handles) > 2:
            pool.close(self.handles.pop(draw.randrange(len(self.handles))))


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed):
    run = Run(seed)
    for _ in range(150):
        before = run.pool.fingerprint(), run.pool.digest()
        try:
            run.call(run.draw.choice(CALLS))
        except (KVPoolError, ValueError):
            assert (run.pool.fingerprint(), run.pool.digest()) == before
        run.pool.check()
        for handle in run.handles:
            judge(run.pool, handle)
    run.pool.close(run.handles)
    for plan in run.steps:
        with contextlib.suppress(KVPoolError):  # its done was noted before
            run.pool.done(plan)
    arenas = len({group.arena for group in run.pool.options.groups if group.kind != "state"})
    states = sum(group.kind == "state" for group in run.pool.options.groups)
    for arena in range(arenas + states):
        stats = run.pool.stats(arena)
        assert (stats.used, stats.limbo, stats.free) == (0, 0, stats.num_blocks - stats.reserved)
