"""What HTTP costs: CPU time of a token from the server, beside the same requests on `Engine` in this process."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.gate import Gate
from benchmarks.http.judge import result
from benchmarks.http.servers import CHUNK, RUNNING, SERVERS, send, started
from benchmarks.http.workload import Chat, Shape
from kvpool.adapters.mlx_lm import Engine, loading

LIMIT = 0.05
NO_END = {256: -100.0}  # of the tiny model: answers are as long as they may be
SHAPE = Shape(RUNNING, float("inf"), 1, 64, "16", "100")  # all at once; nearly all steps are 64 decodes


def gate(model: str, repetitions: int) -> Gate:
    """Return the share of a step that HTTP takes. Server and engine take turns."""
    by_http, alone = zip(*((_by_http(model, seed), _alone(model, seed)) for seed in range(repetitions)), strict=True)
    ours, base = median(by_http), median(alone)
    note = f"{1e6 * (ours - base):.0f} us more than {1e6 * base:.0f} us of a token, {RUNNING} streams"
    return Gate("CPU time of HTTP, share of a step", ours / base - 1, LIMIT, True, note)


def _chats(seed: int) -> list[Chat]:
    """Return the chats."""
    fields = (("logit_bias", {str(token): bias for token, bias in NO_END.items()}),)
    return [replace(chat, fields=fields) for chat in replace(SHAPE, seed=seed).chats()]


def _by_http(model: str, seed: int) -> float:
    """Return CPU seconds of a token that the server sends."""
    with started(SERVERS["kvpool"], model) as server:
        send(server, _chats(seed + 1000))
        found = result(*send(server, _chats(seed)))
    return found.cpu / found.num_tokens if not found.failures else float("nan")


def _alone(model: str, seed: int) -> float:
    """Return CPU seconds of a token of the engine."""
    loaded, tokenizer = loading.load(model)
    seconds = 0.0
    budgets: dict[str, Any] = {"max_running": RUNNING, "prefill_chunk": CHUNK}
    budgets["max_step_tokens"] = max(2 * CHUNK, RUNNING)
    with Engine(loaded, 2048, tokenizer=tokenizer, **budgets) as engine:
        for number in (seed + 1000, seed):
            chats = _chats(number)
            prompts = [chat.as_json()["body"]["messages"] for chat in chats]
            begin = time.process_time()
            engine.batch(prompts, max_tokens=chats[0].max_tokens, logit_bias=NO_END)
            seconds = time.process_time() - begin
    return seconds / sum(chat.max_tokens for chat in chats)
