"""The order in which checkpoints and entries of layer groups leave: the core's, and the plain model's."""

from functools import cache, partial

import pytest
from checkpoint_faults import WRONG_ORDER

from kvpool import Group, Plan, Pool
from kvpool.testing import ModelPlan, ModelPool


def _plan(pool, rows, tokens):
    return (Plan if isinstance(pool, Pool) else ModelPlan)(pool, rows, tokens)


def serve(pool, plan, prompt, cut):
    """Open a prompt, compute it in steps that end where the pool wants, commit it and close it."""
    handle = pool.open(prompt, b"", cut)
    while pool.num_tokens(handle) < len(prompt):
        length, (place,) = pool.num_tokens(handle), pool.prefix.wanted([handle]).tolist()
        end = place if place > 0 else len(prompt)
        pool.step(plan, [handle], end - length)
        pool.done(plan)
        pool.prefix.commit(handle, prompt[length:end])
    pool.close(handle)


def hits(pool, prompts):
    """The lengths of the hits of all beginnings of some prompts."""
    return [pool.prefix.match([*prompt[:n], 999]) for prompt in prompts for n in range(4, len(prompt) + 1, 4)]


LAYERS = ([Group.full()], [Group.window(8), Group.full(arena=1, num_blocks=60)])
"""Groups beside a state; arena 0, or 1, is the one that makes room."""


def what_leaves(make_pool, lengths, turn):
    """What hits find of two prompts while one arena makes room. The first is a hit after the prompt `turn`."""
    prompts, seen = (list(range(lengths[0])), list(range(100, 100 + lengths[1]))), []
    for number, layers in enumerate(LAYERS):
        pool = make_pool(60, 4, groups=[*layers, Group.state(8, blocks=1)], prefix_cache=True)
        plan = _plan(pool, 4, 256)
        for index, prompt in enumerate(prompts):
            serve(pool, plan, prompt, len(prompt))
            if index == turn:
                pool.close(pool.open([*prompts[0], 1]))
        while pool.blocks.arena(number).evict(1):
            seen.append((hits(pool, prompts), pool.prefix.stats().checkpoints))
    return seen + what_has_no_room(make_pool)


def what_has_no_room(make_pool):
    """What hits find after more checkpoints than there is room for, of windows and of states."""
    seen, prompt = [], list(range(64))
    for more in ([], [Group.state(4, blocks=1)]):
        layers = [Group.window(8), Group.full(arena=1, num_blocks=20), *more]
        pool = make_pool(200, 4, max_seqs=1, max_blocks_per_seq=16, groups=layers, prefix_cache=True)
        plan = _plan(pool, 1, 256)
        for tail in range(3):
            for length in range(8, 64, 4):
                serve(pool, plan, [*prompt[:length], 70 + tail], length)
                seen.append((hits(pool, [prompt]), pool.prefix.stats()[-5:]))
    return seen


CASES = (((60, 40), 1), ((24, 60), 0))
what_is_due = cache(partial(what_leaves, Pool))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_model_agrees_in_the_order_of_leaving(case):
    assert what_is_due(*case) == what_leaves(ModelPool, *case) and len(what_is_due(*case)) > 20


@pytest.mark.parametrize(
    "fault", [*WRONG_ORDER[:2], *(pytest.param(fault, marks=pytest.mark.long) for fault in WRONG_ORDER[2:])]
)
def test_planted_fault_shows_in_the_order_of_leaving(fault):
    assert any(what_is_due(*case) != what_leaves(fault, *case) for case in CASES)
