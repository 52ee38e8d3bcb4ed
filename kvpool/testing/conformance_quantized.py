"""Conformance cases about quantized storage: bytes by the formula, attention over what comes back.

A case runs where `capabilities.quant_bits` names bits; other specs have to be refused.
`kvpool.testing.conformance` is the entrance, and says how cases are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from kvpool.config import DTYPES, LAYOUTS, KVSpec
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool.spec import QUANT_BITS
from kvpool.testing.filled import (
    SEED,
    Case,
    Factory,
    NotApplicable,
    capabilities_of,
    collector,
    everything,
    fill,
    fill_all,
    fill_random,
    int32,
    same_bytes,
    token_columns,
)
from kvpool.testing.quantize import quantized

CASES: list[Case] = []
_case = collector(CASES)

_CONTEXTS = [1, 17, 99]
# Bits of keys, bits of values, group.
_KINDS = [(8, 8, 64), (4, 4, 32), (8, 4, 64), (None, 8, 32), (4, None, 64), (4, 4, 128)]
_TOLERANCE = 2e-5  # of float32 results: scale * sum(q n) and bias * sum(q) cancel to a few of 255 steps


def _specs(factory: Factory, *, layouts: bool = False, dtypes: bool = False, layers: int = 1) -> Iterator[KVSpec]:
    """Quantized specs that the backend accepts: bits of keys and values, groups, and on request layouts and dtypes."""
    can, found = capabilities_of(factory), False
    for layout in can.layouts if layouts else can.layouts[:1]:
        for dtype in [d for d in DTYPES if d in can.dtypes and d != "float8_e4m3"] if dtypes else can.dtypes[:1]:
            for k_bits, v_bits, group in _KINDS:
                if layout == "interleaved" and k_bits != v_bits:
                    continue
                dim = max(group, 64)
                v_dim = dim if group == 32 or layout == "interleaved" else 128
                spec = KVSpec(layers, 2, dim, dtype, 16, v_dim, layout, k_bits, v_bits, group)
                if can.refusal(spec, 4) is None:
                    found = True
                    yield spec
    if not found:
        raise NotApplicable


@_case
def quantized_bytes_are_those_of_the_formula(factory: Factory) -> None:
    """Words, scales and biases of every plane, in the order of the export."""
    for spec in chain(_specs(factory, layouts=True, layers=2), _specs(factory, dtypes=True)):
        filled = fill(factory, spec, [spec.block_size])
        expected = []
        for layer in range(spec.num_layers):
            for given, bits in zip((filled.given_k, filled.given_v), spec.bits, strict=True):
                parts = filled.stored(given[layer][0], bits)
                expected += [part.ravel() for part in parts]
        got = np.asarray(filled.backend.export_blocks([int(filled.tables[0, 0])]))
        same_bytes(got, np.concatenate(expected)[None], f"{spec.storage}, {spec.layout}")


@_case
def groups_of_every_kind_are_stored_by_the_formula(factory: Factory) -> None:
    """One sign, one value, zeros, ties, tiny and large; one that is not finite becomes NaN, its neighbours do not."""
    for spec in _specs(factory, dtypes=True):
        rng, n = np.random.default_rng(SEED), spec.block_size
        backend = factory(spec, 3)
        given = []
        for _, dim in spec.planes:
            x = rng.standard_normal((n, 2, dim)).astype(np.float32)
            x[1], x[2], x[3], x[4] = np.abs(x[1]), -np.abs(x[2]), 0.37, 0.0
            x[5], x[6], x[7] = rng.integers(-4, 5, x[5].shape), x[6] * 1e-6, x[7] * 1e3
            x[8, 0, 3], x[9, 1, dim - 1], x[10, 0, 0] = np.nan, np.inf, -np.inf
            given.append(x)
        k, v = map(backend.asarray, given)
        backend.write(backend.prepare(StepArrays(slot_mapping=np.arange(n, 2 * n, dtype=np.int32))), 0, k, v)
        got = [backend.to_numpy(x) for x in backend.gather(0, [1])]
        for x, bits, back in zip(given, spec.bits, got, strict=True):
            if bits is not None:
                expected = quantized(x, spec, bits)[1]
                room = 2 * np.finfo(np.float32).eps * np.abs(np.nan_to_num(expected)).max(axis=-1, keepdims=True)
                room = room + {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[spec.dtype] * np.abs(expected)
                wrong = ~((np.abs(back - expected) <= room) | (np.isnan(back) & np.isnan(expected)))
                assert not wrong.any(), f"{spec.storage}: tokens {np.unique(np.argwhere(wrong)[:, 0])} come back wrong"


@_case
def quantized_contexts_equal_dense_attention(factory: Factory) -> None:
    """Decode and chunks, slots that nobody sees full of NaN, with options where the backend has them."""
    features = capabilities_of(factory).features
    for spec in chain(_specs(factory, layouts=True), _specs(factory, dtypes=True)):
        filled = fill(factory, spec, _CONTEXTS)
        for q_lens in ([1, 1, 1], [1, 5, 70]):
            filled.check(q_lens, 4, f"{spec.storage}, {q_lens} queries", tolerance=_TOLERANCE)
        if "sinks" in features and "window" in features:
            options = AttentionOptions(sinks=np.linspace(-1, 2, 4), window=30)
            filled.check([1, 2, 3], 4, f"{spec.storage}, sinks and window", options=options, tolerance=_TOLERANCE)


@_case
def quantized_blocks_move_as_bytes(factory: Factory) -> None:
    """Copies, zeros, export and import act on words, scales and biases, and on nothing else."""
    for spec in _specs(factory, layouts=True, layers=2):
        backend, other = factory(spec, 7), factory(spec, 7)
        fill_random(backend, np.random.default_rng(SEED))
        fill_all(other, np.nan)
        expected = everything(backend)
        backend.copy_blocks(int32([[3, 5, 7], [2, 6, spec.block_size]]))
        backend.zero([1])
        for src, dst, num_tokens in ((3, 5, 7), (2, 6, spec.block_size)):
            for columns in token_columns(spec, num_tokens):
                expected[dst, columns] = expected[src, columns]
        expected[1] = 0
        same_bytes(everything(backend), expected, f"{spec.storage}, {spec.layout}: copy and zero")
        before = everything(other)
        other.import_blocks([4, 0], backend.export_blocks([5, 6]))
        before[[4, 0]] = expected[[5, 6]]
        same_bytes(everything(other), before, f"{spec.storage}, {spec.layout}: import")


@_case
def quantized_tokens_are_compacted_as_they_are(factory: Factory) -> None:
    """`compact` quantizes nothing anew."""
    if not capabilities_of(factory).compacts:
        raise NotApplicable
    for spec in _specs(factory, layers=2):
        filled = fill(factory, spec, [40])
        backend, table = filled.backend, filled.tables[0, :3]
        keep = np.sort(np.argsort(filled.rng.random((2, 2, 40)), axis=-1)[..., :21], axis=-1)
        old = [[backend.to_numpy(x) for x in backend.gather(layer, table, 40)] for layer in range(2)]
        backend.compact(table, keep)
        for layer in range(2):
            for before, after in zip(old[layer], backend.gather(layer, table, 21), strict=True):
                stays = np.take_along_axis(before, keep[layer].T[:, :, None], 0)
                assert np.array_equal(backend.to_numpy(after), stays), f"{spec.storage}: compaction changed tokens"


@_case
def other_bits_and_groups_are_refused(factory: Factory) -> None:
    """What `capabilities` does not list, the factory refuses with a ValueError."""
    can = capabilities_of(factory)
    layout = next(name for name in can.layouts if name in LAYOUTS)
    dim = 128 if can.head_dims is None else max(can.head_dims)
    plain = KVSpec(1, 1, dim, can.dtypes[0], (can.block_sizes or (16,))[0], layout=layout)
    tried = [replace(plain, k_bits=bits, v_bits=bits, quant_group_size=32) for bits in QUANT_BITS if dim % 32 == 0]
    refused = [spec for spec in tried if can.refusal(spec)]
    for spec in refused:
        try:
            factory(spec, 2)
        except ValueError:
            continue
        raise AssertionError(f"{spec} was accepted, although {can.refusal(spec)}")
    if not refused:
        raise NotApplicable
