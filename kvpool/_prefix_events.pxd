"""Events of the prefix cache; the layer between `SequencePool` and `PrefixPool`."""
from libc.stdint cimport int32_t, int64_t

from kvpool._prefix cimport Index
from kvpool._sequence_calls cimport SequencePool


cdef class EventPool(SequencePool):
    cdef Index index
    cdef object events          # deque of tuples, or None
    cdef int64_t lost_events
    cdef dict keys              # uid -> content key, with events only
    cdef dict names             # uid of a root -> namespace, with events only

    cdef void publish(self)
    cdef int publish_entry(self, const int32_t* entry) except -1
    cdef void add_event(self, tuple event)
