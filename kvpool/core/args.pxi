"""From Python arguments to C integers.

An integer is whatever `operator.index` takes, except a bool. A batch is a list or tuple of such integers, or a
1-D, C-contiguous, aligned buffer of native int32 / int64. A batch is copied at once: what a call judges and what it
then works on is the same memory, which nobody else can write to. Everything that is not such an integer is refused
here, before a call takes the lock of its pool.
"""

cdef extern from *:
    """
    static inline void *kv_exchange(void **place, void *value) {
        return __atomic_exchange_n(place, value, __ATOMIC_ACQ_REL);
    }

    /* Whether an object is an int, no bool, that needs no call to be read. */
    static inline int kv_short_int(PyObject *value, int64_t *number) {
        if (!PyLong_CheckExact(value)) return 0;
    #if PY_VERSION_HEX >= 0x030C0000
        if (!PyUnstable_Long_IsCompact((PyLongObject *)value)) return 0;
        *number = PyUnstable_Long_CompactValue((PyLongObject *)value);
    #else
        Py_ssize_t digits = Py_SIZE(value);
        if (digits < -1 || digits > 1) return 0;
        *number = digits * (int64_t)((PyLongObject *)value)->ob_digit[0];
    #endif
        return 1;
    }
    /* Items from .. to - 1 of a list or tuple, as far as they are ints of 64 bits; returns where it stopped. No Python
       code runs. */
    static inline Py_ssize_t kv_plain_ints(PyObject *batch, Py_ssize_t from, Py_ssize_t to, int64_t *out) {
    #ifdef Py_GIL_DISABLED
        int is_list = PyList_Check(batch);
    #else
        PyObject **items = PySequence_Fast_ITEMS(batch);  /* stays where it is, as no Python code runs */
    #endif
        for (Py_ssize_t i = from; i < to; i++) {
            int fits, overflow = 0;
    #ifdef Py_GIL_DISABLED
            PyObject *item = is_list ? PyList_GetItemRef(batch, i) : Py_NewRef(PyTuple_GET_ITEM(batch, i));
            if (item == NULL) { PyErr_Clear(); return i; }
    #else
            PyObject *item = items[i];
    #endif
            fits = kv_short_int(item, &out[i]);
            if (!fits && PyLong_CheckExact(item)) {
                out[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
                fits = !overflow;
            }
    #ifdef Py_GIL_DISABLED
            Py_DECREF(item);
    #endif
            if (!fits) return i;
        }
        return to;
    }

    /* The head of NumPy's arrays, which its C API makes public. `layout_holds` tells whether it is still so. */
    typedef struct {
        PyObject_HEAD
        char *data;
        int nd;
        Py_ssize_t *dimensions;
        Py_ssize_t *strides;
        PyObject *base;
        PyObject *descr;
        int flags;
    } kv_array;
    /* C-contiguous and aligned; writable, and not so that NumPy warns of it */
    enum { KV_PLAIN = 0x0001 | 0x0100, KV_WRITEABLE = 0x0400, KV_WARN = INT_MIN };
    """
    ctypedef struct Array "kv_array":
        char* data
        int nd
        Py_ssize_t* dimensions
        PyObject* descr
        int flags
    int PLAIN "KV_PLAIN"
    int WRITEABLE "KV_WRITEABLE"
    int WARN "KV_WARN"
    bint short_int "kv_short_int"(object value, int64_t* number) noexcept
    Py_ssize_t plain_ints "kv_plain_ints"(object batch, Py_ssize_t start, Py_ssize_t stop, int64_t* out) noexcept
    void* exchange "kv_exchange"(void** place, void* value) noexcept nogil

cdef enum:
    SPARE_HEAD = 16             # bytes in front of spare memory: how much of it there is
    SPARE_LEAST = 4096          # bytes of a new one
    SPARE_MOST = 1 << 20        # larger ones are not kept

cdef object empty = np.empty
cdef object INT32 = np.dtype(np.int32)      # a name would be looked up on every call
cdef object INT64 = np.dtype(np.int64)


cdef type NDARRAY = np.ndarray


cdef bint layout_holds():
    array = np.arange(3, dtype=np.int32)
    cdef const Array* head = <const Array*>array
    return (<size_t>head.data == array.ctypes.data and head.nd == 1 and head.dimensions[0] == 3
            and head.descr == <PyObject*>INT32 and (head.flags & (PLAIN | WRITEABLE)) == (PLAIN | WRITEABLE))


cdef bint HAS_LAYOUT = layout_holds()


cdef inline const Array* plain_array(object value) noexcept:
    """An array of one dimension that can be read as it is, NULL: the buffer protocol has to tell, which takes NumPy
    longer than most calls."""
    cdef const Array* head = <const Array*>value
    if HAS_LAYOUT and type(value) is NDARRAY and head.nd == 1 and head.flags & PLAIN == PLAIN:
        return head
    return NULL


cdef inline int64_t ints_at(const Ints* ints, Py_ssize_t i) noexcept nogil:
    if ints.data == NULL:
        return ints.scalar
    if ints.width == 8:
        return (<const int64_t*>ints.data)[i]
    return (<const int32_t*>ints.data)[i]


# ---- memory of arguments -----------------------------------------------------------------------------------

cdef void* take_memory(Spare* spare, size_t size) noexcept nogil:
    cdef int k
    cdef char* memory
    for k in range(SPARES):
        memory = <char*>exchange(&spare.memory[k], NULL)
        if memory != NULL and (<size_t*>memory)[0] >= size:
            return memory + SPARE_HEAD
        xfree(memory)
    if not FAULTS:
        size = max(size, <size_t>SPARE_LEAST)
    memory = <char*>xmalloc(SPARE_HEAD + size)
    if memory == NULL:
        return NULL
    (<size_t*>memory)[0] = size
    return memory + SPARE_HEAD


cdef void give_memory(Spare* spare, void* taken) noexcept nogil:
    cdef char* memory = <char*>taken - SPARE_HEAD
    cdef int k
    if not FAULTS and (<size_t*>memory)[0] <= SPARE_MOST:
        for k in range(SPARES):
            memory = <char*>exchange(&spare.memory[k], memory)
            if memory == NULL:
                return
    xfree(memory)


cdef void spare_free(Spare* spare) noexcept nogil:
    cdef int k
    for k in range(SPARES):
        xfree(exchange(&spare.memory[k], NULL))


cdef inline void* ints_room(Ints* ints, Py_ssize_t size, int width, str call, str name) except NULL:
    cdef void* room = ints.small
    if size > SMALL:
        room = NULL
        if size <= (INT64_MAX - SPARE_HEAD) // width:
            room = ints.owned = take_memory(ints.spare, size * width)
        if room == NULL:
            raise MemoryError(f"[{call}] no memory for {size} {name}")
    ints.data = room
    ints.size = size
    ints.width = width
    return room


cdef void ints_free(Ints* ints) noexcept nogil:
    if ints.owned != NULL:
        give_memory(ints.spare, ints.owned)
        ints.owned = NULL


# ---- reading -----------------------------------------------------------------------------------------------

cdef int64_t to_int(object value, str call, str name, int64_t low, int64_t high, type huge=ValueError) except? -1:
    """`value` as an integer in ``low .. high``; `huge` is raised for one that is not."""
    cdef int64_t result
    if not PyLong_CheckExact(value):
        if isinstance(value, bool):
            raise TypeError(f"[{call}] {name} must be an int, not a bool ({value})")
        try:
            value = PyNumber_Index(value)
        except TypeError:
            raise TypeError(f"[{call}] {name} must be an int, not {type(value).__name__} ({show(value)})") from None
    try:
        result = PyLong_AsLongLong(value)
    except OverflowError:
        raise huge(f"[{call}] {name} is out of range ({show(value)}), it must be in {low} .. {high}") from None
    if result < low or result > high:
        raise huge(f"[{call}] {name} is out of range ({result}), it must be in {low} .. {high}")
    return result


cdef bint to_bool(object value, str call, str name) except -1:
    if not isinstance(value, bool):
        raise TypeError(f"[{call}] {name} must be a bool, not {type(value).__name__} ({value!r})")
    return value


cdef Py_ssize_t true_length(object value):
    """Items that a list or tuple has, whatever a subclass says."""
    return PyTuple_GET_SIZE(value) if isinstance(value, tuple) else PyList_GET_SIZE(value)


cdef int from_list(Ints* ints, object value, str call, str name, type huge) except -1:
    """A list may change as it is read, by an `__index__`, a signal handler or another thread: then it is refused."""
    cdef Py_ssize_t i = 0, n = true_length(value)
    cdef int64_t* data = <int64_t*>ints_room(ints, n, 8, call, name)
    while i < n and true_length(value) == n:
        i = plain_ints(value, i, min(n, i + 0x10000), data)
        if i < n:
            PyErr_CheckSignals()
        if i < n and true_length(value) == n and plain_ints(value, i, i + 1, data) == i:
            item = value[i]
            data[i] = to_int(item, call, f"{name}[{i}]", INT64_MIN, INT64_MAX, huge)
            i += 1
    if true_length(value) != n:
        raise ValueError(f"[{call}] {name} changed its length during the call")
    return 0


cdef int buffer_judge(const Py_buffer* view, str call, str name, bint narrow) except -1:
    cdef const char* code = view.format         # without a prefix, or one that says native; "=": numpy, misaligned
    if code != NULL and (code[0] == b"@" or code[0] == b"="):
        code += 1
    cdef bint known = code != NULL and (code[0] == b"q" or code[0] == b"l" or code[0] == b"i") and code[1] == 0
    if not known or not (view.itemsize == 8 or (view.itemsize == 4 and narrow)):
        wanted = "int32 or int64" if narrow else "int64"
        found = code.decode() if code != NULL else "B"
        kind = "int" if found in "bhilq" else "uint" if found in "BHILQ" else "float" if found in "efd" else ""
        shown = f"{kind}{8 * view.itemsize}" if kind and len(found) == 1 else f"format {found!r}, {view.itemsize} bytes"
        raise TypeError(f"[{call}] {name} must have dtype {wanted} in native byte order ({shown})")
    if view.ndim != 1:
        raise ValueError(f"[{call}] {name} must have one dimension ({view.ndim})")
    if view.shape[0] > 1 and view.strides != NULL and view.strides[0] != view.itemsize:
        raise ValueError(f"[{call}] {name} must be C-contiguous (stride {view.strides[0]} bytes)")
    if <size_t>view.buf % view.itemsize and view.shape[0]:
        raise ValueError(f"[{call}] {name} must be aligned to {view.itemsize} bytes (address {<size_t>view.buf:#x})")
    return 0


cdef int from_buffer(Ints* ints, object value, str call, str name, bint narrow) except -1:
    """Copy a buffer. No Python code runs between asking for its memory and the copy. Returns 1 for an array of one
    number without a dimension, which is read as an int."""
    cdef Py_buffer view
    cdef const Array* array = plain_array(value)
    cdef Py_ssize_t size
    cdef int width = 0
    if array != NULL:
        width = 8 if array.descr == <PyObject*>INT64 else 4 if narrow and array.descr == <PyObject*>INT32 else 0
    if width:
        size = array.dimensions[0]      # once: without a GIL another thread may resize it
        memcpy(ints_room(ints, size, width, call, name), array.data, size * width)
        return 0
    try:
        PyObject_GetBuffer(value, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    except (BufferError, ValueError) as error:          # a dtype that has no buffer format
        raise TypeError(f"[{call}] {name} must be an array of ints ({error})") from None
    try:
        if view.ndim == 0:
            return 1
        buffer_judge(&view, call, name, narrow)
        memcpy(ints_room(ints, view.shape[0], <int>view.itemsize, call, name), view.buf,
               view.shape[0] * view.itemsize)
    finally:
        PyBuffer_Release(&view)
    return 0


cdef int ints_get(Ints* ints, object value, str call, str name, bint scalar, bint narrow,
                  type huge=ValueError) except -1:
    """Copy `value` into `ints`, which was initialised; the caller must `ints_free` it, also after an exception.

    scalar: one int is accepted; narrow: int32 is accepted beside int64.
    """
    if PyLong_CheckExact(value):
        pass
    elif isinstance(value, (list, tuple)):
        return from_list(ints, value, call, name, huge)
    elif PyObject_CheckBuffer(value):
        if from_buffer(ints, value, call, name, narrow) == 0:
            return 0
    elif not scalar or not hasattr(value, "__index__"):
        raise TypeError(f"[{call}] {name} must be {'an int or ' if scalar else ''}an array of ints, "
                        f"not {type(value).__name__} ({show(value)})")
    if not scalar:
        raise TypeError(f"[{call}] {name} must be an array of ints, not {type(value).__name__} ({show(value)})")
    ints.scalar = to_int(value, call, name, INT64_MIN, INT64_MAX, huge)
    return 0


cdef inline int ints_batch(Ints* ints, object value, str call, str name, bint narrow, type huge=ValueError) except -1:
    """Copy the batch that a call is made for, as `ints_get`; one int is a batch of one."""
    ints_get(ints, value, call, name, True, narrow, huge)
    if ints.size < 0:
        ints.data = &ints.scalar
        ints.size = 1
    return 0


cdef int ints_copy(Ints* ints, const void* data, Py_ssize_t size, int width, str call, str name) except -1:
    if size < 0:
        raise ValueError(f"[{call}] the number of {name} is negative ({size})")
    if size > 0 and data == NULL:
        raise ValueError(f"[{call}] {name} is NULL")
    memcpy(ints_room(ints, size, width, call, name), data, size * width)
    return 0


cdef int ints_tokens(Ints* tokens, str call) except -1:
    """Judge a batch of token ids, and make it one of int32, in place."""
    cdef int64_t i, token
    cdef int32_t* narrow = <int32_t*>tokens.data
    cdef const char* wide = <const char*>tokens.data if tokens.width == 8 else NULL
    cdef int32_t signs = 0
    if wide == NULL:
        for i in range(tokens.size):
            signs |= narrow[i]
        if signs >= 0:
            return 0
    for i in range(tokens.size):
        if wide != NULL:
            memcpy(&token, wide + 8 * i, 8)
        else:
            token = narrow[i]
        if token < 0 or token > 0x7FFFFFFF:
            raise ValueError(f"[{call}] tokens[{i}] is out of range ({token}), it must be in 0 .. {0x7FFFFFFF}")
        narrow[i] = <int32_t>token      # never in front of what is still to be read
    tokens.width = 4
    return 0


# ---- results -----------------------------------------------------------------------------------------------

cdef object shortened(object array, Py_ssize_t length):
    """A fresh array, which nobody else has, without its end. Nothing is made for that, so nothing can fail."""
    if not HAS_LAYOUT:
        return array[:length]
    (<Array*>array).dimensions[0] = length
    return array


cdef void* array_data(object array) except NULL:
    """Address of a fresh C-contiguous array of ours; it stays valid as long as the array lives."""
    cdef Py_buffer view
    cdef void* data
    PyObject_GetBuffer(array, &view, PyBUF_STRIDES)
    data = view.buf
    PyBuffer_Release(&view)
    return data


cdef list as_list(const int32_t* ids, int32_t n):
    cdef int32_t k
    cdef list result = PyList_New(n)
    for k in range(n):
        item = PyLong_FromLong(ids[k])
        Py_INCREF(item)             # the list takes this reference
        PyList_SET_ITEM(result, k, item)
    return result
