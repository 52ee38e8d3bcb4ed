"""What arrives when: requests with Poisson arrivals and random lengths, or those of a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.trace import Trace

MIXERS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9], np.uint64)  # odd numbers of SplitMix64


@dataclass(frozen=True, eq=False)
class Workload:
    """R requests in order of arrival.

    Attributes
    ----------
    name : str
        For people.
    arrivals : float64 ``[R]``
        Seconds, ascending.
    prompts : list of int32 ``[tokens]``
        At least one token each.
    max_tokens : int64 ``[R]``
        Tokens of each answer, at least 1: requests end by length, so that every server does the same work.
    samples : int
        Answers per request.
    """

    name: str
    arrivals: NDArray[np.float64]
    prompts: list[NDArray[np.int32]] = field(repr=False)
    max_tokens: NDArray[np.int64]
    samples: int = 1

    def __len__(self) -> int:
        return len(self.prompts)

    def one_by_one(self) -> Workload:
        """Return the same with every sample as a request of its own, for servers that know no samples."""
        n = self.samples
        prompts = [prompt for prompt in self.prompts for _ in range(n)]
        return replace(
            self,
            arrivals=np.repeat(self.arrivals, n),
            prompts=prompts,
            max_tokens=np.repeat(self.max_tokens, n),
            samples=1,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that are to be generated."""
        return self.samples * int(self.max_tokens.sum())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer: what a static reservation holds for each sequence."""
        return max(len(prompt) + int(new) for prompt, new in zip(self.prompts, self.max_tokens, strict=True))


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens.

    ``fixed`` is always `first`; ``uniform`` is between `first` and `last`, both included; ``lognormal`` has the
    median `first` and the standard deviation `sigma` of its logarithm, and is cut at `last`.
    """

    kind: str
    first: int
    last: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read ``"64"``, ``"uniform:16:128"`` or ``"lognormal:64:0.8:512"`` (the cut may be left out: 8 medians).

        Raises
        ------
        ValueError
            It is none of these.
        """
        kind, _, rest = text.partition(":")
        try:
            if not rest:
                found = cls("fixed", int(kind), int(kind))
            elif kind == "uniform":
                first, last = map(int, rest.split(":"))
                found = cls(kind, first, last)
            elif kind == "lognormal":
                median, sigma, *cut = rest.split(":")
                (last,) = map(int, cut) if cut else (8 * int(median),)
                found = cls(kind, int(median), last, float(sigma))
            else:
                raise ValueError(kind)
        except ValueError:
            raise ValueError(f"{text}: lengths are N, uniform:FIRST:LAST or lognormal:MEDIAN:SIGMA[:MAX]") from None
        if not (1 <= found.first <= found.last < 2**31 and 0 <= found.sigma <= 10):
            raise ValueError(f"{text}: lengths go from 1 up to 2^31 - 1, sigma from 0 to 10")
        return found

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return `count` lengths, int64 ``[count]``."""
        if self.kind == "lognormal":
            drawn = np.exp(rng.normal(math.log(self.first), self.sigma, count))
            return np.clip(np.rint(drawn), 1, self.last).astype(np.int64)
        return rng.integers(self.first, self.last, count, endpoint=True)

    @property
    def mean(self) -> float:
        """The expected length (of ``lognormal`` without its cut)."""
        if self.kind == "lognormal":
            return self.first * math.exp(self.sigma**2 / 2)
        return (self.first + self.last) / 2


def poisson_arrivals(count: int, rate: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return `count` arrivals in seconds with exponential gaps, `rate` per second; all at 0 when it is infinite."""
    if math.isinf(rate):
        return np.zeros(count)
    return np.cumsum(rng.exponential(1 / rate, count))


def make_workload(
    prompt: Lengths,
    output: Lengths,
    *,
    requests: int | None = None,
    tokens_target: int | None = None,
    rate: float = math.inf,
    shared_prefix: int = 0,
    vocab_size: int = 512,
    samples: int = 1,
    seed: int = 1,
) -> Workload:
    """Return random requests: `requests` of them, or as many as it takes to generate `tokens_target` tokens.

    Arrivals, lengths and tokens have random numbers of their own each, so that a change of the rate, say, leaves
    the requests as they are.

    Parameters
    ----------
    prompt, output : Lengths
        Of what is not shared of a prompt, and of answers.
    requests, tokens_target : int
        Exactly one of them.
    rate : float
        Arrivals per second.
    shared_prefix : int
        Tokens that every prompt begins with.
    vocab_size : int
        Tokens are in ``[0, vocab_size)``.
    samples : int
        Answers per request.
    """
    if (requests is None) == (tokens_target is None):
        raise TypeError("[make_workload] either requests or tokens_target is needed, and not both")
    for_arrivals, for_prompts, for_outputs, for_tokens = np.random.default_rng(seed).spawn(4)
    if requests is None:
        assert tokens_target is not None
        most = max(1, -(-tokens_target // samples))  # an answer has one token at least
        ends = np.cumsum(output.draw(for_outputs, min(most, 10_000_000)))
        requests = min(int(np.searchsorted(ends, most)) + 1, len(ends))
        outputs = np.diff(ends[:requests], prepend=0)
    else:
        outputs = output.draw(for_outputs, requests)
    shared = for_tokens.integers(0, vocab_size, shared_prefix, np.int32)
    prompts = [
        np.concatenate([shared, for_tokens.integers(0, vocab_size, int(own), np.int32)])
        for own in prompt.draw(for_prompts, requests)
    ]
    name = f"{requests} requests" + (f" that share {shared_prefix} tokens" if shared_prefix else "")
    return Workload(name, poisson_arrivals(requests, rate, for_arrivals), prompts, outputs, samples)


def trace_workload(
    trace: Trace, *, requests: int | None = None, scale: int = 1, vocab_size: int | None = None
) -> Workload:
    """Return the requests of a trace at its own times, from 0 on.

    Tokens are made of the trace's hash ids: prompts share prefixes exactly as in the trace. With `vocab_size` they
    are folded into a model's vocabulary by a mixing function, which may add a coincidence, never lose one.

    Parameters
    ----------
    requests : int, optional
        Only so many of the first.
    scale : int
        Lengths are divided by it (rounded up), for models that are slow; times are not.
    vocab_size : int, optional
        By default tokens are numbers of the trace, which no model has.
    """
    if scale < 1:
        raise ValueError(f"[trace_workload] scale is {scale}, the least is 1")
    trace = trace if requests is None else trace.head(requests)
    order = np.argsort(trace.timestamps, kind="stable")
    prompts = []
    for row in order.tolist():
        tokens = trace.tokens(row, int(trace.prompts[row]))[::scale]
        positions = np.arange(len(tokens), dtype=np.uint64)
        if vocab_size is not None:
            mixed = (tokens.astype(np.uint64) + np.uint64(1)) * MIXERS[0] + positions * MIXERS[1]
            tokens = ((mixed >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int32)
        prompts.append(np.ascontiguousarray(tokens))
    arrivals = (trace.timestamps[order] - trace.timestamps.min()) / 1e3
    outputs = np.maximum(-(-trace.outputs[order] // scale), 1)
    return Workload(trace.name, arrivals.astype(np.float64), prompts, outputs)
