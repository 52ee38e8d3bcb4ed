"""Backends filled with known tokens, and comparisons that say what differs, for the conformance cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvpool.config import DTYPES, LAYOUTS, KVSpec
from kvpool.protocol import AnyPlan, AttentionOptions, Capabilities, KVBackend, StepArrays
from kvpool.testing.dense import dense_attention_and_size, quantized, round_to, stored_bytes

Factory = Callable[[KVSpec, int], KVBackend]
Case = Callable[[Factory], None]
OneCase = TypeVar("OneCase")

# Largest error of an element over the size of its token and head (`dense_attention_and_size`). The inputs are exact, so
# in float32 this is what the arithmetic rounds (a score s by s * 6e-8, so the cases keep scores near 10 at most); the
# others leave room for a result that is itself rounded to the dtype, which float8 is not.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2, "float8_e4m3": 2e-6}
_TINY = 1e-4  # smaller sizes count as this: float16 has few digits left there
SEED = 20_260  # of every random choice


class NotApplicable(Exception):
    """The backend's capabilities leave a case nothing to try."""


def need(is_there: object) -> None:
    """Leave the case if there is nothing to try."""
    if not is_there:
        raise NotApplicable


def collector(cases: list[OneCase]) -> Callable[[OneCase], OneCase]:
    """A decorator that adds a case to `cases`."""

    def add(case: OneCase) -> OneCase:
        cases.append(case)
        return case

    return add


CASES: list[Case] = []
"""The conformance cases of backends: all modules of the kit add theirs."""
case = collector(CASES)


def run_cases(cases: Sequence[Any], run: Callable[[Any], object]) -> dict[str, str]:
    """Run each case, as `kvpool.testing.conformance.check_backend` says."""
    outcome: dict[str, str] = {}
    failures: list[tuple[str, Exception]] = []
    for case in cases:
        try:
            run(case)
            outcome[case.__name__] = "passed"
        except NotApplicable:
            outcome[case.__name__] = "not applicable"
        except Exception as error:  # what is tested may fail with anything
            failures.append((f"- {case.__name__}: {type(error).__name__}: {error}", error))
    if failures:
        told = "\n".join(line for line, _ in failures)
        raise AssertionError(f"{len(failures)} of {len(cases)} cases failed\n{told}") from failures[0][1]
    return outcome


# ---------------------------------------------------------------------- what a backend accepts


def capabilities_of(factory: Factory) -> Capabilities:
    """Capabilities, read from the first small backend that the factory agrees to make."""
    refused: Exception | None = None
    for dtype, layout, head_dim, block_size in product(DTYPES, LAYOUTS, (64, 128), (16, 32)):
        try:
            return factory(KVSpec(1, 1, head_dim, dtype, block_size, layout=layout), 2).capabilities
        except ValueError as error:
            refused = error
    raise AssertionError(f"the factory refuses every common spec, the last one so: {refused}") from refused


def specs(
    factory: Factory,
    *,
    layers: int = 2,
    kv_heads: int = 2,
    q_heads: int = 4,
    dtypes: Sequence[str] = ("float32",),
    layouts: Sequence[str] = (),
    block_sizes: Sequence[int] = (8,),
    head_dims: tuple[int, int] = (8, 8),
    packed: bool = False,
) -> Iterator[KVSpec]:
    """Specs of the product that the backend accepts; head dimensions are the smallest that it has.

    With `packed` also quantized ones, in all these layouts.
    """
    can = capabilities_of(factory)
    layouts = layouts or (can.layouts[0],)
    dtypes = tuple(d for d in dtypes if d in can.dtypes) or can.dtypes[:1]
    block_sizes = [s for s in block_sizes if can.block_sizes is None or s in can.block_sizes]
    dims = list(head_dims)
    if can.head_dims is not None:
        accepted = sorted(can.head_dims)
        dims = [accepted[0], accepted[0] if dims[0] == dims[1] else accepted[-1]]
    found = False
    for dtype, layout, block_size in product(dtypes, layouts, block_sizes or can.block_sizes or ()):
        spec = KVSpec(layers, kv_heads, dims[0], dtype, block_size, dims[1], layout)
        if can.refusal(spec, q_heads) is None:
            found = True
            yield spec
    need(found)
    if packed:
        yield from quantized_specs(factory, layers, layouts, dtypes[:1])


# Bits of keys, bits of values, group.
_KINDS = [(8, 8, 64), (4, 4, 32), (8, 4, 64), (None, 8, 32), (4, None, 64), (4, 4, 128)]


def quantized_specs(factory: Factory, layers: int, layouts: Sequence[str], dtypes: Sequence[str]) -> Iterator[KVSpec]:
    """Quantized specs that the backend accepts: bits of keys and values, and groups."""
    can = capabilities_of(factory)
    for layout, dtype, (k_bits, v_bits, group) in product(layouts, dtypes, _KINDS):
        if dtype in can.dtypes and dtype != "float8_e4m3":
            dim = max(group, 64)
            v_dim = dim if group == 32 else 128
            spec = KVSpec(layers, 2, dim, dtype, 16, v_dim, layout, k_bits, v_bits, group)
            if can.refusal(spec, 4) is None:
                yield spec


def head_counts(factory: Factory, *pairs: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Those of the given (Hk, Hq) whose groups are not too large for the backend."""
    limit = capabilities_of(factory).max_q_heads_per_kv_head
    for kv_heads, q_heads in pairs:
        if limit is None or q_heads <= limit * kv_heads:
            yield kv_heads, q_heads


# ---------------------------------------------------------------------- a filled backend


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random values that `dtype` holds exactly."""
    return round_to(rng.standard_normal(shape), dtype)


def int32(numbers: Sequence[int] | Sequence[Sequence[int]]) -> np.ndarray:
    """An int32 array, as plans hold them."""
    return np.array(numbers, np.int32)


def slots_of(table: Sequence[int], begin: int, end: int, block_size: int) -> list[int]:
    return [int(table[p // block_size]) * block_size + p % block_size for p in range(begin, end)]


def fill_all(backend: KVBackend, value: float | np.random.Generator) -> None:
    """Write `value`, or random values, to every slot of every block, the reserved ones included."""
    spec = backend.spec
    slots = np.arange(backend.num_blocks * spec.block_size, dtype=np.int32)
    for layer in range(spec.num_layers):
        shapes = [(slots.size, spec.num_kv_heads, dim) for _, dim in spec.planes]
        if isinstance(value, np.random.Generator):
            k, v = (values(value, shape, spec.dtype) for shape in shapes)
        else:
            k, v = (np.full(shape, value, np.float32) for shape in shapes)
        write(backend, StepArrays(slot_mapping=slots), layer, k, v)


class Expected(NamedTuple):
    """A result and what its errors are in proportion to."""

    out: np.ndarray  # [T, Hq, n]
    size: np.ndarray  # [T, Hq, 1]


def dense_rows(q: np.ndarray, dim: int, rows: Iterable[tuple[Any, ...]]) -> Expected:
    """Dense attention of row after row: how many queries, keys, values, and perhaps scale and options."""
    out, size, begin = np.zeros((*q.shape[:2], dim)), np.zeros((*q.shape[:2], 1)), 0
    for n, *given in rows:
        if n:
            mine = slice(begin, begin + n)
            out[mine], size[mine] = dense_attention_and_size(q[mine], *given)
        begin += n
    return Expected(out, size)


@dataclass
class Filled:
    """A backend whose rows hold known tokens. ``k[layer][row]`` is ``[context, Hk, D]``, as it comes back.

    ``given_k`` and ``given_v`` are what was written: the same, but for quantized planes.
    """

    backend: KVBackend
    tables: np.ndarray
    contexts: list[int]
    rng: np.random.Generator
    k: list[list[np.ndarray]] = field(default_factory=list)
    v: list[list[np.ndarray]] = field(default_factory=list)
    given_k: list[list[np.ndarray]] = field(default_factory=list)
    given_v: list[list[np.ndarray]] = field(default_factory=list)

    def plan(self, q_lens: Sequence[int]) -> StepArrays:
        """A plan of which the last ``q_lens[i]`` tokens of row i are the queries."""
        block_size = self.backend.spec.block_size
        slots: list[int] = []
        for table, context, n in zip(self.tables, self.contexts, q_lens, strict=True):
            slots += slots_of(table, context - n, context, block_size)
        return StepArrays(
            block_tables=self.tables,
            seq_lens=np.array(self.contexts, np.int32),
            cu_q_lens=np.cumsum([0, *q_lens], dtype=np.int32),
            slot_mapping=np.array(slots, np.int32),
        )

    def padded(self, q_lens: Sequence[int], pad: int = 0) -> StepArrays:
        """The same with two rows of length 0 behind it, and slots -1 for twice as many queries."""
        plan, total = self.plan(q_lens), sum(q_lens)
        nobody = np.full((2, plan.block_tables.shape[1]), pad, np.int32)
        return StepArrays(
            block_tables=np.concatenate([plan.block_tables, nobody]),
            seq_lens=np.append(plan.seq_lens, np.zeros(2, np.int32)),
            cu_q_lens=np.append(plan.cu_q_lens, np.full(2, total, np.int32)),
            slot_mapping=np.full(2 * total, -1, np.int32),
        )

    def stored(self, x: np.ndarray, bits: int | None) -> list[np.ndarray]:
        """The bytes of tokens in each stored plane of keys, or of values."""
        spec = self.backend.spec
        return [stored_bytes(x, spec.dtype)] if bits is None else quantized(x, spec, bits)[0]

    def queries(self, q_lens: Sequence[int], q_heads: int) -> np.ndarray:
        spec = self.backend.spec
        return values(self.rng, (sum(q_lens), q_heads, spec.query_dim), spec.dtype)

    def expected(
        self,
        layer: int,
        q: np.ndarray,
        q_lens: Sequence[int],
        scale: float | None = None,
        options: AttentionOptions | None = None,
    ) -> Expected:
        """Dense attention of every row, one after the other."""
        spec, rows, begin = self.backend.spec, [], 0
        for row, n in enumerate(q_lens):
            k, v = self.k[layer][row], self.v[layer][row]
            if spec.latent:
                k, v = np.concatenate([k, v], axis=-1), k
            rows.append((n, k, v, scale, mask_rows(options, slice(begin, begin + n))))
            begin += n
        return dense_rows(q, spec.result_dim, rows)

    def check(
        self,
        q_lens: Sequence[int],
        q_heads: int,
        what: str,
        scale: float | None = None,
        options: AttentionOptions | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """Attention in every layer equals dense attention, within `tolerance` where that is more than usual."""
        plan = self.plan(q_lens)
        for layer in range(self.backend.spec.num_layers):
            q = self.queries(q_lens, q_heads)
            out = attend(self.backend, layer, q, plan, scale, options)
            expected = self.expected(layer, q, q_lens, scale, options)
            close(out, expected, self.backend.spec, f"{what}, layer {layer}", tolerance)


def fill(
    factory: Factory,
    spec: KVSpec,
    contexts: Sequence[int],
    *,
    poison: float = np.nan,
    pad: int = -1,
    shift: int = 0,
) -> Filled:
    """A backend full of `poison` with rows of known tokens in randomly chosen blocks.

    The tokens depend on the seed and the shapes only, the choice of blocks also on `shift`.
    """
    rng = np.random.default_rng(SEED)
    needs = [-(-context // spec.block_size) for context in contexts]
    num_blocks = 1 + sum(needs) + 3
    backend = factory(spec, num_blocks)
    fill_all(backend, poison)
    order = np.random.default_rng(SEED + 1 + shift).permutation(np.arange(1, num_blocks))
    tables = np.full((len(contexts), max([*needs, 1]) + 2), pad, np.int32)  # wider than any row needs
    begin = 0
    for row, need in enumerate(needs):
        tables[row, :need] = order[begin : begin + need]
        begin += need
    filled = Filled(backend, tables, list(contexts), rng)
    plan = filled.plan(contexts)
    for layer in range(spec.num_layers):
        rows = []
        for _, dim in spec.planes:
            rows.append([values(rng, (context, spec.num_kv_heads, dim), spec.dtype) for context in contexts])
        filled.given_k.append(rows[0])
        filled.given_v.append(rows[1])
        for kept, plane, bits in zip((filled.k, filled.v), rows, spec.bits, strict=True):
            kept.append(plane if bits is None else [quantized(x, spec, bits)[1] for x in plane])
        k, v = (np.concatenate(plane) for plane in rows)
        write(backend, plan, layer, k, v)
    return filled


def random_mask(filled: Filled, q_lens: Sequence[int], kind: type, heads: int | None = None) -> np.ndarray:
    """A mask that hides about a third of the keys, ``[T, C']`` or ``[T, heads, C']``, wider than the contexts.

    Bools, or floats with -inf, huge negative and ordinary values; then what causality hides is NaN.
    """
    rng, width = filled.rng, max(filled.contexts) + 3
    shape = (sum(q_lens), width) if heads is None else (sum(q_lens), heads, width)
    draw = rng.random(shape)
    if kind is bool:
        return draw > 0.3
    mask = np.select([draw < 0.2, draw < 0.3], [-np.inf, -1e30], rng.standard_normal(shape)).astype(np.float32)
    begin = 0
    for context, n in zip(filled.contexts, q_lens, strict=True):
        for j in range(n):
            mask[begin + j, ..., context - n + j + 1 :] = np.nan
        begin += n
    return mask


def some_options(
    filled: Filled, q_lens: Sequence[int], q_heads: int, features: Sequence[str], kind: type = float
) -> AttentionOptions:
    """Options with these features, each with a say in the result."""
    every: dict[str, Any] = {
        "window": max(2, max(filled.contexts) // 3),
        "soft_cap": 2.0,
        "sinks": np.linspace(-1, 3, q_heads),
        "alibi_slopes": 2.0 ** -np.arange(1, q_heads + 1),
        "mask": random_mask(filled, q_lens, kind, q_heads),
    }
    return AttentionOptions(**{name: every[name] for name in features})


def told(options: AttentionOptions | None) -> str:
    """Options as messages name them; arrays would be long."""
    return f"options {', '.join(options.features) if options else 'none'}"


def mask_rows(options: AttentionOptions | None, tokens: slice | np.ndarray) -> AttentionOptions | None:
    """The same options for some of the query tokens."""
    if options is None or options.mask is None:
        return options
    return replace(options, mask=options.mask[tokens])


def write(backend: KVBackend, plan: AnyPlan, layer: int, k: np.ndarray, v: np.ndarray) -> None:
    """Write numpy arrays at the slots of a plan."""
    backend.write(backend.prepare(plan), layer, backend.asarray(k), backend.asarray(v))


def attend(
    backend: KVBackend,
    layer: int,
    q: np.ndarray,
    plan: AnyPlan,
    scale: float | None = None,
    options: AttentionOptions | None = None,
) -> np.ndarray:
    return backend.to_numpy(backend.attend(backend.prepare(plan), layer, backend.asarray(q), scale, options=options))


def close(actual: np.ndarray, expected: Expected, spec: KVSpec, what: str, tolerance: float = 0.0) -> None:
    """Every token and head of ``[T, Hq, n]`` is right within `TOLERANCE`, or `tolerance` where that is more."""
    tolerance = max(tolerance, TOLERANCE[spec.dtype])
    what = f"{what} ({spec.dtype}, {spec.layout}, block_size {spec.block_size}, seed {SEED})"
    assert actual.shape == expected.out.shape, f"{what}: shape {actual.shape}, expected {expected.out.shape}"
    error = np.abs(actual - expected.out) / np.maximum(expected.size, _TINY)
    wrong = ~(error <= tolerance)  # NaN counts as wrong
    if wrong.any():
        token, head = np.argwhere(wrong)[0][:2]
        worst = np.nanmax(error) if np.isfinite(actual).any() else np.nan
        raise AssertionError(
            f"{what}: token {token}, head {head} is wrong; {int(np.isnan(actual).sum())} NaN, "
            f"largest relative error {worst:.3g}, allowed {tolerance:g}"
        )


def refused(call: Callable[[], Any], expected: type[Exception], what: str, verb: str = "attend") -> None:
    """`call`, of the backend's method `verb`, raises this."""
    try:
        call()
    except expected as error:
        assert str(error).startswith(f"[{verb}] "), f"{what}: the message must begin with [{verb}], got {error}"
        return
    except Exception as error:
        raise AssertionError(f"{what} raised {error!r}, not {expected.__name__}") from error
    raise AssertionError(f"{what} was accepted, {expected.__name__} is documented")


def same_bytes(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if not np.array_equal(actual, expected):
        blocks = np.flatnonzero((actual != expected).any(axis=1)).tolist()
        raise AssertionError(f"{what}: bytes differ in rows {blocks}")


def everything(backend: KVBackend) -> np.ndarray:
    return np.asarray(backend.export_blocks(np.arange(backend.num_blocks))).copy()


def contexts(block_size: int) -> list[int]:
    """Around every boundary: one token, a block less one, exactly one, two and three blocks, and more."""
    boundaries = [block_size, 2 * block_size, 3 * block_size]
    return sorted({1, block_size - 1, block_size + 1, 3 * block_size + 2, *boundaries} - {0})


def token_columns(spec: KVSpec, num_tokens: int) -> Iterator[slice]:
    """The place of the first `num_tokens` positions in a row of `export_blocks`: a slice per layer and plane."""
    begin = 0
    for _ in range(spec.num_layers):
        for plane in spec.stored_planes:
            token = spec.num_kv_heads * plane.dim * plane.itemsize_nbytes
            yield slice(begin, begin + int(num_tokens) * token)
            begin += spec.block_size * token
