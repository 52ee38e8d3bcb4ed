"""Events on the wire, read by vLLM's own structs: a reader's index is what the pool holds."""

import random

import msgspec
import numpy as np
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from kvpool import Group, Plan, Pool
from kvpool.kv_events import on_the_wire
from kvpool.store import prefix_keys

BLOCK = 4


class Index:
    """What a router knows: the hashes of each group."""

    def __init__(self):
        self.known = set()

    def read(self, payload):
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                self.known |= {(event.group_idx, key) for key in event.block_hashes}
            elif isinstance(event, BlockRemoved):
                self.known -= {(event.group_idx, key) for key in event.block_hashes}
            else:
                assert isinstance(event, AllBlocksCleared)
                self.known.clear()


def reusable(index, tokens, namespace, window):
    """Tokens that a hit can use as far as a reader knows: whole blocks, whose windows are there too."""
    keys = [key.tobytes() for key in prefix_keys(tokens, BLOCK, namespace)[1:]]
    found = 0
    for n in range(1, (len(tokens) - 1) // BLOCK + 1):
        if (0, keys[n - 1]) not in index.known:
            break
        reads = range(max(0, n * BLOCK - window + 1) // BLOCK, n) if window else ()
        if all((1, keys[k]) in index.known for k in reads):
            found = n * BLOCK
    return found


@pytest.mark.parametrize(("window", "groups"), [(0, None), (6, [Group.full(), Group.window(6)])])
def test_index_of_a_reader_is_what_the_pool_holds(window, groups):
    rng, events, index, hits = random.Random(3), 0, Index(), 0
    pool = Pool(40, BLOCK, prefix_cache=True, in_order=True, events=1 << 16, groups=groups, seed=1)
    plan = Plan(pool, max_rows=1, max_tokens=64, table_width=32)
    prompts = [[rng.randrange(9) for _ in range(24)] for _ in range(3)]
    while events < 1_000_000:
        tail = [rng.randrange(2) for _ in range(rng.choice([1, 1, rng.randrange(1, 20)]))]
        tokens = np.array(rng.choice(prompts)[: rng.choice([8, 16, 24])] + tail, np.int32)
        namespace = rng.choice([b"", b"", b"tenant"])
        handle = pool.open(tokens, namespace, len(tokens))
        held = pool.num_tokens(handle)
        known = reusable(index, tokens, namespace, window)
        assert held == known or (groups and held < known)  # no event tells where a checkpoint of windows is
        hits += held
        at = held
        while at < len(tokens):  # a checkpoint of windows is taken where a step ends as the pool wants
            wanted = int(pool.prefix.wanted([handle])[0]) if groups else -1
            end = wanted if wanted > at else len(tokens)
            pool.step(plan, [handle], end - at)
            pool.prefix.commit([handle], tokens[at:end])
            at = end
        pool.close([handle])
        if rng.random() < 0.002:
            pool.prefix.flush(rng.choice([b"tenant", None]))
        found = pool.prefix.events()
        events += len(found)
        index.read(msgspec.msgpack.encode((0.0, on_the_wire(found, "GPU"), None)))
    assert hits > 10_000
