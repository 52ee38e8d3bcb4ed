"""`cimport kvpool`: types for attributes and arguments. The inside of a pool is not an interface."""

cdef extern from "Python.h":
    ctypedef class kvpool._core.Pool [object PyObject, check_size ignore]:
        pass

    ctypedef class kvpool._core.Plan [object PyObject, check_size ignore]:
        pass
