"""The C interface for `cimport`; kvpool.h says what each function does. Compile with `kvpool.get_include()`."""
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from "kvpool/include/kvpool.h":
    const char* KVPOOL_CAPSULE

    enum:
        KVPOOL_OK, KVPOOL_OUT_OF_BLOCKS, KVPOOL_OUT_OF_SEQUENCES, KVPOOL_STALE_HANDLE, KVPOOL_FOREIGN_HANDLE
        KVPOOL_CAPACITY_EXCEEDED, KVPOOL_PLAN_STATE, KVPOOL_CONCURRENT_USE, KVPOOL_CLOSED, KVPOOL_VALUE_ERROR
        KVPOOL_TYPE_ERROR, KVPOOL_NO_MEMORY, KVPOOL_NO_GIL, KVPOOL_OTHER
        KVPOOL_PARTIAL
        KVPOOL_BLOCK_TABLES, KVPOOL_SEQ_LENS, KVPOOL_SLOT_MAPPING, KVPOOL_POSITIONS, KVPOOL_CU_Q_LENS, KVPOOL_INDPTR
        KVPOOL_INDICES, KVPOOL_LAST_PAGE_LEN, KVPOOL_SLOT_IDS, KVPOOL_COPIES, KVPOOL_DIRTY_ROWS, KVPOOL_SERVED
        KVPOOL_HANDLES, KVPOOL_KV_STARTS, KVPOOL_STATE_SRC, KVPOOL_STATE_DST

    ctypedef struct kvpool_pool:
        pass

    ctypedef struct kvpool_plan:
        pass

    ctypedef struct kvpool_array:
        const void* data
        int64_t length
        int64_t width
        int32_t itemsize

    ctypedef struct kvpool_keep:
        int64_t ttl
        int64_t tokens
        int32_t priority

    ctypedef struct kvpool_stats:
        int64_t num_blocks
        int64_t reserved
        int64_t free
        int64_t evictable
        int64_t limbo
        int64_t used
        int64_t shared
        int64_t sequences
        int64_t pending_plans
        int64_t tokens

    ctypedef struct kvpool_api:     # the functions below in a table, for who has no `cimport`
        pass


cdef int pool_from(void* object, kvpool_pool** pool) noexcept
cdef int plan_from(void* object, kvpool_plan** plan) noexcept
cdef const char* error_message() noexcept
cdef void* raise_error() noexcept
cdef int open(kvpool_pool* pool, int64_t tokens, int64_t* handle) noexcept
cdef int open_prompt(kvpool_pool* pool, const int32_t* prompt, int64_t n, const char* name_space, int64_t name_bytes,
                     const kvpool_keep* keep, int64_t* handle, int64_t* cached) noexcept
cdef int fork(kvpool_pool* pool, int64_t handle, int64_t n, int64_t* children) noexcept
cdef int truncate(kvpool_pool* pool, const int64_t* handles, const int64_t* lens, int64_t n) noexcept
cdef int close(kvpool_pool* pool, const int64_t* handles, int64_t n) noexcept
cdef int commit(kvpool_pool* pool, const int64_t* handles, const int64_t* counts, int64_t n, const int32_t* tokens,
                int64_t num_tokens, const kvpool_keep* keep) noexcept
cdef int step(kvpool_pool* pool, kvpool_plan* plan, const int64_t* handles, const int64_t* num_new, int64_t n,
              int32_t flags) noexcept
cdef int step_padded(kvpool_pool* pool, kvpool_plan* plan, const int64_t* handles, const int64_t* num_new, int64_t n,
                     int32_t flags, int64_t pad_rows, int64_t pad_tokens) noexcept
cdef int reserve(kvpool_pool* pool, kvpool_plan* plan, const int64_t* handles, const int64_t* num_new,
                 int64_t n) noexcept
cdef int done(kvpool_pool* pool, kvpool_plan* plan) noexcept
cdef int rollback(kvpool_pool* pool, kvpool_plan* plan) noexcept
cdef int array(kvpool_plan* plan, int32_t name, kvpool_array* array) noexcept
cdef int table(kvpool_pool* pool, int64_t handle, const int32_t** blocks, int64_t* n) noexcept
cdef int num_tokens(kvpool_pool* pool, int64_t handle, int64_t* tokens) noexcept
cdef int num_free(kvpool_pool* pool, int64_t* blocks) noexcept
cdef int stats(kvpool_pool* pool, kvpool_stats* stats, int64_t size) noexcept
cdef int digest(kvpool_pool* pool, uint64_t* digest) noexcept
cdef int group_array(kvpool_plan* plan, int32_t group, int32_t name, kvpool_array* array) noexcept
cdef int group_table(kvpool_pool* pool, int64_t handle, int32_t group, const int32_t** blocks, int64_t* n) noexcept
cdef int tick(kvpool_pool* pool, int64_t now) noexcept
cdef int limit_kept(kvpool_pool* pool, const char* name_space, int64_t name_bytes, int64_t blocks) noexcept
cdef int resize(kvpool_pool* pool, int64_t num_blocks, int32_t arena, int32_t* moves, int64_t room,
                int64_t* n) noexcept
