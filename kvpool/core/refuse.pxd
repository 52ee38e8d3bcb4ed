"""From verdicts to exceptions: one place that decides how refusals of the core read."""


cdef int refuse(str call, const Verdict* v) except -1
