"""What may become known, when, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from prefixes import cache, compute, serve

from kvpool.errors import ForeignHandle, StaleHandle

A, B, C = ([n] * 4 for n in (1, 2, 3))

WRONG_DTYPE = [
    ["1"],
    [1.0],
    [None],
    [True],
    "1",
    b"1",
    None,
    1.5,
    {1},
    np.array([1.0]),
    np.array([1], np.int16),
    np.array([1], np.uint32),
    np.array([True]),
]
WRONG_VALUE = [
    [-1],
    [2**31],
    [2**70],
    [-(2**70)],
    np.array([-1], np.int32),
    np.array([2**31], np.int64),
    np.array([-(2**63)], np.int64),
    np.array([[1]], np.int32),
    np.zeros(4, np.int32)[::2],
]


@pytest.fixture
def pool(make_pool):
    return make_pool(prefix_cache=True)


def test_commit_of_a_pending_step_is_refused(pool, make_plan, refused):
    handle, plan = pool.open(A + B), make_plan(pool)
    pool.step(plan, [handle], 8)
    with refused(pool, ValueError, "commit", plans=[plan]):
        pool.prefix.commit(handle, A + B)
    assert pool.prefix.match(A + B + C) == 0
    pool.done(plan)
    pool.prefix.commit(handle, A + B)
    assert pool.prefix.match(A + B + C) == 8


def test_commit_of_a_step_noted_done_behind_a_pending_one_is_refused(pool, make_plan, refused):
    other, handle = pool.open(), pool.open()
    older, newer = make_plan(pool), make_plan(pool)
    pool.step(older, [other], 1)
    pool.step(newer, [handle], 4)
    pool.done(newer)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handle, A)
    pool.done(older)
    pool.prefix.commit(handle, A)


def test_commit_reaches_up_to_the_oldest_pending_step(pool, make_plan, refused):
    handle = serve(make_plan, pool, A)
    compute(make_plan, pool, handle, 2)
    plans = [make_plan(pool), make_plan(pool)]
    pool.step(plans[0], [handle], 1)
    pool.step(plans[1], [handle], 1)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handle, B[:3])
    pool.prefix.commit(handle, B[:2])
    pool.done(plans[0])
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handle, B[:2])
    pool.prefix.commit(handle, B[:1])
    pool.done(plans[1])
    pool.prefix.commit(handle, B[:1])
    assert pool.prefix.match(A + B + C) == 8


def test_commit_of_a_reserved_position_is_refused(pool, make_plan, refused):
    handle, plan = serve(make_plan, pool, A), make_plan(pool)
    pool.reserve(plan, [handle], 4)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handle, B[:1])
    pool.done(plan)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handle, B[:1])


def test_commit_after_rollback_of_a_step_is_refused_and_nothing_was_committed(pool, make_plan, refused):
    handle, plan = serve(make_plan, pool, A), make_plan(pool)
    before = pool.prefix.stats()
    pool.step(plan, [handle], 4)
    pool.rollback(plan)
    assert pool.prefix.stats() == before
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handle, B)
    assert pool.prefix.match(A + B + C) == 4


def test_commit_of_a_fork_in_the_middle_of_a_step_is_refused(pool, make_plan, refused):
    # Otherwise: commit, close, roll back, and garbage is found.
    parent, plan = serve(make_plan, pool, A), make_plan(pool)
    pool.step(plan, [parent], 4)
    child = int(pool.fork(parent)[0])
    grandchild = int(pool.fork(child)[0])
    for fork in (child, grandchild):
        with refused(pool, ValueError, "commit"):
            pool.prefix.commit(fork, B)
    pool.close([child, grandchild])
    pool.rollback(plan)
    assert pool.prefix.match(A + B + C) == 4


def test_commit_of_a_fork_is_legal_when_the_step_of_its_parent_has_passed(pool, make_plan):
    parent, plan = serve(make_plan, pool, A), make_plan(pool)
    pool.step(plan, [parent], 4)
    child = int(pool.fork(parent)[0])
    pool.done(plan)
    pool.prefix.commit(child, B)
    assert pool.prefix.match(A + B + C) == 8


def test_commit_of_a_fork_of_a_fork_reaches_what_was_done_at_the_fork(pool, make_plan, refused):
    root, plan = pool.open(), make_plan(pool)
    pool.step(plan, [root], 4)
    parent = int(pool.fork(root)[0])
    pool.done(plan)  # everything that the parent has is done
    pool.step(plan, [parent], 4)
    child = int(pool.fork(parent)[0])
    pool.prefix.commit(child, A)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(child, B[:1])
    pool.done(plan)
    pool.prefix.commit(child, B)


def test_commit_of_more_than_there_is_is_refused(pool, make_plan, refused):
    handle = serve(make_plan, pool, A)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handle, [1])
    pool.truncate(handle, 3)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handle, [1])


def test_commit_in_pieces_is_commit_at_once(make_pool, make_plan):
    at_once, pieces = make_pool(prefix_cache=True), make_pool(prefix_cache=True)
    for pool, sizes in ((at_once, [12]), (pieces, [1, 2, 0, 4, 5])):
        handle = pool.open(12)
        compute(make_plan, pool, handle, 12)
        tokens = A + B + C
        for size in sizes:
            pool.prefix.commit(handle, tokens[:size])
            del tokens[:size]
    for prompt in (A + B + C + A, A + B + A, A + A):
        assert at_once.prefix.match(prompt) == pieces.prefix.match(prompt) > 0
    assert at_once.prefix.stats() == pieces.prefix.stats()


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


def test_commit_with_a_negative_count_names_it(pool, make_plan):
    handles = [pool.open() for _ in range(2)]
    with pytest.raises(ValueError, match=r"^\[commit\] counts\[1\] is negative \(-1\)$"):
        pool.prefix.commit(handles, [1, 2, 3], [0, -1])


@pytest.mark.parametrize("counts", [[1, 1], [2, 2], [3], [1, 1, 1], [4, -1], [2**40, 0], []])
def test_commit_with_counts_that_do_not_fit_is_refused(pool, make_plan, refused, counts):
    handles = [pool.open() for _ in range(2)]
    for handle in handles:
        compute(make_plan, pool, handle, 8)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handles, [1, 2, 3], counts)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(handles, [1, 2, 3])  # not equally many
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
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit([handle, handle], [])
    other = core.Pool(4, 4)
    with refused(pool, ForeignHandle, "commit"):
        pool.prefix.commit(other.open(), [])
    other.shutdown()
    for wrong in (None, 1.0, "1", True, [1.5]):
        with refused(pool, TypeError, "commit"):
            pool.prefix.commit(wrong, [])


@pytest.mark.parametrize("call", ["open", "match", "pin", "commit"])
def test_tokens_of_the_wrong_type_are_refused(pool, make_plan, refused, call):
    cache(make_plan, pool, A)
    handle = pool.open(0)
    compute(make_plan, pool, handle, 8)
    before = pool.prefix.stats()
    for tokens in WRONG_DTYPE:
        with refused(pool, TypeError, call):
            part = pool if call == "open" else pool.prefix
            getattr(part, call)(*([handle] if call == "commit" else []), tokens)
    assert pool.prefix.stats() == before


@pytest.mark.parametrize("call", ["open", "match", "pin", "commit"])
def test_tokens_out_of_range_or_shape_are_refused(pool, make_plan, refused, call):
    cache(make_plan, pool, A)
    handle = pool.open(0)
    compute(make_plan, pool, handle, 8)
    before = pool.prefix.stats()
    for tokens in WRONG_VALUE:
        with refused(pool, ValueError, call):
            part = pool if call == "open" else pool.prefix
            getattr(part, call)(*([handle] if call == "commit" else []), tokens)
    assert pool.prefix.stats() == before


@pytest.mark.parametrize("call", ["open", "match", "pin"])
@pytest.mark.parametrize("namespace", ["", "a", None, 0, bytearray(b"a"), (b"a",)])
def test_namespace_that_is_no_bytes_is_refused(pool, refused, call, namespace):
    with refused(pool, TypeError, call):
        getattr(pool if call == "open" else pool.prefix, call)(A, namespace)


def test_open_by_count_refuses_a_namespace_that_is_no_bytes(pool, refused):
    with refused(pool, TypeError, "open"):
        pool.open(4, "tenant")


def test_commit_that_contradicts_a_shared_block_is_refused(pool, make_plan, refused):
    parent = pool.open()
    compute(make_plan, pool, parent, 8)
    child = int(pool.fork(parent)[0])
    pool.prefix.commit(parent, A + B)
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(child, A + C)
    pool.prefix.commit(child, A + B[:2])
    with refused(pool, ValueError, "commit"):
        pool.prefix.commit(child, C[:2])
    pool.prefix.commit(child, B[:2])
    assert pool.prefix.stats().nodes == 2


def test_truncate_below_the_committed_length_lowers_it(pool, make_plan):
    handle = serve(make_plan, pool, A + B)
    pool.truncate(handle, 6)
    assert pool.prefix.match(A + B + C) == 8  # what was known stays known
    compute(make_plan, pool, handle, 2)
    assert pool.table(handle).tolist() == [1, 3]  # never in place
    pool.prefix.commit(handle, C[:2])
    assert pool.prefix.match(A + B[:2] + C[:2] + A) == 8
    pool.truncate(handle, 0)
    compute(make_plan, pool, handle, 4)
    pool.prefix.commit(handle, C)
    assert pool.prefix.match(C + A) == 4


def test_truncate_of_uncommitted_tokens_keeps_the_committed_ones(pool, make_plan):
    handle = pool.open()
    compute(make_plan, pool, handle, 8)
    pool.prefix.commit(handle, A + B[:1])
    pool.truncate(handle, 6)
    compute(make_plan, pool, handle, 2)
    pool.prefix.commit(handle, B[:3])
    assert pool.prefix.match(A + B + C) == 8


def test_fork_has_the_committed_length_of_its_parent(pool, make_plan):
    parent = pool.open()
    compute(make_plan, pool, parent, 6)
    pool.prefix.commit(parent, A + B[:1])
    child = int(pool.fork(parent)[0])
    for handle, tokens in ((parent, B[:3]), (child, C[:3])):
        compute(make_plan, pool, handle, 2)
        pool.prefix.commit(handle, tokens)
    assert pool.prefix.match(A + B + C) == pool.prefix.match(A + B[:1] + C[:3] + A) == 8


def test_draft_token_that_was_rejected_is_never_found(pool, make_plan):
    # Speculative decoding: four drafts are computed, two are accepted, the next step writes over the others.
    handle = serve(make_plan, pool, A)
    compute(make_plan, pool, handle, 4)
    pool.truncate(handle, 6)
    pool.prefix.commit(handle, B[:2])
    compute(make_plan, pool, handle, 2)
    pool.prefix.commit(handle, C[:2])
    assert pool.prefix.match(A + B + C) == 4
    assert pool.prefix.match(A + B[:2] + C[:2] + A) == 8


def test_block_of_a_pending_step_never_hits(pool, make_plan):
    handle, plan = pool.open(A + B), make_plan(pool)
    pool.step(plan, [handle], 8)
    other = pool.open(A + B)
    assert pool.num_tokens(other) == pool.prefix.match(A + B) == 0
    assert not set(pool.table(handle).tolist()) & set(pool.table(other).tolist())
    pool.done(plan)
    assert pool.prefix.match(A + B) == 0  # computed, but nobody said what it is


def test_commit_in_a_pool_that_runs_in_order_needs_no_done(make_pool, make_plan):
    pool = make_pool(prefix_cache=True, in_order=True)
    serve(make_plan, pool, A + B)
    assert pool.prefix.match(A + B + C) == 8
