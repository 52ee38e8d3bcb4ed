"""From Metal text to C++: comments, includes, threadgroup variables, parameters, whole files."""

import numpy as np
import pytest
from msl import Bound, Kernel, MetalError, settings
from msl.prepass import parse_parameters, rewrite_threadgroup_variables

REWRITTEN = {
    "threadgroup vec<T, 4> v[N / 2][8];": (
        'auto& v = ::msl::threadgroup_variable<vec<T, 4> [N / 2][8]>([] { return "v"; });'
    ),
    "threadgroup int a, b[2];": (
        'auto& a = ::msl::threadgroup_variable<int>([] { return "a"; }); '
        'auto& b = ::msl::threadgroup_variable<int [2]>([] { return "b"; });'
    ),
    "threadgroup float\n  a[64];": 'auto& a = ::msl::threadgroup_variable<float [64]>([] { return "a"; })\n;',
} | {
    pointer: pointer  # is left alone
    for pointer in (
        "threadgroup float* p = a;",
        "void f(threadgroup float (&a)[64], threadgroup const T* b) {}",
        "auto p = reinterpret_cast<const threadgroup half4*>(a);",
        "uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]];",
    )
}


@pytest.mark.parametrize("text", REWRITTEN)
def test_threadgroup_variables_become_references_and_pointers_stay(text):
    assert rewrite_threadgroup_variables(f"{{ {text} }}", "k") == f"{{ {REWRITTEN[text]} }}"


OF_THEIR_OWN = r"\[k:1\] threadgroup variables are declared by a statement of"
REFUSED = [
    (rewrite_threadgroup_variables, "for (threadgroup int i; ; ) {}", OF_THEIR_OWN),
    (rewrite_threadgroup_variables, "#define SHARED threadgroup float\nSHARED a[4];", OF_THEIR_OWN),
    (rewrite_threadgroup_variables, "{\nthreadgroup int a = 1; }", r"\[k:2\] not a threadgroup variable \(a = 1\)"),
    (parse_parameters, "kernel void f() {}", r"\[k\] no such kernel in the text"),
    (
        parse_parameters,
        "kernel void k(T t [[texture(0)]]) {}",
        r"parameter t is not supported \(\[\[texture\(0\)\]\]\)",
    ),
    (Kernel, '#include "helper.h"\n', r"\[k.metal\] no such include file \(helper.h\)"),
]


@pytest.mark.parametrize(("call", "text", "message"), REFUSED)
def test_text_that_cannot_be_translated_is_refused(call, text, message):
    with pytest.raises(MetalError, match=message):
        call(text, "k")


WHOLE_FILE = """
#include <metal_stdlib>
#include <metal_simdgroup>
#include "helper.h"
#include "helper.h"
using namespace metal;

constant float table[4] = {1, 2, 3, 4};

template <typename T, int N>
[[kernel]] void f(
    const device T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant int& count [[buffer(3)]],
    ushort i [[thread_index_in_threadgroup]],
    uint2 position [[thread_position_in_grid]]) {
  threadgroup T last[N];
  if (i < N) last[i] = helper(table[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  T value = x[count - 1 - i] + last[i % N];
  y[position.x] = value;
}

template [[host_name("f_float")]] [[kernel]] decltype(f<float, 2>) f<float, 2>;
"""


def test_whole_files_run(tmp_path):
    (tmp_path / "helper.h").write_text("#pragma once\ninline float helper(float x) { return 10 * x; } // a comment\n")
    kernel = Kernel(WHOLE_FILE, "f", "float, 2", [tmp_path])
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    buffers = {
        0: Bound(x, "read_only", "x"),
        1: Bound(y, "output", "y"),
        3: Bound(np.array(8, np.int32), "read_only", "count"),
    }
    for instrumented in (False, True):
        with settings(instrumented=instrumented, seed=1):
            kernel.launch(buffers, (8, 1, 1), (8, 1, 1))
        assert (y == x[::-1] + np.tile([10, 20], 4)).all()
