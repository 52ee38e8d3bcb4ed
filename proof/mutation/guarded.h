/* Memory and locks of the core in the build of the mutants. What is read or written beside an array ends the process,
 * and so does the unlocking of a lock that nobody holds.
 *
 * Each array ends where a page ends that nobody may touch, and one that fills its pages begins behind another; new
 * memory that nobody cleared holds 0xa5, and memory that was given back is gone. The compiler is told to include this
 * before everything else: the macros have arguments, so members of structures keep their names.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { KV_PAGE = 4096 };
static long kv_live __attribute__((unused)); /* arrays that this module made, without those that it gave back */

/* A page with the size, a page that nobody may touch, the array, a page that nobody may touch. */
static inline void *kv_guarded(size_t size, int byte) {
    size_t wanted = size ? size : 1;
    size_t inside = (wanted + KV_PAGE - 1) / KV_PAGE * KV_PAGE;
    char *base, *data;
    if (size > PTRDIFF_MAX)
        return NULL;
    base = (char *)mmap(NULL, inside + 3 * KV_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == (char *)MAP_FAILED)
        return NULL;
    if (mprotect(base, KV_PAGE, PROT_READ | PROT_WRITE) ||
        mprotect(base + 2 * KV_PAGE, inside, PROT_READ | PROT_WRITE)) {
        munmap(base, inside + 3 * KV_PAGE);
        return NULL;
    }
    kv_live++;
    *(size_t *)base = wanted;
    data = base + 2 * KV_PAGE + inside - wanted;
    if (byte)
        memset(data, byte, wanted);
    return data;
}

static inline char *kv_base(void *data) {
    return (char *)((uintptr_t)data / KV_PAGE * KV_PAGE) - 2 * KV_PAGE;
}

static inline void kv_give_back(void *data) {
    if (data != NULL) {
        size_t size = *(size_t *)kv_base(data);
        kv_live--;
        munmap(kv_base(data), (size + KV_PAGE - 1) / KV_PAGE * KV_PAGE + 3 * KV_PAGE);
    }
}

static inline void *kv_cleared(size_t count, size_t size) {
    return size && count > PTRDIFF_MAX / size ? NULL : kv_guarded(count * size, 0);
}

static inline void *kv_moved(void *data, size_t size) {
    void *made = kv_guarded(size, 0xa5);
    if (made != NULL && data != NULL) {
        size_t before = *(size_t *)kv_base(data);
        memcpy(made, data, before < size ? before : size);
        kv_give_back(data);
    }
    return made;
}

/* glibc keeps the state of a mutex in its first word: 0 where it is free. */
static inline int kv_unlock(pthread_mutex_t *mutex) {
    if (*(volatile int *)mutex == 0)
        abort();
    return pthread_mutex_unlock(mutex);
}

#define pthread_mutex_unlock(mutex) kv_unlock(mutex)
#define malloc(size) kv_guarded(size, 0xa5)
#define calloc(count, size) kv_cleared(count, size)
#define realloc(data, size) kv_moved(data, size)
#define free(data) kv_give_back(data)
