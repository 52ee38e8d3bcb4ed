"""The fuzzer's driver: programs are functions of their seed, go everywhere, and find nothing in this core."""

import pytest

from kvpool import Pool
from proof.fuzz._broken import broken
from proof.fuzz._fuzz import Driver
from proof.fuzz.hunt import hunt
from proof.fuzz.shape import EVICTIONS, OPERATIONS, STATES, big_shape, draw_shape, faces

RUNS = 150
CALLS = 1500


def run(shape, calls=CALLS):
    """One run; returns its digest, fingerprint and counters."""
    driver = Driver(shape)
    try:
        driver.run(calls)
        driver.audit()
        return driver.digest(), driver.fingerprint(), driver.results()
    finally:
        driver.shutdown()


@pytest.fixture(scope="module")
def everything():
    """Calls by operation and states by name, of all runs."""
    calls, states = dict.fromkeys(OPERATIONS, 0), dict.fromkeys(STATES, 0)
    for seed in range(RUNS):
        _, _, (some_calls, some_states) = run(draw_shape(seed))
        calls = {name: calls[name] + n for name, n in some_calls.items()}
        states = {name: n + some_states[name] for name, n in states.items()}
    return calls, states


def test_runs_pass_and_reach_every_state(everything):
    calls, states = everything
    assert RUNS * CALLS * 0.8 < sum(calls.values()) < RUNS * CALLS
    assert all(calls.values()) and all(states.values()), (calls, states)


def test_same_seed_same_run():
    assert run(draw_shape(5)) == run(draw_shape(5))


def test_other_seed_other_run():
    assert run(draw_shape(5)) != run(draw_shape(6))


def test_recorded_run_replays_the_same_calls():
    shape = draw_shape(11)
    one, other = Driver(shape), Driver(shape)
    one.run(CALLS)
    other.replay(other.words(0, CALLS))
    assert one.digest() == other.digest()
    assert one.fingerprint() == other.fingerprint()


def test_any_part_of_a_program_is_a_program():
    shape = draw_shape(12)
    driver = Driver(shape)
    driver.replay(driver.words(0, CALLS)[::3])
    driver.audit()


def test_large_pool_is_sound_at_checkpoints():
    driver = Driver(big_shape(1, num_blocks=1 << 12))
    driver.run(30_000, check_every=10_000)
    driver.audit()


@pytest.mark.long
def test_half_a_million_calls_with_evictions_find_nothing():
    report = hunt(seed=1, calls=500_000)
    assert report.finding is None and report.calls >= 500_000
    assert all(report.by_operation[name] > 1_000 for name in EVICTIONS), report.by_operation


def hunt_large(make_pool=Pool):
    """Runs of large pools, on pools that are small enough to be checked often."""
    return hunt(
        seed=1,
        calls=200_000,
        make_pool=make_pool,
        make_shape=lambda seed: big_shape(seed, num_blocks=1 << 11),
        calls_per_run=20_000,
        check_every=2_000,
    )


def test_runs_of_large_pools_evict_tokens_and_find_nothing():
    report = hunt_large()
    assert report.finding is None
    assert all(report.by_operation[name] > 100 for name in EVICTIONS), report.by_operation
    assert report.states["compactions"] > 100


PLANTED = ("shared block compacted", "committed block compacted", "copy missing from an unshare")


@pytest.mark.parametrize("fault", PLANTED)
def test_runs_of_large_pools_find_what_is_planted_into_evictions(fault):
    assert hunt_large(broken(fault)).finding is not None


def test_dice_give_every_enabled_operation_a_face():
    dice = faces({"step": 1000.0, "close": 0.001})
    assert len(dice) == len(OPERATIONS) and sum(dice) == 256
    assert dice[OPERATIONS.index("close")] == 1 and dice[OPERATIONS.index("fork")] == 0
