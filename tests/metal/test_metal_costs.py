"""What the attention kernels cost: limits that every variant keeps."""

import pytest
from metal_costs import VARIANTS, batch_of, costs, name_of

GROUPS = (1, 4, 5, 8, 12, 16, 32, 64)
PLANES = ({"dtype": "float16"}, {"dtype": "float32"}, {"k_bits": 8, "v_bits": 8}, {"k_bits": 4, "v_bits": 4})


def dims_of(head_dim):
    """Of a variant; a pair is that of latents and rotary parts."""
    if isinstance(head_dim, tuple):
        return {"head_dim": head_dim[0], "v_head_dim": head_dim[1], "latent": True}
    return {"head_dim": head_dim}


def threadgroup_nbytes(tiles, spec):
    """Of `paged_matrix`: the scores of every simdgroup, weights, and three numbers of a row."""
    rows = -(-tiles.rows // 8) * 8
    return rows * 4 * (36 * (tiles.simdgroups(spec) + 1) + 3)


#: Accesses of K and V per KiB of them: by bits of both where they are packed.
ACCESSES = {(8, 8): 7.6, (8, 4): 6.2, (4, 4): 14.3}


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_costs_of_a_variant_stay_below_the_limits(variant):
    counted, spec = costs(variant), batch_of(variant).spec
    assert counted.bytes <= (1.02 if variant.get("queries", 1) == 1 else 1.05)
    assert counted.accesses <= ACCESSES.get(spec.bits, 9.7 / spec.itemsize_nbytes)
    shared = 8 if spec.is_quantized else 0  # scales and biases that another lane has read
    assert counted.simd_operations <= 5.4 + 8 * counted.rows + shared
    assert counted.threadgroup_memory <= 32 * 1024


LATENTS = [(512, 64), (256, 64), (512, 128), (128, 96), (96, 128), (128, 128), (192, 256), (224, 224), (256, 256)]


@pytest.mark.parametrize("head_dim", [4, 64, 80, 128, 192, 256, 260, 512, *LATENTS])
def test_threadgroup_memory_of_every_shape_stays_below_the_limit(head_dim):
    for group in GROUPS:
        for planes in PLANES[:2]:
            batch = batch_of({"group": group, "queries": 32} | dims_of(head_dim) | planes)
            tiles = batch.planned[0][2]
            assert threadgroup_nbytes(tiles, batch.spec) <= 32 * 1024 and tiles.simdgroups(batch.spec) <= 32
