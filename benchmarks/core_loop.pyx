# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The core's own loop: decode steps by its C function one after the other, without the GIL, the lock and a check of
arguments. For measuring what the C interface adds; the core's functions are not an interface.
"""
from libc.stdint cimport int64_t

from kvpool._core cimport OK, Ints, Plan, Pool, Verdict, pool_step


def core_steps(Pool pool, Plan plan, const int64_t[::1] handles, int64_t steps):
    """Make decode steps in a pool that is in order; return 0, or what the step was refused for."""
    cdef Ints rows, new
    cdef Verdict verdict
    cdef int status = OK
    rows.data, rows.size, rows.width = &handles[0], handles.shape[0], 8
    new.data, new.size, new.scalar = NULL, -1, 1
    with nogil:
        while status == OK and steps > 0:
            steps -= 1
            status = pool_step(&pool.state, plan, &rows, &new, True, False, 0, -1, &verdict)
    return status
