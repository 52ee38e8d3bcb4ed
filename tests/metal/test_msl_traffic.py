"""Counts of what kernels move, for kernels whose traffic is known: coalesced, strided, broadcast, vectors, branches."""

import numpy as np
import pytest
from msl import Traffic, metal_kernel, settings

HEAD = "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;\n"


def run_of(body, x, y_shape, *, threads=32, grid=None, seed=0, instrumented=True):
    kernel, grid = metal_kernel("traffic", ["x"], ["y"], HEAD + body), (grid or threads, 1, 1)
    arguments = {"inputs": [x], "output_shapes": [y_shape], "output_dtypes": [np.float32], "grid": grid}
    with settings(instrumented=instrumented, seed=seed, allow_unwritten=True) as runs:
        kernel(**arguments, threadgroup=(threads, 1, 1))
    return runs[0]


def floats(count):
    return np.ones(count, np.float32)


#: Of one simdgroup: the body, elements of x, and what is counted of them.
READS = {
    "32 neighbours: one full line": ("y[i] = x[i];", 32, Traffic(128, 128, 1, 1, 1, 128)),
    "an element of every line": ("y[i] = x[32 * i];", 1024, Traffic(128, 128, 1, 32, 0, 128)),
    "one element for all": ("y[i] = x[7];", 32, Traffic(4, 128, 1, 1, 0, 4)),
    "a float4 for every lane: four full lines in one access": (
        "float4 v = *(const device float4*)(x + 4 * i); y[i] = v.x + v.w;",
        128,
        Traffic(512, 512, 1, 4, 4, 512),
    ),
    "four floats for every lane: each access uses a quarter of its lines": (
        "float s = 0; for (int k = 0; k < 4; k++) s += x[4 * i + k]; y[i] = s;",
        128,
        Traffic(512, 512, 4, 16, 0, 512),
    ),
    "a loop that lanes leave at different times": (
        "float s = 0; for (uint k = 0; k <= lane / 8; k++) s += x[32 * k + lane]; y[i] = s;",
        128,
        Traffic(128 + 96 + 64 + 32, 320, 4, 4, 1, 320),
    ),
    "the same line twice": ("y[i] = x[i] + simd_max(1.0f) * x[i ^ 1];", 32, Traffic(256, 256, 2, 2, 2, 128)),
    "a matrix": (
        "simdgroup_float8x8 m; simdgroup_load(m, x, 32); simdgroup_store(m, y);",
        256,
        Traffic(256, 256, 1, 8, 0, 256),
    ),
}


@pytest.mark.parametrize("case", READS)
def test_reads_are_counted(case):
    body, count, expected = READS[case]
    assert run_of(body, floats(count), (64,), seed=5).reads["x"] == expected


def test_writes_are_counted_and_simdgroups_and_threadgroups_add_up():
    run = run_of("y[4 * i] = x[i % 64];", floats(64), (4096,), threads=128, grid=1024)
    assert run.threadgroups == 8
    assert run.reads["x"] == Traffic(4096, 4096, 32, 32, 32, 256)
    assert run.writes["y"] == Traffic(4096, 4096, 32, 128, 0, 4096)
    whole = run_of("((device float4*)y)[i] = float4(x[0]);", floats(32), (128,)).writes["y"]
    assert (whole.accesses, whole.transactions, whole.full_transactions) == (1, 4, 4)


def test_a_skipped_iteration_does_not_shift_the_others_past_a_meeting():
    body = """
        float s = 0;
        for (int k = 0; k < 4; k++) {
            if (k || lane % 2) s += x[32 * k + lane];
            s = simd_max(s);
        }
        y[i] = s;
    """
    read = run_of(body, floats(128), (32,)).reads["x"]
    assert (read.accesses, read.transactions, read.full_transactions, read.bytes) == (4, 4, 3, 3 * 128 + 64)


@pytest.mark.parametrize("instrumented", [False, True])
def test_threadgroup_memory_barriers_and_operations_are_counted(instrumented):
    body = """
        threadgroup float a[96];
        threadgroup half2 b[16];
        for (int k = 0; k < 3; k++) {
            a[thread_index_in_threadgroup] = x[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            y[i] = a[thread_index_in_threadgroup ^ 1];
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (thread_index_in_threadgroup < 16) b[lane] = half2(1);
        y[i] = simd_sum(simd_max(1.0f));
    """
    run = run_of(body, floats(192), (192,), threads=96, grid=192, instrumented=instrumented)
    assert (run.threadgroups, run.threadgroup_barriers, run.threadgroup_memory) == (2, 6, 96 * 4 + 64)
    assert (run.simdgroup_barriers, run.simd_operations) == (2 * 3 * 3, 2 * 3 * 2)
    assert instrumented or run.reads["x"] == Traffic()
