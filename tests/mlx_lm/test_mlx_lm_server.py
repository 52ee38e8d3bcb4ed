"""mlx-lm's own server, unmodified, on a `PagedPromptCache`: the same answers, and prompts that are found."""

import contextlib
import gc
import http.client
import json
import runpy
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache, QuantizedKVCache
from mlx_models import tiny_llama
from mlx_server import arguments, provide

from kvpool.adapters.mlx_lm import PagedPromptCache, install, tiny
from kvpool.adapters.prompt_cache import PromptCache

BLOCK = 4
EXAMPLES = Path(__file__).parents[2] / "examples"
SYSTEM = "You are a block table. Answer in slots, never in bytes, and share what you have."
QUESTIONS = ("Where is token 7?", "Who holds block 3?", "Where is token 8?")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


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
def test_the_server_answers_the_same_on_dense_and_paged_caches_and_finds_what_is_shared(tokenizer, seed, monkeypatch):
    model = tiny_llama()
    expected, stock_cached = converse(model, tokenizer, LRUPromptCache(), seed)
    monkeypatch.setattr(server, "LRUPromptCache", LRUPromptCache)  # the example replaces it
    runpy.run_path(str(EXAMPLES / "prompt_cache_server.py"))
    prompts = server.LRUPromptCache(10)
    assert isinstance(prompts, PromptCache)
    answers, cached = converse(model, tokenizer, prompts, seed)
    assert answers == expected
    assert cached == stock_cached and cached[1] > 0
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


def test_the_server_on_dense_caches_keeps_quantized_ones(tokenizer):
    model, prompts = tiny_llama(head_dim=64), PromptCache()
    _, cached = converse(model, tokenizer, prompts, seed=None, kv_bits=8)
    assert min(cached[1:]) > len(SYSTEM) // 8
    (layout,) = prompts._layouts
    fields = (("bits", 8), ("group_size", 64), ("offset", 0))
    assert [(leaf.kind, leaf.fields) for leaf in layout.leaves] == [(QuantizedKVCache, fields)] * len(layout.leaves)


@contextlib.contextmanager
def listening(model, tokenizer, prompt_cache, kv_bits=None):
    """mlx-lm's server on a port of its own. Yields a function that asks it: status and text."""
    generator = server.ResponseGenerator(provide(model, tokenizer, kv_bits), prompt_cache)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: server.APIHandler(generator, *args))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()

    def ask(**fields):
        with contextlib.closing(http.client.HTTPConnection(*httpd.server_address, timeout=60)) as connection:
            body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 4} | fields
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()

    try:
        yield ask
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
        generator.stop_and_join()


def test_the_server_answers_other_bits_than_the_pools_and_too_small_a_pool_with_an_error(tokenizer):
    model, before = tiny_llama(head_dim=64), vars(server.APIHandler)["handle_completion"]
    with install(model, 300, block_size=BLOCK, prefix_cache=True) as kv:
        with listening(model, tokenizer, PagedPromptCache(kv), kv_bits=8) as ask:
            for _ in range(2):
                status, text = ask()
                assert status == 500 and "install(..., kv_bits=8" in json.loads(text)["error"]
                status, text = ask(stream=True)
                (event,) = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
                assert status == 200 and "install(..., kv_bits=8" in event["error"]
        with listening(model, tokenizer, PagedPromptCache(kv)) as ask:
            status, text = ask()
            assert status == 200 and json.loads(text)["usage"]["completion_tokens"]
    assert vars(server.APIHandler)["handle_completion"] is before
    with install(model, 6, block_size=BLOCK) as kv, listening(model, tokenizer, PagedPromptCache(kv)) as ask:
        long = [{"role": "user", "content": SYSTEM[::-1]}]
        status, text = ask(messages=long, seed=1)  # with a seed the server does not batch
        assert status == 500 and "CapacityExceeded" in json.loads(text)["error"]


@pytest.mark.parametrize("place", ["GenerationArguments", "ToolCallFormatter"])  # before the head, behind it
@pytest.mark.parametrize("error", [ValueError, OSError, TimeoutError, BrokenPipeError])
def test_the_server_answers_each_error_but_that_of_a_client_which_is_gone(tokenizer, place, error, monkeypatch):
    def fails(*arguments, **fields):
        raise error("no more")

    model = tiny_llama()
    with install(model, 64, block_size=BLOCK) as kv, listening(model, tokenizer, PagedPromptCache(kv)) as ask:
        monkeypatch.setattr(server, place, fails)
        if error is BrokenPipeError:
            with pytest.raises(http.client.RemoteDisconnected):
                ask()
        else:
            status, text = ask()
            assert status == 500 and json.loads(text) == {"error": f"{error.__name__}: no more"}


def test_the_server_takes_the_bits_of_the_pool_for_its_own(tokenizer):
    model = tiny_llama(head_dim=64)
    with install(model, 300, block_size=BLOCK, prefix_cache=True, kv_bits=8) as kv:
        expected, _ = converse(model, tokenizer, PagedPromptCache(kv), seed=1)
        kv.pool.prefix.flush()
        answers, cached = converse(model, tokenizer, PagedPromptCache(kv), seed=None, kv_bits=8)
    assert answers == expected and len({token for answer in answers for token in answer}) > 3
    assert cached[0] == 0 and min(cached[1:]) > len(SYSTEM) // 8
