"""``kvpool serve`` with an engine that fails: running requests get an error. Then the server goes on, or ends."""

import threading

from server_process import Server

PROMPT = {"prompt": "How long is a block?", "max_tokens": 40, "temperature": 0, "logit_bias": {"256": -100}}
PLANTED = """
import sys
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.cli import main

run, count = Engine._run, iter(range(10**9))

def failing(self, step, requests):
    if next(count) % 60 == 59:
        {what}
        raise MemoryError("a planted end")
    return run(self, step, requests)

Engine._run = failing
sys.exit(main(sys.argv[1:]))
"""


def crowd(server, count):
    """The statuses of so many requests at a time, some of them streams."""
    found = []

    def ask(number):
        if number % 2:
            found.append(server.post("/v1/completions", PROMPT)[0])
            return
        status, text = server.raw("/v1/completions", PROMPT | {"stream": True})
        found.append(200 if text.endswith("data: [DONE]\n\n") else 500 if '"server_error"' in text else status)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_engine_that_fails_fails_what_ran_and_goes_on():
    server = Server("--num-blocks", "400", program=("-c", PLANTED.format(what="pass")))
    try:
        text = server.post("/v1/completions", PROMPT)[1]["choices"][0]["text"]  # 40 of 60 steps
        found = crowd(server, 6)
        assert found.count(500) == 6, found
        assert server.get("/health")[0] == 200
        status, answer = server.post("/v1/completions", PROMPT)
        assert status == 200 and answer["choices"][0]["text"] == text
        assert server.idle_metrics()['kvpool_blocks{state="used"}'] == 0
    finally:
        status, errors = server.stop()
    assert status == 0 and "stopped, 0 blocks in use" in errors


def test_engine_whose_pool_is_broken_ends_the_process_with_a_status_that_tells():
    what = "self.kv.pool.blocks.alloc(1); self.scheduler._core.decode_tokens = -1; self.scheduler._core.count[1] = 5"
    server = Server("--num-blocks", "400", program=("-c", PLANTED.format(what=what)))
    found = crowd(server, 6)
    found += crowd(server, 1)
    server.process.wait(60)
    status, errors = server.stop()
    assert status == 1 and "the engine was lost" in errors, errors
    assert set(found[:6]) <= {200, 500}
