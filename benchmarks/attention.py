"""Attention on the CPU: time beside a read of the same K and V, and beside dense attention.

Only the call is timed, on prepared blocks and tables, and its results were compared with float64. Contestants take
turns (`benchmarks.measure`), so that ratios hold on a machine that others share. K and V below 134 MB may live in
a cache and decide no gate.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice, product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.command import judged, main
from benchmarks.gate import Gate, table
from benchmarks.measure import Contestant, Race, cpu_model, race, tokens
from kvpool.cli.bench import numbers
from kvpool.cli.console import CommandError, nbytes, progress, whole
from kvpool.config import KVSpec, available_memory_nbytes, format_nbytes
from kvpool.protocol import StepArrays
from kvpool_backends.cpu import CPUBackend, _kernels
from kvpool_backends.cpu.backend import zeroed
from kvpool_backends.numpy.elements import to_bfloat16

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SEED = 32, 8, 128, 16, 1
DTYPES = ("float32", "bfloat16", "float16")
PARTS = ("decode", "prefill", "write", "copy", "scores")
OPTIONS = {
    "part": (",".join(PARTS), "what to measure"),
    "dtype": (",".join(DTYPES), "element types of the cache"),
    "batch": ("1,8,16,32,64", "sequences per call"),
    "context": ("1k,4k,16k", "tokens of each sequence"),
    "against": ("torch", "dense attention to compare with, where it is installed; or none"),
    "threads": ("auto", "numbers of threads; auto: 1 and all of them"),
    "repetitions": ("15", "rounds that have to count"),
    "max-memory": ("auto", "leave out what needs more, such as 8GiB; auto: half of what is available"),
    "kv-bits": ("none", "decode from quantized K and V too, beside bfloat16: 8, 4, 8/4 (keys / values), fp8"),
    "gates": (False, "exit status 1 if a gate is missed or not decided"),
}
BASELINE = "bfloat16"  # of quantized storage
FILLED = 1031  # tokens that are written again and again: no multiple of a block, so that equal ones do not meet
TOLERANCE = 1e-3  # most that a result may differ from float64, as a share of the largest one
TORCH_SECONDS = 1.0  # torch sits out after so long
PREFILL, SIDE = (512, 4096), 1024  # new tokens and all of a context; side of the matrices of sgemm
RUN_NBYTES = 2**28  # a run with scores reads so much: both sides of a ratio near 1 have to be long enough
WRITTEN, PAIRS, MOVED_NBYTES = 512, 256, 2**28  # tokens, pairs of blocks, the pool that both move in
CALLS = 4  # moves in a run: one alone is short, and with memcpy in threads it would time mostly their start
CACHED_NBYTES = 2**27  # rows that read fewer bytes may do it from a cache: they decide nothing


class WrongResult(Exception):
    """A contestant computed something else. Its time means nothing."""


@dataclass(frozen=True)
class Row:
    """One measurement; times in seconds."""

    part: str  # of `PARTS`, but raw, mass and quantized: decode with scores, and from what --kv-bits stores
    dtype: str
    threads: int
    batch: int
    context: int
    nbytes: int  # what the yardstick moves: K and V of all contexts, or the stored bytes
    yardstick: str  # read, sgemm, memcpy, decode: the same work on the same number of threads
    best: float
    median: float
    yardstick_best: float
    yardstick_median: float
    repetitions: int
    is_complete: bool
    torch: float | None = None  # of decode: least time of torch's attention over dense, contiguous K and V
    scores_nbytes: int | None = None  # memory of the array of scores

    @property
    def ratio(self) -> float:
        """Least time, in least times of the yardstick."""
        return self.best / self.yardstick_best

    @property
    def name(self) -> str:
        """What tells this row from others of its part, for people."""
        size = f"{self.context} tokens" if self.part in ("write", "copy") else f"{self.batch} x {tokens(self.context)}"
        return f"{self.dtype} {size}, threads: {self.threads}"

    def as_json(self) -> dict[str, Any]:
        """Everything about the row."""
        return asdict(self) | {"ratio": self.ratio, "gb_per_s": self.nbytes / self.best / 1e9}


def timed(result: Race, name: str, work: float = 1.0) -> dict[str, Any]:
    """Return the fields of a `Row` from a race; `work` is that of contestant `name` in units of the yardstick's."""
    timing, yardstick = result.timings[name], result.yardstick
    times = {"best": timing.best, "median": timing.median}
    times |= {"yardstick_best": yardstick.best * work, "yardstick_median": yardstick.median * work}
    return {**times, "repetitions": result.repetitions, "is_complete": result.is_complete}


def spec_of(name: str) -> KVSpec:
    """Return a layer that stores K and V as `name` says: "8", "4", "8/4" (keys / values), "fp8", or a dtype."""
    sizes: Any = {"num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}
    if name in DTYPES or name == "fp8":
        return KVSpec(1, dtype="float8_e4m3" if name == "fp8" else name, **sizes)
    keys, _, values = name.partition("/")
    return KVSpec(1, dtype=BASELINE, k_bits=int(keys), v_bits=int(values or keys), **sizes)


def shown(name: str) -> str:
    """``"8/4"`` as ``"8/4 bits"``."""
    return f"{name} bits" if name[0].isdigit() else name


class Call:
    """Attention over `batch` contexts whose blocks lie at random in a pool that they fill."""

    def __init__(self, name: str, batch: int, context: int, num_threads: int, queries: int = 1) -> None:
        self.rng, self.context, width = np.random.default_rng([SEED, batch, context]), context, blocks_of(context)
        self.backend = CPUBackend(spec_of(name), batch * width, num_threads=num_threads)
        slots = batch * width * BLOCK_SIZE
        x = self.rng.standard_normal((FILLED, NUM_KV_HEADS, HEAD_DIM), np.float32)
        for first in range(0, slots, FILLED):
            part = x[: slots - first]
            self.backend.write(StepArrays(slot_mapping=np.arange(first, first + len(part))), 0, part, part[::-1])
        self.tables = self.rng.permutation(batch * width).reshape(batch, width).astype(np.int32)
        self.lens, self.ends = np.full(batch, context, np.int32), np.arange(batch + 1, dtype=np.int32) * queries
        self.q = self.rng.standard_normal((batch * queries, NUM_Q_HEADS, HEAD_DIM), np.float32)
        self.out = np.empty_like(self.q)

    def attend(self, **scores: Any) -> None:
        """Compute `out`."""
        self.backend.store.attend(0, self.q, self.out, self.tables, self.lens, self.ends, **scores)

    def check(self, kind: str = "", scores: np.ndarray | None = None) -> None:
        """Compute, and compare the newest query of a row and of a KV head's heads, or its scores, with float64.

        Raises
        ------
        WrongResult
            If they differ by more than `TOLERANCE`.
        """
        self.attend(**({"scores": kind, "scores_out": scores} if kind else {}))
        row, head, group = (
            *(int(self.rng.integers(n)) for n in (len(self.lens), NUM_KV_HEADS)),
            NUM_Q_HEADS // NUM_KV_HEADS,
        )
        k, v = (x[:, head].astype(np.float64) for x in self.backend.gather(0, self.tables[row], self.context))
        heads, newest = slice(head * group, (head + 1) * group), self.ends[row + 1] - 1
        raw = self.q[newest, heads] @ k.T / HEAD_DIM**0.5
        mass = np.exp(raw - raw.max(axis=1, keepdims=True))
        mass /= mass.sum(axis=1, keepdims=True)
        found, right = self.out[newest, heads], mass @ v
        if scores is not None:
            found, right = scores[row, head], (mass if kind == "mass" else raw).mean(axis=0)
        error = float(np.abs(found - right).max() / np.abs(right).max())
        if not error <= TOLERANCE:
            what = f"{kind} of {self.backend.spec.storage}, {len(self.lens)} x {self.context} tokens"
            raise WrongResult(f"{what}: row {row} is off by {error:.1e} of its largest, {TOLERANCE:.0e} are allowed")


def blocks_of(context: int) -> int:
    """Return the blocks of one context."""
    return -(-context // BLOCK_SIZE)


def nbytes_of(name: str, batch: int, context: int) -> int:
    """Return the bytes of a pool of such contexts."""
    return batch * blocks_of(context) * spec_of(name).block_nbytes


# ------------------------------------------------------------------------------------------------ the parts


class Case(NamedTuple):
    """Something to measure: a name for people, the bytes that it takes, and what gives its rows."""

    name: str
    nbytes: int
    run: Callable[[Callable[..., Race]], Iterator[Row]]


def cases(parts: Sequence[str], dtypes: Sequence[str], sizes: Sequence[tuple[int, int]], threads: Sequence[int],
          bits: Sequence[str], torch: Any) -> Iterator[Case]:  # fmt: skip
    """Yield all that is asked for; `sizes` are pairs of batch and context."""
    for part, dtype in product(parts, dtypes):
        if part in ("write", "copy"):
            nbytes = 2 * moved_blocks(dtype) * spec_of(dtype).block_nbytes
            run: Any = write if part == "write" else copy
            for n in threads:
                yield Case(f"{part} {dtype}, threads: {n}", nbytes, partial(run, dtype, n))
        elif part == "prefill":
            for n in threads:
                name = f"prefill {dtype}, threads: {n}"
                yield Case(name, nbytes_of(dtype, 1, PREFILL[1]), partial(prefill, dtype, n))
        else:
            for (batch, context), n in product(sizes, threads):
                nbytes, name = (
                    nbytes_of(dtype, batch, context),
                    f"{part} {dtype} {batch} x {tokens(context)}, threads: {n}",
                )
                run = partial(decode, torch=torch) if part == "decode" else scored
                yield Case(name, nbytes * (2 if torch else 1), partial(run, dtype, batch, context, n))
    for (batch, context), n in product(sizes, threads) if bits else ():
        nbytes = sum(nbytes_of(name, batch, context) for name in (BASELINE, *bits))
        name = f"quantized {batch} x {tokens(context)}, threads: {n}"
        yield Case(name, nbytes, partial(quantized, bits, batch, context, n))
    for name, n in product(bits, threads):
        yield Case(f"quantized write {name}, threads: {n}", MOVED_NBYTES, partial(write, name, n))


def decode(dtype: str, batch: int, context: int, n: int, go: Callable[..., Race], torch: Any) -> Iterator[Row]:
    """One query per sequence, beside a read of the same bytes and dense attention."""
    call = Call(dtype, batch, context, n)
    call.check()
    read = Contestant("read", partial(_kernels.read_sum, call.backend._arrays, num_threads=n))
    contestants = [Contestant("decode", call.attend)]
    if torch:
        contestants.append(Contestant("torch", dense(torch, dtype, batch, context), seconds=TORCH_SECONDS))
        torch.set_num_threads(n)
    found = go(read, contestants)
    best = found.timings["torch"].best if "torch" in found.timings else None
    nbytes = nbytes_of(dtype, batch, context)
    yield Row("decode", dtype, n, batch, context, nbytes, "read", **timed(found, "decode"), torch=best)


def dense(torch: Any, dtype: str, batch: int, context: int) -> Callable[[], object]:
    """Return torch's attention on memory like a backend's, in its best form.

    The query heads of a group are handed over as queries of one head: with ``enable_gqa`` torch is slower.
    """

    def random(length: int) -> Any:
        shape = batch, NUM_KV_HEADS, length, HEAD_DIM
        (memory,) = zeroed([shape], [np.float32 if dtype == "float32" else np.int16])
        return torch.from_numpy(memory).view(getattr(torch, dtype)).normal_()

    attend = torch.inference_mode()(torch.nn.functional.scaled_dot_product_attention)
    return partial(attend, random(NUM_Q_HEADS // NUM_KV_HEADS), random(context), random(context))


def prefill(dtype: str, n: int, go: Callable[..., Race]) -> Iterator[Row]:
    """A chunk that ends a context, beside numpy's product of matrices."""
    queries, context = PREFILL
    a, b = np.random.default_rng(SEED).standard_normal((2, SIDE, SIDE), np.float32)
    product = np.empty_like(a)
    pairs = queries * (context - queries) + queries * (queries + 1) // 2  # of query and key that see each other
    work = 2 * pairs * NUM_Q_HEADS * HEAD_DIM / SIDE**3  # products of q and k, and of weights and v
    call = Call(dtype, 1, context, n, queries)
    call.check()
    with blas_threads(n):
        found = go(Contestant("sgemm", partial(np.matmul, a, b, out=product)), [Contestant("prefill", call.attend)])
    nbytes = nbytes_of(dtype, 1, context)
    yield Row("prefill", dtype, n, 1, context, nbytes, "sgemm", **timed(found, "prefill", work))


def blas_threads(n: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which numpy's BLAS uses so many threads."""
    if importlib.util.find_spec("threadpoolctl"):
        limits: Any = importlib.import_module("threadpoolctl").threadpool_limits(n, "blas")
        return limits
    if n != len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)):
        raise CommandError("threads of sgemm are set by threadpoolctl: pip install threadpoolctl")
    return contextlib.nullcontext()


def scored(dtype: str, batch: int, context: int, n: int, go: Callable[..., Race]) -> Iterator[Row]:
    """Decode that exports scores, in times of the same call without."""
    call, outs = Call(dtype, batch, context, n), dict[str, np.ndarray]()
    for kind in ("raw", "mass"):
        outs[kind] = np.zeros((batch, NUM_KV_HEADS, context), np.float32)
        call.check(kind, outs[kind])
    nbytes = nbytes_of(dtype, batch, context)
    times = max(1, RUN_NBYTES // nbytes)
    runs = {kind: partial(call.attend, scores=kind, scores_out=out) for kind, out in outs.items()}
    without = Contestant("without", repeated(call.attend, times), times)
    found = go(without, [Contestant(kind, repeated(run, times), times) for kind, run in runs.items()])
    for kind, out in outs.items():
        yield Row(kind, dtype, n, batch, context, nbytes, "decode", **timed(found, kind), scores_nbytes=out.nbytes)


def repeated(run: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that calls `run` so often."""

    def runs() -> None:
        for _ in range(times):
            run()

    return runs


def quantized(bits: Sequence[str], batch: int, context: int, n: int, go: Callable[..., Race]) -> Iterator[Row]:
    """Decode from each format, in times of the same call from bfloat16."""
    calls = {name: Call(name, batch, context, n) for name in (BASELINE, *bits)}
    for call in calls.values():
        call.check()
    baseline, *others = (Contestant(name, call.attend) for name, call in calls.items())
    found = go(baseline, others)
    for name in bits:
        nbytes = nbytes_of(name, batch, context)
        yield Row("quantized", shown(name), n, batch, context, nbytes, "decode", **timed(found, name))


# Both go to other places in a pool that is larger than caches with every call, at random; so does memcpy, in order.

Pairs = Sequence[tuple[np.ndarray, np.ndarray]]  # (dst, src), flat


def moved_blocks(name: str) -> int:
    """Return the blocks of the pool: `MOVED_NBYTES`, and room for some calls that do not meet."""
    return max(MOVED_NBYTES // spec_of(name).block_nbytes, 2 * CALLS * PAIRS)


def write(name: str, n: int, go: Callable[..., Race]) -> Iterator[Row]:
    """Write tokens, of float32 into a dtype; of bfloat16 into less, ever other ones that are in no cache of a core."""
    rng, num_blocks, is_dtype = np.random.default_rng(SEED), moved_blocks(name), name in DTYPES
    shape, narrow = (WRITTEN, NUM_KV_HEADS, HEAD_DIM), narrowed(name if is_dtype else BASELINE)
    given = [[rng.standard_normal(shape, np.float32) for _ in "kv"] for _ in range(1 if is_dtype else 16)]
    stored = [[narrow(x) for x in pair] for pair in given]
    backend = CPUBackend(spec_of(name), num_blocks, num_threads=n)
    backend.zero(np.arange(num_blocks))  # the system hands out pages when they are first written
    blocks = rng.permutation(num_blocks)[: num_blocks // (WRITTEN // BLOCK_SIZE) * (WRITTEN // BLOCK_SIZE)]
    slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1, WRITTEN)
    slots = slots if is_dtype else slots[: len(given)]
    turns = cycle(zip(cycle(given if is_dtype else stored), slots, strict=False))

    def run() -> None:
        for pair, where in islice(turns, CALLS):
            backend.store.write(0, pair[0], pair[1], where)

    run()
    back = backend.gather(0, slots[CALLS - 1, ::BLOCK_SIZE] // BLOCK_SIZE, WRITTEN)
    if is_dtype and not all(np.array_equal(narrow(x), y) for x, y in zip(back, stored[0], strict=True)):
        raise WrongResult(f"write, {name}: other elements are stored than were written")
    size = stored[0][0].size
    beside = np.ones((2, len(slots), size), stored[0][0].dtype)
    calls = [
        [(dst, x.reshape(-1)) for dst, x in zip(beside[:, i], pair, strict=True)]
        for i, pair in zip(range(len(slots)), cycle(stored), strict=False)
    ]
    found = beside_memcpy(run, calls, n, go)
    yield Row("write", shown(name), n, 1, WRITTEN, 2 * stored[0][0].nbytes, "memcpy", **timed(found, "moves"))


def narrowed(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return what makes elements of a dtype; numpy has no bfloat16: its bits."""
    return to_bfloat16 if dtype == "bfloat16" else lambda x: x.astype(dtype)


def copy(dtype: str, n: int, go: Callable[..., Race]) -> Iterator[Row]:
    """Copy pairs of whole blocks."""
    rng, num_blocks = np.random.default_rng(SEED), moved_blocks(dtype)
    backend = CPUBackend(spec_of(dtype), num_blocks, num_threads=n)
    data = backend.export_blocks(np.arange(num_blocks))
    backend.import_blocks(np.arange(num_blocks), rng.integers(0, 60, data.shape, np.uint8))
    calls = num_blocks // (2 * PAIRS)
    pairs = rng.permutation(num_blocks)[: calls * 2 * PAIRS].reshape(calls, PAIRS, 2)
    copies = np.concatenate([pairs, np.full((calls, PAIRS, 1), BLOCK_SIZE)], axis=2).astype(np.int32)
    turns = cycle(copies)

    def run() -> None:
        for chosen in islice(turns, CALLS):
            backend.store.copy_blocks(chosen)

    run()
    to, of = (backend.export_blocks(copies[CALLS - 1, :, side]) for side in (0, 1))
    if not np.array_equal(to, of):
        raise WrongResult(f"copy_blocks, {dtype}: a copy differs from its source")
    flat, size = data.reshape(-1), PAIRS * spec_of(dtype).block_nbytes
    other = np.ones_like(flat)
    starts = range(0, calls * size, size)
    found = beside_memcpy(run, [[(other[at : at + size], flat[at : at + size])] for at in starts], n, go)
    yield Row("copy", dtype, n, 1, PAIRS * BLOCK_SIZE, size, "memcpy", **timed(found, "moves"))


def beside_memcpy(run: Callable[[], None], calls: Sequence[Pairs], n: int, go: Callable[..., Race]) -> Race:
    """Race `CALLS` moves with as many calls of memcpy, in which each thread has its share of all of them."""
    places = cycle(calls)

    def share(moves: Sequence[Pairs], thread: int) -> None:
        for pairs in moves:
            for dst, src in pairs:
                part = slice(dst.size * thread // n, dst.size * (thread + 1) // n)
                np.copyto(dst[part], src[part])

    with ThreadPoolExecutor(n) as workers:

        def memcpy() -> None:
            moves = list(islice(places, CALLS))
            others = [workers.submit(share, moves, thread) for thread in range(1, n)]
            share(moves, 0)
            for other in others:
                other.result()

        return go(Contestant("memcpy", memcpy, CALLS), [Contestant("moves", run, CALLS)])


# --------------------------------------------------------------------------------------- what has to hold

Limits = tuple[float, float | None]  # gate, and goal if there is one

REPETITIONS, NUM_TOKENS, SCORES_CONTEXT = 15, 16384, 4096  # rounds, all tokens of a decode, those of one with scores
DECODE: dict[str, dict[str, Limits]] = {  # of other instruction sets: as of AVX2
    "avx512": {"float32": (1.5, 1.2), "bfloat16": (1.65, 1.3), "float16": (1.7, 1.25)},
    "avx2": {"float32": (1.5, 1.35), "bfloat16": (1.65, 1.45), "float16": (1.7, 1.4)},
}
GAIN, TORCH, OF_SGEMM, COPY, RAW_SCORES = (0.9, 1.0), (1.8, 2.5), (85.0, 95.0), (1.1, 1.0), (1.03, 1.015)
WRITE = {"float32": (1.4, 1.15), "bfloat16": (1.3, 1.15), "float16": (1.4, 1.15)}
QUANTIZED: dict[str, Limits] = {"8": (1.05, 0.95), "4": (1.05, None)}
QUANTIZED_WRITE: Limits = (1.4, None)


def decide(
    rows: Sequence[Row], parts: Sequence[str], dtypes: Sequence[str], bits: Sequence[str], gain: bool
) -> list[Gate]:
    """Return the gates of everything that was asked for, measured or not. Portable C has none.

    `gain`: so is one context on several threads.
    """
    isa, gates = _kernels.default_isa(), list[Gate]()
    able = [row for row in rows if row.is_complete and row.repetitions >= REPETITIONS]

    def add(
        name: str, unit: str, limits: Limits, rows: Sequence[Row], value: Callable[[Row], float], at_most: bool = True
    ) -> None:
        row = (max if at_most else min)(rows, key=value, default=None)  # the worst decides
        found, note = (None, "no row decides") if row is None else (value(row), row.name)
        gates.append(Gate(name, found, limits[0], at_most, note, unit, limits[1]))

    for name in (name for name in bits if name in QUANTIZED):
        mine = [row for row in able if row.dtype == shown(name)]
        large = [row for row in mine if row.part == "quantized" and row.batch * row.context >= 2 * NUM_TOKENS]
        add(f"decode {shown(name)}", "x bfloat16", QUANTIZED[name], large, lambda row: row.ratio)
        written = [row for row in mine if row.part == "write"]
        add(f"write {shown(name)}", "x memcpy", QUANTIZED_WRITE, written, lambda row: row.ratio)
    for dtype, part in product(dtypes, parts):
        mine = [row for row in able if row.dtype == dtype and row.part == ("raw" if part == "scores" else part)]
        if part == "decode":
            mine = [row for row in mine if row.nbytes >= CACHED_NBYTES and row.batch * row.context >= NUM_TOKENS]
            limits = DECODE.get(isa, DECODE["avx2"])[dtype]
            add(f"decode {dtype}", "x read", limits, mine, lambda row: row.ratio)
            beside = [row for row in mine if row.torch is not None]
            name = f"decode {dtype} against torch"
            add(name, "x faster", TORCH, beside, lambda row: (row.torch or 0) / row.best, at_most=False)
        elif part == "prefill":
            add(f"prefill {dtype}", "% of sgemm", OF_SGEMM, mine, lambda row: 100 / row.ratio, at_most=False)
        elif part == "scores":
            mine = [row for row in mine if row.context >= SCORES_CONTEXT]
            name = f"decode with raw scores {dtype}"
            add(name, "x without", RAW_SCORES, mine, lambda row: row.median / row.yardstick_median)
        else:
            limits = WRITE[dtype] if part == "write" else COPY
            add(f"{part} {dtype}", "x memcpy", limits, mine, lambda row: row.ratio)
    if (
        gain and "decode" in parts and "float32" in dtypes
    ):  # the only one whose K and V of one context of 16k exceed caches
        alone = {row.threads: row for row in able if (row.part, row.dtype) == ("decode", "float32")
                 and (row.batch, row.context) == (1, NUM_TOKENS)}  # fmt: skip
        more = [row for n, row in alone.items() if n > 1 and 1 in alone]
        name = "decode of one sequence, more threads"
        add(name, "x gain of the read", GAIN, more, lambda row: alone[1].ratio / row.ratio, at_most=False)
    return [] if isa == "portable" else gates


# ------------------------------------------------------------------------------------------------ the command


def some(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in `text`, each of which has to be known."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise CommandError(f"{option} {name}: there are {', '.join(known)}")
    return names


def run(args: argparse.Namespace) -> int:
    """Measure, and print what was found; with ``--gates`` 1 if a gate is missed or not decided."""
    parts, dtypes = some("--part", args.part, PARTS), some("--dtype", args.dtype, DTYPES)
    known = ("8", "4", "8/8", "4/4", "8/4", "4/8", "fp8")
    bits = () if args.kv_bits == "none" else some("--kv-bits", args.kv_bits, known)
    auto = tuple(sorted({1, _kernels.num_threads()}))
    threads = auto if args.threads == "auto" else numbers("--threads", args.threads)
    sizes = list(product(numbers("--batch", args.batch), numbers("--context", args.context)))
    repetitions = whole("--repetitions", args.repetitions)
    most = available_memory_nbytes() // 2 if args.max_memory == "auto" else nbytes("--max-memory", args.max_memory)
    against, torch = some("--against", args.against, ("torch", "none"))[0], None
    if against == "torch" and importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch")
    asked, rows, left_out = list(cases(parts, dtypes, sizes, threads, bits, torch)), list[Row](), list[str]()
    with progress(len(asked), args.json) as say:
        for case in asked:
            say(case.name)
            if case.nbytes > most:
                left_out.append(f"{case.name}: more than {format_nbytes(most)} (--max-memory)")
                continue
            try:
                rows += case.run(partial(race, repetitions=repetitions))
            except WrongResult as error:
                raise CommandError(f"a result is wrong, so its time means nothing: {error}") from None
            except MemoryError:
                raise CommandError("not enough memory: choose a smaller --max-memory") from None
    gates = decide(rows, parts, dtypes, bits, (1, NUM_TOKENS) in sizes and max(threads) > 1)
    machine = {"cpu": cpu_model(), "isa": _kernels.default_isa(), "torch": torch and torch.__version__}
    if args.json:
        told = {"rows": [row.as_json() for row in rows], "gates": [gate.as_json() for gate in gates]}
        print(json.dumps(machine | told | {"left_out": left_out}, indent=2))
        return int(args.gates and not all(gate.holds for gate in gates))
    head = ("what", "bytes", "yardstick", "GB/s of it", "time", "GB/s", "time / yardstick", "torch / time", "")
    print(", ".join(f"{name} {value}" for name, value in machine.items()), table(head, *map(line, rows)), sep="\n\n")
    return judged(gates, args, [f"\nleft out: {what}" for what in left_out] or [""])


def line(row: Row) -> tuple[str, ...]:
    """Return a line of the table."""
    scores = "" if row.scores_nbytes is None else f"scores take {format_nbytes(row.scores_nbytes)}"
    cached = "cached" if row.part == "decode" and row.nbytes < CACHED_NBYTES else ""
    times, is_moved = (row.yardstick_best, row.best), row.yardstick != "sgemm"
    of_yardstick, rate = (f"{row.nbytes / seconds / 1e9:.1f}" if is_moved else "" for seconds in times)
    remarks = filter(None, (cached, "" if row.is_complete else "disturbed", scores))
    return (
        f"{row.part} {row.name}", format_nbytes(row.nbytes), row.yardstick,
        of_yardstick,
        f"{row.best * 1e3:.2f} ms", rate, f"{row.ratio:.3f}",
        "" if row.torch is None else f"{row.torch / row.best:.1f}", ", ".join(remarks),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
