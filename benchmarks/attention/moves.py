"""Moving bytes: `write` of 512 tokens and `copy_blocks` of 256 pairs, beside memcpy of as many bytes.

Both go to other places in a pool that is larger than caches with every call, at random; so does memcpy, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any

import numpy as np

from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import WrongResult, narrowed, random_elements
from benchmarks.attention.rows import Row, threads_name, timed
from kvpool.cli.bench.measure import Contestant
from kvpool.config import KVSpec

BLOCK_SIZE = 16
NUM_TOKENS = 512
NUM_PAIRS = 256
POOL_NBYTES = 2**28
CALLS = 4
"""Calls per run: one alone is short, and with memcpy in threads it would time mostly their start."""

Pairs = Sequence[tuple[np.ndarray, np.ndarray]]  # (dst, src), flat


def num_blocks(spec: KVSpec) -> int:
    """Return the blocks of the pool: `POOL_NBYTES`, and room for some calls that do not meet."""
    return max(POOL_NBYTES // spec.block_nbytes, 2 * CALLS * NUM_PAIRS)


class Store:
    """A pool with a store of the kernels on it, and as much memory beside it for memcpy."""

    def __init__(self, bench: Bench, dtype: str, num_threads: int) -> None:
        self.spec, self.rng = bench.spec(dtype, BLOCK_SIZE), bench.rng(POOL_NBYTES)
        self.num_blocks = num_blocks(self.spec)
        shape = self.spec.plane_layout("k", self.num_blocks).shape
        self.arrays = [random_elements(self.rng, shape, dtype) for _ in "kv"]
        self.beside = [np.zeros_like(array) for array in self.arrays]
        self.kernels = bench.kernels.BlockStore(self.spec, self.num_blocks, self.arrays, num_threads=num_threads)

    def groups(self, size: int) -> np.ndarray:
        """Return disjoint groups of `size` blocks, ``[groups, size]``, all of them in random order."""
        groups = self.num_blocks // size
        return self.rng.permutation(self.num_blocks)[: groups * size].reshape(groups, size).astype(np.int32)

    def stored(self, plane: int, slots: np.ndarray) -> np.ndarray:
        """Return the elements at `slots`, ``[T, Hk, D]``."""
        array = self.arrays[plane].swapaxes(1, 2) if self.spec.layout == "HND" else self.arrays[plane]
        return array[slots // BLOCK_SIZE, slots % BLOCK_SIZE]


class Writes:
    """`write` of float32 K and V."""

    def __init__(self, store: Store) -> None:
        self.store = store
        shape = (NUM_TOKENS, store.spec.num_kv_heads, store.spec.head_dim)
        self.tokens = [store.rng.standard_normal(shape, np.float32) for _ in "kv"]
        self.elements = [narrowed(x, store.spec.dtype).reshape(-1) for x in self.tokens]
        self.nbytes = sum(x.nbytes for x in self.elements)
        blocks = store.groups(NUM_TOKENS // BLOCK_SIZE)
        self.slots = (blocks[..., None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)).reshape(len(blocks), -1)
        self.places = cycle(self.slots)

    def run(self) -> None:
        for slots in islice(self.places, CALLS):
            self.store.kernels.write(0, *self.tokens, slots)

    def memcpy(self) -> list[Pairs]:
        """Return what memcpy does in the place of each call."""
        size = self.elements[0].size
        beside = [array.reshape(-1) for array in self.store.beside]
        starts = range(0, len(self.slots) * size, size)
        return [[(dst[at : at + size], src) for dst, src in zip(beside, self.elements, strict=True)] for at in starts]

    def check(self) -> None:
        """Write once, and look at what is stored."""
        slots = next(self.places)
        self.store.kernels.write(0, *self.tokens, slots)
        for plane, elements in enumerate(self.elements):
            if not np.array_equal(self.store.stored(plane, slots).reshape(-1), elements):
                raise WrongResult(f"write, {self.store.spec.dtype}: other elements are stored than were written")


class Copies:
    """`copy_blocks` of pairs of whole blocks."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.nbytes = NUM_PAIRS * store.spec.block_nbytes
        blocks = store.groups(2 * NUM_PAIRS).reshape(-1, NUM_PAIRS, 2)
        sizes = np.full((*blocks.shape[:2], 1), BLOCK_SIZE, np.int32)
        self.copies = np.concatenate((blocks, sizes), axis=2)
        self.places = cycle(self.copies)

    def run(self) -> None:
        for copies in islice(self.places, CALLS):
            self.store.kernels.copy_blocks(copies)

    def memcpy(self) -> list[Pairs]:
        """Return what memcpy does in the place of each call."""
        flat = [(to.reshape(-1), of.reshape(-1)) for to, of in zip(self.store.beside, self.store.arrays, strict=True)]
        size = flat[0][0].size // self.store.num_blocks * NUM_PAIRS
        starts = range(0, len(self.copies) * size, size)
        return [[(dst[at : at + size], src[at : at + size]) for dst, src in flat] for at in starts]

    def check(self) -> None:
        """Copy once, and look at what is stored."""
        copies = next(self.places)
        self.store.kernels.copy_blocks(copies)
        for array in self.store.arrays:
            if not np.array_equal(array[copies[:, 0]].view(np.uint8), array[copies[:, 1]].view(np.uint8)):
                raise WrongResult(f"copy_blocks, {self.store.spec.dtype}: a copy differs from its source")


def memcpy_runs(calls: list[Pairs], num_threads: int, workers: ThreadPoolExecutor) -> Callable[[], object]:
    """Return a function that does `CALLS` calls of memcpy, each thread its share of all of them."""
    places = cycle(calls)

    def share(todo: list[Pairs], thread: int) -> None:
        for pairs in todo:
            for dst, src in pairs:
                part = slice(dst.size * thread // num_threads, dst.size * (thread + 1) // num_threads)
                np.copyto(dst[part], src[part])

    def run() -> None:
        todo = list(islice(places, CALLS))
        others = [workers.submit(share, todo, thread) for thread in range(1, num_threads)]
        share(todo, 0)
        for other in others:
            other.result()

    return run


def count(bench: Bench) -> int:
    """Return how many races each of the two parts has."""
    return len(bench.settings.dtypes) * len(bench.settings.threads)


def write_rows(bench: Bench) -> Iterator[Row]:
    """Measure writes of float32 into each dtype, with each number of threads."""
    return rows(bench, "write", Writes, NUM_TOKENS)


def copy_rows(bench: Bench) -> Iterator[Row]:
    """Measure copies of blocks of each dtype, with each number of threads."""
    return rows(bench, "copy", Copies, NUM_PAIRS * BLOCK_SIZE)


def rows(bench: Bench, part: str, kind: Callable[[Store], Any], num_tokens: int) -> Iterator[Row]:
    """Measure one part; `num_tokens` is what one call moves."""
    for dtype in bench.settings.dtypes:
        for num_threads in bench.settings.threads:
            name = f"{part} {dtype}, {threads_name(num_threads)}"
            bench.say(name)
            spec = bench.spec(dtype, BLOCK_SIZE)
            if not bench.fits(name, 2 * spec.pool_nbytes(num_blocks(spec))):
                continue
            work = kind(Store(bench, dtype, num_threads))
            work.check()
            with ThreadPoolExecutor(num_threads) as workers:
                memcpy = Contestant("memcpy", memcpy_runs(work.memcpy(), num_threads, workers), CALLS)
                race = bench.race(memcpy, [Contestant(part, work.run, CALLS)])
            yield Row(
                part=part,
                dtype=dtype,
                threads=num_threads,
                layout=bench.settings.layout,
                block_size=BLOCK_SIZE,
                batch=1,
                context=num_tokens,
                nbytes=work.nbytes,
                yardstick="memcpy",
                **timed(race, part),
            )
