"""What came of a run, from the bytes that the clients got and the clocks beside them. It asks no server.

The model has a token for each byte and says nothing but printable ASCII, so each character of an answer is a token,
and an answer has to have exactly as many as were asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import h11
import numpy as np

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Answer:
    """What one client got.

    Attributes
    ----------
    due, due_cpu : float
        When its request was to be sent, and the CPU time of the server when it was sent, in seconds.
    text : str
    times, cpu_times : list of float
        When each character came.
    failure : str or None
        What is wrong with it.
    """

    due: float
    due_cpu: float
    text: str
    times: list[float] = field(repr=False)
    cpu_times: list[float] = field(repr=False)
    failure: str | None


def read(asked: dict[str, Any], got: dict[str, Any]) -> Answer:
    """Read an answer of `clients` to one request."""
    text, times, cpu_times, failure, ended = "", [], [], got["error"], False
    try:
        for wall, cpu, event in _events(got["pieces"]):
            if event == "[DONE]":
                ended = True
                continue
            told = json.loads(event)
            if "error" in told:
                failure = "an error in the stream"
            for choice in told.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                text += piece
                times += [wall] * len(piece)
                cpu_times += [cpu] * len(piece)
    except (h11.ProtocolError, ValueError, KeyError) as error:
        failure = failure or f"{error}"
    if failure is None and not ended:
        failure = "the stream has no end"
    most = asked["body"]["max_tokens"]
    if failure is None and len(text) != most:
        failure = f"{len(text)} tokens of {most}"
    return Answer(asked["at"], got["sent_cpu"], text, times, cpu_times, failure)


def _events(pieces: Iterable[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Yield the data of each server-sent event with the times of its last byte. Raise what is wrong with the answer."""
    line, rest = h11.Connection(h11.CLIENT), b""
    line.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    line.send(h11.EndOfMessage())
    for wall, cpu, piece in pieces:
        line.receive_data(piece.encode("latin-1"))
        while not isinstance(event := line.next_event(), h11.PAUSED | h11.NEED_DATA | h11.ConnectionClosed):
            if isinstance(event, h11.Response) and event.status_code != 200:
                raise ValueError(f"status {event.status_code}")
            if isinstance(event, h11.Data):
                *events, rest = (rest + bytes(event.data)).split(b"\n\n")
                for one in events:
                    if one.startswith(b"data: "):
                        yield wall, cpu, one[6:].decode()
            if isinstance(event, h11.EndOfMessage):
                return


@dataclass(frozen=True)
class Result:
    """A run of one server.

    Attributes
    ----------
    wall, cpu : float
        Seconds until the last answer ended, and CPU seconds of the server in them.
    clients_cpu : float
        CPU seconds of the clients, which are another process.
    nbytes : int
        What the resident memory of the server's process has grown by since it was ready, at its peak.
    """

    answers: list[Answer] = field(repr=False)
    wall: float
    cpu: float
    clients_cpu: float
    nbytes: int = 0

    @property
    def failures(self) -> list[str]:
        """What is wrong with answers."""
        return [answer.failure for answer in self.answers if answer.failure is not None]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers that are right."""
        return sum(len(answer.text) for answer in self.answers if answer.failure is None)

    def as_json(self) -> dict[str, Any]:
        """Return rates, latencies in milliseconds, bytes and failures. Wrong answers count in failures alone."""
        right = [answer for answer in self.answers if answer.failure is None]
        found: dict[str, Any] = {
            **{"requests": len(self.answers), "failures": self.failures, "tokens": self.num_tokens},
            **{"wall_seconds": self.wall, "cpu_seconds": self.cpu, "clients_cpu_seconds": self.clients_cpu},
            "tokens_per_sec": self.num_tokens / self.wall if self.wall > 0 else None,
            "tokens_per_cpu_sec": self.num_tokens / self.cpu if self.cpu > 0 else None,
            "grown_nbytes": self.nbytes,
        }
        series: dict[str, Any] = {
            "ttft": [answer.times[0] - answer.due for answer in right],
            "ttft_cpu": [answer.cpu_times[0] - answer.due_cpu for answer in right],
            "itl": np.concatenate([np.zeros(0), *(np.diff(answer.times) for answer in right)]),
            "itl_cpu": np.concatenate([np.zeros(0), *(np.diff(answer.cpu_times) for answer in right)]),
            "whole": [answer.times[-1] - answer.due for answer in right],
        }
        for name, values in series.items():
            ms = (
                np.percentile(1e3 * np.array(values), PERCENTILES).tolist()
                if len(values)
                else [None] * len(PERCENTILES)
            )
            found |= {f"{name}_ms_p{p}": value for p, value in zip(PERCENTILES, ms, strict=True)}
        return found


def result(asked: dict[str, Any], got: dict[str, Any], **more: Any) -> Result:
    """Return the result of a run of `clients`."""
    answers = [read(*pair) for pair in zip(asked["requests"], got["answers"], strict=True)]
    return Result(answers, got["wall"], got["server_cpu"], got["cpu"], **more)
