"""A full group is the same group, whatever other groups there are; rows read what they must: the fuzzer judges it."""

import dataclasses
import random
import re

import pytest

from kvpool import Group, Plan, Pool
from tests.verify.run import whole
from tests.verify.words import faces, shape_of

MANY = 2048  # blocks: no run takes them all
FULL, TWO_FULL = [Group.full()], [Group.full(), Group.full(arena=1, num_blocks=MANY)]
WINDOW = [Group.full(), Group.window(1000, arena=1, num_blocks=MANY)]  # longer than every row
ROOM = {"num_blocks": MANY, "max_blocks_per_seq": 256}  # a limit would count what has left one group, not the other
BESIDE = {  # groups, words that programs do not have, options of their pools
    "none": (None, [], {}),  # with too few blocks at times
    "full": (TWO_FULL, ["evict", "resize"], ROOM),  # blocks of both leave, the older ones first
    "window": (WINDOW, ["load", "resize"], ROOM | {"prefix_cache": False}),  # it loads what a cache has
}
pytestmark = pytest.mark.parametrize("runs", [40, pytest.param(2_000, marks=pytest.mark.long)])


class Telling(Pool):
    """A pool that adds to the trace of a run what a plan shows of group 0, and the hit and the table of a new row."""

    def step(self, plan, *given, **options):
        super().step(plan, *given, **options)
        part = plan.groups[0]
        shown = part.block_tables, part.slot_mapping, part.kv_lens, part.copies, part.dirty_rows
        self.trace.append([array.tolist() for array in shown])

    def open(self, *given, **options):
        handle = super().open(*given, **options)
        self.trace.append((self.num_tokens(handle), self.capacity(handle), self.table(handle, 0).tolist()))
        return handle


def told(seed, groups, without, options):
    """The calls of a program for one full group with what they gave, but for what each pool has of its own."""
    r, shape = random.Random(f"agree {seed}"), shape_of(seed)
    pool = shape.pool | {"groups": FULL, "lookahead": 0, "events": 0, "prefix_cache": seed % 2 == 0} | options
    plans = tuple(plan | {"table_width": pool["max_blocks_per_seq"]} for plan in shape.plans)
    dice, texts = faces(r, pool["prefix_cache"], FULL, without), 8 * pool["prefix_cache"]
    with Telling(**pool | {"groups": groups}) as made:
        made.trace = []
        shape = dataclasses.replace(shape, pool=pool, plans=plans, dice=dice, texts=texts)
        finding = whole(made, shape, 60, made.trace)
        made.trace += [made.stats()]
    assert finding is None, f"{seed}: {finding}"
    lines = [re.sub(r"\d{16,}", lambda found: str(int(found[0]) & 0xFFFFF), f"{line}") for line in made.trace]
    return [re.sub(r"(generation|current) \d+|(?<=flush\().*", "", line) for line in lines]


@pytest.mark.parametrize(("groups", "without", "options"), BESIDE.values(), ids=BESIDE)
def test_full_group_beside_others_does_what_it_does_alone(runs, groups, without, options):
    for seed in range(runs):
        assert told(seed, groups, without, options) == told(seed, FULL, without, options), seed


def conversations(seed, groups):
    """The hits and tables of four prompts that only grow; each has a checkpoint at its cut."""
    r, found = random.Random(f"conversations {seed}"), []
    size, turns = r.choice([1, 2, 4]), [1] * 4
    texts = [[k, *(r.randrange(2) for _ in range(60))] for k in range(4)]
    with Pool(MANY, size, groups=groups, prefix_cache=True, max_seqs=32, seed=1) as pool:
        plan = Plan(pool, 1, 64)
        for k in r.choices(range(4), k=20):
            turns[k] = min(turns[k] + r.randrange(3), 40 // size)
            cut = turns[k] * size
            row = pool.open(texts[k][: cut + 1], cut=cut)
            hit = pool.num_tokens(row)
            found.append((hit, pool.table(row, 0).tolist()))
            pool.step(plan, [row], cut - hit)
            pool.done(plan)
            pool.prefix.commit(row, texts[k][hit:cut])
            if r.random() < 0.5:
                pool.close(row)
    return found


def test_window_with_a_checkpoint_at_every_cut_hits_as_a_full_group_does(runs):
    for seed in range(runs):
        assert conversations(seed, FULL) == conversations(seed, WINDOW), seed
