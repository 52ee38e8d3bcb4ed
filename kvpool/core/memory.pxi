"""Where all memory of the core comes from: libc's functions, which a build with KVPOOL_FAULTS counts and makes fail."""

cdef extern from *:
    """
    #ifdef KVPOOL_FAULTS
    #define KV_FAULTS 1
    #else
    #define KV_FAULTS 0
    #endif
    """
    const bint FAULTS "KV_FAULTS"       # a constant: without faults the compiler leaves plain calls of libc

cdef int64_t num_made = 0       # allocations since the last `fail_at`
cdef int64_t num_living = 0     # blocks of memory that were not given back yet
cdef int64_t first_failing = 0  # number of the allocation that fails, 0: none
cdef int64_t last_failing = 0


cdef bint must_fail() noexcept nogil:
    """Count an allocation; whether it has to fail."""
    global num_made, num_living
    num_made += 1
    if first_failing <= num_made <= last_failing:
        return True
    num_living += 1
    return False


cdef void given_back() noexcept nogil:
    global num_living
    num_living -= 1


cdef inline void* xmalloc(size_t size) noexcept nogil:
    if FAULTS and must_fail():
        return NULL
    return malloc(size)


cdef inline void* xcalloc(size_t count, size_t size) noexcept nogil:
    if FAULTS and must_fail():
        return NULL
    return calloc(count, size)


cdef inline void* xrealloc(void* memory, size_t size) noexcept nogil:
    """Like the others: `memory` stays as it was when there is none."""
    if FAULTS:
        if must_fail():
            return NULL
        if memory != NULL:
            given_back()                 # one block before, one after
    return realloc(memory, size)


cdef inline void xfree(void* memory) noexcept nogil:
    if FAULTS and memory != NULL:
        given_back()
    free(memory)


def can_fail():
    """Whether this build makes allocations fail on demand."""
    return bool(FAULTS)


def fail_at(int64_t number, bint sticky=False):
    """Count from zero; the allocation `number` (1, 2, ...; 0: none) fails, with `sticky` every later one too."""
    global num_made, first_failing, last_failing
    if not FAULTS:
        raise RuntimeError("[fail_at] this build was compiled without KVPOOL_FAULTS")
    num_made = 0
    first_failing = number if number > 0 else INT64_MAX
    last_failing = 0 if number <= 0 else INT64_MAX if sticky else number


def allocations():
    """(allocations since the last `fail_at`, blocks of memory in use now)."""
    return num_made, num_living
