"""Attention over shapes, element types and features against float64: a seeded sample; `make metal-sweep` runs all.

Pools are full of NaN wherever no token lies. Each variant runs under all schedules of the engine.
"""

import itertools
import os
import random

import pytest
from metal_cases import FEATURES, Batch, pairwise
from metal_packed import PackedBatch

ALL = os.environ.get("KVPOOL_METAL_SWEEP") == "1"
SEED = int(os.environ.get("KVPOOL_METAL_SWEEP_SEED", "21"))
FACTORS = {
    "head_dim": (64, 80, 96, 128, 192, 256),
    "group": (1, 4, 5, 8, 12, 16, 32, 64),
    "stored": ("float16", "bfloat16", "float32", 8, 4),  # elements, or the bits of quantized ones
    "features": ((), *((name,) for name in FEATURES), FEATURES),
}


def is_possible(choice):
    """Groups of 32 elements share a scale."""
    return isinstance(choice["stored"], str) or choice["head_dim"] % 32 == 0


def choices():
    """All variants, or a sample in which every two choices meet."""
    every = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    found = every if ALL else pairwise(FACTORS, seed=SEED)
    return [choice for choice in found if is_possible(choice)]


def batch_of(choice):
    """Rows of one tile, of several parts, and of a few queries, on blocks and lengths drawn by the choice."""
    rng = random.Random(f"{SEED} {choice}")
    shape = {
        "head_dim": choice["head_dim"],
        "group": choice["group"],
        "features": choice["features"],
        "kv_heads": 1 if choice["group"] > 4 else 2,
        "block_size": rng.choice((8, 16, 32)),
        "seq_lens": (rng.randint(1, 31), rng.randint(65, 130), rng.randint(20, 40)),
        "q_lens": (1, 1, rng.randint(1, 4)),
        "part_tokens": rng.choice((32, 64)),
        "seed": rng.randint(0, 10**6),
    }
    if isinstance(choice["stored"], str):
        return Batch(dtype=choice["stored"], **shape)
    bits = {"k_bits": choice["stored"], "v_bits": choice["stored"]}
    return PackedBatch(dtype="float16", q_dtype="float32", size=32, **bits, **shape)


@pytest.mark.long
@pytest.mark.parametrize("choice", choices(), ids=lambda choice: "-".join(map(str, choice.values())))
def test_variant_equals_float64_under_every_schedule(engine, choice):
    print(f"KVPOOL_METAL_SWEEP_SEED={SEED}")
    batch = batch_of(choice)
    for schedule in engine.schedules:
        batch.check(batch.run(engine.factory(schedule)))


def test_the_sample_has_every_value_with_every_element_type():
    sample = [choice for choice in pairwise(FACTORS, seed=SEED) if is_possible(choice)]
    assert len(sample) < 120
    for name in ("group", "features"):
        met = {(choice[name], choice["stored"]) for choice in sample}
        assert len({value for value, _ in met}) == len(FACTORS[name])
    dims = {(choice["head_dim"], choice["stored"]) for choice in sample}
    assert dims == {
        (dim, stored)
        for dim in FACTORS["head_dim"]
        for stored in FACTORS["stored"]
        if is_possible({"head_dim": dim, "stored": stored})
    }
