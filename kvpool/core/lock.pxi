"""The lock of a pool, and what all pools of a process share: the list of their locks, and their tags."""

cdef extern from *:
    """
    static pthread_mutex_t kv_all = PTHREAD_MUTEX_INITIALIZER;   /* of what stands below */
    static kv_lock *kv_first = NULL;
    static unsigned kv_process = 1;                             /* another number in every forked child */
    enum { KV_TAGS = 2047 };
    #define KV_LAST_START (1LL << 31)                           /* half of the generations are left for a new pool */
    /* the first generation that no pool with the tag has given out; INT64_MAX: a live pool has it */
    static int64_t kv_tag_fresh[KV_TAGS + 1];
    static int kv_last_tag = 0;

    static void kv_before_fork(void) {
        pthread_mutex_lock(&kv_all);
        for (kv_lock *lock = kv_first; lock != NULL; lock = lock->next) pthread_mutex_lock(&lock->mutex);
    }
    static void kv_after_fork(void) {
        for (kv_lock *lock = kv_first; lock != NULL; lock = lock->next) pthread_mutex_unlock(&lock->mutex);
        pthread_mutex_unlock(&kv_all);
    }
    static void kv_in_child(void) {
        kv_process++;
        kv_after_fork();
    }
    static int kv_watch_forks(void) { return pthread_atfork(kv_before_fork, kv_after_fork, kv_in_child); }

    static void kv_lock_init(kv_lock *lock) {
        pthread_mutex_init(&lock->mutex, NULL);
        lock->owner = 0;
        pthread_mutex_lock(&kv_all);
        lock->next = kv_first;
        kv_first = lock;
        pthread_mutex_unlock(&kv_all);
    }
    static void kv_lock_destroy(kv_lock *lock) {
        kv_lock **at = &kv_first;
        pthread_mutex_lock(&kv_all);
        while (*at != NULL && *at != lock) at = &(*at)->next;
        if (*at != NULL) {          /* else its pool was never made */
            *at = lock->next;
            pthread_mutex_destroy(&lock->mutex);
        }
        pthread_mutex_unlock(&kv_all);
    }
    static int kv_lock_is_mine(kv_lock *lock) {
        return __atomic_load_n(&lock->owner, __ATOMIC_RELAXED) == (uintptr_t)pthread_self();
    }
    static void kv_lock_until_free(kv_lock *lock) {
        pthread_mutex_lock(&lock->mutex);
        pthread_mutex_unlock(&lock->mutex);
    }
    /* A tag that no live pool has, 0: none; and where its generations begin, behind those that dead pools gave out.
       Round robin: handles of a dead pool stay foreign for long. */
    static int kv_tag_take(int64_t *generation) {
        int found = 0;
        pthread_mutex_lock(&kv_all);
        for (int k = 0; k < KV_TAGS && !found; k++) {
            int tag = (kv_last_tag + k) % KV_TAGS + 1;
            if (kv_tag_fresh[tag] <= KV_LAST_START) found = tag;
        }
        if (found) {
            *generation = kv_tag_fresh[found];
            kv_tag_fresh[found] = INT64_MAX;
            kv_last_tag = found;
        }
        pthread_mutex_unlock(&kv_all);
        return found;
    }
    /* `fresh`: the first generation that was not given out. */
    static void kv_tag_give_back(int64_t tag, int64_t fresh) {
        pthread_mutex_lock(&kv_all);
        kv_tag_fresh[tag] = fresh;
        pthread_mutex_unlock(&kv_all);
    }
    """
    int watch_forks "kv_watch_forks"()
    void lock_init "kv_lock_init"(Lock* lock) noexcept
    void lock_free "kv_lock_destroy"(Lock* lock) noexcept
    bint lock_is_mine "kv_lock_is_mine"(Lock* lock) noexcept
    void lock_until_free "kv_lock_until_free"(Lock* lock) noexcept nogil
    int tag_take "kv_tag_take"(int64_t* generation) noexcept nogil
    void tag_give_back "kv_tag_give_back"(int64_t tag, int64_t fresh) noexcept nogil
    unsigned this_process "kv_process"

cdef enum:
    TRIES = 100                 # before a thread sleeps: most calls hold the lock for less than a microsecond

if watch_forks() != 0:
    raise MemoryError("[kvpool] no memory to watch forks of this process")


cdef bint lock_wait(Lock* lock) noexcept:
    """Take a lock that another thread holds; False: it is this very thread, which would wait for ever."""
    cdef int i
    if lock_is_mine(lock):
        return False
    while True:
        for i in range(TRIES):
            if lock_try(lock):
                return True
        with nogil:
            lock_until_free(lock)


cdef unsigned current_process() noexcept nogil:
    return this_process
