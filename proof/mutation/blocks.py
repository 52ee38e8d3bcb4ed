"""Programs of engines with block tables of their own: blocks by name, and the keys of what they hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvpool.errors import KVPoolError
from proof.mutation.scenarios import look, tried


class KeysModel:
    """`kvpool._core.Keys` as two dicts."""

    def __init__(self, num_blocks: int, reserved: int = 0) -> None:
        self.num_blocks, self.reserved, self.block_of, self.keys = num_blocks, reserved, {}, {}

    def _at(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise IndexError(block)
        return block

    def key(self, block: int) -> Any:
        """Of a block."""
        return self.keys.get(self._at(block))

    def find(self, keys: Any) -> list[int]:
        """Of the longest prefix."""
        return [self.block_of[key] for key in itertools.takewhile(self.block_of.__contains__, keys)]

    def add(self, blocks: list[int], keys: list[Any]) -> list[int]:
        """Those whose key another block has stay without."""
        others = []
        for key in keys:
            hash(key)
        for block, key in zip(blocks, keys, strict=True):
            if block < self.reserved:
                continue
            if self.block_of.setdefault(key, block) == block:
                self.keys[block] = key
            else:
                others.append(block)
        return others

    def new(self, blocks: list[int], keys: list[Any]) -> tuple[list[int], list[Any]]:
        """What `add` would add."""
        pairs: dict[Any, int] = {}
        for block, key in zip(blocks, keys, strict=True):
            if block >= self.reserved and key not in self.block_of and key not in pairs:
                pairs[key] = block
        return [*pairs.values()], [*pairs]

    def check(self) -> list[int]:
        """Who has a key."""
        return sorted(self.keys)

    def drop(self, blocks: Any) -> list[Any]:
        """The keys that are gone."""
        gone = [self.keys.pop(self._at(block)) for block in blocks if self._at(block) in self.keys]
        for key in gone:
            del self.block_of[key]
        return gone

    def clear(self) -> None:
        """No keys at all."""
        self.block_of, self.keys = {}, {}


def blocks_by_name(Pool: Any, Plan: Any) -> None:
    """Every call with good and with bad names, in each place of a batch, with steps pending and without."""
    for reserved, seqs in ((1, 4), (0, 2), (3, 4)):
        pool = Pool(24, 4, max_seqs=seqs, reserved_blocks=reserved)
        plan, blocks = Plan(pool, 2, 20, formats=("block_tables",)), pool.blocks
        row = pool.open(5)
        held: list[int] = []
        for turn in range(14):
            taken = tried(blocks.take, turn % 6)
            held += taken[0] if taken else []
            names = [*held[turn % 3 :: 2], *range(reserved)][:7]
            for wrong in ([], [-1], [24], [99], held[:1] * 2, [2**31], [2**40]):
                batch = [*names[: turn % 4], *wrong, *names[turn % 4 :]]
                for call in (blocks.touch, blocks.mark_cached, blocks.refcounts, blocks.uncache, blocks.release):
                    if wrong or turn % 2:
                        tried(call, batch)
                tried(blocks.release, wrong, oldest=True)
                tried(blocks.take_block, wrong[0] if wrong else 23 - turn)
            tried(blocks.mark_cached, names)
            tried(blocks.touch, names)
            tried(blocks.release, names)
            if turn % 5 == 2:
                tried(pool.step, plan, [row], 1 + turn % 3)
            order = blocks.free_order().tolist()
            for n in (0, 1, 3, len(order), len(order) + 1, -1):
                tried(blocks.free_order, n)
            tried(blocks.release, held[: turn % 5], oldest=bool(turn % 2))
            tried(blocks.release, held[::-1], oldest=turn % 3 == 0)
            tried(blocks.touch, order[-3:])
            tried(blocks.touch, np.array(order[:2], np.int32))
            if turn % 7 == 6:
                tried(blocks.uncache, order[::2])
                tried(blocks.uncache, int(order[0]) if order else 1)
            _ = blocks.num_free, blocks.num_blank, blocks.usage
            tried(blocks.refcounts, list(range(24)))
            look(pool, plan)
            if plan.is_pending:
                pool.rollback(plan) if turn % 2 else pool.done(plan)
                look(pool)
            if turn % 4 == 3:
                counts = blocks.refcounts(list(range(24))).tolist()
                held = [n for n in range(reserved, 24) if counts[n]]
                tried(blocks.release, [n for n in held if n % 2])
        pool.blocks.drain_evicted()
        while tried(blocks.take, 1) is not None:
            look(pool)
        pool.shutdown()
        for name in ("take", "touch", "release", "mark_cached", "uncache", "refcounts", "take_block", "free_order"):
            tried(getattr(blocks, name), 1)


def keys_of_blocks(Keys: Any) -> None:
    """One key a block and one block a key, whatever is added and dropped."""
    for reserved in (0, 1, 3):
        keys_of_some_blocks(Keys(12, reserved))
    keys = Keys(700)
    for block in ("300", "300", "600"):  # each another object
        keys.add([int(block)], ["a"])
        keys.key(300)
        keys.check()


def keys_of_some_blocks(keys: Any) -> None:
    """On one of them."""
    for turn in range(30):
        blocks = sorted({(turn * k + k) % 12 for k in range(1 + turn % 5)}, reverse=bool(turn % 2))
        names = [f"key {(turn * 5 + k * k) % 17}" for k in range(len(blocks))]
        tried(keys.drop, blocks)  # who has a key gets no other
        for _ in range(2):
            tried(keys.new, blocks, names)
            tried(keys.add, blocks, names)
        for known in (names, names[::-1], [*names, "none", *names], iter(names), []):
            tried(keys.find, list(known))
        for block in (0, 5, 11, 12):
            tried(keys.key, block)
        if turn % 3 == 2:
            tried(keys.drop, blocks[::2])
        if turn % 7 == 5:
            tried(keys.drop, [12, 4, 7])
            tried(keys.drop, [4, 7])
            tried(keys.add, [4, 7], ["a new key", ["no key"]])
            tried(keys.check)
        if turn % 11 == 10:
            keys.clear()
        _ = keys.block_of
        tried(keys.check)


def asked(pool: Any, blocks: Any, number: int) -> None:
    """Read all there is to know of blocks."""
    blocks.free_order()
    for n in {0, 1, number // 3, number, number + 1}:
        blocks.free_order(n)
    blocks.refcounts(list(range(number)))
    blocks.refcounts(number - 1)
    _ = blocks.num_free, blocks.num_blank, blocks.usage
    look(pool)


def blocks_of_an_engine(Pool: Any, Plan: Any) -> None:
    """Tables that are filled, known, released to either end, hit and forgotten; asked after each call who is next."""
    for reserved, steps, number in ((0, False, 9), (2, False, 40), (1, True, 40)):
        pool = Pool(number, 4, max_seqs=4, reserved_blocks=reserved)
        engine = Engine(pool, Plan(pool, 2, 40, formats=("block_tables",)), pool.blocks, number, reserved)
        for turn in range(70):
            engine.turn(turn, steps)
        pool.shutdown()


def accepted(call: Callable[[Any], None], ids: Any) -> bool:
    """Whether a call is not refused."""
    try:
        call(ids)
    except (KVPoolError, ValueError):
        return False
    return True


class Engine:
    """What an engine with block tables of its own does, one thing after the other; no call of it is refused."""

    def __init__(self, pool: Any, plan: Any, blocks: Any, number: int, reserved: int) -> None:
        self.pool, self.plan, self.blocks, self.number, self.reserved = pool, plan, blocks, number, reserved
        self.rng, self.row = random.Random(number + reserved), pool.open()
        self.tables: list[list[int]] = []
        self.known: set[int] = set()

    def form(self, ids: list[int]) -> Any:
        """In one of the ways in which a call takes them."""
        made = self.rng.choice([list, tuple, partial(np.array, dtype=np.int64), partial(np.array, dtype=np.int32)])
        return ids[0] if len(ids) == 1 and self.rng.random() < 0.5 else made(ids)

    def turn(self, turn: int, steps: bool) -> None:
        """One call, or a few."""
        rng, pool, blocks = self.rng, self.pool, self.blocks
        often = ["take", "commit", "touch"]
        seldom = ["release", "uncommit", "by id", "evict", "reserved", "step", "raw"]
        what = rng.choice([*often, *often, "release", "release", *seldom])
        if what == "take":
            ids, evicted = tried(blocks.take, rng.choice([1, 2, 3, 5, 17])) or ([], 0)
            self.known -= set(ids[len(ids) - evicted :])
            self.tables += [ids] if ids else []
        elif what == "commit" and self.tables:
            new = [n for n in rng.choice(self.tables) if n not in self.known]
            done = accepted(blocks.mark_cached, self.form(new) if new else [])
            if not done:  # one of them was evicted, and nobody was told
                pool.blocks.drain_evicted()
                done = accepted(blocks.mark_cached, new)
            self.known |= set(new if done else [])
        elif what == "touch" and self.known:
            hit = rng.sample(sorted(self.known), rng.randint(1, min(20, len(self.known))))
            blocks.touch(self.form(hit))
            self.tables.append(hit)
        elif what == "release" and self.tables:
            gone = self.tables.pop(rng.randrange(len(self.tables)))
            part = rng.randint(0, len(gone))
            for ids in (gone[:part], gone[part:]):
                oldest = rng.random() < 0.5
                if tried(blocks.release, self.form(ids), oldest=oldest) is None and oldest and self.plan.is_pending:
                    blocks.release(ids)
        elif what == "uncommit":
            ids = rng.sample(range(self.number), rng.randint(1, 18 if self.number > 18 else 5))
            blocks.uncache(self.form(ids))
            self.known -= set(ids)
        elif what == "by id":
            blank = blocks.free_order(blocks.num_blank).tolist()
            if blank:
                one = rng.choice([blank[0], blank[-1], rng.choice(blank)])
                blocks.take_block(one)
                self.tables.append([one])
        elif what == "evict":
            order = blocks.free_order().tolist()[blocks.num_blank :]
            self.known -= set(order[: pool.blocks.evict(rng.randint(0, 3))])
        elif what == "reserved" and self.tables:
            table = rng.choice(self.tables)
            blocks.touch([*range(self.reserved), *table])
            self.tables.append(list(table))
        elif what == "raw":
            ids = tried(pool.blocks.alloc, 2)
            if ids is not None:
                pool.blocks.incref(ids)
                tried(pool.blocks.mark_cached, ids[:1])
                pool.blocks.decref(ids)
                pool.blocks.free(ids)
                pool.blocks.evict(1)
                self.known.clear()
                blocks.uncache(list(range(self.reserved, self.number)))
        elif what == "step" and steps:
            if self.plan.is_pending:
                pool.done(self.plan) if turn % 2 else pool.rollback(self.plan)
            else:
                tried(pool.step, self.plan, [self.row], 1 + turn % 3)
        self.known &= {n for n in self.known if n not in self.blanked()}
        asked(pool, blocks, self.number)

    def blanked(self) -> set[int]:
        """Blocks that hold nothing."""
        return set(self.blocks.free_order(self.blocks.num_blank).tolist())
