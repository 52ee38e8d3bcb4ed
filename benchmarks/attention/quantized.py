"""Decode from quantized keys and values: what a call takes, in times of the same call from bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import WrongResult, padded
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
    return len(s.batches) * len(s.contexts) * len(s.threads) if s.kv_bits else 0


def rows(bench: Bench) -> Iterator[Row]:
    """Measure each size: a row for each format."""
    s = bench.settings
    sizes = {"num_kv_heads": s.num_kv_heads, "head_dim": s.head_dim, "block_size": BLOCK_SIZE, "layout": s.layout}
    try:
        specs = {name: spec_of(name, **sizes) for name in (BASELINE, *s.kv_bits)}
    except ValueError as exc:
        raise CommandError(f"--kv-bits: {exc}") from None
    for batch, context, num_threads in product(s.batches, s.contexts, s.threads) if s.kv_bits else ():
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
