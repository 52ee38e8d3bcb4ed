"""Six turns of a conversation with models whose layers differ: what a turn computes again, and its tokens.

The judge of the tokens is mlx-lm alone, with its own caches and the whole prompt. A turn computes what is new; of what
it has in common with the prompt before it computes few tokens again.
"""

import gc
from itertools import takewhile

import pytest
from mlx_families import model_of_file
from mlx_lm import server
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_models import solo_tokens
from mlx_server import arguments, provide
from tokenizers import AddedToken

from kvpool.adapters.mlx_lm import Engine, PagedPromptCache, install, tiny

TURNS = 6
MOST = 48  # tokens of the common prefix that a turn may compute again
ANSWER = 10
WHOLE = {"prefill_step_size": 1024}  # mlx-lm alone computes a prompt at once
THINKS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] <think>\n{% endif %}"
)
"""A template that opens a think block behind the last message, and has none in the history."""


@pytest.fixture(scope="module")
def tokenizer():
    plain = tiny.byte_tokenizer()
    plain.add_special_tokens({"additional_special_tokens": [AddedToken("<think>"), AddedToken("</think>")]})
    plain.chat_template = THINKS
    found = TokenizerWrapper(plain)
    assert found.has_thinking
    return found


def common(one, other):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def conversation(tokenizer, answer):
    """Hold a conversation. `answer` takes messages, returns the answer's tokens and the prompt tokens that it found.

    Yields what was computed again of what a prompt has in common with the one before.
    """
    messages, before = [{"role": "system", "content": "Count blocks, " * 5}], []
    for turn in range(TURNS):
        messages = [*messages, {"role": "user", "content": f"Turn {turn}: " + "who holds it? " * (1 + turn % 3)}]
        prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        tokens, found = answer(messages, prompt)
        yield common(prompt, before) - found
        before = prompt
        messages = [*messages, {"role": "assistant", "content": tokenizer.decode(tokens)}]


FAMILIES = ("qwen3_5", "gemma4_text", "gpt_oss", "nemotron_h")


@pytest.mark.parametrize("arch", FAMILIES)
def test_turns_of_the_engine_compute_what_is_new(tokenizer, arch):
    model = model_of_file(arch, len(tokenizer))
    engine = Engine(model, 400, tokenizer=tokenizer, prefill_chunk=64)

    def answer(messages, prompt):
        before = engine.scheduler.stats()
        done = engine.generate(messages, max_tokens=ANSWER, eos=())
        found, after = done.samples[0].output.num_cached, engine.scheduler.stats()
        assert after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens == (
            len(prompt) - found + ANSWER - 1
        )
        assert done.tokens.tolist() == solo_tokens(model, prompt, ANSWER, **WHOLE)
        return done.tokens.tolist(), found

    again = list(conversation(tokenizer, answer))
    assert max(again) <= MOST, again
    assert engine.kv.pool.stats().used == 0
    engine.scheduler.check()


def served(model, tokenizer, kv, seed):
    """Hold a conversation with mlx-lm's server. Return what turns computed again, and prompts with their answers."""
    generator = server.ResponseGenerator(provide(model, tokenizer), PagedPromptCache(kv))
    answers = []

    def answer(messages, prompt):
        request = server.CompletionRequest("chat", "", messages, None, None)
        context, responses = generator.generate(request, arguments(seed))
        answers.append((prompt, [response.token for response in responses]))
        assert context.prompt == prompt
        return answers[-1][1], context.prompt_cache_count

    try:
        return list(conversation(tokenizer, answer)), answers
    finally:
        generator.stop_and_join()


@pytest.mark.parametrize("seed", [None, 1], ids=["batched", "one by one"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_turns_of_the_server_of_mlx_lm_compute_what_is_new(tokenizer, arch, seed):
    model = model_of_file(arch, len(tokenizer))
    with install(model, 400, prefix_cache=True) as kv:
        again, answers = served(model, tokenizer, kv, seed)
    gc.collect()
    assert max(again) <= MOST, again
    for prompt, tokens in answers:
        assert tokens == solo_tokens(model, prompt, ANSWER, **WHOLE)[: len(tokens)]
    assert kv.summary().blocks_used == 0
    kv.pool.check()
