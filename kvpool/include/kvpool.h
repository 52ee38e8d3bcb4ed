/* kvpool.h: the allocator's calls for C99, C++ and whoever can call C, inside a Python process.
 *
 * Pools and plans are made in Python (kvpool.Pool, kvpool.Plan) and handed over as objects; from then on a step is one
 * call through a table of functions, without a call of Python and without an object made.
 *
 *     const kvpool_api *kv = kvpool_import();             // NULL: ImportError is set
 *     kvpool_pool *pool;
 *     if (kv->pool_from(object, &pool)) return kv->raise_error();
 *     if (kv->step(pool, plan, handles, NULL, n, 0)) return kv->raise_error();
 *
 * The rules, for every function:
 * - The caller holds the GIL (in a free-threaded process: an attached thread); without it the call is refused
 *   (KVPOOL_NO_GIL) and does nothing. A call takes the lock of the pool, as Python's calls do, and may release the GIL
 *   while it waits for another thread.
 * - 0 is success. Everything else is one of KVPOOL_* below; the state of the pool is as it was, the exception is kept
 *   for this thread until its next failure, and no Python exception is set: error_message() says what was wrong,
 *   raise_error() sets it, once. Out parameters are written on success only.
 * - Pointers that come back are borrowed: those of an array from its plan, those of a table from its pool until the
 *   next call on it. The caller keeps the Python objects alive.
 * - Handles, lengths and counts are int64, block ids and tokens int32, as in Python.
 *
 * The table grows at its end, under the same KVPOOL_ABI_VERSION; anything else changes the version.
 */
#ifndef KVPOOL_H
#define KVPOOL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVPOOL_ABI_MAGIC UINT64_C(0x6b76706f6f6c4331) /* "kvpoolC1" */
#define KVPOOL_ABI_VERSION 3
#define KVPOOL_CAPSULE "kvpool._C_API"

enum kvpool_status {
    KVPOOL_OK = 0,
    KVPOOL_OUT_OF_BLOCKS = 1,
    KVPOOL_OUT_OF_SEQUENCES = 2,
    KVPOOL_STALE_HANDLE = 3,
    KVPOOL_FOREIGN_HANDLE = 4,
    KVPOOL_CAPACITY_EXCEEDED = 5,
    KVPOOL_PLAN_STATE = 6,
    KVPOOL_CONCURRENT_USE = 7, /* this thread is inside another call: a signal handler */
    KVPOOL_CLOSED = 8,      /* the pool was shut down */
    KVPOOL_VALUE_ERROR = 9, /* also: a NULL pointer, a negative count */
    KVPOOL_TYPE_ERROR = 10,
    KVPOOL_NO_MEMORY = 11,
    KVPOOL_NO_GIL = 12,
    KVPOOL_OTHER = 13 /* an exception that none of these stands for */
};

enum kvpool_step_flag {
    KVPOOL_PARTIAL = 1 /* serve rows in order, skip those whose blocks are not there */
};

enum kvpool_array_name { /* of kvpool.Plan and its layer groups; docs/core.md says what they hold */
    KVPOOL_BLOCK_TABLES = 0,
    KVPOOL_SEQ_LENS = 1,
    KVPOOL_SLOT_MAPPING = 2,
    KVPOOL_POSITIONS = 3,
    KVPOOL_CU_Q_LENS = 4,
    KVPOOL_INDPTR = 5,
    KVPOOL_INDICES = 6,
    KVPOOL_LAST_PAGE_LEN = 7,
    KVPOOL_SLOT_IDS = 8,
    KVPOOL_COPIES = 9, /* rows of (source block, target block, tokens) */
    KVPOOL_DIRTY_ROWS = 10,
    KVPOOL_SERVED = 11,
    KVPOOL_HANDLES = 12,
    KVPOOL_KV_STARTS = 13, /* of windows and chunks; a full group has none */
    KVPOOL_STATE_SRC = 14, /* of states, which have these two and KVPOOL_SEQ_LENS */
    KVPOOL_STATE_DST = 15
};

typedef struct kvpool_pool kvpool_pool; /* a kvpool.Pool */
typedef struct kvpool_plan kvpool_plan; /* a kvpool.Plan */

typedef struct kvpool_array { /* the part of an array that the last step filled, rows C-contiguous */
    const void *data;
    int64_t length; /* rows */
    int64_t width;  /* elements per row, 1 for one dimension */
    int32_t itemsize; /* bytes per element: 1 (served), 4 or 8 */
} kvpool_array;

typedef struct kvpool_keep { /* a directive; see kvpool.retention.Keep */
    int64_t ttl;      /* 1 .. 2^62 - 1, in the unit of the clock that tick tells */
    int64_t tokens;   /* only the first so many, 0: all */
    int32_t priority; /* 1 .. 7 */
} kvpool_keep;

typedef struct kvpool_stats { /* blocks of arena 0, but for the last three; see kvpool.PoolStats */
    int64_t num_blocks;
    int64_t reserved;
    int64_t free; /* blank ones: without a reference and without content. Evictable ones are not among them */
    int64_t evictable;
    int64_t limbo;
    int64_t used;
    int64_t shared;
    int64_t sequences;
    int64_t pending_plans;
    int64_t tokens; /* of all open sequences, evicted ones included */
} kvpool_stats;

typedef struct kvpool_api {
    uint64_t magic;
    uint32_t abi_version;
    uint32_t struct_size; /* bytes */

    /* From Python objects, a borrowed pointer each. */
    int (*pool_from)(void *object, kvpool_pool **pool);
    int (*plan_from)(void *object, kvpool_plan **plan);

    /* What a status means. raise_error sets the Python exception of this thread's last failure and returns NULL. */
    const char *(*error_message)(void);
    void *(*raise_error)(void);

    /* Sequences. tokens: blocks are taken for so many. prompt: its cached prefix is found; keep, for pools with a
       prefix cache, and cached may be NULL. */
    int (*open)(kvpool_pool *pool, int64_t tokens, int64_t *handle);
    int (*open_prompt)(kvpool_pool *pool, const int32_t *prompt, int64_t n, const char *name_space, int64_t name_bytes,
                       const kvpool_keep *keep, int64_t *handle, int64_t *cached);
    int (*fork)(kvpool_pool *pool, int64_t handle, int64_t n, int64_t *children);
    int (*truncate)(kvpool_pool *pool, const int64_t *handles, const int64_t *lens, int64_t n);
    int (*close)(kvpool_pool *pool, const int64_t *handles, int64_t n);
    int (*commit)(kvpool_pool *pool, const int64_t *handles, const int64_t *counts, int64_t n, const int32_t *tokens,
                  int64_t num_tokens, const kvpool_keep *keep);

    /* Steps. num_new NULL: one token each. */
    int (*step)(kvpool_pool *pool, kvpool_plan *plan, const int64_t *handles, const int64_t *num_new, int64_t n,
                int32_t flags);
    int (*step_padded)(kvpool_pool *pool, kvpool_plan *plan, const int64_t *handles, const int64_t *num_new, int64_t n,
                       int32_t flags, int64_t pad_rows, int64_t pad_tokens);
    int (*reserve)(kvpool_pool *pool, kvpool_plan *plan, const int64_t *handles, const int64_t *num_new, int64_t n);
    int (*done)(kvpool_pool *pool, kvpool_plan *plan);
    int (*rollback)(kvpool_pool *pool, kvpool_plan *plan);

    /* Reading. size is sizeof(kvpool_stats): a newer caller's new members become 0. Every pool has layer groups, one at
       least. Positions, cu_q_lens, slot_ids, served and handles are common to them. For the others, array and table are
       short for group 0 of a pool of one group: in a pool of several they fail with KVPOOL_VALUE_ERROR, because an
       engine must not run layers on the tables of others. */
    int (*array)(kvpool_plan *plan, int32_t name, kvpool_array *array);
    int (*table)(kvpool_pool *pool, int64_t handle, const int32_t **blocks, int64_t *n);
    int (*num_tokens)(kvpool_pool *pool, int64_t handle, int64_t *tokens);
    /* Blank blocks, as kvpool_stats.free; an allocation can also get the evictable ones. Both are of arena 0. */
    int (*num_free)(kvpool_pool *pool, int64_t *blocks);
    int (*stats)(kvpool_pool *pool, kvpool_stats *stats, int64_t size);
    int (*digest)(kvpool_pool *pool, uint64_t *digest);

    /* The arrays of a plan, and the table of a sequence, in one layer group. An entry of a table has as many ids as the
       group has columns, one after the other: *n and the width of block_tables count ids, slot_mapping has one row of
       all tokens per column. Loads and saves of states are shown in Python only (plan.groups[k].state_loads). */
    int (*group_array)(kvpool_plan *plan, int32_t group, int32_t name, kvpool_array *array);
    int (*group_table)(kvpool_pool *pool, int64_t handle, int32_t group, const int32_t **blocks, int64_t *n);

    /* Retention, of pools with a prefix cache. tick tells the time, limit_kept how many base blocks a namespace may
       keep, -1: any number. */
    int (*tick)(kvpool_pool *pool, int64_t now);
    int (*limit_kept)(kvpool_pool *pool, const char *name_space, int64_t name_bytes, int64_t blocks);

    /* Another number of blocks, or of state slots, for an arena: block moves[2 * k + 1] is what block moves[2 * k] was,
       k < *n. Copy these before the next step. room: of how many moves there is room; as many as blocks leave are
       enough, and a pool that grows has none. Unlike the other calls, this one makes objects of Python. */
    int (*resize)(kvpool_pool *pool, int64_t num_blocks, int32_t arena, int32_t *moves, int64_t room, int64_t *n);
} kvpool_api;

#ifdef Py_PYTHON_H /* #include <Python.h> first: how C and C++ get at the table */

/* The table in a capsule, NULL with ImportError set if it is not one that this header describes. */
static inline const kvpool_api *kvpool_from_capsule(PyObject *capsule) {
    const kvpool_api *api = (const kvpool_api *)PyCapsule_GetPointer(capsule, KVPOOL_CAPSULE);
    if (api == NULL) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ImportError, "[kvpool.h] this is no capsule named " KVPOOL_CAPSULE);
        return NULL;
    }
    if (api->magic != KVPOOL_ABI_MAGIC) {
        PyErr_SetString(PyExc_ImportError, "[kvpool.h] the capsule holds no table of kvpool's (magic)");
        return NULL;
    }
    if (api->abi_version != KVPOOL_ABI_VERSION) {
        PyErr_Format(PyExc_ImportError, "[kvpool.h] kvpool has ABI version %u, this extension was compiled for %u",
                     (unsigned)api->abi_version, (unsigned)KVPOOL_ABI_VERSION);
        return NULL;
    }
    if (api->struct_size < sizeof(kvpool_api)) { /* a larger one has functions that this header does not know */
        PyErr_Format(PyExc_ImportError,
                     "[kvpool.h] kvpool's table has %u bytes, this extension was compiled for %u: a newer kvpool is "
                     "needed",
                     (unsigned)api->struct_size, (unsigned)sizeof(kvpool_api));
        return NULL;
    }
    return api;
}

/* Import kvpool and return its table, valid as long as the process; NULL with an exception set. */
static inline const kvpool_api *kvpool_import(void) {
    const kvpool_api *api = NULL;
    PyObject *module = PyImport_ImportModule("kvpool");
    PyObject *capsule = module == NULL ? NULL : PyObject_GetAttrString(module, "_C_API");
    if (capsule != NULL) {
        api = kvpool_from_capsule(capsule);
    }
    Py_XDECREF(capsule);
    Py_XDECREF(module);
    return api;
}

#endif /* Py_PYTHON_H */

#ifdef __cplusplus
}
#endif
#endif /* KVPOOL_H */
