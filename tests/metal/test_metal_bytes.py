"""What the kernels move, counted by the stand-in: bytes, cache lines of 128 bytes, threadgroup memory, barriers, races.

No time is measured here and none can be: these counts are what can be known about speed without a Mac.
"""

import numpy as np
import pytest
from metal_cases import FEATURES, Batch, PackedBatch

LINE = 128


def counted(batch, engine, **changed):
    runs = []
    batch.check(batch.run(engine.factory(0, runs=runs), **changed))
    return runs


def needed_bytes(batch):
    tokens = sum(batch.seq_lens)
    dims = batch.spec.head_dim + batch.spec.value_head_dim
    return tokens * batch.kv_heads * dims * batch.spec.itemsize_nbytes


def needed_lines(batch):
    """Lines that the layout makes necessary: those of one head in one block, block by block and head by head."""
    lines = 0
    for row, length in enumerate(batch.seq_lens):
        block = np.arange(length) // batch.block_size
        for plane, _ in batch.spec.planes:
            line = batch.element_indices(plane, row) * batch.spec.itemsize_nbytes // LINE
            lines += sum(
                len(np.unique(line[block == b, head])) for b in range(block[-1] + 1) for head in range(batch.kv_heads)
            )
    return lines


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_decode_reads_k_and_v_once_in_whole_lines(counting_engine, head_dim, dtype, layout):
    batch = Batch(dtype=dtype, head_dim=head_dim, layout=layout, group=4, seq_lens=(200,))
    (run,) = counted(batch, counting_engine)
    reads = [run.reads["k_pool"], run.reads["v_pool"]]
    assert sum(read.bytes for read in reads) <= 1.05 * needed_bytes(batch)
    if batch.tiles.kernel == "paged_matrix":
        return  # reads parts of 8 lines at a time
    transactions = sum(read.transactions for read in reads)
    if head_dim * batch.spec.itemsize_nbytes % LINE == 0:
        assert sum(read.full_transactions for read in reads) >= 0.95 * transactions
    assert transactions <= 1.1 * needed_lines(batch)


@pytest.mark.parametrize(("group", "queries", "features"), [(4, 2, ()), (2, 4, ()), (1, 8, ()), (4, 1, ("window",))])
def test_as_many_queries_as_fit_read_once_what_they_see(counting_engine, group, queries, features):
    shape = {"group": group, "seq_lens": (300,), "q_lens": (queries,), "features": features, "seed": 2}
    batch = Batch(dtype="float16", head_dim=128, **shape)
    (run,) = counted(batch, counting_engine)
    seen = batch.options.window or 300
    assert run.reads["k_pool"].bytes == run.reads["v_pool"].bytes == seen * batch.kv_heads * 128 * 2
    assert bool(features) == (seen < 300)


def test_everything_else_that_decode_reads_is_small(counting_engine):
    batch = Batch(dtype="float16", head_dim=128, group=4, seq_lens=(490,), block_size=16)
    (run,) = counted(batch, counting_engine)
    others = sum(traffic.bytes for name, traffic in run.reads.items() if name not in ("k_pool", "v_pool"))
    assert others <= 0.05 * needed_bytes(batch)
    assert run.reads["tables"].bytes == 4 * 31 * batch.kv_heads  # an entry per block, once per KV head


def test_barriers_do_not_depend_on_the_context(counting_engine):
    counts = set()
    for length in (20, 200, 500):
        (run,) = counted(Batch(seq_lens=(length,), kv_heads=1), counting_engine)
        counts.add((run.threadgroup_barriers, run.simdgroup_barriers))
    assert len(counts) == 1
    assert counts.pop()[1] == 0


RACES = [
    *(
        (Batch, {"head_dim": head_dim, "group": 4, "features": features})
        for head_dim in (64, 80, 256)
        for features in ((), FEATURES)
    ),
    (PackedBatch, {"v_bits": 4, "group": 1}),
    *((Batch, {"group": 20, "scores": scores}) for scores in ("raw", "mass")),
]


@pytest.mark.parametrize(("kind", "choice"), RACES, ids=str)
def test_no_race_in_any_schedule(counting_engine, kind, choice):
    """A race, or a read of what nothing wrote, is an error of the launch."""
    shape = {"dtype": "float16", "kv_heads": 1, "seq_lens": (40, 90), "q_lens": (1, 3), "part_tokens": 32, "padding": 1}
    scores = choice.get("scores")
    batch = kind(**shape | {name: value for name, value in choice.items() if name != "scores"})
    for schedule in counting_engine.schedules:
        batch.check(batch.run_with_scores(counting_engine.factory(schedule, runs=[]), scores)[0])
