"""`Plan`. Other extension modules may hold one, but not reach into it."""


cdef class _Memory:             # of an array, which owns nothing and so cannot be resized
    cdef char* data
    cdef Py_ssize_t size
    cdef bint writable


cdef enum:
    COMMON_ARRAYS = -1          # PlanGroup.kind: it has what is common to all layer groups


cdef class PlanGroup:           # what a plan has for one layer group; it keeps its memory, the plan keeps it
    cdef StepPart data
    cdef int kind
    cdef int32_t columns
    cdef int64_t num_slots      # of its arena
    cdef int64_t tokens         # that the arrays hold
    cdef dict arrays            # name -> (whole array, what keeps its memory in place)
    cdef dict views             # (name, whether without columns) -> (length, view)

    cdef int init(self, const LayerGroup* group, int64_t rows, int64_t tokens, int64_t table_tokens,
                  int32_t bundle) except -1
    cdef int init_common(self, int64_t rows, int64_t tokens) except -1
    cdef void* add(self, str name, object shape, bint writable, object dtype=*) except NULL
    cdef Field* field_of(self, str name) except NULL
    cdef bint has(self, str name) except -1
    cdef tuple whole_shape(self, str name)
    cdef int check_width(self, str name, int width) except -1
    cdef int room_for_copies(self, State* pool, int64_t copies) except -1
    cdef dict arrays_now(self)
    cdef object view(self, str name, int64_t length, bint flat=*)


cdef class Plan:
    cdef readonly Pool pool
    cdef Step step
    cdef PlanGroup common
    cdef Field* field                   # [NUM_FIELDS] its arrays
    cdef uint8_t* served_               # [max_rows]
    cdef int64_t max_tokens_
    cdef int64_t seq_limit              # the length that no sequence may pass
    cdef int64_t table_blocks           # of the pool, for which the tables of all groups have room
    cdef int32_t table_width            # blocks of the pool
    cdef int32_t shown_rows
    cdef int64_t shown_tokens
    cdef int32_t rows
    cdef int64_t tokens
    cdef int64_t changes        # of the arrays: two threads may bind at a time
    cdef tuple names
    cdef tuple group_plans      # a PlanGroup for each layer group
    cdef tuple parts            # and what is common before them
    cdef StepPart* part[MAX_GROUPS]     # theirs
    cdef object __weakref__

    cdef int refuse_pending(self, str call) except -1
    cdef int64_t number_of_step(self, str call) except -1
    cdef int refuse_rows(self, int64_t rows, str call) except -1
    cdef int refuse(self, const Verdict* v, str call, int64_t pad_tokens) except -1
    cdef object view(self, str name, int64_t length)
    cdef int make_groups(self) except -1
    cdef int declare(self, object formats, object dtype, object pad, object out) except -1
    cdef int define(self, str name, int width, int64_t pad) except -1
    cdef list owners(self, str name)
    cdef int attach(self, dict arrays, str call) except -1
    cdef int show_arrays(self, dict bound) except -1
    cdef int exchange_arrays(self, void** data, int64_t seen, Verdict* v) noexcept nogil
    cdef int get_pad(self, object pad_to, str call, int64_t num_rows, int64_t* rows, int64_t* tokens) except -1
