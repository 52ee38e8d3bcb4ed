"""Decode with the Metal kernels: beside MLX's attention on dense K and V, on gathered ones, and a copy of the bytes.

A run is many layers, each with memory of its own, built lazily and evaluated at once, as a model does it: so neither
the cost of a launch nor a cache decides. Contestants run in turns (`measure`); what is printed are medians.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from kvpool.cli.bench import options
from kvpool.cli.bench.measure import Contestant, race
from kvpool.cli.bench.options import tokens
from kvpool.cli.console import CommandError, progress, whole
from kvpool.config import KVSpec

LAYERS_MIN, LAYERS_MAX = 4, 32
RUN_NBYTES = 2**28  # of K and V that the layers of a run have together, if they may be as many: more than caches hold
TOLERANCE = 0.02  # between results, as a share of the largest; both are rounded to 16 bits


@dataclass(frozen=True)
class Case:
    """One size: `nbytes` of K and V in each of `layers` layers; `group` query heads per KV head."""

    dtype: str
    group: int
    batch: int
    context: int
    num_q_heads: int
    head_dim: int
    nbytes: int
    layers: int
    seed: int

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self.num_q_heads // self.group

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.dtype} {self.batch} x {tokens(self.context)}, {self.group} query heads per KV head"


OPTIONS = (
    ("dtype", options.LIST, "float16", "element types of the cache"),
    ("block-size", options.LIST, "8,16,32", "tokens per block"),
    ("batch", options.LIST, "1,8,64", "sequences per call"),
    ("context", options.LIST, "1k,8k,64k", "tokens of each sequence"),
    ("group", options.LIST, "1,4,8,16", "query heads per KV head"),
    ("heads", options.NUMBER, "32", "query heads"),
    ("head-dim", options.NUMBER, "128", "elements per head"),
    ("repetitions", options.NUMBER, "7", "rounds that have to count"),
    ("max-memory", options.NUMBER, "auto", options.MEMORY),
    ("seed", options.NUMBER, "1", "of tables and contents"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; lists read like those of ``kvpool bench attention``."""
    options.declare(parser, OPTIONS)
    parser.add_argument("--sweep", action="store_true", help="try the kernels' constants, print the best as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, and print what was found."""
    block_sizes = options.numbers("--block-size", args.block_size)
    repetitions, most = whole("--repetitions", args.repetitions), options.memory_nbytes(args.max_memory)
    all_cases = list(cases(args, max(block_sizes)))
    device = metal_device()
    if args.sweep:
        fitting = [case for case in all_cases if 2 * case.nbytes * case.layers <= most]
        print(json.dumps({"device": device, **sweep(fitting)}))
        return 0
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    with progress(len(all_cases), args.json) as say:
        for case in all_cases:
            say(case.name)
            if 2 * case.nbytes * case.layers > most:  # with what a copy makes; gathered contexts are no more
                left_out.append(f"{case.name}: more than --max-memory")
                continue
            try:
                rows += case_rows(case, block_sizes, repetitions)
            except ValueError as exc:
                raise CommandError(str(exc)) from None
    if args.json:
        print(json.dumps({"device": device, "rows": rows, "left_out": left_out}, indent=2))
    else:
        print(report(device, args, rows, left_out))
    return 0


def metal_device() -> str:
    """Return the name of the GPU, or refuse."""
    try:
        import mlx.core as mx
    except ImportError as exc:
        raise CommandError(f"mlx does not import ({exc})") from None
    if not mx.metal.is_available():
        raise CommandError("MLX has no Metal device here: its kernels are measured on a Mac")
    return str(mx.device_info().get("device_name", "unknown"))


def cases(args: argparse.Namespace, block_size: int) -> Iterator[Case]:
    """All sizes that are asked for, with as many layers as make a run long enough."""
    num_q_heads, dim = whole("--heads", args.heads), whole("--head-dim", args.head_dim)
    seed = whole("--seed", args.seed, least=0)
    groups = options.numbers("--group", args.group)
    for group in groups:
        if num_q_heads % group:
            raise CommandError(f"--group {group}: {num_q_heads} query heads are not a multiple of it")
    dtypes = options.some("--dtype", args.dtype, options.DTYPES)
    batches, contexts = options.numbers("--batch", args.batch), options.numbers("--context", args.context)
    for dtype, group, batch, context in product(dtypes, groups, batches, contexts):
        room = -(-context // block_size) * block_size
        nbytes = 2 * batch * room * num_q_heads // group * dim * (4 if dtype == "float32" else 2)
        layers = min(LAYERS_MAX, max(LAYERS_MIN, -(-RUN_NBYTES // nbytes)))
        yield Case(dtype, group, batch, context, num_q_heads, dim, nbytes, layers, seed)


def case_rows(case: Case, block_sizes: Sequence[int], repetitions: int) -> Iterator[dict[str, Any]]:
    """Measure one size: median seconds of a layer by the kernels, on dense and on gathered K and V, of a copy.

    All contestants read the same memory, each in its own order.
    """
    import mlx.core as mx

    from kvpool_backends.mlx.base import DTYPES as ELEMENTS

    mx.random.seed(case.seed)
    dtype, dim = ELEMENTS[case.dtype], case.head_dim
    count = case.nbytes // 2 // dtype.size
    layers = [[mx.random.normal((count,)).astype(dtype) for _ in "kv"] for _ in range(case.layers)]
    queries = [mx.random.normal((case.batch, case.num_q_heads, dim)).astype(dtype) for _ in layers]
    mx.eval(layers, queries)

    def dense() -> list[Any]:
        shape = (case.batch, case.num_kv_heads, -1, dim)
        contexts = [[x.reshape(shape)[:, :, : case.context] for x in planes] for planes in layers]
        return [attention(q, k, v) for q, (k, v) in zip(queries, contexts, strict=True)]

    paged = {size: Paged(case, size) for size in block_sizes}
    gathered = paged[min(paged, key=lambda size: abs(size - 16))]
    check(gathered, queries[0], layers[0])
    one = mx.array(1, dtype)
    contestants = [
        contestant("dense", dense, case.layers),
        contestant("gathered", lambda: map(gathered.gather_and_attend, queries, layers), case.layers),
        *(
            contestant(str(size), lambda it=it: map(it.attend, queries, layers), case.layers)  # type: ignore[misc]
            for size, it in paged.items()
        ),
    ]
    copy = contestant("copy", lambda: [x + one for planes in layers for x in planes], case.layers)
    result = race(copy, contestants, repetitions)
    if not result.timings:
        return
    medians = {name: timing.median for name, timing in result.timings.items()}
    same = {"dense": medians["dense"], "gathered": medians["gathered"], "copy": result.yardstick.median}
    for size in block_sizes:
        seconds = medians[str(size)]
        rates = {"gb_per_s": case.nbytes / seconds / 1e9, "copy_gb_per_s": 2 * case.nbytes / same["copy"] / 1e9}
        yield asdict(case) | same | rates | {
            "block_size": size, "paged": seconds, "is_complete": result.is_complete
        }  # fmt: skip


def sweep(cases: Sequence[Case]) -> dict[str, int]:
    """The constants of the kernels with which these cases take least, each chosen while the others stay.

    Write them to a file and name it in ``KVPOOL_METAL_SETTINGS``.
    """
    from kvpool_backends.mlx import metal_kernels

    def seconds() -> float:
        rows = [row["paged"] for case in cases for row in case_rows(case, (16,), 3)]
        return float(np.exp(np.mean(np.log(rows))))

    before = {name: getattr(metal_kernels, name) for name in metal_kernels.CHOICES}
    best, least = dict(before), seconds()
    try:
        for name, choices in metal_kernels.CHOICES.items():
            for choice in choices:
                if choice == best[name]:
                    continue
                setattr(metal_kernels, name, choice)
                found = seconds()
                print(f"{name} {choice}: {found * 1e6:.1f} us, least so far {least * 1e6:.1f}", file=sys.stderr)
                if found < least:
                    best[name], least = choice, found
            setattr(metal_kernels, name, best[name])
    finally:
        for name, choice in before.items():
            setattr(metal_kernels, name, choice)
    return best


def contestant(name: str, build: Callable[[], Any], layers: int) -> Contestant:
    """A contestant that evaluates all that `build` makes, at once."""
    import mlx.core as mx

    return Contestant(name, lambda: mx.eval(list(build())), calls=layers)


def attention(q: Any, k: Any, v: Any) -> Any:
    """MLX's own for q ``[B, Hq, D]``, k and v ``[B, Hk, C, D]``."""
    import mlx.core as mx

    return mx.fast.scaled_dot_product_attention(q[:, :, None], k, v, scale=q.shape[-1] ** -0.5)[:, :, 0]


class Paged:
    """The kernels on contexts whose blocks lie at random in memory that they fill."""

    def __init__(self, case: Case, block_size: int) -> None:
        import mlx.core as mx

        from kvpool_backends.mlx import metal_kernels
        from kvpool_backends.mlx.metal_kernels import MetalKernels, attention_step, head_tiles, parts_of, plan_attention

        metal_kernel: Any = mx.fast.metal_kernel
        self.spec = KVSpec(1, case.num_kv_heads, case.head_dim, case.dtype, block_size)
        self.context = case.context
        width = -(-case.context // block_size)
        self.num_blocks = case.batch * width
        self.kernels = MetalKernels(self.spec, self.num_blocks, metal_kernel)
        blocks = np.random.default_rng(case.seed).permutation(self.num_blocks)
        self.tables = mx.array(blocks.astype(np.int32).reshape(case.batch, width))
        lengths = np.full(case.batch, case.context)
        self.seq_lens = mx.array(lengths.astype(np.int32))
        tiles = head_tiles(self.spec, case.group, 1)
        work = plan_attention(
            lengths,
            np.arange(case.batch + 1),
            case.batch,
            tiles=tiles,
            **parts_of(self.spec, tiles, metal_kernels.PART_TOKENS),
        )
        self.step = attention_step(work, self.tables, case.head_dim**-0.5)

    def pools(self, planes: Any) -> list[Any]:
        """The memory of a layer as a pool, by its first elements, as the backend binds it."""
        return [x[:8] for x in planes]

    def attend(self, q: Any, planes: Any) -> Any:
        """Straight over the pool."""
        k_pool, v_pool = self.pools(planes)
        return self.kernels.attend(0, q, k_pool, v_pool, self.step)[0]

    def gather_and_attend(self, q: Any, planes: Any) -> Any:
        """MLX's attention on contexts that were gathered."""
        k, v = (
            self.kernels.gather(0, plane, pool, self.tables, self.seq_lens, self.context)
            for plane, pool in zip("kv", self.pools(planes), strict=True)
        )
        return attention(q, k, v)


def check(paged: Paged, q: Any, planes: Any) -> None:
    """Refuse times of kernels that compute something else than MLX does on the same blocks."""
    import mlx.core as mx

    ours, theirs = paged.attend(q, planes).astype(mx.float32), paged.gather_and_attend(q, planes).astype(mx.float32)
    error = float(mx.abs(ours - theirs).max() / mx.abs(theirs).max())
    if not error <= TOLERANCE:
        raise CommandError(f"a result is wrong by {error:.2g} of its size, its time means nothing")


def report(device: str, args: argparse.Namespace, rows: list[dict[str, Any]], left_out: list[str]) -> str:
    """Return the table."""
    lines = [
        f"{device}, {args.heads} query heads of {args.head_dim}; medians of one layer, us",
        f"{'dtype':9}{'group':>6}{'batch':>6}{'context':>8}{'block':>6}{'paged':>9}{'dense':>9}{'gathered':>9}"
        f"{'GB/s':>7}{'copy':>7}",
    ]
    for row in rows:
        times = "".join(f"{row[name] * 1e6:9.0f}" for name in ("paged", "dense", "gathered"))
        lines.append(
            f"{row['dtype']:9}{row['group']:6}{row['batch']:6}{tokens(row['context']):>8}{row['block_size']:6}{times}"
            f"{row['gb_per_s']:7.0f}{row['copy_gb_per_s']:7.0f}{'' if row['is_complete'] else '  disturbed'}"
        )
    return "\n".join([*lines, *(f"left out: {text}" for text in left_out)])
