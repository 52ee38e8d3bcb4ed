"""All or nothing: a call that does not find its blocks changes nothing, at every level of what is free."""

import pytest

from kvpool.errors import OutOfBlocks

LARGEST = 64


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
