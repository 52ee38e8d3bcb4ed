"""Compare decode attention of the cpu backend with a read of as many bytes as K and V have.

A decode step reads all of K and V once, so no kernel is faster than that read. Both alternate, so the ratio holds on a
busy machine. ``python -m benchmarks.attention``, in a checkout, measures more: prefill, writes, quantized
storage, scores, and the attention of other frameworks.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from kvpool import KVSpec, Plan, Pool
from kvpool.cli.bench.measure import Contestant, race
from kvpool.cli.bench.options import DTYPES, LIST, MEMORY, NUMBER, declare, memory_nbytes, numbers, some, tokens
from kvpool.cli.console import CommandError, cpu_model, progress, whole

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
CHUNK = 1024  # tokens that are written at once


OPTIONS = (
    ("dtype", LIST, "float32,bfloat16", "element types of the cache"),
    ("batch", LIST, "1,16", "sequences per call"),
    ("context", LIST, "4k", "tokens of each sequence"),
    ("isa", LIST, "auto", "instruction sets of the kernels; all: each one that this machine has"),
    ("layout", LIST, "auto", "layouts of the blocks: NHD, HND; auto: that of the instruction set"),
    ("threads", LIST, "auto", "numbers of threads"),
    ("repetitions", NUMBER, "15", "rounds that have to count"),
    ("max-memory", NUMBER, "auto", MEMORY),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    declare(parser, OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table."""
    repetitions, most = whole("--repetitions", args.repetitions), memory_nbytes(args.max_memory)
    try:
        from kvpool_backends.cpu import _kernels as kernels
    except ImportError as error:
        raise CommandError(f"the CPU kernels do not import: {error}") from None
    isas = {"auto": kernels.default_isa(), "all": ",".join(kernels.isas())}.get(args.isa, args.isa)
    sizes = product(
        some("--dtype", args.dtype, DTYPES),
        numbers("--batch", args.batch),
        numbers("--context", args.context),
        some("--isa", isas, kernels.isas()),
        some("--layout", args.layout, ("NHD", "HND")) if args.layout != "auto" else (None,),
        numbers("--threads", args.threads) if args.threads != "auto" else (kernels.num_threads(),),
    )
    tilings = kernels.tilings()
    cases = [Case(*size[:4], size[4] or tilings[size[3]]["layout"], size[5]) for size in sizes]
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    with progress(len(cases), args.json) as say:
        for case in cases:
            say(case.name)
            if 2 * case.nbytes > most:
                left_out.append(case.name)
            else:
                rows.append(case.measure(kernels, repetitions))
    facts = {"cpu": cpu_model(), "rows": rows, "left_out": left_out}
    print(json.dumps(facts, indent=2) if args.json else describe(facts))
    return 0


@dataclass(frozen=True)
class Case:
    """One size: a layer of K and V for `batch` sequences of `context` tokens."""

    dtype: str
    batch: int
    context: int
    isa: str
    layout: str
    threads: int

    @property
    def name(self) -> str:
        """For people."""
        size = f"{self.batch} x {tokens(self.context)}"
        return f"{self.dtype}, {size}, {self.isa}, {self.layout}, threads: {self.threads}"

    @property
    def spec(self) -> KVSpec:
        """Of the layer."""
        return KVSpec(1, NUM_KV_HEADS, HEAD_DIM, dtype=self.dtype, block_size=BLOCK_SIZE, layout=self.layout)

    @property
    def num_blocks(self) -> int:
        """One block is reserved."""
        return 1 + self.batch * -(-self.context // BLOCK_SIZE)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return self.num_blocks * self.spec.block_nbytes

    def measure(self, kernels: Any, repetitions: int) -> dict[str, Any]:
        """Decode, in turns with the read."""
        from kvpool_backends import load_backend

        rng = np.random.default_rng(1)
        kv = load_backend("cpu")(self.spec, self.num_blocks, isa=self.isa, num_threads=self.threads)
        pool = Pool(self.num_blocks, BLOCK_SIZE, in_order=True)
        plan = Plan(pool, self.batch, max(CHUNK, self.batch), backend=kv)
        handles = np.array([pool.open() for _ in range(self.batch)])
        k, v = rng.standard_normal((2, CHUNK, NUM_KV_HEADS, HEAD_DIM), np.float32)
        for handle in handles:
            for start in range(0, self.context - 1, CHUNK):
                n = min(CHUNK, self.context - 1 - start)
                pool.step(plan, [handle], n)
                kv.write(kv.prepare(plan), 0, k[:n], v[:n])
        pool.step(plan, handles, 1)
        step = kv.prepare(plan)
        kv.write(step, 0, k[: self.batch], v[: self.batch])
        q = rng.standard_normal((self.batch, NUM_Q_HEADS, HEAD_DIM), np.float32)
        other = np.ones(self.nbytes // 4, np.float32)
        read = Contestant("read", lambda: kernels.read_sum([other], num_threads=self.threads))
        result = race(read, [Contestant("decode", lambda: kv.attend(step, 0, q))], repetitions)
        decode = result.timings["decode"].best if result.timings else float("nan")
        return {
            **asdict(self),
            "nbytes": self.nbytes,
            "seconds": decode,
            "read_seconds": result.yardstick.best,
            "ratio": decode / result.yardstick.best,
            "is_complete": result.is_complete,
        }


def describe(facts: dict[str, Any]) -> str:
    """The table for a person."""
    lines = [
        f"{facts['cpu']}; {NUM_Q_HEADS} query heads on {NUM_KV_HEADS} KV heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}",
        f"{'isa':9}{'dtype':10}{'layout':7}{'threads':>7}"
        f"{'sequences':>10}{'context':>9}{'decode':>12}{'GB/s':>8}{'read GB/s':>11}{'times a read':>14}",
    ]
    for row in facts["rows"]:
        rate, read = row["nbytes"] / row["seconds"] / 1e9, row["nbytes"] / row["read_seconds"] / 1e9
        lines.append(
            f"{row['isa']:9}{row['dtype']:10}{row['layout']:7}{row['threads']:>7}"
            f"{row['batch']:>10}{tokens(row['context']):>9}{row['seconds'] * 1e6:>9,.0f} us"
            f"{rate:>8.1f}{read:>11.1f}{row['ratio']:>14.2f}{'' if row['is_complete'] else '  disturbed'}"
        )
    return "\n".join([*lines, *(f"left out: {name} (--max-memory)" for name in facts["left_out"])])
