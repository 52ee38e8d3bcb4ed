"""The memory that one call is given: buffers taken, described and given back, integers read. Part of `_kernels`.

A `Py_buffer` is read as it is, not through a typed memoryview: MLX describes bfloat16 by a format that Cython does
not know. uint16 is taken for bfloat16 too, which numpy lacks.
"""

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void** data, size_t alignment, size_t nbytes)

cdef extern from *:             # words that several threads use at once; of gcc and clang
    const int RELAXED "__ATOMIC_RELAXED"
    const int ACQUIRE "__ATOMIC_ACQUIRE"
    const int RELEASE "__ATOMIC_RELEASE"
    int load_int "__atomic_load_n"(int* at, int order) nogil
    void store_int "__atomic_store_n"(int* at, int value, int order) nogil
    int64_t load_size "__atomic_load_n"(int64_t* at, int order) nogil
    void store_size "__atomic_store_n"(int64_t* at, int64_t value, int order) nogil
    unsigned load_flag "__atomic_load_n"(unsigned* at, int order) nogil
    void store_flag "__atomic_store_n"(unsigned* at, unsigned value, int order) nogil
    bint swap_flag "__atomic_compare_exchange_n"(unsigned* at, unsigned* seen, unsigned value, bint weak, int order,
                                                 int otherwise) nogil
    const char* load_name "__atomic_load_n"(const char** at, int order) nogil
    void store_name "__atomic_store_n"(const char** at, const char* name, int order) nogil


cdef enum Kind:                 # of the elements of a buffer
    OTHER
    FLOAT64
    FLOAT32
    FLOAT16
    BFLOAT16
    INT64
    INT32
    UINT8
    BOOL

cdef enum:
    MOST_BUFFERS = 9            # that a call takes: q, out, tables, two kinds of lengths, sinks, slopes, mask, scores


cdef struct Extent:
    uintptr_t begin, end        # bytes; equal when there are none


cdef struct Scratch:
    char* data                  # aligned to 64 bytes
    int64_t nbytes              # only the caller that is inside the store changes it, anybody may read it


@cython.internal
cdef class Arguments:
    """The buffers that one call at a time holds. A call is `begin`, any number of `take`, and `end` in any case."""

    cdef Py_buffer[MOST_BUFFERS] views
    cdef int count
    cdef unsigned busy          # 0, or the number of the process that is inside a call
    cdef str call
    cdef const char* inside     # the same for other threads: its letters are a constant of the module
    cdef list names             # of the buffers

    def __cinit__(self):
        self.names = [None] * MOST_BUFFERS
        self.inside = b"a call"

    cdef int begin(self, str call) except -1:
        cdef unsigned here = current_process(), seen = load_flag(&self.busy, RELAXED)
        if seen == here or not swap_flag(&self.busy, &seen, here, False, ACQUIRE, RELAXED):
            other = load_name(&self.inside, RELAXED).decode()
            raise ConcurrentUse(f"[{call}] the store is inside another call ({other}); one caller at a time")
        if seen:
            self.give_back()    # a forked child: the thread that was inside the call is the parent's
        self.call = call
        store_name(&self.inside, PyUnicode_AsUTF8(call), RELAXED)
        return 0

    cdef void end(self) noexcept:
        self.give_back()
        store_flag(&self.busy, 0, RELEASE)

    cdef void give_back(self) noexcept:
        while self.count > 0:
            self.count -= 1
            PyBuffer_Release(&self.views[self.count])

    cdef Py_buffer* take(self, object value, str name, int ndim) except NULL:
        """An array of `ndim` dimensions whose strides are whole, aligned elements; held until `end`."""
        cdef Py_buffer* view = &self.views[self.count]
        cdef int i
        if not PyObject_CheckBuffer(value):
            raise TypeError(f"[{self.call}] {name} must be an array, got {type(value).__name__}")
        try:
            PyObject_GetBuffer(value, view, PyBUF_RECORDS_RO)
        except (BufferError, TypeError, ValueError) as error:
            raise TypeError(f"[{self.call}] {name} must be an array of plain elements ({error})") from None
        self.names[self.count] = name
        self.count += 1
        if view.ndim != ndim:
            raise ValueError(f"[{self.call}] {name} must have {ndim} dimensions, got shape {shape_of(view)}")
        if view.itemsize < 1:
            raise TypeError(f"[{self.call}] {name} has elements of {view.itemsize} bytes, the minimum is 1")
        if <uintptr_t>view.buf % view.itemsize:
            raise ValueError(f"[{self.call}] {name} must be aligned to its elements of {view.itemsize} bytes")
        for i in range(ndim):
            if view.shape[i] > 1 and view.strides[i] % view.itemsize:
                raise ValueError(f"[{self.call}] {name} has a stride of {view.strides[i]} bytes, "
                                 f"it must be a multiple of its elements' {view.itemsize}")
        return view

    cdef Py_buffer* take_ints(self, object value, str name, int ndim) except NULL:
        cdef Py_buffer* view = self.take(value, name, ndim)
        cdef int kind = kind_of(view)
        if kind != INT32 and kind != INT64:
            raise TypeError(f"[{self.call}] {name} must be int32 or int64, got {format_of(view)}")
        return view

    cdef int check_shape(self, const Py_buffer* view, str name, int64_t a, int64_t b=-1, int64_t c=-1) except -1:
        """Raise unless the shape is [a], [a, b] or [a, b, c]; a size < 0 may be any."""
        cdef int64_t[3] wanted = [a, b, c]
        cdef int i
        for i in range(view.ndim):
            if wanted[i] >= 0 and view.shape[i] != wanted[i]:
                sizes = ", ".join("any" if wanted[i] < 0 else str(wanted[i]) for i in range(view.ndim))
                raise ValueError(f"[{self.call}] {name} must have shape [{sizes}], got {shape_of(view)}")
        return 0

    cdef int check_output(self, const Py_buffer* view) except -1:
        """Raise unless every element is writable, has an address of its own, and is not part of another buffer."""
        cdef str name = self.names[view - self.views]
        cdef int i
        if view.readonly:
            raise ValueError(f"[{self.call}] {name} is read-only, it is written")
        for i in range(view.ndim):
            if view.shape[i] > 1 and llabs(view.strides[i]) < span_below(view, i):
                raise ValueError(f"[{self.call}] {name} has a stride of {view.strides[i]} bytes in dimension {i}, "
                                 f"the minimum is {span_below(view, i)}: its elements overlap")
        for i in range(self.count):
            if &self.views[i] != view and overlap(extent_of(view), extent_of(&self.views[i])):
                raise ValueError(f"[{self.call}] {name} (at {<uintptr_t>view.buf:#x}) must not overlap with "
                                 f"{self.names[i]} (at {<uintptr_t>self.views[i].buf:#x})")
        return 0


cdef int64_t span_below(const Py_buffer* view, int dimension) noexcept nogil:
    """Bytes that one element and the dimensions of smaller strides span."""
    cdef int64_t stride = llabs(view.strides[dimension]), other, span = view.itemsize
    cdef int i
    for i in range(view.ndim):
        other = llabs(view.strides[i])
        if view.shape[i] > 1 and (other < stride or (other == stride and i < dimension)):
            span += (view.shape[i] - 1) * other
    return span


@cython.internal
cdef class Bases:
    """Buffers, held as long as this object lives; contiguous ones unless they are taken as strided."""

    cdef Py_buffer* views
    cdef int64_t count

    def __dealloc__(self):
        while self.count > 0:
            self.count -= 1
            PyBuffer_Release(&self.views[self.count])
        free(self.views)

    cdef int take(self, str call, object arrays, bint writable, bint strided=False) except -1:
        cdef int flags = (PyBUF_STRIDES if strided else PyBUF_C_CONTIGUOUS) | PyBUF_FORMAT
        if writable:
            flags |= PyBUF_WRITABLE
        try:
            arrays = list(arrays)
        except TypeError:
            raise TypeError(f"[{call}] arrays must be a list of arrays, got {type(arrays).__name__}") from None
        self.views = <Py_buffer*>calloc(max(len(arrays), 1), sizeof(Py_buffer))
        if self.views == NULL:
            raise MemoryError(f"[{call}] no memory for a list of {len(arrays)} arrays")
        for array in arrays:
            try:
                PyObject_GetBuffer(array, &self.views[self.count], flags)
            except TypeError:
                raise TypeError(f"[{call}] arrays[{self.count}] must be an array, got {type(array).__name__}") from None
            except (BufferError, ValueError) as error:
                kind = f"a{' writable' if writable else ''}{'' if strided else ' C-contiguous'} array"
                raise ValueError(f"[{call}] arrays[{self.count}] must be {kind} ({error})") from None
            self.count += 1
        return 0

    cdef int check_apart(self, Arguments arguments) except -1:
        """Raise if a buffer of the call lies in the pool."""
        cdef Extent extent
        cdef int64_t i, j
        for i in range(arguments.count):
            extent = extent_of(&arguments.views[i])
            for j in range(self.count):
                if overlap(extent, extent_of(&self.views[j])):
                    at = <uintptr_t>arguments.views[i].buf
                    raise ValueError(f"[{arguments.call}] {arguments.names[i]} (at {at:#x}) must not overlap with the "
                                     f"memory of the pool (array {j} at {<uintptr_t>self.views[j].buf:#x})")
        return 0


# ---------------------------------------------------------------------- what a buffer is

cdef int kind_of(const Py_buffer* view) noexcept:
    cdef const char* code = view.format
    if code == NULL:
        return UINT8 if view.itemsize == 1 else OTHER
    if strcmp(code, "bfloat16") == 0:
        return BFLOAT16 if view.itemsize == 2 else OTHER
    if code[0] in b"@=<":               # all machines served here are little-endian
        code += 1
    if code[0] == 0 or code[1] != 0:
        return OTHER
    if code[0] == b"f":
        return FLOAT32
    if code[0] == b"e":
        return FLOAT16
    if code[0] == b"H":
        return BFLOAT16
    if code[0] == b"d":
        return FLOAT64
    if code[0] == b"B":                 # of two bytes: bfloat16 of MLX before 0.32.2
        return UINT8 if view.itemsize == 1 else BFLOAT16 if view.itemsize == 2 else OTHER
    if code[0] == b"?":
        return BOOL
    if code[0] in b"ilqn":
        return INT64 if view.itemsize == 8 else INT32
    return OTHER


cdef str format_of(const Py_buffer* view):
    name = {FLOAT64: "float64", FLOAT32: "float32", FLOAT16: "float16", BFLOAT16: "bfloat16 (or uint16)",
            INT64: "int64", INT32: "int32", UINT8: "uint8", BOOL: "bool"}.get(kind_of(view))
    if name is None:
        code = "B" if view.format == NULL else view.format.decode("ascii", "replace")
        name = f"elements of format {code!r}"
    return name


cdef str shape_of(const Py_buffer* view):
    cdef int i
    return str([view.shape[i] for i in range(view.ndim)])


cdef Extent extent_of(const Py_buffer* view) noexcept nogil:
    """From the first to behind the last byte of a buffer, whatever its strides."""
    cdef Extent extent
    cdef int i
    cdef int64_t span
    extent.begin = <uintptr_t>view.buf
    extent.end = extent.begin + view.itemsize
    for i in range(view.ndim):
        if view.shape[i] == 0:
            extent.end = extent.begin = <uintptr_t>view.buf
            return extent
        span = (view.shape[i] - 1) * view.strides[i]
        if span < 0:
            extent.begin += span
        else:
            extent.end += span
    return extent


cdef bint overlap(Extent a, Extent b) noexcept nogil:
    return a.begin < b.end and b.begin < a.end and a.begin < a.end and b.begin < b.end


# ---------------------------------------------------------------------- integers, scratch

cdef inline int64_t int_at(const char* at, int itemsize) noexcept nogil:
    return (<const int64_t*>at)[0] if itemsize == 8 else (<const int32_t*>at)[0]


cdef void copy_ints(int64_t* out, const Py_buffer* view) noexcept nogil:
    """All elements of an int32 or int64 buffer of one or two dimensions, row after row."""
    cdef int64_t i, j, columns = view.shape[1] if view.ndim > 1 else 1
    cdef int64_t step = view.strides[1] if view.ndim > 1 else 0
    cdef int itemsize = <int>view.itemsize
    cdef const char* row = <const char*>view.buf
    for i in range(view.shape[0]):
        for j in range(columns):
            out[i * columns + j] = int_at(row + j * step, itemsize)
        row += view.strides[0]


cdef bint any_outside(const int32_t* ids, int64_t n, int32_t num_blocks) noexcept nogil:
    """Whether some id is not in ``0 .. num_blocks - 1``.

    An id < 0 has its sign bit set; for the others, ``num_blocks - 1 - id`` has it if and only if the id is too large.
    Or-ed together without a branch, this is vectorised on every machine.
    """
    cdef uint32_t bad = 0, last = <uint32_t>(num_blocks - 1)
    cdef int64_t i
    for i in range(n):
        bad |= <uint32_t>ids[i] | (last - <uint32_t>ids[i])
    return (bad >> 31) != 0


cdef char* grow(Scratch* scratch, int64_t nbytes) except NULL:
    """At least `nbytes` of memory; what it held is lost when it grows. By half at least, so that it rarely does."""
    cdef void* data = NULL
    if scratch.nbytes >= nbytes and scratch.data != NULL:
        return scratch.data
    nbytes = (max(nbytes, scratch.nbytes + scratch.nbytes // 2) + 4095) // 4096 * 4096 + 4096
    free(scratch.data)
    scratch.data = NULL
    store_size(&scratch.nbytes, 0, RELAXED)
    if posix_memalign(&data, 64, nbytes) != 0:
        raise MemoryError(f"no memory for {nbytes} bytes of scratch")
    scratch.data = <char*>data
    store_size(&scratch.nbytes, nbytes, RELAXED)
    return scratch.data


cdef int compare_ids(const void* a, const void* b) noexcept nogil:
    cdef int64_t x = (<const int64_t*>a)[0], y = (<const int64_t*>b)[0]
    return (x > y) - (x < y)
