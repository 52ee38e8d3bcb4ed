"""The block pool for engines with own tables, held against a model made from its docstring."""

import random

import numpy as np
import pytest

from kvpool._core import Keys
from kvpool.adapters.block_pool import BlockPool
from kvpool.errors import DoubleFree, OutOfBlocks

NUM_BLOCKS = 9
SEEDS, CALLS = range(20), 600


class Model:
    """What the docstring of `BlockPool` says, in lists: who is free, in the order in which they are taken."""

    def __init__(self, num_blocks):
        self.size = num_blocks - 1
        self.references = dict.fromkeys(range(1, num_blocks), 0)
        self.blank = list(range(1, num_blocks))  # free without a key, the next to be taken first
        self.cached = []  # free with a key, or evicted in its place, likewise
        self.key_of = {}
        self.queries = self.hits = self.evictions = 0

    @property
    def free_order(self):
        return self.blank + self.cached

    def in_use(self):
        return [block for block, count in self.references.items() if count]

    def get(self, n):
        taken = self.free_order[:n]
        for block in taken:
            self.references[block] = 1
            self.evictions += self.key_of.pop(block, None) is not None
        self.blank, self.cached = self.blank[n:], self.cached[max(0, n - len(self.blank)) :]
        return taken

    def touch(self, ids):
        for block in ids:
            self.references[block] += 1
        self.blank = [block for block in self.blank if block not in ids]
        self.cached = [block for block in self.cached if block not in ids]

    def room(self, hits):
        return len(set(self.free_order) - set(hits))

    def free(self, ids):
        for block in ids:
            self.references[block] -= 1
        ended = [block for block in ids if not self.references[block]]
        self.blank = [block for block in ended if block not in self.key_of] + self.blank
        self.cached += [block for block in ended if block in self.key_of]

    def cache(self, ids, keys):
        for block, key in zip(ids, keys, strict=True):
            if key not in self.key_of.values():
                self.key_of[block] = key

    def evict(self, ids, keep_place=False):
        moved = [block for block in ids if block in self.cached and block in self.key_of and not keep_place]
        for block in ids:
            self.key_of.pop(block, None)
        self.blank = moved + self.blank
        self.cached = [block for block in self.cached if block not in moved]

    def lookup(self, keys):
        block_of = {key: block for block, key in self.key_of.items()}
        found = []
        for key in keys:
            if key not in block_of:
                break
            found.append(block_of[key])
        self.queries += len(keys)
        self.hits += len(found)
        return found

    def reset(self):
        if self.in_use():
            return False
        self.blank, self.cached, self.key_of = list(range(1, self.size + 1)), [], {}
        return True


class Program:
    """Random calls on both, with what engines do by mistake in between."""

    def __init__(self, seed):
        print(f"seed {seed}")
        self.random = random.Random(seed)
        self.pool, self.model = BlockPool(NUM_BLOCKS, events=1000), Model(NUM_BLOCKS)
        self.findable = set()  # keys, as the events tell it
        self.refused = self.resets = self.evicted_in_use = self.evicted_in_place = self.blank_touched = 0

    def some(self, blocks):
        blocks = list(blocks)
        return self.random.sample(blocks, self.random.randint(0, len(blocks)))

    def with_null(self, ids):
        """These blocks and the null block, as a list or an array."""
        at = self.random.randint(0, len(ids))
        ids = [*ids[:at], 0, *ids[at:]]
        return np.array(ids, np.int32) if self.random.random() < 0.3 else ids

    def found(self, keys):
        found = self.pool.lookup(keys)
        assert found == self.model.lookup(keys) and all(type(block) is int for block in found)
        return found

    def key(self):
        return f"key {self.random.randrange(12)}"

    def get(self):
        n = self.random.randint(0, 4)
        if n > len(self.model.free_order):
            with pytest.raises(OutOfBlocks):
                self.pool.get(n)
            self.refused += 1
            return
        assert self.pool.get(n) == self.model.get(n)

    def touch(self):
        ids = list(dict.fromkeys(self.found([self.key(), self.key()])))
        blank = self.random.random() < 0.3
        more = self.some(self.model.free_order)[:1] if blank else self.some(self.model.in_use())
        ids += [block for block in more if block not in ids]
        self.blank_touched += any(block in self.model.free_order and block not in self.model.key_of for block in ids)
        room = self.pool.room(self.with_null(ids))
        assert room == self.model.room(ids)
        self.pool.touch(self.with_null(ids), blank=blank)
        self.model.touch(ids)
        assert self.pool.num_free == room

    def free(self):
        ids = self.some(self.model.in_use())
        self.pool.free(self.with_null(ids))
        self.model.free(ids)

    def cache(self):
        ids = [block for block in self.some(self.model.in_use()) if block not in self.model.key_of]
        keys = [self.key() for _ in ids]
        self.pool.cache(ids, keys)
        self.model.cache(ids, keys)

    def evict(self):
        keep = {"keep_place": True} if self.random.random() < 0.5 else {}
        ids = self.some(self.model.cached if keep and self.model.cached else range(1, NUM_BLOCKS))[:3]
        self.evicted_in_use += any(block in self.model.key_of and self.model.references[block] for block in ids)
        self.evicted_in_place += any(block in self.model.key_of and block in self.model.cached for block in ids if keep)
        self.pool.evict(self.with_null(ids), **keep)
        self.model.evict(ids, **keep)

    def reset(self):
        while self.random.random() < 0.8 and self.model.in_use():
            self.free()
        is_done = self.model.reset()
        assert self.pool.reset() == is_done
        self.resets += is_done

    def misuse(self):
        held, free = self.model.in_use(), self.model.blank
        before = self.pool._pool.fingerprint(), self.pool._pool.digest()
        if held:
            with pytest.raises(DoubleFree, match=rf"^\[release\] block {held[0]} stands twice"):
                self.pool.free([*held, held[0]])
        if free:
            with pytest.raises(ValueError, match=rf"^\[touch\] block {free[0]} is neither in use nor cached"):
                self.pool.touch([*held, free[0]])
            with pytest.raises(DoubleFree, match=rf"^\[release\] block {free[0]} has no raw reference"):
                self.pool.free([*held, free[0]])
            with pytest.raises(DoubleFree, match=rf"^\[mark_cached\] block {free[0]} has no reference$"):
                self.pool.cache([free[0]], ["nobody's"])
        keyed = [block for block in held if block in self.model.key_of]
        if keyed:
            with pytest.raises(ValueError, match=rf"^\[mark_cached\] block {keyed[0]} is cached already"):
                self.pool.cache([*held, keyed[0]][-1:], ["another"])
        if held:
            with pytest.raises(TypeError, match="unhashable"):
                self.pool.cache(held[:1], [["no key"]])
        bare, stranger = [block for block in held if block not in keyed], self.random.choice([-1, NUM_BLOCKS, 1 << 40])
        wrong = [(call, [*held, stranger]) for call in (self.pool.free, self.pool.evict, self.pool.touch)]
        for call, *given in (*wrong, (self.pool.cache, [*bare, stranger], ["a"] * (len(bare) + 1))):
            with pytest.raises(IndexError, match=rf"ids\[\d\] is no block \({stranger}\), ids are 0 .. 8$"):
                call(*given)
        with pytest.raises(TypeError):
            self.pool.free([1.5])
        assert self.pool._pool.fingerprint() == before[0]
        assert self.pool._pool.digest() == before[1] or held  # a key that is no key was noticed late, and undone

    def compare(self):
        pool, model = self.pool, self.model
        assert pool.free_order() == model.free_order
        now = len(model.in_use()) / model.size, len(model.free_order), len(model.key_of)
        assert (pool.usage, pool.num_free, pool.num_cached) == now
        assert pool.stats() == (*now, model.queries, model.hits, model.evictions)
        assert {block: pool.refcount(block) for block in range(1, NUM_BLOCKS)} == model.references
        assert {block: pool.references[block] for block in range(1, NUM_BLOCKS)} == model.references
        hits = self.some(range(NUM_BLOCKS))
        assert pool.room(hits) == model.room(hits)
        for key in range(12):
            self.found([f"key {key}"])
        self.found([self.key() for _ in range(3)])
        for what, *about in pool.drain_events():
            if what == "cleared":
                self.findable.clear()
                continue
            keys = set(about[0])
            assert keys and (not keys & self.findable if what == "stored" else keys <= self.findable)
            self.findable ^= keys
        assert self.findable == set(model.key_of.values())
        pool.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_block_pool_random_calls_equal_the_model(seed):
    program = Program(seed)
    calls = [program.get, program.touch, program.free, program.free, program.cache, program.cache, program.evict]
    calls += [program.get, program.misuse, program.reset]
    for _ in range(CALLS):
        program.random.choice(calls)()
        program.compare()
    assert program.refused and program.model.hits and program.evicted_in_use and program.resets
    assert program.evicted_in_place and program.blank_touched


# ---- by hand -----------------------------------------------------------------------------------------------


class Key:
    """A key that is equal to others of its name once it was told so, and adds to a list whenever it is hashed."""

    def __init__(self, name, told=(), longer=None):
        self.name, self.told, self.longer = name, told, longer

    def __hash__(self):
        if self.longer:
            self.longer[0].append(self.longer.pop())
        return hash(self.name)

    def __eq__(self, other):
        return self is other or ("equal" in self.told and self.name == other.name)


def test_keys_of_reserved_blocks_are_not_kept():
    keys = Keys(8, reserved=1)
    assert keys.add([0, 3, 4, 5], ["a", "b", "a", "b"]) == [5]
    assert [keys.key(block) for block in (0, 3, 4, 5)] == [None, "b", "a", None]
    assert keys.new([0, 5, 6, 7], ["x", "y", "y", "a"]) == ([5], ["y"])


def test_block_pool_keys_that_grow_while_they_are_read_are_found_too():
    pool = BlockPool(5)
    ids, keys = pool.get(3), [Key("a"), Key("b"), Key("c")]
    pool.cache(ids, keys)
    asked = keys[:2]
    keys[1].longer = [asked, keys[2]]
    assert pool.lookup(asked) == ids
    pool.check()


def test_block_pool_keys_that_become_equal_are_convicted_by_check():
    pool, told = BlockPool(5), []
    ids = pool.get(2)
    pool.cache(ids, [Key("a", told), Key("a", told)])
    pool.check()
    told.append("equal")
    with pytest.raises(AssertionError, match="keys"):
        pool.check()


def test_block_pool_events_that_have_no_room_are_counted():
    pool = BlockPool(9, events=2)
    for key in "abcde":
        pool.cache(pool.get(1), [key])
    assert pool.drain_events() == [("lost", 3), ("stored", ["d"]), ("stored", ["e"])]
    pool.evict([1, 2])
    assert pool.drain_events() == [("removed", ["a", "b"])]
    assert BlockPool(4).drain_events() == []
