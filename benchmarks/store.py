"""A store on disk beside ``cat``: reading cold, checksums, bytes written, start-up: ``python -m benchmarks.store``.

The files leave the page cache before each round (``posix_fadvise``), and rounds of both alternate. The median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.gate import Gate, as_text, held
from kvpool.store import BlockLayout, Blocks, DiskStore, Layout
from kvpool.store import segments as form
from kvpool.store.folder import SEALED, Folder

QUOTA = 1 << 40


def evict(files: list[str]) -> None:
    """Take files out of the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def filled(folder: str, layout: Layout, count: int) -> tuple[Blocks, float]:
    """Write blocks of random bytes; return their names, and bytes written per byte stored."""
    rng, nbytes = np.random.default_rng(1), layout.groups[0].nbytes
    blocks = layout.blocks(rng.integers(0, 50_000, count * layout.block_size))[0]
    store, step = DiskStore(folder, layout, QUOTA), max((64 << 20) // nbytes, 1)
    for begin in range(0, count, step):
        some = blocks[begin : begin + step]
        store.store(some, rng.integers(0, 256, (len(some), nbytes), np.uint8))
        store.drain(600)
    store.close()
    stats = store.stats()["disk"]
    return blocks, stats.written_nbytes / stats.stored_nbytes


def reading(nbytes: int, total: int, rounds: int) -> list[Gate]:
    """Blocks of one size: all of them loaded, beside ``cat`` of the same files."""
    layout, count = Layout((BlockLayout(16, nbytes, "random bytes"),), "none"), total // nbytes
    with tempfile.TemporaryDirectory() as folder:
        blocks, amplification = filled(folder, layout, count)
        files = [str(path) for path in Path(folder).glob(f"*{SEALED}")]
        store, rows = DiskStore(folder, layout, QUOTA), np.ones((count, nbytes), np.uint8)
        store.ready.wait()
        spent: dict[str, list[float]] = {"cat": [], "load": [], "checksum": []}
        for _ in range(rounds):
            evict(files)
            spent["cat"].append(seconds(lambda: subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)))
            evict(files)
            spent["load"].append(seconds(lambda: store.load(blocks, rows)))
            spent["checksum"].append(seconds(lambda: [form.checksum(form.KIND, row) for row in rows]))
        assert store.stats()["disk"].hits == rounds * count, "not everything was loaded"
        store.close()
    cat, load, checksum = (median(spent[name]) for name in ("cat", "load", "checksum"))
    size, speed = f"blocks of {nbytes >> 10} KiB", f"{total / load / 1e6:,.0f} MB/s, cat {total / cat / 1e6:,.0f} MB/s"
    return [
        Gate(f"load / cat, {size}", cat / load, 0.8, note=speed),
        Gate(f"checksum / load, {size}", checksum / load, 0.1, at_most=True, note=f"kind {form.KIND}"),
        Gate(f"written / stored, {size}", amplification, 1.05, at_most=True),
    ]


def starting(num_blocks: int) -> list[Gate]:
    """A directory with so many blocks, made of footers and holes; a store that starts on it."""
    layout, each = Layout((BlockLayout(2, 50, "holes"),), "none"), 4000
    rng, step = np.random.default_rng(2), 256
    with tempfile.TemporaryDirectory() as path:
        with Folder(path, "benchmarks") as folder:
            folder.check_layout(layout)
            for _ in range(num_blocks // each):
                entries, end = np.zeros(each, form.FOOTER), form.HEADER.size + each * step
                entries["name"] = rng.integers(0, 2**64, each, np.uint64)
                entries["offset"] = form.HEADER.size + np.arange(each) * step
                stem, fd = folder.create(form.packed_header(layout.digest))
                os.pwrite(fd, form.packed_footer(layout.digest, entries, end), end)
                folder.seal(stem)
                os.close(fd)
        begin = time.perf_counter()
        store = DiskStore(path, layout, QUOTA)
        store.ready.wait()
        started = time.perf_counter() - begin
        found = store.stats()["disk"].blocks
        store.close()
        tracemalloc.start()
        store = DiskStore(path, layout, QUOTA)
        store.ready.wait()
        per_block = tracemalloc.get_traced_memory()[0] / found
        tracemalloc.stop()
        store.close()
    return [
        Gate(f"start with {found:,} blocks", started, 3.0, at_most=True, unit="s"),
        Gate("memory per block", per_block, 64, at_most=True, unit="bytes"),
    ]


def main() -> int:
    """Print the gates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512, help="read per round (default: 512)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks at the start (default: 1,000,000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    gates = [gate for kib in (64, 1024) for gate in reading(kib << 10, args.megabytes << 20, args.rounds)]
    gates += starting(args.blocks)
    print(json.dumps([gate.as_json() for gate in gates], indent=2) if args.json else as_text(gates))
    return 0 if held(gates) else 1


if __name__ == "__main__":
    raise SystemExit(main())
