"""What a resize costs: time in the core, bytes at the speed of memcpy, the peak of memory, and steps afterwards.

``python -m benchmarks.resize [--gates]`` (Linux; valgrind for three rows). Times are CPU time, best of ROUNDS.
"""

from __future__ import annotations

import json
import mmap
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import callgrind
from benchmarks.gate import Gate, as_text, held
from kvpool import KVSpec, Plan, Pool
from kvpool_backends import load_backend

BLOCKS, BLOCK_SIZE, ROUNDS = 100_000, 16, 9
SPEC = KVSpec(num_layers=2, num_kv_heads=8, head_dim=128, dtype="float16", block_size=BLOCK_SIZE, layout="NHD")
HAVE = 4096  # blocks: 256 MiB a layer
SIZES = ((HAVE, HAVE // 2), (HAVE // 2, HAVE))
BACKENDS: dict[str, dict[str, Any]] = {"numpy": {}, "cpu": {}, "mlx": {"kernels": False}}
ROWS, TOKENS, STEPS = 64, 4096, 64


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of all threads."""
    start = time.process_time()
    call()
    return time.process_time() - start


# ---------------------------------------------------------------------------------------------------- core


def half_full(num_blocks: int, num_seqs: int, prefix_cache: bool = False) -> Pool:
    """A pool in which every second sequence was closed: its blocks are blank, or cached."""
    width = num_blocks // num_seqs
    length = width * BLOCK_SIZE
    pool = Pool(num_blocks + 1, BLOCK_SIZE, max_seqs=num_seqs, max_blocks_per_seq=width, prefix_cache=prefix_cache)
    plan = Plan(pool, 1, max_tokens=length)
    handles = [pool.open(0 if prefix_cache else length) for _ in range(num_seqs)]
    for number, handle in enumerate(handles if prefix_cache else ()):
        pool.step(plan, [handle], length)
        pool.done(plan)
        pool.prefix.commit(handle, np.arange(number * length, (number + 1) * length, dtype=np.int32))
    pool.close(handles[::2])
    return pool


def core() -> Iterator[Gate]:
    """A pool that gives back all that is not in use, and takes it again."""
    for prefix_cache, name in ((False, "half blank"), (True, "half cached")):
        shrinks, grows, moved = [], [], 0
        for _ in range(ROUNDS):
            with half_full(BLOCKS, BLOCKS // 8, prefix_cache) as pool:
                start = time.thread_time()
                moved = len(pool.resize(BLOCKS // 2 + 1))
                shrinks.append(time.thread_time() - start)
                grows.append(cpu_seconds(lambda size=BLOCKS + 1: pool.resize(size)))
        yield Gate(f"core, {name}, shrinks", 1e3 * min(shrinks), 20, True, f"{moved:,} moves", "ms")
        yield Gate(f"core, {name}, grows", 1e3 * min(grows), 20, True, unit="ms")


def allocations(num_blocks: int) -> int:
    """Allocations of a process that resizes a pool, those of Python's objects too, counted by valgrind."""
    text = f"from benchmarks.resize import half_full; half_full({num_blocks}, 100).resize({num_blocks // 2 + 1})"
    command = ["valgrind", "--leak-check=no", "--undef-value-errors=no", sys.executable, "-B", "-c", text]
    environment = {"PYTHONMALLOC": "malloc", "PYTHONHASHSEED": "0", "PYTHONPATH": ".", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=callgrind.ROOT, env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"total heap usage: ([\d,]+) allocs", done.stderr)
    assert found, done.stderr
    return int(found[1].replace(",", ""))


# ------------------------------------------------------------------------------------------------- storage


def resized(spec: KVSpec, name: str, have: int, size: int) -> tuple[Any, Callable[[], None]]:
    """A backend that is full of bytes, and its resize: blocks in use are a random half where it shrinks."""
    backend = load_backend(name)(spec, have, **BACKENDS[name])
    data = np.ones((8, spec.block_nbytes), np.uint8)
    for at in range(0, have, 8):
        backend.import_blocks(np.arange(at, at + 8), data)
        backend.settle()
    used = np.random.default_rng(1).permutation(np.arange(have))[: have // 2]
    sources = np.sort(used[used >= size])
    targets = np.setdiff1d(np.arange(size), used)[: len(sources)]
    if name == "mlx":
        import mlx.core as mx

        mx.clear_cache()
    return backend, lambda: backend.resize(size, np.stack([sources, targets], axis=1))


def copied(name: str, have: int, size: int) -> Callable[[], None]:
    """The same by np.copyto alone, one array after the other, into memory of the kind that the backend takes."""

    def fresh(count: int) -> np.ndarray:
        if name == "numpy":
            return np.empty((count, row), np.uint8)
        memory = mmap.mmap(-1, count * row, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if name == "cpu":
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8).reshape(count, row)

    row, least = SPEC.block_nbytes // SPEC.num_layers // 2, min(have, size)
    arrays = [fresh(have) for _ in "kv"]
    for array in arrays:
        array[:] = 1

    def run() -> None:
        for number, array in enumerate(arrays):
            arrays[number] = fresh(size)
            np.copyto(arrays[number][:least], array[:least])
            if name == "mlx":  # fills what comes
                arrays[number][least:] = 0

    return run


def copies(name: str, have: int, size: int) -> float:
    """How fast a backend of one layer resizes, relative to np.copyto of the bytes that stay."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        theirs.append(cpu_seconds(copied(name, have, size)))
        backend, resize = resized(replace(SPEC, num_layers=1), name, have, size)
        ours.append(cpu_seconds(resize))
        del backend, resize
    return min(theirs) / min(ours)


def peak(name: str, have: int, size: int) -> None:
    """In a process of its own: print the bytes of a backend before a resize, at the peak of it, and after it."""
    resized(SPEC, name, 16, 8)  # what it imports, and what malloc keeps

    def resident(what: str) -> int:
        found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else 0

    begun = resident("VmRSS")
    backend, resize = resized(SPEC, name, have, size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    full = resident("VmRSS")
    resize()
    print(json.dumps([found - begun for found in (full, resident("VmHWM"), resident("VmRSS"))]))
    assert backend.num_blocks == size


def peak_of(name: str, have: int, size: int, planted: str = "") -> tuple[int, int, int]:
    """Return what `peak` prints. `planted` is executed before."""
    text = f"{planted}\nfrom benchmarks import resize; resize.peak({name!r}, {have}, {size})"
    done = subprocess.run([sys.executable, "-c", text], cwd=callgrind.ROOT, capture_output=True, text=True, check=True)
    full, most, after = json.loads(done.stdout)
    return full, most, after


def most_nbytes(have: int, size: int) -> int:
    """What a resize may take: the larger pool, and a layer of the smaller one."""
    return SPEC.pool_nbytes(max(have, size)) + SPEC.pool_nbytes(min(have, size)) // SPEC.num_layers


# --------------------------------------------------------------------------------------------------- steps


def count_steps() -> None:
    """Under callgrind: dump what decode steps take on a pool that was made with its size, and on two that got it."""
    marks = callgrind.marks()
    marks.count_prepare()
    width = (TOKENS + STEPS) // BLOCK_SIZE + 2
    size = ROWS * (width + 1)
    for kind in ("warm", "fixed", "grown", "resized"):
        pool = Pool(2 if kind == "grown" else size, BLOCK_SIZE, max_seqs=ROWS + 1, max_blocks_per_seq=width, seed=1)
        if kind == "grown":
            pool.resize(size)
        ballast = pool.open(40 * BLOCK_SIZE)
        handles = np.array([pool.open() for _ in range(ROWS)], np.int64)
        prompt, plan = Plan(pool, ROWS, ROWS * TOKENS), Plan(pool, ROWS)
        pool.step(prompt, handles, TOKENS)
        pool.done(prompt)
        pool.close(ballast)
        if kind == "resized":
            assert len(pool.resize(pool.stats().used + 1))
            pool.resize(size)
        for _ in range(STEPS):
            marks.count_toggle()
            pool.step(plan, handles, 1)
            pool.done(plan)
            marks.count_toggle()
        marks.count_dump(kind.encode())


def gates() -> Iterator[Gate]:
    """Measure it all."""
    yield from core()
    for name in BACKENDS:
        for have, size in SIZES:
            what, most = f"{name}, {have:,} to {size:,} blocks", most_nbytes(have, size)
            yield Gate(f"{what}: speed / memcpy", copies(name, have, size), 0.8)
            yield Gate(f"{what}: peak / allowed", peak_of(name, have, size)[1] / most, 1.02, True)
    if callgrind.is_here():
        rate = (allocations(BLOCKS) - allocations(BLOCKS // 100)) / (BLOCKS - BLOCKS // 100)
        yield Gate("core, allocations for each block more", rate, 0.001, True)
        taken = callgrind.counted("-c", "from benchmarks import resize; resize.count_steps()", PYTHONHASHSEED="0")
        for kind in ("grown", "resized"):
            yield Gate(f"decode steps, {kind} / fixed", taken[kind][0] / taken["fixed"][0], 1.01, True)


if __name__ == "__main__":
    found = list(gates())
    print(as_text(found))
    sys.exit("--gates" in sys.argv and not held(found))
