"""Random programs of the fuzzer by Python and by C: same results, refusals and digests, and arrays that both show.

The contents are judged, too, as in every run of the fuzzer.
"""

import ctypes
import re

import numpy as np
import pytest
from capi_table import Array, C, Keep, call, function

from kvpool import Pool
from kvpool._core import PrefixCache
from tests.verify._verify import Run
from tests.verify.words import shape_of

PROGRAMS, WORDS = 32, 300
COMMON = ("positions", "cu_q_lens", "slot_ids", "served", "handles")
OF_BLOCKS = {name: name for name in ("block_tables", "slot_mapping", "copies", "dirty_rows")} | {"seq_lens": "kv_lens"}
OF_CSR = {name: name for name in ("indptr", "indices", "last_page_len")}
OF_WINDOWS = {"kv_starts": "kv_starts"}  # and of chunks
OF_STATES = {"seq_lens": "kv_lens", "state_src": "state_src", "state_dst": "state_dst"}


def rows_of(handles):
    return np.atleast_1d(np.array(handles, np.int64))


def counts_of(counts, rows):
    return np.broadcast_to(np.array(counts, np.int64), len(rows)).copy()


def by_c(keep):
    """A directive as C has it."""
    return keep and Keep(keep.ttl, keep.tokens or 0, keep.priority)


class ByC(Pool):
    """A pool whose calls are made by the C interface, as far as it has them."""

    reserves = "reserve"

    def do(self, name, *arguments):
        if call(name, self, *arguments):
            function("raise_error")()

    def open(self, tokens, namespace=b"", **options):
        if options.keys() - {"keep"} or ((namespace or options) and isinstance(tokens, int)):
            return super().open(tokens, namespace, **options)
        handle, space = ctypes.c_int64(), ctypes.create_string_buffer(namespace)
        if isinstance(tokens, int):
            self.do("open", tokens, handle)
        else:
            prompt, cached = np.array(tokens, np.int32), ctypes.c_int64()
            keep = by_c(options.get("keep"))
            self.do("open_prompt", prompt, len(tokens), space, len(namespace), keep, handle, cached)
            assert cached.value == self.num_tokens(handle.value)
        return handle.value

    def fork(self, handle, n=1):
        children = np.zeros(n, np.int64)
        self.do("fork", handle, n, children)
        return children

    def truncate(self, handles, lens):
        self.do("truncate", rows_of(handles), counts_of(lens, rows_of(handles)), rows_of(handles).size)

    def close(self, handles):
        self.do("close", rows_of(handles), rows_of(handles).size)

    def step(self, plan, handles, num_new=1, partial=False, pad_to=None):
        name, more = ("step", ()) if pad_to is None else ("step_padded", pad_to)
        rows = rows_of(handles)
        self.do(name, plan, rows, counts_of(num_new, rows), rows.size, C["KVPOOL_PARTIAL"] * partial, *more)
        shows_the_same(plan, self.options.groups)

    def reserve(self, plan, handles, num_new=1):
        self.do(self.reserves, plan, rows_of(handles), counts_of(num_new, rows_of(handles)), rows_of(handles).size)

    def done(self, plan):
        self.do("done", plan)

    def rollback(self, plan):
        self.do("rollback", plan)

    def resize(self, num_blocks, arena=0):
        moves, n = np.zeros((self.stats(arena).num_blocks, 2), np.int32), ctypes.c_int64()
        self.do("resize", num_blocks, arena, moves, len(moves), n)
        return moves[: n.value]

    @property
    def prefix(self):
        return PrefixByC(self) if self.options.prefix_cache else None


class PrefixByC(PrefixCache):
    def commit(self, handles, tokens, counts=None, *, keep=None):
        rows, tokens = rows_of(handles), np.array(tokens, np.int32)
        counts = None if counts is None else np.array(counts, np.int64)
        self.pool.do("commit", rows, counts, rows.size, tokens, tokens.size, by_c(keep))

    def tick(self, now):
        self.pool.do("tick", now)

    def limit_kept(self, namespace, blocks):
        space = ctypes.create_string_buffer(namespace)
        self.pool.do("limit_kept", space, len(namespace), -1 if blocks is None else blocks)


def shown(plan, name, group=None):
    """Return an array of a plan, or of a group of it, as the C interface gives it."""
    array = Array()
    form = ["array", plan] if group is None else ["group_array", plan, group]
    assert call(*form, C[f"KVPOOL_{name.upper()}"], array) == 0
    code = {1: np.uint8, 4: np.int32, 8: np.int64}[array.itemsize]
    size = array.length * array.width
    return np.ctypeslib.as_array((np.ctypeslib.as_ctypes_type(code) * size).from_address(array.data)) if size else []


def shows_the_same(plan, groups):
    """Each array of a plan, as Python shows it and as the C interface gives it."""
    for name in COMMON:
        if hasattr(plan, name):
            assert list(shown(plan, name)) == getattr(plan, name).ravel().tolist(), name
    for number, (part, kind) in enumerate(zip(plan.groups, groups, strict=True)):
        names = OF_BLOCKS | (OF_CSR if hasattr(part, "indptr") else {}) | (OF_WINDOWS if kind.kind != "full" else {})
        names = OF_STATES if kind.kind == "state" else names
        for name, shown_as in names.items():
            due = getattr(part, shown_as).ravel().tolist()
            assert list(shown(plan, name, number)) == due, name
            if len(groups) == 1 and name != "kv_starts":
                assert list(shown(plan, name)) == due, name


def program(seed, make_pool):
    """What a run is told, and what it leaves; handles without what differs from pool to pool."""
    pools, trace = [], []

    def make(**options):
        pools.append(make_pool(**options))
        return pools[-1]

    Run(shape_of(seed), make, trace).run(WORDS)
    told = [re.sub(r"\d{7,}", lambda found: str(int(found[0]) & 0xFFFFF), line) for line in trace]
    told = [re.sub(r"\[[a-z]\w+\]|(?<=generation )\d+|(?<=current )\d+", "", line) for line in told]
    told = [re.sub(r"(handle|len|num_new)s?(\[0\])?(?= )", r"\1", line) for line in told]  # C has batches of one
    digest = ctypes.c_uint64()
    assert call("digest", pools[0], digest) == 0 and digest.value == pools[0].digest()
    return told, digest.value, pools[0].fingerprint()


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program_gives_the_same_by_both_ways(seed):
    by_python, by_c = program(seed, Pool), program(seed, ByC)
    for due, found in zip(by_python[0], by_c[0], strict=True):
        assert due == found
    assert by_python == by_c


def test_comparison_notices_a_call_that_does_something_else():
    class Wrong(ByC):
        reserves = "step"

        def do(self, name, *arguments):
            super().do(name, *arguments, *([0] if name == "step" and len(arguments) == 4 else []))

    with pytest.raises(AssertionError):
        for seed in range(PROGRAMS):
            assert program(seed, Pool) == program(seed, Wrong)
