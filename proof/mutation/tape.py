"""Tapes: calls on pools and plans with everything that came back, judged while they are recorded, compared ever after.

Recording is slow: a judge looks on, the plain Python model, which makes the same calls. Playing is fast: the same calls
on a fresh pool, and two things are compared. *Seen* is whatever differs: an outcome, a text, a counter, or after each
call the digest and the fingerprint, which are the same on every build. *Convicted* is what a judge finds who never asks
the pool for its own digest, fingerprint, index or counters: a result that is not the model's.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvpool import _core

#: After these the state is looked at by the next call only: to read the digest closes what was deferred.
QUIET = {
    *("defer_close", "digest", "fingerprint", "check", "stats", "table", "num_tokens", "capacity", "refcount"),
    "_corrupt",  # what is broken may have no end
}
#: What the pool says of itself. The judge does not listen.
OWN_WORD = {
    *("digest", "fingerprint", "check", "stats", "nbytes", "num_free", "refcount_histogram"),
    *("_corrupt", "options"),
}
TAG_SHIFT = 52
LOCAL = (1 << TAG_SHIFT) - 1  # bits of a handle below its pool's tag
#: Attributes that have calls of their own.
PARTS = ("blocks", "prefix")
#: These write into arrays that they are given.
WRITES = ("alloc", "bind")


class Raised(NamedTuple):
    """A refusal."""

    kind: str
    text: str
    more: tuple


@dataclass(frozen=True, slots=True)
class Ref:
    """An object of the tape among the arguments."""

    index: int


@dataclass(slots=True)
class Op:
    """One call, or one attribute that was read."""

    target: int  # -1: a constructor
    name: str
    args: tuple
    kwargs: dict[str, Any] | None  # None: an attribute
    outcome: Any
    writes: bool = False  # into arrays among its arguments
    makes: bool = False  # an attribute that is an object of the tape from here on
    after: tuple[int, int] | None = None  # digest and fingerprint


@dataclass(slots=True)
class Tape:
    """What was called and what came back."""

    name: str
    kinds: dict[str, Callable[..., Any]]
    judged: bool = False  # the model gave the same
    ops: list[Op] = field(default_factory=list)
    objects: int = 0

    def make(self, kind: str) -> type[Recorded]:
        """A class whose objects are recorded."""
        return type(kind, (Recorded,), {"_tape": self, "_kind": kind})

    def play(self, *, learn: bool = False, blind: bool = False) -> Iterator[Difference]:
        """Make the calls of a tape again; `learn` fills in digests and fingerprints, `blind` compares nothing.

        Yields
        ------
        Difference
            After the first one the digest is left alone.
        """
        first_tag()
        objects: list[Any] = []
        seen = blind
        for op in self.ops:
            got = self._made_again(op, objects)
            if got != op.outcome and not blind:
                seen = True
                convicts = self.judged and op.name not in OWN_WORD and as_judged(got) != as_judged(op.outcome)
                yield Difference(convicts, op, got)
            if (seen and not learn) or op.target < 0 or op.kwargs is None or op.name in QUIET:
                continue
            pool = objects[op.target]
            if isinstance(pool, _core.BlockAPI | _core.PrefixCache):
                pool = pool.pool
            if hasattr(pool, "digest"):
                _, after, _ = outcome(lambda pool=pool: (pool.digest(), pool.fingerprint()))
                if learn:
                    op.after = after
                elif after != op.after:
                    seen = True
                    yield Difference(False, op, after)

    def _made_again(self, op: Op, objects: list[Any]) -> Any:
        """What a call gives this time; a new object joins `objects`."""
        args = [objects[value.index] if type(value) is Ref else value for value in op.args]
        if op.name == "_drop":
            objects[op.target] = None
            return None
        if op.kwargs is None:
            got, value, error = outcome(lambda: getattr(objects[op.target], op.name))
        else:
            named = {key: objects[v.index] if type(v) is Ref else v for key, v in op.kwargs.items()}
            if op.writes:
                args = [v.copy() if isinstance(v, np.ndarray) else v for v in args]
                named = {key: v.copy() if isinstance(v, np.ndarray) else v for key, v in named.items()}
            call = self.kinds[op.name] if op.target < 0 else getattr(objects[op.target], op.name)
            got, value, error = outcome(lambda: call(*args, **named))
        if error is None and (op.makes or (op.target < 0 and op.kwargs is not None)):
            objects.append(value)
            return None
        return got


def first_tag() -> None:
    """The next pool has tag 1, if no other pool lives: handles are the same in every recording and every play."""
    gc.collect()  # pools in circles of errors and frames live on
    gc.freeze()  # what is on tapes stays; nobody looks through it again
    _core.set_last_tag(0)


def plain(value: Any) -> Any:
    """A value that compares by content and stays as it is."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, tuple | list):
        return tuple(plain(part) for part in value)
    if isinstance(value, dict):
        return dict(value)
    return repr(value) if isinstance(value, float) else value


def as_judged(value: Any) -> Any:
    """An outcome as two equal pools agree on it: handles without their tags, of a refusal its class."""
    if isinstance(value, Raised):
        return value.kind
    if isinstance(value, tuple) and len(value) == 3 and value[0] == "<i8" and isinstance(value[2], bytes):
        numbers = np.frombuffer(value[2], np.int64)
        return value[1], np.where(numbers >= 0, numbers & LOCAL, numbers).tolist()
    if isinstance(value, tuple):
        return tuple(as_judged(part) for part in value)
    return value & LOCAL if type(value) is int and value > LOCAL else value


def judge(tape: Tape, due: Tape) -> None:
    """Compare what came back with what the model gave in the same program.

    Raises
    ------
    Differs
        A call has another outcome.
    """
    for got, wanted in zip(tape.ops, due.ops, strict=True):
        if got.name not in OWN_WORD - {"stats"} and as_judged(got.outcome) != as_judged(wanted.outcome):
            raise Differs(f"{tape.name}: {got.name}{got.args} gave {got.outcome}, the model {wanted.outcome}")
    tape.judged = True


def outcome(call: Callable[[], Any]) -> tuple[Any, Any, Exception | None]:
    """(what is compared, what came back, what was raised)."""
    try:
        value = call()
    except Exception as error:
        text = re.sub(r"0x[0-9a-f]{6,}", "0x", str(error))  # an address is another one each time
        return Raised(type(error).__name__, text, tuple(sorted(vars(error).items()))), None, error
    return plain(value), value, None


class Recorded:
    """A pool or a plan that writes down what happens to it."""

    _tape: Tape
    _kind: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._object = self._noted(-1, self._kind, args, kwargs, lambda a, k: self._tape.kinds[self._kind](*a, **k))
        self._index = self._tape.objects
        self._tape.objects += 1

    def __getattr__(self, name: str) -> Any:
        kind = type(self._object)
        known = getattr(kind, name, None) or (hasattr(kind, "__getattr__") and getattr(self._object, name, None))
        if not name.startswith("__") and callable(known):
            method = getattr(self._object, name)
            return lambda *args, **kwargs: self._noted(self._index, name, args, kwargs, lambda a, k: method(*a, **k))
        found = self._noted(self._index, name, (), None, lambda a, k: getattr(self._object, name))
        return self._part(found) if name in PARTS and found is not None else found

    def _part(self, found: Any) -> Recorded:
        """A recorded object for what an attribute was."""
        self._tape.ops[-1].makes, self._tape.ops[-1].outcome = True, None
        part = type(self).__new__(type(self))
        part._object, part._index = found, self._tape.objects
        self._tape.objects += 1
        return part

    def _drop(self) -> None:
        self._tape.ops.append(Op(self._index, "_drop", (), None, None))
        self._object = None

    def _noted(self, target: int, name: str, args: tuple, kwargs: dict | None, call: Callable) -> Any:
        real = [_inner(value) for value in args], {key: _inner(value) for key, value in (kwargs or {}).items()}
        noted = [_kept(value) for value in args], {key: _kept(value) for key, value in (kwargs or {}).items()}
        compared, value, error = outcome(partial(call, *real))
        writes = name in WRITES and error is None
        if error is not None and kwargs is not None:  # it may be how an array lies that was refused: no copy
            noted = [_kept(value, copy=False) for value in args], {k: _kept(v, copy=False) for k, v in kwargs.items()}
        made = target < 0 and error is None
        op = Op(target, name, tuple(noted[0]), None if kwargs is None else noted[1], None if made else compared, writes)
        if error is None or not any(map(_is_of_one_use, [*args, *(kwargs or {}).values()])):
            self._tape.ops.append(op)
        try:
            if error is not None:
                raise error
            return value
        finally:  # the error would keep this frame, and this frame the error and the objects
            del error, real, value


def drop(thing: Any) -> None:
    """Let go of a recorded object, in the tape too."""
    if isinstance(thing, Recorded):
        thing._drop()


def _is_of_one_use(value: Any) -> bool:
    """Whether an argument is another one after the call: a list that its own elements change when they are read."""
    return isinstance(value, list) and any(type(part).__module__.startswith("proof.") for part in value)


def _inner(value: Any) -> Any:
    return value._object if isinstance(value, Recorded) else value


def _kept(value: Any, copy: bool = True) -> Any:
    if isinstance(value, Recorded):
        return Ref(value._index)
    if isinstance(value, np.ndarray) and copy:
        return value.copy()
    return list(value) if type(value) is list else value


class Differs(Exception):
    """What came back is not what is on the tape."""


class Difference(NamedTuple):
    """Something that is not as it was recorded."""

    convicts: bool  # the judge would know that this is wrong
    op: Op | None  # of a tape
    got: Any
