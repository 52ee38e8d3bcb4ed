"""Random calls on two pools whose group 0 is a full group: it is the same group, whatever other groups there are.

Contents are judged without the pools: a memory of one number per slot, and the tokens that each row must have. Where
blocks run out, pools evict at different times, so there each kind of pool is held to the plain model.
"""

import dataclasses
import random

import numpy as np
import pytest

from kvpool import Group, KVPoolError, Plan, Pool
from tests.verify._verify import Run
from tests.verify.run import finding_of
from tests.verify.twin import Twin
from tests.verify.words import faces, shape_of

MANY = 2048  # blocks: no run takes them all
LONGEST = 60  # tokens of a row
FULL = [Group.full()]
TWO_FULL = [Group.full(), Group.full(arena=1, num_blocks=MANY)]
WINDOW = [Group.full(), Group.window(4 * LONGEST, arena=1, num_blocks=MANY)]  # longer than every row
RUNS = 100  # of each of 20 parts
WORDS_OF_A_RUN = 60  # beside the plain model, which is slow


class Side:
    """A pool, the memory of its group 0, and plans that are executed when they are done."""

    def __init__(self, groups, **options):
        self.pool = Pool(groups=groups, max_seqs=10, seed=1, **options)
        self.plans = [Plan(self.pool, 6, 64, formats=("block_tables", "seq_lens", "slot_mapping")) for _ in range(3)]
        self.first = self.pool.open()
        self.pool.close(self.first)
        self.kv = np.full(self.pool.num_blocks * self.pool.block_size, -1)

    def arrays(self, number):
        part = self.plans[number].groups[0]
        shown = part.block_tables, part.slot_mapping, part.kv_lens, part.copies, part.dirty_rows
        return [array.tolist() for array in shown]

    def execute(self, copies, slots, tokens):
        size = self.pool.block_size
        for src, dst, n in copies * [size, size, 1]:
            self.kv[dst : dst + n] = self.kv[src : src + n]
        self.kv[slots] = tokens

    def read(self, handle, length):
        slots = self.pool.table(handle, 0) * self.pool.block_size + np.arange(self.pool.block_size)
        return self.kv[slots.ravel()[:length]].tolist()

    def row(self, handle):
        pool = self.pool
        known = pool.prefix.committed(handle) if pool.prefix else 0
        table = pool.table(handle, 0).ravel().tolist()
        return pool.num_tokens(handle), pool.kv_len(handle, 0), pool.capacity(handle), known, table


@dataclasses.dataclass(eq=False)
class Row:
    """A sequence of both pools, the same number behind the first handle of each."""

    number: int
    text: list  # the tokens that it is to have, by position
    held: list  # those that group 0 has
    cut: int = 0  # of its prompt
    waits: set = dataclasses.field(default_factory=set)  # plans that have still to write them


@dataclasses.dataclass(eq=False)
class Flight:
    """A pending plan of both pools."""

    number: int
    work: list  # copies and slots in each pool
    tokens: list
    rows: list  # and how many tokens each held before


class Twins:
    """Two pools that get the same calls. `same`: they agree in everything, not only in group 0."""

    def __init__(self, seed, groups, same=False, **options):
        self.r = r = random.Random(seed)
        options = {
            "block_size": r.choice([1, 2, 4]),
            "in_order": r.random() < 0.3,
            "max_blocks_per_seq": 128,
            **options,
        }
        options.setdefault("num_blocks", r.randint(16, 120))
        self.sides, self.same = [Side(each, **options) for each in groups], same
        self.cached = options["prefix_cache"]
        self.rows, self.pending = [], []
        self.texts = [[r.randrange(2) for _ in range(2 * LONGEST)] for _ in range(4)]

    def both(self, call):
        """The result of a call in both pools, None if it was refused."""
        said = []
        for side in self.sides:
            try:
                said.append((call(side), None))
            except (KVPoolError, ValueError) as error:
                said.append((None, type(error)))
        assert said[0] == said[1]
        return said[0][0]

    def handle(self, side, row):
        return side.first + row.number

    def length(self, row):
        return self.sides[0].pool.num_tokens(self.handle(self.sides[0], row))

    def opened(self, number, text, cut=0):
        """A row that `open` made: its hit must be what it asked for."""
        if number is not None:
            length = self.sides[0].pool.num_tokens(self.sides[0].first + number)
            self.rows.append(Row(number, text, text[:length], cut))

    def open(self):
        text, n = self.r.choice(self.texts), self.r.randrange(30)
        asked = text[:n] if self.r.random() < 0.8 else n
        self.opened(self.both(lambda side: side.pool.open(asked) - side.first), text)

    def issue(self, call, rows, counts):
        """A step, reserve or unshare of a plan that is not pending."""
        idle = [k for k in range(3) if k not in [flight.number for flight in self.pending]]
        if not idle or any(self.length(row) > LONGEST for row in rows):
            return
        number = idle[0]

        def issued(side):
            plan, handles = side.plans[number], [self.handle(side, row) for row in rows]
            getattr(side.pool, call)(plan, handles, counts)
            return side.arrays(number) if call != "unshare" else side.arrays(number)[3:]

        if self.both(issued) is None:
            return
        new = [row.text[(n := self.length(row)) - k : n] for row, k in zip(rows, counts, strict=True) if call == "step"]
        work = [(s.plans[number].groups[0].copies.copy(), s.plans[number].groups[0].slot_mapping[0].copy())
                for s in self.sides]  # fmt: skip
        flight = Flight(number, work, [token for each in new for token in each], [(r, len(r.held)) for r in rows])
        self.pending.append(flight)
        for row, tokens in zip(rows, new or [[]] * len(rows), strict=True):
            row.held += tokens
            row.waits.add(flight)
        if self.sides[0].pool.options.in_order:
            self.end(0)

    def end(self, at, done=True):
        """A plan is through: it is executed, unless it was rolled back."""
        flight = self.pending.pop(at)
        for row in self.rows:
            row.waits.discard(flight)
        for row, length in () if done else flight.rows:
            del row.held[length:]
        for side, (copies, slots) in zip(self.sides, flight.work if done else [], strict=done):
            side.execute(copies, slots[: len(flight.tokens)], flight.tokens)

    def some(self):
        return self.r.sample(self.rows, min(len(self.rows), self.r.randint(1, 3)))

    def step(self):
        rows = self.some()
        self.issue("step", rows, [self.r.choice([0, 1, 1, 3, 9]) for _ in rows])

    def reserve(self):
        rows = self.some()
        self.issue("reserve", rows, [self.r.randrange(9) for _ in rows])

    def unshare(self):
        rows = self.some()
        self.issue("unshare", rows, [self.r.randrange(len(row.held) + 1) for row in rows])

    def done(self):
        if self.pending:
            number = self.pending[0].number
            self.both(lambda side: side.pool.done(side.plans[number]))
            self.end(0)

    def rollback(self):
        if self.pending:
            number = self.pending[-1].number
            if self.both(lambda side: side.pool.rollback(side.plans[number]) or True):
                self.end(-1, done=False)

    def fork(self):
        row = self.r.choice(self.rows)
        found = self.both(lambda side: [int(h) - side.first for h in side.pool.fork(self.handle(side, row), 1)])
        for number in found or []:
            self.rows.append(Row(number, row.text, list(row.held), row.cut, set(row.waits)))

    def close(self):
        row = self.r.choice(self.rows)
        self.rows.remove(row)
        self.both(lambda side: side.pool.close(self.handle(side, row)))

    def truncate(self):
        row = self.r.choice(self.rows)
        length = self.length(row)
        to = max(row.cut, length - self.r.randrange(9))
        if self.both(lambda side: side.pool.truncate(self.handle(side, row), to) or True):
            del row.held[len(row.held) - max(length - to, 0) :]

    def compact(self):
        row = self.r.choice(self.rows)
        left = self.r.randrange(len(row.held) + 1)
        if self.both(lambda side: side.pool.compact(self.handle(side, row), left) or True):
            del row.held[left:]

    def evict_blocks(self):
        row, size = self.r.choice(self.rows), self.sides[0].pool.block_size
        indices = [k for k in range(4) if self.r.random() < 0.3]
        if self.both(lambda side: side.pool.evict_blocks(self.handle(side, row), indices) or True):
            for k in reversed(indices):
                del row.held[k * size : (k + 1) * size]

    def commit(self):
        row = self.r.choice(self.rows)
        length, _, _, known, _ = self.sides[0].row(self.handle(self.sides[0], row))
        tokens = row.text[known : self.r.choice([length, length, known + self.r.randrange(12)])]
        self.both(lambda side: side.pool.prefix.commit(self.handle(side, row), tokens))

    def flush(self):
        self.both(lambda side: side.pool.prefix.flush() is None)

    def compare(self):
        """Rows are alike and read as they must; so do hits, and, in pools that are the same, all that is counted."""
        for row in self.rows:
            self.both(lambda side, row=row: side.row(self.handle(side, row)))
            if not row.waits:
                for side in self.sides:
                    assert side.pool.kv_len(self.handle(side, row), 0) == len(row.held)
                    assert side.read(self.handle(side, row), len(row.held)) == row.held
        for text in self.texts if self.cached else ():
            self.both(lambda side, text=text: side.pool.prefix.match(text[:40]))
        if self.same:
            self.both(lambda side: (side.pool.stats(), side.pool.prefix and side.pool.prefix.stats()))
            self.both(lambda side: (side.pool.digest(), side.pool.fingerprint()))
            self.both(lambda side: side.pool.prefix and side.pool.prefix.events())

    def run(self, words, calls=60):
        for _ in range(calls):
            word = self.r.choice(words) if self.rows else "open"
            if word != "fork" or len(self.rows) < 6:
                getattr(self, word)()
            self.compare()
        while self.pending:
            self.done()
        for _ in self.rows[:]:
            self.close()
        self.compare()
        for side in self.sides:
            side.pool.check()
            side.pool.shutdown()


WORDS = [*["open", "step", "step", "done"] * 3, "rollback", "reserve", "fork", "close", "close", "truncate"]
EVICTING = [*WORDS, "unshare", "compact", "evict_blocks"]
CACHED = [*WORDS, *["commit"] * 6]
EVERYTHING = [*CACHED * 4, *["unshare"] * 6, *["compact", "evict_blocks"] * 2, "flush"]
PARTS = pytest.mark.parametrize("part", range(20))


def seeds(part):
    return range(RUNS * part, RUNS * (part + 1))


@PARTS
def test_pool_without_groups_is_a_pool_of_one_full_group(part):
    """Whatever they are asked, with too few blocks at times."""
    for seed in seeds(part):
        cached = seed % 2 == 0
        options = {"prefix_cache": True, "events": 64} if cached else {"prefix_cache": False}
        Twins(seed, [None, FULL], same=True, **options).run(EVERYTHING if cached else EVICTING)


@PARTS
@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
def test_second_full_group_changes_nothing_in_the_first(part, cached):
    for seed in seeds(part):
        Twins(seed, [FULL, TWO_FULL], num_blocks=MANY, prefix_cache=cached).run(EVERYTHING if cached else EVICTING)


@PARTS
def test_window_longer_than_every_row_changes_nothing_in_a_full_group(part):
    for seed in seeds(part):
        Twins(seed, [FULL, WINDOW], num_blocks=MANY, prefix_cache=False).run(EVICTING)


class Conversations(Twins):
    """Prompts that only grow, each computed and committed up to its cut: there a window has a checkpoint, too."""

    def open(self):
        size = self.sides[0].pool.block_size
        text = self.r.choice(self.texts)
        turns = self.turns = getattr(self, "turns", {})
        turns[id(text)] = k = min(turns.get(id(text), 1) + self.r.randrange(3), 40 // size)
        number = self.both(lambda side: side.pool.open(text[: k * size + 1], b"", k * size) - side.first)
        self.opened(number, text, k * size)

    def step(self):
        """A row that is short of its cut ends exactly there."""
        rows = self.some()
        self.issue("step", rows, [row.cut - len(row.held) if len(row.held) < row.cut else self.r.randrange(4)
                                  for row in rows])  # fmt: skip

    def commit(self):
        row = self.r.choice(self.rows)
        known = self.sides[0].row(self.handle(self.sides[0], row))[3]
        if known < row.cut:
            self.both(lambda side: side.pool.prefix.commit(self.handle(side, row), row.text[known : row.cut]))

    def fork(self):
        """Not of a row that has still to publish its checkpoint: a child has none."""
        if all(self.sides[0].row(self.handle(self.sides[0], row))[3] >= row.cut for row in self.rows):
            super().fork()


@PARTS
def test_window_with_a_checkpoint_at_every_cut_hits_as_a_full_group_does(part):
    for seed in seeds(part):
        twins = Conversations(seed, [FULL, WINDOW], num_blocks=MANY, prefix_cache=True)
        twins.texts = [[k, *text] for k, text in enumerate(twins.texts)]  # nothing is shared between texts
        twins.run([*CACHED * 4, "flush"])


def tiny(seed, groups):
    """A run of the fuzzer on a pool whose prefix cache has to let go soon; groups by name, or none."""
    r, shape = random.Random(f"tiny {seed}"), shape_of(seed)
    window = Group.window(r.randint(1, 3 * shape.pool["block_size"]))
    made = [{"full": Group.full(), "window": window}[name] for name in groups] or None
    pool = shape.pool | {
        "num_blocks": shape.pool["reserved_blocks"] + r.randint(4, 10) * max(1, len(groups)),
        "max_blocks_per_seq": r.choice([4, 8]),
        "watermark": 0,
        "lookahead": 0,
        "prefix_cache": True,
        "groups": made,
    }
    return dataclasses.replace(shape, pool=pool, texts=8, dice=faces(r, True, made, ()))


@PARTS
@pytest.mark.parametrize("groups", [(), ("full", "full"), ("full", "window")], ids=["none", "two full", "window"])
def test_pool_that_evicts_does_what_the_plain_model_does(part, groups):
    """In hits, lengths, tables and counts; and rows read what they must."""
    evicting = 0
    for seed in seeds(part):
        pools = []
        run = Run(tiny(seed, groups), lambda pools=pools, **options: pools.append(Twin(**options)) or pools[0])
        finding = finding_of(lambda run=run: run.run(WORDS_OF_A_RUN))
        evicting += pools[0].stats().evictions > 0
        run.shutdown()
        assert finding is None, f"seed {seed}: {finding}"
    assert evicting > RUNS // 5, "few runs met an eviction"
