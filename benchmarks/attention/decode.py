"""Decode: one query per sequence, over all sizes, beside a read of the same bytes and dense attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import kv_nbytes, padded, random_elements
from benchmarks.attention.dense import torch_attention, torch_threads
from benchmarks.attention.rows import Row, threads_name, timed
from kvpool.cli.bench.measure import Contestant
from kvpool.cli.bench.options import tokens

TORCH_SECONDS = 1.0
"""Torch sits out after so long."""

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Case:
    """One size of the sweep."""

    dtype: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.batch} x {tokens(self.context)}"

    @property
    def num_tokens(self) -> int:
        return self.batch * self.context


def count(bench: Bench) -> int:
    """Return how many races there are."""
    s = bench.settings
    return len(s.dtypes) * len(s.batches) * len(s.contexts) * len(s.threads)


def rows(bench: Bench) -> Iterator[Row]:
    """Measure."""
    s = bench.settings
    for dtype, batch, context in product(s.dtypes, s.batches, s.contexts):
        yield from case_rows(bench, Case(dtype, batch, context))


def case_rows(bench: Bench, case: Case) -> Iterator[Row]:
    """Measure one size for every number of threads, with every block size on the same memory."""
    s, spec, rng = bench.settings, bench.spec(case.dtype), bench.rng(case.batch, case.context)
    per_token = spec.num_kv_heads * spec.head_dim
    room = case.batch * max(padded(case.context, block_size) for block_size in s.block_sizes)
    pool_nbytes, nbytes = kv_nbytes(spec, room), kv_nbytes(spec, case.num_tokens)
    if not bench.fits(f"decode {case.name}", pool_nbytes):
        for _ in s.threads:
            bench.say(f"decode {case.name}: left out")
        return
    planes = tuple(random_elements(rng, room * per_token, case.dtype) for _ in "kv")
    used = [plane[: case.num_tokens * per_token] for plane in planes]
    with_torch = bench.torch is not None and bench.fits(f"torch, {case.name}", pool_nbytes + nbytes)
    dense = dense_contexts(bench, case, rng) if with_torch else ()
    for num_threads in s.threads:
        bench.say(f"decode {case.name}, {threads_name(num_threads)}")
        calls = {}
        for block_size in s.block_sizes:
            paged = bench.spec(case.dtype, block_size)
            calls[block_size] = bench.call(
                paged, planes, batch=case.batch, context=case.context, num_threads=num_threads, rng=rng
            )
        errors = {block_size: call.checked_error(rng) for block_size, call in calls.items()}
        contestants = [Contestant(f"blocks of {size}", call.attend) for size, call in calls.items()]
        if with_torch:
            contestants.append(Contestant("torch", torch_attention(*dense, case.dtype), seconds=TORCH_SECONDS))
        with torch_threads(num_threads) if with_torch else contextlib.nullcontext():
            race = bench.race(bench.reading(used, num_threads), contestants)
        torch = race.timings["torch"].best if "torch" in race.timings else None
        for block_size, error in errors.items():
            yield Row(
                part="decode",
                dtype=case.dtype,
                threads=num_threads,
                layout=s.layout,
                block_size=block_size,
                batch=case.batch,
                context=case.context,
                nbytes=nbytes,
                yardstick="read",
                torch=torch,
                error=error,
                **timed(race, f"blocks of {block_size}"),
            )


def dense_contexts(bench: Bench, case: Case, rng: np.random.Generator) -> Arrays:
    """Return q ``[B, Hk, G, D]``, k and v ``[B, Hk, C, D]``."""
    s = bench.settings
    group = s.num_q_heads // s.num_kv_heads
    q = random_elements(rng, (case.batch, s.num_kv_heads, group, s.head_dim), case.dtype)
    shape = (case.batch, s.num_kv_heads, case.context, s.head_dim)
    return q, random_elements(rng, shape, case.dtype), random_elements(rng, shape, case.dtype)
