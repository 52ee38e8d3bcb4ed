"""The arguments of `BlockStore.attend`: from arrays of any kind to the struct that kernels take."""
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int32_t, int64_t

from kvpool_backends.cpu._arguments cimport Arguments
from kvpool_backends.cpu.kvcpu cimport kv_attention, kv_tokens


cdef struct Inputs:
    const Py_buffer* tables
    const Py_buffer* seq_lens
    const Py_buffer* cu_q_lens
    const Py_buffer* sinks              # NULL where there are none
    const Py_buffer* slopes
    const Py_buffer* mask
    const Py_buffer* scores


cdef int take_inputs(Inputs* inputs, kv_attention* call, Arguments arguments, object block_tables, object seq_lens,
                     object cu_q_lens, object scale, object options) except -1
cdef int take_scores(Inputs* inputs, kv_attention* call, Arguments arguments, object kind, object out) except -1
cdef int64_t lists_nbytes(const Inputs* inputs, const kv_attention* call) noexcept
cdef int read_inputs(const Inputs* inputs, kv_attention* call, char* lists) except -1
cdef int64_t tables_nbytes(kv_attention* call) noexcept
cdef int read_tables(const Py_buffer* view, kv_attention* call, int32_t* out) except -1
cdef const Py_buffer* take_tokens(kv_tokens* tokens, Arguments arguments, object value, str name, int64_t num_tokens,
                                  int64_t num_heads, int64_t dim) except NULL
cdef int raise_from_handler() except -1
