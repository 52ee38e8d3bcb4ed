"""The lock of a pool, and what all pools of a process share: the list of their locks, and their tags."""

cdef extern from *:
    """
    static pthread_mutex_t kv_all = PTHREAD_MUTEX_INITIALIZER;   /* of what stands below */
    static kv_lock *kv_first = NULL;
    static unsigned kv_process = 1;                             /* another number in every forked child */
    enum { KV_TAGS = 2047 };
    #define KV_LAST_START (1LL << 31)                           /* half of the generations are left for a new pool */
    static unsigned char kv_tag_used[KV_TAGS + 1];
    static long long kv_tag_fresh[KV_TAGS + 1];     /* the first generation that no pool with the tag has given out */
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
        lock->made = 1;
        pthread_mutex_lock(&kv_all);
        lock->prev = NULL;
        lock->next = kv_first;
        if (kv_first != NULL) kv_first->prev = lock;
        kv_first = lock;
        pthread_mutex_unlock(&kv_all);
    }
    static void kv_lock_destroy(kv_lock *lock) {
        if (!lock->made) return;    /* its pool was never made */
        pthread_mutex_lock(&kv_all);
        if (lock->prev != NULL) lock->prev->next = lock->next;
        else kv_first = lock->next;
        if (lock->next != NULL) lock->next->prev = lock->prev;
        pthread_mutex_unlock(&kv_all);
        pthread_mutex_destroy(&lock->mutex);
    }
    static int kv_lock_is_mine(kv_lock *lock) {
        return __atomic_load_n(&lock->owner, __ATOMIC_RELAXED) == (uintptr_t)pthread_self();
    }
    static void kv_lock_until_free(kv_lock *lock) {
        pthread_mutex_lock(&lock->mutex);
        pthread_mutex_unlock(&lock->mutex);
    }
    static int kv_tag_take(long long *generation) {     /* round robin: handles of a dead pool stay foreign for long */
        int found = 0;
        pthread_mutex_lock(&kv_all);
        for (int k = 0; k < KV_TAGS && !found; k++) {
            int tag = (kv_last_tag + k) % KV_TAGS + 1;
            if (!kv_tag_used[tag] && kv_tag_fresh[tag] <= KV_LAST_START) found = tag;
        }
        if (found) {
            *generation = kv_tag_fresh[found];
            kv_tag_used[found] = 1;
            kv_last_tag = found;
        }
        pthread_mutex_unlock(&kv_all);
        return found;
    }
    static void kv_tag_give_back(int tag, long long fresh) {
        pthread_mutex_lock(&kv_all);
        kv_tag_used[tag] = 0;
        if (fresh > kv_tag_fresh[tag]) kv_tag_fresh[tag] = fresh;
        pthread_mutex_unlock(&kv_all);
    }
    static unsigned kv_current_process(void) { return kv_process; }
    """
    int watch_forks "kv_watch_forks"()
    void c_lock_init "kv_lock_init"(Lock* lock) noexcept
    void c_lock_destroy "kv_lock_destroy"(Lock* lock) noexcept
    bint c_lock_is_mine "kv_lock_is_mine"(Lock* lock) noexcept
    void c_lock_until_free "kv_lock_until_free"(Lock* lock) noexcept nogil
    int c_tag_take "kv_tag_take"(long long* generation) noexcept nogil
    void c_tag_give_back "kv_tag_give_back"(int tag, long long fresh) noexcept nogil
    unsigned c_current_process "kv_current_process"() noexcept nogil

cdef enum:
    TRIES = 100                 # before a thread sleeps: most calls hold the lock for less than a microsecond

if watch_forks() != 0:
    raise MemoryError("[kvpool] no memory to watch forks of this process")


cdef void lock_init(Lock* lock) noexcept:
    c_lock_init(lock)


cdef void lock_free(Lock* lock) noexcept:
    c_lock_destroy(lock)


cdef bint lock_wait(Lock* lock) noexcept:
    """Take a lock that another thread holds; False: it is this very thread, which would wait for ever."""
    cdef int tries = 0
    if c_lock_is_mine(lock):
        return False
    while not lock_try(lock):
        tries += 1
        if tries >= TRIES:
            with nogil:
                c_lock_until_free(lock)
            tries = 0
    return True


cdef unsigned current_process() noexcept nogil:
    return c_current_process()


cdef int64_t tag_take(int64_t* generation) noexcept nogil:
    """A tag that no live pool has, 0: none; and where its generations begin, behind those that dead pools gave out."""
    cdef long long first = 0
    cdef int tag = c_tag_take(&first)
    generation[0] = first
    return tag


cdef void tag_give_back(int64_t tag, int64_t fresh) noexcept nogil:
    """`fresh`: the first generation that was not given out."""
    c_tag_give_back(<int>tag, fresh)
