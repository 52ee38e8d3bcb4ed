/* The yardstick of benchmarks: memory read by the same threads that attend, in pieces as large as their parts. */
#include "isa.h"

#include <stdatomic.h>

enum { READ_PIECE = 1 << 20 };

typedef struct {
    const kv_isa *isa;
    const char *bytes;
    int64_t nbytes;
    _Atomic float sum;
} reading;

static void read_piece(void *context, int64_t item, int thread) {
    reading *run = context;
    const int64_t begin = item * READ_PIECE, left = run->nbytes - begin;
    const float more = run->isa->read_sum(run->bytes + begin, left < READ_PIECE ? left : READ_PIECE);
    float sum = atomic_load(&run->sum);
    (void)thread;
    while (!atomic_compare_exchange_weak(&run->sum, &sum, sum + more)) {}
}

float kv_read_sum(const kv_isa *isa, const char *bytes, int64_t nbytes, int num_threads) {
    reading run = {isa, bytes, nbytes, 0};
    kv_parallel(read_piece, &run, (nbytes + READ_PIECE - 1) / READ_PIECE, num_threads, NULL);
    return run.sum;
}
