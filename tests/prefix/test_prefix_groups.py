"""Hits of pools with layer groups: docs/prefix.md."""

import numpy as np
import pytest

from kvpool import Group, OutOfBlocks, OutOfSequences, Plan, Pool, StaleHandle
from kvpool.testing import ModelPlan, ModelPool

#: Groups for which a hit needs a checkpoint, or an entry of several base blocks.
KINDS = (
    (Group.full(), Group.state(12, blocks=3)),
    (Group.full(), Group.state(12, blocks=1)),
    (Group.full(), Group.window(8)),
    (Group.full(), Group.window(9, keep=3, columns=2), Group.state(12, blocks=2)),
    (Group.window(6),),
    (Group.full(), Group.chunk(8)),
    (Group.full(columns=2, block_size=8), Group.window(12), Group.full()),
    (Group.state(12, blocks=2), Group.state(10, blocks=1)),
)


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


def make(*groups, num_blocks=200, kinds=(Pool, Plan), **options):
    pool = kinds[0](num_blocks, 4, groups=list(groups), prefix_cache=True, **options)
    return pool, kinds[1](pool, 4, 256)


#: Every number of a test holds for the core and for the model.
EITHER = pytest.mark.parametrize("kinds", [(Pool, Plan), (ModelPool, ModelPlan)], ids=["core", "model"])


@pytest.mark.parametrize("groups", KINDS)
def test_second_turn_finds_all_but_the_tail_of_the_first(groups):
    pool, plan = make(*groups, num_blocks=2000, max_blocks_per_seq=400)
    grain = 4 * max((group.block_size or 4) // 4 for group in groups)
    for length in range(97, 97 + 2 * grain):
        prompt = [length, *range(1, length)]
        pool.close(prefill(pool, plan, prompt)[0])
        assert pool.prefix.match([*prompt[: length - 11], *range(500, 540)]) == (length - 16) // grain * grain
    pool.check()


@pytest.mark.parametrize("more", [[], [Group.state(4, blocks=1)]])
def test_checkpoints_beyond_the_room_push_out_the_oldest(more):
    layers = [Group.window(8), Group.full(arena=1, num_blocks=30), *more]
    pool, plan = make(*layers, max_seqs=1, max_blocks_per_seq=25)
    prompt, room = list(range(100)), (30 + 1) // 4 + 1
    for end in range(4, 100, 4):
        pool.close(prefill(pool, plan, [*prompt[:end], 500], cut=end)[0])
        assert pool.prefix.stats().checkpoints == min(room, end // 4)
    left = range(96 - 4 * (room - 1), 97, 4)
    assert [end for end in range(4, 97, 4) if pool.prefix.match([*prompt[:end], 500]) == end] == [*left]
    assert pool.prefix.stats().checkpoints_evicted == 24 - room
    pool.check()


@pytest.mark.parametrize(("layers", "most"), [
    (None, 120),
    ([Group.full(), Group.window(1024, columns=5)], 165),
    ([Group.full(), Group.window(128), Group.state(64, blocks=3)], 165),
    ([Group.full(), Group.state(64, blocks=1)], 165),
    ([Group.full(), Group.chunk(8192, columns=3)], 165),
    ([Group.full(), Group.window(16), Group.window(128, arena=1, num_blocks=10_000)], 165),
    ([Group.full(columns=2), Group.window(512, columns=10)], 100),  # half as many base blocks
    ([Group.full(block_size=32), Group.window(1024, columns=5)], 330),  # twice as many
])  # fmt: skip
def test_index_takes_few_bytes_per_block(layers, most):
    for events in (0, 1):  # with events each base block has a key of 16 bytes
        sizes = {"num_blocks": 100_000, "block_size": 16, "max_seqs": 64, "prefix_cache": True, "events": events}
        pool, blocks = Pool(**sizes, groups=layers), 100_000 + sum(group.num_blocks or 0 for group in layers or ())
        assert pool.prefix.nbytes / blocks <= most + 32 * events


@pytest.mark.parametrize(("options", "error"), [
    *(({"cut": cut}, ValueError) for cut in (-1, 11, 2**70)),
    *(({"cut": cut}, TypeError) for cut in (True, 3.0, "3")),
    ({"reserve": 1}, TypeError),
    ({"tokens": 3, "cut": 1}, ValueError),
    ({"tokens": 5, "reserve": False}, ValueError),
])  # fmt: skip
def test_option_of_open_that_fits_no_prompt_is_refused(options, error):
    pool, _ = make(Group.full(), Group.state(8, blocks=1))
    before, name = (pool.fingerprint(), pool.digest()), [*options][-1]
    with pytest.raises(error, match=rf"^\[open\] .*{name}"):
        pool.open(**{"tokens": list(range(10))} | options)
    assert (pool.fingerprint(), pool.digest()) == before


@pytest.mark.parametrize("asked", [3, [1, 2, 3]])
def test_cut_without_a_prefix_cache_is_refused(asked):
    with pytest.raises(ValueError, match="no prefix cache"):
        Pool(8, 4).open(asked, cut=1)


def test_cut_in_a_pool_without_groups_changes_nothing():
    pools = [Pool(20, 4, prefix_cache=True, seed=1) for _ in range(2)]
    handles = [pools[0].open(list(range(9))), pools[1].open(list(range(9)), cut=3)]
    assert len({pool.digest() for pool in pools}) == 1
    assert [pool.prefix.wanted([h]).tolist() for pool, h in zip(pools, handles, strict=True)] == [[-1], [-1]]


def test_checkpoint_larger_than_arena_0_is_refused():
    with pytest.raises(ValueError, match="a checkpoint has 20 blocks, arena 0 has 19"):
        Pool(20, 4, groups=[Group.full(), Group.state(4, blocks=20)], prefix_cache=True, reserved_blocks=1)
    Pool(20, 4, groups=[Group.full(), Group.state(4, blocks=19)], prefix_cache=True, reserved_blocks=1)
    with pytest.raises(ValueError, match="has 4294967294 blocks"):
        Pool(20, 4, groups=[Group.state(4, blocks=2**31 - 1)] * 2, prefix_cache=True)


def test_blocks_by_id_leave_entries_whole():
    pool, plan = make(Group.full(columns=3), num_blocks=31, reserved_blocks=1)
    handle, _ = prefill(pool, plan, list(range(36)))
    with pytest.raises(ValueError, match="was not taken with alloc"):
        pool.blocks.incref(pool.table(handle)[0])
    pool.close(handle)
    assert pool.stats().blank == 3 and pool.prefix.match(list(range(37))) == 36
    with pytest.raises(OutOfBlocks) as caught:
        pool.blocks.alloc(4)
    assert (caught.value.short_by, caught.value.evictable) == (1, 0)
    assert pool.blocks.evict(1) == 1 and pool.stats().blank == 6
    mine = pool.blocks.alloc(6)
    pool.blocks.incref(mine)
    assert pool.prefix.match(list(range(37))) == 32
    pool.check()
    assert pool.blocks.evict(1000) == 24 and pool.prefix.stats().nodes == 0
    pool.check()


def test_reset_and_shutdown_with_loads_and_saves_pending_leave_nothing():
    pool, plan = make(Group.full(), Group.window(8), Group.state(8, blocks=2), num_blocks=60, events=1000)
    prompt, late = list(range(40)), Plan(pool, 4, 256)
    pool.close(prefill(pool, plan, prompt, cut=40)[0])
    for end in (pool.reset, pool.shutdown):
        first, second = pool.open([*prompt, 1, 2, 3, 4, 5]), pool.open([7] * 30, b"other", 20)
        pool.step(plan, [first, second], [1, 20])
        pool.open([*prompt, 9])  # its load is not begun
        pool.step(late, [first], 1)
        end()
        if end == pool.reset:
            pool.check()
            stats = pool.stats()
            assert (stats.used, stats.evictable, stats.limbo, stats.sequences) == (0, 0, 0, 0)
            assert pool.prefix.stats().nodes == pool.prefix.stats().namespaces == 0
            told = [event[0] for event in pool.prefix.events()]
            assert told.count("stored") == told.count("removed") > 0 and told[-1] == "cleared"
            pool.close(prefill(pool, plan, prompt, cut=40)[0])
            assert pool.prefix.match([*prompt, 1]) == 40


def loaded(pool, tokens):
    """A row of tokens that were loaded and committed; a step has still to load its states."""
    row = pool.open(tokens, load=True)
    pool.loaded(row, len(tokens))
    pool.prefix.commit(row, tokens)
    return row


def window_stays(pool, *rows, pending=()):
    """Hits find the checkpoint of the first row, with the entries that this row has; at the end nothing is used."""
    pool.check()
    hit = pool.open([7, 7, 7, 7, 8])
    assert pool.num_tokens(hit) == 4 and pool.table(hit, 0)[0] == pool.table(rows[0], 0)[0]
    for plan in pending:
        pool.done(plan)
    pool.close([*rows, hit])
    pool.check()
    assert pool.stats().used == 0


@EITHER
def test_window_of_a_checkpoint_to_be_loaded_stays_when_another_row_with_it_closes(kinds):
    """Both rows were loaded, and neither has run: the second one's entries took the place of the first one's."""
    pool, plan = make(Group.window(24, keep=8), Group.state(6, blocks=3), kinds=kinds)
    first, second = loaded(pool, [7] * 4), pool.open([7] * 16, load=True)
    pool.step(plan, [first], [0])
    pool.loaded(second, 16)
    pool.prefix.commit(second, [7] * 16)
    pool.close(second)
    pool.done(plan)
    window_stays(pool, first)


@EITHER
def test_window_of_a_checkpoint_that_a_pending_step_loads_stays_when_another_row_with_it_was_closed(kinds):
    """The second row was closed while an older step was pending, which ends first: its entries may leave then."""
    pool, older = make(Group.window(25, keep=8), Group.state(6, blocks=2), kinds=kinds)
    newer, bystander = kinds[1](pool, 3, 48), pool.open()
    first, second = loaded(pool, [7] * 4), pool.open([7] * 16, load=True)
    pool.loaded(second, 16)
    pool.step(older, [bystander], [0])
    pool.prefix.commit(second, [7] * 16)
    pool.close(second)
    pool.step(newer, [first, bystander], [1, 0])
    pool.done(older)
    window_stays(pool, first, bystander, pending=[newer])


@EITHER
def test_window_of_a_checkpoint_to_be_loaded_stays_where_tokens_left_the_row(kinds):
    """The row has no place in the tree any more, and its states are still to be loaded."""
    pool, _ = make(Group.full(), Group.window(25, keep=8), Group.state(6, blocks=2), kinds=kinds)
    first = loaded(pool, [7] * 16)
    pool.evict_blocks(first, [0, 2])
    pool.close(loaded(pool, [7] * 4))
    pool.check()
    pool.close(first)
    pool.check()
    assert pool.stats().used == 0


def test_events_name_group_kind_and_window():
    pool, plan = make(Group.full(block_size=8), Group.window(5), Group.state(8, blocks=2), events=1000)
    pool.close(prefill(pool, plan, [*range(16)], cut=8, namespace=b"a")[0])
    events = pool.prefix.events()
    assert sorted(event[6:] for event in events) == [(0, "full", None)] * 2 + [(1, "window", 5), (2, "state", None)]
    by_group = {event[6]: event for event in events if event[3][-1] == 7}
    assert len({event[1] for event in by_group.values()}) == 1  # one key: the prefix
    assert {group: event[3:6] for group, event in by_group.items()} == {
        0: ([*range(8)], 8, b"a"), 1: ([4, 5, 6, 7], 4, b"a"), 2: ([4, 5, 6, 7], 4, b"a"),
    }  # fmt: skip
    assert by_group[0][2] is None
    assert by_group[1][2] == by_group[2][2] is not None
    pool.prefix.flush()
    assert {event[1:] for event in pool.prefix.events()[:-1]} == {(event[1], event[6]) for event in events}


@EITHER
def test_checkpoint_for_which_none_may_leave_is_skipped(kinds):
    layers = [Group.window(4), Group.full(arena=1, num_blocks=4), Group.state(8, blocks=1)]
    pool, plan = make(*layers, kinds=kinds, max_seqs=3)  # 7 nodes and so 2 checkpoints
    prompts = [[k] * 5 for k in range(3)]
    for prompt in prompts[:2]:
        pool.close(prefill(pool, plan, prompt[:4], cut=4)[0])
    rows = [pool.open(prompt, reserve=False) for prompt in prompts[:2]]
    assert [pool.num_tokens(row) for row in rows] == [4, 4]  # whose states are not loaded yet
    third = prefill(pool, plan, prompts[2][:4], cut=4)[0]
    assert [pool.prefix.match(prompt) for prompt in prompts] == [4, 4, 0]
    assert pool.prefix.stats().checkpoints_skipped == 1
    pool.close([*rows, third])
    pool.close(prefill(pool, plan, prompts[2][:4], cut=4)[0])
    assert [pool.prefix.match(prompt) for prompt in prompts] == [0, 4, 4]
    pool.check()


def test_rows_that_compute_one_prompt_at_a_time_make_its_checkpoints_once():
    left = []
    for kinds in ((Pool, Plan), (ModelPool, ModelPlan)):
        pool, plan = make(Group.full(), Group.state(8, blocks=1), kinds=kinds)
        for text in ([1] * 80, [1] * 20 + [4] * 60):
            pool.close(prefill(pool, plan, text)[0])
        prompt, seen = [1] * 80 + [2] * 120, []
        rows = [pool.open(prompt), pool.open(prompt)]
        while (places := pool.prefix.wanted(rows).tolist())[0] > 0:
            pool.step(plan, rows, places[0] - pool.num_tokens(rows[0]))
            pool.done(plan)
            for row in rows:
                pool.prefix.commit(row, prompt[pool.prefix.committed(row) : places[0]])
        pool.close(rows)
        while pool.blocks.evict(1):
            found = [pool.prefix.match([*prompt[:n], 3]) for n in range(16, 200, 8)]
            seen.append((found, pool.prefix.stats().checkpoints))
        stats = pool.prefix.stats()
        left.append((stats.checkpoints_taken, stats.checkpoints_published, seen))
    assert left[0] == left[1] and left[0][:2] == (6 + 2 * 3, 6 + 3) and len({str(one) for one in left[0][2]}) > 5


@EITHER
def test_wanted_of_a_closed_row_is_refused(kinds):
    pool, _ = make(Group.full(), Group.state(8, blocks=1), kinds=kinds)
    rows = [pool.open([1] * 40), pool.open([2] * 40)]
    pool.close(rows[1])
    with pytest.raises(StaleHandle):
        pool.prefix.wanted(rows)
    assert pool.prefix.wanted(rows[:1]).tolist() == [16]


def test_row_for_which_there_is_no_node_goes_on_without_the_cache():
    room = 2**20 + 1  # without full groups, and for one row
    pool = Pool(4, 1, groups=[Group.state(4, blocks=1)], prefix_cache=True, max_seqs=1)
    plan, text = Plan(pool, 1, room + 1, formats=()), np.arange(room + 2, dtype=np.int32)
    first, second = text[: room // 2 + 1], text[1 : room // 2 + 2]
    for prompt in (first, second):  # a checkpoint holds all nodes above it; the second one needs those of the first
        pool.close(prefill(pool, plan, prompt, cut=len(prompt))[0])
        assert pool.prefix.stats().nodes == len(prompt)
    found = [pool.prefix.match(text[k : len(first) + k + 1]) for k in (0, 1)]
    assert found == [0, len(second)] and pool.prefix.stats().checkpoints_evicted == 1
    row, _ = prefill(pool, plan, text[:room], cut=0)
    assert pool.prefix.stats().nodes == room and pool.prefix.stats().checkpoints == 0
    pool.step(plan, [row], 1)
    pool.done(plan)
    pool.prefix.commit(row, text[room : room + 1])
    assert pool.prefix.stats().nodes == 0 and pool.prefix.committed(row) == room + 1
    pool.close(row)
    pool.check()


def test_load_for_which_there_is_no_checkpoint_says_how_many_there_are():
    pool = Pool(41, 4, groups=[Group.full(), Group.state(30, blocks=1)], prefix_cache=True, max_seqs=30)
    most = (40 + 1 + 30) // 4 + 1  # one for four nodes, of which there are as many as blocks and rows
    for k in range(most):
        pool.open([k] * 4, load=True)
    state = pool.fingerprint()
    with pytest.raises(OutOfSequences, match=rf"\[open\] there is room for {most} checkpoints, and running sequences"):
        pool.open([most] * 4, load=True)
    assert pool.fingerprint() == state


def test_arrays_of_states_are_the_engines_to_write():
    pool = Pool(8, 4, groups=[Group.full(), Group.state(4)])
    states = Plan(pool, 2).groups[1]
    assert states.state_src.flags.writeable and states.state_dst.flags.writeable
