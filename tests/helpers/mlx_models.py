"""Tiny random-weight models of mlx-lm, and its stock engines run to the end. Nothing is downloaded."""

import contextlib
import gc
import sys
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import gemma3_text, gpt_oss, llama

from kvpool.groups import arenas_of

generate = sys.modules[generate_step.__module__]  # mlx_lm.generate is a function too
VOCAB = 320
WINDOW = 8  # of sliding layers: shorter than most prompts
SEED = 7
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}

# How the adapter can attend, as options of install: over the pool itself; by the kernels' gather; by plain MLX.
ROUTES = {"fused": {"fused": True}, "gathered": {"fused": False}, "plain": {"kernels": False}}


@contextlib.contextmanager
def on_cpu():
    """Where MLX takes a GPU by default, let it and mlx-lm compute on the CPU: the kernels are for that."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        with _mlx_lm_on(mx.cpu):
            yield
    finally:
        mx.set_default_device(device)


def computing_on_cpu():
    """The body of a fixture: each test of a file computes on the CPU."""
    with on_cpu():
        yield


@contextlib.contextmanager
def _mlx_lm_on(device):
    """mlx-lm makes its stream when it is imported, for the default device of that moment."""
    found = generate.generation_stream
    if found.device == device:
        yield
        return
    stream = mx.new_thread_local_stream(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(generate, "generation_stream", stream))
        for call in (generate.generate_step, generate.speculative_generate_step):
            defaults = tuple(stream if value is found else value for value in call.__defaults__)
            stack.enter_context(mock.patch.object(call, "__defaults__", defaults))
        yield


def randomized(model):
    """Weights large enough that greedy output wanders over many tokens, so that a wrong cache shows."""
    mx.random.seed(SEED)
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.25 if w.ndim > 1 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def tiny(module, **options):
    """The model of a file of mlx-lm."""
    settings = {"model_type": module.__name__.rpartition(".")[2]} | SIZES | options
    return randomized(module.Model(module.ModelArgs(**settings)))


def tiny_llama(**options):
    return tiny(llama, **({"head_dim": 8, "tie_word_embeddings": False} | options))


def tiny_sliding_llama():
    """Full attention comes second: the first mask is not made from the first layer's cache."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return tiny_llama(num_hidden_layers=4, layer_types=layer_types, sliding_window=WINDOW)


def tiny_gemma3():
    more = {"query_pre_attn_scalar": 8, "sliding_window": WINDOW, "sliding_window_pattern": 3, "rms_norm_eps": 1e-6}
    return tiny(gemma3_text, num_hidden_layers=4, head_dim=8, **more)


def tiny_gpt_oss():
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": WINDOW}
    return tiny(gpt_oss, num_hidden_layers=4, head_dim=8, **more)


def random_prompts(lengths, seed=1, vocab=VOCAB):
    print(f"prompt seed {seed}")
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


# Mixed lengths, on both sides of the window and of block boundaries; one prompt is a single token.
PROMPTS = (3, 6, 40, 1, 17, 29, 9, 8)
# Small enough that prefill is chunked and right-padded, batches are extended, split and filtered on the way.
SMALL_STEPS = {"prefill_batch_size": 3, "completion_batch_size": 4, "prefill_step_size": 7}
NO_LOCK = contextlib.nullcontext()


def batch_tokens(model, prompts, max_tokens=16, *, caches=None, known=None, on_step=None, lock=NO_LOCK, **options):
    """Tokens per prompt from mlx-lm's BatchGenerator, with ``on_step(generator, uids)`` after each step.

    `known`: the tokens that each of `caches` holds. `lock` is held for each step.
    """
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    with lock:
        generator = BatchGenerator(model, **(SMALL_STEPS | options))
        uids = generator.insert(prompts, limits, caches, known)
    tokens = {uid: [] for uid in uids}
    while True:
        with lock:
            prompt_responses, responses = generator.next()
        for response in responses:
            tokens[response.uid].append(response.token)
        if not prompt_responses and not responses:
            break
        if on_step is not None:
            on_step(generator, uids)
    with lock:
        generator.close()
    return [tokens[uid] for uid in uids]


def solo_tokens(model, prompt, max_tokens=16, **options):
    """Tokens of one prompt from mlx-lm's generate_step."""
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens, **{"prefill_step_size": 7, **options})
    return [int(token) for token, _ in steps]


def logprobs_of(model, prompt, tokens, cache=None):
    """What the stock model gives each of the tokens that come behind a prompt."""
    logits = model(mx.array([[*prompt, *tokens]]), cache=cache)[0, len(prompt) - 1 : -1].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[np.arange(len(tokens)), tokens]


def ended(engine):
    """Run the engine until nobody is left; returns {id: completion}."""
    done = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def ended_with_failures(engine, owner, name, holds=lambda: True):
    """The same though each third call of ``owner.name`` raises behind its work; `holds` must be so after each step."""
    done, failed, calls, call = {}, 0, iter(range(1, 10_000)), getattr(owner, name)

    def sometimes(*arguments):
        result = call(*arguments)
        if next(calls) % 3 == 0:
            raise OSError("planted")
        return result

    with mock.patch.object(owner, name, sometimes):
        while engine.num_unfinished:
            try:
                done |= {completion.id: completion for completion in engine.step()}
            except OSError:
                failed += 1
            engine.scheduler.check()
            assert holds()
    assert failed > 3, "hardly a step has failed"
    return done


def assert_nothing_is_left(engine):
    """An engine holds no block, slot or state of any sequence."""
    engine.scheduler.check()
    pool = engine.kv.pool
    pool.check()
    for arena in range(1 + max(arenas_of(pool.options.groups))):
        stats = pool.stats(arena)
        assert (stats.used, stats.limbo, stats.sequences, stats.pending) == (0, 0, 0, 0), arena
    assert len(engine._forward.states) == 0


def assert_all_free(kv):
    """Nobody holds a block of an installed model, in any arena; what is cached is free."""
    gc.collect()
    summary = kv.summary()
    assert (summary.blocks_used, summary.blocks_leaked, summary.sequences) == (0, 0, 0), summary
    kv.pool.check()
