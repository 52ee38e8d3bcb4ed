"""Two stores in two threads: whether calls on different pools run side by side."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import PagedCall, kv_nbytes, random_elements
from benchmarks.attention.rows import Row, timed
from kvpool.cli.bench.measure import Contestant, Race
from kvpool.cli.bench.options import tokens

BATCH = 16
CONTEXT = 2048
BLOCK_SIZE = 16


def count(bench: Bench) -> int:
    """Return how many races there are."""
    return len(bench.settings.dtypes)


def rows(bench: Bench) -> Iterator[Row]:
    """Measure each dtype: two calls one after the other, and in two threads; each call has one thread."""
    s = bench.settings
    for dtype in s.dtypes:
        name = f"stores {dtype}, two of {BATCH} x {tokens(CONTEXT)}"
        bench.say(name)
        spec, rng = bench.spec(dtype, BLOCK_SIZE), bench.rng(BATCH, CONTEXT, 2)
        nbytes = 2 * kv_nbytes(spec, BATCH * CONTEXT)
        if max(s.threads) < 2:
            bench.left_out.append((name, "needs 2 threads"))
            continue
        if not bench.fits(name, nbytes):
            continue
        elements = BATCH * CONTEXT * s.num_kv_heads * s.head_dim
        calls = []
        for _ in range(2):
            planes = tuple(random_elements(rng, elements, dtype) for _ in "kv")
            calls.append(bench.call(spec, planes, batch=BATCH, context=CONTEXT, num_threads=1, rng=rng))
        error = max(call.checked_error(rng) for call in calls)
        race = side_by_side(bench, *calls)
        best = {contestant: timing.best for contestant, timing in race.timings.items()}
        yield Row(
            part="stores",
            dtype=dtype,
            threads=2,
            layout=s.layout,
            block_size=BLOCK_SIZE,
            batch=2 * BATCH,
            context=CONTEXT,
            nbytes=nbytes,
            yardstick="read",
            error=error,
            gain=best["one thread"] / best["two threads"],
            yardstick_gain=best["read, one thread"] / race.yardstick.best,
            **timed(race, "two threads"),
        )


def side_by_side(bench: Bench, first: PagedCall, second: PagedCall) -> Race:
    """Return the race of both calls in one thread and in two, and of a read of both in one and in two."""
    arrays = [*first.arrays, *second.arrays]
    with ThreadPoolExecutor(1) as worker:

        def one_thread() -> None:
            first.attend()
            second.attend()

        def two_threads() -> None:
            other = worker.submit(second.attend)
            first.attend()
            other.result()

        read = Contestant("read, one thread", bench.reading(arrays, 1).run)
        contestants = [read, Contestant("one thread", one_thread), Contestant("two threads", two_threads)]
        return bench.race(bench.reading(arrays, 2), contestants)
