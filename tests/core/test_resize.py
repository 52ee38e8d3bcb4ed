"""`Pool.resize`: a pool goes on with another number of blocks, and every row reads what it wrote."""

import random

import numpy as np
import pytest

from kvpool import Group, Plan, Pool
from kvpool.errors import CapacityExceeded, OutOfBlocks, OutOfSequences, PlanStateError

BLOCK = 4
KINDS = {
    "one": None,
    "full": [Group.full()],
    "columns": [Group.full(), Group.full(columns=2)],
    "window": [Group.full(), Group.window(6)],
    "arenas": [Group.full(block_size=8), Group.window(5, arena=1, num_blocks=40)],
    "chunk": [Group.full(), Group.chunk(8)],
    "states": [Group.full(), Group.state(6, blocks=2)],
}


class Device:
    """A pool, and memory that steps write and moves change: each slot has the prefix whose KV it holds."""

    def __init__(self, kind, seed, follow_moves=True):
        self.rng, self.follow_moves = random.Random(seed), follow_moves
        self.pool = Pool(
            self.rng.randrange(30, 60), BLOCK, max_seqs=8, max_blocks_per_seq=24, prefix_cache=self.rng.random() < 0.8,
            groups=KINDS[kind], seed=1,
        )  # fmt: skip
        self.plan = Plan(self.pool, max_rows=8, max_tokens=64, table_width=24)
        self.tokens, self.committed, self.memory = {}, {}, {}  # memory: (arena, block, offset) -> content
        self.texts = [[self.rng.randrange(5) for _ in range(60)] for _ in range(2)]
        self.moves = self.refused = 0

    def groups(self):
        """The groups of blocks: number, group, tokens of a block."""
        groups = enumerate(self.pool.options.groups)
        return [(k, group, group.block_size or BLOCK) for k, group in groups if group.kind != "state"]

    def open(self):
        tokens = [*self.rng.choice(self.texts)[: self.rng.randrange(1, 50)], self.rng.randrange(5)]
        handle = self.pool.open(tokens if self.pool.prefix else 0)
        self.tokens[handle], self.committed[handle] = tokens, self.pool.num_tokens(handle)
        self.check(handle)

    def step(self):
        handles = self.rng.sample(sorted(self.tokens), self.rng.randrange(1, min(4, len(self.tokens)) + 1))
        news = []
        for handle in handles:
            done = self.pool.num_tokens(handle)
            if len(self.tokens[handle]) == done:
                self.tokens[handle].append(self.rng.randrange(5))
            new = min(len(self.tokens[handle]) - done, self.rng.choice([1, 1, 8, 16]))
            wanted = int(self.pool.prefix.wanted([handle])[0]) if self.pool.prefix else -1
            news.append(min(new, wanted - done) if wanted > done else new)
        self.pool.step(self.plan, handles, news)
        self.execute(handles, news)
        self.pool.done(self.plan)
        for handle in handles:
            length = self.pool.num_tokens(handle)
            if self.pool.prefix:
                self.pool.prefix.commit([handle], self.tokens[handle][self.committed[handle] : length])
            self.committed[handle] = length
            self.check(handle)

    def execute(self, handles, news):
        for k, group, size in self.groups():
            part, at = self.plan.groups[k], 0
            for source, target, tokens in part.copies.tolist():
                for offset in range(tokens):
                    self.memory[group.arena, target, offset] = self.memory[group.arena, source, offset]
            for row, (handle, new) in enumerate(zip(handles, news, strict=True)):
                table = self.table(handle, k)
                assert part.block_tables[row, : len(table)].tolist() == table.tolist()
                length = self.pool.num_tokens(handle)
                for position in range(length - new, length):
                    for column, slot in enumerate(part.slot_mapping[:, at].tolist()):
                        self.memory[group.arena, slot // size, slot % size] = self.content(handle, k, column, position)
                    at += 1

    def table(self, handle, k):
        return np.reshape(self.pool.table(handle, k), (-1, self.pool.options.groups[k].columns))

    def content(self, handle, k, column, position):
        return k, column, tuple(self.tokens[handle][: position + 1])

    def check(self, handle):
        """What the next token of a row reads is what was written for it."""
        length = self.pool.num_tokens(handle)
        for k, group, size in self.groups():
            first = {"window": length - group.size + 1, "chunk": length // max(group.size, 1) * group.size}
            table = self.table(handle, k)
            for position in range(max(0, first.get(group.kind, 0)), length):
                for column, block in enumerate(table[position // size].tolist()):
                    found = self.memory.get((group.arena, block, position % size))
                    assert found == self.content(handle, k, column, position)

    def resize(self):
        arenas = 1 + max((group.arena for _, group, _ in self.groups()), default=0)
        arena = self.rng.randrange(arenas + sum(group.kind == "state" for group in self.pool.options.groups))
        size = self.rng.randrange(20, 70) if arena < arenas else self.rng.randrange(1, 9)
        before = self.pool.fingerprint(), self.pool.digest(), self.pool.options
        try:
            moves = self.pool.resize(size, arena).tolist()
        except (OutOfBlocks, ValueError):
            assert (self.pool.fingerprint(), self.pool.digest(), self.pool.options) == before
            self.refused += 1
            return
        self.moves += len(moves)
        assert self.pool.stats(arena).num_blocks == size
        assert all(target < size <= source for source, target in moves)
        held = self.memory
        self.memory = {place: what for place, what in held.items() if place[0] != arena or place[1] < size}
        for source, target in moves if arena < arenas and self.follow_moves else ():
            for offset in range(8):
                self.memory[arena, target, offset] = held.get((arena, source, offset))
        for handle in self.tokens:
            self.check(handle)

    def play(self, calls):
        for _ in range(calls):
            word = self.rng.random()
            try:
                if word < 0.25:
                    self.open()
                elif word < 0.6 and self.tokens:
                    self.step()
                elif word < 0.7 and self.tokens:
                    handle = self.rng.choice(sorted(self.tokens))
                    (child,) = self.pool.fork(handle).tolist()
                    self.tokens[child], self.committed[child] = list(self.tokens[handle]), self.committed[handle]
                elif word < 0.8 and self.tokens:
                    handle = self.rng.choice(sorted(self.tokens))
                    self.pool.close([handle])
                    del self.tokens[handle]
                else:
                    self.resize()
            except (OutOfBlocks, OutOfSequences, CapacityExceeded):
                pass
            self.pool.check()
        return self


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_pool_that_is_resized_read_what_was_written_for_them(kind):
    runs = [Device(kind, seed).play(300) for seed in range(8)]
    assert sum(run.moves for run in runs) > 50 and sum(run.refused for run in runs) > 10


def test_backend_that_forgets_the_moves_is_found():
    with pytest.raises(AssertionError):
        for seed in range(8):
            Device("one", seed, follow_moves=False).play(300)


def test_larger_pool_takes_its_fresh_blocks_last_and_moves_nothing():
    pool = Pool(6, BLOCK, max_blocks_per_seq=8)
    assert pool.resize(9).tolist() == [] and pool.num_blocks == 9
    assert pool.table(pool.open(8 * BLOCK)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_smaller_pool_keeps_the_prefixes_that_were_used_last():
    pool = Pool(9, BLOCK, prefix_cache=True)
    plan = Plan(pool, max_rows=1, max_tokens=16)
    for first in (1, 2):
        tokens = [first] * 16
        handle = pool.open(tokens)
        pool.step(plan, [handle], 16)
        pool.done(plan)
        pool.prefix.commit([handle], tokens)
        pool.close([handle])
    assert len(pool.resize(6)) == 3  # the blocks of the second prompt are 5 .. 8
    assert pool.prefix.match([2] * 17) == 16 and pool.prefix.match([1] * 17) == 4


def test_smaller_pool_keeps_the_blocks_by_id_that_were_cached_last_in_their_order():
    pool = Pool(12, BLOCK)
    ids = pool.blocks.alloc(11)
    pool.blocks.mark_cached(ids)
    for block in (11, 3, 10, 1, 9, 8, 2, 4, 7, 5, 6):  # from the one that leaves first
        pool.blocks.free(block)
    pool.blocks.evict(4)
    assert pool.resize(9).tolist() == [[9, 1]] and pool.blocks.drain_evicted().tolist() == [3]  # 1 has something new
    assert pool.resize(5).tolist() == [[5, 2], [6, 1], [7, 3]]  # 1, 8 and 2 left, for as many are blank as go
    pool.check()
    for block in (4, 3, 2, 1):
        assert pool.blocks.evict(1) == 1 and pool.blocks.drain_evicted().tolist() == [block]


def test_rows_that_moved_are_dirty_in_their_next_step():
    pool = Pool(12, BLOCK)
    plan = Plan(pool, max_rows=2)
    low, gap, high = pool.open(8), pool.open(8), pool.open(8)
    pool.step(plan, [low, high])
    pool.done(plan)
    pool.step(plan, [low, high])
    assert plan.dirty_rows.tolist() == []
    pool.done(plan)
    pool.close([gap])
    assert pool.resize(5).tolist() == [[5, 3], [6, 4]]
    pool.step(plan, [low, high])
    assert plan.dirty_rows.tolist() == [1] and plan.block_tables[1, :2].tolist() == [3, 4]


def test_several_arenas_are_resized_all_or_none():
    groups = [Group.full(), Group.full(arena=1, num_blocks=20), Group.state(4)]
    pool = Pool(20, BLOCK, groups=groups)
    pool.open(16 * BLOCK)
    state = pool.fingerprint()
    with pytest.raises(OutOfBlocks, match=r"\[resize\] 16 blocks are in use, 1 more than would be there in arena 1"):
        pool.resize({0: 30, 1: 16})
    assert pool.fingerprint() == state
    moves = pool.resize({0: 30, 1: 17, 2: 2})
    assert {arena: len(found) for arena, found in moves.items()} == {0: 0, 1: 0, 2: 0}
    assert [pool.stats(arena).num_blocks for arena in range(3)] == [30, 17, 2]
    assert (pool.options.groups[1].num_blocks, pool.options.groups[2].size) == (17, 2)
    again = Pool(**pool.options._asdict())
    assert again.options == pool.options


def pending(pool):
    pool.step(Plan(pool, max_rows=1), [pool.open()])


def held_high(pool):
    pool.blocks.alloc(12)
    pool.blocks.free([*range(1, 12)])


@pytest.mark.parametrize(
    ("prepare", "size", "arena", "error", "message"),
    [
        (pending, 30, 0, PlanStateError, "step 1 is pending"),
        (lambda pool: pool.open([1] * 8, load=True), 30, 0, PlanStateError, "is being loaded"),
        (lambda pool: pool.open(12 * BLOCK), 12, 0, OutOfBlocks, "12 blocks are in use, 1 more than would be there"),
        (lambda pool: pool.blocks.alloc(12), 16, 0, None, None),
        (
            lambda pool: [pool.blocks.alloc(12), pool.blocks.free([*range(1, 12)])],
            12,
            0,
            ValueError,
            "block 12 has 1 ref",
        ),
        (None, 1, 0, ValueError, "arena 0 would have 1 blocks, the least is 5"),
        (None, 1 << 30, 0, CapacityExceeded, "a plan that has int32 slots can name 536870911"),
        (None, 0, 0, ValueError, "num_blocks is out of range"),
        (None, 20, 1, ValueError, "arena is out of range"),
        (None, 2.5, 0, TypeError, "num_blocks must be an int"),
    ],
)
def test_resize_that_cannot_be_is_refused_and_changes_nothing(prepare, size, arena, error, message):
    pool = Pool(20, BLOCK, watermark=4, prefix_cache=True)
    if prepare:
        prepare(pool)
    state = pool.fingerprint(), pool.digest()
    if error is None:
        assert pool.resize(size, arena).tolist() == []
        return
    with pytest.raises(error, match=message):
        pool.resize(size, arena)
    assert (pool.fingerprint(), pool.digest()) == state and pool.num_blocks == 20
