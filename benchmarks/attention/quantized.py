"""Quantized keys and values: decode in times of the same call from bfloat16, writes in times of memcpy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from typing import Any

import numpy as np

from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import WrongResult, narrowed, padded
from benchmarks.attention.moves import CALLS, NUM_TOKENS, memcpy_runs
from benchmarks.attention.rows import Row, threads_name, timed
from kvpool.cli.bench.measure import Contestant
from kvpool.cli.bench.options import tokens
from kvpool.cli.console import CommandError
from kvpool.config import KVSpec
from kvpool.protocol import StepArrays

BLOCK_SIZE = 16
BASELINE = "bfloat16"
TOLERANCE = 1e-3
"""Most that a result may differ from attention in float64 over what `gather` returns."""

_WRITTEN = 1024  # tokens at a time
SETS, WRITE_BLOCKS = 16, 4096  # of tokens that are written, and of the pool


def spec_of(name: str, **sizes: Any) -> KVSpec:
    """Return a spec that stores K and V as `name` says: "8", "4", "8/4" (keys / values), "fp8", or a dtype."""
    if name == "fp8":
        return KVSpec(1, dtype="float8_e4m3", **sizes)
    bits = name.split("/") * (1 if "/" in name else 2)
    if set(bits) <= {"4", "8"} and len(bits) == 2:
        return KVSpec(1, dtype=BASELINE, k_bits=int(bits[0]), v_bits=int(bits[1]), **sizes)
    return KVSpec(1, dtype=name, **sizes)


class Call:
    """Decode of `batch` contexts whose blocks lie at random in a pool that they fill."""

    def __init__(
        self,
        spec: KVSpec,
        batch: int,
        context: int,
        num_q_heads: int,
        num_threads: int,
        rng: np.random.Generator,
        isa: str | None = None,
    ) -> None:
        from kvpool_backends.cpu import CPUBackend

        width = padded(context, spec.block_size) // spec.block_size
        self.spec, self.context = spec, context
        self.backend = CPUBackend(spec, batch * width, isa=isa, num_threads=num_threads)
        slots = batch * width * spec.block_size
        x = rng.standard_normal((min(slots, _WRITTEN), spec.num_kv_heads, spec.head_dim), np.float32)
        for first in range(0, slots, _WRITTEN):
            part = x[: slots - first]
            step = self.backend.prepare(StepArrays(slot_mapping=np.arange(first, first + len(part))))
            self.backend.write(step, 0, part, part[::-1])
        table = rng.permutation(batch * width).reshape(batch, width).astype(np.int32)
        self.table = table[-1]
        self.step = self.backend.prepare(StepArrays(table, np.full(batch, context), np.arange(batch + 1)))
        self.q = rng.standard_normal((batch, num_q_heads, spec.head_dim), np.float32)

    def attend(self) -> np.ndarray:
        """Return the results."""
        return self.backend.attend(self.step, 0, self.q)  # type: ignore[return-value]

    def checked_error(self) -> float:
        """Compute, and return the error of the first head of the last row.

        Raises
        ------
        WrongResult
            If it is more than `TOLERANCE`.
        """
        k, v = (x[:, 0].astype(np.float64) for x in self.backend.gather(0, self.table, self.context))
        weights = np.exp(k @ self.q[-1, 0].astype(np.float64) / self.spec.head_dim**0.5)
        error = float(np.abs(self.attend()[-1, 0] - weights @ v / weights.sum()).max())
        if not error <= TOLERANCE:
            raise WrongResult(f"{self.spec.storage}: the result is off by {error:.1e}, {TOLERANCE:.0e} are allowed")
        return error


def count(bench: Bench) -> int:
    """Return how many races there are."""
    s = bench.settings
    return (len(s.batches) * len(s.contexts) + len(s.kv_bits)) * len(s.threads)


def rows(bench: Bench) -> Iterator[Row]:
    """Measure each size: a row for each format."""
    s = bench.settings
    sizes = {"num_kv_heads": s.num_kv_heads, "head_dim": s.head_dim, "block_size": BLOCK_SIZE, "layout": s.layout}
    try:
        specs = {name: spec_of(name, **sizes) for name in (BASELINE, *s.kv_bits)}
    except ValueError as exc:
        raise CommandError(f"--kv-bits: {exc}") from None
    for batch, context, num_threads in product(s.batches, s.contexts, s.threads):
        name = f"quantized {batch} x {tokens(context)}, {threads_name(num_threads)}"
        bench.say(name)
        room = batch * padded(context, BLOCK_SIZE)
        if not bench.fits(name, room * sum(spec.token_nbytes for spec in specs.values())):
            continue
        calls = {
            which: Call(spec, batch, context, s.num_q_heads, num_threads, bench.rng(batch, context, 4))
            for which, spec in specs.items()
        }
        errors = {which: call.checked_error() for which, call in calls.items()}
        contestants = {which: Contestant(which, call.attend) for which, call in calls.items()}
        race = bench.race(contestants.pop(BASELINE), list(contestants.values()))
        for which in s.kv_bits:
            yield Row(
                part="quantized",
                dtype=which if which == "fp8" else f"{which} bits",
                threads=num_threads,
                layout=s.layout,
                block_size=BLOCK_SIZE,
                batch=batch,
                context=context,
                nbytes=batch * context * specs[which].token_nbytes,
                yardstick="decode",
                error=errors[which],
                **timed(race, which),
            )
    for name, num_threads in product(s.kv_bits, s.threads):
        yield write_row(bench, name, specs[name], num_threads)


def write_row(bench: Bench, name: str, spec: KVSpec, num_threads: int) -> Row:
    """Write bfloat16 to random blocks, ever other tokens to ever other blocks: neither is in a cache of the core's."""
    from kvpool_backends.cpu import CPUBackend

    bench.say(f"quantized write {name}, {threads_name(num_threads)}")
    rng, shape = bench.rng(NUM_TOKENS, 5), (NUM_TOKENS, spec.num_kv_heads, spec.head_dim)
    per_call = NUM_TOKENS // BLOCK_SIZE
    tokens = [[narrowed(rng.standard_normal(shape, np.float32), "bfloat16") for _ in "kv"] for _ in range(SETS)]
    blocks = rng.permutation(WRITE_BLOCKS)[: SETS * per_call].reshape(SETS, per_call, 1)
    slots = (blocks * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(SETS, -1)
    store = CPUBackend(spec, WRITE_BLOCKS, num_threads=num_threads).store
    turns = cycle(range(SETS))

    def write() -> None:
        turn = next(turns)
        store.write(0, *tokens[turn], slots[turn])

    copies = [[(np.empty(x.size, x.dtype), x.reshape(-1)) for x in pair] for pair in tokens]
    with ThreadPoolExecutor(num_threads) as workers:
        memcpy = Contestant("memcpy", memcpy_runs(copies, num_threads, workers), CALLS)
        race = bench.race(memcpy, [Contestant("write", write)])
    return Row(
        part="write",
        dtype=name if name == "fp8" else f"{name} bits",
        threads=num_threads,
        layout=spec.layout,
        block_size=BLOCK_SIZE,
        batch=1,
        context=NUM_TOKENS,
        nbytes=2 * tokens[0][0].nbytes,
        yardstick="memcpy",
        **timed(race, "write"),
    )
