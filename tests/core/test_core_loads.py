"""A sequence whose bytes come from elsewhere: `Pool.open(..., load=True)` and `Pool.loaded`.

What loads read, and what a flush, a close or an eviction does to them, the fuzzer finds (`tests/verify`).
"""

import pytest

from kvpool import CapacityExceeded, Group, Plan, PlanStateError, Pool, StaleHandle

PROMPT = list(range(100, 121))
STATES = [Group.full(), Group.window(8, keep=4), Group.state(slots=6, blocks=3)]


def full_pool(**options):
    return Pool(32, 4, prefix_cache=True, max_seqs=4, **options)


def group_pool(**options):
    return Pool(64, 4, groups=STATES, prefix_cache=True, max_seqs=4, **options)


@pytest.fixture(params=[full_pool, group_pool], ids=["full", "states"])
def pool(request):
    with request.param() as made:
        yield made
        made.check()


CALLS = {
    "step": lambda pool, plan, h: pool.step(plan, [h], 1),
    "reserve": lambda pool, plan, h: pool.reserve(plan, [h], 1),
    "can": lambda pool, plan, h: pool.can([h], 1),
    "fork": lambda pool, plan, h: pool.fork(h),
    "truncate": lambda pool, plan, h: pool.truncate(h, 0),
    "compact": lambda pool, plan, h: pool.compact(h, 0),
    "evict_blocks": lambda pool, plan, h: pool.evict_blocks(h, []),
    "commit": lambda pool, plan, h: pool.prefix.commit(h, []),
    "wanted": lambda pool, plan, h: pool.prefix.wanted([h]),
}


@pytest.mark.parametrize("call", CALLS)
def test_call_on_a_loading_sequence_is_refused_and_changes_nothing(pool, call):
    plan = Plan(pool, 2, 8)
    handle = pool.open(PROMPT[:20], load=True)
    before = pool.fingerprint(), pool.digest()
    with pytest.raises(PlanStateError, match="being loaded"):
        CALLS[call](pool, plan, handle)
    assert (pool.fingerprint(), pool.digest()) == before


def test_loaded_that_fits_no_load_is_refused(pool):
    handle = pool.open(PROMPT[:20], load=True)
    row = pool.open(PROMPT)
    before = pool.fingerprint()
    for n in (-1, 21, 2**31):
        with pytest.raises(ValueError, match="loaded"):
            pool.loaded(handle, n)
    for n in (True, 1.0, "1", None):
        with pytest.raises(TypeError):
            pool.loaded(handle, n)
    with pytest.raises(PlanStateError, match="not being loaded"):
        pool.loaded(row, 0)
    assert pool.fingerprint() == before
    pool.reset()
    with pytest.raises(StaleHandle):
        pool.loaded(handle, 20)
    assert pool.stats().used == 0


@pytest.mark.parametrize("options", [{"load": 1}, {"load": True, "reserve": False}, {"load": True, "cut": 3}])
def test_load_with_options_that_make_no_sense_is_refused(pool, options):
    before = pool.fingerprint()
    with pytest.raises((TypeError, ValueError), match="load"):
        pool.open(PROMPT[:20], **options)
    assert pool.fingerprint() == before


def test_length_that_no_hit_has_is_refused_where_hits_need_checkpoints():
    with group_pool() as pool:
        handle = pool.open(PROMPT[:20], load=True)
        for n in (4, 16, 19):
            with pytest.raises(ValueError, match=r"0 or 20 \.\. 20"):
                pool.loaded(handle, n)
        with pytest.raises(ValueError, match="multiple of 4"):
            pool.open(PROMPT[:18], load=True)


def long_pool(*groups):
    """Nine blocks of 2^28 tokens. Tokens of nodes have places, 11 GB that nobody touches."""
    try:
        return Pool(10, 2**28, groups=groups, prefix_cache=True, max_seqs=1)
    except MemoryError:
        pytest.skip("this machine does not promise 11 GB")


def test_load_with_groups_ends_where_a_plan_can_still_step():
    block = 2**28
    with long_pool(Group.full()) as pool:
        plan = Plan(pool, 1, 1, formats=("seq_lens",), table_width=9)
        handle = pool.open(9 * block, load=True)
        before = pool.fingerprint(), pool.digest()
        with pytest.raises(ValueError, match=rf"\[loaded\] n is \d+, it must be 0 or 0 \.\. {9 * block}"):
            pool.loaded(handle, 9 * block + 1)
        assert (pool.fingerprint(), pool.digest()) == before
        assert pool.loaded(handle, 2**31 - 1)
        with pytest.raises(CapacityExceeded):
            pool.step(plan, [handle], 1)
        pool.step(plan, [handle], 0)
        assert plan.seq_lens.tolist() == [2**31 - 1]
        pool.done(plan)
        pool.compact(handle, block)  # nearly all of them leave
        assert (pool.num_tokens(handle), pool.kv_len(handle)) == (2**31 - 1, block)
        assert len(pool.table(handle, 0).ravel()) == 3  # of nine, as six blocks of tokens have left
        pool.check()


def test_load_that_no_plan_can_step_is_refused_where_it_ends_as_a_whole():
    with long_pool(Group.full(), Group.window(8)) as pool:
        before = pool.fingerprint(), pool.digest()
        with pytest.raises(CapacityExceeded, match=r"\[open\] 2415919104 tokens, .* 2147483647"):
            pool.open(9 * 2**28, load=True)
        assert (pool.fingerprint(), pool.digest()) == before
        assert pool.is_open(pool.open(7 * 2**28, load=True))


def test_bundle_is_that_of_a_hit_until_a_step_has_loaded_it_and_of_a_state_group():
    with group_pool() as pool:
        plan, handle = Plan(pool, 2, 8), pool.open(PROMPT[:20], load=True)
        pool.loaded(handle, 20)
        pool.prefix.commit(handle, PROMPT[:20])
        pool.close(handle)
        assert pool.prefix.bundle(pool.open(3), 2).tolist() == []
        row = pool.open(PROMPT)
        bundle = pool.prefix.bundle(row, 2).tolist()
        for wrong in (-1, 0, 1, 3):
            with pytest.raises(ValueError, match=r"\[bundle\] .*group"):
                pool.prefix.bundle(row, wrong)
        with pytest.raises(StaleHandle):
            pool.prefix.bundle(handle, 2)
        pool.step(plan, [row], 1)
        assert plan.groups[2].state_loads[0, 1:].tolist() == bundle
        pool.done(plan)
        assert pool.prefix.bundle(row, 2).tolist() == []


@pytest.mark.parametrize("groups", [[Group.full()], [Group.full(), Group.full(block_size=8)]], ids=["one", "two"])
def test_pool_of_full_groups_loads_without_a_cache(groups):
    """A prompt or a count of tokens: nothing is found, and blocks are taken for all of it."""
    with Pool(64, 4, groups=groups) as pool:
        plan = Plan(pool, 1, 32, formats=("positions",))
        for asked in (PROMPT, len(PROMPT)):
            handle = pool.open(asked, load=True)
            assert (pool.num_tokens(handle), pool.capacity(handle)) == (0, 24)
            with pytest.raises(PlanStateError, match="being loaded"):
                pool.step(plan, [handle], 1)
            assert pool.loaded(handle, 10) and pool.num_tokens(handle) == 10
            pool.step(plan, [handle], 11)
            assert plan.positions.tolist() == list(range(10, 21))
            pool.done(plan)
            pool.close(handle)
            pool.check()
        assert pool.stats().used == 0


def test_pool_with_a_window_or_a_state_without_a_cache_cannot_load():
    for groups in ([Group.full(), Group.window(8)], [Group.full(), Group.state(slots=4, blocks=3)], STATES):
        with Pool(64, 4, groups=groups) as pool:
            before = pool.fingerprint(), pool.digest()
            for asked in (8, PROMPT):
                with pytest.raises(ValueError, match=r"\[open\] load"):
                    pool.open(asked, load=True)
            assert (pool.fingerprint(), pool.digest()) == before
    no_bundle = [Group.full(), Group.state(slots=4)]
    with Pool(64, 4, groups=no_bundle, prefix_cache=True) as pool, pytest.raises(ValueError, match="load"):
        pool.open(PROMPT[:20], load=True)
