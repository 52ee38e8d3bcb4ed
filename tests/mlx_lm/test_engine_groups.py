"""Models whose layers differ, in the engine: cold and warm it gives the tokens of stock alone, and no state is lost.

Where the chunks of a prompt end at the same places, a warm run gives the logprobs of the cold one, bit by bit.
"""

import itertools
from functools import partial

import numpy as np
import pytest
from mlx_models import assert_nothing_is_left, computing_on_cpu, ended, ended_with_failures, logprobs_of, solo_tokens

from benchmarks import tiny_families
from benchmarks.tiny_families import OWN
from kvpool.adapters.mlx_lm.engine import Engine

cpu = pytest.fixture(computing_on_cpu, autouse=True)
BLOCK = 4
TOKENS = 8
alone = partial(solo_tokens, max_tokens=TOKENS, prefill_step_size=2048)
BY_CHUNK = {"plamo3"}  # files whose tokens depend on the chunks of a prompt in mlx-lm, too


def prompt_of(length, seed):
    print(f"prompt seed {seed}")
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


def engine_of(model, num_blocks=300, **options):
    return Engine(model, num_blocks, **({"block_size": BLOCK, "max_running": 8, "max_step_tokens": 128} | options))


def found_by(completion):
    return completion.samples[0].output.num_cached


def computed(engine, run):
    before = engine.scheduler.stats()
    result = run()
    after = engine.scheduler.stats()
    return result, after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens


def check_warm(model, prompt):
    """The same prompt twice, a longer one, and the first one in a conversation of which it is the beginning."""
    engine = engine_of(model)
    due = alone(model, prompt)
    cold, warm = (engine.generate(prompt, max_tokens=TOKENS) for _ in range(2))
    assert cold.tokens.tolist() == warm.tokens.tolist() == due
    if not engine.kv.prefix_cache:
        return
    is_plain = all(group.kind == "full" for group in engine.kv.layout.groups)  # they need no checkpoint
    assert found_by(cold) == 0
    assert found_by(warm) == (len(prompt) - (1 if is_plain else 16)) // BLOCK * BLOCK
    if not is_plain:  # a cold run ended a chunk where the warm one begins
        assert np.array_equal(cold.samples[0].logprobs, warm.samples[0].logprobs)
    longer = [*prompt, *due, *prompt_of(19, 5)]
    later, count = computed(engine, lambda: engine.generate(longer, max_tokens=TOKENS))
    assert later.tokens.tolist() == alone(model, longer)
    assert found_by(later) >= found_by(warm) and count == len(longer) - found_by(later) + TOKENS - 1
    assert_nothing_is_left(engine)


def check_crowd(model, prompts):
    """Prompts with a common beginning at the same time, twice, in a pool that they outgrow."""
    due, engine = [alone(model, prompt) for prompt in prompts], engine_of(model, 34, prefill_chunk=16)
    for _ in range(2):
        done = engine.batch(prompts, max_tokens=TOKENS)
        assert [one.tokens.tolist() for one in done] == due
        assert_nothing_is_left(engine)


def check_forked_and_cancelled(model, prompts):
    """Two samples of each prompt without a prefix cache, then half of the requests cancelled."""
    due, engine = [alone(model, prompt) for prompt in prompts], engine_of(model, prefix_cache=False)
    forked = engine.batch(prompts, max_tokens=TOKENS, n=2)
    assert [[one.tokens.tolist() for one in each.samples] for each in forked] == [[one, one] for one in due]
    assert_nothing_is_left(engine)
    ids = [engine.submit(prompt, max_tokens=TOKENS) for prompt in prompts]
    for _ in range(len(ids) + 2):
        engine.step()
    gone = [id for id in ids[::2] if id in engine and engine.cancel(id)]
    done = ended(engine)
    assert gone and len(done) + len(gone) == len(ids)
    assert all(done[id].tokens.tolist() == tokens for id, tokens in zip(ids, due, strict=True) if id in done)
    assert_nothing_is_left(engine)


def crowd():
    begin = prompt_of(40, 7)
    return [[*begin[:cut], *prompt_of(23 + 3 * number, 11 + number)] for number, cut in enumerate((40, 33, 40, 7))]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(OWN))
def test_engine_gives_the_tokens_of_stock_alone_in_every_family(name):
    model, _ = tiny_families.make(name)
    check_warm(model, prompt_of(61, 3))
    check_forked_and_cancelled(model, [prompt_of(length, 3) for length in (37, 5, 61, 1, 20)])
    if name not in BY_CHUNK:
        check_crowd(model, crowd())


@pytest.mark.parametrize("name", ["gemma4", "qwen3_5", "longcat_flash_ngram", "gemma3_text"])
def test_samples_of_a_prompt_are_those_of_requests_of_their_own_and_share_what_is_found(name):
    """Each sample begins with the state of the prompt and steps on its own."""
    model, _ = tiny_families.make(name)
    prompt, how = prompt_of(45, 4), {"max_tokens": TOKENS, "temperature": 1.0}
    cold, engine = engine_of(model, prefix_cache=False), engine_of(model)
    due = [cold.generate(prompt, seed=5 + i, **how).tokens.tolist() for i in range(4)]
    assert len(set(map(tuple, due))) == 4
    together = cold.generate(prompt, n=4, seed=5, **how)
    engine.generate(prompt, max_tokens=1)
    warm, count = computed(engine, lambda: engine.generate(prompt, n=4, seed=5, **how))
    for found in (together, warm):
        assert [one.tokens.tolist() for one in found.samples] == due
    assert count == len(prompt) - found_by(warm) + 4 * (TOKENS - 1)
    assert (found_by(warm) > 0) == (name != "longcat_flash_ngram")
    for one in (cold, engine):
        assert_nothing_is_left(one)


@pytest.mark.parametrize("name", ["gemma4", "qwen3_5"])
def test_preempted_sequence_goes_on_from_its_newest_checkpoint(name):
    model, _ = tiny_families.make(name)
    engine, prompt = engine_of(model), prompt_of(62, 21)
    id = engine.submit(prompt, max_tokens=40)
    core, done, known = engine.scheduler._core, [], []
    while not done:
        done = engine.step()
        generated = len(engine.scheduler.tokens_of(id)) if id in engine else 0
        if generated in (6, 25) and generated not in known:
            known.append(generated)
            core.preempt(core.rows.sequence(core.rows.running()[0]))
    assert done[0].tokens.tolist() == alone(model, prompt, max_tokens=40)
    stats = engine.scheduler.stats()
    first, second = ((len(prompt) + n - 16) // BLOCK * BLOCK for n in (0, 6))  # the other one was taken on return
    assert (stats.preemptions, stats.hit_tokens, stats.again_hit_tokens) == (2, 0, first + second)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("name", ["gemma4", "qwen3_5"])
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "default"])
def test_next_turn_computes_few_tokens_again(name, is_told):
    """Turns that begin with a prompt of so many tokens, of which they rewrite so many at the end."""
    model, _ = tiny_families.make(name)
    engine = engine_of(model, 600, block_size=16)
    for length, rewritten in itertools.product((64, 69, 79), (0, 5, 11)):
        prompt = [length, rewritten, *prompt_of(length - 2, length)]
        kept = length - rewritten
        engine.generate(prompt, max_tokens=1, cut=kept if is_told else None)
        turn = [*prompt[:kept], 91, 92, 93, *prompt_of(20, rewritten)]
        done, count = computed(engine, lambda turn=turn: engine.generate(turn, max_tokens=1))
        again = count - (len(turn) - kept)
        assert found_by(done) == (kept if is_told else length - 16) // 16 * 16
        assert 0 <= again == kept - found_by(done) <= 31
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("name", ["longcat_flash_ngram", "qwen3_5"])
def test_state_that_cannot_be_restored_or_is_larger_than_the_pool_is_never_found(name, caplog):
    """The first is said once when the engine is made."""
    model, _ = tiny_families.make(name)
    is_small = name == "qwen3_5"
    engine = engine_of(model, engine_of(model).kv.layout.checkpoint_blocks) if is_small else engine_of(model)
    prompt = prompt_of(13 if is_small else 61, 3)
    for _ in range(2):
        done = engine.generate(prompt, max_tokens=TOKENS, cut=8)
        assert (done.tokens.tolist(), found_by(done)) == (alone(model, prompt), 0)
    assert sum("no prefix of this model is found" in line for line in caplog.messages) == (not is_small)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "gemma4"])
def test_beam_over_forked_states_is_that_of_recomputed_prompts(name):
    """Each hypothesis is scored again by the stock model, from its first token."""
    model, _ = tiny_families.make(name)
    prompt = prompt_of(19, 3)
    engine = engine_of(model, prefix_cache=False)
    (completion,) = engine.batch([prompt], max_tokens=8, n=3, beam_width=3, eos=())
    assert_nothing_is_left(engine)
    scores = []
    for one in completion.samples:
        tokens = one.tokens.tolist()
        scores.append(logprobs_of(model, prompt, tokens, model.make_cache()).sum())
        np.testing.assert_allclose(one.output.score * len(tokens), scores[-1], atol=2e-3)
    assert scores == sorted(scores, reverse=True)


# ------------------------------------------------------------------------------------------- states of slots


@pytest.mark.parametrize("name", ["qwen3_5", "longcat_flash_ngram"])
def test_failed_step_leaves_states_as_they_were(name):
    model, _ = tiny_families.make(name)
    prompts = [prompt_of(length, 3) for length in (9, 21, 4)]
    due = [alone(model, prompt) for prompt in prompts]
    engine = engine_of(model, prefix_cache=False)
    ids = [engine.submit(prompt, max_tokens=TOKENS) for prompt in prompts]
    states = engine._forward.states
    done = ended_with_failures(engine, engine, "_run", lambda: len(states) == slots_of(engine))
    assert [done[id].tokens.tolist() for id in ids] == due
    assert_nothing_is_left(engine)


def slots_of(engine):
    """How many slots are in use: arrays are kept for these and no others."""
    return engine.kv.pool.stats(len(engine.kv.layout.block_nbytes)).used


def test_arrays_of_states_are_bounded_by_the_sequences_that_run():
    model, _ = tiny_families.make("qwen3_5")
    engine = engine_of(model, max_running=4, prefix_cache=False)
    rng = np.random.default_rng(11)
    one = prompt_of(9, 3)
    engine.submit(one, max_tokens=TOKENS)
    engine.step()
    each = engine._forward.states.nbytes
    assert each > 0
    ended(engine)
    for prompt in [prompt_of(length, 3) for length in rng.integers(1, 40, 12)]:
        engine.submit(prompt, max_tokens=int(rng.integers(1, 20)))
    while engine.num_unfinished:
        engine.step()
        assert len(engine._forward.states) == slots_of(engine)
        assert engine._forward.states.nbytes <= 2 * 4 * each  # a row that left stays in the batch for one step
    assert engine._forward.states.nbytes == 0
