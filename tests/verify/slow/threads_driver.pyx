"""Operations on pools by the C functions of the core, without the GIL: what threads do at once in `threads`."""
from libc.stdint cimport int32_t, int64_t, uint64_t

from kvpool._core cimport (
    OPEN, Blocks, Pool, Seqs, blocks_available, blocks_take_many, blocks_unref_many, seq_close, seq_fork, seq_new,
    seq_refresh, seq_table, seq_truncate,
)


cdef uint64_t draw(uint64_t* state) noexcept nogil:
    """splitmix64."""
    cdef uint64_t z
    state[0] += 0x9E3779B97F4A7C15ULL
    z = (state[0] ^ (state[0] >> 30)) * 0xBF58476D1CE4E5B9ULL
    return (z ^ (z >> 27)) * 0x94D049BB133111EBULL


cdef void operate(Seqs* s, Blocks* b, uint64_t r) noexcept nogil:
    """Open, grow, fork, truncate or close a sequence."""
    cdef int32_t slot = <int32_t>((r >> 8) % <uint64_t>s.max_seqs), need
    cdef int64_t children[2]
    cdef int64_t tokens
    if s.life[slot].life != OPEN:
        if s.num_free_slots > 0:
            seq_new(s)
    elif r % 8 < 4:
        tokens = s.seq[slot].kv_len + 1 + <int64_t>((r >> 40) % 9)
        need = <int32_t>((tokens + b.block_size - 1) // b.block_size) - s.seq[slot].num_blocks
        if tokens <= s.max_blocks * b.block_size and need <= blocks_available(b):
            if need > 0:
                blocks_take_many(b, seq_table(s, slot) + s.seq[slot].num_blocks, need)
                s.seq[slot].num_blocks += need
                s.sum_blocks += need
            s.sum_tokens += tokens - s.seq[slot].kv_len
            s.seq[slot].kv_len = tokens
            seq_refresh(s, b, slot)
    elif r % 8 == 4 and s.num_free_slots >= 2:
        seq_fork(s, b, slot, 2, children)
    elif r % 8 < 7:
        seq_truncate(s, b, slot, s.seq[slot].kv_len // 2)
    else:
        seq_close(s, b, slot)


def hammer(Pool pool, uint64_t seed, int64_t operations):
    """Make random operations on a pool, the GIL released; nothing else may use the pool in the meantime."""
    cdef uint64_t state = seed
    cdef int64_t i
    cdef Seqs* s = &pool.state.seqs
    cdef Blocks* b = &pool.state.blocks
    with nogil:
        for i in range(operations):
            operate(s, b, draw(&state))
