"""The cost of an operation against the size of the pool and the length of the tables.

Times grow where caches end; the instructions must not. See benchmarks/scaling.py.
"""

import pytest

from benchmarks import scaling

CASES = [
    *((name, size, "blocks") for name in scaling.POOL_OPERATIONS for size in scaling.POOL_SIZES),
    *((scaling.CONTEXT_OPERATION, size, "tokens") for size in scaling.CONTEXTS),
]


@pytest.mark.benchmark(group="scaling")
@pytest.mark.parametrize(("name", "size", "unit"), CASES)
def bench_scaling(measure, name, size, unit):
    operations = scaling.pool_operations if unit == "blocks" else scaling.context_operations
    run, undo = operations(size)[name]
    if name in scaling.STARTS_UNDONE:
        undo()
    run()  # the first setup takes this back
    counts = scaling.count_instructions()
    measure(
        run, 1, row=f"{name}, {size:,} {unit}", who="kvpool", setup=undo, rounds=scaling.RUNS,
        scaling=name, size=size, instructions=counts and counts[name][size],
    )  # fmt: skip
