"""The arguments of `BlockStore.attend`: from arrays of any kind to the struct that kernels take. Part of `_kernels`.

First `take_inputs` holds every array and checks types and shapes; then `read_inputs` copies lengths and checks the
copies; then `read_tables` does the same with the block ids. So the kernels see nothing that another thread may still
write, except numbers that cannot lead astray (tokens, options). Lengths cost O(rows), ids a copy and a vectorised pass
over the blocks in use.
"""
cdef extern from "Python.h":
    int run_signal_handlers "PyErr_CheckSignals"() noexcept
    unsigned long get_ident "PyThread_get_thread_ident"() noexcept
    void set_error "PyErr_SetString"(PyObject* kind, const char* text) noexcept

cdef extern from "unistd.h":
    int getpid() noexcept

cdef unsigned long main_thread = threading.main_thread().ident


cdef struct Inputs:
    const Py_buffer* tables
    const Py_buffer* seq_lens
    const Py_buffer* cu_q_lens
    const Py_buffer* mask               # NULL where there is none
    const Py_buffer* scores


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


cdef float to_scale(object value) except? -1:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"[attend] scale must be a float, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not isfinite(<float>number):
        raise ValueError(f"[attend] scale is {number}, it must be finite in float32")
    return <float>number


# ---------------------------------------------------------------------- types and shapes

cdef int take_inputs(Inputs* inputs, kv_attention* call, Arguments arguments, object block_tables, object seq_lens,
                     object cu_q_lens, object scale, object options) except -1:
    """Hold and check what comes beside q and out, which `call` has already."""
    cdef int64_t num_rows
    inputs.tables = arguments.take_ints(block_tables, "block_tables", 2)
    inputs.seq_lens = arguments.take_ints(seq_lens, "seq_lens", 1)
    inputs.cu_q_lens = arguments.take_ints(cu_q_lens, "cu_q_lens", 1)
    inputs.mask = inputs.scores = NULL
    num_rows = inputs.seq_lens.shape[0]
    arguments.check_shape(inputs.cu_q_lens, "cu_q_lens", num_rows + 1)
    if inputs.tables.shape[0] < num_rows:
        raise ValueError(f"[attend] block_tables must have shape [{num_rows}, W], got {shape_of(inputs.tables)}")
    call.num_rows = num_rows
    call.scale = <float>(1 / sqrt(<double>call.layer.k.dim)) if scale is None else to_scale(scale)
    call.window = INT64_MAX
    if options is not None:
        take_options(inputs, call, arguments, options)
    return 0


cdef int take_options(Inputs* inputs, kv_attention* call, Arguments arguments, object options) except -1:
    """Hold the arrays of options, which have checked themselves but for their shapes."""
    if not isinstance(options, AttentionOptions):
        raise TypeError(f"[attend] options must be an AttentionOptions, got {type(options).__name__}")
    mask = options.mask
    if options.window is not None:
        call.window = options.window
    if options.soft_cap is not None:
        call.soft_cap = options.soft_cap
    if options.sinks is not None:
        call.sinks = take_per_head(call, arguments, options.sinks, "sinks")
    if options.alibi_slopes is not None:
        call.slopes = take_per_head(call, arguments, options.alibi_slopes, "alibi_slopes")
    if mask is not None:
        if mask.dtype != bool and mask.strides[mask.ndim - 1] != 4:
            mask = np.ascontiguousarray(mask)
        inputs.mask = arguments.take(mask, "mask", mask.ndim)
    return 0


cdef const float* take_per_head(kv_attention* call, Arguments arguments, object value, str name) except NULL:
    cdef const Py_buffer* view = arguments.take(value, name, 1)
    arguments.check_shape(view, name, call.num_q_heads)
    return <const float*>view.buf


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

cdef bint in_place(const Py_buffer* view) noexcept:
    """Whether rows of 4-byte elements can stay where they are."""
    cdef int last = view.ndim - 1
    return view.itemsize == 4 and (view.strides[last] == 4 or view.shape[last] <= 1)


cdef int64_t lists_nbytes(const Inputs* inputs, const kv_attention* call) noexcept:
    """Memory for `read_inputs`: lengths, and a mask of bools as floats."""
    cdef const Py_buffer* mask = inputs.mask
    return 16 * (call.num_rows + 1) + (4 * mask.len if mask != NULL and mask.itemsize == 1 else 0)


cdef int read_inputs(const Inputs* inputs, kv_attention* call, char* lists, object options) except -1:
    """Fill and check lengths, and what depends on them; `lists` has `lists_nbytes`."""
    cdef const Py_buffer* mask = inputs.mask
    cdef int64_t longest
    if get_ident() == main_thread:              # others handle no signals, and need not wait for the GIL
        call.ask = has_raised
    call.seq_lens = <int64_t*>lists
    call.cu_q_lens = call.seq_lens + call.num_rows
    longest = read_lengths(inputs, call)
    if inputs.scores != NULL and inputs.scores.shape[2] < longest:
        raise ValueError(f"[attend] scores_out has {inputs.scores.shape[2]} positions, the longest context has "
                         f"{longest} tokens")
    call.scores.columns = longest
    if mask != NULL:
        if (mask.shape[0] != call.num_tokens or mask.shape[mask.ndim - 1] < longest
                or mask.ndim == 3 and mask.shape[1] != 1 and mask.shape[1] != call.num_q_heads):
            options.check(call.num_tokens, call.num_q_heads, longest)   # it says what is wrong
        call.mask = <const float*>mask.buf
        call.mask_token_stride = element_stride(mask, 0)
        call.mask_head_stride = element_stride(mask, 1) if mask.ndim == 3 else 0
        if mask.itemsize == 1:
            write_mask(mask, call, <float*>(call.cu_q_lens + call.num_rows + 1))
    return 0


cdef void write_mask(const Py_buffer* view, kv_attention* call, float* out) noexcept:
    """A mask of bools as floats, without gaps."""
    cdef int64_t token, head, c, heads = view.shape[1] if view.ndim == 3 else 1
    cdef int64_t columns = view.shape[view.ndim - 1], step = view.strides[view.ndim - 1]
    cdef const char* row
    call.mask = out
    call.mask_head_stride = columns if heads > 1 else 0
    call.mask_token_stride = heads * columns
    for token in range(view.shape[0]):
        for head in range(heads):
            row = <const char*>view.buf + token * view.strides[0] + (head * view.strides[1] if heads > 1 else 0)
            for c in range(columns):
                out[c] = 0.0 if row[c * step] else -INFINITY
            out += columns


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
