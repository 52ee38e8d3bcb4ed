"""From verdicts to exceptions: one place that decides how refusals of the core read."""
from kvpool._types cimport Verdict


cdef int refuse(str call, const Verdict* v) except -1
