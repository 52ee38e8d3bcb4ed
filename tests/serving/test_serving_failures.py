"""``kvpool serve`` with an engine that fails: running requests get an error. Then the server goes on, or ends."""

import asyncio
import threading
from functools import partial

import pytest
from server_process import Server
from test_serving_faults import make

from kvpool.serving.requests import Refused
from kvpool.serving.runner import Run, Runner

PROMPT = {"prompt": "How long is a block?", "max_tokens": 40, "temperature": 0, "logit_bias": {"256": -100}}
PLANTED = """
from kvpool.adapters.mlx_lm.engine import Engine

run, count = Engine._run, iter(range(10**9))

def failing(self, step, requests):
    if next(count) % 60 == 59:
        {what}
        raise MemoryError("a planted end")
    return run(self, step, requests)

Engine._run = failing
"""

NOT_FINITE = """
import mlx.core as mx
from kvpool.adapters.mlx_lm import tiny

make = tiny.make

def damaged():
    model, tokenizer = make()
    model.model.embed_tokens.weight[tokenizer.encode(chr(1))[-1]] = mx.inf  # never drawn: it does not print
    return model, tokenizer

tiny.make = damaged
"""

STUCK = """
from kvpool.serving.runner import Run, Runner

async def stop(self):
    raise RuntimeError("planted")

Runner.stop = stop
"""


def crowd(server, count, body=PROMPT):
    """The statuses of so many requests at a time, some of them streams."""
    found = []

    def ask(number):
        if number % 2:
            found.append(server.post("/v1/completions", body)[0])
            return
        status, text = server.raw("/v1/completions", body | {"stream": True})
        found.append(200 if text.endswith("data: [DONE]\n\n") else 500 if '"server_error"' in text else status)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_engine_that_fails_fails_what_ran_and_goes_on():
    with Server("--num-blocks", "400", patch=PLANTED.format(what="pass")) as server:
        text = server.post("/v1/completions", PROMPT)[1]["choices"][0]["text"]  # 40 of 60 steps
        found = crowd(server, 6)
        assert found.count(500) == 6, found
        assert server.get("/health")[0] == 200
        status, answer = server.post("/v1/completions", PROMPT)
        assert status == 200 and answer["choices"][0]["text"] == text
        assert server.idle_metrics()['kvpool_blocks{state="used"}'] == 0
        status, errors = server.stop()
    assert status == 0 and "stopped, 0 blocks in use" in errors


def test_engine_whose_pool_is_broken_ends_the_process_with_a_status_that_tells():
    what = "Engine.reset = None"
    server = Server("--num-blocks", "400", patch=PLANTED.format(what=what))
    found = crowd(server, 6)
    found += crowd(server, 1)
    server.process.wait(60)
    status, errors = server.stop()
    assert status == 1 and "the engine was lost" in errors, errors
    assert set(found[:6]) <= {200, 500}


def test_logits_that_are_not_finite_are_an_error_of_that_request_alone_and_counted():
    with Server("--num-blocks", "400", patch=NOT_FINITE) as server:
        due = server.post("/v1/completions", PROMPT)
        assert due[0] == 200
        bad = PROMPT | {"prompt": "a \x01 b"}
        asked = {"messages": [{"role": "user", "content": "a \x01 b"}], "max_tokens": 4}
        formed = asked | {"response_format": {"type": "json_object"}}
        cases = [("/v1/completions", bad | more) for more in ({}, {"logprobs": 2}, {"n": 2, "temperature": 1})]
        cases += [("/v1/completions", {"prompt": ["a", "\x01"], "max_tokens": 4, "use_beam_search": True})]
        cases += [("/v1/chat/completions", formed), ("/v1/messages", asked)]
        for path, body in cases:
            status, answer = server.post(path, body)
            assert status == 500 and "LogitsNotFinite" in answer["error"]["message"], (path, body, answer)
        streams = [(path, body | {"stream": True}) for path, body in cases if "use_beam_search" not in body]
        for path, body in streams:
            text = server.raw(path, body)[1]
            assert "LogitsNotFinite" in text and '"error"' in text, (path, body, text)
            assert "[DONE]" not in text and "message_stop" not in text, (path, body, text)
        found = []
        others = threading.Thread(target=lambda: found.append(server.post("/v1/completions", PROMPT)))
        others.start()
        assert crowd(server, 4, bad) == [500] * 4
        others.join()
        assert found[0][1]["choices"] == due[1]["choices"]
        metrics = server.idle_metrics()
        assert metrics["kvpool_requests_not_finite_total"] == len(cases) + len(streams) + 4
        assert metrics['kvpool_blocks{state="used"}'] == 0


@pytest.mark.long
def test_signal_ends_the_process_though_its_engine_cannot_be_stopped():
    status, errors = Server("--num-blocks", "100", patch=STUCK).stop()
    assert status != 0 and "planted" in errors


def test_run_that_can_neither_begin_nor_be_taken_back_gets_its_error():
    async def program():
        runner = Runner(partial(make, max_waiting=1))
        await runner.start()
        cancel = runner.engine.cancel

        def fails_once(id):
            runner.engine.cancel = cancel
            raise MemoryError("planted")

        runner.engine.cancel = fails_once
        with pytest.raises(Refused, match="429"):
            async with asyncio.timeout(60), Run(runner, [[1, 2], [3, 4]], False, {"max_tokens": 3}):
                pass
        assert runner.engine.cancel is not fails_once
        async with Run(runner, [[1, 2]], False, {"max_tokens": 3}) as run:
            assert [len(item.samples[0].tokens) async for _, item in run] == [3]
        return await runner.stop()

    assert asyncio.run(program()) == 0


def test_call_that_fails_does_not_lose_those_behind_it():
    entered, released = threading.Event(), threading.Event()

    async def program():
        runner = Runner(make)
        await runner.start()
        step, cancel = runner.engine.step, runner.engine.cancel

        def held():
            entered.set()
            released.wait(60)
            return step()

        def fails_once(id):
            runner.engine.cancel = cancel
            raise OSError("planted")

        async with Run(runner, [[1, 2]], False, {"max_tokens": 500}):
            runner.engine.step, runner.engine.cancel = held, fails_once
            await asyncio.to_thread(entered.wait, 60)
        stopped = asyncio.create_task(runner.stop())
        await asyncio.sleep(0)
        released.set()
        return await stopped

    assert asyncio.run(program()) == 0
