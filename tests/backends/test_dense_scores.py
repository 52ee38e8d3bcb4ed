"""Attention with scores on dense arrays: of numpy by the kernels, of MLX by MLX; ``mx.dequantize`` is the oracle."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import on_cpu

from kvpool.protocol import AttentionOptions
from kvpool.testing.dense import dense_attention, dense_scores, round_to
from kvpool_backends.cpu import dense as of_numpy
from kvpool_backends.mlx import dense as of_mlx

KINDS = ("raw", "mass")
ERROR = 1e-3  # absolute, of results over quantized data beside dequantized data


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


def made(context, n=1, heads=(4, 2), dims=(64, 32), rows=2, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, heads[0], n, dims[0])).astype(np.float32)
    k, v = (rng.standard_normal((rows, heads[1], context, dim)).astype(np.float32) for dim in dims)
    return q, k, v


def right(q, k, v, kind, options=None):
    outs, scores = [], []
    n = q.shape[2]
    for row in range(len(q)):
        tokens = [np.swapaxes(x[row], 0, 1) for x in (q, k, v)]
        mask = None if options is None or options.mask is None else options.mask[row * n : (row + 1) * n]
        given = AttentionOptions() if options is None else options
        given = AttentionOptions(given.window, given.soft_cap, given.sinks, given.alibi_slopes, mask)
        outs.append(np.swapaxes(dense_attention(*tokens, None, given)[0], 0, 1))
        newest = AttentionOptions(
            given.window, given.soft_cap, given.sinks, given.alibi_slopes, None if mask is None else mask[-1:]
        )
        scores.append(dense_scores(tokens[0][-1:], tokens[1], kind, None, newest))
    return np.stack(outs), np.stack(scores)


def run(module, name, q, *planes, **more):
    if module is of_mlx:
        q, *planes = (tuple(map(mx.array, x)) if isinstance(x, tuple) else mx.array(x) for x in (q, *planes))
    return [np.array(x) for x in getattr(module, name)(q, *planes, **more)]


def options_of(q, context, seed=1):
    rng = np.random.default_rng(seed)
    mask = rng.standard_normal((q.shape[0] * q.shape[2], q.shape[1], context)).astype(np.float32)
    mask[rng.random(mask.shape) < 0.3] = -np.inf
    return AttentionOptions(
        window=context // 2 + 1,
        soft_cap=3.0,
        sinks=np.linspace(-1, 1, q.shape[1]),
        alibi_slopes=np.linspace(0.01, 0.1, q.shape[1]),
        mask=mask,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [of_numpy, of_mlx], ids=["numpy", "mlx"])
@pytest.mark.parametrize(("context", "n"), [(1, 1), (33, 1), (600, 1), (70, 5), (90, 40)])
def test_dense_attention_and_scores_equal_float64(module, context, n, kind):
    q, k, v = made(context, n)
    for options in (None, options_of(q, context)):
        out, s = run(module, "attention_with_scores", q, k, v, scores=kind, options=options)
        expected, scores = right(q, k, v, kind, options)
        assert np.abs(out - expected).max() < 1e-5
        assert np.abs(s - scores).max() < 1e-5 * max(1, np.abs(scores).max())


def quantized(x, bits, group_size):
    words, scales, biases = mx.quantize(mx.array(x), group_size, bits)
    return tuple(np.array(a) for a in (words, scales, biases))


def dequantized(planes, bits, group_size):
    return np.array(mx.dequantize(*map(mx.array, planes), group_size, bits))


@pytest.mark.parametrize("module", [of_numpy, of_mlx], ids=["numpy", "mlx"])
@pytest.mark.parametrize("bits", [4, 8, (8, 4)], ids=str)
@pytest.mark.parametrize("context", [64, 300, 4096])
def test_quantized_attention_equals_dequantize_then_dense(module, context, bits):
    q, k, v = made(context, dims=(128, 64), heads=(8, 2), rows=1, seed=context)
    pair = bits if isinstance(bits, tuple) else (bits, bits)
    planes = [quantized(x, b, 64) for x, b in zip((k, v), pair, strict=True)]
    dense = [dequantized(x, b, 64) for x, b in zip(planes, pair, strict=True)]
    for kind in KINDS:
        for options in (None, options_of(q, context)):
            out, s = run(module, "quantized_attention_with_scores", q, *planes, bits=bits, scores=kind, options=options)
            expected, scores = right(q, *dense, kind, options)
            assert np.abs(out - expected).max() < ERROR
            assert np.abs(s - scores).max() < ERROR * (1 if kind == "raw" else scores.max())


def test_bfloat16_as_bits_and_views_are_taken():
    q, k, v = (round_to(x, "bfloat16") for x in made(50, 2))
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (q, k, v)]
    strided = [np.repeat(x, 2, axis=2)[:, :, ::2] for x in bits]
    for x in strided:
        x.flags.writeable = False
    expected, scores = right(q, k, v, "raw")
    for given in (bits, strided):
        out, s = of_numpy.attention_with_scores(*given)
        assert np.abs(out - expected).max() < 1e-5 and np.abs(s - scores).max() < 1e-5


# ---------------------------------------------------------------------- refusals

Q, K, V = made(9, 2)
PLANES = quantized(K, 8, 64)
DENSE, PACKED = "attention_with_scores", "quantized_attention_with_scores"
REFUSED = [
    (DENSE, {"scores": "entropy"}, ValueError),
    (DENSE, {"k": K.astype(np.float16)}, TypeError),
    (DENSE, {"q": Q[0]}, ValueError),
    (DENSE, {"q": Q[:1]}, ValueError),
    (DENSE, {"q": Q[:, :3]}, ValueError),
    (DENSE, {"q": Q[..., :7]}, ValueError),
    (DENSE, {"q": np.zeros((2, 4, 10, 64), np.float32)}, ValueError),
    (DENSE, {"k": K[:, :, :4]}, ValueError),
    (DENSE, {"v": V[:, :1]}, ValueError),
    (DENSE, {"v": V[0]}, ValueError),
    (DENSE, {"scale": float("nan")}, ValueError),
    (DENSE, {"options": AttentionOptions(sinks=np.zeros(3))}, ValueError),
    (DENSE, {"options": AttentionOptions(mask=np.zeros((4, 8), np.float32))}, ValueError),
    (PACKED, {"k": PLANES[:2]}, (TypeError, ValueError)),
    (PACKED, {"k": PLANES[0]}, (TypeError, ValueError)),
    (PACKED, {"k": (PLANES[1], *PLANES[1:])}, TypeError),
    (PACKED, {"k": (PLANES[0][..., :8], *PLANES[1:])}, ValueError),
    (PACKED, {"v": (*PLANES[:2], PLANES[2][:, :, :3])}, ValueError),
    (PACKED, {"v": (*PLANES[:2], PLANES[2].astype(np.float16))}, TypeError),
    (PACKED, {"bits": 3}, ValueError),
    (PACKED, {"bits": 4}, ValueError),
    (PACKED, {"group_size": 32}, ValueError),
    (PACKED, {"group_size": 7}, ValueError),
    (PACKED, {"scores": "raws"}, ValueError),
]


@pytest.mark.parametrize(("name", "change", "error"), REFUSED)
def test_wrong_arguments_are_refused(name, change, error):
    arguments = {"q": Q, "k": K, "v": V} if name == DENSE else {"q": Q, "k": PLANES, "v": PLANES}
    arguments |= change
    q, k, v = (arguments.pop(plane) for plane in "qkv")
    for module in (of_numpy, of_mlx) if name == DENSE and {"scale", "k"}.isdisjoint(change) else (of_numpy,):
        with pytest.raises(error, match=rf"^\[({name}|KVSpec|attend)\] "):
            run(module, name, q, k, v, **arguments)
