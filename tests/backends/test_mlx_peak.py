"""MLX's own peak of memory stays flat while an engine decodes: no step copies a pool array."""

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_models import ROUTES, on_cpu, random_prompts, tiny_llama

from kvpool.adapters.mlx_lm import install

NUM_BLOCKS, BLOCK, STEPS = 16384, 16, 40
ROWS = 4


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def decode_peaks(kv, model):
    """Bytes that MLX held at most during each decode step, beyond what it held before the first one."""
    generator = BatchGenerator(model, completion_batch_size=ROWS, prefill_batch_size=ROWS)
    generator.insert(random_prompts([24] * ROWS), [STEPS + 8] * ROWS)
    while len(generator.next()[1]) < ROWS:
        pass
    kv.settle()
    base, peaks = mx.get_active_memory(), []
    for _ in range(STEPS):
        mx.reset_peak_memory()
        assert len(generator.next()[1]) == ROWS
        peaks.append(mx.get_peak_memory() - base)
    return peaks


@pytest.mark.parametrize("route", ROUTES)
def test_the_peak_stays_flat_during_decode(model, route):
    with on_cpu(), install(model, NUM_BLOCKS, block_size=BLOCK, **ROUTES[route]) as kv:
        spec = kv.backend.spec
        plane_nbytes = NUM_BLOCKS * spec.block_nbytes // (2 * spec.num_layers)
        longest = -(-(24 + STEPS + 8) // BLOCK)
        context_nbytes = ROWS * longest * spec.block_nbytes  # of all layers: what gathers of two steps can hold
        peaks = decode_peaks(kv, model)
        print(f"peak {max(peaks)}, context {context_nbytes}, one pool array {plane_nbytes}")
        assert max(peaks) < plane_nbytes // 4, "a step copied a pool array"
        assert max(peaks[STEPS // 2 :]) - max(peaks[: STEPS // 2]) <= 2 * context_nbytes, "the peak grows"
        assert kv.settle() == 0 == kv.summary().mlx_pool_copies
