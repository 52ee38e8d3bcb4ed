"""Index arithmetic around 2^31, 2^32 and 2^40: slots, lengths, positions, bytes; Python's integers are the oracle.

Lengths grow by plans without an array per token, so that a sequence of a trillion tokens costs nothing; ids by blocks
that are taken and never touched; bytes by memory that is reserved and never filled.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import kvpool
from proof.figure import Budget, Figure
from tests.verify import builds

NAME = "arithmetic"
TARGET = "index arithmetic around 2^31, 2^32, 2^40: 0 wraps"
COMMAND = "python -m proof arithmetic"
EDGES = (2**31, 2**32, 2**40)
MOST_NEW = 2**31 - 1  # tokens of one step
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "csr", "slot_ids")
Case = tuple[str, Any, Any]  # what, measured, expected


def grow_to(pool: kvpool.Pool, handle: int, length: int) -> None:
    """Append tokens without an array that has one entry for each."""
    plan = kvpool.Plan(pool, 1, MOST_NEW, formats=())
    while pool.num_tokens(handle) < length:
        pool.step(plan, [handle], min(MOST_NEW, length - pool.num_tokens(handle)))


def slot(table: list[int], block_size: int, position: int) -> int:
    """Where a token lies."""
    return table[position // block_size] * block_size + position % block_size


def lengths() -> Iterator[Case]:
    """A sequence steps over an edge, one token and seven at a time."""
    for edge in EDGES:
        for block_size in (2**31 - 1, 2**30, 3 * 2**28 + 1):
            blocks = edge // block_size + 3
            pool = kvpool.Pool(blocks + 1, block_size, max_seqs=4, max_blocks_per_seq=blocks, in_order=True, seed=1)
            handle = pool.open()
            grow_to(pool, handle, edge - 9)
            plan = kvpool.Plan(pool, 2, 16, formats=FORMATS, dtype="int64")
            for new in (7, *[1] * 4, 7):
                start = pool.num_tokens(handle)
                pool.step(plan, [handle], new)
                where, table = f"length {start} + {new}, blocks of {block_size}", pool.table(handle).tolist()
                expected = list(range(start, start + new))
                yield f"{where}: positions", plan.positions.tolist(), expected
                yield (
                    *(f"{where}: slots", plan.slot_mapping.tolist()),
                    [slot(table, block_size, position) for position in expected],
                )
                yield f"{where}: seq_lens", plan.seq_lens.tolist(), [start + new]
                full = -(-(start + new) // block_size)
                yield f"{where}: last page", plan.last_page_len.tolist(), [start + new - (full - 1) * block_size]
                yield f"{where}: pages", plan.indptr.tolist(), [0, full]
                yield f"{where}: tokens", pool.stats().tokens, start + new
                yield f"{where}: capacity", pool.capacity(handle), len(table) * block_size
            child = int(pool.fork(handle)[0])
            pool.truncate(handle, edge - 1)
            yield f"truncated to {edge} - 1", pool.num_tokens(handle), edge - 1
            yield f"sum of two sequences near {edge}", pool.stats().tokens, edge - 1 + pool.num_tokens(child)
            pool.close([handle, child])
            pool.check()


def ids() -> Iterator[Case]:
    """Blocks whose slots lie around an edge."""
    for edge, block_size in ((2**31, 2**15), (2**32, 2**16), (2**40, 2**24), (2**40, 2**22 + 1)):
        first = edge // block_size - 2
        pool = kvpool.Pool(first + 8, block_size, max_seqs=8, max_blocks_per_seq=4, in_order=True, seed=1)
        pool.blocks.alloc(first - 1)  # ids 1 .. first - 1
        handles = [pool.open() for _ in range(5)]
        plan = kvpool.Plan(pool, 5, 15, formats=(*FORMATS, "kv_slots_ragged"), dtype="int64", kv_width=8)
        pool.step(plan, handles, 3)
        tables = [pool.table(handle).tolist() for handle in handles]
        yield f"ids from {first} on", [row[0] for row in tables], list(range(first, first + 5))
        expected = [slot(row, block_size, position) for row in tables for position in range(3)]
        yield f"slots of ids from {first} on", plan.slot_mapping.tolist(), expected
        yield f"contexts of ids from {first} on", plan.kv_slots_ragged.tolist(), expected
        pool.check()


def refused(make: Any) -> str:
    """Name of the exception."""
    try:
        make()
    except Exception as error:
        return type(error).__name__
    return "accepted"


def limits() -> Iterator[Case]:
    """What does not fit is refused when it is built."""
    small = {"max_seqs": 1, "max_blocks_per_seq": 1}
    for block_size, ending in ((2**30, "ValueError"), (2**30 - 1, "accepted")):
        pool = kvpool.Pool(2, block_size, **small)
        yield f"int32 slots, 2 blocks of {block_size}", refused(lambda p=pool: kvpool.Plan(p, 1)), ending
    pool = kvpool.Pool(4, 2**31 - 1, **small)
    yield "int32 slots, 2^33 of them", refused(lambda: kvpool.Plan(pool, 1)), "ValueError"
    yield "2^31 tokens in a block", refused(lambda: kvpool.Pool(2, 2**31)), "ValueError"
    yield "2^31 blocks", refused(lambda: kvpool.Pool(2**31, 1)), "ValueError"
    yield "2^63 tokens", refused(lambda: pool.open(2**63)), "ValueError"
    yield "2^62 tokens", refused(lambda: pool.open(2**62)), "CapacityExceeded"
    for count in (2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1):
        yield f"{count} blocks asked for", refused(lambda n=count: pool.blocks.alloc(n)), "OutOfBlocks"
        yield f"{count} children", refused(lambda n=count: pool.fork(pool.open(), n)), "OutOfSequences"
        pool.reset()
    handle, plan = pool.open(), kvpool.Plan(pool, 1, MOST_NEW, formats=())
    for count in (2**31, 2**32, 2**40, 2**63 - 1):
        yield f"{count} new tokens", refused(lambda n=count: pool.step(plan, [handle], [n])), "CapacityExceeded"


def reserve(nbytes: int) -> mmap.mmap:
    """Memory with addresses and nothing behind them."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE


def kernels() -> Iterator[Case]:
    """The CPU backend writes and reads blocks whose bytes lie around an edge."""
    from kvpool.config import KVSpec
    from kvpool_backends.cpu import BlockStore, base_shapes, isas

    heads, dim, block_size = 2, 64, 16
    spec = KVSpec(1, heads, dim, "float32", block_size)
    for edge in (*EDGES, 2 * EDGES[0], 4 * EDGES[1]):  # the last two: counted in elements
        num_blocks = edge // (heads * dim * block_size * 4) + 4
        shapes = base_shapes(spec, num_blocks)
        try:
            held = [reserve(int(np.prod(shape, dtype=object)) * 4) for shape in shapes]
        except OSError:
            yield f"{edge} bytes can be reserved", False, True
            continue
        arrays = [np.frombuffer(m, np.float32).reshape(s) for m, s in zip(held, shapes, strict=True)]
        for isa in isas():
            store = BlockStore(spec, num_blocks, arrays, isa=isa, num_threads=1)
            rng = np.random.default_rng(edge % 1000)
            k, v = rng.standard_normal((2, 5 * block_size, heads, dim)).astype(np.float32)
            blocks = np.arange(num_blocks - 5, num_blocks)
            slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
            store.write(0, k, v, slots)
            out, q = np.empty((1, heads, dim), np.float32), rng.standard_normal((1, heads, dim)).astype(np.float32)
            table = blocks[None].astype(np.int32)
            store.attend(0, q, out, table, np.array([len(k)], np.int32), np.array([0, 1], np.int32))
            weights = np.exp(np.einsum("hd,thd->ht", q[0], k) / dim**0.5)
            expected = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), v)
            close = bool(np.allclose(out[0], expected, atol=1e-5))
            yield f"attention over the last of {edge} bytes, {isa}", close, True
            low = [bool(array.reshape(-1)[: 1 << 16].any()) for array in arrays]
            yield f"nothing written at the start of {edge} bytes, {isa}", low, [False] * len(arrays)
        del arrays, store


def wraps(cases: Iterator[Case], bits: int = 64) -> tuple[int, list[str]]:
    """Count the cases, and those that do not agree; `bits` below 64 plants a wrap."""
    total, wrong = 0, []
    for what, measured, expected in cases:
        total += 1
        if bits < 64 and isinstance(measured, list):
            measured = [int(np.int64(value).astype(f"int{bits}")) for value in measured]
        if measured != expected:
            wrong.append(f"{what}: {measured} != {expected}")
    return total, wrong


def core_cases() -> Iterator[Case]:
    """All but the kernels."""
    yield from lengths()
    yield from ids()
    yield from limits()


def measure(budget: Budget, bits: int = 64) -> Figure:
    """The core (in full also under UBSan) and the CPU kernels."""
    start = time.monotonic()
    total, wrong = wraps(core_cases(), bits)
    if bits == 64:
        more, found = wraps(kernels())
        total, wrong = total + more, wrong + found
    sanitized = ""
    if budget.share >= 1 and bits == 64:
        done = builds.run("asan", ["-m", "proof.arithmetic"])
        sanitized = ", the core's under UBSan too"
        wrong += json.loads(done.stdout) if done.returncode == 0 else [f"under UBSan: {done.stderr[-300:]}"]
    measured = f"{total:,} cases{sanitized}, {len(wrong)} wraps"
    return Figure(NAME, TARGET, measured, not wrong, COMMAND, time.monotonic() - start, "\n".join(wrong[:20]))


def planted(budget: Budget) -> Figure:
    """What is measured passes through 32 bits."""
    return measure(budget, bits=32)


if __name__ == "__main__":
    json.dump(wraps(core_cases())[1], sys.stdout)
