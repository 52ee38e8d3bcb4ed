"""The block pool for engines with own tables, held against a small independent model after every call."""

import random
from collections import OrderedDict

import pytest

from kvpool.adapters.block_pool import BlockPool
from kvpool.errors import DoubleFree, OutOfBlocks

NUM_BLOCKS = 9


class Model:
    """What the pool promises, from a dict of references and an ordered dict of cached blocks."""

    def __init__(self, num_blocks):
        self.size = num_blocks - 1
        self.references = {}
        self.lru = OrderedDict()  # cached and free, oldest first
        self.key_of = {}

    @property
    def num_free(self):
        return self.size - len(self.references)

    def got(self, ids):
        """The pool took `ids`; returns the keys that had to go, which the model works out itself."""
        blank = self.num_free - len(self.lru)
        evicted = [self.lru.popitem(last=False)[0] for _ in range(max(0, len(ids) - blank))]
        for block in evicted:
            self.key_of.pop(block, None)
        assert set(evicted) <= set(ids)
        self.references.update(dict.fromkeys(ids, 1))

    def touch(self, ids):
        for block in ids:
            self.lru.pop(block, None)
            self.references[block] = self.references.get(block, 0) + 1

    def free(self, ids, final):
        for block in ids:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                if block in final:
                    self.lru[block] = None

    def lookup(self, keys):
        block_of = {key: block for block, key in self.key_of.items()}
        found = []
        for key in keys:
            if key not in block_of:
                break
            found.append(block_of[key])
        return found


class Program:
    """Random calls on both, with what engines do by mistake in between."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.pool, self.model = BlockPool(NUM_BLOCKS), Model(NUM_BLOCKS)
        self.final = set()  # blocks whose content was declared final since they were taken
        self.refused = self.hits = 0

    def some(self, blocks):
        blocks = list(blocks)
        return self.random.sample(blocks, self.random.randint(0, len(blocks)))

    def get(self):
        n = self.random.randint(0, 4)
        if n > self.model.num_free:
            with pytest.raises(OutOfBlocks):
                self.pool.get(n)
            self.refused += 1
            return
        ids = self.pool.get(n).tolist()
        assert len(set(ids)) == n and 0 not in ids and not set(ids) & set(self.model.references)
        self.model.got(ids)
        self.final -= set(ids)

    def touch(self):
        keys = [f"key {self.random.randrange(12)}" for _ in range(2)]
        ids = list(dict.fromkeys(self.pool.lookup(keys)))
        self.hits += len(ids)
        ids = [*ids, *(i for i in self.some(self.model.references) if i not in ids), 0]
        self.pool.touch(ids)
        self.model.touch([i for i in ids if i])

    def free(self):
        ids = [*self.some(self.model.references), 0]
        self.pool.free(ids)
        self.model.free([i for i in ids if i], self.final)

    def cache(self):
        ids = [i for i in self.some(self.model.references) if i not in self.model.key_of]
        keys = [f"key {self.random.randrange(12)}" for _ in ids]
        self.pool.cache(ids, keys)
        for block, key in zip(ids, keys, strict=True):
            if key not in self.model.key_of.values():
                self.model.key_of[block] = key
                self.final.add(block)

    def evict(self):
        ids = self.some(range(1, NUM_BLOCKS))[:1]
        self.pool.evict(ids)
        for block in ids:
            self.model.key_of.pop(block, None)

    def misuse(self):
        held = sorted(self.model.references)
        before = self.pool._pool.fingerprint()
        blank = [i for i in range(1, NUM_BLOCKS) if i not in held and i not in self.model.lru]
        with pytest.raises(DoubleFree, match=r"^\[free\] "):
            self.pool.free([*held, *held[:1]] if held else [1])
        if blank:
            with pytest.raises(ValueError, match="neither in use nor cached"):
                self.pool.touch([*held, blank[0]])
            with pytest.raises(DoubleFree, match=rf"^\[free\] block {blank[0]} has no reference left$"):
                self.pool.free([*held, blank[0]])
            with pytest.raises(DoubleFree):
                self.pool.cache([blank[0]], ["nobody's"])
        with pytest.raises(IndexError):
            self.pool.free([*held, NUM_BLOCKS])
        with pytest.raises(TypeError):
            self.pool.free([1.5])
        assert self.pool._pool.fingerprint() == before

    def compare(self):
        assert self.pool.num_free == self.model.num_free
        assert self.pool.usage == len(self.model.references) / self.model.size
        assert self.pool.num_cached == len(self.model.key_of)
        for block in range(1, NUM_BLOCKS):
            assert self.pool.refcount(block) == self.model.references.get(block, 0)
        for key in range(12):
            assert self.pool.lookup([f"key {key}"]) == self.model.lookup([f"key {key}"])
        self.pool.check()


@pytest.mark.parametrize("seed", range(20))
def test_block_pool_random_calls_equal_the_model(seed):
    program = Program(seed)
    calls = [program.get, program.get, program.touch, program.free, program.cache, program.evict, program.misuse]
    for _ in range(300):
        program.random.choice(calls)()
        program.compare()
    assert program.refused and program.hits


class FreesBackwards(BlockPool):
    def free(self, ids):
        super().free(ids[::-1])


class ForgetsToForget(BlockPool):
    def _forget(self, ids):
        pass


class TakesTheNewKey(BlockPool):
    def cache(self, ids, keys):
        self._forget([self._block_of[key] for key in keys if key in self._block_of])
        super().cache(ids, keys)


@pytest.mark.parametrize("broken", [FreesBackwards, ForgetsToForget, TakesTheNewKey])
def test_block_pool_broken_pool_is_convicted(broken, monkeypatch):
    monkeypatch.setitem(globals(), "BlockPool", broken)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        for seed in range(5):
            test_block_pool_random_calls_equal_the_model(seed)


def test_block_pool_frees_the_first_named_is_evicted_first():
    pool = BlockPool(5)
    table = pool.get(4).tolist()
    pool.cache(table, ["a", "b", "c", "d"])
    pool.free(table[::-1])
    assert pool.lookup("abcd") == table
    assert pool.get(1).tolist() == table[3:]  # the tail of the request
    assert pool.lookup("abcd") == table[:3]


def test_block_pool_key_known_already_the_new_block_stays_blank():
    pool = BlockPool(4)
    first, second = pool.get(2).tolist()
    pool.cache([first], ["a"])
    pool.cache([second], ["a"])
    pool.free([second, first])
    assert pool.lookup("a") == [first]
    assert pool.get(2).tolist().count(first) == 0  # blank blocks before cached ones


@pytest.mark.parametrize("stranger", [-1, 4, 99, 1 << 40])
def test_block_pool_ids_that_are_no_block_are_refused_by_every_call(stranger):
    pool = BlockPool(4)
    (block,) = pool.get(1).tolist()
    pool.cache([block], ["a"])
    before = pool._pool.fingerprint()
    ids = [block, stranger]
    for call, arguments in (("evict", ()), ("cache", (["a", "a"],)), ("touch", ()), ("free", ())):
        with pytest.raises(IndexError, match=rf"^\[{call}\] no such block \({stranger}\), ids are 0 .. 3$"):
            getattr(pool, call)(ids, *arguments)
        assert pool._pool.fingerprint() == before and pool.lookup(["a"]) == [block]
    pool.check()


def test_block_pool_reset_refuses_while_a_block_is_in_use():
    pool = BlockPool(4)
    ids = pool.get(1)
    pool.cache(ids, ["a"])
    assert not pool.reset() and pool.num_cached == 1
    pool.free(ids)
    assert pool.reset() and pool.num_cached == 0 and pool.num_free == 3
    pool.check()


def test_block_pool_null_block_is_never_handed_out_or_counted():
    pool = BlockPool(3)
    assert sorted(pool.get(2).tolist()) == [1, 2]
    assert pool.usage == 1.0
    pool.touch([0])
    pool.cache([0], ["nothing"])
    pool.free([0])
    assert pool.lookup(["nothing"]) == [] and pool.usage == 1.0


def test_block_pool_scheduler_page_runs_as_written():
    """The five lines of the module's docstring."""
    pool = BlockPool(8)
    keys = ["system", "prompt", "tail"]
    for expected_hits in (0, 3):
        ids = pool.lookup(keys)
        assert len(ids) == expected_hits
        pool.touch(ids)
        table = [*ids, *pool.get(4 - len(ids)).tolist()]
        pool.cache(table[:3], keys)
        pool.free(table[::-1])
    assert pool.usage == 0.0
