"""Calls of `kvpool.adapters.block_pool` beside those of vLLM's own block pool, for 1 and for 100 blocks a call.

    pip download --no-deps --only-binary :all: vllm==0.33.0
    KVPOOL_VLLM=vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl python -m benchmarks.block_pool [--json] [--gates]

Only vLLM's pool is loaded, not the rest of it. Both take turns in one process, both have the same blocks in the same
states, in an order as after hours of use; the fastest of many turns counts, in CPU time. Keys are new objects in every
call, as hashes of requests are. ``--gates``: exit status 1 where kvpool is less than 2 times as fast for 1 block, or
10 times for 100.
"""

import gc
import random
import sys
import time

from benchmarks import vllm_source
from benchmarks.command import main
from benchmarks.gate import Gate
from kvpool.adapters.block_pool import BlockPool
from kvpool.cli.console import CommandError

NUM_BLOCKS, PER_TURN, SIZES, SEED = 4_097, 2_000, (1, 100), 20261121
OPTIONS = {"rounds": (200, "turns of each side")}
TIMES_MIN = {1: 2, 100: 10}
ONE_KEY = "lookup, nothing found"  # looks at one key, however many there are


class Ours:
    """kvpool's facade. A table is what `get` gives: a list of ids."""

    name = "kvpool"

    def __init__(self):
        self.pool = pool = BlockPool(NUM_BLOCKS)
        self.get, self.touch, self.free, self.evict = pool.get, pool.touch, pool.free, pool.evict
        self.cache, self.lookup = pool.cache, pool.lookup

    def num_free(self):
        return self.pool.num_free

    def named(self, ids):
        """A table of these blocks."""
        return ids

    def evicted(self, table):
        """What `evict` is given for a table."""
        return table

    def request(self, keys):
        """What `cache` and `lookup` are given."""
        return keys


class Theirs:
    """vLLM's pool. A table is a list of its block objects; `evict` takes a set of ids, a request has hashes."""

    name = "vLLM"

    def __init__(self, modules):
        self.pool = pool = modules[0].BlockPool(NUM_BLOCKS, True, 16)
        self.get, self.touch, self.free, self.evict = (
            pool.get_new_blocks, pool.touch, pool.free_blocks, pool.evict_blocks,
        )  # fmt: skip
        self.num_free, self.request = pool.get_num_free_blocks, vllm_source.request

    def named(self, ids):
        return [self.pool.blocks[i] for i in ids]

    def evicted(self, table):
        return {block.block_id for block in table}

    def cache(self, table, request):
        self.pool.cache_full_blocks(request, table, 0, len(table), 16, 0)

    def lookup(self, request):
        """The loop of its manager: a group of layers, block after block until one is not there."""
        found = []
        for block_hash in request.block_hashes:
            blocks = self.pool.get_cached_block(block_hash, [0])
            if not blocks:
                break
            found.append(blocks[0])
        return found


class Turns:
    """The states between which calls are timed, the same for both sides."""

    def __init__(self, side, size):
        self.side, self.size, self.calls, self.turn = side, size, PER_TURN // size, 0
        order = list(range(1, NUM_BLOCKS))
        random.Random(SEED).shuffle(order)
        side.get(NUM_BLOCKS - 1)
        for k in range(0, len(order), size):
            side.free(side.named(order[k : k + size]))

    def keys(self):
        """Keys that no block has yet, a group for every call."""
        self.turn += 1
        return [[f"{self.turn} {call} {k}".rjust(32).encode() for k in range(self.size)] for call in range(self.calls)]

    def requests(self, keys):
        """The same keys as new objects, as the next request with this prompt brings them."""
        return [self.side.request([bytes(bytearray(key)) for key in group]) for group in keys]

    def run(self):
        """CPU seconds of every kind of call, for all groups."""
        side, found = self.side, {}

        def timed(name, call, *groups):
            begin = time.thread_time_ns()
            made = list(map(call, *groups))
            found[name] = (time.thread_time_ns() - begin) / self.calls
            return made

        def untimed(call, *groups):
            return list(map(call, *groups))

        sizes, keys = [self.size] * self.calls, self.keys()
        tables = timed("get, blank blocks", side.get, sizes)
        timed("free, without keys", side.free, tables)
        tables = untimed(side.get, sizes)
        timed(ONE_KEY, side.lookup, self.requests(keys))
        timed("cache", side.cache, tables, self.requests(keys))
        timed("lookup, all found", side.lookup, self.requests(keys))
        timed("touch, in use", side.touch, tables)
        untimed(side.free, tables)
        timed("free, with keys", side.free, tables)
        timed("touch, cached: a hit", side.touch, tables)
        timed("evict, in use", side.evict, untimed(side.evicted, tables))
        untimed(side.cache, tables, self.requests(keys))
        untimed(side.free, tables)
        timed("evict, cached", side.evict, untimed(side.evicted, tables))
        return found

    def run_full(self):
        """The same of a pool whose free blocks are all cached."""
        side = self.side
        rest = [side.get(self.size) for _ in range(side.num_free() // self.size)]
        for table in rest:
            self.turn += 1
            side.cache(table, side.request([f"full {self.turn} {k}".rjust(32).encode() for k in range(self.size)]))
            side.free(table)
        begin = time.thread_time_ns()
        tables = [side.get(self.size) for _ in range(self.calls)]
        found = {"get, evicting": (time.thread_time_ns() - begin) / self.calls}
        for table in (*tables, *rest):
            side.evict(side.evicted(table))
        for table in tables:
            side.free(table)
        return found


def measure(modules, rounds, sizes=SIZES):
    """Row -> size -> side -> best ns of a call; the sides take turns."""
    best = {}
    for size in sizes:
        sides = [Turns(Ours(), size), Turns(Theirs(modules), size)]
        gc.collect()
        gc.disable()
        try:
            for turn in range(rounds):
                for turns in sides if turn % 2 else sides[::-1]:
                    for row, ns in (turns.run() | (turns.run_full() if turn % 4 >= 2 else {})).items():
                        row = best.setdefault(row, {}).setdefault(size, {})
                        row[turns.side.name] = min(row.get(turns.side.name, ns), ns)
        finally:
            gc.enable()
    return best


def gates(asked):
    """Yield a gate for each call and number of blocks."""
    source = vllm_source.load()
    if source is None:
        raise CommandError(vllm_source.ABSENT)
    for row, sizes in measure(source[:2], max(asked.rounds, 4)).items():
        for size, ns in sizes.items():
            note = f"{ns['kvpool']:.1f} against {ns['vLLM']:.1f} ns"
            least = TIMES_MIN[1 if row == ONE_KEY else size]
            yield Gate(f"{row}, blocks: {size}", ns["vLLM"] / ns["kvpool"], least, note=note, unit="x")


if __name__ == "__main__":
    sys.exit(main())
