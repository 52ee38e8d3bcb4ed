"""Family F: the null block, and memory nobody has written. See README.md."""

import numpy as np
import pytest
from catalogue import PaddingKeepsTheOldRow, Unchecked, broken, conforms, row
from simple_backend import ZeroTimesWhatIsThere

from kvpool.config import KVSpec
from kvpool.protocol import StepArrays
from kvpool_backends.numpy import NumpyBackend


class NullBlockIsTaken(Unchecked):
    """Somebody takes block 0 before it is set aside."""

    def _empty(self):
        super()._empty()
        self.arenas[0].blank.append(0)


class NullBlockIsEvictable(Unchecked):
    """The null block counts as cached."""

    def _empty(self):
        super()._empty()
        self.arenas[0].unused, self.arenas[0].marked = [0], {0}


class ZeroesOneLayer(NumpyBackend):
    """Zeroing was ported for the first layer only."""

    def zero(self, block_ids):
        others = [self.gather(layer, np.arange(self.num_blocks)) for layer in range(1, self.spec.num_layers)]
        super().zero(block_ids)
        slots = np.arange(self.num_blocks * self.spec.block_size, dtype=np.int32)
        for layer, (k, v) in enumerate(others, 1):
            self.write(self.prepare(StepArrays(slot_mapping=slots)), layer, k, v)


@row(NullBlockIsTaken)
def test_f1_null_block_is_reserved_by_the_constructor(make_pool):
    """Block 0 was assumed to be the null block, but another thread took it first."""
    for reserved in (1, 2, 5):
        pool = make_pool(12, reserved_blocks=reserved)
        ids = pool.blocks.alloc(12 - reserved).tolist()
        assert ids == list(range(reserved, 12))
        pool.blocks.free(ids[::-1])
        pool.reset()
        assert sorted(pool.blocks.alloc(12 - reserved).tolist()) == ids


@row(NullBlockIsEvictable)
def test_f2_null_block_is_in_no_count(make_pool):
    """The null block was counted as evictable."""
    pool = make_pool(12, reserved_blocks=3)
    stats = pool.stats()
    assert (stats.blank, stats.evictable, stats.used) == (9, 0, 0)
    assert pool.blocks.refcount_histogram().sum() == 9


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@row(broken(Backend=ZeroTimesWhatIsThere), model=False)
def test_f3_slots_past_the_length_never_matter(parts):
    """Weights of 0 times NaN in slots past the length made the answer NaN."""
    conforms(parts.Backend, "unused_slots_never_matter")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@row(broken(Backend=ZeroTimesWhatIsThere), model=False)
def test_f4_recycled_block_is_read_as_far_as_it_is_written(parts, make_pool, make_plan):
    """A recycled block kept the bits of its last owner, which were NaN in the new dtype."""
    pool, spec = make_pool(2, 4), KVSpec(1, 1, 16, "float32", 4)
    backend = parts.Backend(spec, 2)
    plan = make_plan(pool, formats=("block_tables", "seq_lens", "slot_mapping", "cu_q_lens"))
    for tokens, value in ((4, np.nan), (2, 0.5)):
        handle = pool.open()
        pool.step(plan, [handle], tokens)
        x = np.full((tokens, 1, 16), value, np.float32)
        backend.write(backend.prepare(plan), 0, x, x)
        answer = backend.attend(backend.prepare(plan), 0, x)
        pool.done(plan)
        pool.close(handle)
    np.testing.assert_allclose(answer, 0.5, rtol=1e-6)


@row(broken(Backend=ZeroesOneLayer), model=False)
def test_f4_zeroing_reaches_every_layer_and_plane(parts):
    """A new runner forgot to zero what the old one zeroed."""
    conforms(parts.Backend, "zero_clears_only_what_it_names")


@row(PaddingKeepsTheOldRow)
def test_f5_padding_is_the_null_block_and_no_slot(make_pool, make_plan, core):
    """Padding rows that named real blocks changed results."""
    pool = make_pool()
    plan = make_plan(pool, 3, 4, formats=core.all_formats, table_width=2)
    pool.step(plan, [pool.open()], 2, pad_to=(3, 4))
    assert plan.block_tables.tolist() == [[1, 0], [0, 0], [0, 0]]
    assert plan.slot_mapping.tolist() == [4, 5, -1, -1]
    assert plan.cu_q_lens.tolist() == [0, 2, 2, 2]
    assert plan.slot_ids.tolist() == [0, -1, -1]


@row(broken(Backend=ZeroTimesWhatIsThere), model=False)
def test_f5_padding_changes_no_result(parts):
    """Padding rows and stale tails changed results in the last bits."""
    conforms(parts.Backend, "padding_is_inert")
