"""Everything that the fuzzer reads of a pool with layer groups."""
from libc.stdint cimport int32_t

from kvpool._core cimport Pool
from proof.fuzz._books_groups cimport GroupBooks
from proof.fuzz._content_groups cimport Shown
from proof.fuzz._storage cimport Finding

cdef int compare_groups(Pool pool, const GroupBooks* gb, Finding* f) noexcept
cdef int read_arrays(object groups, const GroupBooks* gb, int32_t k, Shown* shown) except -1
cdef int compare_arrays(const GroupBooks* gb, int32_t k, const Shown* shown, int32_t rows, Finding* f) noexcept
