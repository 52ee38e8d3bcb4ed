"""Copies of this tree compiled in other ways, each in its folder ``build/<variant>/``; the build in place stays.

::

    python -m tests.verify.builds asan -m pytest tests/core/test_pending.py   # compiles what changed, then runs Python

A folder is compiled again only where its sources changed. What runs in it has the folder as its working directory and
imports the copy, tests included.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.verify.builds.interpreter import PREFIX, ROOT, packages, python_of
from tests.verify.mutants.schemata import mutate
from tests.verify.mutants.source import core_sources

#: What a copy consists of; `kvpool_backends/cpu` only where the variant has it.
PARTS = (
    *("kvpool", "kvpool_backends", "tests", "benchmarks", "metal", "docs", "examples"),
    *("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
CPU = Path("kvpool_backends/cpu")
VERIFY = Path("tests/verify")
#: Functions below which the interpreter and numpy allocate what they never free: their modules' code and constants.
KEPT = ("_multiarray_umath_exec", "r_object", "fill_time")
MADE = (".so", ".o", ".pyc", ".gcda", ".gcno", ".html")  # never copied, never removed


@dataclass(frozen=True)
class Variant:
    """How a copy is compiled, and what its processes are given."""

    switches: dict[str, str] = field(default_factory=dict)  # of setup.py
    runtime: dict[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()  # libraries of gcc
    cpu: bool = False  # with the CPU backend
    verify: bool = False  # with the fuzzer of `tests.verify`
    mutated: bool = False  # with all mutants of `tests.verify.mutants`
    planted: bool = False  # with all canaries of `tests.verify`
    interpreter: str = ""  # that runs it, of `tests.verify.builds.interpreter`; this one by default

    @property
    def prefix(self) -> tuple[str, ...]:
        """What stands before a command."""
        return PREFIX["tsan"] if "thread" in self.switches.get("KVPOOL_SANITIZE", "") else ()

    def python(self, kind: str) -> str:
        """The interpreter, of this kind where the copy has one of its own."""
        return str(python_of(kind)) if self.interpreter else sys.executable


ASAN = Variant(
    {"KVPOOL_DEBUG": "1", "KVPOOL_SANITIZE": "address,undefined"},
    {
        "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=2:allocator_may_return_null=1",  # as without it: NULL
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
    },
    ("libasan.so", "libubsan.so"),
    verify=True,
)
#: A fuzzer's pool of a million blocks lies in arrays of many megabytes: glibc asks for large pages for them.
RELEASE = Variant(runtime={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, verify=True)
TSAN = Variant({"KVPOOL_SANITIZE": "thread"}, {"TSAN_OPTIONS": "exitcode=66:history_size=2"}, ("libtsan.so",))
#: Without a GIL: as users have it; under ThreadSanitizer; and with a lock that locks nothing.
FREE = Variant(interpreter="release", cpu=True)
FREE_TSAN = replace(TSAN, preload=(), interpreter="tsan", cpu=True)
#: The CPU kernels take several times as long to compile as the core: only "-cpu" variants have them.
VARIANTS = {
    "release": RELEASE,
    "debug": Variant({"KVPOOL_DEBUG": "1"}, verify=True),
    "asan": ASAN,
    "asan-cpu": replace(ASAN, cpu=True),
    "tsan": TSAN,
    "tsan-cpu": replace(TSAN, cpu=True),
    "free": FREE,
    "free-tsan": FREE_TSAN,
    "free-unlocked": replace(FREE, switches={"CFLAGS": "-DKVPOOL_NO_LOCK=1"}),
    "free-tsan-unlocked": replace(FREE_TSAN, switches=FREE_TSAN.switches | {"CFLAGS": "-DKVPOOL_NO_LOCK=1"}),
    "coverage": Variant({"KVPOOL_COVERAGE": "1", "KVPOOL_FAULTS": "1"}, verify=True),
    "mutated": Variant({"KVPOOL_OPTIMIZE": "1"}, cpu=True, verify=True, mutated=True),
    "canaries": Variant({"KVPOOL_OPTIMIZE": "1"}, verify=True, planted=True),
}


def _is_left_out(kind: Variant, inside: Path) -> bool:
    """Whether a variant does without a file of the tree."""
    if CPU in inside.parents:
        return not kind.cpu
    with_fuzzer = kind.verify or inside.parent != VERIFY
    return not with_fuzzer and inside.suffix in (".pyx", ".pxd")


def _sources(variant: str) -> dict[Path, bytes]:
    """Path in the copy -> text."""
    kind, found = VARIANTS[variant], {}
    for part in PARTS:
        top = ROOT / part
        for path in [top, *top.rglob("*")] if top.is_dir() else [top]:
            inside = path.relative_to(ROOT)
            skipped = path.suffix in MADE or "__pycache__" in path.parts
            if path.is_file() and not skipped and not _is_left_out(kind, inside):
                found[inside] = path.read_bytes()
    if kind.mutated:
        rewritten, mutants = mutate(core_sources())
        found |= {path.relative_to(ROOT): text.encode() for path, text in rewritten.items()}
        found[VERIFY / "mutants" / "mutants.json"] = json.dumps([asdict(one) for one in mutants], indent=0).encode()
    if kind.planted:
        from tests.verify.canaries import planted  # which builds and runs the copy

        found |= {path: text.encode() for path, text in planted().items()}
    return found


def _copy(variant: str, folder: Path) -> bool:
    """Bring the copy up to date; returns whether a file of it changed."""
    sources = _sources(variant)
    changed = False
    for inside, text in sources.items():
        target = folder / inside
        if not target.exists() or target.read_bytes() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text)  # now: newer than what was made of the old one
            changed = True
    for part in PARTS:
        for path in (folder / part).rglob("*") if (folder / part).is_dir() else ():
            gone = path.relative_to(folder) not in sources and path.suffix not in MADE
            if path.is_file() and gone and "__pycache__" not in path.parts:
                path.unlink()
                changed = True
    return changed


def folder_of(variant: str) -> Path:
    """Where the copy stands."""
    return ROOT / "build" / variant


def build(variant: str, compiles: bool = True) -> Path:
    """Bring the copy of this tree that is compiled as `variant` up to date; returns its folder.

    `compiles` is False: the sources alone.
    """
    kind, folder = VARIANTS[variant], folder_of(variant)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "compiled"
    python = kind.python("release")  # a sanitized one is slow, and the same headers serve both
    made_by = f"{python}\n{sys.version}\ncython {importlib.metadata.version('cython')}\n{kind.switches}\n"
    made_by += (ROOT / "setup.py").read_text()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        same = stamp.exists() and stamp.read_text() == made_by
        if not _copy(variant, folder) and same:
            return folder
        stamp.unlink(missing_ok=True)
        if not compiles:
            return folder
        if not same:
            shutil.rmtree(folder / "build", ignore_errors=True)  # objects of another compiler or other switches
        command = [python, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=folder, env=_plain() | kind.switches, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"[builds] {variant} does not compile:\n{done.stdout}{done.stderr}")
        stamp.write_text(made_by)
    return folder


def _plain() -> dict[str, str]:
    """This process's environment without what would choose another core, or switches of another build."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}


def environment(variant: str, **more: str) -> dict[str, str]:
    """All environment variables of a process that imports `variant`; `more` goes on top."""
    kind = VARIANTS[variant]
    libraries = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in kind.preload
    ]
    path = [str(folder_of(variant)), *([str(packages())] if kind.interpreter else [])]
    made = _plain() | kind.runtime | {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return made | ({"LD_PRELOAD": " ".join(libraries)} if libraries else {}) | more


def run(variant: str, argv: Sequence[str], *, leaks: bool = False, **options) -> subprocess.CompletedProcess:
    """Run Python with `argv` in the copy, which is built first. `leaks`, of "asan": memory that is lost fails it.

    The options are those of `subprocess.run`; text is captured unless they say otherwise. ``env`` adds variables.
    """
    folder = build(variant)
    more = dict(options.pop("env", {}))
    if leaks:
        more["ASAN_OPTIONS"] = "detect_leaks=1:fast_unwind_on_malloc=0:malloc_context_size=40"
        (folder / "kept").write_text("".join(f"leak:{name}\n" for name in KEPT))
        more["LSAN_OPTIONS"] = f"suppressions={folder / 'kept'}:print_suppressions=0"
    options = {"cwd": folder, "text": True} | ({} if "stdout" in options else {"capture_output": True}) | options
    kind = VARIANTS[variant]
    command = [*kind.prefix, kind.python(kind.interpreter), *argv]
    return subprocess.run(command, env=environment(variant, **more), **options)
