"""The lock of a pool, and what a fork does to it.

A thread that waits releases the GIL, sleeps until the lock is free, gives the lock back, takes the GIL, and tries
again. So nobody waits for the GIL with a lock in hand. No Python code runs under the lock, so its holder always gets
to the end. A fork takes the locks of all pools: the child finds each pool between two calls, and every lock free.
"""

cdef extern from *:
    """
    #include <pthread.h>
    #include <stdint.h>
    typedef struct kv_lock {
        pthread_mutex_t mutex;
        uintptr_t owner;            /* the thread that holds it, 0: nobody */
        struct kv_lock *next;       /* of all locks */
    } kv_lock;
    #ifdef KVPOOL_NO_LOCK           /* a control for the race detector: the lock that does nothing */
    static inline int kv_lock_try(kv_lock *lock) { (void)lock; return 1; }
    static inline void kv_lock_release(kv_lock *lock) { (void)lock; }
    #else
    static inline int kv_lock_try(kv_lock *lock) {
        if (pthread_mutex_trylock(&lock->mutex) != 0) return 0;
        __atomic_store_n(&lock->owner, (uintptr_t)pthread_self(), __ATOMIC_RELAXED);
        return 1;
    }
    static inline void kv_lock_release(kv_lock *lock) {
        __atomic_store_n(&lock->owner, 0, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&lock->mutex);
    }
    #endif
    """
    ctypedef struct Lock "kv_lock":
        pass
    bint lock_try "kv_lock_try"(Lock* lock) noexcept nogil
    void lock_release "kv_lock_release"(Lock* lock) noexcept nogil


cdef unsigned current_process() noexcept nogil
