"""What each table asks, and the answers to all of them, each question asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from benchmarks.quality.answers import Answer, Quality
from benchmarks.quality.documents import Documents
from benchmarks.quality.policies import BITS, UNLIMITED, Policy, compared, h2o, rotating, slack_of
from benchmarks.quality.settings import Settings


class Question(NamedTuple):
    """A policy on documents of so many tokens."""

    length: int
    policy: Policy


class Subject(Protocol):
    """Whoever reads documents on a cache of some policy."""

    def answer(self, documents: Any, policy: Policy) -> Answer:
        """See `models.Model`."""
        ...


def policies(s: Settings) -> list[Question]:
    """All policies at the advised budget."""
    return [Question(s.context, policy) for policy in compared(s.max_kv)]


def heavy(s: Settings) -> list[Question]:
    """Heavy hitters or the newest: shares of one budget."""
    half = s.context // 2
    return [
        Question(s.context, policy) for policy in (UNLIMITED, rotating(half), h2o(half, 8), h2o(half, 4), h2o(half))
    ]


def max_kv(s: Settings) -> list[Question]:
    """Budgets from a sixteenth of the context to all of it; whole blocks leave where there are four or more."""
    rows = [Question(s.context, UNLIMITED)]
    for share in (16, 8, 4, 2, 1):
        budget = max(32, s.context // share)
        blocks = [Policy("block", budget)] if budget >= 64 else []
        control = [Policy("random", budget, budget // 2, slack=slack_of(budget))] if share == 2 else []
        rows += [Question(s.context, policy) for policy in (rotating(budget), h2o(budget), *blocks, *control)]
    return rows


def length(s: Settings) -> list[Question]:
    """Documents from half of the context to four times as long, at the budget of the context."""
    lengths = [s.context // 2, s.context, 2 * s.context, 4 * s.context]
    return [Question(n, policy) for n in lengths for policy in (UNLIMITED, rotating(s.max_kv), h2o(s.max_kv))]


def bits(s: Settings) -> list[Question]:
    """K and V in 16, 8 or 4 bits, of all tokens and of those that H2O keeps."""
    return [Question(s.context, policy.stored(*of)) for policy in (UNLIMITED, h2o(s.max_kv)) for of in BITS]


ASKED: dict[str, Callable[[Settings], list[Question]]] = {
    "policies": policies,
    "heavy": heavy,
    "max_kv": max_kv,
    "length": length,
    "bits": bits,
}


@dataclass
class Bench:
    """A subject, and what it answered already.

    Attributes
    ----------
    draw : callable
        From length, number of seeds and samples of each to documents.
    """

    settings: Settings
    subject: Subject
    draw: Callable[[int, int, int], Documents]
    say: Callable[[str], None] = lambda what: None
    _known: dict[Question, Quality] = field(default_factory=dict)
    _documents: dict[int, Documents] = field(default_factory=dict)

    @cached_property
    def tables(self) -> dict[str, list[Question]]:
        """The questions of each table that was asked for."""
        return {name: ASKED[name](self.settings) for name in self.settings.tables}

    @property
    def total(self) -> int:
        """Questions in all, each counted once."""
        return len({question for questions in self.tables.values() for question in questions})

    def documents(self, length: int) -> Documents:
        """Return the documents of one length: fewer where they are long, so that a table takes as long as another."""
        if length not in self._documents:
            s = self.settings
            self._documents[length] = self.draw(
                length, s.seeds, max(1, s.samples * s.context // max(length, s.context))
            )
        return self._documents[length]

    def ask(self, question: Question) -> Quality:
        """Return the answer, which is remembered."""
        if question not in self._known:
            policy, documents = question.policy, self.documents(question.length)
            budget = f" of {policy.max_kv}" if policy.max_kv else ""
            self.say(f"{question.length} tokens, {policy.name}{budget}, {policy.bits} bits")
            self._known[question] = Quality.of(documents, self.subject.answer(documents.tokens, policy))
        return self._known[question]

    def rows(self) -> Iterator[tuple[str, list[tuple[Question, Quality]]]]:
        """Yield each table with its answers."""
        for name, questions in self.tables.items():
            yield name, [(question, self.ask(question)) for question in questions]


Table = Sequence[tuple[Question, Quality]]


def of(table: Table, **wanted: Any) -> Quality:
    """Return the row of the policy that is so."""
    for question, quality in table:
        if all(getattr(question.policy, name) == value for name, value in wanted.items()):
            return quality
    raise KeyError(wanted)
