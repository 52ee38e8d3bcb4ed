"""Chats for a model whose tokenizer has a token for each byte: their lengths in tokens are those of their texts."""

from __future__ import annotations

import string
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.serving.workload import Lengths

LETTERS = np.array(list(string.ascii_letters + string.digits + " "))


@dataclass(frozen=True)
class Chat:
    """A streamed chat: when its client sends it, what it says, and how many tokens its answer has."""

    at: float
    system: str
    user: str
    max_tokens: int
    fields: tuple[tuple[str, Any], ...] = ()  # more of the body

    def as_json(self) -> dict[str, Any]:
        """Return it as `clients` reads it."""
        messages = [{"role": role, "content": getattr(self, role)} for role in ("system", "user")]
        body = {"messages": messages, "max_tokens": self.max_tokens, "temperature": 0.0, "stream": True}
        return {"at": self.at, "body": body | dict(self.fields)}


@dataclass(frozen=True)
class Shape:
    """What is sent.

    Attributes
    ----------
    requests : int
    rate : float
        Poisson arrivals per second.
    systems, system_tokens : int
        Different system prompts, and tokens of each.
    user, output : str
        Lengths in tokens, see `Lengths`.
    """

    requests: int = 64
    rate: float = 16.0
    systems: int = 8
    system_tokens: int = 1024
    user: str = "lognormal:24:0.7:96"
    output: str = "lognormal:32:0.7:128"
    seed: int = 1

    def chats(self) -> list[Chat]:
        """Return the chats in order of arrival."""
        for_arrivals, for_texts, for_users, for_outputs = np.random.default_rng(self.seed).spawn(4)

        def text(length: int) -> str:
            return "".join(for_texts.choice(LETTERS, length))

        systems = [text(self.system_tokens) for _ in range(self.systems)]
        columns = (
            np.cumsum(for_arrivals.exponential(1 / self.rate, self.requests)).tolist(),
            for_texts.integers(0, self.systems, self.requests).tolist(),
            Lengths.parse(self.user).draw(for_users, self.requests).tolist(),
            Lengths.parse(self.output).draw(for_outputs, self.requests).tolist(),
        )
        return [Chat(at, systems[which], text(user), most) for at, which, user, most in zip(*columns, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)
