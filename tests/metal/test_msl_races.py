"""The race detector against the definition of a race, on random programs of reads, writes and barriers."""

from itertools import product

import numpy as np
import pytest
from msl import MetalError, metal_kernel, settings

THREADS, GROUPS, PHASES, CELLS = 64, 2, 5, 12
# Barrier after a phase: who meets, and which memory it orders (1: device, 2: threadgroup).
BARRIERS = [("threadgroup", 3), ("threadgroup", 1), ("threadgroup", 2), ("threadgroup", 0), ("simdgroup", 1),
            ("simdgroup", 2), ("simdgroup", 3), ("simdgroup", 0)]  # fmt: skip
FLAGS = {0: "mem_none", 1: "mem_device", 2: "mem_threadgroup"}


def barrier_call(scope, flags):
    names = [FLAGS[bit] for bit in (1, 2) if flags & bit] or [FLAGS[0]]
    return f"{scope}_barrier({' | '.join(f'mem_flags::{name}' for name in names)});"


# An access is 0: none, a + 1: read cell a, -(a + 1): write cell a; the first CELLS cells are device memory.
INTERPRETER = f"""
    threadgroup int local[{CELLS}];
    uint at = thread_position_in_grid.x;
    int sum = 0;
    if (thread_index_in_threadgroup == 0)
        for (int i = 0; i < {CELLS}; i++) local[i] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int phase = 0; phase < {PHASES}; phase++) {{
        int access = accesses[phase * {THREADS * GROUPS} + at];
        int cell = abs(access) - 1;
        if (access > 0) sum += cell < {CELLS} ? memory[cell] : local[cell - {CELLS}];
        if (access < 0) (cell < {CELLS} ? memory[cell] : local[cell - {CELLS}]) = at;
        switch (barriers[phase]) {{
            {"".join(f"case {i}: {barrier_call(*kind)} break;" for i, kind in enumerate(BARRIERS))}
        }}
    }}
    sums[at] = sum;
"""
KERNEL = metal_kernel("interpreter", ["accesses", "barriers"], ["memory", "sums"], INTERPRETER)


def detector_finds_a_race(accesses, barriers, seed):
    with settings(instrumented=True, seed=seed):
        try:
            KERNEL(
                inputs=[accesses, np.array(barriers, np.int32)], output_shapes=[(CELLS,), (THREADS * GROUPS,)],
                output_dtypes=[np.int32, np.int32], init_value=0, grid=(THREADS * GROUPS, 1, 1),
                threadgroup=(THREADS, 1, 1),
            )  # fmt: skip
        except MetalError as error:
            assert "data race" in str(error), error
            return True
    return False


def ordered(first, second, barriers, is_device):
    """Whether a barrier between two accesses (phase, thread) puts them in order."""
    (phase, thread), (later, other) = sorted([first, second])
    for scope, flags in (BARRIERS[kind] for kind in barriers[phase:later]):
        size = THREADS if scope == "threadgroup" else 32
        if flags & (1 if is_device else 2) and thread // size == other // size:
            return True
    return False


def has_a_race(accesses, barriers):
    """By definition: two threads, one cell, at least one write, no order."""
    by_cell = {}
    for phase, thread in product(range(PHASES), range(THREADS * GROUPS)):
        access = int(accesses[phase, thread])
        cell = abs(access) - 1
        if access:
            place = cell if cell < CELLS else (cell, thread // THREADS)  # threadgroup memory is each one's own
            by_cell.setdefault(place, []).append((phase, thread, access < 0))
    for place, found in by_cell.items():
        for i, (phase, thread, writes) in enumerate(found):
            for later, other, also_writes in found[i + 1 :]:
                if thread != other and (writes or also_writes):
                    is_device = not isinstance(place, tuple)
                    if not ordered((phase, thread), (later, other), barriers, is_device):
                        return True
    return False


def draw(random):
    """A program with few accesses, so that about half of the programs have no race."""
    accesses = np.zeros((PHASES, THREADS * GROUPS), np.int32)
    count = random.integers(2, 7)
    cells = random.choice(2 * CELLS, 2)
    near = random.integers(0, 2)
    for _ in range(count):
        thread = random.integers(0, 32) if near else random.integers(0, THREADS * GROUPS)
        accesses[random.integers(PHASES), thread] = (random.choice(cells) + 1) * random.choice([1, 1, -1])
    return accesses, [int(kind) for kind in random.integers(0, len(BARRIERS), PHASES)]


@pytest.mark.parametrize("seed", range(4))
def test_races_are_found_if_and_only_if_there_are_any(seed):
    random = np.random.default_rng(seed)
    outcomes = []
    for number in range(150):
        accesses, barriers = draw(random)
        expected = has_a_race(accesses, barriers)
        assert detector_finds_a_race(accesses, barriers, seed) == expected, (seed, number)
        outcomes.append(expected)
    assert 0.2 < np.mean(outcomes) < 0.8, "both kinds of programs are drawn"
