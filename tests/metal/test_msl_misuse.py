"""Metal kernels on a CPU: what a kernel may not do is found, and the message says what, where and by whom."""

import numpy as np
import pytest
from msl import MetalError, metal_kernel, settings

THREADS = 64


def run(body, *, threads=THREADS, grid=THREADS, shape=(THREADS,), dtype=np.float32, **chosen):
    """Run `body` with an input x and an output y of 64 floats, one threadgroup of 64 threads."""
    kernel = metal_kernel("misuse", ["x"], ["y"], f"uint i = thread_position_in_grid.x;\n{body}")
    with settings(**chosen):
        return kernel(
            inputs=[np.arange(64, dtype=np.float32)],
            output_shapes=[shape],
            output_dtypes=[dtype],
            grid=(grid, 1, 1),
            threadgroup=(threads, 1, 1),
        )[0]


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FOUND_ALWAYS = {
    "a barrier that half of the threads reach": (
        f"if (i < 32) {{ {BARRIER} }}\ny[i] = x[i];",
        "divergent threadgroup_barrier: this thread waits in .* at .*:2, but thread 32 .* has returned",
    ),
    "a shuffle from a lane that has returned": (
        "if (i % 32 > 15) { y[i] = 0; return; }\ny[i] = simd_shuffle(x[i], 20);",
        "simd_shuffle at line 3 reads inactive lane 20 .*lane 0",
    ),
    "a read by one element past the end": (
        "y[i] = x[i + 1];",
        r"out-of-bounds .*'x' \(256 bytes\) at byte offset 256 .*thread \(63, 0, 0\), simdgroup 1, lane 31",
    ),
    "a read far below the start": (
        "y[i] = x[int(i) - 2000000];",
        r"out-of-bounds .*'x' \(256 bytes\) at byte offset -8000000 .*thread \(0, 0, 0\)",
    ),
    "a write to an input": (
        "const_cast<device float*>(x)[i] = 0;\ny[i] = 1;",
        r"write to read-only buffer 'x' \(256 bytes\) at byte offset 0 .*thread \(0, 0, 0\)",
    ),
    "a full stack": (
        "float big[40000];\nfor (int k = 0; k < 40000; k++) big[k] = x[(k * 7 + i) % 64];\ny[i] = big[int(x[i]) * 33];",
        "the thread's stack of 64 KiB is full",
    ),
    "too much threadgroup memory, in a branch not taken": (
        "if (x[i] < 0) { threadgroup float s[9000]; s[i] = x[i]; y[i] = s[i]; }\nelse y[i] = 0;",
        "threadgroup memory of 36000 bytes, the limit is 32768",
    ),
    "an element that nothing writes": (
        "if (i != 60) y[i] = x[i];",
        "output 'y': 1 of 64 elements were never written, the first is element 60",
    ),
    "a write before the start of threadgroup memory": (
        f"threadgroup float s[64];\ns[int(i) - 1] = x[i];\n{BARRIER}\ny[i] = s[i];",
        r"write .*threadgroup variable 's'.* at byte offset -",
    ),
    "a matrix operation of half a simdgroup": (
        "if (i >= 16) return;\nsimdgroup_float8x8 m;\nsimdgroup_store(m, y);",
        "simdgroup_store at line 4 needs 32 active lanes, has 0x0000ffff",
    ),
}


@pytest.mark.parametrize("instrumented", [False, True], ids=["plain", "instrumented"])
@pytest.mark.parametrize("case", FOUND_ALWAYS)
def test_misuse_is_refused_with_its_place(case, instrumented):
    body, message = FOUND_ALWAYS[case]
    # Below the start of a buffer there is a guard for odd seeds only, but the far read finds one anyway.
    with pytest.raises(MetalError, match=f"(?s){message}"):
        run(body, instrumented=instrumented)


FOUND_INSTRUMENTED = {
    "a write after others have read": (
        f"threadgroup float s[64];\ns[i] = x[i];\n{BARRIER}\nif (i < 32) y[i] = s[i + 32];\nelse y[i] = s[i] = 0;",
        "data race on threadgroup variable 's' at byte offset 128: this thread writes what thread 0 .* read",
    ),
    "a write that a barrier of a simdgroup does not order": (
        f"threadgroup float s[64];\ns[i] = 0;\n{BARRIER}\ns[i] = x[i];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[63 - i];",
        "data race on threadgroup variable 's' at byte offset",
    ),
    "device memory behind a barrier of threadgroup memory": (
        f"y[i] = x[i];\n{BARRIER}\ny[63 - i] += 1;",
        "data race on .*'y'",
    ),
    "a write by one of the lanes that have read": (
        f"threadgroup float s[1];\nif (i == 0) s[0] = 1;\n{BARRIER}\ny[i] = 0;\n"
        "if (i < 32) { y[i] = simd_sum(s[0]); if (i == 0) s[0] = 2; }",
        "data race on threadgroup variable 's' at byte offset 0: this thread writes what several threads read",
    ),
    "threadgroup memory that nothing wrote": (
        "threadgroup float s[64];\ny[i] = s[i];",
        "read of threadgroup variable 's' at byte offset 0, which nothing has written",
    ),
    "a read between the end of a buffer and its guard": (
        "y[i] = ((const device uchar*)x)[i == 63 ? 256 : i];",
        r"out-of-bounds read of 1 bytes: buffer 'x' \(256 bytes\) at byte offset 256",
    ),
    "a read past the end of threadgroup memory": (
        f"threadgroup float s[64];\nthreadgroup float t[64];\ns[i] = t[i] = x[i];\n{BARRIER}\ny[i] = s[i + 16];",
        r"out-of-bounds read of 4 bytes: threadgroup variable 's' \(256 bytes\) at byte offset 256",
    ),
}


@pytest.mark.parametrize("case", FOUND_INSTRUMENTED)
def test_misuse_is_refused_by_instrumented_runs(case):
    body, message = FOUND_INSTRUMENTED[case]
    with pytest.raises(MetalError, match=f"(?s){message}"):
        run(body, instrumented=True)


def test_threadgroups_are_never_ordered():
    with pytest.raises(MetalError, match=r"data race on .*'y'"):
        run("y[i % 32] = x[i];", threads=32, instrumented=True)


def test_odd_seeds_guard_the_start_of_buffers():
    with pytest.raises(MetalError, match=r"out-of-bounds .*'x' .* at byte offset -4 "):
        run("y[i] = x[int(i) - 1];", seed=1)
