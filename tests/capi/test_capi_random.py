"""Random programs on two pools, by Python and by C: same results, refusals, arrays and digests, call by call.

Of pools with one layer group and with several.
"""

import ctypes
import random
import re

import numpy as np
import pytest
from capi_table import KV_TO_PYTHON, Array, C, call, message

from kvpool import Group, Plan, Pool

PROGRAMS, CALLS = 24, 200
NAMES = [b"", b"tenant"]
WEIGHTS = {
    "open": 3, "open_prompt": 4, "fork": 2, "truncate": 2, "close": 2, "commit": 3, "step": 10, "step_padded": 2,
    "reserve": 2, "done": 8, "rollback": 2,
}  # fmt: skip


FORMATS = {
    "block_tables": "block_tables", "seq_lens": "seq_lens", "slot_mapping": "slot_mapping", "positions": "positions",
    "cu_q_lens": "cu_q_lens", "indptr": "csr", "indices": "csr", "last_page_len": "csr", "slot_ids": "slot_ids",
}  # fmt: skip
COMMON = ("positions", "cu_q_lens", "slot_ids", "served", "handles")
OF_BLOCKS = {name: name for name in (*FORMATS, "copies", "dirty_rows") if name not in COMMON} | {"seq_lens": "kv_lens"}
OF_KIND = {  # name of the C interface -> attribute of a plan's group
    "full": OF_BLOCKS,
    "window": OF_BLOCKS | {"kv_starts": "kv_starts"},
    "state": {"seq_lens": "kv_lens", "state_src": "state_src", "state_dst": "state_dst"},
}
SEVERAL = [Group.full(columns=2), Group.window(6), Group.state(16, blocks=2)]


class Side:
    """A pool and its plans."""

    def __init__(self, **options):
        blocks = 72 if options.get("groups") else 24
        self.pool = Pool(blocks, 4, max_seqs=6, max_blocks_per_seq=8, seed=3, prefix_cache=True, **options)
        every = {"formats": sorted(set(FORMATS.values())), "dtype": {"positions": "int64"}}
        self.plans = [Plan(self.pool, 4, 24, **every), Plan(self.pool, 3, 16, table_width=5)]


def open_by_python(side, prompt, name):
    handle = side.pool.open(prompt, name)
    return handle, side.pool.num_tokens(handle)


BY_PYTHON = {
    "open": lambda side, tokens: side.pool.open(tokens),
    "open_prompt": open_by_python,
    "fork": lambda side, handle, n: side.pool.fork(handle, n).tolist(),
    "truncate": lambda side, handles, lens: side.pool.truncate(handles, lens),
    "close": lambda side, handles: side.pool.close(handles),
    "commit": lambda side, handles, counts, tokens: side.pool.prefix.commit(handles, tokens, counts),
    "step": lambda side, plan, rows, new, partial: side.pool.step(side.plans[plan], rows, new, partial=partial),
    "step_padded": lambda side, plan, rows, new, pad_to: side.pool.step(side.plans[plan], rows, new, pad_to=pad_to),
    "reserve": lambda side, plan, rows, new: side.pool.reserve(side.plans[plan], rows, new),
    "done": lambda side, plan: side.pool.done(side.plans[plan]),
    "rollback": lambda side, plan: side.pool.rollback(side.plans[plan]),
}


class Refused(Exception):
    """A status that is not 0."""


def checked(name, *arguments):
    status = call(name, *arguments)
    if status:
        raise Refused(KV_TO_PYTHON[status], message())


def open_by_c(side, tokens):
    handle = ctypes.c_int64()
    checked("open", side.pool, tokens, handle)
    return handle.value


def open_prompt_by_c(side, prompt, name):
    handle, cached = ctypes.c_int64(), ctypes.c_int64()
    memory = ctypes.create_string_buffer(name)
    checked("open_prompt", side.pool, prompt, len(prompt), memory, len(name), handle, cached)
    return handle.value, cached.value


def fork_by_c(side, handle, n):
    children = np.zeros(max(n, 1), np.int64)
    checked("fork", side.pool, handle, n, children)
    return children[:n].tolist()


def plan_by_c(name):
    """A step or a reservation; `more` is whether it may be partial, or what it is padded to."""

    def make(side, plan, rows, new, *more):
        flags = [C["KVPOOL_PARTIAL"] * more[0]] if name == "step" else [0, *more[0]] if more else []
        checked(name, side.pool, side.plans[plan], rows, new, len(rows), *flags)

    return make


BY_C = {
    "open": open_by_c,
    "open_prompt": open_prompt_by_c,
    "fork": fork_by_c,
    "truncate": lambda side, handles, lens: checked("truncate", side.pool, handles, lens, len(handles)),
    "close": lambda side, handles: checked("close", side.pool, handles, len(handles)),
    "commit": lambda side, handles, counts, tokens: checked(
        "commit", side.pool, handles, counts, len(handles), tokens, len(tokens)
    ),
    **{name: plan_by_c(name) for name in ("step", "step_padded", "reserve")},
    "done": lambda side, plan: checked("done", side.pool, side.plans[plan]),
    "rollback": lambda side, plan: checked("rollback", side.pool, side.plans[plan]),
}


def shown(plan, name, group=None):
    """Return an array of a plan, or of a group of it, as the C interface gives it."""
    array = Array()
    form = ["array", plan] if group is None else ["group_array", plan, group]
    assert call(*form, C[f"KVPOOL_{name.upper()}"], array) == 0
    code = {1: np.uint8, 4: np.int32, 8: np.int64}[array.itemsize]
    size = array.length * array.width
    flat = np.ctypeslib.as_array((np.ctypeslib.as_ctypes_type(code) * size).from_address(array.data)) if size else []
    return np.array(flat, code).reshape((array.length, array.width) if array.width > 1 else (array.length,))


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


def outcome(side, calls, handles, name, arguments):
    """Make a call; return its result without handles, or what was refused, and remember handles that it made."""
    given = [np.array([handles[k] for k in a], np.int64) if isinstance(a, list) else a for a in arguments]
    if name == "fork":
        given[0] = int(given[0][0]) if len(given[0]) else -1
    try:
        result = calls[name](side, *given)
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


def same_arrays(python, c):
    """Each array of a plan, as Python shows it and as the C interface gives it of the other pool's plan."""
    for name in COMMON:
        expected = getattr(python, name)
        for found in [shown(c, name), *(shown(c, name, group) for group in range(len(c.groups)))]:
            if name == "handles":
                expected, found = expected & 0xFFFFF, found & 0xFFFFF  # their tags differ
            assert found.tolist() == expected.tolist() and found.dtype == expected.dtype, name
    for number, (part, kind) in enumerate(zip(python.groups, c.pool.options.groups, strict=True)):
        for name, shown_as in OF_KIND[kind.kind].items():
            expected, found = getattr(part, shown_as), shown(c, name, number)
            assert found.ravel().tolist() == expected.ravel().tolist() and found.dtype == expected.dtype, name
            if len(c.groups) == 1:
                assert shown(c, name).tolist() == getattr(python, name).tolist(), name


def compare(seed, *ways, groups=None):
    rng = random.Random(seed)
    sides = [Side(in_order=seed % 4 == 0, groups=groups) for _ in ways]
    handles, done = ([], []), 0
    for number in range(CALLS):
        name, arguments = make_call(rng, len(handles[0]))
        python, c = (outcome(*each, name, arguments) for each in zip(sides, ways, handles, strict=True))
        assert python == c, (number, name, arguments)
        digest = ctypes.c_uint64()
        assert call("digest", sides[1].pool, digest) == 0
        assert sides[0].pool.digest() == sides[1].pool.digest() == digest.value, (number, name, arguments)
        if name in ("step", "step_padded", "reserve") and arguments[0] == 0:
            same_arrays(*(side.plans[0] for side in sides))
        done += isinstance(python[0], list)
    for side in sides:
        side.pool.check()
    assert sides[0].pool.fingerprint() == sides[1].pool.fingerprint()
    assert CALLS // 5 < done < CALLS  # neither does everything succeed, nor nothing


@pytest.mark.parametrize("groups", [None, SEVERAL], ids=["one group", "several"])
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program_gives_the_same_by_both_ways(seed, groups):
    compare(seed, BY_PYTHON, BY_C, groups=groups)


def test_comparison_notices_a_call_that_does_something_else():
    wrong = BY_C | {"reserve": lambda side, plan, rows, new: BY_C["step"](side, plan, rows, new, False)}
    with pytest.raises(AssertionError):
        for seed in range(PROGRAMS):
            compare(seed, BY_PYTHON, wrong)
