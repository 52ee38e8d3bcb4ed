"""Family F: the null block, and memory nobody has written. See README.md."""

import numpy as np
import pytest

from kvpool.config import KVSpec
from kvpool_backends.numpy import NumpyBackend


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_f4_recycled_block_is_read_as_far_as_it_is_written(make_pool, make_plan):
    """A recycled block kept the bits of its last owner, which were NaN in the new dtype."""
    pool, spec = make_pool(2, 4), KVSpec(1, 1, 16, "float32", 4)
    backend = NumpyBackend(spec, 2)
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


def test_f5_padding_is_the_null_block_and_no_slot(make_pool, make_plan, core):
    """Padding rows that named real blocks changed results."""
    pool = make_pool()
    plan = make_plan(pool, 3, 4, formats=core.all_formats, table_width=2)
    pool.step(plan, [pool.open()], 2, pad_to=(3, 4))
    assert plan.block_tables.tolist() == [[1, 0], [0, 0], [0, 0]]
    assert plan.slot_mapping.tolist() == [4, 5, -1, -1]
    assert plan.cu_q_lens.tolist() == [0, 2, 2, 2]
    assert plan.slot_ids.tolist() == [0, -1, -1]
