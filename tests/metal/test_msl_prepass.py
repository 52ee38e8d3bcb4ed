"""From Metal text to C++: comments, includes, threadgroup variables, parameters, function constants, whole files."""

from pathlib import Path

import msl
import numpy as np
import pytest
from msl import Bound, Kernel, MetalError, settings
from msl.prepass import (
    PREDEFINED,
    parse_parameters,
    rewrite_threadgroup_variables,
    split_at_commas,
    strip_comments,
    take_branches,
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


def test_a_threadgroup_variable_may_follow_a_directive():
    text = 'void f() {\n#line 1 "body"\n  #define N 4\n\n  threadgroup int a[N]; }'
    assert "::msl::threadgroup_variable<int [N]>" in rewrite_threadgroup_variables(text, "k")


def test_comments_go_and_lines_stay():
    text = 'a // b\n/* c\n d */ e "// no /* comment */" f'
    assert strip_comments(text) == 'a     \n    \n      e "// no /* comment */" f'


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ("defined NOWHERE || __METAL_VERSION__ >= 310", True),
        ("!defined(__METAL__) && 1", False),
        ("A != B && C", True),  # C is A
        ("EMPTY || NOWHERE", False),
        ("__has_include(<metal_tensor>)", False),
        ("(A + 2) * 10ul == 40", True),
    ],
)
def test_branches_that_are_not_taken_go(condition, taken):
    text = f"#define A 2\n#define B 3\n#define C A\n#define EMPTY\n#if {condition}\nyes\n#else\nno\n#endif\nend"
    assert take_branches(text, "k").split("\n")[4:] == ["", "yes" * taken, "", "no" * (not taken), "", "end"]


def test_branches_may_be_nested_and_chained():
    text = "#ifdef A\n#if 1\n1\n#endif\n#elif 1\n#ifndef A\n2\n#undef B\n#endif\n#elif 1\n3\n#else\n4\n#endif"
    assert take_branches(text, "k").split() == ["2", "#undef", "B"]
    assert take_branches("#define A\n" + text, "k").split() == ["#define", "A", "1"]
    assert take_branches("#define A\n#undef A\n" + text, "k").split()[-3:] == ["2", "#undef", "B"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n#endif", r"\[k:2\] #endif without #if"),
        ("#if 1\n#if 0\n#endif", r"\[k\] #if without #endif"),
        ("#if 1 +", r"\[k:1\] this condition is not understood \(1 \+\)"),
    ],
)
def test_branches_that_make_no_sense_are_refused(text, message):
    with pytest.raises(MetalError, match=message):
        take_branches(text, "k")


def test_what_metal_says_of_itself_is_the_same_in_both_places():
    text = (Path(msl.__file__).parent / "include" / "msl" / "all.h").read_text()
    for macro, value in PREDEFINED.items():
        assert f"#define {macro} {value}\n" in text


def test_a_failed_assertion_ends_the_launch():
    text = """kernel void f(device int* y, uint i [[thread_position_in_grid]]) {
      #if 0
      threadgroup = default;
      #endif
      assert(i < 2 && y != nullptr);
      y[i] = i; }"""
    y = np.zeros(4, np.int32)
    kernel = Kernel(text, "f")
    with pytest.raises(MetalError, match=r"assert\(i < 2 && y != nullptr\) failed at line 5 .*thread \(2, 0, 0\)"):
        kernel.launch({0: Bound(y, "output", "y")}, (4, 1, 1), (4, 1, 1))
    kernel.launch({0: Bound(y[:2], "output", "y")}, (2, 1, 1), (2, 1, 1))
    assert y.tolist() == [0, 1, 0, 0]


def test_lists_are_split_outside_of_brackets():
    assert split_at_commas("a<b, c>, d(e, f), g[h, i]") == ["a<b, c>", " d(e, f)", " g[h, i]"]


def test_parameters_without_attributes_are_numbered_in_order():
    text = """kernel void f(device float* a, constant int& b [[buffer(4)]], device int* c,
                  uint i [[thread_position_in_grid]]) {}"""
    assert [(p.name, p.kind, p.index) for p in parse_parameters(text, "f")] == [
        ("a", "buffer", 0), ("b", "buffer", 4), ("c", "buffer", 5), ("i", "thread_position_in_grid", 0),
    ]  # fmt: skip


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
constant int offset [[ function_constant(7) ]];
constant float table[4] = {1, 2, 3, 4};

template <typename T, int N>
[[kernel]] void f(
    const device T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant int& count [[buffer(3)]],
    threadgroup T* scratch [[threadgroup(0)]],
    ushort i [[thread_index_in_threadgroup]],
    uint2 position [[thread_position_in_grid]]) {
  threadgroup T last[N];
  scratch[i] = x[position.x];
  if (i < N) last[i] = helper(table[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  T value = scratch[count - 1 - i] + last[i % N] + offset;
  y[position.x] = twice ? 2 * value : value;
}

template [[host_name("f_float")]] [[kernel]] decltype(f<float, 2>) f<float, 2>;
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "helper.h").write_text("#pragma once\ninline float helper(float x) { return 10 * x; } // a comment\n")
    return tmp_path


@pytest.mark.parametrize(("constants", "factor", "offset"), [({}, 1, 0), ({0: True, "offset": 5}, 2, 5)])
def test_whole_files_run(folder, constants, factor, offset):
    kernel = Kernel(WHOLE_FILE, "f", "float, 2", [folder], constants)
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    buffers = {
        0: Bound(x, "read_only", "x"),
        1: Bound(y, "output", "y"),
        3: Bound(np.array(8, np.int32), "read_only", "count"),
    }
    for instrumented in (False, True):
        with settings(instrumented=instrumented, seed=1):
            kernel.launch(buffers, (8, 1, 1), (8, 1, 1), threadgroup_memory=[32])
        assert (y == factor * (x[::-1] + np.tile([10, 20], 4) + offset)).all()
        message = r"threadgroup.* '\[\[threadgroup\]\] argument' \(28 bytes\) at byte offset 28"
        with settings(instrumented=instrumented), pytest.raises(MetalError, match=message):
            kernel.launch(buffers, (8, 1, 1), (8, 1, 1), threadgroup_memory=[28])
    with pytest.raises(MetalError, match=r"no memory was given for \[\[threadgroup\(0\)\]\]"):
        kernel.launch(buffers, (8, 1, 1), (8, 1, 1))


def test_a_missing_include_is_refused():
    with pytest.raises(MetalError, match=r"\[f.metal\] no such include file \(helper.h\)"):
        Kernel(WHOLE_FILE, "f", "float, 2")


def test_a_buffer_that_is_not_bound_is_a_null_pointer():
    kernel = Kernel("kernel void f(device int* x, device int* y) { y[0] = x[0]; }", "f")
    with pytest.raises(MetalError, match="a buffer that is not bound"):
        kernel.launch({1: Bound(np.zeros(1, np.int32), "output", "y")}, (1, 1, 1), (1, 1, 1))


def test_arrays_are_bound_whole():
    kernel = Kernel("kernel void f(device int* y) { y[0] = 1; }", "f")
    with pytest.raises(MetalError, match="buffer 'y' is not C-contiguous"):
        kernel.launch({0: Bound(np.zeros(4, np.int32)[::2], "output", "y")}, (1, 1, 1), (1, 1, 1))
    with pytest.raises(MetalError, match="three positive numbers"):
        kernel.launch({0: Bound(np.zeros(4, np.int32), "output", "y")}, (0, 1, 1), (1, 1, 1))
