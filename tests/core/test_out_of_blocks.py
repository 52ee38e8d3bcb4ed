"""All or nothing: a call that does not find its blocks changes nothing, at every level of what is free."""

import os

import pytest

from kvpool.errors import OutOfBlocks

LARGEST = 8 if os.environ.get("KVPOOL_CORE") == "model" else 64  # the model takes minutes for more


def leave(pool, blanks):
    """Raw-allocate until exactly this many blank blocks are left."""
    pool.blocks.alloc(pool.stats().blank - blanks)


class Scene:
    """A pool whose blocks can be taken away, and a call that needs `need` of them."""

    def __init__(self, core, need, **options):
        self.core, self.need = core, need
        self.pool = core.Pool(1 + 4 * need + 8, 2, max_seqs=2 * need + 8, seed=1, **options)
        self.plan = core.Plan(self.pool, need + 1, 2 * need + 2, table_width=need + 2)
        self.margin = options.get("watermark", 0)  # blocks that must be there beside the need
        self.rows = []  # of which each needs a block
        self.call, self.arguments = self.pool.step, ()

    def grow(self, handle, count):
        """Write tokens and wait for them."""
        plan = self.core.Plan(self.pool, 1, count, formats=())
        self.pool.step(plan, [handle], count)
        self.pool.done(plan)

    def shown(self):
        """All that a refused call must leave alone."""
        plan = self.plan
        arrays = [array.tolist() for array in (plan.copies, plan.block_tables, plan.handles)]
        return self.pool.fingerprint(), self.pool.digest(), self.pool.stats(), plan.is_pending, plan.num_tokens, arrays

    def refuse(self, free):
        """The call, while `free` blocks are there."""
        before = self.shown()
        with pytest.raises(OutOfBlocks) as caught:
            self.call(*self.arguments)
        assert isinstance(caught.value, MemoryError)
        error, where = caught.value, f"need {self.need}, free {free}"
        assert self.shown() == before, where
        assert str(error).startswith(f"[{self.call.__name__.removeprefix('_blocks_')}] ")
        assert (error.needed, error.short_by, error.limbo) == (self.need, self.need + self.margin - free, 0), where
        assert (error.blank, error.blank + error.evictable) == (self.pool.stats().blank, free), where
        row = free if self.rows else 0  # the first that is short
        assert error.row == row or (error.row == -1 and not self.rows), where
        assert error.row == -1 or error.handle == self.arguments[1][row], where


def one_row(scene, call="step"):
    scene.call = getattr(scene.pool, call)
    scene.arguments = (scene.plan, [scene.pool.open()], 2 * scene.need)


def many_rows(scene, call="step"):
    scene.rows = [scene.pool.open() for _ in range(scene.need)]
    scene.call, scene.arguments = getattr(scene.pool, call), (scene.plan, scene.rows, 1)


def copies(scene):
    """need + 1 sequences share a tail; the last one writes in place."""
    parent = scene.pool.open()
    scene.grow(parent, 1)
    scene.rows = [parent, *scene.pool.fork(parent, scene.need).tolist()]
    scene.arguments = (scene.plan, scene.rows, 1)


def own_blocks(scene):
    """A sequence that shares all its blocks gets copies of them."""
    parent = scene.pool.open()
    scene.grow(parent, 2 * scene.need)
    scene.call, scene.arguments = scene.pool.unshare, (scene.plan, scene.pool.fork(parent), 2 * scene.need - 1)


def own_rows(scene):
    """need children of a sequence, a copy each."""
    parent = scene.pool.open()
    scene.grow(parent, 2)
    scene.rows = scene.pool.fork(parent, scene.need).tolist()
    scene.call, scene.arguments = scene.pool.unshare, (scene.plan, scene.rows, 1)


def opened(scene):
    scene.call, scene.arguments = scene.pool.open, (2 * scene.need,)


def taken(scene):
    scene.call, scene.arguments = scene.pool.blocks.alloc, (scene.need,)


@pytest.mark.parametrize("with_cached", [False, True])  # every other block that is there
@pytest.mark.parametrize(
    ("arrange", "options"),
    [
        (one_row, {}),
        (many_rows, {}),
        (lambda scene: one_row(scene, "reserve"), {}),
        (lambda scene: many_rows(scene, "reserve"), {}),
        (copies, {}),
        (own_blocks, {}),
        (own_rows, {}),
        (opened, {}),
        (opened, {"watermark": 5}),
        (taken, {}),
    ],
)
def test_call_at_every_need_and_free_level_is_served_or_changes_nothing(core, arrange, options, with_cached):
    for need in range(1, LARGEST + 1):
        scene = Scene(core, need, **options)
        arrange(scene)
        held = scene.pool.blocks.alloc(scene.pool.stats().blank).tolist()
        if with_cached:
            scene.pool.blocks.mark_cached(held[::2])
        for free in range(need + scene.margin):
            scene.refuse(free)
            scene.pool.blocks.free(held[free])
        scene.call(*scene.arguments)
        scene.pool.check()


def test_prompt_whose_hits_can_be_evicted_does_not_count_them_as_free(core):
    for need in range(1, LARGEST + 1):
        hits = min(3, need)
        tokens = list(range(2 * (hits + need)))
        for free in range(need):
            scene = Scene(core, need, prefix_cache=True)
            first = scene.pool.open(tokens[: 2 * hits])
            scene.grow(first, 2 * hits)
            scene.pool.prefix.commit(first, tokens[: 2 * hits])
            scene.pool.close(first)
            scene.pool.blocks.alloc(scene.pool.stats().blank - free)
            scene.call, scene.arguments = scene.pool.open, (tokens,)
            scene.refuse(free)


def test_error_counts_limbo_apart(make_pool, make_plan, refused):
    pool = make_pool(8, 4)
    row, old = pool.open(), pool.open(12)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [row], 4)
    pool.close(old)
    leave(pool, 1)
    with refused(pool, OutOfBlocks, "step", plans=[second]) as caught:
        pool.step(second, [row], 12)
    assert (caught.value.needed, caught.value.short_by, caught.value.blank, caught.value.limbo) == (3, 2, 1, 3)
    pool.done(first)
    pool.step(second, [row], 12)


# --- partial ----------------------------------------------------------------------------------------------


def test_partial_skips_the_row_that_does_not_fit_and_tries_the_next(make_pool, make_plan):
    pool = make_pool(5, 4)  # four blocks
    a, b, c, d = (pool.open() for _ in range(4))
    plan = make_plan(
        pool, formats=("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens"), table_width=3
    )
    pool.step(plan, [a, b, c, d], [5, 12, 3, 4], partial=True)  # needs 2, 3, 1, 1
    assert plan.served.tolist() == [1, 0, 1, 1]
    assert plan.seq_lens.tolist() == [5, 0, 3, 4]
    assert plan.cu_q_lens.tolist() == [0, 5, 5, 8, 12]
    assert (len(plan.handles), plan.num_tokens) == (4, 12)
    assert plan.block_tables.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0], [4, 0, 0]]
    assert plan.slot_mapping.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 16, 17, 18, 19]
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert [pool.num_tokens(h) for h in (a, b, c, d)] == [5, 0, 3, 4]


@pytest.mark.parametrize("free", range(8))
def test_partial_serves_greedily_in_the_order_given(make_pool, make_plan, free):
    needs = [3, 1, 2, 1]
    pool = make_pool(16, 4)
    handles = [pool.open() for _ in needs]
    leave(pool, free)
    plan = make_plan(pool)
    pool.step(plan, handles, [4 * n for n in needs], partial=True)
    served, left = [], free
    for need in needs:
        served.append(int(need <= left))
        left -= need * served[-1]
    assert plan.served.tolist() == served
    assert pool.stats().blank == left


# --- watermark --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "need, watermark, fits",
    [(5, 3, True), (6, 3, False), (8, 0, True), (9, 0, False), (1, 7, True), (1, 8, False), (0, 8, True)],
)
def test_watermark_holds_back_open_and_nothing_else(make_pool, make_plan, need, watermark, fits):
    pool = make_pool(9, 4, watermark=watermark, max_blocks_per_seq=16)
    ids = pool.blocks.alloc(4)  # half of the blocks are cached, and count
    pool.blocks.mark_cached(ids)
    pool.blocks.free(ids)
    if not fits:
        with pytest.raises(OutOfBlocks) as caught:
            pool.open(4 * need)
        assert (caught.value.needed, caught.value.short_by) == (need, need + watermark - 8)
        return
    handle = pool.open(4 * need)
    assert len(pool.table(handle)) == need
    pool.step(make_plan(pool), [handle], 28)
    assert len(pool.blocks.alloc(pool.stats().free)) == 8 - max(need, 7)
