"""What one request does to others: how long they wait with it and without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from benchmarks.gate import Gate
from benchmarks.http.judge import Result, result
from benchmarks.http.servers import Server, send, started
from benchmarks.http.workload import Chat, Shape

LIMIT = 1.2
OTHERS = Shape(16, 40.0, 4, 64, "16", "24")
HARM = {
    "1,500 tokens with a seed": Chat(0.0, "", "a" * 16, 1500, (("seed", 7),)),
    "a wrong model name": Chat(0.0, "", "a" * 16, 100, (("model", "gpt-4o-mini"),)),
    "an adapters field": Chat(0.0, "", "a" * 16, 100, (("adapters", "/etc"),)),
    "a prompt that is too long": Chat(0.0, "", "a" * 20_000, 100),
}


def gates(name: str, arguments: Sequence[str], model: str, repetitions: int) -> list[Gate]:
    """Return how much longer others wait beside each of these requests. Runs with and without it take turns."""
    decided = []
    for harm, chat in HARM.items():
        with started(arguments, model) as server:
            send(server, replace(OTHERS, seed=999).chats())
            runs = [
                [_others(server, more, 2 * seed + bool(more)) for more in ((), (chat,))] for seed in range(repetitions)
            ]
        failures = sorted({failure for pair in runs for run in pair for failure in run.failures})
        ratio = None if failures else median(waits(beside) / waits(alone) for alone, beside in runs)
        note = ", ".join(failures) or "CPU time of the server from request to end"
        decided.append(Gate(f"{name}: waits of others beside {harm}", ratio, LIMIT, True, note))
    return decided


def _others(server: Server, more: Sequence[Chat], seed: int) -> Result:
    """Send the others behind `more`, and return what came of the others."""
    chats = [replace(chat, at=chat.at + 0.1) for chat in replace(OTHERS, seed=seed).chats()]
    asked, got = send(server, [*more, *chats], limit=30)
    return result(asked | {"requests": asked["requests"][len(more) :]}, got | {"answers": got["answers"][len(more) :]})


def waits(run: Result) -> float:
    """Return the mean CPU time of the server from a request to the end of its answer."""
    return fmean(answer.cpu_times[-1] - answer.due_cpu for answer in run.answers)
