"""The work list of the Metal kernels: what is read by whom, decided by the lengths of a row alone."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.config import KVSpec
from kvpool_backends.mlx.metal_kernels import (
    PARTS_MAX,
    SIMDGROUPS,
    HeadTiles,
    MetalKernels,
    default_parts,
    head_tiles,
    parts_of,
    plan_attention,
)

ROWS = st.lists(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(n, 40)))), min_size=1)


def planned(rows, queries=1, **options):
    seq_lens, q_lens = (np.array(x) for x in zip(*rows, strict=True))
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)])
    tiles = HeadTiles(4, 1, queries)
    arguments = {"num_tokens": int(cu_q_lens[-1]), "tiles": tiles} | options
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
            assert run % 8 == 0 and part % 8 == 0
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
    assert len(work.parts) == len({(first, inside) for inside, first, _ in work.parts.tolist()}) == total
    assert (work.items[:, 7] == 0).sum() == padding  # padding sees nothing


@settings(deadline=None)
@given(ROWS, st.integers(0, 50), st.sampled_from([1, 2, 4]))
def test_cuts_of_a_row_do_not_depend_on_the_batch(rows, which, queries):
    which %= len(rows)
    together, _, cu = planned(rows, queries)
    alone, *_ = planned([rows[which]], 1)
    # Where runs begin decides in which order a query adds things up. It is the same with other tiles of queries too.
    cuts = [
        {
            (t - start, part, run)
            for _, q, n, position, part, run, *_ in work.items.tolist()
            for t in range(q, q + n)
            if part <= position + t - q  # else a part of its neighbours, of which it sees nothing
        }
        for work, start in ((together, int(cu[which])), (alone, 0))
    ]
    num_queries = rows[which][1]
    assert {cut for cut in cuts[0] if 0 <= cut[0] < num_queries} == cuts[1]


def test_a_long_context_has_a_bounded_number_of_parts_that_simdgroups_share_evenly():
    for part_tokens in (32, 64, 512):  # whatever the size of a block: a run may begin inside one
        work, *_ = planned([(20 * part_tokens, 1)], part_tokens=part_tokens)
        assert len(work.items) == 20 and (work.items[:, 5] * SIMDGROUPS == part_tokens).all()
    for context in (2560, 2561, 16_384, 32_769, 100_000, 1_000_000):
        work, *_ = planned([(context, 1)])
        assert PARTS_MAX / 2 <= len(work.items) <= PARTS_MAX


@pytest.mark.parametrize(
    ("spec", "group"),
    [
        (KVSpec(1, 8, 128), 8),
        (KVSpec(1, 8, 64, "bfloat16"), 4),
        (KVSpec(1, 8, 128, k_bits=8, v_bits=8), 4),
        (KVSpec(1, 8, 128, k_bits=4, v_bits=4), 4),
        (KVSpec(1, 1, 512, v_head_dim=64, latent=True), 16),
    ],
)
def test_what_parts_leave_stays_small_beside_keys_and_values(spec, group):
    tiles = head_tiles(spec, group, 1)
    for context in (1000, 16_384, 131_072):
        work = plan_attention(np.array([context]), np.array([0, 1]), 1, tiles=tiles, **parts_of(spec, tiles))
        sums = len(work.items) * group * (spec.result_dim + 4) * 4 * 2
        assert sums <= 0.5 * context * spec.token_nbytes / spec.num_kv_heads


@pytest.mark.parametrize(("name", "cores"), [("Apple M1", 8), ("Apple M4 Max", 40), ("Apple M3 Ultra", 80)])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_one_sequence_has_threadgroups_for_every_core(monkeypatch, name, cores, group):
    """Eight KV heads and one query: 4 threadgroups a core from 2k tokens on, of an Ultra from 2.5k on."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": name})
    spec, most = KVSpec(1, 8, 128, "float16", 16), default_parts()
    tiles = head_tiles(spec, group, 1)
    for context in (*range(512, 8193, 8), 16_384, 20_481, 131_072):
        work = plan_attention(np.array([context]), np.array([0, 1]), 1, tiles=tiles, parts_max=most)
        per_core = len(work.items) * tiles.groups * spec.num_kv_heads / cores
        assert per_core >= (0.8 if context < 2048 else min(4, context / 64 * 8 / cores))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32, 71])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("queries", [1, 2, 5, 8, 500])
def test_head_tiles_hold_whole_groups_as_far_as_registers_do(group, head_dim, queries):
    tiles = head_tiles(KVSpec(1, 2, head_dim, "float16", 16), group, queries)
    assert tiles.heads * (tiles.groups - 1) < group <= tiles.heads * tiles.groups
    assert tiles.queries < 2 * queries
    if tiles.kernel == "paged_attention":
        assert tiles.groups == 1 and tiles.heads <= 512 // max(head_dim, 128) and tiles.rows * head_dim <= 512
    else:
        most = 32 if head_dim <= 128 else 16
        assert group * queries > 512 // max(head_dim, 128) / 2 or head_dim > 256
        assert tiles.rows <= most and tiles.groups == -(-group // most)


@pytest.mark.parametrize(
    ("v_head_dim", "k_bits", "message"),
    [
        (132, None, "latents and rotary parts have 644 elements, at most 640"),
        (64, 8, "bits of latents are (8, None), they must be the same"),
    ],
)
def test_latents_without_a_kernel_are_refused(v_head_dim, k_bits, message):
    spec = KVSpec(1, 1, 512, v_head_dim=v_head_dim, latent=True, k_bits=k_bits)
    with pytest.raises(ValueError) as refused:
        MetalKernels(spec, 4)
    assert str(refused.value) == f"[MetalKernels] {message}"


def test_a_batch_of_padding_alone_has_idle_items_only():
    work = plan_attention(np.zeros(0), np.zeros(1), 3, tiles=HeadTiles(4, 1, 1))
    assert work.items.tolist() == [[0, token, 1, 0, 0, 0, 0, 0] for token in range(3)]
    assert work.parts.tolist() == [[0, item, 1] for item in range(3)]
    assert work.direct
