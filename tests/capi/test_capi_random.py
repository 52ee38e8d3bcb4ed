"""Random programs on two pools, by Python's calls and by C's: same results, refusals and digests after every call."""

import ctypes
import random
import re

import numpy as np
import pytest
from capi_table import KV_TO_PYTHON, C, call, message

from kvpool import Plan, Pool

PROGRAMS, CALLS = 24, 200
NAMES = [b"", b"tenant"]
WEIGHTS = {
    "open": 3, "open_prompt": 4, "fork": 2, "truncate": 2, "close": 2, "commit": 3, "step": 10, "step_padded": 2,
    "reserve": 2, "done": 8, "rollback": 2,
}  # fmt: skip


class ByPython:
    def __init__(self, **options):
        self.pool = Pool(24, 4, max_seqs=6, max_blocks_per_seq=8, seed=3, prefix_cache=True, **options)
        self.plans = [Plan(self.pool, 4, 24), Plan(self.pool, 3, 16, table_width=5)]

    def open(self, tokens):
        return self.pool.open(tokens)

    def open_prompt(self, prompt, name):
        handle = self.pool.open(prompt, name)
        return handle, self.pool.num_tokens(handle)

    def fork(self, handle, n):
        return self.pool.fork(handle, n).tolist()

    def truncate(self, handles, lens):
        self.pool.truncate(handles, lens)

    def close(self, handles):
        self.pool.close(handles)

    def commit(self, handles, counts, tokens):
        self.pool.prefix.commit(handles, tokens, counts)

    def step(self, plan, handles, num_new, partial):
        self.pool.step(self.plans[plan], handles, num_new, partial=partial)

    def step_padded(self, plan, handles, num_new, pad_to):
        self.pool.step(self.plans[plan], handles, num_new, pad_to=pad_to)

    def reserve(self, plan, handles, num_new):
        self.pool.reserve(self.plans[plan], handles, num_new)

    def done(self, plan):
        self.pool.done(self.plans[plan])

    def rollback(self, plan):
        self.pool.rollback(self.plans[plan])


class Refused(Exception):
    """A status that is not 0."""


def checked(name, *arguments):
    status = call(name, *arguments)
    if status:
        raise Refused(KV_TO_PYTHON[status], message())


class ByC(ByPython):
    def open(self, tokens):
        handle = ctypes.c_int64()
        checked("open", self.pool, tokens, handle)
        return handle.value

    def open_prompt(self, prompt, name):
        handle, cached = ctypes.c_int64(), ctypes.c_int64()
        memory = ctypes.create_string_buffer(name)
        checked("open_prompt", self.pool, prompt, len(prompt), memory, len(name), handle, cached)
        return handle.value, cached.value

    def fork(self, handle, n):
        children = np.zeros(max(n, 1), np.int64)
        checked("fork", self.pool, handle, n, children)
        return children[:n].tolist()

    def truncate(self, handles, lens):
        checked("truncate", self.pool, handles, lens, len(handles))

    def close(self, handles):
        checked("close", self.pool, handles, len(handles))

    def commit(self, handles, counts, tokens):
        checked("commit", self.pool, handles, counts, len(handles), tokens, len(tokens))

    def step(self, plan, handles, num_new, partial):
        checked("step", self.pool, self.plans[plan], handles, num_new, len(handles), C["KVPOOL_PARTIAL"] * partial)

    def step_padded(self, plan, handles, num_new, pad_to):
        checked("step_padded", self.pool, self.plans[plan], handles, num_new, len(handles), 0, *pad_to)

    def reserve(self, plan, handles, num_new):
        checked("reserve", self.pool, self.plans[plan], handles, num_new, len(handles))

    def done(self, plan):
        checked("done", self.pool, self.plans[plan])

    def rollback(self, plan):
        checked("rollback", self.pool, self.plans[plan])


def make_call(rng, known):
    """Return a name and arguments; a list of ints stands for places in the list of known handles."""
    name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    rows = [rng.randrange(max(0, known - 7), known) for _ in range(rng.randint(0, 4))] if known else []
    if rng.random() < 0.9:
        rows = sorted(set(rows))
    few = np.array([rng.choice([1, 1, 1, 2, 5, 0, -1]) for _ in rows], np.int64)
    tokens = np.array([7] * rng.randint(0, 20), np.int32)
    plan = rng.randrange(2)
    return name, {
        "open": [rng.choice([0, 1, 9, 40, 20])],
        "open_prompt": [tokens, rng.choice(NAMES)],
        "fork": [rows[:1], rng.choice([0, 1, 2, 9])],
        "truncate": [rows, few],
        "close": [rows],
        "commit": [rows, np.minimum(few, 4), tokens[: rng.choice([0, 1, 2, 4])]],
        "step": [plan, rows, few, rng.random() < 0.3],
        "step_padded": [plan, rows, few, (rng.randint(0, 5), rng.randint(0, 30))],
        "reserve": [plan, rows, few],
        "done": [plan],
        "rollback": [plan],
    }[name]


def outcome(side, handles, name, arguments):
    """Make a call; return its result without handles, or what was refused, and remember handles that it made."""
    given = [np.array([handles[k] for k in a], np.int64) if isinstance(a, list) else a for a in arguments]
    if name == "fork":
        given[0] = int(given[0][0]) if len(given[0]) else -1
    try:
        result = getattr(side, name)(*given)
    except Refused as error:
        kind, words = error.args
    except Exception as error:
        kind, words = type(error), str(error)
    else:
        made = [result] if name == "open" else result[:1] if name == "open_prompt" else result or []
        handles.extend(made)
        return [h & 0xFFFFF for h in made], result[1] if name == "open_prompt" else None
    words = re.sub(r"(generation|current) \d+", r"\1", words)  # they begin elsewhere in every pool
    return kind, re.sub(r"\d{9,}", "handle", re.sub(r"^\[\w+\] ", "", words))


def compare(seed, *kinds):
    rng = random.Random(seed)
    sides = [kind(in_order=seed % 4 == 0) for kind in kinds]
    handles, done = ([], []), 0
    for number in range(CALLS):
        name, arguments = make_call(rng, len(handles[0]))
        python, c = (outcome(side, own, name, arguments) for side, own in zip(sides, handles, strict=True))
        assert python == c, (number, name, arguments)
        assert sides[0].pool.digest() == sides[1].pool.digest(), (number, name, arguments)
        done += isinstance(python[0], list)
    for side in sides:
        side.pool.check()
    assert sides[0].pool.fingerprint() == sides[1].pool.fingerprint()
    assert CALLS // 5 < done < CALLS  # neither does everything succeed, nor nothing


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program_gives_the_same_by_both_ways(seed):
    compare(seed, ByPython, ByC)


def test_comparison_notices_a_call_that_does_something_else():
    class Wrong(ByC):
        def reserve(self, plan, handles, num_new):
            self.step(plan, handles, num_new, False)

    with pytest.raises(AssertionError):
        for seed in range(PROGRAMS):
            compare(seed, ByPython, Wrong)
