"""Faults planted into the C kernels, one of a kind, each caught by the test named with it, in every instruction set.

The faults of an instruction set are compiled together, in copies of the sources. Each is an expression or a statement
beside the right one, and ``kv_fault`` says which of them is computed. A process that loads this library before kvpool's
own runs each test twice: without a fault, where it must pass, and with its own, where it must fail. So the tests of the
kernels are tested.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_cpu_decode as decode
import test_cpu_move as move
import test_cpu_quantized as quantized

from kvpool.testing import conformance
from kvpool_backends.cpu import CPUBackend, isas

KERNELS = Path(__file__).resolve().parents[2] / "kvpool_backends" / "cpu" / "kernels"
SHARED = ("attend", "move", "threads")  # sources that all instruction sets have in common
Check = Callable[[str], object]  # a test, called with the name of an instruction set

pytestmark = [
    pytest.mark.long,  # it compiles
    pytest.mark.skipif(sys.platform != "linux", reason="other systems do not know LD_PRELOAD"),
]


class Fault(NamedTuple):
    """`before` is an expression, or a statement where it ends with a semicolon; so is `after`."""

    name: str
    file: str
    before: str
    after: str
    check: Check


def decoded(**choice: Any) -> Check:
    """The test of one decode, or of a short window of queries."""
    case = {"dtype": "float16", "block_size": 16, "dims": (80, 96), "group": 3, "features": "none", "queries": 5}
    case |= {"prior": 130, "layout": "NHD", "tokens": "float32"} | choice
    return lambda isa: decode.test_attention_of_any_shape_equals_float64(case | {"isa": isa})


def conforms(name: str) -> Check:
    """A case of the conformance kit."""
    (case,) = [case for case in conformance.CASES if case.__name__ == name]
    return lambda isa: case(partial(CPUBackend, isa=isa))


FAULTS = [
    # Tiles, blocks and parts of a context
    Fault(
        "the last value of a block is the one before",
        "tile.h",
        "v + i * v_step",
        "v + (i - (i > 0 && i + 1 == count)) * v_step",
        decoded(),
    ),
    # What changes a score, and what hides it
    Fault(
        "a NaN in the mask of a chunk hides its token",
        "chunk_softmax.h",
        "entry != hidden",
        "entry > hidden",
        lambda isa: decode.test_nan_of_the_mask_shows_where_it_is_visible(50, 512, isa),
    ),
    # Sums
    Fault(
        "parts are added up as if they had one maximum",
        "decode.h",
        "expf(part[lane] - largest)",
        "1",
        decoded(prior=700),
    ),
    Fault(
        "a value that a query of a chunk does not see is multiplied by 0",
        "chunk_pack.h",
        "v_sum(bad) == 0",
        "1",
        lambda isa: decode.test_query_takes_nothing_from_tokens_that_it_does_not_see(isa, "float32", None, False, 40),
    ),
    # Scores
    Fault(
        "a hidden token has the score -inf",
        "decode.h",
        "v_select(s == -INFINITY, (vf){0}, s)",
        "s",
        conforms("scores_are_what_goes_into_exp"),
    ),
    # Quantized storage
    Fault(
        "a token without weight adds its zero point",
        "decode_quantized.h",
        "v_select(unused, none, weight * v_load(biases + g * TILE + t))",
        "weight * v_load(biases + g * TILE + t)",
        lambda isa: quantized.test_masked_tokens_that_are_nan_never_matter(1),
    ),
    # Conversions
    Fault(
        "ties of bfloat16 are rounded up",
        "simd.h",
        "0x7fff + ((bits >> 16) & 1)",
        "(bits & 0) + 0x8000",
        lambda isa: move.test_midpoints_of_all_16_bit_numbers_round_to_nearest_even("bfloat16", "at", isa),
    ),
    # Moves
    Fault(
        "a copy lacks its last token",
        "move.c",
        "copy[2]",
        "copy[2] - 1",
        lambda isa: move.test_large_moves_on_several_threads_leave_the_same_bytes_as_the_model("NHD"),
    ),
    Fault(
        "kept tokens come from their new place",
        "move.c",
        "keep[j] % block_size * p->slot",
        "j % block_size * p->slot",
        conforms("compaction_moves_what_stays_and_nothing_else"),
    ),
]


def planted(text: str, number: int, fault: Fault) -> str:
    """`text` with the fault in it, where ``kv_fault`` is its number."""
    assert text.count(fault.before) == 1, f"the kernels have changed: say again where {fault.name!r} goes"
    if fault.before.endswith(";"):
        both = f"if (kv_fault == {number}) {{ {fault.after} }} else {fault.before}"
    else:
        both = f"(kv_fault == {number} ? (__typeof__({fault.before}))({fault.after}) : ({fault.before}))"
    return text.replace(fault.before, both)


def library(isa: str, folder: Path, compiler: Sequence[str]) -> Path:
    """The kernels of one instruction set with all faults, compiled."""
    texts = {path.name: path.read_text() for path in KERNELS.glob("*.[ch]")}
    for number, fault in enumerate(FAULTS, 1):
        texts[fault.file] = planted(texts[fault.file], number, fault)
    texts["kvcpu.h"] = f"extern int kv_fault;\n{texts['kvcpu.h']}"
    texts["threads.c"] += "int kv_fault;\n"
    for name, text in texts.items():
        (folder / name).write_text(text)
    made = folder / f"{isa}.so"
    sources = [str(folder / f"{name}.c") for name in (f"isa_{isa}", *SHARED)]
    options = ["-O1", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-w", "-o", str(made), "-lm"]
    subprocess.run([*compiler, *sources, *options], check=True)
    return made


def how_it_ends(check: Check, isa: str) -> str:
    """Of a test: "passes", or what it raises."""
    try:
        check(isa)
    except Exception as error:
        return "".join(traceback.format_exception_only(error))
    return "passes"


def judge(isa: str, made: str) -> None:
    """Print how each test ends, without its fault and with it. The process has loaded the library before kvpool's."""
    switch = ctypes.c_int.in_dll(ctypes.CDLL(made), "kv_fault")
    for number, fault in enumerate(FAULTS, 1):
        ends = []
        for switch.value in (0, number):
            ends.append(how_it_ends(fault.check, isa))
        print(json.dumps([fault.name, *ends]), flush=True)


def read(said: str) -> dict[str, tuple[str, str]]:
    """What `judge` has printed: name of a fault -> how its test ends without it, and with it."""
    return {name: (sound, faulty) for name, sound, faulty in map(json.loads, said.splitlines())}


def is_caught(sound: str, faulty: str) -> bool:
    """Whether a test passes without a fault and finds a wrong result with it."""
    return sound == "passes" and faulty.startswith("AssertionError")


@pytest.fixture(scope="module")
def ends(isa: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """How the test of each fault ends in an instruction set: without the fault, and with it."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    made = library(isa, tmp_path_factory.mktemp(isa), compiler)
    env = {"LD_PRELOAD": str(made), "KVPOOL_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__, isa, made], env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return read(done.stdout)


UNSEEN = pytest.mark.skipif(not os.environ.get("KVPOOL_LONG"), reason="not tried with AVX-512; KVPOOL_LONG=1 runs it")
ISAS = [pytest.param(isa, marks=UNSEEN) if isa == "avx512" else isa for isa in isas()]


@pytest.mark.parametrize("isa", ISAS, scope="module")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_planted_fault_in_a_kernel_is_caught(fault: Fault, ends: dict[str, tuple[str, str]]) -> None:
    assert is_caught(*ends[fault.name]), ends[fault.name]


if __name__ == "__main__":
    judge(*sys.argv[1:])
