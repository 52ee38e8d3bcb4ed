"""An engine outside of kvpool that holds a pool and a plan as typed attributes."""

from kvpool cimport Plan, Pool


cdef class Engine:
    cdef Pool pool
    cdef Plan plan

    def __cinit__(self, Pool pool, Plan plan):
        self.pool = pool
        self.plan = plan

    def decode(self, handles):
        """Make one step; return the lengths after it."""
        self.pool.step(self.plan, handles, 1)
        return self.plan.seq_lens.tolist()
