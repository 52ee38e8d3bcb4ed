"""Random programs on pools with layer groups and a prefix cache, and a memory that judges what their steps read.

The memory executes a plan as its arrays say: copies, loads of states, writes, saves of states. Where a token is written
it keeps the whole prefix that the token ends, and a state is the prefix that it has seen. So a read tells whose content
a block holds. Nothing here asks a pool what is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from kvpool import Group
from kvpool.errors import KVPoolError

KINDS = (
    (Group.full(), Group.state(12, blocks=3)),
    (Group.full(), Group.state(12, blocks=1)),
    (Group.full(), Group.window(8)),
    (Group.full(), Group.window(9, keep=3, columns=2), Group.state(12, blocks=2)),
    (Group.window(6),),
    (Group.full(), Group.chunk(8)),
    (Group.full(columns=2, block_size=8), Group.window(12), Group.full()),
    (Group.full(), Group.window(8, arena=1, num_blocks=20), Group.state(12, blocks=2)),
    (Group.window(8), Group.full(arena=1, num_blocks=30), Group.state(12, blocks=2)),
    (Group.state(12, blocks=2), Group.state(10, blocks=1)),
    (Group.full(), Group.state(12)),
    (Group.full(),),
)
BLOCK_SIZE, MAX_BLOCKS = 4, 16


class WrongContent(AssertionError):
    """A step reads what its sequence has not computed."""


Held = Callable[[int, int], list[int]]


class Memory:
    """What all blocks and states hold."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.tokens = {}  # (group's arena, column's block, offset) -> prefix
        self.states = {}  # (group, slot) -> prefix

    def execute(
        self, plan: Any, pool: Any, handles: list[int], new: list[int], prefixes: list[Any], held: Held
    ) -> None:
        """Execute a plan; `prefixes` are (namespace, tokens) of each row after the step.

        ``held(handle, group)`` are the positions that a row has not lost, in the order of their places.
        """
        for number, (group, arrays) in enumerate(zip(self.groups, plan.groups, strict=True)):
            if group.kind == "state":
                for slot, *blocks in arrays.state_loads.tolist():
                    found = {self.tokens.get((0, block, k)) for block in blocks for k in range(BLOCK_SIZE)}
                    self.states[number, slot] = found.pop() if len(found) == 1 else None
                continue
            size = group.block_size or BLOCK_SIZE
            for src, dst, tokens in arrays.copies.tolist():
                for k in range(size):
                    self.tokens[group.arena, dst, k] = self.tokens.get((group.arena, src, k)) if k < tokens else None
        for row, (handle, n, (space, tokens)) in enumerate(zip(handles, new, prefixes, strict=True)):
            length = int(pool.num_tokens(handle))
            for number, (group, arrays) in enumerate(zip(self.groups, plan.groups, strict=True)):
                if group.kind == "state":
                    self._advance(number, arrays, row, n, (space, tuple(tokens[: length - n])), space, tokens[:length])
                else:
                    self._attend(number, group, arrays.block_tables[row], held(handle, number), n, space, tokens)

    def _advance(
        self, number: int, arrays: Any, row: int, n: int, before: Any, space: bytes, tokens: list[int]
    ) -> None:
        if not n:
            return
        src, dst = int(arrays.state_src[row]), int(arrays.state_dst[row])
        if before[1] and self.states.get((number, src)) != before:
            raise WrongContent(f"state {src} of group {number} is not that of {before}")
        self.states[number, dst] = (space, tuple(tokens))
        for slot, *blocks in arrays.state_saves.tolist():
            if slot == dst:
                self.tokens |= {(0, block, k): (space, tuple(tokens)) for block in blocks for k in range(BLOCK_SIZE)}

    def compact(self, number: int, table: list[list[int]], keep: list[int]) -> None:
        """Tokens move to the front of a table."""
        group = self.groups[number]
        size = group.block_size or BLOCK_SIZE
        moves = {
            (group.arena, block, to % size): self.tokens.get((group.arena, table[place // size][column], place % size))
            for to, place in enumerate(keep)
            for column, block in enumerate(table[to // size])
        }
        self.tokens |= moves

    def _attend(
        self, number: int, group: Group, table: Any, held: list[int], n: int, space: bytes, tokens: list[int]
    ) -> None:
        size = group.block_size or BLOCK_SIZE
        for place in range(len(held) - n, len(held)):
            for block in table[place // size].tolist():
                self.tokens[group.arena, block, place % size] = (space, tuple(tokens[: held[place] + 1]))
        for p in range(len(held) - n, len(held)):
            first = {"full": 0, "window": p - group.size + 1, "chunk": p - p % max(group.size, 1)}[group.kind]
            for q in (*range(min(group.keep, max(first, 0))), *range(max(first, 0), p + 1)):
                for block in table[q // size].tolist():
                    if self.tokens.get((group.arena, block, q % size)) != (space, tuple(tokens[: held[q] + 1])):
                        raise WrongContent(f"group {number}: block {block} does not hold position {q}")


class Program:
    """Random calls on some pools, the same on each; the memory watches the first."""

    def __init__(self, seed: int, make_pools: Callable[..., list[Any]], make_plan: Callable[..., Any]) -> None:
        self.rng = rng = random.Random(seed)
        self.groups = rng.choice(KINDS)
        options = {"groups": list(self.groups), "prefix_cache": True, "max_seqs": 8, "seed": 1}
        options |= {"in_order": rng.random() < 0.3, "max_blocks_per_seq": MAX_BLOCKS, "events": rng.choice((0, 10**6))}
        options["two_classes"] = rng.random() < 0.5
        self.pools = make_pools(rng.choice((16, 24, 40, 80)), BLOCK_SIZE, **options)
        self.plans = [[make_plan(pool, 6, 64) for pool in self.pools] for _ in range(1 if options["in_order"] else 3)]
        self.in_order = options["in_order"]
        self.idle, self.pending = list(range(len(self.plans))), []
        self.rows = {}  # handle on the first pool -> (handles, namespace, tokens)
        #: (handle on the first pool, group) -> positions that an eviction left, the length at which it did
        self.left: dict[tuple[int, int], tuple[list[int], int]] = {}
        self.memory = Memory(self.groups)
        self.prompts = [[rng.randrange(3) for _ in range(48)] for _ in range(3)]

    def each(self, call: Callable[[int, Any], Any]) -> list[Any] | None:
        """Do a call on every pool. Return the results, or None if it was refused, by all of them alike."""
        results, errors = [], []
        for k, pool in enumerate(self.pools):
            try:
                results.append(call(k, pool))
            except (ValueError, KVPoolError) as error:
                errors.append(type(error))
        assert len(errors) in (0, len(self.pools)) and len(set(errors)) <= 1, (errors, results)
        return None if errors else results

    def handles(self, names: list[int], k: int) -> list[int]:
        """What some rows are called on pool k."""
        return [self.rows[name][0][k] for name in names]

    def run(self, calls: int) -> Iterator[str]:
        """Make so many calls. Returns after each, for the caller to look."""
        words = ["open", "step", "done"] * 2 + ["close", "fork", "commit", "flush", "truncate", "rollback"]
        words += ["pin", "match", "evict", "reset", "compact"] + ["compute"] * 4
        for _ in range(calls):
            word = self.rng.choice(words)
            if word in ("open", "match", "evict") or self.rows or self.pending:
                getattr(self, "do_" + word)()
            yield word

    def _prompt(self) -> tuple[list[int], bytes]:
        prompt = list(self.rng.choice(self.prompts)[: self.rng.randrange(1, 48)])
        for _ in range(self.rng.randrange(3)):
            prompt[self.rng.randrange(len(prompt))] = self.rng.randrange(3)
        return prompt, self.rng.choice((b"", b"", b"other"))

    def _opened(self, opened: list[int] | None, space: bytes, tokens: list[int]) -> None:
        if opened is not None:
            tail = [self.rng.randrange(3) for _ in range(20)]
            self.rows[opened[0]] = (opened, space, tokens + tail)

    def do_open(self) -> None:
        prompt, space = self._prompt()
        cut = self.rng.choice((None, len(prompt), self.rng.randrange(len(prompt) + 1)))
        reserve = self.rng.random() < 0.6
        self._opened(self.each(lambda k, pool: pool.open(prompt, space, cut, reserve=reserve)), space, prompt)

    def do_pin(self) -> None:
        if self.rng.random() < 0.3:
            prompt, space = self._prompt()
            self._opened(self.each(lambda k, pool: pool.prefix.pin(prompt, space)), space, prompt)

    def do_match(self) -> None:
        prompt, space = self._prompt()
        found = self.each(lambda k, pool: pool.prefix.match(prompt, space))
        assert len(set(found)) == 1, found

    def do_compute(self) -> None:
        """Take a row as far as its tokens go, or nearly: steps end where the pool wants, and are committed."""
        if not self.rows:
            return
        name = self.rng.choice(sorted(self.rows))
        for _ in range(self.rng.randrange(1, 6)):
            self.do_step([name])
            while self.pending:
                self.do_done()
            self.do_commit(name)

    def do_step(self, names: list[int] | None = None) -> None:
        if not (self.rows and self.idle):
            return
        rng, pool = self.rng, self.pools[0]
        names = names or rng.sample(sorted(self.rows), min(len(self.rows), rng.randrange(1, 4)))
        wanted = self.each(lambda k, pool: pool.prefix.wanted(self.handles(names, k)).tolist())
        assert all(one == wanted[0] for one in wanted), wanted
        new = []
        for name, place in zip(names, wanted[0], strict=True):
            length = int(pool.num_tokens(name))
            n = place - length if place > 0 and rng.random() < 0.8 else rng.choice((1, rng.randrange(12)))
            new.append(max(0, min(n, len(self.rows[name][2]) - length)))
        if sum(new) > 64:
            return
        number = self.idle[-1]
        plans = self.plans[number]
        if self.each(lambda k, pool: pool.step(plans[k], self.handles(names, k), new)) is None:
            return
        self.memory.execute(plans[0], pool, names, new, [self.rows[name][1:] for name in names], self.held)
        for arrays in zip(*(plan.groups for plan in plans), strict=True):
            for name in ("state_loads", "state_saves"):
                if hasattr(arrays[0], "state_src"):
                    assert len({len(getattr(one, name)) for one in arrays}) == 1, name
        if not self.in_order:
            self.pending.append(self.idle.pop())

    def do_done(self) -> None:
        if self.pending:
            number = self.pending.pop(0)
            self.each(lambda k, pool: pool.done(self.plans[number][k]))
            self.idle.append(number)

    def do_rollback(self) -> None:
        if self.pending and self.rng.random() < 0.3:
            number = self.pending[-1]
            if self.each(lambda k, pool: pool.rollback(self.plans[number][k])) is not None:
                self.idle.append(self.pending.pop())

    def do_close(self) -> None:
        if self.rows and self.rng.random() < 0.6:
            name = self.rng.choice(sorted(self.rows))
            self.each(lambda k, pool: pool.close(self.handles([name], k)))
            del self.rows[name]

    def do_fork(self) -> None:
        if not self.rows:
            return
        name = self.rng.choice(sorted(self.rows))
        children = self.each(lambda k, pool: int(pool.fork(self.handles([name], k)[0])[0]))
        if children is not None:
            _, space, tokens = self.rows[name]
            length = int(self.pools[0].num_tokens(name))
            if self.rng.random() < 0.5:
                tokens = tokens[:length] + [self.rng.randrange(3) for _ in tokens[length:]]
            self.rows[children[0]] = (children, space, tokens)
            self.left |= {(children[0], number): left for (row, number), left in self.left.items() if row == name}

    def held(self, name: int, number: int) -> list[int]:
        """The positions of a row that it has not lost in a group."""
        positions, length = self.left.get((name, number), ([], 0))
        return [*positions, *range(length, int(self.pools[0].num_tokens(name)))]

    def do_compact(self) -> None:
        """Tokens leave a group of a row: whole entries, or any of them."""
        number, rng = self.rng.randrange(len(self.groups)), self.rng
        if not self.rows or not self.idle:
            return
        name, group = rng.choice(sorted(self.rows)), self.groups[number]
        size, held = group.block_size or BLOCK_SIZE, self.held(name, number)
        if rng.random() < 0.4:
            leaving = [index for index in range(len(held) // size) if rng.random() < 0.4]
            stay = [place for place in range(len(held)) if place // size not in leaving]
            left = self.each(lambda k, pool: pool.evict_blocks(self.handles([name], k)[0], leaving, number))
            if left is not None and leaving:
                self.left[name, number] = [held[place] for place in stay], int(self.pools[0].num_tokens(name))
            return
        plans, target = self.plans[self.idle[-1]], rng.randrange(len(held) + 1)
        handles = [self.handles([name], k) for k in range(len(self.pools))]
        if self.each(lambda k, pool: pool.unshare(plans[k], handles[k], target, group=number)) is None:
            return
        self.memory.execute(plans[0], self.pools[0], [name], [0], [self.rows[name][1:]], self.held)
        if not self.in_order:
            self.pending.append(self.idle.pop())
        while self.pending:
            self.do_done()
        table = self.pools[0].table(name, number).tolist()
        left = self.each(lambda k, pool: pool.compact(handles[k], target, group=number))
        if left is not None and target < len(held):
            keep = sorted(rng.sample(range(len(held)), target))
            self.memory.compact(number, table, keep)
            self.left[name, number] = [held[place] for place in keep], int(self.pools[0].num_tokens(name))

    def do_commit(self, name: int | None = None) -> None:
        if not self.rows:
            return
        name = name or self.rng.choice(sorted(self.rows))
        known = self.each(lambda k, pool: int(pool.prefix.committed(self.handles([name], k)[0])))
        assert len(set(known)) == 1, known
        length = int(self.pools[0].num_tokens(name))
        n = max(0, self.rng.choice((length - known[0], self.rng.randrange(9))))
        tokens = self.rows[name][2][known[0] : known[0] + n]
        self.each(lambda k, pool: pool.prefix.commit(self.handles([name], k), tokens))

    def do_flush(self) -> None:
        if self.rng.random() < 0.1:
            space = self.rng.choice((None, b""))
            blank = self.each(lambda k, pool: pool.prefix.flush(space))
            assert len(set(blank)) == 1, blank

    def do_evict(self) -> None:
        n, arena = self.rng.choice((1, 2, 5)), self.rng.choice([g.arena for g in self.groups])
        evicted = self.each(lambda k, pool: pool.blocks.arena(arena).evict(n))
        assert len(set(evicted)) == 1, evicted

    def do_reset(self) -> None:
        if self.rng.random() < 0.05:
            self.each(lambda k, pool: pool.reset())
            self.rows.clear()
            self.idle, self.pending = list(range(len(self.plans))), []

    def do_truncate(self) -> None:
        if self.rows and self.rng.random() < 0.5:
            name = self.rng.choice(sorted(self.rows))
            length = self.rng.randrange(int(self.pools[0].num_tokens(name)) + 1)
            if self.each(lambda k, pool: pool.truncate(self.handles([name], k), [length])) is not None:
                handles, space, tokens = self.rows[name]
                tokens = tokens[:length] + [self.rng.randrange(3) for _ in tokens[length:]]
                self.rows[name] = (handles, space, tokens)


def live(pool: Any, known: dict[Any, Any]) -> dict[Any, Any]:
    """Fold the events of a pool into what it holds: (content key, group) -> what it said of it."""
    for name, key, *more in pool.prefix.events():
        if name == "stored":
            assert (key, more[4]) not in known, "stored twice"
            known[key, more[4]] = more
        elif name == "removed":
            del known[key, more[0]]
        else:
            assert name == "cleared" and (key is not None or not known)
    return known


def figures(pool: Any, arena: int) -> tuple[int, ...]:
    """What two pools must agree on in an arena."""
    stats = pool.stats(arena=arena)
    return stats.blank, stats.evictable, stats.limbo, stats.used, stats.shared


def agree(seed: int, make_pools: Callable[..., list[Any]], make_plan: Callable[..., Any], calls: int) -> None:
    """A program on two pools, which agree after every call in all that can be seen; `WrongContent`, AssertionError."""
    program = Program(seed, make_pools, make_plan)
    pools, held = program.pools, ({}, {})
    for word in program.run(calls):
        for pool in pools:
            pool.check()
        one, other = (pool.prefix.stats()._replace(reuse_gap=0.0) for pool in pools)
        assert one == other, (word, one, other)
        assert live(pools[0], held[0]) == live(pools[1], held[1]), word
        for arena in range(len(pools[1].arenas)):
            assert figures(pools[0], arena) == figures(pools[1], arena), (word, arena)
        for names, _, _ in program.rows.values():
            assert pools[0].num_tokens(names[0]) == pools[1].num_tokens(names[1]), word
