"""`Needs.growth`: sequences for which so many blocks are free never find too few, whatever they share; and not more."""

import numpy as np
import pytest

from kvpool import Group, Plan, Pool
from kvpool.scheduler.needs import Needs

SEEDS = range(150)
PLENTY = 4000


def drawn_groups(rng):
    """Layer groups over one arena or two, and a lookahead that all windows allow."""
    groups, bounds = [], [64]
    for number in range(rng.integers(1, 4)):
        size = int(rng.integers(1, 40))
        where = {"columns": int(rng.integers(1, 4)), "block_size": 4 * int(rng.choice([1, 2]))}
        if number and rng.random() < 0.5:
            known = any(group.arena for group in groups)
            where |= {"arena": 1} if known else {"arena": 1, "num_blocks": PLENTY}
        kind = rng.integers(3)
        if kind == 0:
            groups.append(Group.full(**where))
            continue
        bounds.append(size)
        groups.append(Group.window(size, keep=size // 4, **where) if kind == 1 else Group.chunk(size, **where))
    if rng.random() < 0.5:
        groups.append(Group.state(200))
    return groups, int(rng.integers(0, min(5, min(bounds))))


class Engine:
    """Rows of a pool that grow in chunks, beside copies of them that are kept."""

    def __init__(self, rng):
        groups, lookahead = drawn_groups(rng)
        self.rng = rng
        self.chunk = int(rng.integers(1, 24))
        self.pool = Pool(PLENTY, 4, max_seqs=64, max_blocks_per_seq=200, groups=groups, lookahead=lookahead)
        self.plan = Plan(self.pool, 64, 64 * 24)
        self.needs = Needs(self.pool, self.chunk)
        self.has_states = any(group.kind == "state" for group in groups)
        self.lookahead = lookahead

    def step(self, handles, num_new):
        self.pool.step(self.plan, handles, num_new)
        self.pool.done(self.plan)

    def grow(self, handle, tokens):
        """Until a length, in chunks of any size."""
        while (left := tokens - self.pool.num_tokens(handle)) > 0:
            self.step([handle], [int(self.rng.integers(1, min(left, self.chunk) + 1))])

    def begin(self):
        """Rows of some length, some with a copy that is kept, some cut or gone on since."""
        rows = [int(self.pool.open(0)) for _ in range(self.rng.integers(1, 5))]
        for handle in rows:
            self.grow(handle, int(self.rng.integers(0, 90)))
        kept = [self.pool.fork(handle) for handle in rows if self.rng.random() < 0.5]
        for handle in rows:
            length = self.pool.num_tokens(handle)
            if self.rng.random() < 0.3 and not self.has_states:
                self.pool.truncate([handle], [max(0, length - self.lookahead)])
            elif self.rng.random() < 0.5:
                self.grow(handle, length + int(self.rng.integers(0, 30)))
        return rows, kept

    def leave_free(self, blocks):
        """Others take all blocks of each arena but so many."""
        for arena, most in enumerate(blocks):
            calls = self.pool.blocks.arena(arena)
            free = self.pool.stats(arena).free
            assert most <= free, f"arena {arena}: {most} of {free}"
            calls.alloc(free - most)

    def run(self, rows, limits):
        """Let all rows grow to their limits, a few at a time."""
        left = dict(zip(rows, limits, strict=True))
        while left:
            batch = [handle for handle in left if self.rng.random() < 0.7] or list(left)[:1]
            missing = [left[handle] - self.pool.num_tokens(handle) for handle in batch]
            self.step(batch, [min(more, int(self.rng.integers(1, self.chunk + 1))) for more in missing])
            for handle in batch:
                if self.pool.num_tokens(handle) == left[handle]:
                    del left[handle]


def served(seed):
    """A random engine finds all blocks that it was promised."""
    engine = Engine(np.random.default_rng(seed))
    rows, _ = engine.begin()
    rows += [int(engine.pool.open(0)) for _ in range(engine.rng.integers(0, 3))]
    lens = [engine.pool.num_tokens(handle) for handle in rows]
    limits = [length + int(engine.rng.integers(1, 150)) for length in lens]
    need = engine.needs.growth(lens, limits)
    engine.leave_free(need)
    engine.run(rows, limits)
    engine.pool.check()


@pytest.mark.parametrize("first", range(0, len(SEEDS), 50))
def test_rows_with_so_many_free_blocks_never_run_out(first):
    for seed in SEEDS[first : first + 50]:
        print(f"seed {seed}")
        served(seed)


def test_window_is_not_counted_as_if_it_kept_every_token():
    """The most that a row without shared blocks holds, over every way to cut its length into equal chunks."""
    groups = [Group.window(20, keep=5), Group.full(arena=1, num_blocks=PLENTY)]
    pool = Pool(PLENTY, 4, max_seqs=8, max_blocks_per_seq=200, groups=groups)
    plan = Plan(pool, 1, 7)
    seen = [0, 0]
    for first in range(1, 8):
        handle = int(pool.open(0))
        for new in [first] + [7] * 20:
            pool.step(plan, [handle], new)
            seen = [max(seen[arena], pool.stats(arena).used) for arena in (0, 1)]
            pool.done(plan)
        pool.close(handle)
    need = Needs(pool, 7).growth([0], [147])
    assert [need[0] - 1, need[1] - 1] == seen, "one more is for the copy of a tail"


@pytest.mark.parametrize("length", [1, 30, 100])
def test_row_that_holds_its_window_needs_only_what_is_missing(length):
    pool = Pool(PLENTY, 4, max_seqs=8, max_blocks_per_seq=400, groups=[Group.window(20)])
    plan, handle = Plan(pool, 1), int(pool.open(0))
    for _ in range(length):
        pool.step(plan, [handle], 1)
        pool.done(plan)
    held = pool.stats().used
    needs = Needs(pool, 1)
    assert needs.growth([length], [1500])[0] - 1 <= needs.growth([0], [1500])[0] - 1 - held + 1
