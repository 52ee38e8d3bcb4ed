"""The engine begins a step before it reads the tokens of the one before, and nobody's tokens change.

Plain MLX is lazy everywhere. Where the extension is built, the kernels of a CPU are, too: ``tests/metal`` has that.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from mlx_models import computing_on_cpu, random_prompts

from kvpool import Pool
from kvpool.adapters.mlx_lm import engine as module
from kvpool.adapters.mlx_lm.engine import Engine

cpu = pytest.fixture(computing_on_cpu, autouse=True)
BLOCK = 4


def lazy(model, num_blocks=400, **options):
    return Engine(model, num_blocks, block_size=BLOCK, kernels=False, **options)


KINDS = [
    {},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0.8, "seed": 4, "n": 3},
    {"top_logprobs": 4, "logit_bias": {7: 2.0}},
    {"eos": tuple(range(0, 320, 9))},
    {"temperature": 1.2, "seed": 9, "n": 2, "eos": tuple(range(0, 320, 5))},
]
LOOKS_BACK = {"presence_penalty": 100.0}


def requests(kinds=KINDS):
    """Sixteen prompts with these options in turn."""
    prompts = random_prompts([5, 9, 2, 17] * 4, seed=11)
    return [(prompt, {"max_tokens": 3 + at, **kinds[at % len(kinds)]}) for at, prompt in enumerate(prompts)]


def answers(engine, arrivals):
    """Tokens and ends of all requests, and what their listeners heard. One more arrives with every other step."""
    waiting, done, events = list(arrivals), {}, {}
    ticks = 0
    while waiting or engine.num_unfinished:
        if waiting and ticks % 2 == 0:
            prompt, options = waiting.pop(0)
            seen = []
            events[engine.submit(prompt, on_token=seen.append, **options)] = seen
        done |= {completion.id: completion for completion in engine.step()}
        ticks += 1
    stats = engine.kv.pool.stats()
    assert (stats.used, stats.limbo, stats.pending) == (0, 0, 0)
    tokens = [[one.tokens.tolist() for one in done[id].samples] for id in events]
    ends = [[one.finish_reason for one in done[id].samples] for id in events]
    heard = [[(event.index, event.token, [token for token, _ in event.top]) for event in events[id]] for id in events]
    return tokens, ends, list(map(sorted, heard))


def count_flights(monkeypatch):
    """Return a list that gets one entry for each step that begins while another one is out."""
    found, run = [], Engine._run

    def note(self, step, before):
        found.extend([step] if before is not None else [])
        return run(self, step, before)

    monkeypatch.setattr(Engine, "_run", note)
    return found


@pytest.mark.parametrize("num_blocks", [400, 31], ids=["room", "preemption"])
@pytest.mark.parametrize("kinds", [KINDS, [*KINDS, LOOKS_BACK]], ids=["all may", "some wait"])
def test_tokens_are_those_of_an_engine_that_waits_for_each_step(model, num_blocks, kinds, monkeypatch):
    with lazy(model, num_blocks, max_running=5, plans=1) as engine:
        expected = answers(engine, requests(kinds))
    ahead = count_flights(monkeypatch)
    with lazy(model, num_blocks, max_running=5) as engine:
        assert answers(engine, requests(kinds)) == expected
    assert ahead


def test_step_begins_before_the_tokens_of_the_one_before_are_read(model, monkeypatch):
    events, run = [], Engine._run
    monkeypatch.setattr(Engine, "_run", lambda self, *args: events.append("begin") or run(self, *args))
    with lazy(model) as engine:
        update = engine.scheduler.update
        engine.scheduler.update = lambda *args: events.append("read") or update(*args)
        engine.submit([5, 6, 7], max_tokens=5)
        while engine.num_unfinished:
            engine.step()
    assert events == ["begin", *["begin", "read"] * 4, "read"]


def test_request_that_looks_at_its_tokens_waits_for_them(model, monkeypatch):
    ahead = count_flights(monkeypatch)
    with lazy(model) as engine:
        engine.generate([5, 6, 7], max_tokens=8, presence_penalty=1.0)
        assert not ahead
        engine.generate([5, 6, 7], max_tokens=8, logit_bias={3: 1.0})
    assert ahead


@pytest.mark.parametrize("end", ["cancel", "close", "eos"])
def test_last_request_that_ends_takes_the_step_back_that_has_begun(model, end):
    with lazy(model) as engine:
        first = engine.generate([5, 6, 7], max_tokens=9).tokens
        stop = int(first[4])
        id = engine.submit([5, 6, 7], max_tokens=9, eos=(stop,) if end == "eos" else ())
        if end == "eos":
            while engine.num_unfinished:
                engine.step()
        else:
            for _ in range(3):
                engine.step()
            assert engine.kv.pool.stats().pending == 1
            _ = engine.cancel(id) if end == "cancel" else engine.close()
        stats = engine.kv.pool.stats()
        assert (stats.used, stats.limbo, stats.pending) == (0, 0, 0)
        assert engine.generate([5, 6, 7], max_tokens=9).tokens.tolist() == first.tolist()


@pytest.mark.parametrize("by", ["its thread", "another thread"])
def test_close_waits_for_the_step_that_has_begun(model, monkeypatch, by):
    """So MLX gives no memory of the pool away under it. What a living thread has built only that thread waits for."""
    with lazy(model) as engine, ThreadPoolExecutor(1) as thread:
        engine.submit([5, 6, 7], max_tokens=9)
        for _ in range(3):
            engine.step()
        waits, kind = [], type(engine.kv.backend)
        settle = kind.settle
        monkeypatch.setattr(kind, "settle", lambda self: (waits.append(self), settle(self))[1])
        _ = engine.close() if by == "its thread" else thread.submit(engine.close).result()
        assert waits == ([engine.kv.backend] if by == "its thread" else [])
        assert engine.num_unfinished == engine.kv.pool.stats().used == 0


@pytest.mark.parametrize("when", ["begin", "read", "scheduled"])
def test_failure_takes_both_steps_back_and_the_engine_goes_on(model, when, monkeypatch):
    with lazy(model) as engine:
        due = engine.generate([5, 6, 7], max_tokens=12).tokens.tolist()
        id = engine.submit([5, 6, 7], max_tokens=12, top_logprobs=1)
        for _ in range(4):
            engine.step()
        before = engine.scheduler.tokens_of(id).tolist()
        broken = {"begin": (Engine, "_run"), "read": (module, "_likeliest")}
        broken["scheduled"] = engine.scheduler, "schedule"
        schedule = engine.scheduler.schedule  # behind which a signal raises
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(*broken[when], lambda *arguments: (when == "scheduled" and schedule(), 1 / 0))
            engine.step()
        assert engine.scheduler.tokens_of(id).tolist() == before and engine.kv.pool.stats().pending == 0
        engine.scheduler.check()
        (completion,) = [one for _ in range(20) for one in engine.step()]
        assert completion.tokens.tolist() == due


def test_engines_on_one_pool_take_turns_between_steps(model):
    """One steps once, the other one four times."""
    with lazy(model) as engine:
        alone = engine.generate([5, 6, 7], max_tokens=12).tokens.tolist()
    pool, done = Pool(100, BLOCK, prefix_cache=True), [[], []]
    pair = [Engine(model, pool=pool, block_size=BLOCK, kernels=False) for _ in range(2)]
    ids = [engine.submit([5, 6, 7], max_tokens=12) for engine in pair]
    while any(engine.num_unfinished for engine in pair):
        for turn in (0, 1, 1, 1, 1):
            done[turn] += pair[turn].step()
    assert [(one.id, one.tokens.tolist()) for (one,) in done] == [(id, alone) for id in ids]
    assert pool.stats().pending == 0
