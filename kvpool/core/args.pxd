"""From Python arguments to C integers: one place that decides what is accepted and how refusals read."""

cdef enum:
    SMALL = 16                  # integers that an argument holds without memory of its own
    SPARES = 2


cdef struct Spare:              # memory that the arguments of the next call will use, so that a call asks for none
    void* memory[SPARES]


cdef struct Ints:
    # A copy of a batch of integers that came as one int, a list or tuple, or a 1-D int32 / int64 buffer.
    int64_t scalar
    const void* data            # NULL: every element is `scalar`
    Py_ssize_t size             # -1: a scalar for any number of rows
    int width                   # bytes per element: 4 or 8
    Spare* spare                # where `owned` comes from
    void* owned                 # NULL: `small` has them
    int64_t[SMALL] small


cdef int64_t to_int(object value, str call, str name, int64_t low, int64_t high, type huge=*) except? -1
cdef int ints_copy(Ints* ints, const void* data, Py_ssize_t size, int width, str call, str name) except -1
cdef int ints_tokens(Ints* tokens, str call) except -1
cdef void ints_free(Ints* ints) noexcept nogil


cdef inline void ints_init(Ints* ints, Spare* spare) noexcept nogil:
    """Nothing read yet: one for every row, which some calls have as their default."""
    ints.scalar = 1
    ints.data = NULL
    ints.size = -1
    ints.width = 8
    ints.spare = spare
    ints.owned = NULL
