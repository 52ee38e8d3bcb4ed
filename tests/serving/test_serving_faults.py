"""An exception at any place of the engine, with clients running: each gets its answer or an error, and the next all.

``KVPOOL_FAULT_STRIDE=1 python -m pytest tests/serving/test_serving_faults.py`` plants one at each of the 16,000 events
that a profiler sees. By default it is one of 331.
"""

import asyncio
import logging
import os
import random
import sys

import pytest
from mlx_models import on_cpu

from kvpool.adapters.mlx_lm import Engine, tiny
from kvpool.adapters.mlx_lm.engine import Completion
from kvpool.serving.requests import Refused
from kvpool.serving.runner import Run, Runner

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # faults in generators
STRIDE = int(os.environ.get("KVPOOL_FAULT_STRIDE", 331))
SEED = int(os.environ.get("KVPOOL_FUZZ_SEED", 7))
ERRORS = (MemoryError, RuntimeError, KeyboardInterrupt, SystemExit, OSError)
ALL = {"max_tokens": 5, "eos": (), "seed": 1}
FIELDS = {"stop": ["zzz"], "top_logprobs": 2, "frequency_penalty": 0.5, "logit_bias": {3: 1.0}}
CLIENTS = (  # prompts, whether the client streams, options
    ([range(1, 40)], True, {}),
    ([[5, 6, 7], [8, 9, 10, 11]], False, {"n": 2, "temperature": 1.0}),
    ([range(1, 30)], True, FIELDS),
)


class Fault:
    """Raises at event number `at` of the profiler, within the calls that `watch` returns. `place` is where that was."""

    def __init__(self, at, error):
        self.at, self._error, self.place = at, error, None

    def watch(self, call):
        def watched(*args, **options):
            if not self.at:
                return call(*args, **options)
            sys.setprofile(self._event)
            try:
                return call(*args, **options)
            finally:
                sys.setprofile(None)

        return watched

    def _event(self, frame, event, value):
        if self.at and getattr(value, "__name__", "") != "__exit__":  # a lock would never be released
            self.at -= 1
            if not self.at:
                self.place = f"{event} in {frame.f_code.co_qualname}, line {frame.f_lineno}, {self._error.__name__}"
                raise self._error("planted")


async def ask(runner, prompts, listens, options):
    """The tokens of all samples, or the word failed."""
    found = {}
    try:
        async with Run(runner, prompts, listens, ALL | options) as run:
            async for number, item in run:
                if isinstance(item, Completion):
                    found[number] = [sample.tokens.tolist() for sample in item.samples]
    except Refused:
        return "failed"
    return found


async def crowd(runner):
    asked = [asyncio.create_task(ask(runner, *client)) for client in CLIENTS]
    await asyncio.wait(asked, timeout=30)
    return [one.result() if one.done() else "no answer" for one in asked]


def make(**options):
    with on_cpu():
        model, tokenizer = tiny.make()
        return Engine(model, 200, tokenizer=tokenizer, prefill_chunk=16, **options)


async def harm(runner, at, error, due):
    """What is wrong after a fault. None: the clients need fewer events than that."""
    engine, fault = runner.engine, Fault(at, error)
    calls = {name: getattr(engine, name) for name in ("step", "submit", "cancel")}
    vars(engine).update({name: fault.watch(call) for name, call in calls.items()})
    found = await crowd(runner)
    fault.at = 0
    if fault.place is None:
        return None
    wrong = [f"{one}, due is {right}" for one, right in zip(found, due, strict=True) if one not in (right, "failed")]
    again = await crowd(runner)
    if again != due:
        wrong.append(f"then {again}, due is {due}")
    return [f"event {at}, {fault.place}: {one}" for one in wrong]


async def program(runner, stride, seed):
    """All that goes wrong, the number of faults, and the blocks that are left."""
    await runner.start()
    draw, due, wrong, at = random.Random(seed), await crowd(runner), [], 0
    while not wrong and runner.failure is None:
        at += draw.randrange(2 * stride) if stride > 1 else 1
        found = await harm(runner, at + 1, draw.choice(ERRORS), due)
        if found is None:
            break
        wrong += found
    return wrong, at, await runner.stop()


def test_exception_anywhere_in_the_engine_harms_nobody_who_comes_later():
    print(f"seed {SEED}")
    logging.disable(logging.CRITICAL)
    try:
        runner = Runner(make)
        wrong, events, left = asyncio.run(program(runner, STRIDE, SEED))
    finally:
        logging.disable(logging.NOTSET)
    assert not wrong, wrong
    assert runner.failure is None and not left
    assert events > 5000, "the clients hardly used the engine"


def test_question_that_raises_is_answered_by_its_exception_and_harms_nobody():
    async def ask_all():
        runner = Runner(make)
        await runner.start()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(runner.ask(lambda engine: 1 // 0), 60)
        answers = await runner.ask(lambda engine: engine.kv.pool.num_blocks), await crowd(runner)
        return answers, runner.failure, await runner.stop()

    (blocks, answers), failure, left = asyncio.run(ask_all())
    assert (blocks, failure, left) == (200, None, 0) and all(isinstance(one, dict) for one in answers)


@pytest.mark.long
def test_server_that_does_not_recover_is_found():
    runner = Runner(make)
    runner._recover = lambda engine: None
    logging.disable(logging.CRITICAL)
    try:
        wrong, _, _ = asyncio.run(program(runner, 40, SEED))
    finally:
        logging.disable(logging.NOTSET)
    assert wrong
