"""Kernels that others wrote, and that are known to work on GPUs: MLX's own, from the headers that its wheel brings.

They tell whether the harness is right, where tests of its parts cannot: nothing in their text was written for it.
"""

import re
from pathlib import Path

import mlx
import numpy as np
import pytest
from msl import Bound, Kernel, settings

INCLUDE = next((Path(folder) / "include" for folder in mlx.__path__ if (Path(folder) / "include").is_dir()), None)
# MLX's utils.h overloads functions on address spaces, which are one here: what the kernels need of it, for floats.
HELPERS = """
#include <metal_stdlib>
using namespace metal;
template <typename U>
struct Limits {
  static constexpr U max = metal::numeric_limits<U>::infinity(), min = -max;
  static constexpr U finite_max = metal::numeric_limits<U>::max(), finite_min = -finite_max;
};
"""


def text_of(header):
    """Of MLX's, with function constants that are 0."""
    text = HELPERS + (INCLUDE / "mlx/backend/metal/kernels" / header).read_text()
    return re.sub(r"constant (\w+) (\w+) \[\[function_constant\(\d+\)\]\];", r"constant constexpr \1 \2 = 0;", text)


def bind(*arrays, output):
    """Buffers by index; the one named `output` is written."""
    return {i: Bound(a, "output" if name == output else "read_only", name) for i, (name, a) in enumerate(arrays)}


@pytest.mark.parametrize(("dim", "tokens"), [(64, 67), (128, 40)])
def test_sdpa_vector(dim, tokens):
    batch, q_heads, kv_heads = 2, 6, 2
    random = np.random.default_rng(0)
    q = random.standard_normal((batch, q_heads, dim)).astype(np.float32)
    k, v = (random.standard_normal((batch, kv_heads, tokens, dim)).astype(np.float32) for _ in "kv")
    out = np.empty_like(q)
    kernel = Kernel(text_of("sdpa_vector.h"), "sdpa_vector", f"float, {dim}, {dim}")
    scalars = {"gqa_factor": np.int32(q_heads // kv_heads), "N": np.int32(tokens)}
    scalars |= {f"{x}_{y}_stride": np.uint64(n) for x in "kv" for y, n in (("head", tokens * dim), ("seq", dim))}
    scalars["scale"] = np.float32(dim**-0.5)
    buffers = bind(
        ("q", q), ("k", k), ("v", v), ("out", out), *((n, np.array(s)) for n, s in scalars.items()), output="out"
    )

    def launch():
        kernel.launch(buffers, (batch * q_heads * 1024, 1, 1), (1024, 1, 1))
        return out.tobytes()

    results = set()
    for seed in range(3):
        with settings(seed=seed):
            results.add(launch())
    assert len(results) == 1
    groups = q_heads // kv_heads
    scores = np.einsum("bhd,bhnd->bhn", q.astype(np.float64), np.repeat(k, groups, 1)) * dim**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhn,bhnd->bhd", weights, np.repeat(v, groups, 1))
    np.testing.assert_allclose(out, expected, atol=1e-6)
    with settings(instrumented=True) as runs:
        launch()
    run = runs[0]
    assert run.reads["k"].bytes == groups * k.nbytes, "this kernel reads K once per query head"
    assert run.reads["k"].distinct_bytes == k.nbytes and run.writes["out"].bytes == out.nbytes
    assert run.threadgroup_barriers == batch * q_heads * (1 + 2 * dim // 32)
    assert run.simd_operations == batch * q_heads * (tokens + 32 * (2 + dim // 32))
