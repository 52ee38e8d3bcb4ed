"""Is this a correct backend? A list of cases that every `kvpool.protocol.KVBackend` has to pass.

``check_backend(MyBackend)`` runs all; a test can take them one by one (docs/backends.md). A case takes a factory
``factory(spec, num_blocks)``.

Every pool is filled with NaN first, in every slot of every block, the reserved block 0 included; known tokens
are then written into randomly chosen blocks, and what comes out is compared with dense float64 attention
(`kvpool.testing.dense`) over the values as the dtype rounds them. So a backend that reads one slot too many
answers NaN. How large an error may be: `kvpool.testing.filled.TOLERANCE`. Cases try only what `capabilities`
claims; a case for which nothing is left raises `NotApplicable`. More of them are in `conformance_attention`,
`conformance_storage` and `conformance_groups`; `CASES` has all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import numpy as np

from kvpool import Plan, Pool
from kvpool.config import DTYPES, LAYOUTS
from kvpool.protocol import BatchShape, KVBackend, StepArrays
from kvpool.spec import QUANT_BITS
from kvpool.testing import conformance_groups, conformance_storage  # noqa: F401 (they add cases)
from kvpool.testing.conformance_attention import exported
from kvpool.testing.dense import dense_attention, dense_attention_and_size, round_to, stored_bytes
from kvpool.testing.engine import RandomEngine
from kvpool.testing.filled import (
    CASES,
    SEED,
    Case,
    Expected,
    Factory,
    Filled,
    NotApplicable,
    attend,
    capabilities_of,
    case,
    close,
    contexts,
    everything,
    fill,
    fill_all,
    int32,
    mask_rows,
    need,
    quantized_specs,
    run_cases,
    same_bytes,
    some_options,
    specs,
    token_columns,
    told,
    values,
    write,
)

__all__ = ["CASES", "NotApplicable", "check_backend"]

BLOCK_SIZES = (1, 3, 8, 16, 32)


def check_backend(factory: Factory, cases: Sequence[Case] | None = None) -> dict[str, str]:
    """Run all cases, or those given.

    Returns
    -------
    dict
        Case name to "passed" or "not applicable".

    Raises
    ------
    AssertionError
        Some case failed. The message names every case that did, and how; the first failure is chained.
    """
    return run_cases(CASES if cases is None else cases, lambda case: case(factory))


# ---------------------------------------------------------------------- attention


@case
def protocol_is_implemented(factory: Factory) -> None:
    """All methods are there, the formats are known, capabilities are what the spec says."""
    spec = next(specs(factory))
    backend = factory(spec, 3)
    assert isinstance(backend, KVBackend), "a method or attribute of KVBackend is missing"
    assert backend.spec == spec and backend.num_blocks == 3
    assert backend.capabilities.refusal(spec) is None, "the backend serves what its capabilities refuse"
    with Pool(4, 8) as pool:
        Plan(pool, 1, formats=tuple(backend.required_formats))


@case
def decode_equals_dense_attention(factory: Factory) -> None:
    """One query per row; every dtype, block size and head grouping; contexts around every block boundary."""
    for kv_heads, q_heads in ((2, 2), (2, 8), (1, 4)):
        for spec in specs(factory, kv_heads=kv_heads, q_heads=q_heads, dtypes=tuple(DTYPES), block_sizes=BLOCK_SIZES):
            filled = fill(factory, spec, contexts(spec.block_size))
            filled.check([1] * len(filled.contexts), q_heads, f"decode, {q_heads} over {kv_heads} heads")


@case
def ragged_chunks_equal_dense_attention(factory: Factory) -> None:
    """Rows with no query, one, some and all of their tokens as queries, in one batch."""
    for kv_heads, q_heads in ((2, 4), (1, 3)):
        for spec in specs(factory, kv_heads=kv_heads, q_heads=q_heads, dtypes=tuple(DTYPES), block_sizes=BLOCK_SIZES):
            lengths = contexts(spec.block_size)
            filled = fill(factory, spec, lengths)
            some = [min(length, (0, 1, 2, 5)[i % 4]) for i, length in enumerate(lengths)]
            for q_lens in (lengths, some, [0] * len(lengths)):
                filled.check(q_lens, q_heads, f"chunks of {q_lens} in {lengths}")


@case
def plans_of_int64_are_read_like_int32(factory: Factory) -> None:
    """Engines with large pools ask for int64 plans."""
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [3, 16, 9]), [2, 1, 9]
        plan = filled.plan(q_lens)
        wide = StepArrays(*(getattr(plan, field.name).astype(np.int64) for field in fields(plan)))
        k, v = (np.concatenate([x[0][i][-n:] for i, n in enumerate(q_lens)]) for x in (filled.k, filled.v))
        write(filled.backend, wide, 0, k, v)
        q = filled.queries(q_lens, 4)
        close(attend(filled.backend, 0, q, wide), filled.expected(0, q, q_lens), spec, "int64 plan")


@case
def layouts_are_strides_only(factory: Factory) -> None:
    """Every layout answers the same, and exports the same bytes, also where keys and values differ in dimension."""
    exported: dict[int, np.ndarray] = {}
    can = capabilities_of(factory)
    dims = (8, 12) if can.mixed_head_dims else (8, 8)
    for spec in specs(factory, layers=3, layouts=can.layouts, block_sizes=(3, 8), head_dims=dims):
        filled = fill(factory, spec, [1, 7, 24])
        filled.check([1, 7, 2], 4, "strided layout")
        data = everything(filled.backend)
        same_bytes(data, exported.setdefault(spec.block_size, data), f"export from layout {spec.layout}")


@case
def attention_weights_are_returned(factory: Factory) -> None:
    """`return_attn`: the weights in logical token order, 0 where nothing is visible; a sink's share is missing."""
    can = capabilities_of(factory)
    need(can.return_attn)
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [3, 16, 9]), [2, 1, 9]
        q, plan, backend = filled.queries(q_lens, 4), filled.plan(q_lens), filled.backend
        for options in (None, some_options(filled, q_lens, 4, can.features)):
            out, attn = backend.attend(backend.prepare(plan), 1, backend.asarray(q), options=options, return_attn=True)
            result = filled.expected(1, q, q_lens, None, options)
            close(backend.to_numpy(out), result, spec, "result beside the weights")
            expected, begin = np.zeros((12, 4, 16)), 0
            for row, n in enumerate(q_lens):
                mine, k, v = slice(begin, begin + n), filled.k[1][row], filled.v[1][row]
                expected[mine, :, : len(k)] = dense_attention(q[mine], k, v, None, mask_rows(options, mine))[1]
                begin += n
            largest = expected.max(axis=-1, keepdims=True)
            close(backend.to_numpy(attn), Expected(expected, largest), spec, f"weights, {told(options)}")


@case
def unused_slots_never_matter(factory: Factory) -> None:
    """Whatever other slots hold and table padding names, NaN included, and in whatever blocks the tokens are: the same
    result, bit for bit.
    """
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(1, 3, 8, 16)):
        results = []
        for shift, poison, pad in ((0, 0.0, 0), (1, np.nan, 0), (2, np.nan, -1), (3, np.inf, 1), (0, -np.inf, 0)):
            filled, q_lens = fill(factory, spec, [1, 8, 13, 32], poison=poison, pad=pad, shift=shift), [1, 0, 5, 3]
            q = filled.queries(q_lens, 4)
            results.append(attend(filled.backend, 1, q, filled.plan(q_lens)))
        for result in results[1:]:
            assert np.array_equal(result, results[0]), f"a slot out of sight matters ({spec}, seed {SEED})"


@case
def padding_is_inert(factory: Factory) -> None:
    """Padding (rows of length 0, flat cu_q_lens, slots -1) writes nothing, answers 0 and scores 0, with any options."""
    can = capabilities_of(factory)
    for spec in specs(factory):
        filled = fill(factory, spec, [8, 5])
        padded, backend = filled.padded([2, 1]), filled.backend
        before = everything(backend)
        k, v = (np.ones((6, spec.num_kv_heads, dim), np.float32) for _, dim in spec.planes)
        write(backend, padded, 0, k, v)
        same_bytes(everything(backend), before, "a write to slots -1")
        q = filled.queries([6], 4)
        every = given = some_options(filled, [2, 1], 4, can.features)
        if every.mask is not None:
            nan = np.full((3, *every.mask.shape[1:]), np.nan, np.float32)
            given = replace(every, mask=np.concatenate([every.mask, nan]))
        for plan, options, due in ((padded, None, None), (filled.padded([2, 1], pad=-1), given, every)):
            out = attend(backend, 0, q, plan, None, options)
            close(out[:3], filled.expected(0, q[:3], [2, 1], None, due), spec, f"rows before padding, {told(due)}")
            assert out.shape[0] == 6 and not out[3:].any(), "padding tokens must answer 0"
        empty = StepArrays(block_tables=np.zeros((0, 1), np.int32))
        backend.copy_blocks(empty)
        write(backend, empty, 0, k[:0], v[:0])
        assert attend(backend, 0, q[:0], empty).shape == (0, 4, spec.value_head_dim)
        for kind in can.scores:
            alone, scores = exported(filled, q[:3], filled.plan([2, 1]), kind)[1], exported(filled, q, padded, kind)[1]
            assert scores.shape == (4, spec.num_kv_heads, 8) and not scores[2:].any(), "padding rows must score 0"
            assert np.array_equal(scores[:2], alone), "padding rows change the scores of others"
            assert exported(filled, q[:0], empty, kind)[1].shape == (0, spec.num_kv_heads, 0)
        same_bytes(everything(backend), before, "an empty batch")


# ---------------------------------------------------------------------- bytes in blocks


@case
def written_values_are_rounded_to_nearest_even(factory: Factory) -> None:
    """The stored bits of ties, huge values, infinities and NaN."""
    tie = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11
    special = [*tie, 1 / 3, -2 / 3, 65519.0, 65520.0, 1e30, np.inf, -np.inf, 0.0]
    for spec in specs(factory, dtypes=tuple(DTYPES), layers=1, kv_heads=1, block_sizes=(16, 8, 32)):
        backend = factory(spec, 2)
        heads_k, heads_v = (np.resize(np.array(special, np.float32), (1, 1, dim)) for _, dim in spec.planes)
        write(backend, StepArrays(slot_mapping=int32([spec.block_size])), 0, heads_k, heads_v)
        got = np.asarray(backend.export_blocks([1]))[0][: spec.head_dim * spec.itemsize_nbytes]
        expected = stored_bytes(round_to(heads_k, spec.dtype), spec.dtype)
        assert np.array_equal(got, expected), f"values are not rounded to nearest even ({spec.dtype})"


@case
def copies_take_exactly_the_valid_tokens(factory: Factory) -> None:
    """Copy-on-write moves the first tokens of a block in all layers and planes; the rest of dst stays."""
    for spec in specs(
        factory,
        layers=3,
        layouts=capabilities_of(factory).layouts,
        block_sizes=(1, 3, 8),
        dtypes=tuple(DTYPES),
        packed=True,
    ):
        backend, rng = factory(spec, 7), np.random.default_rng(SEED)
        fill_all(backend, rng)
        before = everything(backend)
        copies = np.array([[3, 5, max(1, spec.block_size - 1)], [3, 1, 1], [2, 6, spec.block_size]], np.int32)
        backend.copy_blocks(StepArrays(copies=copies))
        expected = before.copy()
        for src, dst, num_tokens in copies:
            for columns in token_columns(spec, num_tokens):
                expected[dst, columns] = before[src, columns]
        same_bytes(everything(backend), expected, f"copies {copies.tolist()} ({spec.layout})")
        backend.copy_blocks(copies[:0])
        backend.copy_blocks(np.array([[6, 4, 1]], np.int32))
        for columns in token_columns(spec, 1):
            expected[4, columns] = expected[6, columns]
        same_bytes(everything(backend), expected, "copies given as an array")


@case
def copies_writes_reads_happen_in_order(factory: Factory) -> None:
    """A copy sees the writes before it and none after it; a read sees all of them."""
    for spec in specs(factory, block_sizes=(8, 16)):
        backend, rng = factory(spec, 4), np.random.default_rng(SEED)
        fill_all(backend, np.nan)
        writes = StepArrays(slot_mapping=np.arange(spec.block_size, spec.block_size + 5, dtype=np.int32))
        reads = StepArrays(int32([[2], [1]]), int32([4, 5]), int32([0, 1, 2]), int32([-1, -1]))
        copies = int32([[1, 2, 4]])
        for _ in range(2):
            # Block 1 is written, copied to block 2, and overwritten: 2 keeps what 1 held in between.
            old, new = ([values(rng, (5, spec.num_kv_heads, d), spec.dtype) for _, d in spec.planes] for _ in "on")
            for layer in range(spec.num_layers):
                write(backend, writes, layer, old[0], old[1])
            backend.copy_blocks(StepArrays(copies=copies))
            for layer in range(spec.num_layers):
                write(backend, writes, layer, new[0], new[1])
                q = values(rng, (2, 4, spec.head_dim), spec.dtype)
                copied = dense_attention_and_size(q[:1], old[0][:4], old[1][:4])
                overwritten = dense_attention_and_size(q[1:], new[0], new[1])
                expected = Expected(*map(np.concatenate, zip(copied, overwritten, strict=True)))
                close(attend(backend, layer, q, reads), expected, spec, "write, copy, write, read")


@case
def gather_copies_tokens_in_logical_order(factory: Factory) -> None:
    """`gather` gives the written tokens, and what it gave does not change when the pool does."""
    layouts = capabilities_of(factory).layouts
    for spec in specs(factory, layouts=layouts, block_sizes=(1, 8), dtypes=tuple(DTYPES)):
        filled = fill(factory, spec, [19])
        backend, table = filled.backend, filled.tables[0, : -(-19 // spec.block_size)]
        k, v = (backend.to_numpy(x) for x in backend.gather(1, table, 19))
        whole_block = backend.gather(1, table[:1].tolist())
        no_block = backend.gather(1, table[:0])
        fill_all(backend, np.nan)
        assert np.array_equal(k, filled.k[1][0]) and np.array_equal(v, filled.v[1][0]), f"gather differs ({spec})"
        first = backend.to_numpy(whole_block[0])
        assert np.array_equal(first, filled.k[1][0][: spec.block_size]), "gather must hand out copies"
        assert backend.to_numpy(no_block[1]).shape == (0, spec.num_kv_heads, spec.value_head_dim)


@case
def exported_blocks_hold_the_documented_bytes(factory: Factory) -> None:
    """Layer, plane, position, head, element: known tokens appear where they belong, quantized ones by the formula."""
    can = capabilities_of(factory)
    dense = specs(factory, layouts=can.layouts, dtypes=tuple(DTYPES), layers=3, packed=True)
    for spec in chain(dense, quantized_specs(factory, 1, can.layouts[:1], can.dtypes[1:])):
        filled = fill(factory, spec, [spec.block_size])
        data = np.asarray(filled.backend.export_blocks([int(filled.tables[0, 0])]))
        assert data.dtype == np.uint8 and data.shape == (1, spec.block_nbytes), "export is uint8 [n, block_nbytes]"
        expected = [
            part.ravel()
            for layer in range(spec.num_layers)
            for given, bits in zip((filled.given_k, filled.given_v), spec.bits, strict=True)
            for part in filled.stored(given[layer][0], bits)
        ]
        same_bytes(data, np.concatenate(expected)[None], f"export of {spec.storage} from layout {spec.layout}")


@case
def import_restores_what_export_took(factory: Factory) -> None:
    """Into the same blocks, into others, and into another backend; no other block changes."""
    layouts = capabilities_of(factory).layouts
    for spec in specs(factory, layouts=layouts, dtypes=tuple(DTYPES), block_sizes=(3, 8), packed=True):
        backend, other = factory(spec, 6), factory(spec, 9)
        fill_all(backend, np.random.default_rng(SEED))
        fill_all(other, np.random.default_rng(SEED + 1))
        data, before = np.asarray(backend.export_blocks([4, 1])).copy(), everything(other)
        same_bytes(data, everything(backend)[[4, 1]], "export in the order of the ids")
        other.import_blocks(np.array([2, 8], np.int32), data)
        before[[2, 8]] = data
        same_bytes(everything(other), before, "import into another backend")
        backend.zero([4, 1])
        backend.import_blocks([4, 1], data)
        same_bytes(np.asarray(backend.export_blocks([4, 1])), data, "import into the same blocks")


@case
def zero_clears_only_what_it_names(factory: Factory) -> None:
    """All layers and planes of these blocks are 0, everything else stays."""
    for spec in specs(factory, layouts=capabilities_of(factory).layouts, layers=3, packed=True):
        backend = factory(spec, 6)
        fill_all(backend, np.random.default_rng(SEED))
        expected = everything(backend)
        backend.zero(np.array([5, 2], np.int32))
        backend.zero([])
        expected[[5, 2]] = 0
        same_bytes(everything(backend), expected, "zero")


@case
def warmup_changes_nothing(factory: Factory) -> None:
    """Shapes may be warmed up at any time."""
    for spec in specs(factory):
        filled = fill(factory, spec, [9])
        before = everything(filled.backend)
        for scores in (None, *filled.backend.capabilities.scores):
            filled.backend.warmup([BatchShape(1, 1, 4, 4), BatchShape(3, 8, 2, 4)], scores=scores)
            filled.backend.warmup((), scores=scores)
        same_bytes(everything(filled.backend), before, "warmup")


# ---------------------------------------------------------------------- with a real pool


@case
def engine_steps_equal_dense_attention(factory: Factory) -> None:
    """A random engine on a tight pool: forks, copy-on-write, truncation, reservation, padding, closing."""
    for spec in specs(factory, block_sizes=BLOCK_SIZES):
        RandomEngine(factory, spec, SEED).play(range(150))


@case
def rollback_forgets_a_step_that_failed_half_way(factory: Factory) -> None:
    """The backend raises after copies and half of the writes; the same step after a rollback is right."""
    for spec in specs(factory, block_sizes=(3, 8), layouts=capabilities_of(factory).layouts):
        RandomEngine(factory, spec, SEED + 1, fail_every=2).play(range(100))


# ---------------------------------------------------------------------- misuse


@case
def misuse_is_refused_before_a_byte_changes(factory: Factory) -> None:
    """Wrong layers, shapes and ids: the documented exception, the storage as it was."""
    for spec in specs(factory):
        filled = fill(factory, spec, [9, 4])
        before = everything(filled.backend)
        wrong = [text for expected, call in _misuses(filled) if (text := _misuse_finding(expected, call))]
        assert not wrong, "\n".join(wrong)
        same_bytes(everything(filled.backend), before, "misuse")


def _misuse_finding(expected: type[Exception], call: Callable[[], Any]) -> str:
    """The fault in the answer of a backend to a misuse; "" if there is none."""
    try:
        call()
        answer = "was accepted"
    except expected:
        return ""
    except Exception as error:
        answer = f"raised {error!r}"
    return f"{_source(call)} {answer}, {expected.__name__} is documented"


def _source(call: Callable[[], Any]) -> str:
    """The text of a lambda of `_misuses`."""
    lines = inspect.getsource(call).strip()
    return lines.partition("lambda: ")[2].rstrip(",").removesuffix(")")


def _misuses(filled: Filled) -> list[tuple[type[Exception], Callable[[], Any]]]:
    backend, spec, plan = filled.backend, filled.backend.spec, filled.plan([1, 1])
    layers, blocks, size = spec.num_layers, backend.num_blocks, spec.block_size
    heads, dim = spec.num_kv_heads, spec.head_dim

    def array(*shape: int) -> Any:
        return backend.asarray(np.ones(shape, np.float32))

    k, v, q = array(2, heads, dim), array(2, heads, spec.value_head_dim), array(2, 2 * heads, dim)
    beyond = StepArrays(slot_mapping=int32([0, blocks * size]))
    row = np.zeros((1, spec.block_nbytes), np.uint8)
    return [
        (IndexError, lambda: backend.write(backend.prepare(plan), layers, k, v)),
        (IndexError, lambda: backend.write(backend.prepare(plan), -1, k, v)),
        (IndexError, lambda: backend.attend(backend.prepare(plan), layers, q)),
        (IndexError, lambda: backend.write(backend.prepare(beyond), 0, k, v)),
        (ValueError, lambda: backend.write(backend.prepare(plan), 0, array(2, heads + 1, dim), v)),
        (ValueError, lambda: backend.write(backend.prepare(plan), 0, k, array(2, heads, spec.value_head_dim + 1))),
        (ValueError, lambda: backend.write(backend.prepare(plan), 0, k[:1], v[:1])),
        (ValueError, lambda: backend.attend(backend.prepare(plan), 0, array(2, 2 * heads + 1, dim))),
        (ValueError, lambda: backend.attend(backend.prepare(plan), 0, array(2, 2 * heads, dim - 1))),
        (IndexError, lambda: backend.copy_blocks(int32([[1, blocks, 1]]))),
        (IndexError, lambda: backend.copy_blocks(int32([[-1, 1, 1]]))),
        (ValueError, lambda: backend.copy_blocks(int32([[1, 2, 1], [1, 3, size + 1]]))),
        (ValueError, lambda: backend.copy_blocks(int32([[1, 2, 1], [1, 3, 0]]))),
        (IndexError, lambda: backend.zero([1, blocks])),
        (TypeError, lambda: backend.zero(np.array([1.5]))),
        (IndexError, lambda: backend.gather(0, [-1])),
        (ValueError, lambda: backend.gather(0, [1], size + 1)),
        (IndexError, lambda: backend.export_blocks([blocks])),
        (IndexError, lambda: backend.import_blocks([blocks], row)),
        (ValueError, lambda: backend.import_blocks([1], row[:, :-1])),
        (ValueError, lambda: backend.import_blocks([1, 1], np.concatenate([row, row]))),
    ]


@case
def refused_specs_raise(factory: Factory) -> None:
    """What `capabilities` does not list, the factory refuses with a ValueError."""
    spec, can = next(specs(factory)), capabilities_of(factory)
    others = [replace(spec, dtype=dtype) for dtype in DTYPES]
    others += [replace(spec, layout=layout) for layout in LAYOUTS]
    others += [replace(spec, block_size=7), replace(spec, head_dim=7), replace(spec, v_head_dim=spec.head_dim + 1)]
    dim = max(can.head_dims or (128,))
    wide = replace(spec, head_dim=dim, v_head_dim=dim, quant_group_size=32)
    others += [replace(wide, k_bits=bits, v_bits=bits) for bits in QUANT_BITS if dim % 32 == 0]
    wrong = [(spec, reason) for spec in others if (reason := can.refusal(spec))]
    for spec, reason in wrong:
        try:
            factory(spec, 2)
        except ValueError:
            continue
        raise AssertionError(f"{spec} was accepted, although {reason}")
    need(wrong)
