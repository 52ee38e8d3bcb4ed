"""Policies and what they remember: which tokens stay, by an oracle that sorts everything, and what is refused."""

import itertools

import numpy as np
import pytest

from kvpool import Group, Pool
from kvpool.eviction import (
    H2O,
    BlockEviction,
    Evictor,
    Memory,
    SlidingWindow,
    advise,
    check_backend,
)
from kvpool.protocol import Capabilities

LAYERS, HEADS, BLOCK = 2, 3, 4


def memory(policy, rows=1):
    return Memory(policy, LAYERS, HEADS, BLOCK, rows)


def draw(seed, rows, length):
    return np.random.default_rng(seed).standard_normal((LAYERS, rows, HEADS, length)).astype(np.float32)


@pytest.mark.parametrize(
    ("groups", "group", "words"),
    [
        ([Group.window(8), Group.full()], 0, "group 0 is a window, which lets go by itself: .* 1 is one"),
        ([Group.full(), Group.window(8)], 2, r"group is out of range \(2\), it must be in 0 .. 1"),
        ([Group.full(), Group.window(8)], -1, r"group is out of range \(-1\)"),
        (None, 1, r"group is out of range \(1\), it must be in 0 .. 0"),
        ([Group.window(8), Group.state(4)], 0, r"the pool has no full group \(window, state\), tokens leave full"),
    ],
)
def test_evictor_refuses_a_group_that_is_not_full(groups, group, words):
    class Backend:
        """It is not looked at."""

    with pytest.raises(ValueError, match=rf"\[Evictor\] {words}"):
        Evictor(H2O(max_kv=16), Pool(16, 4, groups=groups), Backend(), group=group)


def test_advice_is_a_quarter_and_half_of_that():
    assert advise(4096) == (1024, 512)
    with pytest.raises(ValueError, match=r"\[advise\] context is 8"):
        advise(8)


@pytest.mark.parametrize("alpha", [0.5, 0.95])
@pytest.mark.parametrize("kind", ["raw", "mass"])
def test_scores_are_a_moving_average_that_begins_with_the_first_one(alpha, kind):
    policy = H2O(max_kv=64, alpha=alpha, kind=kind)
    known, expected = memory(policy, 3), np.zeros((LAYERS, 3, HEADS, 40), np.float64)
    lens = np.array([3, 10, 1])
    for step in range(12):
        new = draw(step, 3, int(lens.max()))
        for row, n in enumerate(lens.tolist()):
            seen = np.abs(new[:, row, :, :n])
            before = n - 2 if step else 0  # two tokens a step; with the first one all are new
            expected[:, row, :, :before] *= alpha
            expected[:, row, :, :before] += (1 - alpha) * seen[..., :before]
            expected[:, row, :, before:n] = seen[..., before:]
        known.observe(new.copy(), lens)
        lens = lens + 2
    for row, n in enumerate((lens - 2).tolist()):
        np.testing.assert_allclose(known.scores[:, row, :, :n], expected[:, row, :, :n], rtol=1e-5)
        assert known.known[row] == n


def test_rows_without_a_query_learn_nothing():
    known = memory(H2O(max_kv=64), 2)
    known.observe(np.ones((LAYERS, 2, HEADS, 5), np.float32), np.array([5, 5]))
    known.observe(np.full((LAYERS, 2, HEADS, 6), 9, np.float32), np.array([6, 5]), np.array([0, -1]))
    assert (known.scores[:, 1, :, :5] == 1).all() and known.known.tolist() == [6, 5]
    assert (known.scores[:, 0, :, :5] > 1).all()


@pytest.mark.parametrize("seed", range(5))
def test_h2o_keeps_sinks_the_newest_and_the_heaviest(seed):
    policy = H2O(max_kv=32, sink=3, heavy=14, slack=4)
    known, n = memory(policy, 2), 50
    scores = draw(seed, 2, n)
    known.observe(scores.copy(), np.array([n, n]))
    (_, target) = policy.lens_after(np.array([31, n]), BLOCK)
    assert target == 28
    keep = known.select(1, n, target)
    assert keep.shape == (LAYERS, HEADS, target) and (np.diff(keep) > 0).all()
    for layer in range(LAYERS):
        for head in range(HEADS):
            middle = np.abs(scores[layer, 1, head, 3 : n - 15])
            heaviest = 3 + np.argsort(middle)[::-1][:10]
            due = sorted({0, 1, 2, *range(n - 15, n), *heaviest.tolist()})
            assert keep[layer, head].tolist() == due


class HeavyBlocks(H2O):
    """A policy of whole blocks that is not `BlockEviction`."""

    whole_blocks = True
    lens_after = BlockEviction.lens_after


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "policy", [HeavyBlocks(max_kv=24, sink=5, heavy=13), BlockEviction(max_kv=24, sink=5, recent_tokens=6)]
)
def test_blocks_with_the_lowest_scores_leave_under_any_policy_of_whole_blocks(policy, seed):
    known, n = memory(policy), 39
    scores = draw(seed, 1, n)
    known.observe(scores.copy(), np.array([n]))
    target = int(policy.lens_after(np.array([n]), BLOCK)[0])
    assert target == 23  # four blocks
    sums = [float(np.abs(scores[..., b * 4 : b * 4 + 4]).sum()) for b in range(2, 8)]  # blocks 2 .. 7 may leave
    due = sorted(2 + int(i) for i in np.argsort(sums)[:4])
    assert known.select(0, n, target).tolist() == due


def test_blocks_leave_as_far_as_there_are_any_to_choose_from():
    policy = BlockEviction(max_kv=16, sink=4, recent_tokens=8)
    lens = np.array([15, 16, 17, 19, 20, 60])
    after = policy.lens_after(lens, BLOCK)
    assert after.tolist() == [15, 12, 13, 15, 12, 12] and ((lens - after) % BLOCK == 0).all()


def test_positions_follow_what_moves():
    policy = H2O(max_kv=16, sink=2, heavy=6, slack=3)
    known, held = memory(policy), np.tile(np.arange(20), (LAYERS, HEADS, 1))
    tokens = 20
    for step in range(6):
        n = held.shape[2]
        known.observe(draw(step, 1, n), np.array([n]))
        keep = known.select(0, n, 13)
        known.evicted(0, n, keep, tokens)
        held = np.take_along_axis(held, keep, -1)
        assert (known.positions(0, 13, tokens) == held).all()
        new = np.arange(tokens, tokens + 3 + step)
        tokens += len(new)
        held = np.concatenate([held, np.broadcast_to(new, (LAYERS, HEADS, len(new)))], axis=-1)
        assert (known.positions(0, held.shape[2], tokens) == held).all()


def test_positions_follow_blocks_that_leave():
    policy = BlockEviction(max_kv=16, sink=1, recent_tokens=4)
    known = memory(policy)
    known.observe(draw(0, 1, 18), np.array([18]))
    known.evicted(0, 18, np.array([1, 3]), 18)
    assert known.positions(0, 11, 19)[0, 0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18]


@pytest.mark.parametrize(("mine", "theirs"), [(24, 25), (25, 24), (0, 9)])
def test_rows_of_a_memory_are_copied_kept_and_cut(mine, theirs):
    """Whichever of the two has more room."""
    one, two = (memory(H2O(max_kv=64)) for _ in range(2))
    for each, length in ((one, mine), (two, theirs)):
        each.observe(np.full((LAYERS, 1, HEADS, length), length, np.float32), np.array([length]), np.array([0]))
    one.append(two, [0, 0])
    two.scores[:] = 7  # rows are copies
    for row, length in enumerate((mine, theirs, theirs)):
        assert (one.scores[:, row, :, :length] == length).all() and not one.scores[:, row, :, length:].any()
    one.keep_rows([2, 0])
    assert one.known.tolist() == [theirs, mine]
    one.truncate(np.array([5, 99]))
    assert one.known.tolist() == [5, mine]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["raw", "mass"])
def test_tokens_with_scores_that_are_no_numbers_count_as_the_heaviest(bad, kind):
    """In the head that has seen them; the others choose as ever."""
    policy = H2O(max_kv=64, kind=kind)
    told, clean = memory(policy), memory(policy)
    for step in range(3):
        scores = draw(step, 1, 64)
        clean.observe(scores.copy(), np.array([64]))
        scores[0, 0, 1, 20:23] = bad
        told.observe(scores, np.array([64]))
    keep, due = told.select(0, 64, 56), clean.select(0, 64, 56)
    assert (np.diff(keep, axis=-1) > 0).all() and np.isin([20, 21, 22], keep[0, 1]).all()
    assert (keep[1] == due[1]).all() and (keep[0, [0, 2]] == due[0, [0, 2]]).all()
    if bad > -np.inf:
        blocks, scores = memory(BlockEviction(max_kv=64, recent_tokens=8)), np.ones((LAYERS, 1, HEADS, 64), np.float32)
        scores[0, 0, 1, 10:50] = bad
        blocks.observe(scores, np.array([64]))
        (leaves,) = blocks.select(0, 64, 60)
        assert not 10 // BLOCK <= leaves <= 49 // BLOCK


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (H2O, {"max_kv": 8}, r"max_kv is 8, too small for sink 4 \+ heavy 4"),
        (H2O, {"heavy": 60}, "max_kv is 64, too small"),
        (H2O, {"heavy": 8, "slack": 9}, r"max_kv is 64, smaller than sink 4 \+ recent 52"),
        (H2O, {"alpha": 0.0}, r"alpha is 0.0, it must be in \(0, 1\)"),
        *((H2O, {"alpha": alpha}, f"alpha is {alpha}") for alpha in (1.0, float("nan"))),
        (H2O, {"kind": "weights"}, "kind is 'weights', it must be one of raw, mass"),
        *((H2O, {name: 0}, f"{name} is 0, the range is 1 ..") for name in ("max_kv", "queries")),
        (H2O, {"sink": -1}, "sink is -1"),
        (SlidingWindow, {"max_kv": 5}, "max_kv is 5, the range is 8 .."),
        (SlidingWindow, {"sink": 32}, "max_kv is 64, too small for sink 32: the least is twice that and one more"),
        (H2O, {"slack": 0}, "slack is 0"),
        (BlockEviction, {"max_kv": 4}, r"max_kv is 4, smaller than sink 4 \+ recent 1"),
        (BlockEviction, {"recent_tokens": 62}, "max_kv is 64, smaller than sink 4"),
        (BlockEviction, {"alpha": 2.0}, "alpha is 2.0"),
        *((BlockEviction, {name: 0}, f"{name} is 0") for name in ("queries", "recent_tokens")),
        (BlockEviction, {"kind": "rows"}, "kind is 'rows'"),
    ],
)
def test_bad_numbers_are_refused_when_a_policy_is_made(kind, options, message):
    with pytest.raises(ValueError, match=rf"^\[{kind.__name__}\] {message}"):
        kind(**{"max_kv": 64} | options)


@pytest.mark.parametrize("value", [True, 1.5, "64", None])
def test_numbers_of_other_types_are_refused(value):
    for make in (
        lambda: H2O(max_kv=value),
        lambda: H2O(max_kv=64, queries=value),
        lambda: BlockEviction(max_kv=64, queries=value),
        lambda: SlidingWindow(max_kv=64, sink=value),
        lambda: advise(value),
    ):
        with pytest.raises(TypeError):
            make()
    with pytest.raises(TypeError, match="alpha must be a float"):
        H2O(max_kv=64, alpha=value if value != 1.5 else "0.5")


def test_backends_that_cannot_are_named():
    plain = Capabilities("plain", ("NHD",), ("float32",))
    with pytest.raises(ValueError, match=r"\[H2O\] backend 'plain' exports no scores 'mass', none at all"):
        check_backend(H2O(max_kv=64), plain, 16)
    can = Capabilities("can", ("NHD",), ("float32",), scores=("mass",))
    with pytest.raises(ValueError, match=r"\[H2O\] backend 'can' cannot move tokens"):
        check_backend(H2O(max_kv=64), can, 16)
    check_backend(BlockEviction(max_kv=64), can, 16)
    with pytest.raises(ValueError, match=r"exports no scores 'raw', only \['mass'\]"):
        check_backend(H2O(max_kv=64, kind="raw"), can, 16)
    with pytest.raises(ValueError, match=r"\[BlockEviction\] max_kv is 64, in blocks of 32 the least is 80:"):
        check_backend(BlockEviction(max_kv=64), can, 32)


def test_policy_most_is_the_largest_length_at_the_start_of_a_step():
    lens = np.arange(200)
    for policy in (H2O(max_kv=19), BlockEviction(max_kv=19, sink=5, recent_tokens=7)):
        for size in (1, 2, 4):
            policy.check_block_size(size)
            after = policy.lens_after(lens, size)
            assert after.max() == policy.most == 18 and (after <= lens).all()


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_blocks_are_refused_where_a_sequence_would_hold_more_than_its_budget(size):
    lens = np.arange(300)
    for max_kv, sink, recent in itertools.product(range(20, 60, 3), (0, 4, 5), (1, 8, 13)):
        policy = BlockEviction(max_kv=max_kv, sink=sink, recent_tokens=recent)
        if policy.lens_after(lens, size).max() < max_kv:
            policy.check_block_size(size)
        else:
            with pytest.raises(ValueError, match=rf"\[BlockEviction\] max_kv is {max_kv}, in blocks of {size} the lea"):
                policy.check_block_size(size)
