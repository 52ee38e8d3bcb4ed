"""The lint: what Apple's compiler refuses and g++ takes. Address spaces need clang, the rest does not."""

import pytest
from msl.lint import clang, lint

TEXT = """
#include <metal_stdlib>
using namespace metal;
constant float table[2] = {1, 2};
struct Pair {
  const device float* first; int second;
  METAL_FUNC int next() const { return second + 1; }
};
template <typename P>
float head(P p) { return p[0]; }
template <typename T>
T tail(threadgroup T* p, uint n) { return p[n - 1]; }
template <typename T, int N>
[[kernel]] void f(const device T* x [[buffer(0)]], constant int& n [[buffer(1)]], device T* y [[buffer(2)]],
                  const constant float* few [[buffer(3)]], uint3 tid [[thread_position_in_grid]]) {
  threadgroup T s[N];
  threadgroup float4 v[2];
  uint i = tid.x;
  threadgroup T* q = s + 4;
  const device vec<T, 4>* x4 = (const device vec<T, 4>*)(x + 4 * i);
  vec<T, 4> a = x4[0] * T(2);
  float4 b = float4(a), d = float4(1, 2, b.x, b.w), e(0.0f);
  Pair pair{(const device float*)x, n};
  q[i] = simd_sum(T(x[i])) + T(head(few)) + T(head(x)) + tail(s, N) + T(table[1] + pair.first[pair.next()]);
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  v[0] = max(b, d) + vec<float, 4>(a) + metal::vec<float, 4>(1, 2, b.x, b.w) + e;
  for (int k = 0; k < n; k++) y[i] = T(fast::exp(v[0].x - float(s[i])));
  simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(m, (const device float*)x, 8);
  simdgroup_store(m, (threadgroup float*)s, 8);
}
template [[host_name("f")]] [[kernel]] decltype(f<half, 64>) f<half, 64>;
"""
ADDRESS_SPACES = {
    "threadgroup T* z = y;": "threadgroup _Float16 *",
    "device T* z = s;": "device _Float16 *",
    "const T* z = x;": "const _Float16 *",
    "const constant T* z = x;": "constant _Float16 const *",
    "tail(y, 3);": "no matching function for call to 'tail'",
    "auto z = reinterpret_cast<device T*>(s);": "reinterpret_cast from",
    "y[i] = head(few) * 2.0;": "to 'double'",
    "device T* z = x;": "device _Float16 *",  # x is const
    "device T* z = (device T*)s;": "C-style cast from '__local half *' to '__global half *'",
    "int z = ((const device Pair*)x)->next();": "'this' argument to member function 'next' has type 'device Pair",
    "Pair p; threadgroup Pair* z = (threadgroup Pair*)&p;": "C-style cast from '__private Pair *' to '__local Pair *'",
}
needs_clang = pytest.mark.skipif(clang() is None, reason="no clang++: its address spaces are what is tested")


def with_line(line):
    return TEXT.replace("uint i = tid.x;", f"uint i = tid.x;\n{line}")


def test_lint_passes_a_correct_text():
    assert lint(TEXT, "f.metal") == []
    assert lint(with_line("int fragment = 0;"), "f.metal") == ["f.metal: these names are qualifiers of functions"]


@needs_clang
@pytest.mark.parametrize("line", ADDRESS_SPACES)
def test_mixed_address_spaces_are_found(line):
    found = lint(with_line(line), "f.metal")
    assert found and ADDRESS_SPACES[line] in found[0] and found[0].startswith("f.metal:19:"), found
