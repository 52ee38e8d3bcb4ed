"""`BlockStore`: writes, attention and copies by the C kernels, in memory of another owner.

Every call takes its buffers, copies all integers, and checks the copies (docs/backends.md). Then it
releases the GIL and runs a kernel. A refused call has changed nothing. The kernels check nothing themselves. They do
not see what another thread writes to a table meanwhile.
"""
import os
import threading
from inspect import signature
from math import prod

import numpy as np

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_RECORDS_RO, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_AsUTF8
from libc.math cimport INFINITY, isfinite, sqrt
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uintptr_t
from libc.stdlib cimport bsearch, calloc, free, llabs, qsort
from libc.string cimport memcpy, memset, strcmp

cdef extern from *:
    """
    #if defined(__GNUC__) && !defined(__clang__)
    #pragma GCC optimize ("Os")     /* of this file; the kernels are compiled for speed */
    #endif
    """

from kvpool._core cimport current_process, to_int
from kvpool_backends.cpu.kvcpu cimport *

from kvpool.errors import ConcurrentUse
from kvpool.protocol import AttentionOptions
from kvpool.spec import KVSpec
from kvpool_backends.checks import check_attends
from kvpool_backends.cpu import _signatures

include "_arguments.pxi"
include "_attention.pxi"

MOST_THREADS = 1024

cdef const kv_isa* default_kernels = NULL
cdef int process_threads = 1
cdef dict DTYPES = {"float32": KV_F32, "float16": KV_F16, "bfloat16": KV_BF16, "float8_e4m3": KV_F8}


# ---------------------------------------------------------------------- instruction sets and threads

def isas():
    """Names of the instruction sets that this machine can run the kernels with, best last."""
    return tuple(kv_isa_name(kv_isa_at(i)).decode() for i in range(kv_isa_count()))


def tilings():
    """What suits a decode, for each of `isas()`: ``{"tokens", "keys", "queries", "vectors", "layout"}``.

    Tokens of a tile; keys and queries that meet in registers; vectors of values; the layout of a spec without one.
    """
    cdef dict found = {}
    for i in range(kv_isa_count()):
        tiling = kv_isa_tiling(kv_isa_at(i))
        found[kv_isa_name(kv_isa_at(i)).decode()] = {
            "tokens": tiling.tokens, "keys": tiling.keys, "queries": tiling.queries, "vectors": tiling.vectors,
            "layout": tiling.layout.decode(),
        }
    return found


def default_isa():
    """The one that stores take: the best, or that of the environment variable ``KVPOOL_CPU_ISA``."""
    return kv_isa_name(default_kernels).decode()


def num_threads():
    """Threads of a call: the CPUs that the process may use, or ``KVPOOL_NUM_THREADS``, or `set_num_threads`."""
    return load_int(&process_threads, RELAXED)


def set_num_threads(n):
    """Set the number of threads for calls of all stores that were made without a number of their own."""
    store_int(&process_threads, <int>to_int(n, "set_num_threads", "n", 1, MOST_THREADS), RELAXED)


cdef const kv_isa* find_isa(str name) noexcept:
    for i in range(kv_isa_count()):
        if kv_isa_name(kv_isa_at(i)).decode() == name:
            return kv_isa_at(i)
    return NULL


cdef int usable_cpus() except -1:
    """CPUs that this process may use, within a container's share of their time (cgroup v2)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = map(int, file.read().split())
    except (OSError, ValueError):       # no such limit, "max 100000"
        return cpus
    return max(1, min(cpus, -(-quota // period)))


cdef int read_environment() except -1:
    global default_kernels, process_threads
    default_kernels = kv_isa_at(kv_isa_count() - 1)
    process_threads = min(usable_cpus(), MOST_THREADS)
    name = os.environ.get("KVPOOL_CPU_ISA")
    if name:
        default_kernels = find_isa(name)
        if default_kernels == NULL:
            raise ImportError(f"[kvpool_backends.cpu] KVPOOL_CPU_ISA is {name!r}, this machine has {', '.join(isas())}")
    threads = os.environ.get("KVPOOL_NUM_THREADS")
    if threads:
        if not threads.isdecimal() or not 1 <= int(threads[:9]) <= MOST_THREADS:
            raise ImportError(f"[kvpool_backends.cpu] KVPOOL_NUM_THREADS is {threads!r}, "
                              f"the range is 1 .. {MOST_THREADS}")
        process_threads = int(threads)
    return 0


read_environment()


def read_sum(arrays, num_threads=None):
    """Sum of all bits of `arrays` as floats: what merely reading these bytes costs, with the same threads.

    The yardstick of benchmarks; the value itself means nothing.

    Parameters
    ----------
    arrays : sequence of C-contiguous buffers
    num_threads : int, optional
        `num_threads()` by default.
    """
    cdef int threads = load_int(&process_threads, RELAXED)
    cdef Bases bases = Bases()
    cdef int64_t i
    cdef float total = 0
    if num_threads is not None:
        threads = <int>to_int(num_threads, "read_sum", "num_threads", 1, MOST_THREADS)
    bases.take("read_sum", arrays, False)
    with nogil:
        for i in range(bases.count):
            total += kv_read_sum(default_kernels, <const char*>bases.views[i].buf, bases.views[i].len, threads)
    return total


# ---------------------------------------------------------------------- the base arrays of a store

cdef int check_bases(Bases bases, object spec, int64_t num_blocks) except -1:
    """Raise unless these are the base arrays of `spec`: number, sizes, alignment, memory of their own."""
    cdef const Py_buffer* view
    cdef int64_t i, j
    wanted = spec.base_arrays(num_blocks)
    if len(wanted) != bases.count:
        raise ValueError(f"[BlockStore] there are {bases.count} arrays, layout {spec.layout!r} has {len(wanted)}")
    for i, (shape, _, itemsize) in enumerate(wanted):
        nbytes = prod(shape) * itemsize
        view = &bases.views[i]
        if view.itemsize != itemsize or view.len != nbytes:
            raise ValueError(f"[BlockStore] arrays[{i}] has {view.len} bytes in elements of {view.itemsize}, "
                             f"it must have {nbytes} bytes in elements of {itemsize}")
        size = max(plane.itemsize_nbytes for plane in spec.stored_planes) if spec.layout == "block" else itemsize
        if spec.layout == "block":
            check_rows(view, shape, size)
        if <uintptr_t>view.buf % <int64_t>size:
            raise ValueError(f"[BlockStore] arrays[{i}] must be aligned to its elements of {size} bytes")
        for j in range(i):
            if overlap(extent_of(view), extent_of(&bases.views[j])):
                raise ValueError(f"[BlockStore] arrays[{i}] must not overlap with arrays[{j}]")
    return 0


cdef int check_rows(const Py_buffer* view, object shape, int64_t size) except -1:
    """Raise unless the array of layout "block" has one row of contiguous bytes per block."""
    if view.ndim != 2 or view.shape[0] != <int64_t>shape[0] or view.strides[1] != 1:
        raise ValueError(f"[BlockStore] arrays[0] must have shape {list(shape)} and contiguous rows")
    if view.shape[0] > 1 and (view.strides[0] < view.shape[1] or view.strides[0] % size):
        raise ValueError(f"[BlockStore] arrays[0] has a row every {view.strides[0]} bytes, it must be a multiple of "
                         f"{size} and at least {view.shape[1]}")
    return 0


cdef int place_layers(kv_layer* layers, object spec, int64_t num_blocks, Bases bases) except -1:
    """Where each plane of each layer lies; the arrays in the order of `KVSpec.base_arrays`."""
    cdef kv_plane* plane
    cdef kv_part* part
    cdef char* base
    cdef int64_t layer
    cdef int64_t rows = bases.views[0].strides[0] if spec.layout == "block" else 0  # bytes from block to block
    dims, bits = dict(spec.planes), dict(zip("kv", spec.bits))
    for layer in range(spec.num_layers):
        layers[layer].dtype = DTYPES[spec.dtype]
        layers[layer].num_blocks = num_blocks
        layers[layer].block_size = spec.block_size
        layers[layer].num_kv_heads = spec.num_kv_heads
        for number, stored in enumerate(spec.stored_planes):
            layout = spec.plane_layout(stored.name, num_blocks)
            base = <char*>bases.views[<int64_t>spec.base_number(layer, number)].buf
            base += <int64_t>((layout.offset + layer * layout.layer_stride) * stored.itemsize_nbytes)
            name = stored.name[0]
            plane = &layers[layer].k if name == "k" else &layers[layer].v
            if stored.name == name:
                plane.base = base
                plane.block_stride = rows // stored.itemsize_nbytes if rows else layout.block_stride
                plane.slot_stride = layout.slot_stride
                plane.head_stride = layout.head_stride
                plane.dim = dims[name]
                plane.bits = bits[name] or 0
                plane.group_size = spec.quant_group_size if bits[name] else 0
                continue
            part = &plane.scales if stored.name.endswith("scales") else &plane.biases
            part.base = base
            part.block_stride = rows // stored.itemsize_nbytes if rows else layout.block_stride
            part.slot_stride = layout.slot_stride
            part.head_stride = layout.head_stride
    return 0


# ---------------------------------------------------------------------- the store

cdef class BlockStore:
    """Kernels on the planes of a pool in memory of another owner.

    Parameters
    ----------
    spec : KVSpec
        Any layout, dtype, block size and head dimensions.
    num_blocks : int
        1 .. 2^31 - 1.
    arrays : sequence of buffers
        `KVSpec.base_arrays`. Any writable C-contiguous buffers of the right size
        and item size, bfloat16 as uint16 or as MLX's own, float8 as uint8. The rows of the one array of layout "block"
        may lie apart. They are held, and must stay where they are, for the life of the store.
    isa : str, optional
        One of `isas()`, `default_isa()` by default.
    num_threads : int, optional
        By default `num_threads()` at the time of each call.

    Notes
    -----
    Arrays of tokens are ``[T, heads, dim]`` of any strides, float32, float16 or bfloat16 (uint16); conversion rounds to
    nearest even. Lists of integers are int32 or int64 arrays of any strides. Wrong types raise TypeError, shapes and
    values ValueError, ids and layers outside the pool IndexError, as ``[call] what (value), the limit``, before a byte
    is touched; a second call before the first has returned raises ConcurrentUse. The GIL is released meanwhile, and
    after the first calls nothing is allocated (`scratch_nbytes`).
    """

    cdef readonly object spec
    cdef readonly int64_t num_blocks
    cdef const kv_isa* kernels
    cdef int num_threads                # 0: as many as the process uses
    cdef kv_layer* layers               # [num_layers]
    cdef int64_t num_layers
    cdef Bases bases
    cdef Arguments arguments
    cdef Scratch lists                  # lengths or ids of a call, as the kernels want them
    cdef Scratch tables                 # and its block ids
    cdef Scratch work                   # what kv_attend asks for
    cdef object __weakref__

    __signature__ = signature(_signatures.BlockStore)

    def __cinit__(self, *args, **options):
        spec, num_blocks, arrays, isa, num_threads = _signatures.BlockStore(*args, **options)
        if not isinstance(spec, KVSpec):
            raise TypeError(f"[BlockStore] spec must be a KVSpec, got {type(spec).__name__}")
        self.spec = spec
        self.num_blocks = to_int(num_blocks, "BlockStore", "num_blocks", 1, INT32_MAX)
        if isa is not None and not isinstance(isa, str):
            raise TypeError(f"[BlockStore] isa must be a str, got {type(isa).__name__}")
        self.kernels = default_kernels if isa is None else find_isa(isa)
        if self.kernels == NULL:
            raise ValueError(f"[BlockStore] isa is {isa!r}, this machine has {', '.join(isas())}")
        if num_threads is not None:
            self.num_threads = <int>to_int(num_threads, "BlockStore", "num_threads", 1, MOST_THREADS)
        self.arguments = Arguments()
        self.bases = Bases()
        self.bases.take("BlockStore", arrays, True, spec.layout == "block")
        check_bases(self.bases, spec, self.num_blocks)
        self.num_layers = spec.num_layers
        self.layers = <kv_layer*>calloc(self.num_layers, sizeof(kv_layer))
        if self.layers == NULL:
            raise MemoryError(f"[BlockStore] no memory for {self.num_layers} layers")
        place_layers(self.layers, spec, self.num_blocks, self.bases)

    def __dealloc__(self):
        free(self.layers)
        free(self.lists.data)
        free(self.tables.data)
        free(self.work.data)

    @property
    def isa(self):
        """Name of the instruction set."""
        return kv_isa_name(self.kernels).decode()

    @property
    def scratch_nbytes(self):
        """Memory that calls have left for the next ones: as much as the largest needed."""
        return (load_size(&self.lists.nbytes, RELAXED) + load_size(&self.tables.nbytes, RELAXED)
                + load_size(&self.work.nbytes, RELAXED))

    def addresses(self):
        """Addresses of the base arrays."""
        return [<uintptr_t>self.bases.views[i].buf for i in range(self.bases.count)]

    # ------------------------------------------------------------------ one step

    def write(self, layer, k, v, slots):
        """Store token t of `k` and `v` in slot ``slots[t]``, where that is not negative.

        Parameters
        ----------
        k, v : ``[T, Hk, D]``, ``[T, Hk, Dv]``
        slots : int ``[T]``
            ``block * block_size + offset``, distinct: of two tokens for one slot, parts of either may stay.
        """
        cdef Arguments arguments = self.arguments
        cdef const kv_layer* where
        cdef kv_tokens keys, values
        cdef const Py_buffer* view
        cdef int64_t* numbers
        cdef int64_t num_tokens, token, limit = self.num_blocks * self.layers.block_size
        cdef int threads = self.threads()
        arguments.begin("write")
        try:
            where = self.layer_of(layer)
            view = arguments.take_ints(slots, "slots", 1)
            num_tokens = view.shape[0]
            take_tokens(&keys, arguments, k, "k", num_tokens, where.num_kv_heads, where.k.dim)
            take_tokens(&values, arguments, v, "v", num_tokens, where.num_kv_heads, where.v.dim)
            self.bases.check_apart(arguments)
            numbers = <int64_t*>grow(&self.lists, num_tokens * sizeof(int64_t))
            copy_ints(numbers, view)
            for token in range(num_tokens):
                if numbers[token] >= limit:
                    raise IndexError(f"[write] slots[{token}] is {numbers[token]}, the pool has slots 0 .. {limit - 1}")
            with nogil:
                kv_write(self.kernels, where, &keys, &values, numbers, num_tokens, threads)
        finally:
            arguments.end()

    def attend(self, layer, q, out, block_tables, seq_lens, cu_q_lens, scale=None, options=None, *, scores=None,
               scores_out=None):
        """Causal attention of the query tokens over their rows' contexts; docs/backends.md has the equations.

        Parameters
        ----------
        q, out : ``[T, Hq, D]``, ``[T, Hq, Dv]``
            All of `out` is written: tokens from ``cu_q_lens[B]`` on become 0.
        block_tables : int ``[>= B, W]``
        seq_lens, cu_q_lens : int ``[B]``, ``[B + 1]``
            Row i has ``seq_lens[i]`` tokens, of which the last ones are the queries ``cu_q_lens[i] :
            cu_q_lens[i + 1]``. What lies behind a row's context in its table is not read, nor is any of a row
            without queries.
        scale : float, optional
            ``1 / sqrt(D)`` by default.
        options : AttentionOptions, optional
            Nobody looks for NaN in the mask: where it is visible, so is the NaN.
        scores : "raw" or "mass", optional
            See `KVBackend.attend`.
        scores_out : float32 ``[>= B, Hk, >= C]``, with `scores`
            C is the longest context; its first B rows and C positions are written. Positions are 4 bytes apart.

        Returns
        -------
        int or None
            C, with `scores`.
        """
        cdef Arguments arguments = self.arguments
        cdef kv_attention call
        cdef Inputs inputs
        cdef const Py_buffer* queries
        cdef const Py_buffer* results
        cdef int64_t nbytes
        cdef int is_stopped, threads = self.threads()
        memset(&call, 0, sizeof(call))
        arguments.begin("attend")
        try:
            call.layer = self.layer_of(layer)
            if self.spec.latent:
                check_attends(self.spec)
            queries = take_tokens(&call.q, arguments, q, "q", -1, -1, call.layer.k.dim)
            call.num_tokens = queries.shape[0]
            call.num_q_heads = queries.shape[1]
            if call.num_q_heads < 1 or call.num_q_heads % call.layer.num_kv_heads:
                raise ValueError(f"[attend] q has {call.num_q_heads} heads, it must be a multiple of the "
                                 f"{call.layer.num_kv_heads} KV heads")
            results = take_tokens(&call.out, arguments, out, "out", call.num_tokens, call.num_q_heads, call.layer.v.dim)
            take_inputs(&inputs, &call, arguments, block_tables, seq_lens, cu_q_lens, scale, options)
            if scores is not None:
                take_scores(&inputs, &call, arguments, scores, scores_out)
            elif scores_out is not None:
                raise ValueError("[attend] scores_out needs scores, one of ['raw', 'mass']; scores is None")
            arguments.check_output(results)
            self.bases.check_apart(arguments)
            read_inputs(&inputs, &call, grow(&self.lists, lists_nbytes(&inputs, &call)), options)
            read_tables(inputs.tables, &call, <int32_t*>grow(&self.tables, tables_nbytes(&call)))
            if call.num_tokens == 0 and inputs.scores == NULL:
                return
            with nogil:
                nbytes = kv_attend_scratch_nbytes(self.kernels, &call, threads)
            grow(&self.work, nbytes)
            with nogil:
                is_stopped = kv_attend(self.kernels, &call, self.work.data, threads)
            if is_stopped:
                raise_from_handler()
            return None if inputs.scores == NULL else call.scores.columns
        finally:
            arguments.end()

    # ------------------------------------------------------------------ whole blocks

    def copy_blocks(self, copies):
        """Copy first tokens of blocks, in all layers and planes.

        Parameters
        ----------
        copies : int ``[K, 3]``
            Rows of (src, dst, num_tokens), 1 <= num_tokens <= block_size. Every dst is named once and is not a src.
        """
        cdef Arguments arguments = self.arguments
        cdef const Py_buffer* view
        cdef int64_t* rows
        cdef int64_t num_copies
        cdef int threads = self.threads()
        arguments.begin("copy_blocks")
        try:
            view = arguments.take_ints(copies, "copies", 2)
            num_copies = view.shape[0]
            arguments.check_shape(view, "copies", num_copies, 3)
            rows = <int64_t*>grow(&self.lists, 4 * num_copies * sizeof(int64_t))
            copy_ints(rows, view)
            self.check_copies(rows, num_copies, rows + 3 * num_copies)
            with nogil:
                kv_copy_blocks(self.layers, self.num_layers, rows, num_copies, threads)
        finally:
            arguments.end()

    def gather(self, layer, blocks, k_out, v_out):
        """Copy the first tokens of `blocks` out of the pool, in the order given.

        Parameters
        ----------
        blocks : int ``[n]``
        k_out, v_out : ``[t, Hk, D]``, ``[t, Hk, Dv]``, in the dtype of the pool; of what is quantized or float8, any
            t is the number of tokens that are wanted, at most ``n * block_size``.
        """
        cdef Arguments arguments = self.arguments
        cdef const kv_layer* where
        cdef kv_tokens keys, values
        cdef const Py_buffer* k_view
        cdef const Py_buffer* v_view
        cdef int64_t* ids
        cdef int64_t num_blocks, num_tokens
        cdef int threads = self.threads()
        arguments.begin("gather")
        try:
            where = self.layer_of(layer)
            k_view = take_tokens(&keys, arguments, k_out, "k_out", -1, where.num_kv_heads, where.k.dim)
            num_tokens = k_view.shape[0]
            v_view = take_tokens(&values, arguments, v_out, "v_out", num_tokens, where.num_kv_heads, where.v.dim)
            for name, is_wrong in (("k_out", where.k.bits == 0 and keys.dtype != where.dtype),
                                   ("v_out", where.v.bits == 0 and values.dtype != where.dtype)):
                if is_wrong and where.dtype != KV_F8:
                    raise TypeError(f"[gather] {name} must have the dtype of the pool, {self.spec.dtype}, got "
                                    f"{format_of(k_view if name == 'k_out' else v_view)}")
            ids = self.block_list(blocks, &num_blocks)
            if num_tokens > num_blocks * where.block_size:
                raise ValueError(f"[gather] k_out has {num_tokens} tokens, {num_blocks} blocks hold "
                                 f"{num_blocks * where.block_size}")
            arguments.check_output(k_view)
            arguments.check_output(v_view)
            self.bases.check_apart(arguments)
            with nogil:
                kv_gather(self.kernels, where, ids, num_tokens, &keys, &values, threads)
        finally:
            arguments.end()

    def compact(self, blocks, keep):
        """Move the tokens of one sequence that stay to its front, in place, in all planes.

        Parameters
        ----------
        blocks : int ``[n]``
            Of the sequence, in order, distinct.
        keep : int ``[L * Hk, t]``
            Per layer and KV head the old positions, ascending, of what is at positions 0, 1, ... afterwards.
        """
        cdef Arguments arguments = self.arguments
        cdef const Py_buffer* view
        cdef int64_t* ids
        cdef int64_t* places
        cdef int64_t num_blocks, num_kept, i, j, limit, rows = self.num_layers * self.layers.num_kv_heads
        cdef int threads = self.threads()
        arguments.begin("compact")
        try:
            view = arguments.take_ints(keep, "keep", 2)
            num_kept = view.shape[1]
            arguments.check_shape(view, "keep", rows, num_kept)
            grow(&self.work, rows * num_kept * sizeof(int64_t))
            places = <int64_t*>self.work.data
            copy_ints(places, view)
            ids = self.block_list(blocks, &num_blocks)
            self.check_distinct(ids, num_blocks, ids + num_blocks)
            limit = num_blocks * self.layers.block_size
            for i in range(rows):
                for j in range(num_kept):
                    if places[i * num_kept + j] < 0 or places[i * num_kept + j] >= limit:
                        raise ValueError(f"[compact] keep[{i}, {j}] is {places[i * num_kept + j]}, the blocks hold "
                                         f"{limit} tokens")
                    if j > 0 and places[i * num_kept + j] <= places[i * num_kept + j - 1]:
                        raise ValueError(f"[compact] keep[{i}, {j}] is {places[i * num_kept + j]} after "
                                         f"{places[i * num_kept + j - 1]}, it must ascend")
            with nogil:
                kv_compact(self.layers, self.num_layers, ids, places, num_kept, threads)
        finally:
            arguments.end()

    def zero(self, blocks):
        """Set every byte of the blocks ``[n]`` to 0, in all layers and planes."""
        self.do_blocks("zero", KV_ZERO, blocks, None)

    def export_blocks(self, blocks, out):
        """The bytes of the blocks ``[n]`` in portable order to `out`, C-contiguous uint8 ``[n, spec.block_nbytes]``."""
        self.do_blocks("export_blocks", KV_EXPORT, blocks, out)

    def import_blocks(self, blocks, data):
        """Overwrite the blocks ``[n]``, which must be distinct, with rows that `export_blocks` made."""
        self.do_blocks("import_blocks", KV_IMPORT, blocks, data)

    cdef int do_blocks(self, str call, kv_task task, object blocks, object rows) except -1:
        cdef Arguments arguments = self.arguments
        cdef const Py_buffer* view = NULL
        cdef int64_t* ids
        cdef int64_t num_blocks
        cdef int threads = self.threads()
        arguments.begin(call)
        try:
            ids = self.block_list(blocks, &num_blocks)
            if task != KV_ZERO:
                view = self.take_rows(rows, "out" if task == KV_EXPORT else "data", num_blocks)
                self.bases.check_apart(arguments)
            if task == KV_EXPORT:
                arguments.check_output(view)
            elif task == KV_IMPORT:
                self.check_distinct(ids, num_blocks, ids + num_blocks)
            with nogil:
                kv_blocks(task, self.layers, self.num_layers, ids, num_blocks,
                          NULL if view == NULL else <char*>view.buf, threads)
        finally:
            arguments.end()
        return 0

    # ------------------------------------------------------------------ checks

    cdef int threads(self) noexcept:
        return self.num_threads if self.num_threads else load_int(&process_threads, RELAXED)

    cdef const kv_layer* layer_of(self, object layer) except NULL:
        return &self.layers[to_int(layer, self.arguments.call, "layer", 0, self.num_layers - 1, IndexError)]

    cdef int64_t* block_list(self, object blocks, int64_t* count) except NULL:
        """The ids, checked, and as much memory again behind them."""
        cdef const Py_buffer* view = self.arguments.take_ints(blocks, "blocks", 1)
        cdef int64_t i, n = view.shape[0]
        cdef int64_t* ids = <int64_t*>grow(&self.lists, 2 * n * sizeof(int64_t))
        copy_ints(ids, view)
        for i in range(n):
            if ids[i] < 0 or ids[i] >= self.num_blocks:
                raise IndexError(f"[{self.arguments.call}] blocks[{i}] is {ids[i]}, the pool has blocks 0 .. "
                                 f"{self.num_blocks - 1}")
        count[0] = n
        return ids

    cdef const Py_buffer* take_rows(self, object value, str name, int64_t num_blocks) except NULL:
        """uint8 ``[num_blocks, block_nbytes]`` without gaps."""
        cdef const Py_buffer* view = self.arguments.take(value, name, 2)
        cdef int64_t width = self.spec.block_nbytes
        if kind_of(view) != UINT8:
            raise TypeError(f"[{self.arguments.call}] {name} must be uint8, got {format_of(view)}")
        self.arguments.check_shape(view, name, num_blocks, width)
        if num_blocks > 0 and (view.strides[1] != 1 and width > 1 or view.strides[0] != width and num_blocks > 1):
            raise ValueError(f"[{self.arguments.call}] {name} must be C-contiguous, its strides are "
                             f"[{view.strides[0]}, {view.strides[1]}] bytes")
        return view

    cdef int check_distinct(self, const int64_t* ids, int64_t n, int64_t* ordered) except -1:
        """Raise if an id comes twice; the ids are left in order in `ordered`."""
        cdef int64_t i
        memcpy(ordered, ids, n * sizeof(int64_t))
        qsort(ordered, n, sizeof(int64_t), compare_ids)
        for i in range(1, n):
            if ordered[i] == ordered[i - 1]:
                raise ValueError(f"[{self.arguments.call}] block {ordered[i]} is named twice, blocks must be distinct")
        return 0

    cdef int check_copies(self, const int64_t* rows, int64_t n, int64_t* ordered) except -1:
        cdef int64_t i, column, block
        for i in range(n):
            for column in range(2):
                block = rows[3 * i + column]
                if block < 0 or block >= self.num_blocks:
                    raise IndexError(f"[copy_blocks] {'dst' if column else 'src'} of copy {i} is {block}, the pool has "
                                     f"blocks 0 .. {self.num_blocks - 1}")
            if rows[3 * i + 2] < 1 or rows[3 * i + 2] > self.layers.block_size:
                raise ValueError(f"[copy_blocks] num_tokens of copy {i} is {rows[3 * i + 2]}, the range is 1 .. "
                                 f"{self.layers.block_size}")
            ordered[i] = rows[3 * i + 1]
        qsort(ordered, n, sizeof(int64_t), compare_ids)
        for i in range(n):
            if i > 0 and ordered[i] == ordered[i - 1]:
                raise ValueError(f"[copy_blocks] block {ordered[i]} is the dst of two copies, the limit is one")
            if bsearch(&rows[3 * i], ordered, n, sizeof(int64_t), compare_ids) != NULL:
                raise ValueError(f"[copy_blocks] block {rows[3 * i]} is a src and a dst, it can be only one")
        return 0
