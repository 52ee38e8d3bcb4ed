/* Memory of the core in the build of the mutants: what is read or written beside an array ends the process.
 *
 * Each array ends where a page ends that nobody may touch, and one that fills its pages begins behind another; new
 * memory that nobody cleared holds 0xa5, and memory that was given back is gone. The compiler is told to include this
 * before everything else: the macros have arguments, so members of structures keep their names.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { KV_PAGE = 4096 };

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

#define malloc(size) kv_guarded(size, 0xa5)
#define calloc(count, size) kv_cleared(count, size)
#define realloc(data, size) kv_moved(data, size)
#define free(data) kv_give_back(data)
