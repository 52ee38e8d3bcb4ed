"""mlx-lm's own server, unmodified, on a `PagedPromptCache`: the same answers, and prompts that are found."""

import gc
import runpy
from pathlib import Path

import pytest
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache, QuantizedKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_models import VOCAB, tiny_llama
from mlx_server import arguments, provide

from kvpool.adapters.mlx_lm import PagedPromptCache, install
from kvpool.adapters.prompt_cache import PromptCache

BLOCK = 4
EXAMPLES = Path(__file__).parents[2] / "examples"
SYSTEM = "You are a block table. Answer in slots, never in bytes, and share what you have."
QUESTIONS = ("Where is token 7?", "Who holds block 3?", "Where is token 8?")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - 20, initial_alphabet=alphabet, show_progress=False)
    plain.train_from_iterator([SYSTEM, *QUESTIONS], trainer)
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=TEMPLATE))


def converse(model, tokenizer, prompt_cache, seed, kv_bits=None):
    """Ask every question in a chat of its own; returns the answers and how many prompt tokens were cached."""
    generator = server.ResponseGenerator(provide(model, tokenizer, kv_bits), prompt_cache)
    answers, cached = [], []
    try:
        for question in QUESTIONS:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            request = server.CompletionRequest("chat", "", messages, None, None)
            context, responses = generator.generate(request, arguments(seed))
            answers.append([response.token for response in responses])
            cached.append(context.prompt_cache_count)
    finally:
        generator.stop_and_join()
    return answers, cached


@pytest.mark.parametrize("seed", [None, 1], ids=["batched", "one by one"])
def test_the_server_on_dense_caches_answers_the_same_and_finds_as_much(tokenizer, seed, monkeypatch):
    model = tiny_llama()
    expected, stock_cached = converse(model, tokenizer, LRUPromptCache(), seed)
    monkeypatch.setattr(server, "LRUPromptCache", LRUPromptCache)  # the example replaces it
    runpy.run_path(str(EXAMPLES / "prompt_cache_server.py"))
    prompts = server.LRUPromptCache(10)
    assert isinstance(prompts, PromptCache)
    answers, cached = converse(model, tokenizer, prompts, seed)
    assert answers == expected
    assert cached == stock_cached and cached[1] > 0


def test_the_server_on_dense_caches_keeps_quantized_ones(tokenizer):
    model, prompts = tiny_llama(head_dim=64), PromptCache()
    _, cached = converse(model, tokenizer, prompts, seed=None, kv_bits=8)
    assert min(cached[1:]) > len(SYSTEM) // 8
    caches = next(iter(prompts._shelves)).leaves
    assert [(leaf.kind, leaf.arguments) for leaf in caches] == [(QuantizedKVCache, (64, 8))] * len(caches)


@pytest.mark.parametrize("seed", [None, 1], ids=["batched", "one by one"])
def test_the_server_answers_the_same_and_finds_what_prompts_share(tokenizer, seed):
    model = tiny_llama()
    expected, stock_cached = converse(model, tokenizer, LRUPromptCache(), seed)
    with install(model, 300, block_size=BLOCK, prefix_cache=True) as kv:
        answers, cached = converse(model, tokenizer, PagedPromptCache(kv), seed)
    assert answers == expected
    assert len({token for answer in answers for token in answer}) > 3
    assert cached[0] == stock_cached[0] == 0
    assert all(found > len(SYSTEM) // 8 and found % BLOCK == 0 for found in cached[1:])
    assert all(ours > stock - BLOCK for ours, stock in zip(cached, stock_cached, strict=True))
    gc.collect()
    assert kv.summary().blocks_used == 0
    assert kv.hit_tokens == sum(cached)
    kv.pool.check()


def test_the_server_takes_the_bits_of_the_pool_for_its_own(tokenizer):
    """An error in the middle of a request would close its connection without an answer."""
    model = tiny_llama(head_dim=64)
    with install(model, 300, block_size=BLOCK, prefix_cache=True, kv_bits=8) as kv:
        expected, _ = converse(model, tokenizer, PagedPromptCache(kv), seed=1)
        kv.pool.prefix.flush()
        answers, cached = converse(model, tokenizer, PagedPromptCache(kv), seed=None, kv_bits=8)
    assert answers == expected and len({token for answer in answers for token in answer}) > 3
    assert cached[0] == 0 and min(cached[1:]) > len(SYSTEM) // 8
