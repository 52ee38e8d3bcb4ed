"""Failures of memory on demand, for tests: the k-th allocation of the core fails, or all from the k-th on.

Only builds with KVPOOL_FAULTS (debug, sanitizers, coverage) count and fail; in a release these calls are refused.
"""
from libc.stdint cimport INT64_MAX, int64_t

cdef int64_t made = 0           # allocations since the last `fail_at`
cdef int64_t living = 0         # blocks of memory that were not given back yet
cdef int64_t first = 0          # number of the allocation that fails, 0: none
cdef int64_t last = 0


cdef bint refused() noexcept nogil:
    """Count an allocation; whether it has to fail."""
    global made, living
    made += 1
    if first <= made <= last:
        return True
    living += 1
    return False


cdef void counted(int blocks) noexcept nogil:
    global living
    living += blocks


def can_fail():
    """Whether this build makes allocations fail on demand."""
    return bool(FAULTS)


def fail_at(int64_t number, bint sticky=False):
    """Count from zero; the allocation `number` (1, 2, ...; 0: none) fails, with `sticky` every later one too."""
    global made, first, last
    if not FAULTS:
        raise RuntimeError("[fail_at] this build was compiled without KVPOOL_FAULTS")
    made = 0
    first = number if number > 0 else INT64_MAX
    last = 0 if number <= 0 else INT64_MAX if sticky else number


def allocations():
    """(allocations since the last `fail_at`, blocks of memory in use now)."""
    return made, living
