"""From Metal text to C++: comments, includes, threadgroup variables, parameters, function constants, whole files."""

import numpy as np
import pytest
from msl import Bound, Kernel, MetalError, settings
from msl.prepass import (
    parse_parameters,
    rewrite_threadgroup_variables,
)

VARIABLES = {
    "threadgroup vec<T, 4> v[N / 2][8];": (
        'auto& v = ::msl::threadgroup_variable<vec<T, 4> [N / 2][8]>([] { return "v"; });'
    ),
    "threadgroup int a, b[2];": (
        'auto& a = ::msl::threadgroup_variable<int>([] { return "a"; }); '
        'auto& b = ::msl::threadgroup_variable<int [2]>([] { return "b"; });'
    ),
    "threadgroup float\n  a[64];": 'auto& a = ::msl::threadgroup_variable<float [64]>([] { return "a"; })\n;',
}
LEFT_ALONE = [
    "threadgroup float* p = a;",
    "void f(threadgroup float (&a)[64], threadgroup const T* b) {}",
    "auto p = reinterpret_cast<const threadgroup half4*>(a);",
    "threadgroup_barrier(mem_flags::mem_threadgroup);",
    "uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]];",
]


@pytest.mark.parametrize("declaration", VARIABLES)
def test_threadgroup_variables_become_references(declaration):
    assert rewrite_threadgroup_variables(f"{{ {declaration} }}", "k") == f"{{ {VARIABLES[declaration]} }}"


@pytest.mark.parametrize("text", LEFT_ALONE)
def test_pointers_to_threadgroup_memory_stay(text):
    assert rewrite_threadgroup_variables(f"{{ {text} }}", "k") == f"{{ {text} }}"


@pytest.mark.parametrize("text", ["for (threadgroup int i; ; ) {}", "#define SHARED threadgroup float\nSHARED a[4];"])
def test_other_uses_of_threadgroup_are_refused(text):
    with pytest.raises(MetalError, match=r"\[k:1\] threadgroup variables are declared by a statement of"):
        rewrite_threadgroup_variables(text, "k")


def test_an_initialised_threadgroup_variable_is_refused():
    with pytest.raises(MetalError, match=r"\[k:2\] not a threadgroup variable \(a = 1\)"):
        rewrite_threadgroup_variables("{\nthreadgroup int a = 1; }", "k")
    with pytest.raises(MetalError, match=r"\[body:3\] not a threadgroup variable"):
        rewrite_threadgroup_variables('void f() {\n#line 1 "body"\n\n;\nthreadgroup int a = 1; }', "k")


def test_unknown_kernels_and_attributes_are_refused():
    with pytest.raises(MetalError, match=r"\[g\] no such kernel in the text"):
        parse_parameters("kernel void f() {}", "g")
    with pytest.raises(MetalError, match=r"parameter t is not supported \(\[\[texture\(0\)\]\]\)"):
        parse_parameters("kernel void f(texture2d<float> t [[texture(0)]]) {}", "f")


WHOLE_FILE = """
#include <metal_stdlib>
#include <metal_simdgroup>
#include "helper.h"
#include "helper.h"
using namespace metal;

constant bool twice [[function_constant(0)]];
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
  y[position.x] = twice ? 2 * value : value;
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


def test_a_missing_include_is_refused():
    with pytest.raises(MetalError, match=r"\[f.metal\] no such include file \(helper.h\)"):
        Kernel(WHOLE_FILE, "f", "float, 2")


def test_a_buffer_that_is_not_bound_is_a_null_pointer():
    kernel = Kernel("kernel void f(device int* x, device int* y) { y[0] = x[0]; }", "f")
    with pytest.raises(MetalError, match="a buffer that is not bound"):
        kernel.launch({1: Bound(np.zeros(1, np.int32), "output", "y")}, (1, 1, 1), (1, 1, 1))
