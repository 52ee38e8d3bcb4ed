"""Scores beside decode: what a call that exports them takes, in times of the same call without."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import PagedCall, WrongResult, kv_nbytes, padded, random_elements
from benchmarks.attention.rows import Row, threads_name, timed
from kvpool.cli.bench.measure import Contestant
from kvpool.cli.bench.options import tokens

BLOCK_SIZE = 16
KINDS = ("raw", "mass")
RUN_NBYTES = 2**28
"""A run reads so much, in several calls where one is small: both sides of a ratio near 1 have to be long enough."""

TOLERANCE = 1e-4
"""Most that a score may differ from float64's, as a share of the largest of its row and head."""


def count(bench: Bench) -> int:
    """Return how many races there are."""
    s = bench.settings
    return len(s.dtypes) * len(s.batches) * len(s.contexts) * len(s.threads)


def rows(bench: Bench) -> Iterator[Row]:
    """Measure each size: two rows each, "raw" and "mass"."""
    s = bench.settings
    for dtype, batch, context, num_threads in product(s.dtypes, s.batches, s.contexts, s.threads):
        name = f"scores {dtype} {batch} x {tokens(context)}, {threads_name(num_threads)}"
        bench.say(name)
        spec, rng = bench.spec(dtype, BLOCK_SIZE), bench.rng(batch, context, 3)
        room, nbytes = batch * padded(context, BLOCK_SIZE), kv_nbytes(spec, batch * context)
        if not bench.fits(name, kv_nbytes(spec, room)):
            continue
        planes = tuple(random_elements(rng, room * spec.num_kv_heads * spec.head_dim, dtype) for _ in "kv")
        call = bench.call(spec, planes, batch=batch, context=context, num_threads=num_threads, rng=rng)
        call.checked_error(rng)
        scores = {kind: Scores(call, kind) for kind in KINDS}
        for kind in KINDS:
            scores[kind].check(rng)
        repeats = max(1, RUN_NBYTES // nbytes)
        race = bench.race(
            Contestant("without", repeated(call.attend, repeats), repeats),
            [Contestant(kind, repeated(scores[kind].attend, repeats), repeats) for kind in KINDS],
        )
        for kind in KINDS:
            yield Row(
                part=kind,
                dtype=dtype,
                threads=num_threads,
                layout=s.layout,
                block_size=BLOCK_SIZE,
                batch=batch,
                context=context,
                nbytes=nbytes,
                yardstick="decode",
                scores_nbytes=scores[kind].nbytes,
                **timed(race, kind),
            )


class Scores:
    """A call that exports scores of one kind, into memory of its own."""

    def __init__(self, call: PagedCall, kind: str) -> None:
        self.call, self.kind = call, kind
        self.out = np.zeros((len(call.tables), call.spec.num_kv_heads, call.context), np.float32)

    def attend(self) -> None:
        """Compute the result and the scores."""
        c = self.call
        c.store.attend(0, c.q, c.out, c.tables, c.seq_lens, c.cu_q_lens, scores=self.kind, scores_out=self.out)

    @property
    def nbytes(self) -> int:
        """Bytes of the scores, and of what is laid aside for them."""
        aside: int = self.call.store.scores_scratch_nbytes if self.kind == "mass" else 0
        return self.out.nbytes + aside

    def check(self, rng: np.random.Generator) -> None:
        """Compute, and compare one row and head with float64.

        Raises
        ------
        WrongResult
            If a score differs by more than `TOLERANCE` allows.
        """
        self.attend()
        c, row = self.call, int(rng.integers(len(self.call.tables)))
        head = int(rng.integers(c.spec.num_kv_heads))
        raw, mass, _ = c.exact(row, head)
        right = (mass if self.kind == "mass" else raw).mean(axis=0)
        error = float(np.abs(self.out[row, head] - right).max() / np.abs(right).max())
        if not error <= TOLERANCE:
            raise WrongResult(f"{self.kind} scores, {c.spec.dtype}: row {row} is off by {error:.1e} of its largest")


def repeated(run: Any, times: int) -> Any:
    """Return a function that calls `run` so often."""

    def runs() -> None:
        for _ in range(times):
            run()

    return runs
