"""Layers of several shapes in one arena of blocks, where the storage is memory that several backends can write."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_families import model_of_file
from mlx_models import computing_on_cpu

from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import host, install
from kvpool.adapters.mlx_lm.layout import layout_of
from kvpool.sizing import IDLE, arrays_of_an_arena, arrays_of_one_size

cpu = pytest.fixture(computing_on_cpu, autouse=True)
WIDE = {"head_dim": 32, "global_head_dim": 64}  # heads as wide as a group of the quantization
SHARED = ("gemma4_text", "baichuan_m1", "openelm", "deepseek_v32")  # tiny models whose bytes agree


def test_blocks_of_equal_bytes_are_the_largest_of_which_few_idle():
    """The oracle tries every number of arrays of every group."""
    rng = np.random.default_rng(5)
    print("seed 5")
    found = 0
    for _ in range(400):
        counts = rng.integers(1, 13, rng.integers(2, 4)).tolist()
        needs = [(count, int(rng.choice([16, 32, 48, 64, 96, 128]))) for count in counts]

        def idles(nbytes, need):
            count, one = need
            shares = [1 - count * one / (-(-count // arrays) * nbytes) for arrays in range(1, nbytes // one + 1)]
            return min(shares, default=1)

        sizes = {one * arrays for count, one in needs for arrays in range(1, count + 1)}
        good = [nbytes for nbytes in sizes if all(idles(nbytes, need) <= IDLE for need in needs)]
        widths = arrays_of_one_size(needs)
        assert (widths is None) == (not good)
        if widths is not None:
            found += 1
            assert max(width * one for width, (_, one) in zip(widths, needs, strict=True)) == max(good)
        fits = [width for width in range(1, max(counts) + 1) if all(idles(width, (n, 1)) <= IDLE for n in counts)]
        assert arrays_of_an_arena(counts) == max(fits)
    assert 50 < found < 350


def logits_of(name, **how):
    """Logits of a program in a pool so small that blocks go from one shape to the other; and what the pool holds."""
    model = model_of_file("gemma4_text", **WIDE) if name == "wide" else tiny_families.make(name)[0]
    rng = np.random.default_rng(8)
    found = []
    with install(model, 44, block_size=4, max_seqs=16, **how) as kv:
        for lengths in ((70, 1, 1), (5, 40, 3), (33, 2, 30, 1)):
            caches = [kv.make_cache(), kv.make_cache()]
            for n in lengths:
                for cache in caches:
                    found.append(np.array(model(mx.array(rng.integers(0, 90, (1, n))), cache=cache)))
                caches[1] = copy.deepcopy(caches[0])
            del caches, cache
        arenas = len(kv.layout.block_nbytes)
    return arenas, found


CASES = [
    *((name, {}) for name in SHARED),
    *(("gemma4_text", {"backend": name}) for name in ("numpy", "cpu")),
    *(("wide", bits | {"quant_group_size": 32}) for bits in ({"kv_bits": 8}, {"k_bits": 8, "v_bits": 4})),
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_shapes_in_one_arena_compute_what_they_compute_in_arenas_of_their_own(name, how, monkeypatch):
    shared, found = logits_of(name, **how)
    monkeypatch.setattr(host, "layout_on", lambda _, *model, **bits: layout_of(*model, **bits))  # an arena for each
    apart, due = logits_of(name, **how)
    assert (shared, apart) == (1, 2)
    assert all(np.array_equal(x, y) for x, y in zip(found, due, strict=True))


def test_storage_without_kernels_keeps_an_arena_for_each_shape():
    assert logits_of("gemma4_text", kernels=False)[0] == 2
