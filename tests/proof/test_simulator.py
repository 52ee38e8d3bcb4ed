"""The asynchronous engine in simulation: the core passes, a seed replays, and the events that matter do happen."""

from collections import Counter

import pytest

from kvpool.errors import PoolClosed
from proof.simulation import simulator
from proof.simulation.faults import FAULTS, convict
from proof.simulation.host import Host, Kit
from proof.simulation.simulator import Failure, simulate


def log_of(seed, steps=100):
    host = Host(seed, Kit())
    host.run(steps)
    host.drain()
    digest = host.pool.digest()
    host.leave()
    return digest, vars(host.tally), len(host.log)


@pytest.mark.long
def test_core_in_ten_thousand_steps_reads_nothing_stale_and_leaks_nothing():
    outcome = simulate(seed=1, steps=10_000)
    assert outcome.failures == [] and outcome.steps >= 10_000
    assert outcome.reads > 10 * outcome.steps
    quiet = {name for name, value in vars(outcome).items() if value == 0} - {"failures"}
    assert not quiet, f"never happened: {quiet}"


def test_seed_determines_the_simulated_world():
    assert log_of(3) == log_of(3)
    assert log_of(3) != log_of(4)


def test_sixty_seeds_cover_both_values_of_every_switch():
    shapes = [Host(seed, Kit()).shape for seed in range(60)]
    for name in ("prefix_cache", "in_order", "by_tables"):
        assert {getattr(shape, name) for shape in shapes} == {False, True}
    assert {shape.depth for shape in shapes} == {1, 2, 3, 4}


@pytest.mark.long
def test_requests_are_aborted_and_preempted_in_every_state():
    states = Counter()
    for seed in range(1, 9):
        host = Host(seed, Kit(shape={"weights": {"abort": 2.0, "preempt": 1.0, "fork": 3.0}}))
        host.run(500)
        host.leave()
        states += host.states
    running = {"prefill", "decode"} | {f"{what} in flight" for what in ("prefill", "decode", "drafts", "fork of a row")}
    assert {state for verb, state in states if verb == "preempt"} == running
    assert {state for verb, state in states if verb == "abort"} == running | {"waiting"}


def test_failure_names_a_seed_that_fails_again():
    first = convict("no fence")
    with pytest.raises(Failure) as caught:
        simulate(first.seed, 1, FAULTS["no fence"])
    again = caught.value
    assert (again.seed, again.steps) == (first.seed, first.steps)
    assert f"--seed {first.seed} " in str(again) and "step" in "".join(again.log)


def test_pool_of_a_failed_simulation_is_released():
    pools = []

    class Remembered(FAULTS["no fence"].Pool):
        def __init__(self, *arguments, **options):
            pools.append(self)

    with pytest.raises(Failure):
        simulate(1, 1, Kit(Pool=Remembered, shape=FAULTS["no fence"].shape))
    with pytest.raises(PoolClosed):
        pools[0].stats()


def test_command_says_what_happened_and_fails_when_something_is_wrong(capsys, monkeypatch):
    assert simulator.main(["--seed", "5", "--steps", "300"]) == 0
    assert "rollbacks" in capsys.readouterr().out
    monkeypatch.setattr(simulator, "Kit", lambda: FAULTS["no fence"])
    assert simulator.main(["--seed", "1", "--steps", "300"]) == 1
    assert "stale read" in capsys.readouterr().out
