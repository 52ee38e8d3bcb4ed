"""The C interface: `Pool`'s calls as functions on opaque pointers that return a status; kvpool.h is the contract.

A call copies C arrays and makes no Python object, unless it is `resize` or fails: then the exception that Python would
have seen is kept in the dictionary of the thread, and becomes a status. `cimport kvpool.capi` gets at the functions by
name, everybody else at the same ones through the capsule ``kvpool._C_API``.
"""
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.string cimport memset

from kvpool._core cimport (
    NOT_INDEXED, NO_LIMIT, OK, ONLY_GROUP, PRIORITIES, Directive, Field, Ints, Plan, PlanGroup, Pool, Spare, State,
    StepPart, Verdict, ints_copy, ints_free, ints_init, ints_tokens, pool_close, pool_commit, pool_enter, pool_fork,
    pool_leave, pool_limit_kept, pool_next_handle, pool_open, pool_table, pool_tick, pool_truncate, refuse, refused,
    seq_judge_any, slot_of, to_int,
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
)
cdef str KEPT = "kvpool.capi"   # in the dictionary of a thread: (exception, or None once it was raised; message)
cdef tuple NOTHING_KEPT = (None, b"no failure is kept in this thread")
cdef const char* UNNAMED = b""  # the namespace of no bytes


# -- failures

cdef int failed(object error) noexcept:
    """Keep an exception for this thread; return its status."""
    # Without memory an exception has no traceback, which a `return` from an `except` of Cython would need: none is here
    cdef PyObject* kept = PyThreadState_GetDict()
    cdef int found = KVPOOL_OTHER
    try:
        if kept != NULL:
            (<dict>kept).pop(KEPT, None)
            (<dict>kept)[KEPT] = (error.with_traceback(None), str(error).encode("utf-8", "replace"))
        for kind, status in STATUSES:
            if isinstance(error, kind):
                found = status
                break
    except BaseException:       # no memory for the message: the status still tells
        found = KVPOOL_NO_MEMORY
    return found


cdef const char* error_message() noexcept:
    cdef PyObject* kept
    cdef bytes message
    if not PyGILState_Check():
        return b"the caller does not hold the GIL"
    kept = PyThreadState_GetDict()
    message = (<tuple>(<dict>kept).get(KEPT, NOTHING_KEPT) if kept != NULL else NOTHING_KEPT)[1]
    return message              # it lives as long as the dictionary has it


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


# -- the frame of a call

cdef enum:                      # what an argument is
    OUT                         # where a result goes
    COUNT                       # a number of something
    NAMESPACE                   # bytes
    STATS_SIZE
    HANDLES                     # an array of int64: handles, lengths, counts
    TOKENS                      # an array of int32
    ONE_EACH                    # no array
    KEEP                        # a directive, or none
    TIME
    LIMIT                       # -1: none


cdef struct Argument:
    PyObject* name              # a constant of this module
    int kind
    const void* data
    int64_t size
    Ints ints                   # the copy of an array; a count
    Directive directive         # the copy of a directive


cdef struct Given:              # what a call was given, beside its pool
    Argument[4] argument        # num_arguments valid; they are judged in this order
    int num_arguments
    int64_t number              # a handle, or how many
    int64_t group               # of a table
    int64_t* more               # a second result, NULL: not wanted


ctypedef int (*Act)(State* pool, Given* given, Verdict* v) noexcept nogil


cdef inline void begin(Given* given, int64_t number) noexcept:
    given.num_arguments = 0
    given.number = number
    given.more = NULL


cdef inline void give(Given* given, int kind, str name, const void* data, int64_t size) noexcept:
    cdef Argument* a = &given.argument[given.num_arguments]
    given.num_arguments += 1
    a.name = <PyObject*>name
    a.kind = kind
    a.data = data
    a.size = size
    a.ints.owned = NULL


cdef int judge_number(int64_t value, int64_t low, int64_t high, str call, str name) except -1:
    if not low <= value <= high:
        to_int(value, call, name, low, high)    # says what is wrong
    return 0


cdef int judge_keep(const kvpool_keep* keep, Directive* told, str call) except -1:
    told.priority, told.ttl, told.tokens = 0, 0, INT64_MAX
    if keep == NULL:
        return 0
    judge_number(keep.priority, 1, PRIORITIES - 1, call, "keep.priority")
    judge_number(keep.ttl, 1, INT64_MAX >> 1, call, "keep.ttl")
    judge_number(keep.tokens, 0, INT64_MAX >> 1, call, "keep.tokens")
    told.priority, told.ttl = keep.priority, keep.ttl
    if keep.tokens:
        told.tokens = keep.tokens
    return 0


cdef int judge(Argument* a, Spare* spare, str call) except -1:
    cdef str name = <str>a.name
    ints_init(&a.ints, spare)
    if a.kind == HANDLES:
        ints_copy(&a.ints, a.data, a.size, 8, call, name)
    elif a.kind == TOKENS:
        ints_copy(&a.ints, a.data, a.size, 4, call, name)
        ints_tokens(&a.ints, call)
    elif a.kind == OUT:
        refuse_null(a.data, call, name)
    elif a.kind == KEEP:
        judge_keep(<const kvpool_keep*>a.data, &a.directive, call)
    elif a.kind == TIME:
        judge_number(a.size, 0, INT64_MAX >> 1, call, name)
    elif a.kind == LIMIT:
        judge_number(a.size, -1, 1 << 30, call, name)
    elif a.kind == COUNT:
        if a.size < 0:
            raise ValueError(f"[{call}] {name} is negative ({a.size})")
        a.ints.size = a.size
    elif a.kind == NAMESPACE and (a.size < 0 or (a.size > 0 and a.data == NULL)):
        raise ValueError(f"[{call}] {name} of {a.size} bytes is not a name")
    elif a.kind == STATS_SIZE and not <int64_t>sizeof(kvpool_stats) <= a.size <= 4096:
        raise ValueError(f"[{call}] size is {a.size}, this kvpool's kvpool_stats has {sizeof(kvpool_stats)} bytes")
    return 0


cdef int perform(kvpool_pool* pool_, str call, Given* given, Act act) noexcept:
    """Judge the arguments, do the call under the lock of the pool, and turn a refusal into a status."""
    cdef Pool pool
    cdef Verdict v
    cdef int k, status
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, call)
        try:
            for k in range(given.num_arguments):
                judge(&given.argument[k], &pool.state.spare, call)
            pool_enter(&pool.state, call)
            status = act(&pool.state, given, &v)
            pool_leave(&pool.state)
        finally:
            for k in range(given.num_arguments):
                ints_free(&given.argument[k].ints)
        if status != OK:
            refuse(call, &v)
    except BaseException as error:
        status = failed(error)
    return status


cdef int refuse_null(const void* pointer, str call, str name) except -1:
    if pointer == NULL:
        raise ValueError(f"[{call}] {name} is NULL")
    return 0


cdef Pool get_pool(kvpool_pool* pool, str call):
    refuse_null(pool, call, "pool")
    return <Pool><PyObject*>pool


cdef Plan get_plan(kvpool_plan* plan, str call):
    refuse_null(plan, call, "plan")
    return <Plan><PyObject*>plan


cdef int convert(void* object, void** result, str call, str name, type kind) noexcept:
    """The pointer to a Python object, a pool, of a subclass too, or exactly a plan."""
    cdef int status = KVPOOL_OK
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        refuse_null(object, call, "object")
        refuse_null(result, call, name)
        if type(<object>object) is not kind and (kind is Plan or not isinstance(<object>object, kind)):
            raise TypeError(f"[{call}] this is not a kvpool.{kind.__name__} but {type(<object>object).__name__}")
        result[0] = object
    except BaseException as error:
        status = failed(error)
    return status


cdef int pool_from(void* object, kvpool_pool** pool) noexcept:
    return convert(object, <void**>pool, "pool_from", "pool", Pool)


cdef int plan_from(void* object, kvpool_plan** plan) noexcept:
    return convert(object, <void**>plan, "plan_from", "plan", Plan)


# -- sequences

cdef int do_open(State* pool, Given* given, Verdict* v) noexcept nogil:
    """Arguments: where the handle goes, a namespace, a count or a prompt, a directive."""
    cdef Argument* space = &given.argument[1]
    cdef const Directive* keep = &given.argument[3].directive
    cdef int64_t made = pool_next_handle(pool)
    cdef int status
    if keep.priority and pool.groups.tree == NULL:
        return refused(v, NOT_INDEXED, -1, 0, 0, 0, 0)
    status = pool_open(pool, &given.argument[2].ints, <const char*>space.data if space.size else UNNAMED,
                       space.size, -1, True, True, False, False, False, keep, v)
    if status == OK:
        (<int64_t*>given.argument[0].data)[0] = made
        if given.more != NULL:
            given.more[0] = pool.seqs.seq[slot_of(made)].num_tokens
    return status


cdef int open_any(kvpool_pool* pool, int kind, const int32_t* prompt, int64_t n, const char* name_space,
                  int64_t name_bytes, const kvpool_keep* keep, int64_t* handle, int64_t* cached, str call) noexcept:
    cdef Given given
    begin(&given, 0)
    given.more = cached
    give(&given, OUT, "handle", handle, 1)
    give(&given, NAMESPACE, "name_space", name_space, name_bytes)
    give(&given, kind, "tokens", prompt, n)
    give(&given, KEEP, "keep", keep, 1)
    return perform(pool, call, &given, do_open)


cdef int open(kvpool_pool* pool, int64_t tokens, int64_t* handle) noexcept:
    return open_any(pool, COUNT, NULL, tokens, NULL, 0, NULL, handle, NULL, "open")


cdef int open_prompt(kvpool_pool* pool, const int32_t* prompt, int64_t n, const char* name_space, int64_t name_bytes,
                     const kvpool_keep* keep, int64_t* handle, int64_t* cached) noexcept:
    return open_any(pool, TOKENS, prompt, n, name_space, name_bytes, keep, handle, cached, "open_prompt")


cdef int do_fork(State* pool, Given* given, Verdict* v) noexcept nogil:
    return pool_fork(pool, given.number, given.argument[0].size, <int64_t*>given.argument[1].data, v)


cdef int fork(kvpool_pool* pool, int64_t handle, int64_t n, int64_t* children) noexcept:
    cdef Given given
    begin(&given, handle)
    give(&given, COUNT, "n", NULL, n)
    give(&given, OUT if n else ONE_EACH, "children", children, n)
    return perform(pool, "fork", &given, do_fork)


cdef int do_truncate(State* pool, Given* given, Verdict* v) noexcept nogil:
    return pool_truncate(pool, &given.argument[0].ints, &given.argument[1].ints, v)


cdef int truncate(kvpool_pool* pool, const int64_t* handles, const int64_t* lens, int64_t n) noexcept:
    cdef Given given
    begin(&given, 0)
    give(&given, HANDLES, "handles", handles, n)
    give(&given, HANDLES, "lens", lens, n)
    return perform(pool, "truncate", &given, do_truncate)


cdef int do_close(State* pool, Given* given, Verdict* v) noexcept nogil:
    return pool_close(pool, &given.argument[0].ints, v)


cdef int close(kvpool_pool* pool, const int64_t* handles, int64_t n) noexcept:
    cdef Given given
    begin(&given, 0)
    give(&given, HANDLES, "handles", handles, n)
    return perform(pool, "close", &given, do_close)


cdef int do_commit(State* pool, Given* given, Verdict* v) noexcept nogil:
    cdef Argument* a = given.argument
    return pool_commit(pool, &a[0].ints, &a[1].ints, &a[2].ints, a[1].kind == ONE_EACH, &a[3].directive, v)


cdef int commit(kvpool_pool* pool, const int64_t* handles, const int64_t* counts, int64_t n, const int32_t* tokens,
                int64_t num_tokens, const kvpool_keep* keep) noexcept:
    cdef Given given
    begin(&given, 0)
    give(&given, HANDLES, "handles", handles, n)
    give(&given, HANDLES if counts != NULL else ONE_EACH, "counts", counts, n)
    give(&given, TOKENS, "tokens", tokens, num_tokens)
    give(&given, KEEP, "keep", keep, 1)
    return perform(pool, "commit", &given, do_commit)


# -- retention, and the size

cdef int do_tick(State* pool, Given* given, Verdict* v) noexcept nogil:
    return pool_tick(pool, given.argument[0].size, v)


cdef int tick(kvpool_pool* pool, int64_t now) noexcept:
    cdef Given given
    begin(&given, 0)
    give(&given, TIME, "now", NULL, now)
    return perform(pool, "tick", &given, do_tick)


cdef int do_limit_kept(State* pool, Given* given, Verdict* v) noexcept nogil:
    cdef Argument* space = &given.argument[0]
    cdef int64_t most = given.argument[1].size
    return pool_limit_kept(pool, <const char*>space.data if space.size else UNNAMED, space.size,
                           most if most >= 0 else NO_LIMIT, v)


cdef int limit_kept(kvpool_pool* pool, const char* name_space, int64_t name_bytes, int64_t blocks) noexcept:
    cdef Given given
    begin(&given, 0)
    give(&given, NAMESPACE, "name_space", name_space, name_bytes)
    give(&given, LIMIT, "blocks", NULL, blocks)
    return perform(pool, "limit_kept", &given, do_limit_kept)


cdef int resize(kvpool_pool* pool_, int64_t num_blocks, int32_t arena, int32_t* moves, int64_t room,
                int64_t* n) noexcept:
    cdef Pool pool
    cdef dict found
    cdef int status = KVPOOL_OK
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, "resize")
        judge_number(room, 0, INT64_MAX, "resize", "room")
        if room:
            refuse_null(moves, "resize", "moves")
        refuse_null(n, "resize", "n")
        found = pool.resize_arenas(num_blocks, arena, moves, room)
        n[0] = len(found[arena])
    except BaseException as error:
        status = failed(error)
    return status


# -- steps

cdef int run(kvpool_pool* pool_, kvpool_plan* plan_, const int64_t* handles, const int64_t* num_new, int64_t n,
             str call, bint advance, int32_t flags, bint padded, int64_t pad_rows, int64_t pad_tokens) noexcept:
    cdef Pool pool
    cdef Plan plan
    cdef Ints rows, new
    cdef int status = KVPOOL_OK
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
            if padded and (pad_rows < n or pad_rows > plan.step.max_rows or pad_tokens < 0
                           or pad_tokens > plan.max_tokens_):
                plan.get_pad((pad_rows, pad_tokens), call, n, &pad_rows, &pad_tokens)       # says what is wrong
            pool.run_plan(plan, &rows, &new, call, advance, flags & KVPOOL_PARTIAL, pad_rows, pad_tokens)
        finally:
            ints_free(&rows)
            ints_free(&new)
    except BaseException as error:
        status = failed(error)
    return status


cdef int step(kvpool_pool* pool, kvpool_plan* plan, const int64_t* handles, const int64_t* num_new, int64_t n,
              int32_t flags) noexcept:
    return run(pool, plan, handles, num_new, n, "step", True, flags, False, 0, -1)


cdef int step_padded(kvpool_pool* pool, kvpool_plan* plan, const int64_t* handles, const int64_t* num_new, int64_t n,
                     int32_t flags, int64_t pad_rows, int64_t pad_tokens) noexcept:
    return run(pool, plan, handles, num_new, n, "step_padded", True, flags, True, pad_rows, pad_tokens)


cdef int reserve(kvpool_pool* pool, kvpool_plan* plan, const int64_t* handles, const int64_t* num_new,
                 int64_t n) noexcept:
    return run(pool, plan, handles, num_new, n, "reserve", False, 0, False, 0, -1)


cdef int end(kvpool_pool* pool_, kvpool_plan* plan_, str call, bint is_done) noexcept:
    cdef Pool pool
    cdef Plan plan
    cdef int status = KVPOOL_OK
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        pool = get_pool(pool_, call)
        plan = pool.check_plan(get_plan(plan_, call), call)
        if is_done:
            pool.end_done(plan)
        else:
            pool.end_rollback(plan)
    except BaseException as error:
        status = failed(error)
    return status


cdef int done(kvpool_pool* pool, kvpool_plan* plan) noexcept:
    return end(pool, plan, "done", True)


cdef int rollback(kvpool_pool* pool, kvpool_plan* plan) noexcept:
    return end(pool, plan, "rollback", False)


# -- reading

cdef int describe(Plan plan, int64_t group, int32_t name, kvpool_array* out) except -1:
    """Where an array is, and how much of it the last step filled. `group` -1: the pool has no other than one."""
    cdef kvpool_array found
    cdef StepPart* part
    cdef const Field* field
    cdef int32_t columns
    cdef bint common = name in (KVPOOL_POSITIONS, KVPOOL_CU_Q_LENS, KVPOOL_SLOT_IDS, KVPOOL_SERVED, KVPOOL_HANDLES)
    if not -1 <= group < len(plan.group_plans):
        raise ValueError(f"[array] there is no layer group {group}, the pool has {len(plan.group_plans)}")
    if group < 0 and len(plan.group_plans) > 1 and not common:
        raise ValueError(f"[array] the pool has {len(plan.group_plans)} layer groups: group_array has those of one")
    part = plan.part[max(group, 0)]
    columns = (<PlanGroup>plan.group_plans[max(group, 0)]).columns
    found.data, found.length, found.width = NULL, plan.shown_rows, 1
    if KVPOOL_BLOCK_TABLES <= name <= KVPOOL_SLOT_IDS:          # the core numbers its fields like that, too
        field = &plan.field[name] if common else &part.wire.field[name]
        found.itemsize = field.width
        if field.width:
            found.data = field.data
        if name == KVPOOL_POSITIONS:
            found.length = plan.shown_tokens
        elif name == KVPOOL_SLOT_MAPPING:
            found.length = plan.shown_tokens * columns
        elif name == KVPOOL_CU_Q_LENS or name == KVPOOL_INDPTR:
            found.length += 1
        elif name == KVPOOL_INDICES:
            found.length, found.width = part.wire.nnz, columns
        elif name == KVPOOL_BLOCK_TABLES:
            found.width = part.wire.table_width
    elif name == KVPOOL_SERVED:
        found.data, found.length, found.itemsize = plan.served_, plan.rows, 1
    elif name == KVPOOL_HANDLES:
        found.data, found.length, found.itemsize = plan.step.handle, plan.rows, 8
    elif name == KVPOOL_COPIES:
        found.data, found.length, found.width, found.itemsize = part.copies, part.num_copies, 3, 4
    elif name == KVPOOL_DIRTY_ROWS:
        found.data, found.length, found.itemsize = part.wire.dirty, part.wire.num_dirty, 4
    elif name == KVPOOL_KV_STARTS and part.kv_starts != NULL:
        found.data, found.itemsize = part.kv_starts, 4
    elif name == KVPOOL_STATE_SRC:
        found.data, found.itemsize = part.state_src, 4
    elif name == KVPOOL_STATE_DST:
        found.data, found.itemsize = part.state_dst, 4
    else:
        raise ValueError(f"[array] there is no such array ({name})")
    if found.data == NULL:
        raise ValueError(f"[array] array {name} is not there, this plan fills {', '.join(plan.names)}")
    out[0] = found
    return 0


cdef int array_at(kvpool_plan* plan, int64_t group, int32_t name, kvpool_array* array) noexcept:
    cdef int status = KVPOOL_OK
    if not PyGILState_Check():
        return KVPOOL_NO_GIL
    try:
        refuse_null(array, "array", "array")
        describe(get_plan(plan, "array"), group, name, array)
    except BaseException as error:
        status = failed(error)
    return status


cdef int array(kvpool_plan* plan, int32_t name, kvpool_array* array) noexcept:
    return array_at(plan, -1, name, array)


cdef int group_array(kvpool_plan* plan, int32_t group, int32_t name, kvpool_array* array) noexcept:
    return array_at(plan, group if group >= 0 else 1 << 30, name, array)      # -1 is the short form's


cdef int do_table(State* pool, Given* given, Verdict* v) noexcept nogil:
    cdef int32_t columns = 0
    return pool_table(pool, given.number, given.group, <const int32_t**>given.argument[0].data,
                      <int64_t*>given.argument[1].data, &columns, v)


cdef int read_table(kvpool_pool* pool, int64_t handle, int64_t group, const int32_t** blocks, int64_t* n,
                    str call) noexcept:
    cdef Given given
    begin(&given, handle)
    given.group = group
    give(&given, OUT, "blocks", blocks, 1)
    give(&given, OUT, "n", n, 1)
    return perform(pool, call, &given, do_table)


cdef int table(kvpool_pool* pool, int64_t handle, const int32_t** blocks, int64_t* n) noexcept:
    return read_table(pool, handle, ONLY_GROUP, blocks, n, "table")


cdef int group_table(kvpool_pool* pool, int64_t handle, int32_t group, const int32_t** blocks, int64_t* n) noexcept:
    return read_table(pool, handle, group, blocks, n, "group_table")


cdef int do_num_tokens(State* pool, Given* given, Verdict* v) noexcept nogil:
    cdef int32_t slot = seq_judge_any(&pool.seqs, given.number, -1, v)
    if slot < 0:
        return v.reason
    (<int64_t*>given.argument[0].data)[0] = pool.seqs.seq[slot].num_tokens
    return OK


cdef int read(kvpool_pool* pool, int64_t handle, void* to, str name, str call, Act act) noexcept:
    cdef Given given
    begin(&given, handle)
    give(&given, OUT, name, to, 1)
    return perform(pool, call, &given, act)


cdef int num_tokens(kvpool_pool* pool, int64_t handle, int64_t* tokens) noexcept:
    return read(pool, handle, tokens, "tokens", "num_tokens", do_num_tokens)


cdef int do_num_free(State* pool, Given* given, Verdict* v) noexcept nogil:
    (<int64_t*>given.argument[0].data)[0] = pool.blocks.num_blank
    return OK


cdef int num_free(kvpool_pool* pool, int64_t* blocks) noexcept:
    return read(pool, 0, blocks, "blocks", "num_free", do_num_free)


cdef int do_stats(State* pool, Given* given, Verdict* v) noexcept nogil:
    cdef kvpool_stats* found = <kvpool_stats*>given.argument[0].data
    memset(found, 0, given.argument[1].size)
    found.num_blocks = pool.blocks.num_blocks
    found.reserved = pool.blocks.reserved
    found.free = pool.blocks.num_blank
    found.evictable = pool.blocks.num_evictable
    found.limbo = pool.blocks.limbo.size
    found.used = pool.blocks.num_used
    found.shared = pool.blocks.num_shared
    found.sequences = pool.seqs.num_open
    found.pending_plans = pool.pending.size
    found.tokens = pool.seqs.sum_tokens
    return OK


cdef int stats(kvpool_pool* pool, kvpool_stats* stats, int64_t size) noexcept:
    cdef Given given
    begin(&given, 0)
    give(&given, OUT, "stats", stats, 1)
    give(&given, STATS_SIZE, "size", NULL, size)
    return perform(pool, "stats", &given, do_stats)


cdef int do_digest(State* pool, Given* given, Verdict* v) noexcept nogil:
    (<uint64_t*>given.argument[0].data)[0] = pool.blocks.digest
    return OK


cdef int digest(kvpool_pool* pool, uint64_t* digest) noexcept:
    return read(pool, 0, digest, "digest", "digest", do_digest)


# -- the capsule

cdef extern from *:
    """
    #define KV_TABLE(...) ((kvpool_api){KVPOOL_ABI_MAGIC, KVPOOL_ABI_VERSION, sizeof(kvpool_api), __VA_ARGS__})
    """
    kvpool_api table_of "KV_TABLE"(...)

cdef kvpool_api functions = table_of(           # in the order of kvpool.h, with which the C compiler compares them
    pool_from, plan_from, error_message, raise_error, open, open_prompt, fork, truncate, close, commit, step,
    step_padded, reserve, done, rollback, array, table, num_tokens, num_free, stats, digest, group_array, group_table,
    tick, limit_kept, resize,
)

_C_API = PyCapsule_New(&functions, KVPOOL_CAPSULE, NULL)
