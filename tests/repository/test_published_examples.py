"""Worked examples that others published about paged KV caches, and the faults in them, as tests of kvpool.

Sources: the MLX paged-attention plan (block manager sketch), Levanter's inference notes (page tables and
PageBatchInfo), a PagedAttention simulation with hashed blocks, an H2O eviction report for MLX, and a
continuous-batching notebook (pool, page table, scheduler). Each section follows one of them.
"""

from collections import deque
from math import ceil

import numpy as np
import pytest

from kvpool import Plan, Pool
from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec
from kvpool.errors import CapacityExceeded, DoubleFree, OutOfBlocks, StaleHandle
from kvpool.protocol import StepArrays
from kvpool.stats import PageBatchInfo
from kvpool.testing.dense import dense_attention
from kvpool_backends.numpy import NumpyBackend


def used(pool):
    return pool.stats().used


# ---------------------------------------------------------------------- paged against static reservation


def test_lengths_32_128_64_256_take_30_blocks_where_static_reservation_takes_64():
    lengths = (32, 128, 64, 256)
    pool = Pool(65, 16)
    plan = Plan(pool, 4, sum(lengths))
    handles = [pool.open() for _ in lengths]
    pool.step(plan, handles, lengths)
    assert used(pool) == 2 + 8 + 4 + 16 == 30
    assert len(lengths) * ceil(max(lengths) / 16) == 64
    assert pool.stats().fragmentation == 0.0  # every length is a multiple of 16


# ---------------------------------------------------------------------- Levanter: page tables

INVALID = -1


def pool_with_pages_2_and_7():
    """Pages 0 .. 9 of 4 tokens; the sequence in slot 3 owns pages 2 and 7, as in the toy example."""
    pool = Pool(10, 4, reserved_blocks=0, max_blocks_per_seq=4)
    pool.open(8)  # slot 0: pages 0, 1
    sequences = [pool.open() for _ in range(3)]  # slots 1, 2, 3
    plan = Plan(pool, 2, 16, formats=("page_batch_info", "positions"))
    target = sequences[2]
    pool.step(plan, [target], 4)  # page 2
    pool.done(plan)
    pool.step(plan, [sequences[0]], 16)  # pages 3 .. 6
    pool.done(plan)
    return pool, plan, sequences, target


def test_token_at_position_5_of_pages_2_and_7_goes_to_slot_29():
    pool, plan, _, target = pool_with_pages_2_and_7()
    pool.step(plan, [target], 2)
    assert pool.table(target).tolist() == [2, 7]
    assert plan.positions.tolist() == [4, 5]
    assert plan.slot_mapping[1] == 7 * 4 + 1 == 29


def test_page_batch_info_of_the_toy_example_is_complete():
    pool, plan, sequences, target = pool_with_pages_2_and_7()
    pool.step(plan, [target, sequences[1]], [2, 3], pad_to=(2, 8))
    info = PageBatchInfo.of(plan)
    assert info.slot_ids.tolist() == [3, 2]
    assert info.page_indices.tolist() == [[2, 7, INVALID, INVALID], [8, INVALID, INVALID, INVALID]]
    assert info.seq_lens.tolist() == [6, 3]
    assert info.cu_q_lens.tolist() == [0, 2, 5]
    assert info.num_seqs == 2
    assert info.new_token_dests.tolist() == [28, 29, 32, 33, 34, INVALID, INVALID, INVALID]
    assert info.page_size == 4
    pages, offsets = np.divmod(info.new_token_dests[:5], info.page_size)  # its pages_and_slots()
    assert pages.tolist() == [7, 7, 8, 8, 8] and offsets.tolist() == [0, 1, 0, 1, 2]
    assert all(
        info.seq_lens[row] >= position + 1 for row, position in zip([0, 0, 1, 1, 1], plan.positions, strict=False)
    )


def test_page_batch_info_of_a_padded_batch_keeps_static_shapes():
    pool, plan, _, target = pool_with_pages_2_and_7()
    pool.step(plan, [target], 1, pad_to=(2, 16))
    info = PageBatchInfo.of(plan)
    assert info.num_seqs == 1
    assert info.slot_ids.tolist() == [3, INVALID]
    assert info.page_indices[1].tolist() == [INVALID] * 4
    assert info.seq_lens.tolist() == [5, 0]
    assert info.cu_q_lens.tolist() == [0, 1, 1]
    assert info.new_token_dests.tolist() == [28] + [INVALID] * 15


def test_kv_of_position_5_is_in_page_7_slot_1_and_stale_slots_do_not_matter():
    """kv_pages[page, slot, 2 * kv_heads, embed], heads k0, v0, k1, v1; positions 6 and 7 are stale."""
    spec = KVSpec(1, 2, 4, "float32", 4, layout="interleaved")
    backend = NumpyBackend(spec, 10)
    stale = np.full((40, 2, 4), np.nan, np.float32)
    backend.write(backend.prepare(StepArrays(slot_mapping=np.arange(40))), 0, stale, stale)
    pool, plan, _, target = pool_with_pages_2_and_7()
    pool.step(plan, [target], 2)
    k, v = np.random.default_rng(5).standard_normal((2, 6, 2, 4)).astype(np.float32)
    backend.write(backend.prepare(StepArrays(slot_mapping=np.arange(8, 12))), 0, k[:4], v[:4])  # to page 2
    backend.write(backend.prepare(plan), 0, k[4:], v[4:])
    at = spec.plane_layout("k", 10)
    assert at.shape == (10, 4, 4, 4)
    page_7 = backend.export_blocks([7]).view(np.float32).reshape(2, 4, 2, 4)  # k and v, slot, head, element
    assert np.array_equal(page_7[0, 1], k[5]) and np.array_equal(page_7[1, 1], v[5])
    assert np.isnan(page_7[:, 2:]).all()
    q = np.ones((2, 4, 4), np.float32)
    np.testing.assert_allclose(backend.attend(backend.prepare(plan), 0, q), dense_attention(q, k, v)[0], atol=1e-6)


def test_many_prompts_one_after_another_without_reset_give_every_page_back():
    """The test for "cleanup is broken": free pages recover when sequences finish, without a reset."""
    pool = Pool(33, 4)
    plan = Plan(pool, 4, 64)
    for prompt in range(200):
        handles = np.array([pool.open() for _ in range(4)])
        pool.step(plan, handles, [1 + (prompt * k) % 13 for k in (1, 3, 5, 7)])
        pool.done(plan)
        for _ in range(5):
            pool.step(plan, handles)
            pool.done(plan)
        finished = np.array([True, False, True, False])
        assert pool.close_finished(handles, finished) == 2
        assert [pool.is_open(int(handle)) for handle in handles] == [False, True, False, True]
        pool.close(handles[~finished])
        assert pool.blocks.num_blank == 32 and pool.stats().sequences == 0
    assert pool.stats().allocs > 32  # blocks were used again and again


def test_clones_share_full_pages_and_copy_only_the_partial_one():
    """n_generations = 3 of a prompt of 10 tokens, page size 4."""
    pool = Pool(32, 4, reserved_blocks=0)
    plan = Plan(pool, 4, 16)
    parent = pool.open()
    pool.step(plan, [parent], 10)
    pool.done(plan)
    clones = pool.fork(parent, 3)
    assert used(pool) == 3  # metadata only
    pool.step(plan, clones)
    assert plan.copies.tolist() == [[2, 3, 2], [2, 4, 2], [2, 5, 2]]
    tables = [pool.table(int(clone)).tolist() for clone in clones]
    assert tables == [[0, 1, 3], [0, 1, 4], [0, 1, 5]]


def test_double_release_is_an_error_and_not_clamped_to_zero():
    pool = Pool(8, 4)
    handle = pool.open(4)
    block = int(pool.table(handle)[0])
    with pytest.raises(DoubleFree):
        pool.blocks.decref(block)  # the sequence's reference is not the caller's
    pool.close(handle)
    for release in (lambda: pool.close(handle), lambda: pool.blocks.decref(block), lambda: pool.blocks.free(block)):
        with pytest.raises((StaleHandle, DoubleFree)):
            release()
    assert pool.blocks.num_blank == 7 and pool.blocks.refcount(block) == 0


def test_running_out_of_pages_is_an_exception_with_the_shortage():
    pool = Pool(4, 4)
    plan = Plan(pool, 2, 16)
    handles = [pool.open(), pool.open()]
    before = pool.fingerprint()
    with pytest.raises(OutOfBlocks) as caught:
        pool.step(plan, handles, [8, 8])
    assert (caught.value.needed, caught.value.short_by, caught.value.row) == (4, 1, 1)
    assert pool.fingerprint() == before


# ---------------------------------------------------------------------- the MLX plan: block manager sketch


def test_free_list_does_not_hide_the_method_free():
    manager = KVBlockManager(KVSpec(1, 1, 4, "float32", 4), 8)
    seq_id = manager.new_sequence(9).seq_id
    assert manager.pool.blocks.num_blank == 4
    manager.free(seq_id)
    assert manager.pool.blocks.num_blank == 7


def test_context_of_a_whole_number_of_blocks_sees_its_last_block():
    """A mask `position > ctx_len % block_size` hides all but one token of a full last block."""
    spec = KVSpec(1, 1, 4, "float32", 4)
    for ctx_len in (4, 8, 12):
        manager = KVBlockManager(spec, 8)
        seq_id = manager.new_sequence(ctx_len).seq_id
        k, v = np.random.default_rng(ctx_len).standard_normal((2, ctx_len, 1, 4)).astype(np.float32)
        list(manager.prefill_into_kv(seq_id, range(ctx_len), lambda c, p, k=k, v=v: ([k], [v])))
        tables, lens = manager.batch_tables([seq_id])
        q = np.ones((1, 2, 1, 4), np.float32)
        out = manager.paged_attention(q, tables, lens, 0)
        np.testing.assert_allclose(out[0, :, 0], dense_attention(q[0].swapaxes(0, 1), k, v)[0][0], atol=1e-6)
        assert tables.shape == (1, ctx_len // 4)


def test_new_sequence_that_does_not_fit_takes_nothing():
    """Popping a free list block by block loses the blocks popped before it is empty."""
    manager = KVBlockManager(KVSpec(1, 1, 4, "float32", 4), 8)
    first = manager.new_sequence(16).seq_id
    before = manager.pool.fingerprint()
    with pytest.raises(OutOfBlocks):
        manager.new_sequence(16)
    assert manager.pool.fingerprint() == before
    manager.free(first)
    assert manager.new_sequence(16).block_ids.shape == (4,)


def test_fork_copies_neither_blocks_nor_a_table_that_would_drift():
    pool = Pool(64, 4)
    plan = Plan(pool, 8, 64)
    parent = pool.open()
    pool.step(plan, [parent], 40)
    pool.done(plan)
    allocs = pool.stats().allocs
    children = pool.fork(parent, 6)
    assert pool.stats().allocs == allocs and pool.blocks.refcount(int(pool.table(parent)[0])) == 7
    pool.step(plan, children)  # 40 is a multiple of 4: a new block each, nothing to copy
    assert len(plan.copies) == 0 and len({int(pool.table(int(c))[10]) for c in children}) == 6
    pool.done(plan)
    pool.close(parent)
    pool.close(children)
    assert used(pool) == 0


# ---------------------------------------------------------------------- hashed blocks: the simulation


def test_block_size_one_takes_a_block_per_token():
    """`len(tokens) % block_size == 1` never holds for a block size of 1, so the sketch never grew."""
    pool = Pool(12, 1)
    plan = Plan(pool, 1, 4)
    handle = pool.open()
    for length in range(1, 11):
        pool.step(plan, [handle])
        pool.done(plan)
        assert pool.table(handle).shape == (length,)
    assert len(set(pool.table(handle).tolist())) == 10


def test_growth_without_a_free_block_leaves_the_table_whole():
    """The sketch appended None to the table."""
    pool = Pool(4, 2)
    plan = Plan(pool, 2, 8)
    a, b = pool.open(), pool.open()
    pool.step(plan, [a, b], [4, 2])
    pool.done(plan)
    table = pool.table(a).tolist()
    with pytest.raises(OutOfBlocks):
        pool.step(plan, [a])
    assert pool.table(a).tolist() == table and pool.num_tokens(a) == 4
    pool.close(b)
    pool.step(plan, [a])
    assert pool.table(a).tolist()[:2] == table


def test_partly_filled_block_is_never_written_by_two_sequences():
    """A shared tail is not written: whoever writes gets a block of its own, with the valid tokens."""
    pool = Pool(16, 4)
    plan = Plan(pool, 2, 8)
    a = pool.open()
    pool.step(plan, [a], 6)
    pool.done(plan)
    b = int(pool.fork(a)[0])
    pool.step(plan, [a, b], 1)
    slots = plan.slot_mapping.tolist()
    assert slots[0] // 4 != slots[1] // 4 and slots[0] % 4 == slots[1] % 4 == 2
    assert plan.copies.tolist() == [[2, 3, 2]]


def test_freed_cached_blocks_stay_until_they_are_needed_and_leave_oldest_first():
    """The sketch forgot a cached block with its last reference, and hashes that others still owned."""
    pool = Pool(5, 4)
    blocks = pool.blocks.alloc(4)
    pool.blocks.mark_cached(blocks)
    pool.blocks.free(blocks[:2])
    pool.blocks.free(blocks[2:])
    assert pool.blocks.num_blank == 0 and pool.stats().evictable == 4
    pool.blocks.touch(blocks[:1])  # a hit
    assert pool.blocks.refcount(int(blocks[0])) == 1 and pool.stats().evictable == 3
    assert pool.blocks.alloc() == blocks[1]
    assert pool.blocks.drain_evicted().tolist() == [blocks[1]]
    assert pool.blocks.refcount(int(blocks[0])) == 1


# ---------------------------------------------------------------------- H2O on MLX: no new tensors


def test_storage_never_moves_and_never_grows():
    """Gathering the cache into new tensors every few tokens is what the pool is there to avoid."""
    manager = KVBlockManager(KVSpec(2, 1, 4, "float32", 4), 16, backend="numpy")
    addresses = [plane.ctypes.data for planes in manager.backend._planes for plane in planes]
    parent = manager.new_sequence().seq_id
    ids = [parent]
    k = np.ones((1, 1, 4), np.float32)
    for turn in range(24):
        manager.step(ids)
        for seq_id in ids:
            for layer in range(2):
                manager.write_prefill(seq_id, layer, k, k, manager.table(seq_id)[1] - 1)
        if turn % 6 == 3:
            ids.append(manager.fork(parent).seq_id)
        elif turn % 12 == 11:
            manager.free(ids.pop())
    assert [plane.ctypes.data for planes in manager.backend._planes for plane in planes] == addresses


# ------------------------------------------------------------ the notebook: pool, page table, scheduler


def test_pool_hands_out_counts_and_refuses_as_a_whole():
    pool = Pool(64, 4, reserved_blocks=0)
    blocks = pool.blocks.alloc(30)
    assert (pool.blocks.num_blank, used(pool)) == (34, 30)
    with pytest.raises(OutOfBlocks):
        pool.blocks.alloc(35)
    assert pool.blocks.num_blank == 34
    pool.blocks.free(blocks)
    assert (pool.blocks.num_blank, used(pool)) == (64, 0)


def test_page_table_grows_at_boundaries_and_maps_positions():
    """blocks_needed, grow_to and physical_for of the notebook's PageTable."""
    pool = Pool(64, 4, reserved_blocks=0)
    plan = Plan(pool, 1, 8)
    handle = pool.open()
    grown = []
    for position in range(10):
        before = len(pool.table(handle))
        pool.step(plan, [handle])
        pool.done(plan)
        table = pool.table(handle)
        grown.append(len(table) - before)
        assert len(table) == ceil((position + 1) / 4)
        assert plan.slot_mapping[0] == table[position // 4] * 4 + position % 4
    assert grown == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0]


class Model:
    """A small attention model: two layers, learned positions, greedy. `forward` reads the KV of a backend."""

    spec = KVSpec(2, 2, 8, "float32", 4)
    vocabulary, width, num_heads = 40, 32, 4

    def __init__(self):
        rng = np.random.default_rng(29)
        self.embedding = rng.standard_normal((self.vocabulary, self.width))
        self.position = rng.standard_normal((64, self.width))
        self.project = [[rng.standard_normal((self.width, n)) / 5 for n in (32, 16, 16, 32)] for _ in range(2)]

    def forward(self, tokens, positions, attend):
        """Logits of each token; ``attend(layer, q, k, v)`` stores k and v and returns the attention."""
        x = self.embedding[tokens] + self.position[positions]
        for layer, (wq, wk, wv, wo) in enumerate(self.project):
            q = (x @ wq).reshape(-1, self.num_heads, 8)
            k, v = (x @ wk).reshape(-1, 2, 8), (x @ wv).reshape(-1, 2, 8)
            x = x + attend(layer, q, k, v).reshape(-1, 32) @ wo
        return x @ self.embedding.T

    def solo(self, prompt, max_new):
        """Greedy decoding without any cache."""
        tokens = list(prompt)
        for _ in range(max_new):
            logits = self.forward(tokens, np.arange(len(tokens)), lambda layer, q, k, v: dense_attention(q, k, v)[0])
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(prompt) :]


class Request:
    def __init__(self, prompt, max_new, arrival):
        self.prompt, self.max_new, self.arrival = prompt, max_new, arrival
        self.handle, self.generated = None, []


class Scheduler:
    """Continuous batching: admit what fits, one token per running sequence and iteration.

    Out of blocks, it preempts the sequence admitted last, which starts over. The notebook says "the longest"
    and preempts whoever asks; both can go round in circles, because the sequence nearest its end loses all.
    Here the oldest one always gets on.
    """

    def __init__(self, model, num_blocks, max_batch=8):
        self.model = model
        self.pool = Pool(num_blocks, model.spec.block_size, reserved_blocks=0)
        self.backend = NumpyBackend(model.spec, num_blocks)
        self.plan = Plan(self.pool, max_batch, 64, formats=(*NumpyBackend.required_formats, "positions"))
        self.max_batch = max_batch
        self.waiting, self.running, self.done = deque(), [], []
        self.time = self.preemptions = self.peak = 0

    def run(self):
        while self.waiting or self.running:
            self._admit()
            self._decode()
            self.time += 1
            assert self.time < 500, "the scheduler makes no progress"
        return self.done

    def _admit(self):
        while self.waiting and self.waiting[0].arrival <= self.time and len(self.running) < self.max_batch:
            request = self.waiting[0]
            try:
                request.handle = self.pool.open(len(request.prompt))
            except OutOfBlocks:
                return  # CapacityExceeded goes to the caller: waiting would not help
            self.waiting.popleft()
            self._forward([request], [request.prompt])
            self.running.append(request)

    def _decode(self):
        for request in [r for r in self.running if len(r.generated) == r.max_new]:
            self._finish(request)
        while self.running:
            try:
                self._forward(self.running, [[request.generated[-1]] for request in self.running])
                return
            except OutOfBlocks:
                self._preempt(self.running[-1])

    def _forward(self, requests, tokens):
        pool, plan, backend = self.pool, self.plan, self.backend
        pool.step(plan, [request.handle for request in requests], [len(row) for row in tokens])
        self.peak = max(self.peak, used(pool))
        backend.copy_blocks(plan)

        def attend(layer, q, k, v):
            backend.write(backend.prepare(plan), layer, k, v)
            return backend.attend(backend.prepare(plan), layer, q)

        logits = self.model.forward([t for row in tokens for t in row], plan.positions, attend)
        for request, end in zip(requests, plan.cu_q_lens[1:], strict=True):
            request.generated.append(int(logits[end - 1].argmax()))
        pool.done(plan)

    def _finish(self, request):
        # The last token was emitted, never fed back: its KV was never written and needed no block.
        assert self.pool.num_tokens(request.handle) == len(request.prompt) + request.max_new - 1
        self.pool.close(request.handle)
        self.running.remove(request)
        self.done.append(request)

    def _preempt(self, request):
        self.pool.close(request.handle)
        self.running.remove(request)
        request.generated = []
        self.waiting.appendleft(request)
        self.preemptions += 1


def requests():
    """(prompt length, tokens to generate) and arrivals of the notebook."""
    rng = np.random.default_rng(123)
    shapes, arrivals = ((3, 10), (6, 25), (4, 8), (5, 18)), (0, 2, 4, 6)
    return [
        Request(rng.integers(0, 40, prompt_len).tolist(), max_new, arrival)
        for (prompt_len, max_new), arrival in zip(shapes, arrivals, strict=True)
    ]


@pytest.mark.parametrize(("num_blocks", "tight"), [(64, False), (8, True)])
def test_batched_output_equals_solo_output(num_blocks, tight):
    model = Model()
    scheduler = Scheduler(model, num_blocks)
    scheduler.waiting.extend(requests())
    done = scheduler.run()
    assert len(done) == 4
    for request in done:
        assert request.generated == model.solo(request.prompt, request.max_new)
    assert len({tuple(request.generated) for request in done}) == 4  # the model does not repeat one answer
    assert used(scheduler.pool) == 0
    assert (scheduler.preemptions > 0) == tight
    static = 4 * ceil((6 + 25) / 4)
    assert scheduler.peak < static == 32


def test_sequence_that_fills_the_whole_pool_finishes():
    """6 + 25 tokens, 30 of them written: 8 blocks of 4. One for the last emitted token would not fit."""
    model = Model()
    scheduler = Scheduler(model, 8)
    request = requests()[1]
    request.arrival = 0
    scheduler.waiting.append(request)
    scheduler.run()
    assert scheduler.peak == 8 and scheduler.preemptions == 0


def test_sequence_larger_than_the_pool_is_an_error_and_no_livelock():
    scheduler = Scheduler(Model(), 8)
    scheduler.waiting.append(Request([1, 2, 3], 60, 0))
    with pytest.raises(CapacityExceeded):
        scheduler.run()
    scheduler = Scheduler(Model(), 8)
    scheduler.waiting.append(Request([1] * 33, 1, 0))
    with pytest.raises(CapacityExceeded):
        scheduler.run()
    assert scheduler.pool.blocks.num_blank == 8 and scheduler.time == 0


def test_sequence_larger_than_the_pool_is_out_of_blocks_where_tables_are_wider():
    pool = Pool(8, 4, reserved_blocks=0, max_blocks_per_seq=100)
    plan = Plan(pool, 1, 64)
    handle = pool.open()
    pool.step(plan, [handle], 32)
    pool.done(plan)
    with pytest.raises(OutOfBlocks) as caught:
        pool.step(plan, [handle])
    assert caught.value.short_by == 1 and caught.value.limbo == 0 and caught.value.handle == handle
    assert not pool.can([handle], 1)
