"""Tapes: calls on pools and plans with everything that came back, judged while they are recorded, compared ever after.

Recording is slow: a judge (the plain Python model, or the assertions of a scenario) looks on. Playing is fast: the same
calls on a fresh pool, each outcome compared, and after each call the digest and the fingerprint, which are the same on
every build.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvpool import _lock, errors

#: After these the state is looked at by the next call only: to read the digest closes what was deferred.
QUIET = ("defer_close", "digest", "fingerprint", "check", "stats", "table", "num_tokens", "capacity", "refcount")

LOCAL = (1 << 52) - 1  # bits of a handle below its pool's tag
REFUSALS = {*vars(errors), "ValueError", "TypeError", "IndexError", "OverflowError", "MemoryError", "AttributeError"}
#: These write into arrays that they are given.
WRITES = ("alloc", "bind")


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
    after: tuple[int, int] | None = None  # digest and fingerprint


@dataclass(slots=True)
class Tape:
    """What was called and what came back."""

    name: str
    kinds: dict[str, Callable[..., Any]]
    ops: list[Op] = field(default_factory=list)
    objects: int = 0

    def make(self, kind: str) -> type[Recorded]:
        """A class whose objects are recorded."""
        return type(kind, (Recorded,), {"_tape": self, "_kind": kind})


def first_tag() -> None:
    """The next pool has tag 1, if no other pool lives: handles are the same in every recording and every play."""
    _lock.set_last_tag(0)


def plain(value: Any) -> Any:
    """A value that compares by content and stays as it is."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, tuple | list):
        return tuple(plain(part) for part in value)
    return repr(value) if isinstance(value, float) else value


def tags_off(value: Any) -> Any:
    """An outcome as two equal pools agree on it: handles without their tags, of a refusal its class."""
    if isinstance(value, tuple) and value and value[0] in REFUSALS:
        return value[0]
    if isinstance(value, tuple) and len(value) == 3 and value[0] == "<i8" and isinstance(value[2], bytes):
        numbers = np.frombuffer(value[2], np.int64)
        return value[1], np.where(numbers >= 0, numbers & LOCAL, numbers).tolist()
    if isinstance(value, tuple):
        return tuple(tags_off(part) for part in value)
    return value & LOCAL if type(value) is int and value > LOCAL else value


def outcome(call: Callable[[], Any]) -> tuple[Any, Any, Exception | None]:
    """(what is compared, what came back, what was raised)."""
    try:
        value = call()
    except Exception as error:
        return (type(error).__name__, str(error), tuple(sorted(vars(error).items()))), None, error
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
        if not name.startswith("__") and callable(getattr(type(self._object), name, None)):
            method = getattr(self._object, name)
            return lambda *args, **kwargs: self._noted(self._index, name, args, kwargs, lambda a, k: method(*a, **k))
        return self._noted(self._index, name, (), None, lambda a, k: getattr(self._object, name))

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


def play(tape: Tape, *, learn: bool = False, blind: bool = False) -> None:
    """Make the calls of a tape again; `learn` fills in digests and fingerprints, `blind` compares nothing.

    Raises
    ------
    Differs
        An outcome, a digest or a fingerprint is another one.
    """
    first_tag()
    objects: list[Any] = []
    for op in tape.ops:
        args = [objects[value.index] if type(value) is Ref else value for value in op.args]
        if op.name == "_drop":
            objects[op.target] = got = None
        elif op.kwargs is None:
            got, value, _ = outcome(lambda op=op: getattr(objects[op.target], op.name))
        else:
            named = {key: objects[v.index] if type(v) is Ref else v for key, v in op.kwargs.items()}
            if op.writes:
                args = [v.copy() if isinstance(v, np.ndarray) else v for v in args]
                named = {key: v.copy() if isinstance(v, np.ndarray) else v for key, v in named.items()}
            call = tape.kinds[op.name] if op.target < 0 else getattr(objects[op.target], op.name)
            got, value, error = outcome(lambda call=call, args=args, named=named: call(*args, **named))
            if op.target < 0 and error is None:
                objects.append(value)
                got = None
        if got != op.outcome and not blind:
            raise Differs(f"{tape.name}: {op.name}{op.args} gave {got}, on the tape is {op.outcome}")
        if op.target >= 0 and op.kwargs is not None and op.name not in QUIET and hasattr(objects[op.target], "digest"):
            _, after, _ = outcome(lambda op=op: (objects[op.target].digest(), objects[op.target].fingerprint()))
            if learn:
                op.after = after
            elif after != op.after and not blind:
                raise Differs(f"{tape.name}: after {op.name}{op.args} digest and fingerprint are {after}")
