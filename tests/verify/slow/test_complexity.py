"""Instructions of random programs, counted by callgrind: in a pool of a million blocks they take those of a small one.

All blocks of a pool but a few are taken before, so a program of the fuzzer does the same in pools of any size. Counts
do not depend on caches, clocks or neighbours. ``python -m tests.verify.slow.test_complexity`` is what is counted.
"""

import gc
import json
import sys
from dataclasses import replace

import pytest

from benchmarks import callgrind
from kvpool import Group, Pool
from tests.verify._verify import Run
from tests.verify.words import FULL_ONLY, shape_of
from tests.verify.wrapped import Wrapped

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not callgrind.is_here(), reason="valgrind counts the instructions, and is not here"),
]
SEEDS, WORDS, WITHIN = (3, 6, 10, 13), 800, 0.05
TAKEN, FEW_TAKEN, GROUPS = (1_000, 30_000, 1_000_000), (1_000, 100_000), (1, 2, 4, 8)


class Counted(Wrapped):
    """A pool whose calls are counted. `taken` blocks of it are no part of the program."""

    taken, marks = 0, None

    def made(self, name, call, given, options, part=None):
        self.marks.count_toggle()
        try:
            return call(*given, **options)
        finally:
            self.marks.count_toggle()

    def check(self):
        """It looks at every block, as `fingerprint` does, and nobody counts it."""

    def fingerprint(self):
        return 0

    def stats(self, arena=0):
        found = Pool.stats(self, arena)
        return found._replace(used=found.used - (0 if arena else self.taken))


class Careless(Counted):
    """Looks at the whole pool in every fork."""

    def fork(self, handle, n=1):
        return self.made("fork", lambda: (Pool.fork(self, handle, n), Pool.fingerprint(self))[0], (), {})


def shape(seed, taken, num_groups):
    """The run of a seed in a pool with so many blocks more; or on so many equal windows, without a prefix cache."""
    found = shape_of(seed, ("reset", "flush", *(FULL_ONLY if num_groups else ())))  # these look at the whole pool
    pool = found.pool
    if num_groups:
        groups = [Group.window(4 * pool["block_size"], block_size=pool["block_size"])] * num_groups
        pool |= {"groups": groups, "num_blocks": 100 * num_groups, "watermark": 0, "lookahead": 0}
    return replace(found, pool=pool | {"num_blocks": pool["num_blocks"] + taken})


def count(kind, cases):
    """Under callgrind: dump the instructions of each case, and tell what was met."""
    Counted.marks = callgrind.marks()
    Counted.marks.count_prepare()
    gc.disable()
    for seed, taken, num_groups in [cases[0], *cases]:  # Python rewrites the code of a function in its first runs

        def make_pool(taken=taken, **options):
            pool = kind(**options)
            Pool.blocks.__get__(pool).alloc(taken)
            pool.taken = taken
            return pool

        run = Run(shape(seed, taken, num_groups), make_pool)
        run.run(WORDS)
        met = {name: times for name, times in run.facts()[1].items() if name in ("calls", "refused", "hits")}
        Counted.marks.count_dump(json.dumps([seed, taken, num_groups, met]).encode())
        run.shutdown()


def counted(cases, kind="Counted"):
    """Instructions of each case, and what it met."""
    command = ("-m", "tests.verify.slow.test_complexity", kind, json.dumps(cases))
    found = {}
    for mark, counts in callgrind.counted(*command, PYTHONHASHSEED="0").items():
        *case, met = json.loads(mark)
        found[tuple(case)] = counts[-1], met
    return found


def grown(found):
    """How much more a program takes in the pool where it takes most. It did the same in all."""
    counts, met = zip(*found.values(), strict=True)
    assert all(one == met[0] for one in met), found
    return max(counts) / min(counts) - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_program_takes_the_same_in_every_size_of_pool(seed):
    found = counted([(seed, taken, 0) for taken in TAKEN])
    print(found)
    assert grown(found) <= WITHIN


def test_group_takes_the_same_as_another():
    found = counted([(4, 1_000, n) for n in GROUPS])
    print(found)
    one, _, half, many = (found[4, 1_000, n][0] for n in GROUPS)
    assert (many - half) / 4 <= (half - one) / 3 * (1 + WITHIN)


def test_call_that_looks_at_the_whole_pool_is_detected():
    assert grown(counted([(SEEDS[0], taken, 0) for taken in FEW_TAKEN], "Careless")) > WITHIN


if __name__ == "__main__":
    count({"Counted": Counted, "Careless": Careless}[sys.argv[1]], [tuple(case) for case in json.loads(sys.argv[2])])
