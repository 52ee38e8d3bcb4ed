"""`Engine.resize` between two steps: every request goes on, and gives the tokens of a pool that is never resized."""

from functools import cache, partial

import numpy as np
import pytest
from mlx_models import computing_on_cpu, random_prompts

import kvpool_backends.mlx
from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import Engine, tiny
from kvpool.errors import OutOfBlocks, RequestRejected
from kvpool.store import MemoryStore
from kvpool_backends.numpy import NumpyBackend

cpu = pytest.fixture(computing_on_cpu, autouse=True)
NAMES = ("llama", "gemma3_text", "qwen3_5")
ROUTES = {
    "kernels": {"kernels": True},
    "plain": {"kernels": False},
    "numpy": {"backend": "numpy"},
    "cpu": {"backend": "cpu"},
    "quantized": {"kernels": True, "kv_bits": 8, "quant_group_size": 32},
}
SIZES = (110, 160, 120, 400, 130)  # blocks of 4 tokens; those of the requests together are more
NUM_REQUESTS = 17
SMALL = {"block_size": 4, "max_running": 4, "max_step_tokens": 64, "prefill_chunk": 32}


@cache
def made(name):
    return (tiny.make() if name == "llama" else tiny_families.make(name))[0]


@pytest.fixture(params=NAMES)
def model(request):
    return made(request.param)


def ballast_of(pool, tokens, blank=0):
    """A sequence that holds the first blank blocks, if it leaves so many: what comes lies behind, and has to move."""
    try:
        held = [pool.open(tokens)]
    except OutOfBlocks:
        return []
    if pool.stats().blank < blank:
        pool.close([held.pop()])
    return held


def answers(engine, times=0, requests=NUM_REQUESTS, sizes=SIZES, longest=13, ballast=480, running=0):
    """Tokens of all requests, which share prefixes, with `times` resizes in between; and how many blocks moved.

    `running`: so many have to run when it is resized.
    """
    lens = [9, 30, 17, 41] * -(-requests // 4)
    prompts = [(prompt % 200).tolist() for prompt in map(np.asarray, random_prompts(lens, seed=5))]
    prompts = [prompts[1] + one if at % 3 == 0 else one for at, one in enumerate(prompts[:requests])]
    sizes, ids, done, moved = [sizes[at % len(sizes)] for at in range(times)], [], {}, []
    resize = engine.kv.storage.resize
    engine.kv.storage.resize = lambda sizes: moved.append(resize(sizes)) or moved[-1]
    for at, prompt in enumerate(prompts):
        seeded = {"temperature": 1.0, "seed": at} if at % 2 else {}
        ids.append(engine.submit(prompt, max_tokens=longest - at % 5, **seeded))
    holding = [] if running else ballast_of(engine.kv.pool, ballast)
    while engine.num_unfinished:
        done |= {completion.id: completion for completion in engine.step()}
        now = engine.scheduler.stats()
        if sizes and now.prefilling + now.decoding >= running:
            engine.kv.pool.close(holding)
            engine.resize(sizes.pop(0))
            holding = ballast_of(engine.kv.pool, ballast, blank=running)
            engine.scheduler.check()
    engine.kv.pool.close(holding)
    assert not sizes, "the requests ended before the resizes"
    return [done[id].tokens.tolist() for id in ids], sum(len(pairs) for one in moved for pairs in one.values())


@pytest.mark.parametrize(
    ("name", "route"),  # heads of the others are smaller than a group of quantized elements
    [(name, route) for name in NAMES for route in ROUTES if name == "llama" or route != "quantized"],
)
def test_tokens_between_resizes_are_those_of_a_fixed_pool(name, route):
    model, how = made(name), {**SMALL, **ROUTES[route]}
    with Engine(model, 400, **how) as engine:
        expected, _ = answers(engine)
    with Engine(model, 200, **how) as engine:
        found, moved = answers(engine, 50)
        assert found == expected
        assert moved > 30  # blocks
        engine.kv.pool.check()


def check_200_running_sequences(**how):
    """All run at once, with 50 resizes; returns the route of their attention."""
    make = partial(Engine, made("llama"), max_running=200, max_step_tokens=2048, block_size=8, **how)
    many = {"requests": 200, "longest": 75, "ballast": 14000, "running": 200}
    with make(5000) as engine:
        expected, _ = answers(engine, **many)
    with make(4600) as engine:
        found, moved = answers(engine, 50, sizes=(3000, 4600, 3100, 5200, 3200), **many)
        assert found == expected
        assert moved > 200  # blocks
        engine.kv.pool.check()
        return getattr(engine.kv.backend, "route", None)


@pytest.mark.long
@pytest.mark.parametrize("route", sorted(ROUTES.keys() - {"plain"}))  # computes one prompt a pass: few run at once
def test_200_running_sequences_give_the_tokens_of_a_fixed_pool(route):
    check_200_running_sequences(**ROUTES[route])


@pytest.mark.slow
def test_200_running_sequences_on_metal_give_the_tokens_of_a_fixed_pool(engine, monkeypatch):
    on_metal = partial(kvpool_backends.mlx.MLXBackend, native=False, metal_kernel=engine.factory(1))
    monkeypatch.setattr(kvpool_backends.mlx, "MLXBackend", lambda spec, num_blocks, **_: on_metal(spec, num_blocks))
    assert check_200_running_sequences() == "metal"


class ForgetsAMove(NumpyBackend):
    """Does not bring the first block that moves."""

    def resize(self, num_blocks, moves, **more):
        super().resize(num_blocks, moves[1:], **more)


def test_backend_that_forgets_a_move_gives_other_tokens():
    model = tiny.make()[0]
    with Engine(model, 400, backend="numpy", **SMALL) as engine:
        expected, _ = answers(engine)
    with Engine(model, 200, backend=ForgetsAMove, **SMALL) as engine:
        found, moved = answers(engine, 50)
        assert moved
        assert found != expected


def test_resize_below_what_is_live_changes_nothing(model):
    with Engine(model, 200, max_running=4) as engine:
        ids = [engine.submit(list(range(1, 130)), max_tokens=8, seed=1) for _ in range(3)]
        for _ in range(3):
            engine.step()
        before = engine.kv.pool.digest(), engine.kv.pool.num_blocks
        with pytest.raises(OutOfBlocks, match=r"\[resize\] request .* needs .* would be left"):
            engine.resize(4)
        with pytest.raises(ValueError, match=r"\[resize\] num_blocks is 1, the range is 2"):
            engine.resize(1)
        assert (engine.kv.pool.digest(), engine.kv.pool.num_blocks) == before
        while engine.num_unfinished:
            engine.step()
        assert len(ids) == 3
        engine.scheduler.check()


def test_pool_that_was_made_small_serves_longer_requests_when_it_has_grown(model):
    """Given `max_model_len`, its tables have room for them. They have not by default."""
    prompt = list(range(1, 90))
    with Engine(model, 100, **SMALL) as engine:
        expected = engine.generate(prompt, max_tokens=20).tokens.tolist()
    with Engine(model, 12, max_model_len=120, **SMALL) as engine:
        with pytest.raises(RequestRejected, match=r"108 tokens need .*, the pool has"):
            engine.generate(prompt, max_tokens=20)
        engine.resize(100)
        assert engine.generate(prompt, max_tokens=20).tokens.tolist() == expected
        with pytest.raises(RequestRejected, match="89 prompt tokens and 33 more, the model takes 120"):
            engine.generate(prompt, max_tokens=33)
    with Engine(model, 12, **SMALL) as engine:
        engine.resize(100)
        with pytest.raises(RequestRejected, match="a sequence has at most 11"):
            engine.generate(prompt, max_tokens=20)


def test_pool_of_two_engines_is_resized_by_neither():
    """Blocks of the one would move, and its storage would not know."""
    model = tiny.make()[0]
    with Engine(model, 80) as engine, Engine(model, pool=engine.kv.pool) as other:
        for one in (engine, other):
            with pytest.raises(ValueError, match=r"\[resize\] the pool was given to install"):
                one.resize(90)
        assert engine.kv.pool.num_blocks == 80


def test_prefixes_saved_and_loaded_between_resizes_have_their_bytes(model):
    """Saves hold blocks that move; loads end; what the store has serves an engine that never resizes."""
    made, held = [], {}

    def keeping(layout):
        made.append(MemoryStore(layout, 2**28))
        made[-1]._held.update(held)
        return made[-1]

    engine_of = partial(Engine, model, **SMALL)
    with engine_of(400) as engine:
        expected, _ = answers(engine)
    with engine_of(200, store=keeping) as engine:
        assert answers(engine, 50)[0] == expected
        for number in range(400):
            if not engine.is_saving:
                break
            engine.step()
            engine.resize(SIZES[number % len(SIZES)])
        assert engine.kv.stored.stats().saved_blocks
        held.update(made[0]._held)
    with engine_of(400, store=keeping) as engine:
        assert answers(engine)[0] == expected
        assert engine.kv.stored.stats().loads
