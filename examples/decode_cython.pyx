# cython: language_level=3, boundscheck=False
"""An engine's decode loop in Cython, over the same functions by name."""
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

cimport kvpool.capi as capi


def decode(pool_object, plan_object, const int64_t[::1] handles, int64_t steps):
    """Make decode steps; return the sum of the slots that were written."""
    cdef capi.kvpool_pool* pool = NULL
    cdef capi.kvpool_plan* plan = NULL
    cdef capi.kvpool_array slots
    cdef int64_t total = 0, k
    if (capi.pool_from(<PyObject*>pool_object, &pool) != capi.KVPOOL_OK
            or capi.plan_from(<PyObject*>plan_object, &plan) != capi.KVPOOL_OK):
        failed()
    for _ in range(steps):
        if (capi.step(pool, plan, &handles[0], NULL, handles.shape[0], 0) != capi.KVPOOL_OK
                or capi.array(plan, capi.KVPOOL_SLOT_MAPPING, &slots) != capi.KVPOOL_OK):
            failed()
        for k in range(slots.length):           # your kernels run here
            total += (<const int32_t*>slots.data)[k]
        if capi.done(pool, plan) != capi.KVPOOL_OK:
            failed()
    return total


cdef int failed() except -1:
    capi.raise_error()
    return -1
