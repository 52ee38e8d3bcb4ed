"""A store on disk beside ``cat``, and an engine that has one: ``python -m benchmarks.store``.

Reading cold, checksums, bytes written, start-up; a restart, steps while the writer works, a store that hangs. The files
leave the page cache before each round (``posix_fadvise``), and the sides take turns to be first. The median counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import serving_lm as lm
from benchmarks.baselines import seconds
from benchmarks.command import main
from benchmarks.gate import Gate
from kvpool.adapters.mlx_lm import Engine
from kvpool.adapters.mlx_lm.engine import Sample
from kvpool.store import BlockLayout, Blocks, DiskStore, Layout, MemoryStore
from kvpool.store import segment_format as form
from kvpool.store.blocks import Rows
from kvpool.store.disk import SEALED, Folder

QUOTA = 1 << 40
OPTIONS = {
    **{"megabytes": (512, "read per round"), "rounds": (5, "of each"), "blocks": (1_000_000, "at the start")},
    "tokens": (8192, "of the prompt after a restart"),
}
SEGMENT_STEPS = 20  # steps in a row with the writer, or without it


def evict(files: list[str]) -> None:
    """Take files out of the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Timed:
    """A function, and how long its calls took."""

    def __init__(self, function: Callable[..., int]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, *args: object) -> int:
        begin = time.perf_counter()
        found = self._function(*args)
        self.seconds += time.perf_counter() - begin
        return found


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
        sides: dict[str, Callable[[], object]] = {
            "cat": lambda: subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True),
            "load": lambda: store.load(blocks, rows),
        }
        for number in range(rounds):
            for side in sorted(sides, reverse=number % 2 == 1):
                evict(files)
                with mock.patch.object(form, "checksum", Timed(form.checksum)) as timed:
                    spent[side].append(seconds(sides[side]))
                if side == "load":
                    spent["checksum"].append(timed.seconds)
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
        with closing(Folder(path, "benchmarks")) as folder:
            folder.check_layout(layout)
            for _ in range(num_blocks // each):
                entries, end = np.zeros(each, form.FOOTER), form.HEADER.size + each * step
                entries["name"] = rng.integers(0, 2**64, each, np.uint64)
                entries["offset"] = form.HEADER.size + np.arange(each) * step
                stem, fd = folder.create(form.packed_header(layout.digest))
                os.pwrite(fd, form.packed_footer(layout.digest, entries, end, form.KIND), end)
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


class Hanging(MemoryStore):
    """A store whose loads take a minute."""

    def load(self, blocks: Blocks, rows: Rows) -> np.ndarray:
        """Sleep, then load."""
        time.sleep(60)
        return super().load(blocks, rows)

    def close(self) -> None:
        """Stay: several engines use it."""


def on_disk(folder: str) -> Callable[[Layout], DiskStore]:
    """Return what makes the store of an engine."""
    return lambda layout: DiskStore(folder, layout, QUOTA)


def first_token(engine: Engine, prompt: np.ndarray, **options: Any) -> tuple[float, Sample]:
    """Seconds until the first token of an answer, and the answer."""
    came: list[float] = []
    begin = time.perf_counter()
    completion = engine.generate(
        prompt.tolist(), max_tokens=8, on_token=lambda event: came.append(time.perf_counter()), **options
    )
    return came[0] - begin, completion.samples[0]


def restarting(num_tokens: int) -> list[Gate]:
    """A long prompt computed, then loaded by a fresh engine whose files are out of the page cache."""
    (model, vocab), answers = lm.load("medium"), []
    prompt = np.random.default_rng(3).integers(0, vocab, num_tokens)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            evict([str(path) for path in Path(folder).glob(f"*{SEALED}")])
            with Engine(model, num_tokens // 16 + 64, store=on_disk(folder)) as engine:
                engine.kv.stored.store.ready.wait()
                answers.append(first_token(engine, prompt))
    (computed, one), (loaded, other) = answers
    same = one.tokens.tolist() == other.tokens.tolist() and one.logprobs.tolist() == other.logprobs.tolist()
    note = f"{computed:.3g} s, {loaded:.3g} s; {other.output.num_cached:,} tokens loaded"
    return [
        Gate(f"first token, {num_tokens:,} tokens, computed / loaded", computed / loaded, 10, note=note),
        Gate("tokens and log probabilities are the same", float(same), 1),
    ]


def stepping(rounds: int) -> list[Gate]:
    """Steps of four requests while prefixes are saved, beside steps while nothing is."""
    model, vocab = lm.load("medium")
    prompts = np.random.default_rng(4).integers(0, vocab, (4, 500))
    with tempfile.TemporaryDirectory() as folder, Engine(model, 4096, store=on_disk(folder)) as engine:
        stored, own, saves = engine.kv.stored, engine.kv.own_namespace(b""), itertools.count()

        def spend(saving: bool) -> np.ndarray:
            began = np.array([time.perf_counter(), time.process_time()])
            for _ in range(SEGMENT_STEPS):
                if saving and not engine.is_saving:  # in a new namespace, so that the store lacks it
                    number = next(saves)
                    stored.save(prompts[number % 4], b"%d" % number, own)
                engine.step()
            return np.array([time.perf_counter(), time.process_time()]) - began

        def settle() -> None:
            stored.flush()
            engine.step()

        for prompt in prompts:
            engine.submit(prompt.tolist(), max_tokens=10_000, eos=())
        while stored.stats().saves < len(prompts):
            engine.step()
        settle()
        ratios, saved = [], stored.stats().saved_blocks
        for _ in range(rounds):
            before, first, second = spend(False), spend(True), spend(True)
            settle()
            ratios.append((first + second) / (before + spend(False)))
        saved = stored.stats().saved_blocks - saved
    note = f"{saved} blocks saved meanwhile"
    clock, cpu = (median(ratio[which] for ratio in ratios) for which in range(2))
    return [
        Gate("step while the writer works / step", clock, 1.03, at_most=True, note=note),
        Gate("the same, CPU time of all threads", cpu, 1.03, at_most=True),
    ]


def hanging(rounds: int) -> list[Gate]:
    """The first token of a prompt that a store has and does not bring, beside an engine without a store."""
    model, vocab = lm.load("medium")
    prompt = np.random.default_rng(5).integers(0, vocab, 1500)
    warm, ratios = np.zeros(500, int), []
    with Engine(model, 512, store=lambda layout: Hanging(layout, 1 << 30)) as saver:
        first_token(saver, prompt)
        saver.kv.stored.flush()
        held = saver.kv.stored.store
        for _ in range(rounds):
            spent = []
            for store in (None, held):
                with Engine(model, 512, store=store) as engine:
                    first_token(engine, warm, namespace=b"warm")  # measures how fast the model computes
                    spent.append(first_token(engine, prompt)[0])
            ratios.append(spent[1] / spent[0])
    return [Gate("first token, a store that hangs / no store", median(ratios), 1.05, at_most=True)]


def gates(args: argparse.Namespace) -> Iterator[Gate]:
    """Yield all of them."""
    for kib in (64, 1024):
        yield from reading(kib << 10, args.megabytes << 20, args.rounds)
    yield from (*starting(args.blocks), *restarting(args.tokens), *stepping(2 * args.rounds), *hanging(args.rounds))


if __name__ == "__main__":
    sys.exit(main())
