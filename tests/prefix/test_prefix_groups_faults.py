"""Faults of the prefix cache with layer groups are seen, in what steps read or beside the core."""

import pytest
from checkpoint_faults import WRONG_CHOICE, WRONG_CONTENT, WRONG_ORDER

from kvpool import Group, Plan, Pool
from kvpool.testing.model import ModelPlan, ModelPool
from proof.machine.checkpoints import Program, WrongContent, agree

CALLS, MOST = 150, 300_000


def _plan(pool, rows, tokens):
    return (Plan if isinstance(pool, Pool) else ModelPlan)(pool, rows, tokens)


def first_seed(play, kind):
    """The first program that shows a fault."""
    for seed in range(MOST // CALLS):
        try:
            play(seed)
        except kind as finding:
            print("seed", seed, repr(finding)[:200])
            return
    raise AssertionError("no program shows it")


@pytest.mark.parametrize("fault", WRONG_CONTENT)
def test_planted_fault_shows_in_what_steps_read(fault):
    def play(seed):
        for _ in Program(seed, lambda *a, **o: [fault(*a, **o)], ModelPlan).run(CALLS):
            pass

    first_seed(play, WrongContent)


@pytest.mark.long
@pytest.mark.parametrize("fault", WRONG_CHOICE)
def test_planted_fault_shows_beside_the_core(fault):
    first_seed(lambda seed: agree(seed, lambda *a, **o: [Pool(*a, **o), fault(*a, **o)], _plan, CALLS), AssertionError)


LAYERS = ([Group.full()], [Group.window(8), Group.full(arena=1, num_blocks=60)])
"""Groups beside a state; arena 0, or 1, is the one that makes room."""


def what_leaves(make_pool, lengths, turn):
    """What is left of two prompts while one arena makes room; a hit on the first one follows the prompt `turn`."""
    prompts, seen = (list(range(lengths[0])), list(range(100, 100 + lengths[1]))), []
    for number, layers in enumerate(LAYERS):
        pool = make_pool(60, 4, groups=[*layers, Group.state(8, blocks=1)], prefix_cache=True)
        plan = _plan(pool, 4, 256)
        for index, prompt in enumerate(prompts):
            handle = pool.open(prompt, b"", len(prompt))
            while pool.num_tokens(handle) < len(prompt):
                length, (place,) = pool.num_tokens(handle), pool.prefix.wanted([handle]).tolist()
                end = place if place > 0 else len(prompt)
                pool.step(plan, [handle], end - length)
                pool.done(plan)
                pool.prefix.commit(handle, prompt[length:end])
            pool.close(handle)
            if index == turn:
                pool.close(pool.open([*prompts[0], 1]))
        while pool.blocks.arena(number).evict(1):
            hits = [pool.prefix.match([*prompt[:n], 999]) for prompt in prompts for n in range(4, 61, 4)]
            seen.append((hits, pool.prefix.stats().checkpoints))
    return seen


@pytest.mark.parametrize("fault", WRONG_ORDER)
def test_planted_fault_shows_in_the_order_of_leaving(fault):
    differs = False
    for case in (((60, 40), 1), ((24, 60), 0)):
        due = what_leaves(Pool, *case)
        assert due == what_leaves(ModelPool, *case) and len(due) > 20
        differs |= due != what_leaves(fault, *case)
    assert differs
