/* One set of worker threads per process.
 *
 * Not OpenMP: macOS has none, and torch and MLX bring runtimes of their own that fight over the cores. Workers are
 * started when first wanted, wait for the next job spinning for a moment (the layers of a model follow each other
 * closely) and then asleep. Items are handed out one by one, so unequal ones balance. A caller never waits for a worker
 * that is still asleep: what it did not join when the items ran out, it does not join any more.
 */
#include "kvcpu.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { MAX_WORKERS = 1023, SPIN_NANOSECONDS = 50000, ASK_NANOSECONDS = 20000000 };

static struct {
    atomic_flag busy;           /* a call has the workers */
    pthread_mutex_t lock;       /* of everything below that is not atomic */
    pthread_cond_t wake;
    int num_workers, num_asleep;
    atomic_ullong job;          /* number of the latest job; the rest of this struct describes that one */
    kv_work work;
    void *context;
    int64_t num_items;
    int limit, joined;          /* workers allowed (0: the job is over), workers in it */
    _Alignas(64) atomic_llong next;
    _Alignas(64) atomic_int finished;
} pool = {.busy = ATOMIC_FLAG_INIT, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Returns the number of a job that is not `seen`. */
static unsigned long long wait_for_job(unsigned long long seen) {
    const int64_t deadline = nanoseconds() + SPIN_NANOSECONDS;
    do
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(&pool.job, memory_order_acquire) != seen) return atomic_load(&pool.job);
            relax();
        }
    while (nanoseconds() < deadline);
    pthread_mutex_lock(&pool.lock);
    pool.num_asleep++;
    while (atomic_load(&pool.job) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    pool.num_asleep--;
    pthread_mutex_unlock(&pool.lock);
    return atomic_load(&pool.job);
}

static void take_items(kv_work work, void *context, int64_t num_items, int thread) {
    int64_t item;
    while ((item = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed)) < num_items)
        work(context, item, thread);
}

/* The same for a caller, who asks every 20 ms; whoever shares `next` with him ends when he does. */
static int take_and_ask(kv_work work, void *context, atomic_llong *next, int64_t num_items, kv_ask ask) {
    int64_t item, asked = ask == NULL ? 0 : nanoseconds();
    while ((item = atomic_fetch_add_explicit(next, 1, memory_order_relaxed)) < num_items) {
        work(context, item, 0);
        if (ask == NULL || nanoseconds() < asked + ASK_NANOSECONDS) continue;
        if (ask()) {
            atomic_store(next, num_items);
            return 1;
        }
        asked = nanoseconds();
    }
    return 0;
}

static void *worker(void *unused) {
    unsigned long long seen = 0;
    for (;;) {
        seen = wait_for_job(seen);
        pthread_mutex_lock(&pool.lock);
        const int thread = pool.joined < pool.limit ? ++pool.joined : 0;
        const kv_work work = pool.work;
        void *const context = pool.context;
        const int64_t num_items = pool.num_items;
        pthread_mutex_unlock(&pool.lock);
        if (thread == 0) continue;
        take_items(work, context, num_items, thread);
        atomic_fetch_add_explicit(&pool.finished, 1, memory_order_release);
    }
    return unused;
}

/* A forked child has the memory of the workers, not the workers. */
static void forget_workers(void) {
    atomic_flag_clear(&pool.busy);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.num_workers = pool.num_asleep = pool.limit = pool.joined = 0;
    atomic_store(&pool.job, 0);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

/* Called with `busy` held. Where the system refuses more threads, there are fewer. */
static void start_workers(int wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    while (pool.num_workers < wanted && pool.num_workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL) != 0) return;
        pthread_detach(thread);
        pool.num_workers++;
    }
}

int kv_parallel(kv_work work, void *context, int64_t num_items, int num_threads, kv_ask ask) {
    if (num_threads > num_items) num_threads = (int)num_items;
    if (num_threads <= 1 || atomic_flag_test_and_set_explicit(&pool.busy, memory_order_acquire)) {
        atomic_llong next;
        atomic_init(&next, 0);
        return take_and_ask(work, context, &next, num_items, ask);
    }
    start_workers(num_threads - 1);
    pthread_mutex_lock(&pool.lock);
    pool.work = work;
    pool.context = context;
    pool.num_items = num_items;
    pool.limit = num_threads - 1;
    pool.joined = 0;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.finished, 0);
    atomic_fetch_add_explicit(&pool.job, 1, memory_order_release);
    if (pool.num_asleep > 0) pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);

    const int is_stopped = take_and_ask(work, context, &pool.next, num_items, ask);

    pthread_mutex_lock(&pool.lock);
    pool.limit = 0;
    const int joined = pool.joined;
    pthread_mutex_unlock(&pool.lock);
    for (int spins = 0; atomic_load_explicit(&pool.finished, memory_order_acquire) < joined; spins++)
        if (spins < 10000) relax();
        else sched_yield(); /* a worker has lost its core in the middle of an item */
    atomic_flag_clear_explicit(&pool.busy, memory_order_release);
    return is_stopped;
}
