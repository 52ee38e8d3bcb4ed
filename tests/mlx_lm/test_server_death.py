"""When the engine of ``kvpool serve`` dies of something that nobody foresaw, nobody waits for it."""

import json
import threading

from server_process import Server

DIES = """
import sys
from kvpool.adapters.mlx_lm.server import AdmittingGenerator
from kvpool.cli import main

step, count = AdmittingGenerator._next, iter(range(12))

def dying(self):
    if next(count, None) is None:
        raise MemoryError("a planted end")
    return step(self)

AdmittingGenerator._next = dying
sys.exit(main(sys.argv[1:]))
"""
QUESTION = {"messages": [{"role": "user", "content": "How long is a block?"}], "max_tokens": 200}


def test_an_engine_that_dies_says_so_and_every_client_gets_an_error():
    server = Server(program=("-c", DIES))
    outcomes = []

    def ask():
        try:
            outcomes.append(server.stream(QUESTION))
        except Exception as error:
            outcomes.append(error)

    try:
        clients = [threading.Thread(target=ask) for _ in range(6)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert len(outcomes) == 6 and all(isinstance(one, Exception) for one in outcomes), outcomes
        assert server.get("/health")[0] == 503
        status, answer = server.post("/v1/chat/completions", QUESTION)
        assert status >= 400 and "generation thread died" in json.dumps(answer)
    finally:
        _, errors = server.stop()
    assert "a planted end" in errors and "generation thread died" in errors
