"""What went wrong in other prefix caches, one test per kind of defect; the public report is named in each."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from prefixes import cache, compute, serve

from kvpool.errors import CapacityExceeded, OutOfBlocks, StaleHandle
from kvpool.namespaces import namespace

A, B, C = ([n] * 4 for n in (1, 2, 3))


# ---- used after it was freed, evicted while in use ---------------------------------------------------------


def test_blocks_of_a_closed_request_wait_for_the_step_in_flight(make_pool, make_plan):
    """vllm PR45357, vllm-ascend#14055: freed on the output of one step while the next one still writes."""
    pool = make_pool(4, prefix_cache=True)  # three blocks
    handle, plan = serve(make_plan, pool, A), make_plan(pool)
    pool.step(plan, [handle], 1)
    pool.close(handle)
    assert pool.evict(16) == 0
    with pytest.raises(OutOfBlocks):
        pool.alloc(2)
    pool.done(plan)
    assert pool.alloc(3).tolist() == [2, 3, 1]  # the cached one last


def test_late_output_of_a_preempted_request_is_refused(make_pool, make_plan, refused):
    """vllm PR49620: late output was applied to the request that came after."""
    pool = make_pool(prefix_cache=True, max_seqs=1)
    old = pool.open(A)
    compute(make_plan, pool, old, 4)
    pool.close(old)
    new = pool.open(B)
    compute(make_plan, pool, new, 4)
    with refused(pool, StaleHandle, "commit", old):
        pool.commit(old, A)
    assert pool.match(A + C) == 0


def test_pin_keeps_a_prefix_while_somebody_copies_it_out(make_pool, make_plan):
    """TensorRT-LLM#12540, #12542: sequence removed or evicted while an asynchronous sender read it."""
    pool = make_pool(4, prefix_cache=True)
    cache(make_plan, pool, A + B)
    pin = pool.pin(A + B)
    with pytest.raises(OutOfBlocks):
        pool.open([9] * 8)
    assert pool.table(pin).tolist() == [1, 2]
    pool.unpin(pin)
    assert pool.num_tokens(pool.open([9] * 8)) == 0


def test_retracted_request_leaves_its_committed_chunk_in_one_place(make_pool, make_plan):
    """sglang#38319: a prefill chunk was in the tree, and its pages were freed."""
    pool = make_pool(prefix_cache=True)
    handle = pool.open(A + B + C)
    compute(make_plan, pool, handle, 6)
    pool.commit(handle, A + B[:2])
    pool.close(handle)
    stats = pool.stats()
    assert (stats.evictable, stats.used, stats.free) == (1, 0, 14)
    assert pool.match(A + B) == 4
    assert 1 not in pool.alloc(14).tolist()


def test_commit_takes_and_evicts_nothing(make_pool, make_plan):
    """TensorRT-LLM#17926: commit, alloc, evict: the request being committed lost its own blocks."""
    pool = make_pool(4, prefix_cache=True)
    handle = pool.open(A + B + C)
    compute(make_plan, pool, handle, 12)
    before = pool.stats()
    pool.commit(handle, A + B + C)
    assert pool.stats() == before
    assert pool.table(handle).tolist() == [1, 2, 3]


def test_orphan_of_an_evicted_parent_is_never_found(make_pool, make_plan):
    """TensorRT-LLM PR15018: orphaned blocks came back with stale content."""
    pool = make_pool(prefix_cache=True)
    handle = serve(make_plan, pool, A + B)
    pool.incref(2)
    pool.close(handle)
    pool.evict(1)
    cache(make_plan, pool, A + C)
    assert pool.match(A + B + C) == 4


def test_chain_that_was_evicted_joins_no_other(make_pool, make_plan):
    """TensorRT-LLM PR16037: stale links joined finished chains."""
    pool = make_pool(8, prefix_cache=True)
    for turn in range(20):
        prompt = [turn] * 4 + [turn + 1] * 4 + [turn % 2] * 4
        cache(make_plan, pool, prompt)
        assert pool.match([*prompt, 0]) == 12
        for other in range(20):
            wrong = [turn] * 4 + [turn + 1] * 4 + [other + 2] * 4 + [0]
            assert pool.match(wrong) == 8


@pytest.mark.parametrize(("cached", "blank"), list(itertools.product(range(4), range(4))))
def test_open_fits_exactly_when_its_blocks_are_there(make_pool, make_plan, cached, blank):
    """vllm PR10507, PR11565, PR6849: hits in the LRU were counted as blocks to take, or taken before they were held."""
    for hits, need in itertools.product(range(cached + 1), range(1, 8)):
        pool = make_pool(cached + blank + 9, 4, prefix_cache=True, watermark=0)
        prompt = [t for block in range(cached) for t in [block + 1] * 4]
        cache(make_plan, pool, prompt)
        pool.alloc(pool.num_free - blank)
        request = prompt[: 4 * hits] + [99] * (4 * need)
        if need <= blank + cached - hits:
            handle = pool.open(request)
            table = pool.table(handle).tolist()
            assert pool.num_tokens(handle) == 4 * hits and len(set(table)) == len(table) == hits + need
        else:
            with pytest.raises(OutOfBlocks) as caught:
                pool.open(request)
            assert caught.value.short_by == need - (blank + cached - hits)
            assert pool.match([*prompt, 0]) == 4 * cached
        pool.check()


def test_hit_cannot_be_evicted_between_lookup_and_use(make_pool, make_plan):
    """vllm#39702, #54914: looked up, evicted by somebody else, then used."""
    pool = make_pool(4, prefix_cache=True)
    cache(make_plan, pool, A)
    handle = pool.open(A + B)
    assert pool.evict(16) == 0
    with pytest.raises(OutOfBlocks):
        pool.open([9] * 12)
    assert pool.table(handle).tolist() == [1, 2] and pool.num_tokens(handle) == 4


def test_evicted_block_leaves_the_index_and_its_mark(make_pool, make_plan):
    """vllm PR4761, PR5364, kvcached#362: a recycled block kept its old hash or its computed bit."""
    pool = make_pool(3, prefix_cache=True)  # two blocks
    for turn in range(10):
        cache(make_plan, pool, [turn] * 4)
        handle = pool.open()
        compute(make_plan, pool, handle, 8)  # takes both
        assert [pool.match([n] * 5) for n in range(turn + 1)] == [0] * (turn + 1)
        pool.close(handle)
        assert pool.stats().evictable == pool.prefix_stats().nodes == 0


def test_output_is_the_same_under_eviction_pressure(make_pool, make_plan):
    """vllm#37076: results changed under pressure. Here: whatever is found was written for exactly this prefix."""
    rng = random.Random(5)
    pool = make_pool(7, 2, prefix_cache=True)
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(300):
        prompt = tuple(rng.choice((1, 2)) for _ in range(rng.randrange(2, 12)))
        handle = pool.open(list(prompt))
        cached, table = pool.num_tokens(handle), pool.table(handle).tolist()
        for i, block in enumerate(table[: cached // 2]):
            assert content[block] == prompt[: 2 * i + 2]
        compute(make_plan, pool, handle, len(prompt) - cached)
        pool.commit(handle, list(prompt[cached:]))
        for i in range(cached // 2, len(prompt) // 2):
            content[table[i]] = prompt[: 2 * i + 2]
        pool.close(handle)
    assert pool.prefix_stats().evicted > 100 and pool.prefix_stats().hit_tokens > 100


# ---- one too many, one too few -----------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_fully_cached_prompt_leaves_one_token_and_keeps_its_chain(make_pool, make_plan, block_size):
    """vllm PR11186, PR12003: the whole prompt was cached, computing its last token again broke the chain."""
    pool = make_pool(16, block_size, prefix_cache=True)
    prompt = list(range(3 * block_size))
    cache(make_plan, pool, prompt)
    handle = pool.open(prompt)
    assert pool.num_tokens(handle) == 2 * block_size
    compute(make_plan, pool, handle, block_size)
    pool.commit(handle, prompt[2 * block_size :])  # a duplicate of the third block
    compute(make_plan, pool, handle, block_size)
    pool.commit(handle, [7] * block_size)
    assert pool.match([*prompt, *[7] * block_size, 8]) == 4 * block_size


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_length_of_the_cached_part_is_not_cut_twice(make_pool, make_plan, length, cached):
    """vllm PR40684: the last token was subtracted by two layers, 17 tokens became 0."""
    pool = make_pool(8, 16, prefix_cache=True)
    cache(make_plan, pool, list(range(48)))
    assert pool.match(list(range(length))) == cached


def test_length_of_the_cached_part_has_one_source(make_pool, make_plan):
    """vllm#52617: the scheduler said 894 tokens, the worker loaded 895."""
    pool = make_pool(64, 4, prefix_cache=True)
    cache(make_plan, pool, list(range(40)))
    for length in range(1, 50):
        prompt = list(range(length))
        promised, before = pool.match(prompt), pool.prefix_stats().hit_tokens
        handle = pool.open(prompt)
        assert pool.num_tokens(handle) == promised == pool.prefix_stats().hit_tokens - before
        pool.close(handle)


def test_lookahead_at_a_block_boundary_loses_no_data_block(make_pool, make_plan):
    """vllm#43996: one block more for drafts at a boundary; trimming dropped the first data block instead."""
    pool = make_pool(prefix_cache=True)
    handle, plan = serve(make_plan, pool, A + B), make_plan(pool)
    pool.reserve(plan, [handle], 3)
    assert pool.table(handle).tolist() == [1, 2, 3]
    pool.done(plan)
    pool.truncate(handle, 8)
    assert pool.table(handle).tolist() == [1, 2]
    assert pool.match(A + B + C) == 8


def test_prompt_up_to_the_limit_fits_and_one_token_more_is_refused(make_pool, make_plan, refused):
    """vllm PR10730: allocated past the longest sequence."""
    pool = make_pool(prefix_cache=True, max_blocks_per_seq=2)
    cache(make_plan, pool, A + B)
    assert pool.num_tokens(pool.open(A + B)) == 4
    with refused(pool, CapacityExceeded, "open"):
        pool.open([*A, *B, 3])


def test_slots_of_the_rest_of_a_prompt_are_as_many_as_its_tokens(make_pool, make_plan):
    """LMCache#2327: slots and tokens differed in number."""
    pool, stats = make_pool(64, 4, prefix_cache=True), []
    prompt = list(range(30))
    cache(make_plan, pool, prompt)
    for length in range(1, 31):
        handle, plan = pool.open(prompt[:length]), make_plan(pool, formats=("slot_mapping", "positions"))
        cached, blocks = pool.num_tokens(handle), pool.stats().allocs
        pool.step(plan, [handle], length - cached)
        assert plan.positions.tolist() == list(range(cached, length)) and len(plan.slot_mapping) == length - cached
        stats.append(pool.stats().allocs - blocks)
        pool.done(plan)
        pool.close(handle)
    assert set(stats) == {0}  # vllm PR50531: open has taken what the prompt needs, by the same formula


# ---- keys, collisions, isolation ---------------------------------------------------------------------------


def test_event_keys_do_not_depend_on_the_hash_seed_of_python():
    """CVE-2025-25183: keys built on Python's hash(), where hash(None) is a constant."""
    program = (
        "from kvpool.testing.model import ModelPlan as Plan, ModelPool as Pool\n"
        if os.environ.get("KVPOOL_CORE") == "model"
        else "from kvpool import Plan, Pool\n"
    ) + (
        "pool = Pool(8, 2, prefix_cache=True, events=8); plan = Plan(pool, 1, 4)\n"
        "handle = pool.open([1, 2, 3, 4], b'x'); pool.step(plan, [handle], 4); pool.done(plan)\n"
        "pool.commit(handle, [1, 2, 3, 4]); print([event[1].hex() for event in pool.drain_events()])\n"
    )
    seen = set()
    for seed in ("0", "7"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        seen.add(
            subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
        )
    assert len(seen) == 1 and len(seen.pop()) > 64


def test_tenants_with_one_salt_hit_and_with_two_do_not(make_pool, make_plan):
    """CVE-2025-46570: the time to the first token told one tenant what another had asked."""
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, namespace(salt="mine"))
    assert pool.match(A + B, namespace(salt="mine")) == 4
    assert pool.match(A + B, namespace(salt="yours")) == pool.match(A + B) == 0


def test_algebraic_neighbours_of_a_block_miss(make_pool, make_plan):
    """Megatron-LM PR4158: with a polynomial hash, one token + 31 and the next - 1 collided."""
    pool = make_pool(prefix_cache=True)
    block = [1000, 2000, 3000, 4000]
    cache(make_plan, pool, block)
    for j, factor in itertools.product(range(3), (2, 31, 33, 37, 131, 257, 1000)):
        for sign in (1, -1):
            near = list(block)
            near[j] += sign * factor if near[j] + sign * factor >= 0 else factor
            near[j + 1] -= sign
            assert pool.match([*near, 0]) == 0
    for order in itertools.permutations(block):
        assert pool.match([*order, 0]) == (4 if list(order) == block else 0)


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_colliding_hash_is_no_proof(make_pool, make_plan, bits):
    """openvino.genai#3722, vllm PR54727: equal hashes were taken for equal tokens."""
    pool = make_pool(64, 4, prefix_cache=True, _hash_bits=bits)
    prompts = [[i] * 4 + [i + 1] * 4 for i in range(20)]
    tables = [pool.table(serve(make_plan, pool, prompt)).tolist() for prompt in prompts]
    for i, prompt in enumerate(prompts):
        hits = pool.table(pool.pin(prompt)).tolist()
        assert hits == tables[i][: len(hits)]
        assert pool.match([i] * 4 + [i + 2] * 4 + [0]) in (0, 4)
        assert pool.match([i + 100] * 5) == 0


def test_adapter_and_salt_of_one_name_are_two(make_pool, make_plan):
    """vllm#44701, sglang#24638: untagged in one tuple; the base model hit blocks of an adapter."""
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, namespace(lora="a"))
    assert pool.match(A + B, namespace(lora="a")) == 4
    assert pool.match(A + B, namespace(salt="a")) == pool.match(A + B) == 0


def test_adapter_with_new_weights_under_an_old_name_misses(make_pool, make_plan):
    """vllm#30931: the name of an adapter was its key."""
    old, new = (namespace(lora=hashlib.sha256(weights).digest()) for weights in (b"old", b"new"))
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, old)
    assert (pool.match(A + B, old), pool.match(A + B, new)) == (4, 0)


def test_model_and_format_are_in_the_key(make_pool, make_plan):
    """sglang#33268, #24758: the key lacked the weights' identity and the KV dtype."""
    spaces = [namespace(model=m, kv_dtype=d) for m in ("one", "two") for d in ("float16", "int8")]
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, spaces[0])
    assert [pool.match(A + B, space) for space in spaces] == [4, 0, 0, 0]


def test_image_of_another_shape_with_the_same_bytes_misses(make_pool, make_plan):
    """GHSA-c65p-x677-fgj6: bytes without shape; 30 x 150 was 150 x 30. The digest is the caller's, of both."""
    pixels = np.zeros((30, 150), np.uint8)

    def digest(image):
        return hashlib.sha256(repr((image.shape, image.dtype.str)).encode() + image.tobytes()).digest()

    one, other = (namespace(multimodal=[(0, digest(image))]) for image in (pixels, pixels.T.copy()))
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, one)
    assert (pool.match(A + B, one), pool.match(A + B, other)) == (4, 0)


def test_digests_are_compared_whole(make_pool, make_plan):
    """LMCache#3301: image hashes were cut to 16 bits."""
    digest = hashlib.sha256(b"image").digest()
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, namespace(multimodal=[(0, digest)]))
    for at in range(32):
        near = digest[:at] + bytes([digest[at] ^ 1]) + digest[at + 1 :]
        assert pool.match(A + B, namespace(multimodal=[(0, near)])) == 0
    assert pool.match(A + B, namespace(multimodal=[(0, digest)])) == 4


def test_equal_placeholder_tokens_of_two_images_miss(make_pool, make_plan):
    """vllm PR49975, ATOM PR1358: placeholder ids are all equal, only the digest tells the images apart."""
    placeholders = [32000] * 12
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, placeholders, namespace(multimodal=[(0, b"cat")]))
    assert pool.match(placeholders, namespace(multimodal=[(0, b"cat")])) == 8
    assert pool.match(placeholders, namespace(multimodal=[(0, b"dog")])) == 0
    assert pool.match(placeholders) == 0


def test_fields_that_join_to_one_text_are_told_apart(make_pool, make_plan):
    """confidential-model-router PR386: ("org_1", "2345") and ("org_12345", "")."""
    one, other = namespace(salt="org_1", lora="2345"), namespace(salt="org_12345", lora="")
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, one)
    assert (pool.match(A + B, one), pool.match(A + B, other)) == (4, 0)
