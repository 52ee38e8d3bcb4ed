# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The core's own loop: decode steps by its C functions one after the other, without the GIL and without a check of
arguments. For measuring what the C interface adds; the core's functions are no interface.
"""
from libc.stdint cimport INT64_MAX, int64_t

from kvpool._core cimport (
    OK, Blocks, Ints, Limits, Plan, Pool, Seqs, Verdict, log_release, step_check, step_commit, wire_emit,
)


def core_steps(Pool pool, Plan plan, const int64_t[::1] handles, int64_t steps):
    """Make decode steps in a pool that is in order; return 0, or what step_check says."""
    cdef Ints rows, new
    cdef Limits limits
    cdef Verdict verdict
    cdef Seqs* s = &pool.state.seqs
    cdef Blocks* b = &pool.state.blocks
    cdef int status = OK
    rows.data, rows.size, rows.width = &handles[0], handles.shape[0], 8
    new.data, new.size, new.scalar = NULL, -1, 1
    limits.max_tokens = plan.max_tokens_
    limits.seq_tokens = min(plan.seq_limit, s.max_blocks * b.block_size)
    limits.table_width = plan.wire.table_width
    with nogil:
        while status == OK and steps > 0:
            steps -= 1
            s.stamp += 1
            status = step_check(&plan.step, s, b, &rows, &new, &limits, True, False, &verdict)
            if status == OK:
                plan.step.id = pool.state.next_step
                pool.state.next_step += 1
                step_commit(&plan.step, s, b, <const int64_t*>rows.data, True, False)
                wire_emit(&plan.wire, &plan.step, s, b, 0, 0)
                log_release(&plan.step.log, b)
                plan.step.log.size = 0
    return status
