"""Tenants, priorities and deadlines of the engine: what they end or order, and that the others get the same answers."""

import pytest
from mlx_models import on_cpu, solo_tokens

from kvpool.adapters.mlx_lm import tiny
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.errors import RequestRejected

PROMPT = "The block table maps"


@pytest.fixture(scope="module")
def text_model():
    with on_cpu():
        return tiny.make()


@pytest.fixture
def made(text_model):
    """Make an engine, and a list whose only number is its time."""
    engines = []

    def make(**options):
        model, tokenizer = text_model
        now = [0.0]
        engines.append(Engine(model, 100, block_size=4, tokenizer=tokenizer, clock=lambda: now[0], **options))
        return engines[0], now

    with on_cpu():
        yield make
        (engine,) = engines
        engine.close()
        engine.scheduler.check()
        engine.kv.pool.check()
        assert engine.kv.pool.stats().used == 0


def finish(engine):
    """Return the completions in the order in which they end."""
    done = {}
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def test_deadline_ends_requests_with_what_they_have_and_no_other(made, text_model):
    model, tokenizer = text_model
    engine, now = made(max_running=3, max_step_tokens=64, prefill_chunk=8)
    alone = solo_tokens(model, tokenizer.encode(PROMPT), 40)
    events = []
    engine.submit(PROMPT, id="free", max_tokens=40, eos=())
    engine.submit(PROMPT, id="runs", max_tokens=40, eos=(), deadline=5, on_token=events.append)
    for _ in range(12):
        engine.step()
    engine.submit(PROMPT * 8, id="reads", max_tokens=40, deadline=5)
    engine.submit(PROMPT, id="waits", max_tokens=40, deadline=5, n=2, temperature=1.0, seed=3)
    engine.step()
    now[0] = 5.0
    done = finish(engine)
    reasons = {id: {sample.finish_reason for sample in one.samples} for id, one in done.items()}
    assert reasons == {"free": {"length"}, **{id: {"deadline"} for id in ("runs", "reads", "waits")}}
    assert done["free"].tokens.tolist() == alone
    cut = done["runs"].tokens.tolist()
    assert 5 < len(cut) < 40 and cut == alone[: len(cut)]
    assert done["runs"].text == "".join(event.text for event in events)
    assert events[-1].finish_reason == "deadline" and len(events) == len(cut)
    assert [len(done[id].samples) for id in ("reads", "waits")] == [1, 2]
    assert not any(len(sample.tokens) for id in ("reads", "waits") for sample in done[id].samples)
    with pytest.raises(RequestRejected, match="deadline has passed"):
        engine.submit(PROMPT, deadline=4.0)


def test_tenants_take_turns_and_priorities_order_their_own_requests(made):
    engine, _ = made(max_running=1, weights={"a": 2.0}, prefix_cache=False)  # hits cost nothing
    for number in range(4):
        for tenant in "ab":
            engine.submit(PROMPT, id=(tenant, number), max_tokens=4, eos=(), tenant=tenant, priority=int(number == 3))
    order = list(finish(engine))
    assert [number for tenant, number in order if tenant == "a"] == [3, 0, 1, 2]
    assert [tenant for tenant, _ in order[:5]].count("a") >= 3, "a has twice the weight of b"
