"""The engine on every kind of cache: tokens are those of stock alone, and no state is lost or left.

Each family runs here or in test_engine_prefix, with ``KVPOOL_LONG=1`` in both.
"""

import os

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_models import ended, on_cpu

from kvpool.adapters.mlx_lm import tiny
from kvpool.adapters.mlx_lm.engine import Engine, RaggedForward
from kvpool.adapters.mlx_lm.states import SlotStates
from kvpool.adapters.mlx_lm.tiny_families import OWN
from kvpool.eviction import SlidingWindow

BLOCK = 4
TOKENS = 10
LENGTHS = (37, 5, 61, 1, 20)
SHORT = {  # family: what it stands for
    **{"qwen3_5": "states", "nemotron_h": "states and layers without a cache", "mamba2": "states only"},
    **{"gemma3_text": "windows", "gemma4": "shapes", "llama4": "chunks", "falcon_h1": "CacheList"},
    **{"deepseek_v32": "an indexer", "longcat_flash_ngram": "a state that grows"},
}


BY_CHUNK = {"plamo3"}  # files whose tokens depend on the chunks of a prompt in mlx-lm, too


def prompts_of(lengths=LENGTHS, seed=3):
    rng = np.random.default_rng(seed)
    print(f"prompt seed {seed}")
    return [rng.integers(0, 90, n).tolist() for n in lengths]


def alone(model, prompt, max_tokens=TOKENS):
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens)]


def engine_of(model, num_blocks=200, **options):
    how = {"block_size": BLOCK, "max_running": 8, "max_step_tokens": 64, "prefix_cache": False}
    return Engine(model, num_blocks, **(how | options))


def assert_nothing_is_left(engine):
    kv = engine.kv
    engine.scheduler.check()
    kv.pool.check()
    num_states = sum(group.kind == "state" for group in kv.layout.groups)
    for arena in range(len(kv.layout.block_nbytes) + num_states):
        assert kv.pool.stats(arena).used == 0
    assert len(engine._forward.states) == 0
    assert kv.pool.stats().sequences == 0


def tokens_of(completions):
    return [completion.tokens.tolist() for completion in completions]


def check_tight(model, prompts, due):
    """Chunks, and a pool that most models outgrow."""
    engine = engine_of(model, 24, prefill_chunk=16)
    assert tokens_of(engine.batch(prompts, max_tokens=TOKENS)) == due
    assert_nothing_is_left(engine)


def check_wide(model, prompts, due):
    """Forks, then half of the requests cancelled."""
    engine = engine_of(model)
    forked = engine.batch(prompts, max_tokens=TOKENS, n=2)
    assert [[one.tokens.tolist() for one in each.samples] for each in forked] == [[one, one] for one in due]
    assert_nothing_is_left(engine)
    ids = [engine.submit(prompt, max_tokens=TOKENS) for prompt in prompts]
    for _ in range(len(ids) + 2):
        engine.step()
    gone = [id for id in ids[::2] if id in engine]
    for id in gone:
        engine.cancel(id)
    done = ended(engine)
    assert gone and len(done) + len(gone) == len(ids)
    assert all(done[id].tokens.tolist() == tokens for id, tokens in zip(ids, due, strict=True) if id in done)
    assert_nothing_is_left(engine)


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_tokens_of_every_kind_of_cache_are_those_of_stock_alone(name):
    with on_cpu():
        model, _ = tiny.make(name)
        prompts = prompts_of()
        due = [alone(model, prompt) for prompt in prompts]
        check_tight(model, prompts, due)
        check_wide(model, prompts[1::2], due[1::2])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(OWN) if os.environ.get("KVPOOL_LONG") else sorted(OWN.keys() - SHORT)[::2])
def test_tokens_of_every_family_are_those_of_stock_alone(name):
    with on_cpu():
        model, _ = tiny.make(name)
        prompts = prompts_of()
        due = [alone(model, prompt) for prompt in prompts]
        engine = engine_of(model, max_running=3)
        assert tokens_of(engine.batch(prompts, max_tokens=TOKENS)) == due
        assert_nothing_is_left(engine)
        if name not in BY_CHUNK:
            check_tight(model, prompts, due)
        check_wide(model, prompts, due)


def test_tight_pool_preempts():
    with on_cpu():
        model, _ = tiny.make("qwen3_5")
        engine = engine_of(model, 24, prefill_chunk=16)
        engine.batch(prompts_of(), max_tokens=TOKENS)
        assert engine.scheduler.stats().preemptions > 0


def sampled(model, prompt, n, **how):
    """The samples of one request, with their own seeds."""
    engine = engine_of(model)
    (completion,) = engine.batch([prompt], max_tokens=TOKENS, n=n, temperature=1.0, **how)
    assert_nothing_is_left(engine)
    return [one.tokens.tolist() for one in completion.samples]


@pytest.mark.parametrize("name", ["qwen3_5", "longcat_flash_ngram", "gemma3_text"])
def test_samples_that_share_a_prompt_are_those_of_requests_of_their_own(name):
    with on_cpu():
        model, _ = tiny.make(name)
        prompt = prompts_of((21,))[0]
        together = sampled(model, prompt, 3, seed=5)
        assert together == [sampled(model, prompt, 1, seed=5 + i)[0] for i in range(3)]
        assert len({tuple(tokens) for tokens in together}) == 3


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "gemma4"])
def test_beam_over_forked_states_is_that_of_recomputed_prompts(name):
    """Each hypothesis is scored again by the stock model, from its first token."""
    with on_cpu():
        model, _ = tiny.make(name)
        prompt = prompts_of((19,))[0]
        engine = engine_of(model)
        (completion,) = engine.batch([prompt], max_tokens=8, n=3, beam_width=3, eos=())
        assert_nothing_is_left(engine)
        scores = []
        for one in completion.samples:
            tokens = one.tokens.tolist()
            logits = model(mx.array([prompt + tokens]), cache=model.make_cache())[0, len(prompt) - 1 : -1]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            scores.append(float(logprobs[mx.arange(len(tokens)), mx.array(tokens)].sum()))
            np.testing.assert_allclose(one.output.score * len(tokens), scores[-1], atol=2e-3)
        assert scores == sorted(scores, reverse=True)


# ------------------------------------------------------------------------------------------- states of slots


@pytest.mark.parametrize("name", ["qwen3_5", "longcat_flash_ngram"])
def test_failed_step_leaves_states_as_they_were(name, monkeypatch):
    with on_cpu():
        model, _ = tiny.make(name)
        prompts = prompts_of((9, 21, 4))
        due = [alone(model, prompt) for prompt in prompts]
        engine = engine_of(model)
        ids = [engine.submit(prompt, max_tokens=TOKENS) for prompt in prompts]
        run, calls = engine._run, [0]

        def sometimes(*args):
            result = run(*args)
            calls[0] += 1
            if calls[0] % 3 == 0:
                raise OSError("the model is gone")
            return result

        monkeypatch.setattr(engine, "_run", sometimes)
        done, failed = {}, 0
        while engine.num_unfinished:
            try:
                done |= {completion.id: completion for completion in engine.step()}
            except OSError:
                failed += 1
            assert_only_live_states(engine)
        assert failed > 3
        assert [done[id].tokens.tolist() for id in ids] == due
        assert_nothing_is_left(engine)


def assert_only_live_states(engine):
    """Arrays are kept for the slots in use and no others."""
    kv, states = engine.kv, engine._forward.states
    slots = kv.pool.stats(len(kv.layout.block_nbytes)).used
    assert len(states) == slots


def test_arrays_of_states_are_bounded_by_the_sequences_that_run():
    with on_cpu():
        model, _ = tiny.make("qwen3_5")
        engine = engine_of(model, max_running=4)
        rng = np.random.default_rng(11)
        (one,) = prompts_of((9,))
        engine.submit(one, max_tokens=TOKENS)
        engine.step()
        each = engine._forward.states.nbytes
        assert each > 0
        ended(engine)
        for prompt in prompts_of(rng.integers(1, 40, 12).tolist()):
            engine.submit(prompt, max_tokens=int(rng.integers(1, 20)))
        while engine.num_unfinished:
            engine.step()
            assert_only_live_states(engine)
            assert engine._forward.states.nbytes <= 2 * 4 * each  # a row that left stays in the batch for one step
        assert engine._forward.states.nbytes == 0


def test_state_that_a_fork_shares_and_one_of_them_writes_in_place_shows(monkeypatch):
    """The fault: every row writes the slot that it read, as if nobody else had it."""
    with on_cpu():
        model, _ = tiny.make("qwen3_5")
        prompt = prompts_of((21,))[0]
        due = sampled(model, prompt, 3, seed=5)
        slots = RaggedForward._slots

        def in_place(self, plan, name, part):
            found = slots(self, plan, name, part)
            if name == "state_src":
                return found
            read = slots(self, plan, "state_src", part)
            for one, other in zip(found, read, strict=True):
                self.alias[one] = self.alias.get(other, other) if other >= 0 else one
            return [self.alias[one] for one in found]

        def aliased(self, slots):
            return read(self, [RaggedForward.alias.get(slot, slot) for slot in slots])

        read = SlotStates.read
        monkeypatch.setattr(RaggedForward, "alias", {}, raising=False)
        monkeypatch.setattr(RaggedForward, "_slots", in_place)
        monkeypatch.setattr(RaggedForward, "keep_states", lambda self, handles: None)
        monkeypatch.setattr(SlotStates, "read", aliased)
        engine = engine_of(model)
        (completion,) = engine.batch([prompt], max_tokens=TOKENS, n=3, temperature=1.0, seed=5)
        assert [one.tokens.tolist() for one in completion.samples] != due


def test_slots_that_are_not_forgotten_show(monkeypatch):
    """The fault: nothing is forgotten."""
    monkeypatch.setattr(RaggedForward, "keep_states", lambda self, handles: None)
    with pytest.raises(AssertionError):
        test_arrays_of_states_are_bounded_by_the_sequences_that_run()


# ------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5"])
def test_prefix_cache_can_be_left_out(name):
    with on_cpu():
        model, _ = tiny.make(name)
        engine = engine_of(model, prefix_cache=False)
        assert engine.kv.pool.prefix is None and engine.kv.layout.groups
        prompt = prompts_of((61,))[0]
        first, second = (engine.generate(prompt, max_tokens=TOKENS) for _ in range(2))
        assert first.tokens.tolist() == second.tokens.tolist() == alone(model, prompt)
        assert second.samples[0].output.num_cached == 0


@pytest.mark.parametrize(
    ("name", "eviction"),
    [("qwen3", None), ("gemma3_text", None), ("qwen3_5", None), ("gemma3_text", SlidingWindow(max_kv=32))],
)
def test_prefix_cache_is_there_by_default(name, eviction):
    with on_cpu():
        model, _ = tiny.make(name)
        engine = Engine(model, 200, block_size=BLOCK, eviction=eviction)
        assert engine.kv.prefix_cache and bool(engine.kv.layout.groups) == (name != "qwen3")
