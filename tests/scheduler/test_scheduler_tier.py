"""A tier over a real backend: blocks leave for the host and come back, and nothing is computed again."""

import numpy as np
import pytest
from schedules import greedy, next_token

from kvpool import Group, KVSpec, Pool, Request, Scheduler
from kvpool_backends.numpy import NumpyBackend

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, block_size=2, dtype="float32")


class HostTier:
    """Exports blocks of a backend and imports them into others; takes so many at most."""

    def __init__(self, backend, most=10**6):
        self.backend = backend
        self.room = most
        self.spilled = 0

    def spill_to_host(self, handle, blocks):
        if len(blocks) > self.room:
            return None
        self.room -= len(blocks)
        self.spilled += len(blocks)
        return self.backend.export_blocks(blocks).copy()

    def prefetch(self, kept, handle, blocks):
        assert len(kept) == len(blocks)
        self.room += len(blocks)
        self.backend.import_blocks(blocks, kept)


def execute(backend, pool, step):
    """Write the tokens as keys, and read every context back from the blocks."""
    plan = step.plan
    backend.copy_blocks(plan)
    kv = step.tokens.astype(np.float32)[:, None, None]
    backend.write(backend.prepare(plan), 0, kv, kv)
    rows = np.searchsorted(plan.cu_q_lens, step.sample_at, side="right") - 1
    contexts = []
    for row in rows.tolist():
        length = int(plan.seq_lens[row])
        blocks = plan.block_tables[row][: -(-length // SPEC.block_size)]
        contexts.append(backend.gather(0, blocks, length)[0].ravel().astype(int).tolist())
    return contexts


def run(pool, scheduler, backend):
    outputs = {}
    for _ in range(2000):
        if (step := scheduler.schedule()) is None:
            return outputs
        tokens = np.int32([next_token(context) for context in execute(backend, pool, step)])
        outputs.update({(output.id, output.index): output for output in scheduler.update(step, tokens)})
        scheduler.check()
    raise AssertionError(f"not done: {scheduler}")


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tier_spilled_sequences_come_back_without_recomputing(prefix_cache):
    pool = Pool(16, 2, prefix_cache=prefix_cache, seed=1)
    backend = NumpyBackend(SPEC, 16)
    tier = HostTier(backend)
    scheduler = Scheduler(pool, watermark=0, prefill_chunk=3, tier=tier)
    requests = [Request(range(10 * i, 10 * i + 4 + i), max_tokens=15, n=1 + i % 2) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    outputs = run(pool, scheduler, backend)
    assert {key: output.tokens.tolist() for key, output in outputs.items()} == {
        (i, j): greedy(request)[0] for i, request in enumerate(requests) for j in range(request.n)
    }
    stats = scheduler.stats()
    assert stats.spills > 0 and tier.spilled > 0
    assert stats.preemptions == stats.recomputed_tokens == 0
    assert pool.stats().used == 0 and tier.room == 10**6


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tier_receives_the_blocks_of_each_full_group(prefix_cache):
    sizes = 2, 4
    groups = [Group.full(), Group.full(block_size=4, arena=1, num_blocks=12)]
    pool = Pool(16, 2, groups=groups, prefix_cache=prefix_cache, seed=1)
    memory = [np.full((64, size), -1) for size in sizes]  # of each group: tokens by block and place

    class Tier:
        spilled = 0

        def spill_to_host(self, handle, blocks):
            self.spilled += 1
            return [kept[ids.ravel()].copy() for kept, ids in zip(memory, blocks, strict=True)]

        def prefetch(self, kept, handle, blocks):
            for into, rows, ids in zip(memory, kept, blocks, strict=True):
                into[ids.ravel()] = rows

    tier = Tier()
    scheduler = Scheduler(pool, watermark=0, prefill_chunk=3, tier=tier)
    requests = [Request(range(10 * i, 10 * i + 4 + i), max_tokens=15, n=1 + i % 2) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    outputs = {}
    while (step := scheduler.schedule()) is not None:
        plan, found = step.plan, []
        for part, kept, size in zip(plan.groups, memory, sizes, strict=True):
            for src, dst, n in part.copies.tolist():
                kept[dst, :n] = kept[src, :n]
            kept.reshape(-1)[part.slot_mapping[0]] = step.tokens
            rows = np.searchsorted(plan.cu_q_lens, step.sample_at, side="right") - 1
            held = [(part.block_tables[row, :, 0], int(part.kv_lens[row])) for row in rows.tolist()]
            found.append([kept[ids[: -(-n // size)]].ravel()[:n].tolist() for ids, n in held])
        assert found[0] == found[1]
        tokens = np.int32([next_token(context) for context in found[0]])
        outputs.update({(output.id, output.index): output for output in scheduler.update(step, tokens)})
        scheduler.check()
    assert {key: output.tokens.tolist() for key, output in outputs.items()} == {
        (i, j): greedy(request)[0] for i, request in enumerate(requests) for j in range(request.n)
    }
    stats = scheduler.stats()
    assert stats.spills == tier.spilled > 0 and stats.preemptions == stats.recomputed_tokens == 0


@pytest.mark.parametrize("n", [1, 2])
def test_restored_sequence_holds_no_second_copy_of_what_is_cached(n):
    """It is spilled in the middle of its prompt, while another user of the pool has the other blocks."""
    pool = Pool(90, 2, prefix_cache=True, seed=1)
    backend = NumpyBackend(SPEC, 90)
    scheduler = Scheduler(pool, watermark=0, tier=HostTier(backend), prefill_chunk=4, max_step_tokens=6)
    requests = {"decodes": Request(range(4), 60, id="decodes")}
    scheduler.add(requests["decodes"])
    one(pool, scheduler, backend)
    requests["spilled"] = Request(range(100, 140), 14, id="spilled", n=n)
    scheduler.add(requests["spilled"])
    for _ in range(4):
        one(pool, scheduler, backend)
    guest = pool.open(2 * pool.stats().blank)
    while not scheduler.stats().spilled:
        one(pool, scheduler, backend)
    pool.close(guest)
    cached = pool.stats().evictable
    assert cached > 0
    outputs = {}
    while scheduler.stats().decoding + scheduler.stats().spilled:
        outputs |= one(pool, scheduler, backend)
        tables = {block for handle in scheduler.handles.tolist() for block in pool.table(handle).tolist()}
        assert pool.stats().used == len(tables)
    assert outputs == {name: greedy(request)[0] for name, request in requests.items()}
    assert pool.prefix.match([*range(100, 140), 1]) == 40


def test_tier_spilled_comes_back_before_those_who_wait():
    pool = Pool(12, 2)
    backend = NumpyBackend(SPEC, 12)
    scheduler = Scheduler(pool, watermark=0, tier=HostTier(backend))
    for name in "ab":
        scheduler.add(Request(range(6), max_tokens=12, id=name))
    while not scheduler.stats().spilled:
        one(pool, scheduler, backend)
    for name in "xyz":
        scheduler.add(Request([1], max_tokens=1, id=name, priority=5))
    while scheduler.stats().spilled:
        assert scheduler.stats().waiting == 3
        one(pool, scheduler, backend)
    run(pool, scheduler, backend)
    assert pool.stats().used == 0


def test_tier_cancelled_while_spilled_is_dropped():
    pool = Pool(12, 2)
    backend = NumpyBackend(SPEC, 12)
    scheduler = Scheduler(pool, watermark=0, tier=HostTier(backend))
    requests = {name: Request(range(6), max_tokens=12, id=name) for name in "ab"}
    for request in requests.values():
        scheduler.add(request)
    while not scheduler.stats().spilled:
        one(pool, scheduler, backend)
    (output,) = scheduler.cancel("b")
    assert output.tokens.tolist() == greedy(requests["b"])[0][: len(output.tokens)] and len(output.tokens)
    scheduler.check()
    assert scheduler.stats().spilled == 0
    assert run(pool, scheduler, backend)["a", 0].tokens.tolist() == greedy(requests["a"])[0]


def one(pool, scheduler, backend):
    step = scheduler.schedule()
    tokens = np.int32([next_token(context) for context in execute(backend, pool, step)])
    return {output.id: output.tokens.tolist() for output in scheduler.update(step, tokens)}
