"""Counts of what kernels move, for kernels whose traffic is known: coalesced, strided, broadcast, vectors, branches."""

import numpy as np
import pytest
from msl import Traffic, metal_kernel, settings

HEAD = "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;\n"


def run_of(body, x, y_shape, *, threads=32, grid=None, dtype=np.float32, seed=0, instrumented=True):
    kernel = metal_kernel("traffic", ["x"], ["y"], HEAD + body)
    with settings(instrumented=instrumented, seed=seed, allow_unwritten=True) as runs:
        kernel(
            inputs=[x], output_shapes=[y_shape], output_dtypes=[dtype], grid=(grid or threads, 1, 1),
            threadgroup=(threads, 1, 1),
        )  # fmt: skip
    return runs[0]


def floats(count):
    return np.ones(count, np.float32)


READS = {  # of one simdgroup: the body, elements of x, and what is counted of them
    "32 neighbours: one full line": (
        "y[i] = x[i];", 32, Traffic(bytes=128, lane_bytes=128, accesses=1, transactions=1, full_transactions=1,
                                    distinct_bytes=128),
    ),
    "an element of every line": (
        "y[i] = x[32 * i];", 1024, Traffic(bytes=128, lane_bytes=128, accesses=1, transactions=32, full_transactions=0,
                                           distinct_bytes=128),
    ),
    "one element for all": (
        "y[i] = x[7];", 32, Traffic(bytes=4, lane_bytes=128, accesses=1, transactions=1, full_transactions=0,
                                    distinct_bytes=4),
    ),
    "a float4 for every lane: four full lines in one access": (
        "float4 v = *(const device float4*)(x + 4 * i); y[i] = v.x + v.w;", 128,
        Traffic(bytes=512, lane_bytes=512, accesses=1, transactions=4, full_transactions=4, distinct_bytes=512),
    ),
    "four floats for every lane: each access uses a quarter of its lines": (
        "float s = 0; for (int k = 0; k < 4; k++) s += x[4 * i + k]; y[i] = s;", 128,
        Traffic(bytes=512, lane_bytes=512, accesses=4, transactions=16, full_transactions=0, distinct_bytes=512),
    ),
    "a loop that lanes leave at different times": (
        "float s = 0; for (uint k = 0; k <= lane / 8; k++) s += x[32 * k + lane]; y[i] = s;", 128,
        Traffic(bytes=128 + 96 + 64 + 32, lane_bytes=320, accesses=4, transactions=4, full_transactions=1,
                distinct_bytes=320),
    ),
    "the same line twice": (
        "y[i] = x[i] + simd_max(1.0f) * x[i ^ 1];", 32,
        Traffic(bytes=256, lane_bytes=256, accesses=2, transactions=2, full_transactions=2, distinct_bytes=128),
    ),
    "a matrix": (
        "simdgroup_float8x8 m; simdgroup_load(m, x, 32); simdgroup_store(m, y);", 256,
        Traffic(bytes=256, lane_bytes=256, accesses=1, transactions=8, full_transactions=0, distinct_bytes=256),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READS)
def test_reads_are_counted(case):
    body, count, expected = READS[case]
    assert run_of(body, floats(count), (64,), seed=5).reads["x"] == expected


WRITES = {
    "32 neighbours": ("y[i] = 1;", (1, 1, 1)),
    "every fourth element": ("y[4 * i] = 1;", (1, 4, 0)),
    "a float4 for every lane": ("*(device float4*)(y + 4 * i) = float4(x[0]);", (1, 4, 4)),
    "a float4 by operator": ("device float4& v = ((device float4*)y)[i]; v = 1; v *= 2.0f;", (2, 8, 8)),
}


@pytest.mark.parametrize("case", WRITES)
def test_writes_are_counted(case):
    body, expected = WRITES[case]
    written = run_of(body, floats(32), (128,)).writes["y"]
    assert (written.accesses, written.transactions, written.full_transactions) == expected


def test_simdgroups_and_threadgroups_add_up():
    run = run_of("y[i] = x[i % 64];", floats(64), (1024,), threads=128, grid=1024)
    assert run.threadgroups == 8
    assert run.reads["x"] == Traffic(
        bytes=4096, lane_bytes=4096, accesses=32, transactions=32, full_transactions=32, distinct_bytes=256,
    )  # fmt: skip
    assert run.writes["y"].full_transactions == 32


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


def test_threadgroup_memory_and_barriers_are_counted():
    body = """
        threadgroup float a[32];
        threadgroup half2 b[16];
        for (int k = 0; k < 3; k++) {
            a[lane] = x[i];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            y[i] = a[lane ^ 1];
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (lane < 16) b[lane] = half2(1);
    """
    plain = run_of(body, floats(64), (64,), grid=64, instrumented=False)
    assert (plain.threadgroup_barriers, plain.threadgroup_memory, plain.reads["x"]) == (6, 192, Traffic())
    run = run_of(body, floats(64), (64,), grid=64)
    assert (run.threadgroup_barriers, run.simdgroup_barriers, run.simd_operations) == (6, 6, 0)
    assert run.threadgroup_memory == 128 + 64
