"""Quantized storage of the reference backend, word for word against MLX, and the specs that describe it."""

import numpy as np
import pytest
from quantized_rows import FLOATS, rows

from kvpool.config import KVSpec
from kvpool_backends.numpy.elements import dequantize, from_bfloat16, quantize, to_bfloat16

mx = pytest.importorskip("mlx.core", reason="MLX is what the reference is compared with")
SEED = 8_104
FORMATS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def of_mlx(x, group: int, bits: int, dtype: str) -> list[np.ndarray]:
    """Words, and the bits of scales and biases."""
    words, scales, biases = mx.quantize(mx.array(x).astype(getattr(mx, dtype)), group, bits)
    kind = mx.uint32 if dtype == "float32" else mx.uint16
    return [np.array(words), np.array(scales.view(kind)), np.array(biases.view(kind))]


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return to_bfloat16(x)
    return x.astype(dtype).view(np.uint16 if dtype == "float16" else np.uint32)


def floats(bits: np.ndarray, dtype: str) -> np.ndarray:
    return from_bfloat16(bits) if dtype == "bfloat16" else bits.view(dtype).astype(np.float32)


# ---------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_quantize_of_any_group_equals_mlx_bit_for_bit(bits, group, dtype):
    x = floats(stored(rows(np.random.default_rng(SEED), (420, 256)), dtype), dtype)
    words, scales, biases = quantize(x, group, bits)
    ours = words, stored(scales, dtype), stored(biases, dtype)
    for name, mine, theirs in zip(("words", "scales", "biases"), ours, of_mlx(x, group, bits, dtype), strict=True):
        assert np.array_equal(mine, theirs), f"{name} differ in {np.argwhere(mine != theirs)[:3].tolist()}"


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_dequantize_equals_mlx_in_float32(bits, group):
    x = rows(np.random.default_rng(SEED + 1), (84, 256))
    words, scales, biases = quantize(x, group, bits)
    theirs = np.array(mx.dequantize(*map(mx.array, (words, scales, biases)), group, bits))
    assert np.array_equal(dequantize(words, scales, biases, bits), theirs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_of_a_group_that_is_not_finite_makes_all_of_it_nan(bad, bits):
    x = np.random.default_rng(1).standard_normal((2, 128)).astype(np.float32)
    x[1, 70] = bad
    back = dequantize(*quantize(x, 64, bits), bits)
    assert np.isnan(back[1, 64:]).all() and np.isfinite(back[1, :64]).all() and np.isfinite(back[0]).all()


# ---------------------------------------------------------------------- specs


def test_bytes_of_a_quantized_token_are_those_of_its_format():
    dense, int8 = KVSpec(1, 8, 128, "float16"), KVSpec(1, 8, 128, "float16", k_bits=8, v_bits=8)
    int4 = KVSpec(1, 8, 128, "float16", k_bits=4, v_bits=4)
    elements = 2 * 8 * 128
    sizes = dense.token_nbytes, int8.token_nbytes, int4.token_nbytes
    assert sizes == (2 * elements, 1.0625 * elements, 0.5625 * elements)
    assert [plane.name for plane in int8.stored_planes] == ["k", "k_scales", "k_biases", "v", "v_scales", "v_biases"]
    assert int8.storage == "float16, keys 8 bits, values 8 bits, groups of 64"


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"k_bits": 3}, ValueError, "k_bits is 3, it must be None or 4 or 8"),
        ({"v_bits": 16}, ValueError, "v_bits is 16, it must be None or 4 or 8"),
        ({"k_bits": True}, TypeError, "k_bits must be None or 4 or 8, got bool"),
        ({"v_bits": "8"}, TypeError, "v_bits must be None or 4 or 8, got str"),
        ({"quant_group_size": 16}, ValueError, "quant_group_size is 16, it must be 32 or 64 or 128"),
        ({"k_bits": 8, "quant_group_size": 128}, ValueError, "head_dim is 64, not a multiple of quant_group_size 128"),
        ({"v_bits": 8, "v_head_dim": 96}, ValueError, "v_head_dim is 96, not a multiple of quant_group_size 64"),
        ({"k_bits": 8, "dtype": "float8_e4m3"}, ValueError, "dtype 'float8_e4m3' has too few digits for the scales"),
    ],
)
def test_specs_that_cannot_be_quantized_are_refused(wrong, error, message):
    with pytest.raises(error, match=r"^\[KVSpec\] .*" + message):
        KVSpec(1, 2, 64, **wrong)
