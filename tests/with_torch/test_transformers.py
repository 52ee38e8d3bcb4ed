"""transformers' continuous batching on a kvpool pool: tokens equal `generate`, nothing leaks, and steps cost less."""

import contextlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from embedding_page import examples
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as stock_cache
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    CachePool,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from kvpool.adapters.transformers import PoolAllocator, install
from kvpool.errors import OutOfBlocks

VOCAB, NEW, WINDOW = 320, 12, 12
LENGTHS = (3, 17, 12, 9, 40, 5, 13, 21)  # each second one with a common beginning; shorter than the window, and longer
S, F = "sliding_attention", "full_attention"
MODELS = {  # 5 windows and 2 full layers share no divisor; gpt-oss has as many of each; Mistral has windows alone
    "llama": (LlamaConfig, {"num_hidden_layers": 2, "sliding_window": None}),
    "gemma3": (Gemma3TextConfig, {"num_hidden_layers": 7, "layer_types": [S, S, F, S, S, F, S]}),
    "gpt_oss": (
        GptOssConfig,
        {"num_hidden_layers": 4, "layer_types": [S, F, S, F], "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral": (MistralConfig, {"num_hidden_layers": 2}),
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
of_model = partial(pytest.mark.parametrize, "model", indirect=True)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A model whose greedy output wanders: a wrong block shows."""
    torch.manual_seed(0)
    kind, layers = MODELS[request.param]
    model = AutoModelForCausalLM.from_config(kind(**SIZES | layers)).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.25)
    return model


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    shared = rng.integers(1, VOCAB, 20).tolist()
    return [shared * (k % 2) + rng.integers(1, VOCAB, n).tolist() for k, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """What each prompt gives alone, on transformers' own caches."""
    settings = generation()
    with torch.no_grad():
        tokens = [model.generate(torch.tensor([p]), generation_config=settings)[0, len(p) :].tolist() for p in prompts]
    assert len({token for row in tokens for token in row}) > 50
    return tokens


@pytest.fixture
def pools(monkeypatch):
    """The allocators that have a pool, of those that transformers makes during a test."""
    made = []
    original = PoolAllocator.lead

    def lead(self, members):
        original(self, members)
        made.append(self)

    monkeypatch.setattr(PoolAllocator, "lead", lead)
    return made


def generation(**options):
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": VOCAB + 1, "pad_token_id": 0}
    return GenerationConfig(**(settings | options))


def batching(**options):
    settings = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64, "use_async_batching": False}
    return ContinuousBatchingConfig(**(settings | {"use_cuda_graph": False} | options))


def generate(model, prompts, settings=None, **options):
    """Tokens per request in the order of the prompts, children of a request behind it."""
    outputs = model.generate_batch(
        prompts, generation_config=settings or generation(), continuous_batching_config=batching(**options)
    )
    assert all(output.error is None for output in outputs.values())

    def order(name):
        request, _, child = name.partition("__child#")
        return int(request.split("_")[-1]), int(child or -1)

    return [outputs[name].generated_tokens for name in sorted(outputs, key=order)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 4, "num_blocks": 256, "max_batch_tokens": 16},  # prompts in chunks
        {"page_size": 5, "num_blocks": 200},
        {"num_blocks": 9},  # two or three requests at a time
        {"allow_block_sharing": False},
    ],
    ids=str,
)
def test_continuous_batching_equals_generate_and_leaks_nothing(model, prompts, expected, pools, options):
    with install():
        assert generate(model, prompts, **options) == expected
    (allocator,) = pools
    assert allocator.blocks.stats().used == 0 < allocator.blocks.stats().peak_used and not allocator.handles
    allocator.blocks.check()


@of_model(["llama"])
def test_prompts_that_begin_alike_share_blocks(model, prompts, expected, pools):
    twice = prompts + prompts
    with install():
        assert generate(model, twice, max_batch_tokens=48) == expected + expected
    (allocator,) = pools
    assert allocator.blocks.prefix.stats().hit_tokens == 0  # counts opens; transformers pins what it has found
    assert allocator.blocks.stats().allocs < sum(-(-(len(p) + NEW) // 16) for p in twice)


def test_samples_of_one_prompt_are_forks_that_copy_on_write(model, prompts, expected, pools):
    with install():
        settings = generation(num_return_sequences=3, do_sample=True, top_k=1)
        tokens = generate(model, prompts[:3], settings, page_size=4, num_blocks=128)
    assert tokens == [row for row in expected[:3] for _ in range(3)]
    (allocator,) = pools
    stats = allocator.blocks.stats()
    assert stats.used == 0 < stats.cow_copies <= 6 * sum(member.columns for member in allocator.members)
    allocator.blocks.check()


@of_model(["gemma3", "gpt_oss", "mistral"])
def test_windows_hold_their_last_tokens_alone(model, prompts, pools):
    """The most blocks of a long answer are those of the full layers, and of the window with a page at either end."""
    with install():
        generate(model, [prompts[0]], generation(max_new_tokens=60), page_size=4)
    (allocator,) = pools
    entries = {"full": -(-(len(prompts[0]) + 60) // 4), "window": -(-WINDOW // 4) + 1}
    most = sum(entries[member.group.kind] * member.columns for member in allocator.members)
    assert allocator.blocks.stats().peak_used <= most
    assert {member.group.kind for member in allocator.members} >= {"window"}


def test_hooks_are_put_back_and_refuse_to_be_doubled(monkeypatch):
    prepare = ContinuousBatchingIOs.prepare_batch_tensors
    with contextlib.suppress(KeyError), install():  # and after an error
        assert stock_cache.ATTN_TYPE_TO_ALLOCATOR[FULL_ATTENTION] is PoolAllocator
        with pytest.raises(RuntimeError, match="the allocator is PoolAllocator"), install():
            pass
        assert stock_cache.ATTN_TYPE_TO_ALLOCATOR[FULL_ATTENTION] is PoolAllocator
        raise KeyError
    assert stock_cache.ATTN_TYPE_TO_ALLOCATOR[FULL_ATTENTION] is FullAttentionCacheAllocator
    assert stock_cache.ATTN_TYPE_TO_ALLOCATOR[SLIDING_ATTENTION] is SlidingAttentionCacheAllocator
    assert ContinuousBatchingIOs.prepare_batch_tensors is prepare


@pytest.mark.parametrize("renamed", [True, False])
def test_transformers_that_calls_its_allocators_in_another_way_is_refused(monkeypatch, renamed):
    if renamed:
        for owner in FullAttentionCacheAllocator.__mro__:
            if "get_seqlen_k" in vars(owner):
                monkeypatch.delattr(owner, "get_seqlen_k")
    else:
        monkeypatch.setattr(FullAttentionCacheAllocator, "get_seqlen_k", lambda self, past_length: past_length)
    with pytest.raises(RuntimeError, match=r"^\[install\] transformers 5[\d.]+ has changed get_seqlen_k$"), install():
        pass
    assert stock_cache.ATTN_TYPE_TO_ALLOCATOR[FULL_ATTENTION] is FullAttentionCacheAllocator


def allocator_of(kind, num_blocks, page=16, kinds=1):
    """An allocator as `PagedAttentionCache` makes it, for one layer with small heads."""
    config = SimpleNamespace(head_dim=8, hidden_size=8, num_attention_heads=1)
    allocator = kind(0, config, 1, torch.float32, page, [0], True)
    sector = allocator.bytes_per_block
    memory = torch.zeros((num_blocks + 2) * sector, dtype=torch.uint8)
    allocator.register_cache_tensor(sector, num_blocks * sector, memory, CachePool(num_blocks, kinds))
    return allocator


def test_indices_equal_those_that_transformers_works_out():
    rng = np.random.default_rng(1)
    ours, stock = allocator_of(PoolAllocator, 200, page=7), allocator_of(FullAttentionCacheAllocator, 200, page=7)
    lengths = dict.fromkeys("abcde", 0)
    for _ in range(40):
        counts = {name: int(rng.integers(1, 9)) for name in lengths if rng.random() < 0.7}
        if not counts:
            continue
        for name, count in counts.items():
            ours.allocate_cache_to_request(name, lengths[name], count)
            stock.block_table[name] = ours.blocks.table(ours.handles[name]).tolist()
        ((write, read),) = ours.indices([ours.handles[name] for name in counts], list(counts.values()))
        wanted_write, wanted_read = [], []
        for name, count in counts.items():
            wanted_write += stock.get_write_indices(name, lengths[name], count)
            wanted_read += stock.get_read_indices(name, lengths[name], count)
            lengths[name] += count
        assert write.tolist() == [wanted_write] and read.tolist() == [wanted_read]
        table, wanted_table = torch.full((2, 64), -1)
        name = next(iter(counts))
        ours.fill_block_table(name, 0, 0, table)
        stock.fill_block_table(name, 0, 0, wanted_table)
        assert table.tolist() == wanted_table.tolist()


def test_tables_are_read_and_a_request_ends_by_free_blocks_alone():
    ours = allocator_of(PoolAllocator, 8)
    ours.allocate_cache_to_request("a", 0, 40)
    ours.allocate_cache_to_request("b", 0, 16)
    tables = {name: ours.blocks.table(handle).tolist() for name, handle in ours.handles.items()}
    assert dict(ours.block_table) == tables and ours.block_table.get("c", []) == []
    for change in ("pop", "clear", "__delitem__", "__setitem__"):
        assert not hasattr(ours.block_table, change), "it would lose the handle, and the blocks for good"
    ours.free_all_requests()
    assert not ours.block_table and ours.blocks.stats().used == 0


def test_request_that_does_not_fit_changes_nothing():
    ours = allocator_of(PoolAllocator, 4)
    ours.allocate_cache_to_request("a", 0, 40)
    before = ours.blocks.fingerprint()
    assert ours.needs_new_sectors("b", 0, 17) == 1 and ours.needs_new_sectors("a", 40, 25) == 1
    assert ours.needs_new_sectors("b", 0, 16) == 0 and ours.needs_new_sectors("a", 40, 24) == 0
    with pytest.raises(OutOfBlocks):
        ours.allocate_cache_to_request("b", 0, 17)
    assert ours.blocks.fingerprint() == before and "b" not in ours.handles
    with pytest.raises(ValueError, match="3 tokens, the request has 0"):
        ours.fork_blocks("a", "c", 3)
    assert ours.blocks.fingerprint() == before and "c" not in ours.handles
    ours.free_blocks("never there")
    assert ours.blocks.fingerprint() == before


def test_example_of_the_page_runs(capsys):
    (code,) = examples("torch")
    exec(code, {})
    assert "req_1" in capsys.readouterr().out


def test_indices_of_a_step_take_no_more_memory_with_more_blocks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "adapters"))
    from test_adapter_allocation import GROWTH_MAX, STAYS_MAX, measured

    peaks, length = [], 400
    for num_blocks in (256, 4096):
        allocator = allocator_of(PoolAllocator, num_blocks)
        for name in "abcd":
            allocator.allocate_cache_to_request(name, 0, length)
        handles = [allocator.handles[name] for name in "abcd"]
        allocator.indices(handles, [length] * 4)

        def step(allocator=allocator, handles=handles, lengths=(length,) * 4):
            allocator.blocks.truncate(handles, lengths)
            allocator.indices(handles, [1] * 4)

        peak, stays = measured(step)
        assert stays <= STAYS_MAX
        peaks.append(peak)
    assert peaks[1] - peaks[0] <= GROWTH_MAX
