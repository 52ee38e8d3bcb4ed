"""A compiled kernel and its launches: buffers in, buffers and counts out."""

import contextlib
import ctypes
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from . import build
from .lint import lint as lint_text
from .prepass import MetalError, translate

THREADS_PER_THREADGROUP_MAX = 1024
ACCESSES = ("read_only", "output", "in_out")
AccessName = Literal["read_only", "output", "in_out"]


class _Traffic(ctypes.Structure):
    _names = ("bytes", "lane_bytes", "accesses", "transactions", "full_transactions", "distinct_bytes")
    _fields_ = [(name, ctypes.c_uint64) for name in _names]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("access", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
        ("unwritten", ctypes.c_uint64),
        ("first_unwritten", ctypes.c_uint64),
        ("read", _Traffic),
        ("written", _Traffic),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("buffers", ctypes.POINTER(_Buffer)),
        ("kernel", ctypes.c_void_p),
        ("variables", ctypes.c_void_p),
        ("num_buffers", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("seed", ctypes.c_uint32),
        ("instrumented", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("threadgroups", ctypes.c_uint64),
        ("threadgroup_barriers", ctypes.c_uint64),
        ("simdgroup_barriers", ctypes.c_uint64),
        ("simd_operations", ctypes.c_uint64),
        ("error_address", ctypes.c_uint64),
        ("error", ctypes.c_char * 1024),
    ]


@dataclass(frozen=True)
class Traffic:
    """What the simdgroups of a launch moved to or from one buffer.

    Attributes
    ----------
    bytes : bytes touched, summed over accesses; lanes that touch the same byte in one access count once
    lane_bytes : the same summed over lanes
    accesses : one is an instruction, executed by up to 32 lanes of a simdgroup
    transactions : lines of 128 bytes touched, summed over accesses
    full_transactions : those of which an access used every byte
    distinct_bytes : bytes touched at all: the least that must move
    """

    bytes: int = 0
    lane_bytes: int = 0
    accesses: int = 0
    transactions: int = 0
    full_transactions: int = 0
    distinct_bytes: int = 0


@dataclass(frozen=True)
class Run:
    """One launch. What was counted is 0 unless the launch was instrumented, except the numbers of operations."""

    kernel: str
    threadgroups: int
    threadgroup_barriers: int
    simdgroup_barriers: int
    simd_operations: int
    threadgroup_memory: int
    reads: Mapping[str, Traffic]
    writes: Mapping[str, Traffic]


@dataclass(frozen=True)
class Settings:
    """How launches run; see `settings`."""

    seed: int = 0
    instrumented: bool = False
    lint: bool = False
    allow_unwritten: bool = False
    runs: list[Run] = field(default_factory=list)


_settings: ContextVar[Settings] = ContextVar("settings")
_one_launch = threading.Lock()


@contextlib.contextmanager
def settings(
    *,
    seed: int = 0,
    instrumented: bool = False,
    lint: bool = False,
    allow_unwritten: bool = False,
) -> Iterator[list[Run]]:
    """Choose how the launches inside of the ``with`` run; yields the list to which each adds its `Run`.

    Parameters
    ----------
    seed : int
        The schedule: 0 is the natural order, every other seed shuffles lanes, simdgroups and threadgroups. Even seeds
        put a guard page behind each buffer, odd ones in front of it.
    instrumented : bool
        Check and count every access to memory (about ten times slower): data races, reads of what nothing wrote, exact
        bounds, alignment; bytes and transactions.
    lint : bool
        Refuse kernels that mix address spaces or use what Metal has not; see lint.py. Without clang, less is seen.
    allow_unwritten : bool
        Take an output with an unwritten element, which is an error otherwise.
    """
    chosen = Settings(seed, instrumented, lint, allow_unwritten)
    token = _settings.set(chosen)
    try:
        yield chosen.runs
    finally:
        _settings.reset(token)


@dataclass
class Bound:
    """An array bound to ``[[buffer(index)]]``; C-contiguous, updated in place unless read_only."""

    array: np.ndarray
    access: AccessName
    name: str


class Kernel:
    """One instance of a kernel, compiled when it first runs, plain and instrumented apart.

    Parameters
    ----------
    source : str
        Metal text.
    function : str
        Name of the kernel in it.
    template : str
        Its template arguments as text, as ``"float, 64"``; empty for a kernel that is no template.
    prelude : text that goes in front of the source and counts no lines
    """

    def __init__(self, source: str, function: str, template: str = "", prelude: str = ""):
        self.function = function
        self._described = source, template
        self.text, self.parameters = translate(source, function, template, prelude)
        self._libraries: dict[bool, tuple[Path, ctypes.CDLL]] = {}

    @cached_property
    def faults(self) -> list[str]:
        """What lint.py finds in the text."""
        source, template = self._described
        if template and not re.search(r"\btemplate\b[^;{]*\bdecltype\b", source):
            source += f"\ntemplate decltype({self.function}<{template}>) {self.function}<{template}>;"
        return lint_text(source, f"{self.function}.metal")

    def _library(self, instrumented: bool) -> tuple[Path, ctypes.CDLL]:
        if instrumented not in self._libraries:
            build.runtime()
            path = build.compile_kernel(self.text, self.function, instrumented)
            library = ctypes.CDLL(str(path))
            library.msl_variables.restype = ctypes.POINTER(ctypes.c_void_p)
            self._libraries[instrumented] = path, library
        return self._libraries[instrumented]

    def launch(self, buffers: Mapping[int, Bound], grid: Sequence[int], threadgroup: Sequence[int]) -> Run:
        """Run grid[0] * grid[1] * grid[2] threads, in threadgroups that shrink at the grid's edges.

        Raises
        ------
        MetalError
            The kernel did something that it may not; the message says what, where and by which thread. The arrays hold
            what they held before.
        """
        chosen = _settings.get(Settings())
        if chosen.lint and self.faults:
            raise MetalError(f"[{self.function}] Metal would refuse this:\n" + "\n".join(self.faults))
        path, library = self._library(chosen.instrumented)
        launch = _describe(chosen, buffers, grid, threadgroup)
        launch.kernel = ctypes.cast(library.msl_kernel, ctypes.c_void_p)
        launch.variables = library.msl_variables()[0]
        with _one_launch:
            failed = build.runtime().msl_launch(ctypes.byref(launch))
        if failed:
            raise MetalError(f"[{self.function}] {launch.error.decode()}{_place(path, launch.error_address)}")
        run = _run_of(self.function, launch, len(buffers) and max(buffers) + 1)
        _check_written(self.function, chosen, launch, buffers)
        chosen.runs.append(run)
        return run


def _describe(
    chosen: Settings, buffers: Mapping[int, Bound], grid: Sequence[int], threadgroup: Sequence[int]
) -> _Launch:
    group = [min(size, whole) for size, whole in zip(threadgroup, grid, strict=True)]
    if len(grid) != 3 or min(*grid, *threadgroup) < 1:
        sizes = f"{tuple(grid)}, {tuple(threadgroup)}"
        raise MetalError(f"[launch] grid and threadgroup are three positive numbers each ({sizes})")
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if threads > THREADS_PER_THREADGROUP_MAX:
        raise ValueError(
            f"Thread group size ({threads}) is greater than  the maximum allowed threads per threadgroup "
            f"({THREADS_PER_THREADGROUP_MAX})."
        )
    described = (_Buffer * (max(buffers, default=-1) + 1))()
    for index, bound in buffers.items():
        if not bound.array.flags.c_contiguous:
            raise MetalError(f"[launch] buffer '{bound.name}' is not C-contiguous")
        entry = described[index]
        entry.data, entry.bytes = bound.array.ctypes.data, bound.array.nbytes
        entry.name, entry.access = bound.name.encode(), ACCESSES.index(bound.access)
        entry.element_bytes = bound.array.itemsize
    launch = _Launch(
        buffers=described, num_buffers=len(described), seed=chosen.seed, instrumented=chosen.instrumented
    )
    launch.grid[:], launch.group[:] = grid, group
    return launch


def _place(path: Path, address: int) -> str:
    """Return " at file:line" of an address in a loaded kernel, or "" where that cannot be found out."""
    with contextlib.suppress(OSError):
        for mapped in Path("/proc/self/maps").read_text().splitlines():
            if address and mapped.endswith(str(path)):
                line = build.line_of(path, address - int(mapped.split("-")[0], 16) - 1)
                return f" at {line}" if line else ""
    return ""


def _run_of(function: str, launch: _Launch, num_buffers: int) -> Run:
    def traffic(kind: str) -> dict[str, Traffic]:
        found = {}
        for buffer in launch.buffers[:num_buffers]:
            if buffer.name:
                counted = getattr(buffer, kind)
                found[buffer.name.decode()] = Traffic(**{name: getattr(counted, name) for name, _ in counted._fields_})
        return found

    return Run(
        kernel=function,
        threadgroups=launch.threadgroups,
        threadgroup_barriers=launch.threadgroup_barriers,
        simdgroup_barriers=launch.simdgroup_barriers,
        simd_operations=launch.simd_operations,
        threadgroup_memory=launch.threadgroup_bytes,
        reads=traffic("read"),
        writes=traffic("written"),
    )


def _check_written(function: str, chosen: Settings, launch: _Launch, buffers: Mapping[int, Bound]) -> None:
    """Refuse outputs with unwritten elements: exact if instrumented, else floats that still hold the poison."""
    if chosen.allow_unwritten:
        return
    for index, bound in buffers.items():
        if bound.access != "output":
            continue
        if chosen.instrumented:
            count, first = launch.buffers[index].unwritten, launch.buffers[index].first_unwritten
        elif bound.array.dtype.kind == "f" or bound.array.dtype.name == "bfloat16":
            poisoned = bound.array.reshape(-1).view(f"u{bound.array.itemsize}") == 2 ** (8 * bound.array.itemsize) - 1
            count, first = int(poisoned.sum()), int(poisoned.argmax()) if poisoned.size else 0
        else:
            continue
        if count:
            raise MetalError(
                f"[{function}] output '{bound.name}': {count} of {bound.array.size} elements were never written, "
                f"the first is element {first}"
            )
