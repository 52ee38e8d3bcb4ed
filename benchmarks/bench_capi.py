"""Decode steps from C, through the table of functions of ``kvpool._C_API``: 64 sequences, wanted as in bench_step.py.

What stands as floor is the core's own loop: the same functions one after the other, without the GIL, without a look at
arguments. Both make the same changes: the digests of their pools are equal.
"""

import pytest

from benchmarks.capi_loops import ROWS, STEPS, loop


@pytest.mark.benchmark(group="decode step from C")
@pytest.mark.parametrize("who", ["kvpool", "floor"])
def bench_decode_from_c(measure, who):
    run, _ = loop("capsule" if who == "kvpool" else "core")
    measure(run, STEPS, row=f"decode step from C, {ROWS} sequences", who=who, rounds=60, rows=ROWS)


@pytest.mark.benchmark(group="decode step from C")
def bench_decode_and_done_from_c(measure):
    run, _ = loop("capsule", in_order=False)
    measure(run, STEPS, row=f"decode step and done from C, {ROWS} sequences", who="kvpool", rounds=60, rows=ROWS)
