"""Chunked prefill: 512 new tokens that end a context of 4,096, beside numpy's matrix product."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import kv_nbytes, padded, random_elements
from benchmarks.attention.dense import blas_threads
from benchmarks.attention.rows import Row, threads_name, timed
from kvpool.cli.bench.measure import Contestant
from kvpool.cli.bench.options import tokens

NUM_QUERIES = 512
CONTEXT = 4096
BLOCK_SIZE = 16
SIDE = 1024  # of the matrices of sgemm


def count(bench: Bench) -> int:
    """Return how many races there are."""
    return len(bench.settings.dtypes) * len(bench.settings.threads)


def flops(num_queries: int, context: int, num_q_heads: int, head_dim: int) -> int:
    """Return the floating-point operations of the pairs of query and key that see each other."""
    pairs = num_queries * (context - num_queries) + num_queries * (num_queries + 1) // 2
    return pairs * num_q_heads * head_dim * 2 * 2  # two products, an addition with each multiplication


def rows(bench: Bench) -> Iterator[Row]:
    """Measure each dtype with each number of threads."""
    s = bench.settings
    a, b = np.random.default_rng(s.seed).standard_normal((2, SIDE, SIDE), np.float32)
    product = np.empty_like(a)
    sgemm = Contestant("sgemm", lambda: np.matmul(a, b, out=product))
    work = flops(NUM_QUERIES, CONTEXT, s.num_q_heads, s.head_dim) / (2 * SIDE**3)
    for dtype in s.dtypes:
        spec, rng = bench.spec(dtype, BLOCK_SIZE), bench.rng(NUM_QUERIES, CONTEXT)
        elements = padded(CONTEXT, BLOCK_SIZE) * s.num_kv_heads * s.head_dim
        planes = tuple(random_elements(rng, elements, dtype) for _ in "kv")
        for num_threads in s.threads:
            name = f"prefill {dtype}, {NUM_QUERIES} of {tokens(CONTEXT)} tokens, {threads_name(num_threads)}"
            bench.say(name)
            threads = blas_threads(num_threads)
            if threads is None:
                bench.left_out.append((name, "numpy's threads are set by threadpoolctl: pip install threadpoolctl"))
                continue
            size = {"batch": 1, "context": CONTEXT, "num_queries": NUM_QUERIES, "num_threads": num_threads}
            call = bench.call(spec, planes, **size, rng=rng)
            error = call.checked_error(rng)
            with threads:
                race = bench.race(sgemm, [Contestant("prefill", call.attend)])
            yield Row(
                part="prefill",
                dtype=dtype,
                threads=num_threads,
                layout=s.layout,
                block_size=BLOCK_SIZE,
                batch=1,
                context=CONTEXT,
                nbytes=kv_nbytes(spec, CONTEXT),
                yardstick="sgemm",
                error=error,
                **timed(race, "prefill", work),
            )
