"""Each conformance case of quantized storage catches the fault that it is meant for."""

from dataclasses import replace

import numpy as np
import pytest

from kvpool.config import KVSpec
from kvpool.protocol import StepArrays
from kvpool.testing import conformance_storage
from kvpool_backends.numpy import NumpyBackend
from kvpool_backends.numpy.elements import dequantize, quantize

CASES = {case.__name__: case for case in conformance_storage.QUANTIZED_CASES}


class Changed(NumpyBackend):
    """Right, but for what a test changes in the parts of a quantized plane."""

    def change(self, words, scales, biases, bits):
        return words, scales, biases

    def _to_parts(self, name, x, bits):
        if bits is None:
            return super()._to_parts(name, x, bits)
        floats = self._as_floats(self._to_stored(name, x))
        words, scales, biases = self.change(*quantize(floats, self.spec.quant_group_size, bits), bits)
        return [words, self._to_stored(name, scales), self._to_stored(name, biases)]


class HalfOfAGroupOf128(Changed):
    """The scale of a group of 128 is that of a group of 64."""

    def change(self, words, scales, biases, bits):
        return words, scales / 2 if self.spec.quant_group_size == 128 else scales, biases


class NaNIsZero(Changed):
    def change(self, words, scales, biases, bits):
        return words, np.nan_to_num(scales), np.nan_to_num(biases)


class CopiesWordsAlone(NumpyBackend):
    def copy_blocks(self, plan):
        before = [[plane.copy() for plane in planes] for planes in self._planes]
        super().copy_blocks(plan)
        for planes, old in zip(self._planes, before, strict=True):
            for plane, kept in zip(planes, old, strict=True):
                if plane.dtype != np.uint32:
                    plane[:] = kept


class ScalesOfTheNextToken(NumpyBackend):
    def _context(self, plane, table, num_tokens):
        if isinstance(plane, tuple):
            words, scales, biases = plane
            plane = words, np.roll(scales, 1, axis=1), biases
        return super()._context(plane, table, num_tokens)


class QuantizesAgain(NumpyBackend):
    def compact(self, blocks, keep):
        blocks, keep = np.asarray(blocks), np.asarray(keep)
        n = keep.shape[-1]
        slots = (blocks[:, None] * self.spec.block_size + np.arange(self.spec.block_size)).ravel()[:n]
        for layer in range(self.spec.num_layers):
            kept = [
                np.take_along_axis(x, keep[layer].T[:, :, None], 0) * np.float32(1 + 2.0**-7)
                for x in self.gather(layer, blocks)
            ]
            self.write(self.prepare(StepArrays(slot_mapping=slots)), layer, *kept)


class AcceptsAll(NumpyBackend):
    """Says that it has 4 bits only, and takes 8."""

    def __init__(self, spec, num_blocks):
        super().__init__(spec, num_blocks)
        self.capabilities = replace(self.capabilities, quant_bits=(4,))


FAULTS = {
    HalfOfAGroupOf128: "quantized_bytes_are_those_of_the_formula",
    ScalesOfTheNextToken: "quantized_contexts_equal_dense_attention",
    NaNIsZero: "groups_of_every_kind_are_stored_by_the_formula",
    CopiesWordsAlone: "quantized_blocks_move_as_bytes",
    QuantizesAgain: "quantized_tokens_are_compacted_as_they_are",
    AcceptsAll: "other_bits_and_groups_are_refused",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught_by_its_case(fault):
    with pytest.raises(AssertionError):
        CASES[FAULTS[fault]](fault)


def test_a_backend_without_quantization_refuses_the_spec():
    from kvpool_backends.mlx.plain import PlainBackend

    class Dense(PlainBackend):
        capabilities = replace(PlainBackend.capabilities, quant_bits=(), quant_group_sizes=())

    spec = KVSpec(1, 2, 64, "float16", k_bits=8)
    with pytest.raises(ValueError, match="k_bits 8 is not among"):
        Dense(spec, 2)
    CASES["other_bits_and_groups_are_refused"](Dense)


def test_half_a_step_is_the_most_that_quantization_takes():
    x = np.random.default_rng(1).standard_normal((50, 2, 64)).astype(np.float32)
    for bits in (4, 8):
        words, scales, biases = quantize(x, 64, bits)
        off = np.abs(dequantize(words, scales, biases, bits) - x)
        step = np.abs(scales)
        assert (off <= 0.5001 * step + 1e-6).mean() > 0.99  # the far end may be clipped where 0 was made a step
