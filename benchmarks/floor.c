/* The floor: what the pool's hot operations cost in plain C, with nothing checked.
 *
 * An array as free stack, int32 refcounts, a persistent padded table. No handles, no generations, no
 * copy-on-write, no fences, no dirty rows, no errors: the distance to kvpool is the price of these and of
 * the call from Python. The loops run here, so that no call from Python is in the floor's numbers.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t num_free;
    int32_t *free_stack;
    int32_t *refcounts;
    int32_t width;       /* blocks per row of the table */
    int32_t block_shift; /* log2(block_size) */
    int32_t *table;      /* [rows, width] */
    int32_t *num_blocks; /* [rows] blocks in each row */
    int32_t *seq_lens;   /* [rows] */
} Floor;

void floor_delete(Floor *pool) {
    if (!pool) return;
    free(pool->free_stack);
    free(pool->refcounts);
    free(pool->table);
    free(pool->num_blocks);
    free(pool->seq_lens);
    free(pool);
}

/* A pool whose free stack hands out `order[0]`, `order[1]`, ...; NULL when memory runs out. */
Floor *floor_new(const int32_t *order, int32_t num_blocks, int32_t rows, int32_t width, int32_t block_shift) {
    Floor *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->num_free = num_blocks;
    pool->width = width;
    pool->block_shift = block_shift;
    pool->free_stack = malloc((size_t)num_blocks * sizeof(int32_t));
    pool->refcounts = calloc((size_t)num_blocks, sizeof(int32_t));
    pool->table = calloc((size_t)rows * width + 1, sizeof(int32_t));
    pool->num_blocks = calloc((size_t)rows + 1, sizeof(int32_t));
    pool->seq_lens = calloc((size_t)rows + 1, sizeof(int32_t));
    if (!pool->free_stack || !pool->refcounts || !pool->table || !pool->num_blocks || !pool->seq_lens) {
        floor_delete(pool);
        return NULL;
    }
    for (int32_t i = 0; i < num_blocks; i++) pool->free_stack[num_blocks - 1 - i] = order[i];
    return pool;
}

static inline int32_t take(Floor *pool) {
    int32_t block = pool->free_stack[--pool->num_free];
    pool->refcounts[block] = 1;
    return block;
}

static inline void drop(Floor *pool, int32_t block) {
    if (--pool->refcounts[block] == 0) pool->free_stack[pool->num_free++] = block;
}

static void floor_alloc(Floor *pool, int32_t *ids, int32_t n) {
    for (int32_t i = 0; i < n; i++) ids[i] = take(pool);
}

static void floor_free(Floor *pool, const int32_t *ids, int32_t n) {
    for (int32_t i = 0; i < n; i++) drop(pool, ids[i]);
}

/* Allocations of `sizes[i]` blocks into consecutive parts of `ids`, then all parts freed in `order`. */
void floor_alloc_free(Floor *pool, int32_t *ids, int32_t num_calls, const int32_t *sizes,
                      const int32_t *starts, const int32_t *order) {
    for (int32_t i = 0; i < num_calls; i++) floor_alloc(pool, ids + starts[i], sizes[i]);
    for (int32_t i = 0; i < num_calls; i++) floor_free(pool, ids + starts[order[i]], sizes[order[i]]);
}

/* Rows 0.. of the given lengths, with the blocks these need. */
void floor_set_lengths(Floor *pool, const int32_t *lengths, int32_t rows) {
    for (int32_t row = 0; row < rows; row++) {
        int32_t *table = pool->table + (size_t)row * pool->width;
        int32_t needed = (lengths[row] + (1 << pool->block_shift) - 1) >> pool->block_shift;
        while (pool->num_blocks[row] < needed) table[pool->num_blocks[row]++] = take(pool);
        pool->seq_lens[row] = lengths[row];
    }
}

/* `num_steps` steps: `num_new` tokens for each of `num_rows` named rows; slot_mapping is [num_rows * num_new].
 * The same call as `Pool.step`: any rows in any order, any number of tokens. */
void floor_steps(Floor *pool, const int32_t *rows, int32_t num_rows, int32_t num_new, int32_t num_steps,
                 int32_t *slot_mapping) {
    const int32_t shift = pool->block_shift, mask = (1 << shift) - 1;
    for (int32_t step = 0; step < num_steps; step++) {
        int32_t *slots = slot_mapping;
        for (int32_t i = 0; i < num_rows; i++) {
            const int32_t row = rows[i];
            int32_t *table = pool->table + (size_t)row * pool->width;
            int32_t len = pool->seq_lens[row];
            for (int32_t t = 0; t < num_new; t++, len++) {
                if ((len & mask) == 0) table[pool->num_blocks[row]++] = take(pool);
                *slots++ = (table[len >> shift] << shift) | (len & mask);
            }
            pool->seq_lens[row] = len;
        }
    }
}

/* `n` forks of row 0 into rows 1..n: every block of the parent gets n more references. */
void floor_fork(Floor *pool, int32_t n) {
    const int32_t count = pool->num_blocks[0];
    for (int32_t i = 0; i < count; i++) pool->refcounts[pool->table[i]] += n;
    for (int32_t child = 1; child <= n; child++) {
        memcpy(pool->table + (size_t)child * pool->width, pool->table, (size_t)count * sizeof(int32_t));
        pool->num_blocks[child] = count;
        pool->seq_lens[child] = pool->seq_lens[0];
    }
}

/* Close rows 1..n. */
void floor_close(Floor *pool, int32_t n) {
    for (int32_t child = 1; child <= n; child++) {
        const int32_t *table = pool->table + (size_t)child * pool->width;
        for (int32_t i = pool->num_blocks[child]; i-- > 0;) drop(pool, table[i]);
        pool->num_blocks[child] = 0;
        pool->seq_lens[child] = 0;
    }
}
