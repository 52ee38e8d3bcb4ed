"""Calls of a pool by the C functions of the core, without the GIL: what threads do at once in `threads`."""
from libc.stdint cimport int64_t, uint64_t

from kvpool._core cimport (
    Ints, Plan, Pool, Seq, State, Verdict, ints_init, pool_close, pool_fork, pool_open, pool_step, pool_truncate,
)


cdef uint64_t draw(uint64_t* state) noexcept nogil:
    """splitmix64."""
    cdef uint64_t z
    state[0] += 0x9E3779B97F4A7C15ULL
    z = (state[0] ^ (state[0] >> 30)) * 0xBF58476D1CE4E5B9ULL
    return (z ^ (z >> 27)) * 0x94D049BB133111EBULL


cdef void operate(State* pool, Plan plan, uint64_t r) noexcept nogil:
    """Open, grow, fork, truncate or close a sequence; the pool may refuse it."""
    cdef Seq* q = &pool.seqs.seq[(r >> 8) % <uint64_t>pool.seqs.max_seqs]
    cdef int64_t handle = q.handle
    cdef int64_t[2] children
    cdef Ints row, number
    cdef Verdict v
    ints_init(&row, &pool.spare)
    ints_init(&number, &pool.spare)
    row.data, row.size = &handle, 1
    number.scalar = 1 + <int64_t>((r >> 40) % 9)
    if handle < 0:
        number.size = number.scalar         # tokens to have blocks for
        pool_open(pool, &number, NULL, 0, -1, True, True, False, False, False, NULL, &v)
    elif r % 8 < 4:
        pool_step(pool, plan, &row, &number, True, False, 0, -1, &v)
    elif r % 8 == 4:
        pool_fork(pool, handle, 2, children, &v)
    elif r % 8 < 7:
        number.scalar = q.num_tokens // 2
        pool_truncate(pool, &row, &number, &v)
    else:
        pool_close(pool, &row, &v)


def hammer(Pool pool, uint64_t seed, int64_t operations):
    """Make random calls on a pool whose steps are `in_order`, the GIL released; nothing else may use it meanwhile."""
    cdef uint64_t state = seed
    cdef int64_t i
    cdef Plan plan = Plan(pool, 1, 16)
    with nogil:
        for i in range(operations):
            operate(&pool.state, plan, draw(&state))
