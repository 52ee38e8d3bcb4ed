"""Directives of the prefix cache: what is kept goes past its turn, until its time is over. Worked out by hand."""

from __future__ import annotations

import random

import pytest
from prefixes import compute

from kvpool import Group
from kvpool.retention import Keep
from kvpool.testing import ModelPlan, ModelPool

A, B, C, D = ([n] * 4 for n in (1, 2, 3, 4))
LATER = [9]


def found(pool, *prompts):
    """Which prompts of one block are cached."""
    return [pool.prefix.match(prompt + LATER) == len(prompt) for prompt in prompts]


def keep(make_plan, pool, tokens, directive, namespace=b""):
    """Cache a prompt, which is kept."""
    handle = pool.open(tokens + LATER, namespace, keep=directive)
    compute(make_plan, pool, handle, len(tokens) + 1 - pool.num_tokens(handle))
    pool.prefix.commit(handle, (tokens + LATER)[pool.prefix.committed(handle) :])
    pool.close(handle)


def test_first_tokens_alone_are_kept(make_any, make_plan):
    pool = make_any()
    keep(make_plan, pool, A + B + C, Keep(3, 5, tokens=7))
    assert pool.prefix.stats().kept == 1
    pool.blocks.evict(2)
    assert found(pool, A, A + B) == [True, False]
    handle = pool.open(A + LATER)
    pool.prefix.commit(handle, [], keep=Keep(1, 9, tokens=3))  # less than a block
    pool.prefix.tick(5)
    assert pool.prefix.stats().kept == 0


def test_prompt_whose_checkpoint_makes_room_for_its_rest_keeps_its_node(make_pool, make_plan):
    """At the end of a chunk a checkpoint has no blocks, and leaves before what is kept."""
    pool = make_pool(9, 4, max_blocks_per_seq=16, groups=[Group.chunk(8)], prefix_cache=True)
    for prompt, directive in ((A + B, None), (C + D + A, Keep(1, 9))):
        handle = pool.open(prompt, cut=len(prompt), keep=directive)
        compute(make_plan, pool, handle, len(prompt))
        pool.prefix.commit(handle, prompt)
        pool.close(handle)
    assert pool.num_tokens(pool.open(A + B + 8 * C)) == 8  # which takes every block
    pool.check()
    assert pool.prefix.stats().checkpoints == 0


def test_fork_has_the_directive_of_its_parent(make_any, make_plan):
    pool = make_any()
    parent = pool.open(keep=Keep(1, 5))
    (child,) = pool.fork(parent)
    compute(make_plan, pool, child, 4)
    pool.prefix.commit(child, A)
    assert pool.prefix.stats().kept == 1


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ((0, 1), ValueError, r"\[Keep\] priority is out of range \(0\), it must be in 1 .. 7"),
    ((8, 1), ValueError, r"\[Keep\] priority is out of range"),
    ((1, 0), ValueError, r"\[Keep\] ttl is out of range \(0\)"),
    ((1, 2**62), ValueError, r"\[Keep\] ttl is out of range"),
    ((1, 1.5), TypeError, r"\[Keep\] ttl must be an int, not float \(1.5\)"),
    ((True, 1), TypeError, r"\[Keep\] priority must be an int, not bool"),
    ((1, 1, 0), ValueError, r"\[Keep\] tokens is out of range"),
])  # fmt: skip
def test_directive_out_of_range_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        Keep(*arguments)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda pool, handle: pool.prefix.tick(4), ValueError, r"\[tick\] now is 4, the clock was at 5 already"),
    (lambda pool, handle: pool.prefix.tick(-1), ValueError, r"\[tick\] now is out of range \(-1\)"),
    (lambda pool, handle: pool.prefix.tick(2**62), ValueError, r"\[tick\] now is out of range"),
    (lambda pool, handle: pool.prefix.tick(6.0), TypeError, r"\[tick\] now must be an int"),
    (lambda pool, handle: pool.prefix.limit_kept("a", 1), TypeError, r"\[limit_kept\] namespace must be bytes"),
    (lambda pool, handle: pool.prefix.limit_kept(b"a", -1), ValueError, r"\[limit_kept\] blocks is out of range"),
    (lambda pool, handle: pool.open(A, keep=3), TypeError, r"\[open\] keep must be a Keep, not int \(3\)"),
    (lambda pool, handle: pool.prefix.commit(handle, [], keep=3), TypeError, r"\[commit\] keep must be a Keep"),
    (lambda pool, handle: pool.prefix.commit(handle, A, keep=Keep(1, 1)), ValueError, r"\[commit\] 4 tokens"),
])  # fmt: skip
def test_refused_call_leaves_everything_as_it_was(make_any, make_plan, call, error, text):
    pool = make_any()
    keep(make_plan, pool, A, Keep(1, 9))
    pool.prefix.tick(5)
    handle = pool.open(A + LATER)
    before = pool.fingerprint(), pool.digest(), pool.prefix.stats()
    with pytest.raises(error, match=text):
        call(pool, handle)
    assert (pool.fingerprint(), pool.digest(), pool.prefix.stats()) == before
    pool.prefix.tick(5)  # the same time again is none that goes back


def test_pool_without_prefix_cache_has_no_directive(make_pool):
    with pytest.raises(ValueError, match=r"\[open\] keep is Keep.*no prefix cache"):
        make_pool(8, 4).open(3, keep=Keep(1, 1))


def test_time_directives_and_limits_are_part_of_digest_and_fingerprint(make_any):
    calls = [
        lambda pool: None,
        lambda pool: pool.prefix.tick(1),
        lambda pool: pool.prefix.tick(2),
        lambda pool: pool.prefix.limit_kept(b"a", 1),
        lambda pool: pool.prefix.limit_kept(b"a", 2),
    ]
    pools = [make_any(seed=1) for _ in calls]
    for pool, call in zip(pools, calls, strict=True):
        call(pool)
    assert len({pool.digest() for pool in pools}) == len({pool.fingerprint() for pool in pools}) == len(calls)


def run(pool, make_plan, seed):
    """Prompts of few texts, some kept, in a pool that is short of blocks; what each call found."""
    rng, plan, told = random.Random(seed), make_plan(pool, 1, 96), []
    for now in range(120):
        if rng.random() < 0.4:
            pool.prefix.tick(now)
        space = rng.choice((b"", b"a"))
        if rng.random() < 0.05:
            pool.prefix.limit_kept(space, rng.choice((None, 0, 3, 9)))
        prompt = [rng.choice((1, 2))] * 4 + [rng.choice((1, 2, 3))] * 4 + [rng.choice((1, 2))] * rng.randrange(1, 20)
        directive = rng.choice((None, None, Keep(rng.choice((1, 3, 7)), rng.choice((1, 2, 5, 33, 64)))))
        handle = pool.open(prompt, space, keep=directive)
        told.append(pool.num_tokens(handle))
        while pool.num_tokens(handle) < len(prompt):
            wanted = pool.prefix.wanted(handle)[0]
            end = len(prompt) if wanted < 0 else min(len(prompt), wanted)
            pool.step(plan, [handle], end - pool.num_tokens(handle))
            pool.done(plan)
            pool.prefix.commit(handle, prompt[pool.prefix.committed(handle) : end])
        pool.close(handle)
        told.append(pool.prefix.stats())
        pool.check()
    return told


@pytest.mark.parametrize("groups", [
    [Group.full()],
    [Group.full(block_size=8), Group.full(columns=2)],
    [Group.full(), Group.state(3, blocks=1)],
    [Group.full(), Group.window(9, keep=2, arena=1, num_blocks=24), Group.state(3, blocks=2)],
], ids=["full", "two full", "state", "window and state"])  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_core_evicts_what_the_model_evicts(make_pool, make_plan, groups, seed):
    options = {"prefix_cache": True, "groups": groups, "seed": 1}
    due = run(ModelPool(24, 4, **options), ModelPlan, seed)
    assert run(make_pool(24, 4, **options), make_plan, seed) == due
    assert max(stats.kept for stats in due[1::2]) > 3 and due[-1].evicted > 50
