"""Time of a decode step and of a chunk of a prompt: a model on mlx-lm's own caches, and on a pool.

Both take turns on the same model, and the medians are compared. Time is that of the CPU, of all threads: others may
use the machine, too. It does not show how much of the time two threads work at once. A step is what mlx-lm's
``generate_step`` does: the next one is built while this one runs. A chunk ends with the evaluation of the caches, and
nobody uses its logits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from benchmarks.models.held import BLOCK_SIZE, merged
from benchmarks.models.subjects import Beside
from kvpool.adapters.mlx_lm.cache_hook import Hook
from kvpool.adapters.mlx_lm.host import PagedKV, install
from kvpool.cli.bench.measure import Contestant, seconds_per_call

CHUNK = 512
STEPS = 4  # in a timed run
FEW = 3  # runs of a chunk of one row; the chunk of a batch takes long, and runs once


def installed(model: Any, num_rows: int, repetitions: int) -> PagedKV:
    """Return a pool with room for the runs of `measure`."""
    num_blocks = 1 + 2 * (num_rows + 1) * -(-(CHUNK + STEPS * (repetitions + 1)) // BLOCK_SIZE)
    return install(model, num_blocks, block_size=BLOCK_SIZE, max_seqs=4 * num_rows + 8)


def measure(kv: PagedKV, num_rows: int, repetitions: int) -> tuple[Beside, Beside]:
    """Time a decode step of rows with 512 tokens and more, and the first 512 tokens of all rows. `kv` is entered.

    The rows that decode are those of the last chunk.
    """
    makers = {"stock": lambda: Hook.stock_caches(kv.model), "pool": kv.make_cache}
    fed: dict[str, list[Any]] = {}

    def chunk(who: str) -> None:
        fed.pop(who, None)  # the blocks of the run before
        fed[who] = _fed(kv.model, makers[who], num_rows)

    for make in makers.values():
        _fed(kv.model, make, 1)  # warm-up: MLX does more work in a first run
    chunks = [Contestant(who, partial(chunk, who)) for who in makers]
    of_chunk = _turns(chunks, min(FEW, repetitions) if num_rows == 1 else 1)
    steps = [Contestant(who, _decoding(kv.model, fed[who], num_rows), STEPS) for who in makers]
    return _turns(steps, repetitions), of_chunk


def _turns(both: list[Contestant], rounds: int) -> Beside:
    """Return the median seconds of a call of each."""
    found = [[seconds_per_call(one, time.process_time) for one in both] for _ in range(rounds)]
    return Beside(*map(statistics.median, zip(*found, strict=True)))


def _fed(model: Any, make: Callable[[], list[Any]], num_rows: int) -> list[Any]:
    """Return the caches of rows with a prompt of one chunk."""
    caches = make() if num_rows == 1 else merged(make, num_rows)
    model(mx.array([[(7 * i + 11 * row) % 90 + 1 for i in range(CHUNK)] for row in range(num_rows)]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def _decoding(model: Any, caches: list[Any], num_rows: int) -> Callable[[], object]:
    """Return a function that decodes some tokens more of each row."""
    newest = mx.ones((num_rows, 1), mx.int32)

    def step(tokens: mx.array) -> mx.array:
        following = mx.argmax(model(tokens, cache=caches)[:, -1:], axis=-1)
        mx.async_eval(following)
        return following

    def run() -> None:
        nonlocal newest
        for _ in range(STEPS):
            before, newest = newest, step(newest)
            mx.eval(before)
        mx.eval(newest)

    return run
