"""Input and output of the scheduler, `Request` and `Output`; its tenants, groups and sequences, and `WaitingQueue`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from numbers import Real
from operator import index
from typing import Any, NamedTuple

import numpy as np
from numpy import int32
from numpy.typing import NDArray

from kvpool.retention import Keep

MOST = 2**31 - 1
SAMPLES = 64  # of a request, or as many as there are lanes
ENDS = 1024  # tokens and sequences that end a request
END_TOKENS = 256  # of such a sequence


def integer(call: str, name: str, value: Any, low: int, high: int = MOST) -> int:
    """Return `value` as an int, or say what is wrong with it."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"[{call}] {name} must be an int, not bool ({value!r})")
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"[{call}] {name} must be an int, not {type(value).__name__} ({value!r})") from None
    if not low <= number <= high:
        raise ValueError(f"[{call}] {name} must be {low} .. {high} ({number})")
    return number


def real(call: str, name: str, value: Any, low: float, high: float) -> float:
    """Return `value` as a float, or say what is wrong with it."""
    is_number = isinstance(value, Real) and not isinstance(value, bool | np.bool_)
    if not is_number:
        raise TypeError(f"[{call}] {name} must be a number, not {type(value).__name__} ({value!r})")
    if not low <= value <= high:
        raise ValueError(f"[{call}] {name} must be {low:g} .. {high:g} ({value})")
    return float(value)


def token_array(call: str, name: str, tokens: Any) -> NDArray[int32]:
    """Return a read-only int32 copy of a 1-D sequence of tokens, which may be empty."""
    if isinstance(tokens, str | bytes | bytearray):
        raise TypeError(f"[{call}] {name} must be integers, not {type(tokens).__name__}")
    if isinstance(tokens, np.ndarray):
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"[{call}] {name} must be integers ({tokens.dtype})")
        if tokens.ndim != 1:
            raise ValueError(f"[{call}] {name} must have one dimension (shape {tokens.shape})")
        least, most = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        if least < 0 or most > MOST:
            raise ValueError(f"[{call}] a token of {name} must be 0 .. {MOST} ({least if least < 0 else most})")
    else:
        try:
            tokens = list(tokens)
        except TypeError:
            raise TypeError(f"[{call}] {name} must be integers, not {type(tokens).__name__} ({tokens!r})") from None
        if not (set(map(type, tokens)) <= {int} and max(tokens, default=0) <= MOST and min(tokens, default=0) >= 0):
            tokens = [integer(call, f"{name}[{i}]", token, 0) for i, token in enumerate(tokens)]
    owned = np.array(tokens, np.int32)
    owned.flags.writeable = False
    return owned


def _token_tuple(name: str, tokens: Any) -> tuple[int, ...]:
    return tuple(token_array("Request", name, tokens).tolist())


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and how to continue it.

    Parameters
    ----------
    prompt : ints
        At least one token, each 0 .. 2^31 - 1. Kept as a read-only int32 array.
    max_tokens : int, default 16
        Most tokens to generate, per sequence.
    id : hashable, optional
        Name of the request. The scheduler numbers a request without one, and shows a copy that has the number here.
    eos : int or ints
        Tokens that end a sequence, at most 1,024. The token is part of the output.
    stop : sequence of sequences of ints
        The output ends when it ends with one of these, which are part of it: at most 1,024, of at most 256 tokens each.
    n : int, default 1
        Samples of the prompt, at most 64, or ``max_running`` if that is more. With a beam: how many of the best
        hypotheses to return.
    beam_width : int, default 0
        0: sampling. Otherwise the number of hypotheses of a beam search, ``n <= beam_width``.
    length_penalty : float, default 1.0
        A hypothesis scores ``sum of logprobs / length ** length_penalty``.
    priority : int, default 0
        Of the requests of a tenant, the higher goes first. Waiting makes up for it, see ``Scheduler(ageing=)``.
    tenant : hashable, optional
        Who sends the request. Tenants share the service by their weights, see ``Scheduler(weights=)``.
    deadline : float, optional
        Time by the scheduler's clock when the request ends with what it has.
    namespace : bytes
        Namespace of the prefix cache, made by `kvpool.namespace`.
    cut : int, optional
        Where the part of the prompt begins that the next turn of a conversation may rewrite. Windows, chunks and
        states keep a checkpoint there. By default 16 tokens before the end.
    keep : Keep, optional
        How long the prompt and the answer stay in the prefix cache after the request, ``ttl`` in whole seconds of the
        scheduler's clock.
    user : object
        Passed through to the runner, for instance sampling options.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, or a wrong value.
    """

    prompt: Any
    max_tokens: int = 16
    _: KW_ONLY
    id: Hashable = None
    eos: Any = ()
    stop: Any = ()
    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    priority: int = 0
    tenant: Hashable = None
    deadline: float | None = None
    namespace: bytes = b""
    cut: int | None = None
    keep: Keep | None = None
    user: Any = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("prompt", token_array("Request", "prompt", self.prompt))
        if not self.prompt.size:
            raise ValueError("[Request] the prompt is empty, it needs at least one token")
        put("max_tokens", integer("Request", "max_tokens", self.max_tokens, 1))
        for name in ("id", "tenant"):
            value = getattr(self, name)
            try:
                hash(value)
            except TypeError:
                kind = type(value).__name__
                raise TypeError(f"[Request] {name} must be hashable, {kind} is not ({value!r})") from None
        eos, stop = self.eos, self.stop
        put("eos", _token_tuple("eos", eos if isinstance(eos, Iterable) else (integer("Request", "eos", eos, 0),)))
        if isinstance(stop, str | bytes) or not isinstance(stop, Iterable):
            raise TypeError(f"[Request] stop must be sequences of tokens, not {type(stop).__name__} ({stop!r})")
        put("stop", tuple(_token_tuple(f"stop[{i}]", tokens) for i, tokens in enumerate(stop)))
        if () in self.stop:
            raise ValueError(f"[Request] stop[{self.stop.index(())}] is empty, it needs at least one token")
        put("beam_width", integer("Request", "beam_width", self.beam_width, 0))
        put("n", integer("Request", "n", self.n, 1))
        if self.beam_width and self.n > self.beam_width:
            raise ValueError(f"[Request] n must be 1 .. beam_width with a beam ({self.n} > {self.beam_width})")
        put("length_penalty", real("Request", "length_penalty", self.length_penalty, -32, 32))
        if self.deadline is not None:
            put("deadline", real("Request", "deadline", self.deadline, -1e300, 1e300))
        put("priority", integer("Request", "priority", self.priority, -(2**63), 2**63 - 1))
        if not isinstance(self.namespace, bytes):
            raise TypeError(f"[Request] namespace must be bytes, not {type(self.namespace).__name__}")
        if self.cut is not None:
            put("cut", integer("Request", "cut", self.cut, 0, self.prompt.size))
        if not isinstance(self.keep, Keep | None):
            raise TypeError(f"[Request] keep must be a kvpool.retention.Keep, not {type(self.keep).__name__}")


class Times(NamedTuple):
    """Times of events of a request, by the scheduler's clock. None: the event did not happen."""

    arrived: float
    admitted: float | None
    first_token: float | None
    finished: float


@dataclass(frozen=True, eq=False, slots=True)
class Output:
    """One sequence that has ended."""

    id: Hashable  #: the id of the request
    index: int  #: number of the sample; with a beam: the rank of the hypothesis, best first
    tokens: NDArray[int32]  #: int32 ``[N]``, with the eos token or the stop sequence that ended them
    logprobs: NDArray[np.float32] | None  #: float32 ``[N]``, as given to `update`, NaN for tokens without one
    score: float | None  #: of a hypothesis of a beam
    finish_reason: str  #: ``"eos"``, ``"stop"``, ``"length"``, ``"cancelled"`` or ``"deadline"``
    num_cached: int  #: prompt tokens that the prefix cache had when the request was first admitted
    preemptions: int  #: how often this sequence lost its blocks and was recomputed
    times: Times


class TenantStats(NamedTuple):
    """Requests of a tenant, and the tokens that it was served."""

    waiting: int  #: new requests that wait
    unfinished: int  #: requests, those that wait and those that run
    served_tokens: int  #: tokens computed for it; prompts count from their admission, and no token counts twice


class SchedulerStats(NamedTuple):
    """Counters of a scheduler. Each is kept up to date, so reading them is O(1).

    The first four count sequences now. The others count since the beginning. A request is one sequence until its prompt
    is computed, then `n` sequences or a beam's hypotheses.
    """

    waiting: int  #: sequences without blocks: not admitted yet, or preempted
    prefilling: int  #: running, known tokens left to compute
    decoding: int  #: running, one token a step
    spilled: int  #: with their KV in the tier
    finished: int  #: outputs that ended by themselves
    cancelled: int  #: outputs that were cancelled
    expired: int  #: outputs whose deadline passed
    rejected: int  #: requests that could never run, or found the queue full
    admissions: int  #: sequences that got blocks, repeated ones included
    preemptions: int  #: sequences that lost their blocks
    spills: int  #: sequences that the tier took
    steps: int  #: updates
    decode_tokens: int  #: computed, one per decoding row and step, and the accepted drafts
    prefill_tokens: int  #: computed in chunks
    recomputed_tokens: int  #: of these, computed before a preemption already
    hit_tokens: int  #: found in the prefix cache at first admissions of requests
    again_hit_tokens: int  #: found at later admissions: a preempted sequence finds what it computed itself
    sampled_tokens: int  #: tokens that became known by `update`
    evicted_tokens: int  #: that left sequences for their budgets
    drafted_tokens: int  #: computed as drafts
    accepted_tokens: int  #: of these, what sampling confirmed


WAITING, PREFILLING, DECODING, SPILLED, FINISHED = range(5)
NO_TOKENS = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


@dataclass(eq=False, repr=False, slots=True)
class Tenant:
    """A sender of requests, with what was served to it."""

    name: Hashable
    weight: float
    served: int = 0  #: tokens computed for it. Those that a sequence has count when it is admitted, others when they
    #: are computed. Neither hits of the prefix cache count, nor what a preempted sequence computes again.
    base: float = 0.0  #: what `used` has skipped while nothing waited
    admitted: int = 0  #: requests that were admitted: the time by which the others grow older
    requests: int = 0  #: requests that have not ended
    new: int = 0  #: requests that were never admitted
    line: list[Sequence] = field(default_factory=list)  #: those that never ran, by rank: new requests, and samples
    since: int = 0  #: number of the request with which the line began
    is_listed: bool = False  #: whether the queue has a turn for it
    waited: float = 0.0  #: how long the request waited that was admitted last

    @property
    def used(self) -> float:
        """The virtual counter. Of the tenants with lines, the one that has used least goes first."""
        return self.base + self.served / self.weight


@dataclass(eq=False, repr=False, slots=True)
class RequestGroup:
    """A request and its sequences."""

    request: Request
    arrived: float
    id: Hashable = field(init=False)
    sequences: list[Sequence] = field(init=False)
    unfinished: int = 1  #: sequences
    forked: bool = field(init=False)  #: or: there are no samples to fork
    beam: Any = None
    num_cached: int = 0
    admitted: float | None = None
    first_token: float | None = None
    tenant: Tenant = field(init=False)
    rank: tuple[int, int] = field(init=False)  #: its place in the line of its tenant, and the number of its arrival
    passed: int = 0  #: later requests that were admitted before it, because it found no room

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.sequences = [Sequence(self, 0)]
        self.forked = self.request.n == 1 or self.request.beam_width > 0


@dataclass(eq=False, repr=False, slots=True)
class Sequence:
    """One stream of tokens. While it has a lane, `LaneRows` has its numbers, and `tokens` and `logprobs` are empty."""

    group: RequestGroup
    index: int
    state: int = WAITING
    lane: int = -1
    tokens: NDArray[int32] = field(default_factory=lambda: NO_TOKENS)
    logprobs: NDArray[np.float32] | None = None
    high: int = 0  #: most tokens ever computed; computing tokens below it again counts as recomputation
    computed: int = 0  #: tokens whose KV the tier has, while spilled
    paid: int = 0  #: leading tokens that its tenant has been charged for
    kept: Any = None
    preemptions: int = 0


class WaitingQueue:
    """Sequences that wait: first those that lost their blocks, then by tenant those that never ran.

    The latter are new requests, and samples that found no lane. Only new requests count in `len`. `Scheduler` has the
    parameters. Choosing takes O(log tenants), adding and removing O(log requests) and a move of the references behind.
    """

    def __init__(self, weights: Mapping[Hashable, float], ageing: int, overtake: int) -> None:
        self.weights, self.overtake = weights, overtake
        self._ageing = ageing
        self._back: OrderedDict[Sequence, None] = OrderedDict()  # those that ran before
        self._new = self._arrivals = 0
        self._turns: list[tuple[float, int, Tenant]] = []  # heap by `used` and `since`, which may have grown
        self._latest: Tenant | None = None  # the last one whose line became shorter
        self._sweep_at = 64
        self.tenants: dict[Hashable, Tenant] = {}
        for name in weights:
            self.tenant(name)

    def __len__(self) -> int:
        return self._new

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._back
        for tenant in self.tenants.values():
            yield from tenant.line

    def tenant(self, name: Hashable) -> Tenant:
        """Return the tenant of this name, a new one if it is not there."""
        found = self.tenants.get(name)
        if found is None:
            if len(self.tenants) >= self._sweep_at:
                self._sweep()
            found = self.tenants[name] = Tenant(name, self.weights.get(name, 1.0))
        return found

    def _sweep(self) -> None:
        """Forget idle tenants that would be lifted if they came back."""
        least = self._least()
        self.tenants = {
            name: one for name, one in self.tenants.items() if one.requests or one.used > least or name in self.weights
        }
        self._sweep_at = max(64, 2 * len(self.tenants))

    def share(self, name: Hashable, places: int) -> int:
        """Return how many of the `places` for waiting requests a tenant may use."""
        weights = self.weights
        return max(1, int(places * weights[name] / sum(weights.values()))) if name in weights else places

    def enroll(self, group: RequestGroup) -> None:
        """Give a new request its tenant and its rank."""
        tenant = group.tenant = self.tenant(group.request.tenant)
        tenant.requests += 1
        group.rank = (tenant.admitted - self._ageing * group.request.priority, self._arrivals)
        self._arrivals += 1

    # -- who waits

    def push(self, sequence: Sequence, *, front: bool = False) -> None:
        """Put a sequence that never ran in the line of its tenant, or with `front` one that ran before all others."""
        if front:
            self._back[sequence] = None
            self._back.move_to_end(sequence, last=False)
            return
        tenant = sequence.group.tenant
        self._count(sequence, 1)
        if not tenant.line:
            tenant.base += max(0.0, self._least() - tenant.used)
            tenant.since = sequence.group.rank[1]
        insort(tenant.line, sequence, key=_rank)
        if not tenant.is_listed:
            tenant.is_listed = True
            heappush(self._turns, (tenant.used, tenant.since, tenant))

    def _count(self, sequence: Sequence, change: int) -> None:
        """Count a sequence of a line, if it stands for a new request."""
        if sequence.group.admitted is None:
            self._new += change
            sequence.group.tenant.new += change

    def _least(self) -> float:
        """Return what the tenants with lines have used at least. Nobody who comes has used less."""
        first = self._first() or self._latest
        return 0.0 if first is None else first.used

    def _first(self) -> Tenant | None:
        """Return the tenant that goes first, None if all lines are empty."""
        while self._turns:
            used, since, tenant = self._turns[0]
            now = (tenant.used, tenant.since, tenant)
            if not tenant.line:
                heappop(self._turns)
                tenant.is_listed = False
            elif now[:2] != (used, since):
                heapreplace(self._turns, now)
            else:
                return tenant
        return None

    def head(self) -> Sequence | None:
        """Return the next sequence, None if nobody waits."""
        if self._back:
            return next(iter(self._back))
        tenant = self._first()
        return None if tenant is None else tenant.line[0]

    def first(self, most: int) -> list[Sequence]:
        """Return `most` of the lines: the first of each tenant, in fair order, then the second ones."""
        turns: list[tuple[float, int, Tenant]] = []
        while len(turns) < most and self._first() is not None:
            turns.append(heappop(self._turns))
        for turn in turns:
            heappush(self._turns, turn)
        places = [(place, tenant) for place in range(most) for _, _, tenant in turns]
        return [tenant.line[place] for place, tenant in places if place < len(tenant.line)][:most]

    def is_back(self, sequence: Sequence) -> bool:
        """Return whether a sequence waits that ran before."""
        return sequence in self._back

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._back:
            del self._back[sequence]
            return
        tenant = self._latest = sequence.group.tenant
        self._count(sequence, -1)
        del tenant.line[bisect_left(tenant.line, _rank(sequence), key=_rank)]

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is queued. Of a beam only the first sequence is."""
        if sequence in self._back or self._is_in_line(sequence):
            self.remove(sequence)

    def _is_in_line(self, sequence: Sequence) -> bool:
        line = sequence.group.tenant.line
        at = bisect_left(line, _rank(sequence), key=_rank)
        return line[at : at + 1] == [sequence]

    def put_back(self, sequence: Sequence, *, front: bool) -> None:
        """Let a sequence wait where it did before an admission that raised. `mend` comes next."""
        if front:
            return self.push(sequence, front=True)
        self._back.pop(sequence, None)
        if not self._is_in_line(sequence):
            insort(sequence.group.tenant.line, sequence, key=_rank)

    def mend(self) -> None:
        """Recompute all that follows from the lines, after an exception."""
        for tenant in self.tenants.values():
            tenant.is_listed = bool(tenant.line)
        self._new = sum(tenant.new for tenant in self.tenants.values())
        self._turns = [(tenant.used, tenant.since, tenant) for tenant in self.tenants.values() if tenant.line]
        heapify(self._turns)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return *sequence.group.rank, sequence.index
