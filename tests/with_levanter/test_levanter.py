"""`Engine` beside Levanter's own: the same tiny Llama, the same requests, the same tokens.

Levanter's engine takes what fits into one prefill and drops the rest, so it gets the requests in batches. The oracle of
samples is a request of its own for each, with the key that Levanter folds for it. In the tested release, samples of a
prompt of a page or more read other pages than their parent's, so its ``n_generations`` judges shorter prompts only.
"""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_page import examples
from fastapi.testclient import TestClient
from haliax import Axis, named
from levanter.inference import openai
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

from kvpool.adapters.levanter import Engine

VOCAB, PAGE, LEN, ROWS, PAGES = 128, 8, 48, 8, 64
NUM_PROMPTS, SHORT = 64, 5


def make_model(seed):
    """Random weights, large enough that greedy output wanders over many tokens."""
    sizes = {"hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    config = LlamaConfig(max_seq_len=LEN, **sizes)
    model = LlamaLMHeadModel.init(Axis("vocab", VOCAB), config, key=jax.random.PRNGKey(seed))
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, model)


def config(**changes):
    options = {
        "max_seq_len": LEN, "page_size": PAGE, "max_seqs": ROWS, "max_pages": PAGES, "max_prefill_size": ROWS * LEN,
        "max_seqs_in_prefill": ROWS, "max_queued_tokens": ROWS, "max_rounds": 8, "max_stop_seqs": 2,
        "max_stop_tokens": 2, "compute_dtype": jnp.float32,
    }  # fmt: skip
    return InferenceEngineConfig(**options | changes)


def small(**changes):
    """Of an engine on a pool: it needs no prefill of all prompts at once, and a smaller one has fewer shapes."""
    return config(**{"max_prefill_size": 4 * ROWS} | changes)


def request(number, prompt, n=1, *, new=8, temperature=0.0, top_p=1.0, stop=None, key=None):
    key = jax.random.PRNGKey(number) if key is None else key
    stop = None if stop is None else named(jnp.array(stop, jnp.int32), ("stop_seq", "position"))
    params = SeqDecodingParams(
        jnp.array(len(prompt) + new), stop, jnp.array(temperature, jnp.float32), jnp.array(top_p, jnp.float32), key
    )
    return Request(prompt, number, params, n)


def requests(n=1, longest=LEN - 12):
    """Greedy and sampled requests with prompts of all lengths, some of which begin alike and some of which may stop."""
    rng = np.random.default_rng(5)
    begin, found = rng.integers(0, VOCAB, LEN), []
    for number in range(NUM_PROMPTS):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, longest + 1)))
        if number % 4 == 0:
            prompt[: len(prompt) // 2] = begin[: len(prompt) // 2]
        stop = rng.integers(0, VOCAB, (2, 1)) if number % 3 == 0 else None
        sampling = {"temperature": 0.8, "top_p": (1.0, 0.9)[number // 2 % 2]} if number % 2 else {}
        found.append(request(number, prompt.tolist(), n, new=int(rng.integers(1, 12)), stop=stop, **sampling))
    return found


def alone(wanted):
    """A request of its own for each sample."""
    return [
        dataclasses.replace(
            one, request_id=one.request_id * 100 + k, n_generations=1,
            decode_params=dataclasses.replace(one.decode_params, key=jax.random.fold_in(one.decode_params.key, k))
            if k else one.decode_params,
        )
        for one in wanted for k in range(one.n_generations)
    ]  # fmt: skip


def in_batches(engine, wanted):
    """Tokens and logprobs of Levanter's engine."""
    tokens, logprobs, size = [], [], ROWS // wanted[0].n_generations
    for first in range(0, len(wanted), size):
        result = engine.generate(wanted[first : first + size])
        tokens += result.tokens
        logprobs += result.logprobs
    return tokens, logprobs


def check(result, expected):
    tokens, logprobs = expected
    assert result.tokens == tokens and result.total_generated == sum(map(len, tokens))
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.fixture(scope="module")
def model():
    return make_model(0)


@pytest.fixture(scope="module")
def stock(model):
    return InferenceEngine.from_model_with_config(model, Letters(), config())


@pytest.fixture(scope="module")
def expected(stock):
    found = in_batches(stock, requests())
    tokens = {token for row in found[0] for token in row}
    assert len(tokens) > VOCAB // 2 and len({len(row) for row in found[0]}) > 8  # a wrong cache would show
    return found


@pytest.fixture(scope="module")
def engine(model):
    return Engine.from_model_with_config(model, Letters(), small())


@pytest.fixture(autouse=True)
def every_page_is_given_back(engine):
    yield
    engine.pool.check()
    assert engine.pool.stats().used == 0


def test_64_prompts_have_the_tokens_of_levanters_engine(engine, expected):
    steps = []
    check(engine.generate(requests(), steps.append), expected)
    assert steps == list(range(len(steps))) and len(steps) > 64 // ROWS  # more than run at a time
    assert engine.pool.prefix.stats().hit_tokens > 0


def test_short_prompts_with_four_samples_have_the_tokens_of_levanters_engine(engine, stock):
    wanted = requests(4, SHORT)
    check(engine.generate(wanted), in_batches(stock, wanted))


def test_four_samples_of_64_prompts_have_the_tokens_of_requests_of_their_own(engine, stock):
    before, wanted = engine.pool.stats().cow_copies, requests(4)
    check(engine.generate(wanted), in_batches(stock, alone(wanted)))
    assert engine.pool.stats().cow_copies > before


def test_samples_that_do_not_copy_their_page_read_others_tokens(engine, monkeypatch):
    wanted = [request(0, list(range(12)), 4, temperature=0.8)]
    tokens = engine.generate(wanted).tokens
    monkeypatch.setattr(engine, "_copy", lambda pages, *_: pages)
    assert engine.generate(wanted).tokens != tokens


def test_more_samples_than_rows_are_served(engine, stock):
    wanted = [request(k, list(range(k, k + 11)), 3 * ROWS, temperature=0.8) for k in range(2)]
    check(engine.generate(wanted), in_batches(stock, alone(wanted)))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_three_calls_without_a_reset_have_the_same_tokens(model, engine, expected, prefix_cache):
    if not prefix_cache:
        engine = Engine(model, Letters(), small(), prefix_cache=False)
    for call in range(3):
        check(engine.generate(requests()), expected)
        if not prefix_cache:  # pages hold what was written last, and nobody reads it
            assert all(np.asarray(page).any(axis=(1, 2, 3)).sum() > ROWS for page in engine._pages)
            engine._pages = [jnp.full_like(page, 100.0 + call) for page in engine._pages]


def test_half_the_pages_serve_all_where_levanters_engine_raises(model, stock, expected):
    batch = requests()[:ROWS]
    lengths = [len(one.prompt_tokens) + len(tokens) for one, tokens in zip(batch, expected[0], strict=False)]
    need = sum(-(-(length - 1) // PAGE) for length in lengths)  # the last token is not written
    with pytest.raises(Exception, match="Out of free pages"):
        InferenceEngine.from_model_with_config(model, Letters(), config(max_pages=need // 2)).generate(batch)
    engine = Engine(model, Letters(), small(max_pages=need // 2))
    check(engine.generate(requests()), expected)
    grow = [request(k, [k, k + 1], new=40, temperature=0.5) for k in range(ROWS)]  # all begin, not all can go on
    check(engine.generate(grow), in_batches(stock, grow))
    assert engine.scheduler.stats().preemptions > 0 and engine.pool.stats().used == 0


def test_prompts_longer_than_a_step_are_computed_in_chunks(model, expected):
    engine = Engine(model, Letters(), small(max_prefill_size=20))
    check(engine.generate(requests()), expected)
    assert engine._decode._cache_size() == 3 and engine._choose._cache_size() == 1  # 8, 16 and 20 tokens are compiled


def test_requests_are_admitted_in_the_step_after_one_that_ended(model, expected):
    engine, wanted = Engine(model, Letters(), config()), requests()
    for one in wanted[: ROWS + 3]:
        engine.add(one)
    outputs = {}
    while (before := len(outputs)) < ROWS + 3:
        outputs |= {output.id: output.tokens.tolist() for output in engine.step()}
        running = min(ROWS, ROWS + 3 - before) - (len(outputs) - before)  # those of the step that have not ended
        assert engine.pool.stats().sequences == running  # the others have given their pages back
        if len(outputs) == 2:
            with pytest.raises(RuntimeError, match="other requests run"):
                engine.generate(wanted[:1])
    assert [outputs[k] for k in range(ROWS + 3)] == expected[0][: ROWS + 3] and engine.step() == []


def test_a_request_that_can_never_run_is_refused_before_any_runs(model, engine, expected):
    good, tiny = requests()[:3], Engine(model, Letters(), small(max_pages=3))
    for owner, bad, error in (
        (engine, request(9, [1] * (LEN + 1)), "49 prompt tokens and 1 more, the model takes 48"),
        (engine, request(9, []), "the prompt is empty"),
        (engine, request(9, [1], 65), "n is 65, a request has at most 64 samples"),
        (engine, request(1, [1]), "1"),  # an id that is there
        (tiny, request(9, [1] * 4 * PAGE), "need 5 blocks, the pool has 3"),
    ):
        before = owner.pool.fingerprint(), owner.scheduler.stats().steps
        with pytest.raises(ValueError, match=error) as caught:
            owner.generate([*good[1:], bad] if owner is engine else [bad])
        assert (owner.pool.fingerprint(), owner.scheduler.stats().steps) == before
        assert caught.value.__notes__ == [f"request_id {bad.request_id}"]
    assert engine.generate(good).tokens == expected[0][:3]


def test_a_prompt_as_long_as_the_cache_has_one_more_token(engine):
    (tokens,) = engine.generate([request(0, [3] * LEN)]).tokens
    assert len(tokens) == 1


def test_sizes_and_releases_are_judged_when_the_engine_is_made(model, monkeypatch, caplog):
    assert Engine(model, Letters(), small(max_pages=None)).pool.stats().num_blocks == ROWS * LEN // PAGE
    with pytest.raises(ValueError, match="num_blocks"):
        Engine(model, Letters(), small(max_pages=0))
    monkeypatch.setattr("kvpool.adapters.levanter.RELEASE", "0.3.0")
    Engine(model, Letters(), small())
    assert "marin-levanter 0.3.0 is installed, tested with >= 0.2.20" in caplog.text


def test_an_engine_whose_model_raised_can_be_used_again(model, expected, monkeypatch):
    engine = Engine(model, Letters(), small())
    for name, call in (("_decode", engine._decode), ("_choose", engine._choose)):

        def fail(*arguments, name=name, call=call):
            call(*arguments)  # the pages are donated and lost
            raise FloatingPointError(name)

        with monkeypatch.context() as patch, pytest.raises(FloatingPointError, match=name):
            patch.setattr(engine, name, fail)
            engine.generate(requests()[:3])
        assert engine.generate(requests()[:3]).tokens == expected[0][:3]

    def interrupt(number):
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests()[:3], interrupt)
    assert engine.generate(requests()[:3]).tokens == expected[0][:3] and engine.pool.stats().used == 0


def test_another_model_reads_no_page_of_the_one_before(model, expected):
    engine, other = Engine(model, Letters(), small()), make_model(1)
    wanted = requests()[:ROWS]
    check(engine.generate(wanted), [part[:ROWS] for part in expected])
    shapes = engine._decode._cache_size()
    engine.model = other
    assert engine.pool.prefix.match(np.array(wanted[0].prompt_tokens)) == 0
    check(engine.generate(wanted), in_batches(InferenceEngine.from_model_with_config(other, None, config()), wanted))
    assert engine.model is other and engine._decode._cache_size() == shapes  # nothing is compiled anew


class Letters:
    """A tokenizer of letters whose text is the list of the tokens."""

    def encode(self, text, **_):
        return list(text.encode())

    def decode(self, tokens, **_):
        return str(tokens)


def test_levanters_server_gives_the_same_answers(model, monkeypatch):
    config_of_server, texts = openai.InferenceServerConfig(service=config()), []
    body = {"model": "", "prompt": "abcd", "max_tokens": 12, "temperature": 0.8, "seed": 3, "n": 4}
    for made in (InferenceEngine, Engine):
        monkeypatch.setattr(openai, "InferenceEngine", made)
        trainer = config_of_server.trainer
        with hax.partitioning.set_mesh(trainer.device_mesh), hax.axis_mapping(trainer.compute_axis_mapping):
            server = openai.InferenceServer.create(config_of_server, model, Letters())
        assert isinstance(server.inference_context.engine, made)
        answer = TestClient(server.app).post("/v1/completions", json=body)
        server.inference_context.shutdown()
        texts.append([choice["text"] for choice in answer.json()["choices"]])
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_example_of_the_page_runs(capsys):
    (code,) = examples("levanter")
    exec(code, {})
    assert capsys.readouterr().out == "20 200 0\n"


def test_scores_are_levanters(engine, stock):
    tokens = list(range(5))
    assert engine.score_token_logprobs(tokens, 2) == stock.score_token_logprobs(tokens, 2)
