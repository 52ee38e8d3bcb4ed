"""The arguments of `BlockStore.attend`: from arrays of any kind to the struct that kernels take.

First `take_inputs` holds every array and checks types and shapes; then `lists_nbytes` says how much memory lengths and
options need as the kernels want them, `read_inputs` copies them to there and checks the copies; then `read_tables` does
the same with the block ids. So the kernels see nothing that another thread may still write, except numbers that cannot
lead astray (tokens, a float mask). Lengths cost O(rows), ids a copy and a vectorised pass over the blocks in use.
"""
import threading

from cpython.object cimport PyObject
from libc.math cimport INFINITY, isfinite, sqrt
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from kvpool._core cimport to_int
from kvpool_backends.cpu._arguments cimport (
    BFLOAT16, BOOL, FLOAT16, FLOAT32, FLOAT64, Arguments, any_outside, copy_ints, format_of, int_at, kind_of, shape_of,
)
from kvpool_backends.cpu.kvcpu cimport KV_BF16, KV_F16, KV_F32, KV_MASS, KV_RAW, kv_attention, kv_tokens


cdef extern from "Python.h":
    int run_signal_handlers "PyErr_CheckSignals"() noexcept
    unsigned long get_ident "PyThread_get_thread_ident"() noexcept
    void set_error "PyErr_SetString"(PyObject* kind, const char* text) noexcept

cdef extern from "unistd.h":
    int getpid() noexcept

cdef unsigned long main_thread = threading.main_thread().ident


cdef const Py_buffer* take_tokens(kv_tokens* tokens, Arguments arguments, object value, str name, int64_t num_tokens,
                                  int64_t num_heads, int64_t dim) except NULL:
    """Hold a float array ``[T, heads, dim]``; a size < 0 may be any."""
    cdef Py_buffer* view = arguments.take(value, name, 3)
    cdef int kind = kind_of(view)
    if kind != FLOAT32 and kind != FLOAT16 and kind != BFLOAT16:
        raise TypeError(f"[{arguments.call}] {name} must be float32, float16 or bfloat16, got {format_of(view)}")
    arguments.check_shape(view, name, num_tokens, num_heads, dim)
    tokens.base = <char*>view.buf
    tokens.dtype = KV_F32 if kind == FLOAT32 else KV_F16 if kind == FLOAT16 else KV_BF16
    tokens.token_stride = element_stride(view, 0)
    tokens.head_stride = element_stride(view, 1)
    tokens.dim_stride = element_stride(view, 2)
    return view


cdef int64_t element_stride(const Py_buffer* view, int dimension) noexcept:
    """In elements; 0 where a dimension of one element leaves it open."""
    return view.strides[dimension] // view.itemsize if view.shape[dimension] > 1 else 0


cdef float to_float32(object value, str name) except? -1:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"[attend] {name} must be a float, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not isfinite(<float>number):
        raise ValueError(f"[attend] {name} is {number}, it must be finite in float32")
    return <float>number


# ---------------------------------------------------------------------- types and shapes

cdef int take_inputs(Inputs* inputs, kv_attention* call, Arguments arguments, object block_tables, object seq_lens,
                     object cu_q_lens, object scale, object options) except -1:
    """Hold and check what comes beside q and out, which `call` has already."""
    cdef int64_t num_rows
    inputs.tables = arguments.take_ints(block_tables, "block_tables", 2)
    inputs.seq_lens = arguments.take_ints(seq_lens, "seq_lens", 1)
    inputs.cu_q_lens = arguments.take_ints(cu_q_lens, "cu_q_lens", 1)
    inputs.sinks = inputs.slopes = inputs.mask = inputs.scores = NULL
    num_rows = inputs.seq_lens.shape[0]
    arguments.check_shape(inputs.cu_q_lens, "cu_q_lens", num_rows + 1)
    if inputs.tables.shape[0] < num_rows:
        raise ValueError(f"[attend] block_tables must have shape [{num_rows}, W], got {shape_of(inputs.tables)}")
    call.num_rows = num_rows
    call.scale = <float>(1 / sqrt(<double>call.layer.k.dim)) if scale is None else to_float32(scale, "scale")
    call.window = INT64_MAX
    if options is not None:
        take_options(inputs, call, arguments, options)
    return 0


cdef int take_options(Inputs* inputs, kv_attention* call, Arguments arguments, object options) except -1:
    try:
        window, soft_cap, mask = options.window, options.soft_cap, options.mask
        sinks, slopes = options.sinks, options.alibi_slopes
    except AttributeError:
        raise TypeError(f"[attend] options must be an AttentionOptions, got {type(options).__name__}") from None
    if window is not None:
        call.window = to_int(window, "attend", "window", 1, INT64_MAX)
    if soft_cap is not None:
        call.soft_cap = to_float32(soft_cap, "soft_cap")
        if call.soft_cap <= 0:
            raise ValueError(f"[attend] soft_cap is {soft_cap}, it must be > 0 in float32")
    if sinks is not None:
        inputs.sinks = take_per_head(call, arguments, sinks, "sinks")
    if slopes is not None:
        inputs.slopes = take_per_head(call, arguments, slopes, "alibi_slopes")
    if mask is not None:
        inputs.mask = take_mask(call, arguments, mask)
    return 0


cdef const Py_buffer* take_per_head(kv_attention* call, Arguments arguments, object value, str name) except NULL:
    cdef Py_buffer* view = arguments.take(value, name, 1)
    cdef int kind = kind_of(view)
    if kind != FLOAT32 and kind != FLOAT64:
        raise TypeError(f"[attend] {name} must be float32 or float64, got {format_of(view)}")
    arguments.check_shape(view, name, call.num_q_heads)
    return view


cdef const Py_buffer* take_mask(kv_attention* call, Arguments arguments, object value) except NULL:
    cdef int ndim = 3 if getattr(value, "ndim", 2) == 3 else 2
    cdef Py_buffer* view = arguments.take(value, "mask", ndim)
    cdef int kind = kind_of(view)
    if kind != FLOAT32 and kind != BOOL:
        raise TypeError(f"[attend] mask must be float32 or bool, got {format_of(view)}")
    if view.shape[0] != call.num_tokens or (ndim == 3 and view.shape[1] != 1 and view.shape[1] != call.num_q_heads):
        raise ValueError(f"[attend] mask must have shape [{call.num_tokens}, C'] or [{call.num_tokens}, "
                         f"1 or {call.num_q_heads}, C'], got {shape_of(view)}")
    return view


cdef int take_scores(Inputs* inputs, kv_attention* call, Arguments arguments, object kind, object out) except -1:
    """Hold and check where scores go: after `take_inputs`."""
    cdef Py_buffer* view
    if not isinstance(kind, str):
        raise TypeError(f"[attend] scores must be a str, got {type(kind).__name__}")
    if kind != "raw" and kind != "mass":
        raise ValueError(f"[attend] scores is {kind!r}, the kinds are ['raw', 'mass']")
    if out is None:
        raise ValueError(f"[attend] scores {kind!r} need scores_out, an array to fill")
    view = arguments.take(out, "scores_out", 3)
    if kind_of(view) != FLOAT32:
        raise TypeError(f"[attend] scores_out must be float32, got {format_of(view)}")
    if view.shape[0] < call.num_rows or view.shape[1] != call.layer.num_kv_heads:
        raise ValueError(f"[attend] scores_out must have shape [{call.num_rows} or more, {call.layer.num_kv_heads}, "
                         f"C], got {shape_of(view)}")
    if view.shape[2] > 1 and view.strides[2] != 4:
        raise ValueError(f"[attend] scores_out has a stride of {view.strides[2]} bytes between positions, not 4")
    if view.len > 0:                    # empty arrays have any strides
        arguments.check_output(view)
    call.scores.kind = KV_RAW if kind == "raw" else KV_MASS
    call.scores.out = <float*>view.buf
    call.scores.row_stride = element_stride(view, 0)
    call.scores.head_stride = element_stride(view, 1)
    inputs.scores = view
    return 0


# ---------------------------------------------------------------------- lists, as the kernels want them

cdef int64_t aligned(int64_t nbytes) noexcept:
    return (nbytes + 63) // 64 * 64


cdef bint in_place(const Py_buffer* view) noexcept:
    """Whether rows of 4-byte elements can stay where they are."""
    cdef int last = view.ndim - 1
    return view.itemsize == 4 and (view.strides[last] == 4 or view.shape[last] <= 1)


cdef int64_t elements(const Py_buffer* view) noexcept:
    return view.len // view.itemsize


cdef int64_t lists_nbytes(const Inputs* inputs, const kv_attention* call) noexcept:
    """Memory for `read_inputs`: known from the shapes alone."""
    cdef int64_t nbytes = aligned(8 * call.num_rows) + aligned(8 * (call.num_rows + 1))
    nbytes += 2 * aligned(4 * call.num_q_heads)
    if inputs.mask != NULL and not in_place(inputs.mask):
        nbytes += aligned(4 * elements(inputs.mask))
    return nbytes


cdef int read_inputs(const Inputs* inputs, kv_attention* call, char* lists) except -1:
    """Fill and check lengths and options; `lists` has `lists_nbytes`, aligned to 64."""
    cdef int64_t longest
    if get_ident() == main_thread:              # others handle no signals, and need not wait for the GIL
        call.ask = has_raised
    call.seq_lens = <int64_t*>lists
    lists += aligned(8 * call.num_rows)
    call.cu_q_lens = <int64_t*>lists
    lists += aligned(8 * (call.num_rows + 1))
    longest = read_lengths(inputs, call)
    if inputs.scores != NULL and inputs.scores.shape[2] < longest:
        raise ValueError(f"[attend] scores_out has {inputs.scores.shape[2]} positions, the longest context has "
                         f"{longest} tokens")
    call.scores.columns = longest
    if inputs.sinks != NULL:
        call.sinks = read_per_head(inputs.sinks, <float*>lists, "sinks")
    lists += aligned(4 * call.num_q_heads)
    if inputs.slopes != NULL:
        call.slopes = read_per_head(inputs.slopes, <float*>lists, "alibi_slopes")
    lists += aligned(4 * call.num_q_heads)
    if inputs.mask != NULL:
        read_mask(inputs.mask, call, <float*>lists, longest)
    return 0


cdef int64_t read_lengths(const Inputs* inputs, kv_attention* call) except -1:
    """Lengths and prefix sums, each row checked; returns the longest context."""
    cdef int64_t* seq_lens = <int64_t*>call.seq_lens
    cdef int64_t* cu_q_lens = <int64_t*>call.cu_q_lens
    cdef int64_t row, num_queries, blocks, longest = 0, block_size = call.layer.block_size
    copy_ints(seq_lens, inputs.seq_lens)
    copy_ints(cu_q_lens, inputs.cu_q_lens)
    if cu_q_lens[0] != 0:
        raise ValueError(f"[attend] cu_q_lens[0] is {cu_q_lens[0]}, it must be 0")
    for row in range(call.num_rows):
        if cu_q_lens[row + 1] < cu_q_lens[row] or cu_q_lens[row + 1] > call.num_tokens:
            raise ValueError(f"[attend] cu_q_lens[{row + 1}] is {cu_q_lens[row + 1]}, the range is {cu_q_lens[row]} .. "
                             f"{call.num_tokens}")
        num_queries = cu_q_lens[row + 1] - cu_q_lens[row]
        if seq_lens[row] < num_queries:
            raise ValueError(f"[attend] seq_lens[{row}] is {seq_lens[row]}, the row has {num_queries} queries")
        blocks = seq_lens[row] // block_size + (seq_lens[row] % block_size != 0)
        if num_queries > 0 and blocks > inputs.tables.shape[1]:
            raise ValueError(f"[attend] seq_lens[{row}] is {seq_lens[row]}, a table of {inputs.tables.shape[1]} "
                             f"blocks holds {inputs.tables.shape[1] * block_size} tokens")
        longest = max(longest, seq_lens[row])
    return longest


cdef int64_t blocks_read(const kv_attention* call, int64_t row) noexcept nogil:
    """Entries of a row's table that the kernels read: none where there are no queries."""
    if call.cu_q_lens[row + 1] == call.cu_q_lens[row]:
        return 0
    return (call.seq_lens[row] - 1) // call.layer.block_size + 1


cdef int64_t tables_nbytes(kv_attention* call) noexcept:
    """Memory for `read_tables`, after `read_inputs`: rows as wide as the longest context that is read."""
    cdef int64_t row
    call.table_stride = 0
    for row in range(call.num_rows):
        call.table_stride = max(call.table_stride, blocks_read(call, row))
    return 4 * call.num_rows * call.table_stride


cdef int read_tables(const Py_buffer* view, kv_attention* call, int32_t* out) except -1:
    """The ids that kernels read, as int32 rows; each is read once from the caller's memory, and then checked."""
    cdef const char* ids
    cdef int32_t num_blocks = <int32_t>call.layer.num_blocks
    cdef int64_t row, column, count, block
    call.tables = out
    for row in range(call.num_rows):
        ids = <const char*>view.buf + row * view.strides[0]
        count = blocks_read(call, row)
        if in_place(view):
            memcpy(out, ids, count * sizeof(int32_t))
            if any_outside(out, count, num_blocks):
                for column in range(count):
                    check_id(row, column, out[column], num_blocks)
        else:
            for column in range(count):
                block = int_at(ids + column * view.strides[1], <int>view.itemsize)
                check_id(row, column, block, num_blocks)
                out[column] = <int32_t>block
        out += call.table_stride
    return 0


cdef inline int check_id(int64_t row, int64_t column, int64_t block, int32_t num_blocks) except -1:
    if block < 0 or block >= num_blocks:
        raise IndexError(f"[attend] block_tables[{row}, {column}] is {block}, the pool has blocks 0 .. "
                         f"{num_blocks - 1}")
    return 0


cdef const float* read_per_head(const Py_buffer* view, float* out, str name) except NULL:
    cdef int64_t head
    cdef const char* at = <const char*>view.buf
    for head in range(view.shape[0]):
        out[head] = (<const float*>at)[0] if view.itemsize == 4 else <float>(<const double*>at)[0]
        if not isfinite(out[head]):
            raise ValueError(f"[attend] {name}[{head}] is {out[head]}, it must be finite in float32")
        at += view.strides[0]
    return out


cdef int read_mask(const Py_buffer* view, kv_attention* call, float* out, int64_t longest) except -1:
    """A float32 mask of contiguous columns stays in place; another one is written out."""
    cdef bint heads = view.ndim == 3 and view.shape[1] > 1
    cdef int last = view.ndim - 1
    if view.shape[last] < longest:
        raise ValueError(f"[attend] mask has {view.shape[last]} columns, the longest context has {longest} tokens")
    if in_place(view):
        call.mask = <const float*>view.buf
        call.mask_token_stride = view.strides[0] // 4 if view.shape[0] > 1 else 0
        call.mask_head_stride = view.strides[1] // 4 if heads else 0
        return 0
    call.mask = out
    call.mask_head_stride = longest if heads else 0
    call.mask_token_stride = longest * (view.shape[1] if heads else 1)
    with nogil:
        write_mask(view, out, view.shape[0], view.shape[1] if heads else 1, longest)
    return 0


cdef void write_mask(const Py_buffer* view, float* out, int64_t num_tokens, int64_t num_heads,
                     int64_t longest) noexcept nogil:
    cdef int64_t token, head, c, step = view.strides[view.ndim - 1]
    cdef const char* row
    for token in range(num_tokens):
        for head in range(num_heads):
            row = <const char*>view.buf + token * view.strides[0] + (head * view.strides[1] if num_heads > 1 else 0)
            if view.itemsize == 4:
                for c in range(longest):
                    out[c] = (<const float*>(row + c * step))[0]
            else:
                for c in range(longest):
                    out[c] = 0.0 if (<const uint8_t*>(row + c * step))[0] else -INFINITY
            out += longest


cdef int has_raised() noexcept with gil:
    """Run the handlers of signals that came, in the main thread; what one raises stays set."""
    cdef int here = getpid()
    if run_signal_handlers() != 0:
        return 1
    if getpid() == here:
        return 0
    set_error(<PyObject*>RuntimeError, b"[attend] a signal's handler has forked this process inside the call: "
                                       b"only the parent ends it, its worker threads stayed there")
    return 1


cdef int raise_from_handler() except -1:
    """When `has_raised` has ended a call."""
    return -1
