"""`kvpool.governor` on a simulated machine, whose memory is counted apart from the policy."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import governor as simulated
from benchmarks.command import main
from benchmarks.governor import GIB, Computer, day
from kvpool import governor
from kvpool.governor import CRITICAL, WARNING, Governor, Holder, Machine


def busy(now):
    return 2 * GIB


def squeeze(now):
    """Others take 12 GiB within two minutes, so that half of what the pool had is left."""
    return (5 + 7 * min(max(now - 60, 0) / 120, 1)) * GIB


def governed(**options):
    return Governor(GIB, 10 * GIB, 2 * GIB, **options)


class Forgetful(Governor):
    """Forgets that MLX keeps what was freed."""

    def decide(self, machine, holders):
        return super().decide(machine._replace(buffers=0), holders)._replace(frees_buffers=False)


class Eager(Governor):
    """Grows into whatever is free now."""

    def decide(self, machine, holders):
        self._seen.clear()
        self._may_grow = 0.0
        return super().decide(machine, holders)


def test_pool_that_others_squeeze_to_half_is_never_above_its_limit_by_a_layer():
    computer = Computer(governed(), squeeze, busy, size=10 * GIB).run(300)
    assert computer.moments[0].size == 10 * GIB and computer.size < 5.1 * GIB
    assert computer.over() <= 10 * GIB // computer.layers
    assert {one.decision.reason for one in computer.resizes} == {governor.OTHERS}
    assert len(computer.resizes) <= 4 * 2 + 2  # a quarter of the reserve at a time


def test_governor_that_forgets_the_buffers_of_mlx_is_found():
    computer = Computer(Forgetful(GIB, 10 * GIB, 2 * GIB), squeeze, busy, size=10 * GIB).run(300)
    assert computer.over() > 10 * GIB // computer.layers


@pytest.mark.parametrize("planted", [False, True])
def test_memory_of_others_that_goes_comes_back_when_requests_wait(planted):
    def others(now):
        return (4 if not 60 <= now < 300 else 12) * GIB

    def load(now):
        return (2 if now < 300 or planted else 7) * GIB

    computer = Computer(governed(), others, load).run(600)
    assert computer.moments[299].size < 5 * GIB
    assert computer.size == (computer.moments[299].size if planted else 7 * GIB)


def rates(kind, seed, load, noise, seconds=1800):
    """Resizes in all, and the most within a minute after the first two, while nothing but noise happens."""
    draw = random.Random(seed)
    base = draw.uniform(2, 16) * GIB
    curve = [base + draw.uniform(-1, 1) * noise for _ in range(seconds)]
    size = draw.randrange(1, 11) * GIB
    computer = Computer(kind, lambda now: curve[int(now)], lambda now: load, size=size).run(seconds)
    times = [one.seconds for one in computer.resizes if one.seconds >= 120]
    return len(times), max((sum(start <= other < start + 60 for other in times) for start in times), default=0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 12), st.floats(0, 3))
def test_governor_in_a_steady_load_resizes_at_most_once_a_minute(seed, load, noise):
    total, _ = rates(governed(), seed, int(load * GIB), int(noise * GIB))
    assert total <= 28
    assert noise > 0.5 or total <= 3  # it settles


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 12))
def test_governor_in_noise_below_its_margin_never_resizes_twice_in_a_minute(seed, load):
    _, most = rates(governed(), seed, int(load * GIB), GIB // 4)
    assert most <= 1


def test_governor_without_a_pause_is_found():
    assert max(rates(Eager(GIB, 10 * GIB, 2 * GIB), seed, 9 * GIB, GIB)[1] for seed in range(8)) > 1


def test_idle_pool_shrinks_to_the_floor_and_the_next_request_does_not_wait():
    computer = Computer(governed(idle_release=120), lambda now: 4 * GIB, lambda now: 6 * GIB)
    computer.run(30)
    computer.load = lambda now: 0
    for now in range(30, 200):
        computer.tick(float(now))
    assert computer.size == GIB
    [released] = computer.resizes
    assert (released.seconds, released.decision.reason) == (149.0, governor.IDLE)
    computer.load = lambda now: 6 * GIB
    assert computer.tick(200.0).decision.reason == governor.WAITING
    assert computer.size == 6 * GIB


def test_day_of_the_picture_has_each_reason_and_keeps_the_reserve(capsys, tmp_path):
    main(simulated, ["--plot", str(tmp_path / "day.png")])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("GiB  ")[1] for line in lines} == {governor.OTHERS, governor.WAITING, governor.IDLE}
    assert (tmp_path / "day.png").stat().st_size > 20_000
    computer = Computer(governed(), *day()).run(1800)
    late = [one for one in computer.moments if not 840 <= one.seconds < 844]  # the model arrives at once
    assert max(one.size + one.buffers - max(one.room, GIB) for one in late) <= computer.size // computer.layers


# ------------------------------------------------------------------------------------------ one decision


def test_blank_and_cached_blocks_leave_before_live_ones():
    holders = [Holder("chat", 400, 100, 200), Holder("code", 400, 300, 100), Holder("prompts", 200, 0, 200)]
    given = {size: governor._shared(size, holders) for size in (1000, 900, 600, 400, 200, 0)}
    assert given[1000] == (400, 400, 200)
    assert given[900] == (300, 400, 200)  # the blank ones of chat
    assert given[600][0] > 100 and given[600][1] > 300
    assert given[400] == (100, 300, 0)
    assert given[200] == (50, 150, 0) and given[0] == (0, 0, 0)


def test_requests_of_one_model_get_what_another_model_does_not_use():
    govern = Governor(0, 1000, 0)
    decision = govern.decide(Machine(0, 0), [Holder("chat", 500, 500, 0, 100), Holder("code", 500, 50, 100)])
    assert decision.reason == governor.WAITING and decision.size == 1000
    assert decision.sizes[0] == 600


def test_sizes_are_whole_blocks_and_hold_the_longest_request():
    govern = Governor(0, 1000, 0)
    decision = govern.decide(Machine(0, 100, active=2000, most_active=1500), [Holder("a", 990, 10, least=95, unit=30)])
    assert decision == (480, governor.DEVICE, (480,), True)
    decision = govern.decide(Machine(1, 0, active=5000, most_active=1500), [Holder("a", 480, 10, least=95, unit=30)])
    assert decision.sizes == (120,)


SIZES = st.integers(0, 1000)
HOLDERS = st.lists(
    st.tuples(SIZES, SIZES, SIZES, SIZES, st.sampled_from([0, 0, 50]), st.booleans()), min_size=1, max_size=4
)


@settings(max_examples=300, deadline=None)
@given(HOLDERS, st.lists(st.integers(0, 3000), min_size=1, max_size=3), st.integers(0, 300))
def test_holders_that_all_fill_what_they_have_leave_the_reserve_to_others(given_holders, looks, reserve):
    holders = [
        Holder(str(n), live + cached + blank, live, cached, waiting, least, fills=fills)
        for n, (live, cached, blank, waiting, least, fills) in enumerate(given_holders)
    ]
    govern = Governor(0, 10**6, reserve, pause=0)
    for now, available in enumerate(looks):
        taken = sum(one.live + one.cached if one.fills else one.size for one in holders)
        decision = govern.decide(Machine(now, available), holders)
        assert decision.size == sum(decision.sizes)
        assert decision.size <= max(taken + available - reserve, sum(one.least for one in holders))
        holders = [
            one._replace(size=size, live=min(one.live, size), cached=min(one.cached, size - min(one.live, size)))
            for one, size in zip(holders, decision.sizes, strict=True)
        ]


def test_cache_that_fills_grows_when_it_is_full_and_a_pool_whose_cached_blocks_may_leave_does_not():
    for fills, cached, size in ((True, 390, 450), (True, 300, 400), (False, 390, 400)):
        one = Holder("prompts", 400, 0, cached, 50, fills=fills)
        assert Governor(0, 1000).decide(Machine(0, 10**4), [one]).size == size


def test_cache_without_a_limit_of_its_own_leaves_the_blank_blocks_of_pools():
    holders = [Holder("chat", 500, 100, 100), Holder("prompts", 2**63, 0, 100, fills=True)]
    sizes = Governor(0, 1000).decide(Machine(0, 10**4), holders).sizes
    assert sum(sizes) in (999, 1000) and 300 < sizes[0] < 500


def test_room_that_a_cache_was_promised_and_has_not_taken_goes_to_requests_that_wait():
    holders = [Holder("chat", 500, 500, 0, 200), Holder("prompts", 500, 0, 100, fills=True)]
    assert Governor(0, 1000).decide(Machine(0, 400), holders) == (1000, governor.WAITING, (700, 300), True)


@pytest.mark.parametrize(("pressure", "sizes"), [(CRITICAL, [100, 100]), (WARNING, [700, 700, 613, 613])])
def test_pressure_shrinks_by_steps_and_if_critical_at_once(pressure, sizes):
    govern, size, found = Governor(100, 1000), 800, []
    for now in (0, 9, 10, 19)[: len(sizes)]:
        size = govern.decide(Machine(now, 10**6, pressure), [Holder("pool", size, 50, 0, 10**4)]).size
        found.append(size)
    assert found == sizes


def test_fixed_size_does_not_shrink_for_others_but_when_idle():
    govern = Governor(100, 800, 500, yields=False, idle_release=60)
    used, idle = Holder("pool", 800, 50), Holder("pool", 800)
    assert govern.decide(Machine(0, 0, CRITICAL), [used]) == (800, governor.KEEP, (800,), False)
    assert govern.decide(Machine(59, 0), [idle]).size == 800
    assert govern.decide(Machine(60, 0), [idle])[:2] == (100, governor.IDLE)
    back = govern.decide(Machine(61, 0), [Holder("pool", 100, 100, 0, 300)])
    assert back[:2] == (400, governor.WAITING)


def test_shortage_is_met_by_buffers_first():
    govern = Governor(100, 1000, 200)
    decision = govern.decide(Machine(0, 150, buffers=80), [Holder("pool", 800, 50)])
    assert decision == (800, governor.BUFFERS, (800,), True)
    assert govern.decide(Machine(1, 230), [Holder("pool", 800, 800, 0, 500)]).reason == governor.HELD_DOWN


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"floor": 2, "ceiling": 1}, "floor is 2 bytes, above the ceiling of 1: lower it"),
        ({"floor": -1, "ceiling": 1}, "floor is -1, it must be at least 0"),
        ({"floor": 0, "ceiling": 1, "reserve": -5}, "reserve is -5"),
        ({"floor": 0, "ceiling": 1, "idle_release": float("nan")}, "idle_release is nan"),
        ({"floor": 0, "ceiling": 1, "pause": -1.0}, "pause is -1.0"),
    ],
)
def test_governor_of_impossible_numbers_is_refused(arguments, text):
    with pytest.raises(ValueError, match=rf"\[Governor\] .*{text}"):
        Governor(**arguments)
