/* The yardstick of benchmarks: memory read by the same threads that attend, in pieces as large as their parts. */
#include "isa.h"

#include <stdatomic.h>

enum { READ_PIECE = 1 << 20 };

typedef struct {
    const kv_isa *isa;
    const char *const *ranges;
    const int64_t *nbytes;
    int64_t num_ranges;
    _Atomic float sum;
} reading;

static void read_piece(void *context, int64_t item, int thread) {
    reading *run = context;
    int64_t range = 0, piece = item;
    (void)thread;
    for (; range < run->num_ranges; range++) {
        const int64_t pieces = (run->nbytes[range] + READ_PIECE - 1) / READ_PIECE;
        if (piece < pieces) break;
        piece -= pieces;
    }
    const int64_t left = run->nbytes[range] - piece * READ_PIECE;
    const float more = run->isa->read_sum(run->ranges[range] + piece * READ_PIECE,
                                          left < READ_PIECE ? left : READ_PIECE);
    float sum = atomic_load(&run->sum);
    while (!atomic_compare_exchange_weak(&run->sum, &sum, sum + more)) {}
}

float kv_read_sum(const kv_isa *isa, const char *const *ranges, const int64_t *nbytes, int64_t num_ranges,
                  int num_threads) {
    reading run = {isa, ranges, nbytes, num_ranges, 0};
    int64_t pieces = 0;
    for (int64_t i = 0; i < num_ranges; i++) pieces += (nbytes[i] + READ_PIECE - 1) / READ_PIECE;
    kv_parallel(read_piece, &run, pieces, num_threads, NULL);
    return run.sum;
}
