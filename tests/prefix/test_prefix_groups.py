"""Hits of pools with layer groups: docs/prefix.md, "Layer groups"."""

import pytest
from hybrid_programs import KINDS, Program, WrongContent, figures

from kvpool import Group, Plan, Pool
from kvpool.testing.model import ModelPlan, ModelPool
from kvpool.testing.model_checkpoints import CheckpointModel

CALLS = 150


def prefill(pool, plan, prompt, cut=None, namespace=b""):
    """Open a prompt and compute it in chunks that end where the pool wants; returns (handle, cached tokens)."""
    handle = pool.open(prompt, namespace, cut)
    length = cached = pool.num_tokens(handle)
    while length < len(prompt):
        place = int(pool.prefix.wanted([handle])[0])
        end = place if place > 0 else len(prompt)
        pool.step(plan, [handle], end - length)
        pool.done(plan)
        pool.prefix.commit(handle, prompt[length:end])
        length = end
    return handle, cached


def make(*groups, num_blocks=200, **options):
    pool = Pool(num_blocks, 4, groups=list(groups), prefix_cache=True, **options)
    return pool, Plan(pool, 4, 256)


@pytest.mark.parametrize("seed", range(120))
def test_random_programs_agree_with_the_model_and_read_their_own_content(seed):
    print("seed", seed)
    program = Program(seed, lambda *a, **o: [Pool(*a, **o), ModelPool(*a, **o)], _plan)
    core, model = program.pools
    for _ in program.run(CALLS):
        core.check()
        model.check()
        assert core.prefix.stats().nodes == len(model._nodes)
        for arena in range(len(model.arenas)):
            assert (figures(core, arena) == figures(model, arena)).all(), arena
        for name, (handles, _, _) in program.rows.items():
            assert core.num_tokens(name) == model.num_tokens(handles[1])


def _plan(pool, rows, tokens):
    return (Plan if isinstance(pool, Pool) else ModelPlan)(pool, rows, tokens)


@pytest.mark.parametrize("groups", [kinds for kinds in KINDS if kinds != (Group.full(),) and not any(g.arena for g in kinds)])
def test_second_turn_finds_all_but_the_tail_of_the_first(groups):
    if any(group.kind == "state" and not group.blocks for group in groups):
        pytest.skip("nothing can be restored")
    pool, plan = make(*groups, num_blocks=2000, max_blocks_per_seq=400)
    grain = 4 * max((group.block_size or 4) // 4 for group in groups)
    for length in range(97, 97 + 2 * grain):
        prompt = [length, *range(1, length)]
        pool.close(prefill(pool, plan, prompt)[0])
        assert pool.prefix.match([*prompt[: length - 11], *range(500, 540)]) == (length - 16) // grain * grain
    pool.check()


def test_cut_tells_where_the_checkpoint_is_and_nothing_lies_behind_it():
    pool, plan = make(Group.full(), Group.state(8, blocks=20))  # so large that nothing is kept inside of a prompt
    prompt = list(range(60))
    pool.close(prefill(pool, plan, prompt, cut=41)[0])
    assert [pool.prefix.match([*prompt[:n], 999]) for n in (39, 40, 41, 60)] == [0, 40, 40, 40]


def test_junction_is_kept_for_the_third_visitor():
    pool, plan = make(Group.full(), Group.state(8, blocks=20))
    first, second, third = ([*range(40), *range(k, k + 40)] for k in (100, 200, 300))
    assert prefill(pool, plan, first)[1] == 0
    assert prefill(pool, plan, second)[1] == 0  # there is no state at the junction yet
    assert prefill(pool, plan, third)[1] == 40


def test_checkpoint_for_which_there_are_no_blocks_is_skipped():
    pool, plan = make(Group.full(), Group.state(8, blocks=30), num_blocks=33)
    handle, _ = prefill(pool, plan, list(range(40)))
    assert pool.num_tokens(handle) == 40
    assert pool.prefix.match(list(range(41))) == 0


def test_kv_without_a_checkpoint_leaves_before_kv_with_one():
    pool, plan = make(Group.full(), Group.state(8, blocks=1), num_blocks=40)
    kept = list(range(40))
    pool.close(prefill(pool, plan, kept)[0])
    pool.close(prefill(pool, plan, list(range(100, 140)), cut=0)[0])  # younger, but nobody can use it
    pool.open(88)  # 22 of the 28 blocks that are left, 10 of which are these
    assert pool.prefix.match([*kept, 1]) == 24


@pytest.mark.parametrize("cut", [-1, 11])
def test_cut_beyond_the_prompt_is_refused(cut):
    pool, _ = make(Group.full(), Group.state(8, blocks=1))
    with pytest.raises(ValueError, match=r"\[open\] cut"):
        pool.open(list(range(10)), cut=cut)
    assert pool.stats().sequences == 0


def test_cut_without_a_prefix_cache_is_refused():
    with pytest.raises(ValueError, match="no prefix cache"):
        Pool(8, 4).open([1, 2, 3], cut=1)


@pytest.mark.parametrize("leave", ["compact", "blocks"])
def test_row_that_lost_tokens_ends_its_index_and_what_it_committed_stays(leave):
    pool, plan = make(Group.full(), Group.window(8), Group.state(8, blocks=1))
    prompt = list(range(60))
    handle, _ = prefill(pool, plan, prompt)
    found = pool.prefix.match([*prompt, 1])
    assert found > 0
    if leave == "blocks":
        pool.evict_blocks(handle, [1, 2])
    else:
        with pytest.raises(ValueError, match="unshare"):
            pool.compact(handle, 20)  # what is committed is not rewritten
        pool.unshare(plan, [handle], 20)
        pool.done(plan)
        pool.compact(handle, 20)
    assert pool.prefix.committed(handle) == 0 and pool.prefix.wanted([handle]).tolist() == [-1]
    pool.step(plan, [handle], 4)
    pool.done(plan)
    with pytest.raises(ValueError, match="commits no more"):
        pool.prefix.commit(handle, [1])
    assert pool.prefix.match([*prompt, 1]) == found
    other = pool.open([*prompt, 1])
    assert pool.num_tokens(other) == pool.kv_len(other) == found
    pool.close([handle, other])
    pool.check()


def test_row_in_the_place_of_one_that_lost_tokens_has_lost_none():
    pool, plan = make(Group.full(), Group.window(8), max_seqs=1)
    prompt = list(range(60))
    for _ in range(2):
        handle, cached = prefill(pool, plan, prompt)
        assert pool.kv_len(handle) == 60 and len(pool.table(handle)) == 15
        pool.evict_blocks(handle, [0, 1])
        pool.close(handle)
    assert cached > 0
    pool.check()


# ---------------------------------------------------------------------------------------------- planted faults


class EvictedRowCommits(CheckpointModel):
    """A row that lost tokens goes on in the index."""

    def _lose_in(self, layer, seq, n, left):
        root, tokens, known = seq.root, seq.tokens, seq.known
        super()._lose_in(layer, seq, n, left)
        seq.root, seq.tokens, seq.known, seq.point = root, tokens, known, 0


class OtherNamespaces(CheckpointModel):
    """All namespaces have one root."""

    def _root(self, namespace):
        return super()._root(b"")

    def _path(self, tokens, namespace, most):
        return super()._path(tokens, b"", most)


class StaleStates(CheckpointModel):
    """A load reads the bundle when nobody holds it any more."""

    def _is_free(self, mark):
        return mark.step is None


class WrittenInPlace(CheckpointModel):
    """Committed entries are written in place."""

    def _group_need(self, seq, n, layer, lost, reads):
        entries, self._entries = self._entries, {}
        try:
            return super()._group_need(seq, n, layer, lost, reads)
        finally:
            self._entries = entries


@pytest.mark.parametrize("fault", [OtherNamespaces, StaleStates, WrittenInPlace, EvictedRowCommits])
def test_planted_fault_shows_in_what_steps_read(fault):
    for seed in range(400):
        try:
            for _ in Program(seed, lambda *a, **o: [fault(*a, **o)], ModelPlan).run(CALLS):
                pass
        except (WrongContent, AssertionError, KeyError, ValueError, IndexError):
            print("seed", seed)
            return
    raise AssertionError("no program shows it")
