"""Random programs give what they gave when these numbers were written down: results, texts of refusals, digests.

Ranks compare digests, and logs keep texts, also over releases. No judge knows which ones are right, so a number of each
run is kept. Whoever changes one of them on purpose, or a word of the fuzzer, or adds a call, writes new numbers down:
``python -m tests.verify.test_recorded_runs``.
"""

import json
import random
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import kvpool
from tests.verify._verify import Run
from tests.verify.twin import TAG_SHIFT
from tests.verify.words import shape_of

NUMBERS = Path(__file__).with_name("recorded_runs.json")
SEEDS, WORDS, GUESSES = 64, 800, 1_500
PLANNED = ("step", "reserve", "unshare", "done", "rollback")  # calls whose first argument is a plan
#: Not guessed: what ends a pool, and what is of the machine or has bytes of an own layout.
NOT_CALLED = ("shutdown", "reset", "events", "nbytes", "stats", "usage", "pool", "options", "arena")
ODD = (None, True, 1.5, "x", b"a", (), [[1]], {}, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1)


def drawn(rng, handles, plans):
    """An argument: rows, ids, counts, plans, or what is none of these."""
    kinds = (lambda: rng.choice(handles[-3:]), lambda: rng.randrange(-1, 9), lambda: rng.choice(ODD[-5:]))
    one = kinds[rng.choice((0, 0, 0, 0, 1, 1, 1, 1, 2))]
    some = [one() for _ in range(rng.randrange(4))]
    return rng.choice((one(), one(), some, some, np.array([rng.randrange(9)] * 2), *plans, rng.choice(ODD)))


def guessed(pool, handles, rng):
    """Calls with arguments that are drawn without any sense, and what comes of them."""
    plans, parts = [kvpool.Plan(pool, 3, 24) for _ in range(2)], [pool, pool.blocks, pool.prefix]
    calls = [getattr(part, name) for part in parts for name in dir(part) if name[0] != "_" and name not in NOT_CALLED]
    for call in rng.choices([call for call in calls if callable(call)], k=GUESSES):
        handles.sort(key=pool.is_open)  # the last ones are open, if any are
        given = [drawn(rng, handles, plans) for _ in range(rng.randrange(1, 4))]
        given[:0] = [rng.choice(plans)] * (call.__name__ in PLANNED)
        try:
            found = call(*given)
            told = found.tolist() if isinstance(found, np.ndarray) else found
            handles += [found] * (call.__name__ == "open")
        except Exception as error:
            told = f"{type(error).__name__} {error if str(error).startswith('[') else ''}"
        yield f"{call.__name__} {told}"


def number_of(seed, pool_type=kvpool.Pool):
    """A number of all that a run is told: another one as soon as anything differs."""
    pools, trace = [], []

    def make_pool(*args, **options):
        pools.append(pool_type(*args, **options))
        return pools[-1]

    run = Run(shape_of(seed), make_pool, trace)
    run.run(WORDS)
    (pool,) = pools
    handles = [*{int(found): 0 for line in trace for found in re.findall(r"\d{16,18}", line)}][-64:]
    told = [*trace, *guessed(pool, handles, random.Random(seed)), f"{pool.digest()} {pool.fingerprint()}"]
    told = [re.sub(r"\d{16,18}", lambda found: str(int(found[0]) & (1 << TAG_SHIFT) - 1), line) for line in told]
    return zlib.crc32("\n".join(told).encode())


class Polite(kvpool.Pool):
    """A pool with another text."""

    def close(self, *args):
        try:
            super().close(*args)
        except ValueError as error:
            raise ValueError(f"{error}, please") from None


def numbers(*arguments):
    """Of all runs, in a process of its own: where thousands of pools were before, generations begin elsewhere."""
    command = [sys.executable, "-m", "tests.verify.test_recorded_runs", "print", *arguments]
    done = subprocess.run(command, cwd=NUMBERS.parents[2], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="texts of refusals name types as Linux does")
def test_runs_give_what_they_gave_and_something_else_where_a_text_differs():
    due = json.loads(NUMBERS.read_text())
    found = numbers()
    different = [seed for seed in range(SEEDS) if found[seed] != due[seed]]
    assert not different, "what writes new numbers down: see the top of this file"
    assert sum(one != other for one, other in zip(numbers("polite"), due, strict=True)) > 16


if __name__ == "__main__":
    made = [number_of(seed, Polite if "polite" in sys.argv else kvpool.Pool) for seed in range(SEEDS)]
    if "print" in sys.argv:
        print(json.dumps(made))
    else:
        NUMBERS.write_text(json.dumps(made) + "\n")
