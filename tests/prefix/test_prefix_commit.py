"""What may become known, when, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from prefixes import cache, compute, serve

from kvpool.errors import ForeignHandle, StaleHandle

A, B, C = ([n] * 4 for n in (1, 2, 3))

WRONG_DTYPE = [
    *(["1"], [1.0], [None], [True], "1", b"1", None, 1.5, {1}),
    *(np.array([1.0]), np.array([1], np.int16), np.array([1], np.uint32), np.array([True])),
]
WRONG_VALUE = [
    *([-1], [2**31], [2**70], [-(2**70)], np.array([-1], np.int32), np.array([2**31]), np.array([-(2**63)])),
    *(np.array([[1]], np.int32), np.zeros(4, np.int32)[::2]),
]


@pytest.fixture
def pool(make_any):
    return make_any()


def test_commit_of_a_batch_by_counts_or_equal_parts(pool, make_plan):
    handles = [pool.open() for _ in range(3)]
    for handle in handles:
        compute(make_plan, pool, handle, 8)
    pool.prefix.commit(handles, A + B + C)
    pool.prefix.commit(np.array(handles), np.array(B + C[:1], np.int32), np.array([4, 0, 1], np.int32))
    pool.prefix.commit(handles[1:], A + B[:3], [4, 3])
    assert [pool.prefix.match(p) for p in (A + B + C, B + A + C, C + C[:1] + B + A)] == [8, 8, 8]
    pool.prefix.commit([], [])
    pool.prefix.commit([], [], [])


@pytest.mark.parametrize("counts", [[1, 1], [2, 2], [3], [1, 1, 1], [2**40, 0], [], [0, -1], None])
def test_commit_with_counts_that_do_not_fit_is_refused(pool, make_plan, refused, counts):
    handles = [pool.open() for _ in range(2)]
    for handle in handles:
        compute(make_plan, pool, handle, 8)
    words = {(0, -1): "counts[1] is negative (-1)", None: "evenly"}
    with refused(pool, ValueError, "commit", words.get(counts if counts is None else tuple(counts))):
        pool.prefix.commit(handles, [1, 2, 3], *([] if counts is None else [counts]))
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit([], [1])


def test_commit_judges_all_rows_before_anything_moves(pool, make_plan, refused):
    good, bad = pool.open(), pool.open()
    compute(make_plan, pool, good, 4)
    compute(make_plan, pool, bad, 3)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit([good, bad], A + B)
    assert pool.prefix.match(A + C) == 0


def test_commit_of_bad_handles_is_refused(pool, core, make_plan, refused):
    handle = serve(make_plan, pool, A)
    closed = pool.open()
    pool.close(closed)
    with refused(pool, StaleHandle, "commit", closed):
        pool.prefix.commit([handle, closed], [])
    with refused(pool, StaleHandle, "committed", closed):
        pool.prefix.committed(closed)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit([handle, handle], [])
    other = core.Pool(4, 4)
    with refused(pool, ForeignHandle, "commit"):
        pool.prefix.commit(other.open(), [])
    other.shutdown()
    for wrong in (None, 1.0, "1", True, [1.5]):
        with refused(pool, TypeError, "commit"):
            pool.prefix.commit(wrong, [])


@pytest.mark.parametrize(("error", "wrong"), [(TypeError, WRONG_DTYPE), (ValueError, WRONG_VALUE)])
@pytest.mark.parametrize("call", ["open", "match", "pin", "commit"])
def test_tokens_of_the_wrong_type_range_or_shape_are_refused(pool, make_plan, refused, call, error, wrong):
    cache(make_plan, pool, A)
    handle = pool.open(0)
    compute(make_plan, pool, handle, 8)
    before = pool.prefix.stats()
    for tokens in wrong:
        with refused(pool, error, call):
            part = pool if call == "open" else pool.prefix
            getattr(part, call)(*([handle] if call == "commit" else []), tokens)
    assert pool.prefix.stats() == before
    if call in ("match", "pin"):
        with refused(pool, TypeError, call, 5):
            getattr(pool.prefix, call)(5)  # a count


@pytest.mark.parametrize("call", ["open", "match", "pin", "flush"])
def test_namespace_that_is_no_bytes_is_refused(pool, refused, call):
    for namespace in ("", "a", 0, bytearray(b"a"), (b"a",)):
        with refused(pool, TypeError, call):
            given = [] if call == "flush" else [A]
            getattr(pool if call == "open" else pool.prefix, call)(*given, namespace)
    for given in ([A, None], [4, "tenant"]):
        with refused(pool, TypeError, "open"):
            pool.open(*given)


def test_digest_sees_the_tokens_of_a_commit_and_the_namespace_of_a_flush(make_any, make_plan):
    """Ranks that sampled different tokens differ from that call on, and equal ones never do."""
    commits, flushes = [], []
    for tokens in (A + B, A + B, A + B[:3] + [5], [5, *A[1:], *B], A + B[:3]):
        pool = make_any()
        handle = pool.open()
        compute(make_plan, pool, handle, 8)
        before = pool.digest()
        pool.prefix.commit(handle, tokens)
        assert pool.digest() != before
        commits.append(pool.digest())
    assert commits[0] == commits[1] and len(set(commits)) == 4
    for flushed in (b"a", b"b", None):
        pool = make_any()
        for namespace in (b"a", b"b"):
            cache(make_plan, pool, A + B, namespace)
        pool.prefix.flush(flushed)
        flushes.append(pool.digest())
    assert len(set(flushes)) == 3


def test_counts_that_change_the_tokens_while_they_are_read_are_judged_on_the_change(pool, make_plan):
    handle, tokens = pool.open(0), np.array(A, np.int32)
    compute(make_plan, pool, handle, 4)

    class Evil:
        def __index__(self):
            tokens[0] = -7
            return 4

    with pytest.raises(ValueError, match=r"tokens\[0\] is out of range \(-7\)"):
        pool.prefix.commit([handle], tokens, [Evil()])
