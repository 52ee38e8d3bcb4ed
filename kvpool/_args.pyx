"""From Python arguments to C integers.

An integer is whatever `operator.index` takes, except a bool. A batch is a list or tuple of such integers, or a
1-D, C-contiguous buffer of native int32 / int64; its memory is read in place. Everything else is refused here,
before a call looks at the state of the pool.
"""
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLong, PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.number cimport PyNumber_Index
from cpython.tuple cimport PyTuple_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t
from kvpool._memory cimport xfree, xmalloc

import numpy as np

cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(object value)

cdef object empty = np.empty
cdef object INT32 = np.dtype(np.int32)      # a name would be looked up on every call
cdef object INT64 = np.dtype(np.int64)


cdef str show(object value):
    """The value as a message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:           # a number of 5,000 digits, an object that cannot show itself
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


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


cdef Py_ssize_t true_length(object value):
    """Items that a list or tuple has, whatever a subclass says."""
    return PyTuple_GET_SIZE(value) if isinstance(value, tuple) else PyList_GET_SIZE(value)


cdef int _from_list(Ints* ints, object value, str call, str name, type huge) except -1:
    cdef Py_ssize_t i, n = true_length(value)
    cdef PyObject** items = PySequence_Fast_ITEMS(value)
    cdef int overflow = 0
    cdef int64_t* data = <int64_t*>xmalloc(max(n, 1) * sizeof(int64_t))
    if data == NULL:
        raise MemoryError(f"[{call}] no memory for {n} {name}")
    try:
        for i in range(n):
            if i & 0xFFFF == 0xFFFF:            # nothing was judged yet that a handler could change: as in __index__
                PyErr_CheckSignals()
                if true_length(value) != n:
                    raise ValueError(f"[{call}] {name} changed its length during the call")
                items = PySequence_Fast_ITEMS(value)
            if PyLong_CheckExact(<object>items[i]):
                data[i] = PyLong_AsLongLongAndOverflow(<object>items[i], &overflow)
                if not overflow:
                    continue
            item = value[i]
            data[i] = to_int(item, call, f"{name}[{i}]", INT64_MIN, INT64_MAX, huge)
            if true_length(value) != n:         # its __index__ changed the list
                raise ValueError(f"[{call}] {name} changed its length during the call")
            items = PySequence_Fast_ITEMS(value)
    except BaseException:
        xfree(data)
        raise
    ints.owned = data
    ints.data = data
    ints.size = n
    ints.width = 8
    return 0


cdef int _check_view(Ints* ints, str call, str name, bint narrow) except -1:
    cdef Py_buffer* view = &ints.view
    cdef const char* code = view.format         # numpy and array.array write the native codes without a prefix
    cdef bint known = code != NULL and (code[0] == b"q" or code[0] == b"l" or code[0] == b"i") and code[1] == 0
    if not known or not (view.itemsize == 8 or (view.itemsize == 4 and narrow)):
        wanted = "int32 or int64" if narrow else "int64"
        found = code.decode() if code != NULL else "B"
        raise TypeError(f"[{call}] {name} must have dtype {wanted} in native byte order "
                        f"(format {found!r}, {view.itemsize} bytes)")
    if view.ndim != 1:
        raise ValueError(f"[{call}] {name} must have one dimension ({view.ndim})")
    if view.shape[0] > 1 and view.strides != NULL and view.strides[0] != view.itemsize:
        raise ValueError(f"[{call}] {name} must be C-contiguous (stride {view.strides[0]} bytes)")
    ints.data = view.buf
    ints.size = view.shape[0]
    ints.width = <int>view.itemsize
    return 0


cdef int ints_get(Ints* ints, object value, str call, str name, bint scalar, bint narrow,
                  type huge=ValueError) except -1:
    """Read `value` into `ints`; the caller must `ints_free` it, also after an exception.

    scalar: one int is accepted; narrow: int32 is accepted beside int64.
    """
    ints.data = NULL
    ints.owned = NULL
    ints.held = False
    ints.size = -1
    ints.width = 8
    if PyLong_CheckExact(value):
        pass
    elif isinstance(value, (list, tuple)):
        return _from_list(ints, value, call, name, huge)
    elif PyObject_CheckBuffer(value):
        try:
            PyObject_GetBuffer(value, &ints.view, PyBUF_STRIDES | PyBUF_FORMAT)
        except (BufferError, ValueError) as error:      # a dtype that has no buffer format
            raise TypeError(f"[{call}] {name} must be an array of ints ({error})") from None
        ints.held = True
        if ints.view.ndim > 0:
            return _check_view(ints, call, name, narrow)
    elif not scalar or not hasattr(value, "__index__"):
        raise TypeError(f"[{call}] {name} must be {'an int or ' if scalar else ''}an array of ints, "
                        f"not {type(value).__name__} ({show(value)})")
    if not scalar:
        raise TypeError(f"[{call}] {name} must be an array of ints, not {type(value).__name__} ({show(value)})")
    ints.scalar = to_int(value, call, name, INT64_MIN, INT64_MAX, huge)
    return 0


cdef void ints_free(Ints* ints) noexcept:
    if ints.held:
        PyBuffer_Release(&ints.view)
        ints.held = False
    xfree(ints.owned)
    ints.owned = NULL


cdef object new_int32(Py_ssize_t size):
    return empty(size, INT32)


cdef object new_int64(Py_ssize_t size):
    return empty(size, INT64)


cdef void* array_data(object array) except NULL:
    """Address of a fresh C-contiguous array of ours; it stays valid as long as the array lives."""
    cdef Py_buffer view
    cdef void* data
    PyObject_GetBuffer(array, &view, PyBUF_STRIDES)
    data = view.buf
    PyBuffer_Release(&view)
    if data == NULL:
        raise MemoryError("array without memory")
    return data
