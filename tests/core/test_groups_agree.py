"""Random programs on two pools whose group 0 is a full group: it is the same group, whatever other groups there are.

The fuzzer (`tests/verify`) plays the same program on both, and judges what rows of group 0 read. Where blocks run out,
pools evict at different times, so there each kind of pool is held to the plain model.
"""

import dataclasses
import random
import re

import pytest

from kvpool import Group, Plan, Pool
from tests.verify._verify import Run
from tests.verify.run import finding_of
from tests.verify.twin import Twin
from tests.verify.words import faces, shape_of

MANY = 2048  # blocks: no run takes them all
FULL = [Group.full()]
TWO_FULL = [Group.full(), Group.full(arena=1, num_blocks=MANY)]
WINDOW = [Group.full(), Group.window(1000, arena=1, num_blocks=MANY)]  # longer than every row
RUNS = 100  # of each of 20 parts
WORDS_OF_A_RUN = 60
ROOM = {"num_blocks": MANY, "max_blocks_per_seq": 256}  # a limit would count what has left one group, not the other
PARTS = pytest.mark.parametrize("part", range(20))


def seeds(part):
    return range(RUNS * part, RUNS * (part + 1))


class Telling(Pool):
    """A pool that tells what a plan shows of group 0, and how long the hit of a prompt is."""

    trace: list

    def tell(self, plan):
        part = plan.groups[0]
        shown = part.block_tables, part.slot_mapping, part.kv_lens, part.copies, part.dirty_rows
        self.trace.append([array.ravel().tolist() for array in shown])

    def step(self, plan, *given, **options):
        super().step(plan, *given, **options)
        self.tell(plan)

    def reserve(self, plan, *given):
        super().reserve(plan, *given)
        self.tell(plan)

    def open(self, *given, **options):
        handle = super().open(*given, **options)
        self.trace.append((self.num_tokens(handle), self.capacity(handle), self.table(handle, 0).ravel().tolist()))
        return handle


def told(shape, groups):
    """What a program is told by a pool of these groups, and its end; handles without what differs from pool to pool."""
    pool, trace = Telling(**shape.pool | {"groups": groups}), []
    pool.trace = trace
    run = Run(shape, lambda **options: pool, trace)
    finding = finding_of(lambda: run.run(WORDS_OF_A_RUN))
    end = pool.digest(), pool.fingerprint(), pool.stats()
    run.shutdown()
    assert finding is None, f"{shape.seed}: {finding}"
    lines = [re.sub(r"\d{16,}", lambda found: str(int(found[0]) & 0xFFFFF), f"{line}") for line in trace]
    return [re.sub(r"(generation|current) \d+|(?<=flush\().*", "", line) for line in lines], end


def program(seed, without=(), **options):
    """A run of the fuzzer on a pool of one full group."""
    r, shape = random.Random(f"agree {seed}"), shape_of(seed)
    pool = shape.pool | {"groups": FULL, "lookahead": 0, "events": 0, "prefix_cache": seed % 2 == 0} | options
    plans = tuple(plan | {"table_width": pool["max_blocks_per_seq"]} for plan in shape.plans)
    dice, texts = faces(r, pool["prefix_cache"], FULL, without), 8 * pool["prefix_cache"]
    return dataclasses.replace(shape, pool=pool, plans=plans, dice=dice, texts=texts)


@PARTS
def test_pool_without_groups_is_a_pool_of_one_full_group(part):
    """Whatever they are asked, with too few blocks at times."""
    for seed in seeds(part):
        assert told(program(seed), None) == told(program(seed), FULL), seed


@PARTS
def test_second_full_group_changes_nothing_in_the_first(part):
    for seed in seeds(part):
        shape = program(seed, ["evict", "resize"], **ROOM)  # blocks of both leave, the older ones first
        assert told(shape, FULL)[0] == told(shape, TWO_FULL)[0], seed


@PARTS
def test_window_longer_than_every_row_changes_nothing_in_a_full_group(part):
    for seed in seeds(part):
        shape = program(seed, ["load", "resize"], prefix_cache=False, **ROOM)  # a window loads what a cache has
        assert told(shape, FULL)[0] == told(shape, WINDOW)[0], seed


@PARTS
def test_window_with_a_checkpoint_at_every_cut_hits_as_a_full_group_does(part):
    """Prompts that only grow, each computed and committed up to its cut; nothing is shared between them."""
    for seed in seeds(part):
        r = random.Random(f"conversations {seed}")
        size, turns = r.choice([1, 2, 4]), [1] * 4
        texts = [[k, *(r.randrange(2) for _ in range(60))] for k in range(4)]
        pools = [Pool(MANY, size, groups=groups, prefix_cache=True, max_seqs=8, seed=1) for groups in (FULL, WINDOW)]
        plans, rows = [Plan(pool, 1, 64) for pool in pools], []
        for _ in range(20):
            k = r.randrange(4)
            turns[k] = min(turns[k] + r.randrange(3), 40 // size)
            text, cut = texts[k][: turns[k] * size + 1], turns[k] * size
            rows.append([pool.open(text, b"", cut) for pool in pools])
            found = [pool.num_tokens(row) for pool, row in zip(pools, rows[-1], strict=True)]
            for pool, plan, row in zip(pools, plans, rows[-1], strict=True):
                if found[0] < cut:
                    pool.step(plan, [row], cut - found[0])
                    pool.done(plan)
                    pool.prefix.commit(row, text[found[0] : cut])
            tables = [pool.table(row, 0).tolist() for pool, row in zip(pools, rows[-1], strict=True)]
            assert found[0] == found[1] and tables[0] == tables[1], seed
            closed = rows.pop(r.randrange(len(rows))) if len(rows) > 4 else [pool.open() for pool in pools]
            is_flushed = r.random() < 0.03
            for pool, row in zip(pools, closed, strict=True):
                pool.close(row)
                if is_flushed:
                    pool.prefix.flush()


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
