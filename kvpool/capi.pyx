"""The C interface: `Pool`'s calls as functions on opaque pointers that return a status; kvpool.h is the contract.

A call copies C arrays and makes no Python object, unless it fails: then the exception that Python would have
seen is kept in the dictionary of the thread, and becomes a status. `cimport kvpool.capi` gets at the functions by
name, everybody else at the same ones through the capsule ``kvpool._C_API``.
"""
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kvpool._core cimport (
    NUM_FIELDS, OK, Ints, Plan, Pool, Verdict, ints_copy, ints_free, ints_init, ints_tokens, pool_close,
    pool_commit, pool_enter, pool_fork, pool_leave, pool_next_handle, pool_open, pool_truncate, refuse, seq_judge,
    seq_table, slot_of,
)

from kvpool.errors import (
    CapacityExceeded,
    ConcurrentUse,
    ForeignHandle,
    OutOfBlocks,
    OutOfSequences,
    PlanStateError,
    PoolClosed,
    StaleHandle,
)

cdef extern from "Python.h":
    int PyGILState_Check() noexcept nogil
    PyObject* PyThreadState_GetDict() noexcept
    void PyErr_SetObject(PyObject* type, PyObject* value) noexcept
    void PyErr_Clear() noexcept

cdef tuple STATUSES = (         # the first that fits: a subclass stands before its base
    (OutOfBlocks, KVPOOL_OUT_OF_BLOCKS),
    (OutOfSequences, KVPOOL_OUT_OF_SEQUENCES),
    (StaleHandle, KVPOOL_STALE_HANDLE),
    (ForeignHandle, KVPOOL_FOREIGN_HANDLE),
    (CapacityExceeded, KVPOOL_CAPACITY_EXCEEDED),
    (PlanStateError, KVPOOL_PLAN_STATE),
    (ConcurrentUse, KVPOOL_CONCURRENT_USE),
    (PoolClosed, KVPOOL_CLOSED),
    (ValueError, KVPOOL_VALUE_ERROR),
    (TypeError, KVPOOL_TYPE_ERROR),
    (MemoryError, KVPOOL_NO_MEMORY),
    (BufferError, KVPOOL_VALUE_ERROR),
)
cdef str KEPT = "kvpool.capi"   # in the dictionary of a thread: (exception, or None once it was raised; message)
cdef tuple NOTHING_KEPT = (None, b"no failure is kept in this thread")
cdef tuple NAMES = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "indptr", "indices",
                    "last_page_len", "kv_slots", "kv_slots_ragged", "kv_indptr", "slot_ids")
cdef const char* UNNAMED = b""  # the namespace of no bytes


# -- failures

cdef int failed(object error) noexcept:
    """Keep an exception for this thread; return its status."""
    cdef PyObject* kept = PyThreadState_GetDict()
    try:
        if kept != NULL:
            (<dict>kept).pop(KEPT, None)
            (<dict>kept)[KEPT] = (error.with_traceback(None), str(error).encode("utf-8", "replace"))
        for kind, status in STATUSES:
            if isinstance(error, kind):
                return status
    except BaseException:       # no memory for the message: the status still tells
        PyErr_Clear()
        return KVPOOL_NO_MEMORY
    return KVPOOL_OTHER


cdef const char* error_message() noexcept:
    cdef PyObject* kept
    cdef bytes message
    if not PyGILState_Check():
        return b"the caller does not hold the GIL"
    kept = PyThreadState_GetDict()
    try:
        message = ((<dict>kept).get(KEPT, NOTHING_KEPT) if kept != NULL else NOTHING_KEPT)[1]
        return message          # it lives as long as the dictionary has it
    except BaseException:
        return b"no memory for the message"


cdef void* raise_error() noexcept:
    cdef PyObject* kept
    if not PyGILState_Check():
        return NULL
    kept = PyThreadState_GetDict()
    try:
        error, message = (<dict>kept).get(KEPT, NOTHING_KEPT) if kept != NULL else NOTHING_KEPT
        if error is None:
            error = SystemError("[raise_error] no failure is kept in this thread")
        else:
            (<dict>kept)[KEPT] = (None, message)    # it will have a traceback, whose frames are not to be kept
    except BaseException as other:
        error = other
    kind = type(error)
    PyErr_SetObject(<PyObject*>kind, <PyObject*>error)
    return NULL


# -- arguments

cdef Pool get_pool(kvpool_pool* pool, str call):
    if pool == NULL:
        raise ValueError(f"[{call}] pool is NULL")
    return <Pool><PyObject*>pool


cdef Plan get_plan(kvpool_plan* plan, str call):
    if plan == NULL:
        raise ValueError(f"[{call}] plan is NULL")
    return <Plan><PyObject*>plan


cdef int refuse_null(const void* pointer, str call, str name) except -1:
    if pointer == NULL:
        raise ValueError(f"[{call}] {name} is NULL")
    return 0


cdef int pool_from(void* object, kvpool_pool** pool) noexcept:
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        refuse_null(object, "pool_from", "object")
        refuse_null(pool, "pool_from", "pool")
        if not isinstance(<object>object, Pool):
            raise TypeError(f"[pool_from] this is no kvpool.Pool but {type(<object>object).__name__}")
        pool[0] = <kvpool_pool*>object
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int plan_from(void* object, kvpool_plan** plan) noexcept:
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        refuse_null(object, "plan_from", "object")
        refuse_null(plan, "plan_from", "plan")
        if type(<object>object) is not Plan:
            raise TypeError(f"[plan_from] this is no kvpool.Plan but {type(<object>object).__name__}")
        plan[0] = <kvpool_plan*>object
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


# -- sequences

cdef int open_tokens(Pool pool, const Ints* tokens, const char* space, int64_t size, str call, int64_t* handle,
                     int64_t* cached) except -1:
    cdef Verdict v
    cdef int64_t made
    cdef int status
    pool_enter(&pool.state, call)
    made = pool_next_handle(&pool.state)
    status = pool_open(&pool.state, tokens, space, size, True, &v)
    if status == OK:
        handle[0] = made
        if cached != NULL:
            cached[0] = pool.state.seqs.seq[slot_of(made)].num_tokens
    pool_leave(&pool.state)
    if status != OK:
        refuse(call, &v)
    return 0


cdef int open(kvpool_pool* pool_, int64_t tokens, int64_t* handle) noexcept:
    cdef Pool pool
    cdef Ints count
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "open")
        refuse_null(handle, "open", "handle")
        if tokens < 0:
            raise ValueError(f"[open] tokens is negative ({tokens})")
        ints_init(&count, &pool.state.spare)
        count.size = tokens
        open_tokens(pool, &count, UNNAMED, 0, "open", handle, NULL)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int open_prompt(kvpool_pool* pool_, const int32_t* prompt, int64_t n, const char* name_space, int64_t name_bytes,
                     int64_t* handle, int64_t* cached) noexcept:
    cdef Pool pool
    cdef Ints tokens
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "open_prompt")
        refuse_null(handle, "open_prompt", "handle")
        if name_bytes < 0 or (name_bytes > 0 and name_space == NULL):
            raise ValueError(f"[open_prompt] name_space of {name_bytes} bytes is no name")
        ints_init(&tokens, &pool.state.spare)
        try:
            ints_copy(&tokens, prompt, n, 4, "open_prompt", "tokens")
            ints_tokens(&tokens, "open_prompt")
            open_tokens(pool, &tokens, name_space if name_bytes else UNNAMED, name_bytes, "open_prompt", handle, cached)
        finally:
            ints_free(&tokens)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int fork(kvpool_pool* pool_, int64_t handle, int64_t n, int64_t* children) noexcept:
    cdef Pool pool
    cdef Verdict v
    cdef int status
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "fork")
        if n < 0:
            raise ValueError(f"[fork] n is negative ({n})")
        if n:
            refuse_null(children, "fork", "children")
        pool_enter(&pool.state, "fork")
        status = pool_fork(&pool.state, handle, n, children, &v)
        pool_leave(&pool.state)
        if status != OK:
            refuse("fork", &v)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int truncate(kvpool_pool* pool_, const int64_t* handles, const int64_t* lens, int64_t n) noexcept:
    cdef Pool pool
    cdef Ints batch, lengths
    cdef Verdict v
    cdef int status
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "truncate")
        ints_init(&batch, &pool.state.spare)
        ints_init(&lengths, &pool.state.spare)
        try:
            ints_copy(&batch, handles, n, 8, "truncate", "handles")
            ints_copy(&lengths, lens, n, 8, "truncate", "lens")
            pool_enter(&pool.state, "truncate")
            status = pool_truncate(&pool.state, &batch, &lengths, &v)
            pool_leave(&pool.state)
        finally:
            ints_free(&batch)
            ints_free(&lengths)
        if status != OK:
            refuse("truncate", &v)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int close(kvpool_pool* pool_, const int64_t* handles, int64_t n) noexcept:
    cdef Pool pool
    cdef Ints batch
    cdef Verdict v
    cdef int status
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "close")
        ints_init(&batch, &pool.state.spare)
        try:
            ints_copy(&batch, handles, n, 8, "close", "handles")
            pool_enter(&pool.state, "close")
            status = pool_close(&pool.state, &batch, &v)
            pool_leave(&pool.state)
        finally:
            ints_free(&batch)
        if status != OK:
            refuse("close", &v)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int commit(kvpool_pool* pool_, const int64_t* handles, const int64_t* counts, int64_t n, const int32_t* tokens,
                int64_t num_tokens) noexcept:
    cdef Pool pool
    cdef Ints batch, new, known
    cdef Verdict v
    cdef int status
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "commit")
        ints_init(&batch, &pool.state.spare)
        ints_init(&new, &pool.state.spare)
        ints_init(&known, &pool.state.spare)
        try:
            ints_copy(&batch, handles, n, 8, "commit", "handles")
            if counts != NULL:
                ints_copy(&new, counts, n, 8, "commit", "counts")
            ints_copy(&known, tokens, num_tokens, 4, "commit", "tokens")
            ints_tokens(&known, "commit")
            pool_enter(&pool.state, "commit")
            status = pool_commit(&pool.state, &batch, &new, &known, counts == NULL, &v)
            pool_leave(&pool.state)
        finally:
            ints_free(&batch)
            ints_free(&new)
            ints_free(&known)
        if status != OK:
            refuse("commit", &v)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


# -- steps

cdef int run(kvpool_pool* pool_, kvpool_plan* plan_, const int64_t* handles, const int64_t* num_new, int64_t n,
             str call, bint advance, int32_t flags, bint padded, int64_t pad_rows, int64_t pad_tokens) noexcept:
    cdef Pool pool
    cdef Plan plan
    cdef Ints rows, new
    cdef Verdict v
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, call)
        plan = pool.check_plan(get_plan(plan_, call), call)
        plan.refuse_pending(call)
        if flags & ~KVPOOL_PARTIAL:
            raise ValueError(f"[{call}] flags are unknown ({flags})")
        ints_init(&rows, &pool.state.spare)
        ints_init(&new, &pool.state.spare)
        try:
            ints_copy(&rows, handles, n, 8, call, "handles")
            if num_new != NULL or not advance:
                ints_copy(&new, num_new, n, 8, call, "num_new")
            plan.refuse_rows(n, call)
            if padded and (pad_rows < n or pad_rows > plan.wire.max_rows or pad_tokens < 0
                           or pad_tokens > plan.max_tokens_):
                plan.get_pad((pad_rows, pad_tokens), call, n, &pad_rows, &pad_tokens)       # says what is wrong
            pool.run_plan(plan, &rows, &new, call, advance, flags & KVPOOL_PARTIAL, pad_rows, pad_tokens)
        finally:
            ints_free(&rows)
            ints_free(&new)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int step(kvpool_pool* pool, kvpool_plan* plan, const int64_t* handles, const int64_t* num_new, int64_t n,
              int32_t flags) noexcept:
    return run(pool, plan, handles, num_new, n, "step", True, flags, False, 0, -1)


cdef int step_padded(kvpool_pool* pool, kvpool_plan* plan, const int64_t* handles, const int64_t* num_new, int64_t n,
                     int32_t flags, int64_t pad_rows, int64_t pad_tokens) noexcept:
    return run(pool, plan, handles, num_new, n, "step_padded", True, flags, True, pad_rows, pad_tokens)


cdef int reserve(kvpool_pool* pool, kvpool_plan* plan, const int64_t* handles, const int64_t* num_new,
                 int64_t n) noexcept:
    return run(pool, plan, handles, num_new, n, "reserve", False, 0, False, 0, -1)


cdef int done(kvpool_pool* pool_, kvpool_plan* plan) noexcept:
    cdef Pool pool
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "done")
        pool.end_done(pool.check_plan(get_plan(plan, "done"), "done"), "done")
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int rollback(kvpool_pool* pool_, kvpool_plan* plan) noexcept:
    cdef Pool pool
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "rollback")
        pool.end_rollback(pool.check_plan(get_plan(plan, "rollback"), "rollback"), "rollback")
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


# -- reading

cdef int describe(Plan plan, int32_t name, kvpool_array* out) except -1:
    """Where an array is, and how much of it the last step filled: what the attribute of the plan shows."""
    cdef kvpool_array found
    found.width = 1
    if 0 <= name < NUM_FIELDS:
        if plan.wire.field[name].width == 0:
            raise ValueError(f"[array] {NAMES[name]} was not asked for, this plan fills {', '.join(plan.names)}")
        found.data = plan.wire.field[name].data
        found.itemsize = plan.wire.field[name].width
        found.length = plan.shown_rows
        if name == KVPOOL_BLOCK_TABLES:
            found.width = plan.wire.table_width
        elif name == KVPOOL_KV_SLOTS:
            found.width = plan.wire.kv_width
        elif name == KVPOOL_SLOT_MAPPING or name == KVPOOL_POSITIONS:
            found.length = plan.shown_tokens
        elif name == KVPOOL_CU_Q_LENS or name == KVPOOL_INDPTR or name == KVPOOL_KV_INDPTR:
            found.length = plan.shown_rows + 1
        elif name == KVPOOL_INDICES:
            found.length = plan.wire.nnz
        elif name == KVPOOL_KV_SLOTS_RAGGED:
            found.length = plan.wire.kv_total
    elif name == KVPOOL_COPIES:
        found.data, found.length, found.width, found.itemsize = plan.step.copies, plan.copies_made, 3, 4
    elif name == KVPOOL_DIRTY_ROWS:
        found.data, found.length, found.itemsize = plan.wire.dirty, plan.wire.num_dirty, 4
    elif name == KVPOOL_SERVED:
        found.data, found.length, found.itemsize = plan.wire.served, plan.rows, 1
    elif name == KVPOOL_HANDLES:
        found.data, found.length, found.itemsize = plan.step.handle, plan.rows, 8
    else:
        raise ValueError(f"[array] there is no such array ({name})")
    out[0] = found
    return 0


cdef int array(kvpool_plan* plan, int32_t name, kvpool_array* array) noexcept:
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        refuse_null(array, "array", "array")
        describe(get_plan(plan, "array"), name, array)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int table(kvpool_pool* pool_, int64_t handle, const int32_t** blocks, int64_t* n) noexcept:
    cdef Pool pool
    cdef Verdict v
    cdef int32_t slot
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "table")
        refuse_null(blocks, "table", "blocks")
        refuse_null(n, "table", "n")
        pool_enter(&pool.state, "table")
        slot = seq_judge(&pool.state.seqs, handle, -1, &v)
        if slot >= 0:
            blocks[0] = seq_table(&pool.state.seqs, slot)
            n[0] = pool.state.seqs.seq[slot].num_blocks
        pool_leave(&pool.state)
        if slot < 0:
            refuse("table", &v)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int num_tokens(kvpool_pool* pool_, int64_t handle, int64_t* tokens) noexcept:
    cdef Pool pool
    cdef Verdict v
    cdef int32_t slot
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "num_tokens")
        refuse_null(tokens, "num_tokens", "tokens")
        pool_enter(&pool.state, "num_tokens")
        slot = seq_judge(&pool.state.seqs, handle, -1, &v)
        if slot >= 0:
            tokens[0] = pool.state.seqs.seq[slot].num_tokens + pool.state.seqs.life[slot].evicted
        pool_leave(&pool.state)
        if slot < 0:
            refuse("num_tokens", &v)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int num_free(kvpool_pool* pool_, int64_t* blocks) noexcept:
    cdef Pool pool
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "num_free")
        refuse_null(blocks, "num_free", "blocks")
        pool_enter(&pool.state, "num_free")
        blocks[0] = pool.state.blocks.num_blank
        pool_leave(&pool.state)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int stats(kvpool_pool* pool_, kvpool_stats* stats, int64_t size) noexcept:
    cdef Pool pool
    cdef kvpool_stats found
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "stats")
        refuse_null(stats, "stats", "stats")
        if size < <int64_t>sizeof(kvpool_stats) or size > 4096:
            raise ValueError(f"[stats] size is {size}, this kvpool's kvpool_stats has {sizeof(kvpool_stats)} bytes")
        pool_enter(&pool.state, "stats")
        found.num_blocks = pool.state.blocks.num_blocks
        found.reserved = pool.state.blocks.reserved
        found.free = pool.state.blocks.num_blank
        found.evictable = pool.state.blocks.lru.size
        found.limbo = pool.state.blocks.limbo.size
        found.used = pool.state.blocks.num_used
        found.shared = pool.state.blocks.num_shared
        found.sequences = pool.state.seqs.num_open
        found.pending_plans = pool.state.pending.size
        found.tokens = pool.state.seqs.sum_tokens
        pool_leave(&pool.state)
        memset(stats, 0, size)
        memcpy(stats, &found, sizeof(found))
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


cdef int digest(kvpool_pool* pool_, uint64_t* digest) noexcept:
    cdef Pool pool
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "digest")
        refuse_null(digest, "digest", "digest")
        pool_enter(&pool.state, "digest")
        digest[0] = pool.state.blocks.digest
        pool_leave(&pool.state)
    except BaseException as error:
        return failed(error)
    return KVPOOL_OK


# -- the capsule

cdef kvpool_api functions

functions.magic = KVPOOL_ABI_MAGIC
functions.abi_version = KVPOOL_ABI_VERSION
functions.struct_size = sizeof(kvpool_api)
functions.pool_from = pool_from
functions.plan_from = plan_from
functions.error_message = error_message
functions.raise_error = raise_error
functions.open = open
functions.open_prompt = open_prompt
functions.fork = fork
functions.truncate = truncate
functions.close = close
functions.commit = commit
functions.step = step
functions.step_padded = step_padded
functions.reserve = reserve
functions.done = done
functions.rollback = rollback
functions.array = array
functions.table = table
functions.num_tokens = num_tokens
functions.num_free = num_free
functions.stats = stats
functions.digest = digest

_C_API = PyCapsule_New(&functions, KVPOOL_CAPSULE, NULL)
