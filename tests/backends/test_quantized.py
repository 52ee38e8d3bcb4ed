"""Quantized storage of the reference backend, word for word against MLX, and the specs that describe it."""

import numpy as np
import pytest
from quantized_rows import FLOATS, rows

from kvpool.config import LAYOUTS, KVSpec, blocks_for, describe_plan
from kvpool.protocol import StepArrays
from kvpool_backends.numpy import NumpyBackend
from kvpool_backends.numpy.elements import dequantize, from_bfloat16, pack, quantize, to_bfloat16, unpack

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


def test_unpack_of_packed_numbers_returns_them():
    for bits in (4, 8):
        numbers = np.random.default_rng(bits).integers(0, 2**bits, (3, 64)).astype(np.uint8)
        assert np.array_equal(unpack(pack(numbers, bits), bits), numbers)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_of_a_group_that_is_not_finite_makes_all_of_it_nan(bad, bits):
    x = np.random.default_rng(1).standard_normal((2, 128)).astype(np.float32)
    x[1, 70] = bad
    back = dequantize(*quantize(x, 64, bits), bits)
    assert np.isnan(back[1, 64:]).all() and np.isfinite(back[1, :64]).all() and np.isfinite(back[0]).all()


# ---------------------------------------------------------------------- the backend


def filled(spec: KVSpec, tokens: int = 8) -> tuple[NumpyBackend, np.ndarray, np.ndarray]:
    backend, rng = NumpyBackend(spec, 4), np.random.default_rng(SEED)
    k, v = (rows(rng, (tokens, spec.num_kv_heads, dim)) for _, dim in spec.planes)
    slots = 2 * spec.block_size + np.arange(tokens)
    for layer in range(spec.num_layers):
        backend.write(backend.prepare(StepArrays(slot_mapping=slots)), layer, k + layer, v + layer)
    return backend, k, v


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("k_bits", "v_bits"), [(8, 8), (4, 4), (8, 4), (None, 4), (8, None)])
def test_exported_block_holds_what_mlx_makes_of_its_tokens(k_bits, v_bits, dtype, layout):
    if layout == "interleaved" and k_bits != v_bits:  # one array
        return
    v_dim = 64 if layout == "interleaved" else 128
    spec = KVSpec(2, 3, 64, dtype, 16, v_dim, layout, k_bits, v_bits, 32)
    backend, k, v = filled(spec, 16)
    expected = []
    for layer in range(2):
        for x, bits in ((k + layer, k_bits), (v + layer, v_bits)):
            parts = [stored(x, dtype)] if bits is None else of_mlx(x, 32, bits, dtype)
            expected += [np.ascontiguousarray(part).view(np.uint8).ravel() for part in parts]
    assert np.array_equal(backend.export_blocks([2])[0], np.concatenate(expected))
    assert backend.export_blocks([2]).nbytes == spec.block_nbytes


def test_gather_returns_what_mlx_dequantizes():
    spec = KVSpec(1, 2, 128, "bfloat16", 4, k_bits=8, v_bits=4)
    backend, k, v = filled(spec)
    got = backend.gather(0, [2, 3], 8)
    for x, bits, mine in ((k, 8, got[0]), (v, 4, got[1])):
        words, scales, biases = mx.quantize(mx.array(x[:8]).astype(mx.bfloat16), 64, bits)
        theirs = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), 64, bits)
        assert np.array_equal(mine, np.array(theirs))


def test_copy_and_zero_act_on_all_planes():
    spec = KVSpec(2, 2, 64, "float16", 4, k_bits=8, v_bits=4)
    backend, _, _ = filled(spec, 4)
    backend.copy_blocks(np.array([[2, 1, 4]]))
    assert np.array_equal(backend.export_blocks([1]), backend.export_blocks([2])) and backend.export_blocks([1]).any()
    backend.zero([2])
    assert not backend.export_blocks([2]).any()


def test_attend_reads_the_dequantized_tokens():
    spec = KVSpec(1, 2, 64, "float32", 4, k_bits=4, v_bits=8)
    backend, _, _ = filled(spec)
    dense = NumpyBackend(KVSpec(1, 2, 64, "float32", 4), 4)
    k, v = backend.gather(0, [2, 3], 8)
    dense.write(dense.prepare(StepArrays(slot_mapping=8 + np.arange(8))), 0, k, v)
    q = np.random.default_rng(3).standard_normal((1, 4, 64))
    plan = StepArrays(np.array([[2, 3]]), np.array([8]), np.array([0, 1]))
    assert np.array_equal(backend.attend(backend.prepare(plan), 0, q), dense.attend(dense.prepare(plan), 0, q))


# ---------------------------------------------------------------------- specs


def test_bytes_of_a_quantized_token_are_those_of_its_format():
    dense, int8 = KVSpec(1, 8, 128, "float16"), KVSpec(1, 8, 128, "float16", k_bits=8, v_bits=8)
    int4 = KVSpec(1, 8, 128, "float16", k_bits=4, v_bits=4)
    elements = 2 * 8 * 128
    sizes = dense.token_nbytes, int8.token_nbytes, int4.token_nbytes
    assert sizes == (2 * elements, 1.0625 * elements, 0.5625 * elements)
    assert [plane.name for plane in int8.stored_planes] == ["k", "k_scales", "k_biases", "v", "v_scales", "v_biases"]
    assert int8.storage == "float16, keys 8 bits, values 8 bits, groups of 64"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planes_of_a_quantized_spec_cover_every_element_once(layout):
    spec = KVSpec(2, 3, 64, "float16", 4, layout=layout, k_bits=8, v_bits=8, quant_group_size=32)
    seen: dict[tuple[str, int], np.ndarray] = {}
    for layer in range(2):
        for plane in spec.stored_planes:
            at = spec.plane_layout(plane.name, 5)
            base = seen.setdefault((at.array, layer if at.per_layer else 0), np.zeros(int(np.prod(at.shape)), int))
            width = plane.itemsize_nbytes if layout == "block" else 1  # its base array has bytes
            block, slot, head, d = np.ogrid[:5, :4, :3, : plane.dim]
            where = at.offset + layer * at.layer_stride + block * at.block_stride + slot * at.slot_stride
            elements = (where + head * at.head_stride + d).ravel()
            np.add.at(base, (width * elements[:, None] + np.arange(width)).ravel(), 1)
    assert all((base == 1).all() for base in seen.values())


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
        ({"k_bits": 8, "layout": "interleaved"}, ValueError, "needs equal bits"),
    ],
)
def test_specs_that_cannot_be_quantized_are_refused(wrong, error, message):
    with pytest.raises(error, match=r"^\[KVSpec\] .*" + message):
        KVSpec(1, 2, 64, **wrong)


def test_a_plan_for_a_model_counts_quantized_bytes():
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    config |= {"model_type": "llama", "dtype": "float16"}
    dense, _ = describe_plan(config, "1GiB")
    int8, text = describe_plan(config, "1GiB", k_bits=8, v_bits=8)
    assert int8["token_nbytes"] * 2 == dense["token_nbytes"] * 1.0625 and "keys 8 bits, values 8 bits" in text
    assert int8["num_blocks"] == int(1.0 * 2**30) // int8["block_nbytes"]
    assert blocks_for("1MiB", KVSpec(1, 1, 64, k_bits=4, v_bits=4)).num_blocks == 2**20 // (16 * 2 * 36)
