"""The work list of the Metal kernels: what is read by whom, decided by the lengths of a row alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.config import KVSpec
from kvpool_backends.mlx.metal_kernels import (
    PARTS_MAX,
    ROW_DIMS_MAX,
    ROWS_MAX,
    SIMDGROUPS,
    HeadTiles,
    MetalKernels,
    head_tiles,
    plan_attention,
)

ROWS = st.lists(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(n, 40)))), min_size=1)


def planned(rows, queries=1, **options):
    seq_lens, q_lens = (np.array(x) for x in zip(*rows, strict=True))
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)])
    tiles = HeadTiles(4, 1, queries)
    arguments = {"num_tokens": int(cu_q_lens[-1]), "block_size": 16, "tiles": tiles} | options
    return plan_attention(seq_lens, cu_q_lens, **arguments), seq_lens, cu_q_lens


@settings(deadline=None)
@given(ROWS, st.sampled_from([1, 2, 4]), st.none() | st.integers(1, 4000), st.sampled_from([32, 128, 512]))
def test_items_of_a_token_cover_what_it_sees_once(rows, queries, window, part_tokens):
    work, seq_lens, cu = planned(rows, queries, window=window, part_tokens=part_tokens)
    for token, (inside, first_item, num_items) in enumerate(work.parts):
        row = int(np.searchsorted(cu, token, "right")) - 1
        position = seq_lens[row] - cu[row + 1] + token
        seen = []
        for item in work.items[first_item : first_item + num_items]:
            batch_row, first_query, count, first_position, part, run, begin, end = item.tolist()
            assert (batch_row, first_query + inside, first_position + inside) == (row, token, position)
            assert inside < count <= queries
            assert run % 16 == 0 and part % 16 == 0
            # Simdgroups take a run each: together all of begin .. end.
            assert part <= begin < end <= part + SIMDGROUPS * run
            seen += range(begin, min(end, position + 1))
        first_seen = 0 if window is None else max(0, position - window + 1)
        assert [c for c in seen if c >= first_seen] == list(range(first_seen, position + 1))


@settings(deadline=None)
@given(ROWS, st.sampled_from([1, 4]), st.integers(0, 5))
def test_every_token_has_a_row_of_its_own_in_the_items(rows, queries, padding):
    total = sum(q for _, q in rows) + padding
    work, *_ = planned(rows, queries, num_tokens=total)
    assert len(work.parts) == total
    places = {(first, inside) for inside, first, _ in work.parts.tolist()}
    assert len(places) == total
    assert (work.items[:, 7] == 0).sum() == padding  # padding sees nothing


@settings(deadline=None)
@given(ROWS, st.integers(0, 50), st.sampled_from([1, 2, 4]))
def test_cuts_of_a_row_do_not_depend_on_the_batch(rows, which, queries):
    which %= len(rows)
    together, _, cu = planned(rows, queries)
    alone, *_ = planned([rows[which]], 1)
    # Where runs begin decides in which order a query adds things up. It is the same with other tiles of queries too.
    cuts = [
        {(int(t) - start, part, run) for _, q, n, _, part, run, *_ in work.items.tolist() for t in range(q, q + n)}
        for work, start in ((together, cu[which]), (alone, 0))
    ]
    num_queries = rows[which][1]
    assert {cut for cut in cuts[0] if 0 <= cut[0] < num_queries} == cuts[1]


def test_contexts_up_to_one_part_are_direct():
    assert planned([(512, 1), (1, 1), (300, 8)])[0].direct
    assert not planned([(513, 1), (1, 1)])[0].direct


def test_a_long_context_has_a_bounded_number_of_parts():
    for context in (16_384, 32_768, 32_769, 100_000, 1_000_000):
        work, *_ = planned([(context, 1)])
        assert PARTS_MAX / 2 <= len(work.items) <= PARTS_MAX


def test_chunks_are_not_split():
    assert planned([(5000, 9)], queries=4)[0].direct


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32, 71])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("longest", [1, 2, 5, 8, 500])
def test_head_tiles_share_one_read_up_to_sixteen_heads(group, head_dim, longest):
    tiles = head_tiles(group, head_dim, longest)
    assert tiles.rows <= ROWS_MAX
    assert tiles.heads * (tiles.groups - 1) < group <= tiles.heads * tiles.groups
    assert tiles.groups == -(-group // ROWS_MAX)
    assert tiles.queries < 2 * longest
    assert tiles.queries == 1 or tiles.rows * head_dim <= ROW_DIMS_MAX


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 12}, "block_size is 12, it must be a multiple of 8"),
        ({"head_dim": 66}, "head_dim is 66, it must be a multiple of 4, at most 256"),
        ({"v_head_dim": 512}, "v_head_dim is 512, it must be a multiple of 4, at most 256"),
    ],
)
def test_shapes_without_a_kernel_are_refused(changed, message):
    spec = KVSpec(**({"num_layers": 1, "num_kv_heads": 2, "head_dim": 64} | changed))
    with pytest.raises(ValueError) as refused:
        MetalKernels(spec, 4)
    assert str(refused.value) == f"[MetalKernels] {message}"


def test_a_batch_of_padding_alone_has_idle_items_only():
    work = plan_attention(np.zeros(0), np.zeros(1), 3, block_size=16, tiles=HeadTiles(4, 1, 1))
    assert work.items.tolist() == [[0, token, 1, 0, 0, 0, 0, 0] for token in range(3)]
    assert work.parts.tolist() == [[0, item, 1] for item in range(3)]
    assert work.direct
