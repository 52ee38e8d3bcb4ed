"""The compiled fuzzer of pools with layer groups: it goes everywhere and finds what is planted."""

import pytest

import kvpool
from kvpool.testing.fuzz_target import FuzzFinding
from proof.fuzz import shrink
from proof.fuzz._broken_groups import GROUP_FAULTS, broken_groups
from proof.fuzz._fuzz_groups import GroupDriver
from proof.fuzz.hunt import hunt
from proof.fuzz.shape import GROUP_STATES, GROUP_WEIGHTS, draw_group_shape

CALLS_MAX = 300_000
SEEDS = range(150)


def run(shape, calls=1500, more=0):
    """One run; returns its digest and fingerprint."""
    driver = GroupDriver(shape)
    driver.read_more(more)
    try:
        driver.run(calls)
        driver.audit()
        return driver.digest(), driver.fingerprint()
    finally:
        driver.shutdown()


def test_shapes_have_all_that_a_pool_can_have():
    pools = [draw_group_shape(seed).pool for seed in SEEDS]
    groups = [group for pool in pools for group in pool["groups"]]
    assert {len(pool["groups"]) for pool in pools} >= {1, 2, 8}
    assert {group.kind for group in groups} == {"full", "window", "chunk", "state"}
    assert {pool["in_order"] for pool in pools} == {True, False}
    assert any(pool["lookahead"] for pool in pools) and any(group.keep for group in groups)
    assert max(group.columns for group in groups) > 1 and max(group.arena for group in groups) > 1


def test_sound_pool_has_no_finding_and_every_state_is_reached():
    report = hunt(seed=1, calls=400_000, make_shape=draw_group_shape)
    assert report.finding is None and report.calls >= 400_000
    assert not [name for name in GROUP_WEIGHTS if report.by_operation[name] < 100], report.by_operation
    assert not [name for name in GROUP_STATES if report.states[name] < 100], report.states


@pytest.mark.parametrize("fault", GROUP_FAULTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_planted_bug_is_found(fault, seed):
    report = hunt(seed, calls=CALLS_MAX, make_shape=draw_group_shape, make_pool=broken_groups(fault))
    print(f"{fault}: {report.calls} calls, {report.finding}")
    assert report.finding is not None, f"{report.calls} calls found nothing"


def test_contents_convict_a_rule_that_pool_and_books_have_wrong():
    """The judge of contents knows no rule: queries that read a token more are robbed, whatever both agree on."""
    found = []
    for seed in SEEDS:
        try:
            run(draw_group_shape(seed), more=1)
        except FuzzFinding as finding:
            found.append(str(finding))
    assert len(found) >= 10
    assert all("does not read its token" in finding for finding in found), found


def test_same_seed_same_run():
    assert run(draw_group_shape(5)) == run(draw_group_shape(5)) != run(draw_group_shape(6))


def test_any_part_of_a_program_is_a_program():
    driver = GroupDriver(draw_group_shape(12))
    driver.replay(driver.words(0, 1500)[::3])
    driver.audit()
    driver.shutdown()


@pytest.mark.parametrize("seed", [1, 20, 27])  # the group that shows the fault is in another arena than 0
def test_finding_shrinks_to_a_test_that_fails_on_the_bug_alone(seed):
    fault = "lookahead forgotten"
    report = hunt(seed, calls=CALLS_MAX, make_shape=draw_group_shape, make_pool=broken_groups(fault))
    source = f"from proof.fuzz._broken_groups import broken_groups\nbroken_groups({fault!r})"
    failure = shrink.shrink(report.shape, report.words, broken_groups(fault), source)
    print(failure.script)
    assert failure.reproduces and len(failure.words) <= 30 and len(failure.shape.pool["groups"]) == 1
    assert not shrink.script_fails(shrink.make_script(failure.shape, failure.words, kvpool.Pool))
