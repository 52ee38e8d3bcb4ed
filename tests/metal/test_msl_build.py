"""Compiled kernels are kept by content: a text compiles once, another text or flag again, whoever asks."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msl import Bound, Kernel, MetalError, settings

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys, numpy as np
from msl import Bound, Kernel, settings
y = np.zeros(4, np.int32)
kernel = Kernel("kernel void f(device int* y, uint i [[thread_position_in_grid]]) { y[i] = %s; }", "f")
with settings(instrumented=%s):
    kernel.launch({0: Bound(y, "output", "y")}, (4, 1, 1), (4, 1, 1))
print(y.tolist())
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def start(cache, value, instrumented=False, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM % (value, instrumented)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(TESTS), "KVPOOL_MSL_CACHE": str(cache), **environment},
    )  # fmt: skip


def output_of(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.strip()


def kernels_in(cache):
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("f_*.so")}


def test_processes_share_what_one_has_compiled(cache):
    racing = [start(cache, 7) for _ in range(3)]  # all of them find the cache empty
    assert [output_of(process) for process in racing] == ["[7, 7, 7, 7]"] * 3
    first = kernels_in(cache)
    assert len(first) == 1
    assert output_of(start(cache, 7)) == "[7, 7, 7, 7]" and kernels_in(cache) == first
    assert output_of(start(cache, 8)) == "[8, 8, 8, 8]" and len(kernels_in(cache)) == 2
    assert output_of(start(cache, 7, instrumented=True)) == "[7, 7, 7, 7]" and len(kernels_in(cache)) == 3
    left = {path.suffix for path in cache.rglob("*") if path.is_file()}
    assert left <= {".so", ".gch", ".pch", ".h"}, "no locks, no half-made files"


def test_kernels_of_the_same_name_keep_their_own_threadgroup_memory():
    """Two shared objects with the same variables in them: the sizes must not be confused."""
    text = """
        kernel void same(device float* y, uint i [[thread_index_in_threadgroup]]) {{
          threadgroup float s[{size}];
          s[i] = i;
          metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
          y[i] = s[{size} - 1 - i];
        }}
    """
    for size in (8, 32, 16):
        y = np.zeros(size, np.float32)
        with settings() as runs:
            Kernel(text.format(size=size), "same").launch({0: Bound(y, "output", "y")}, (size, 1, 1), (size, 1, 1))
        assert runs[0].threadgroup_memory == 4 * size
        assert y.tolist() == list(range(size))[::-1]


def test_the_compiler_s_message_is_passed_on():
    with pytest.raises(MetalError, match=r"(?s)the compiler refused this:.*f\.metal:2:.*undeclared_name"):
        Kernel("kernel void f(device int* y) {\n y[0] = undeclared_name; }", "f").launch({}, (1, 1, 1), (1, 1, 1))
