/* A tile: some consecutive tokens of one row's context, found by the block table. Block sizes need no code of their
 * own: a tile is a list of pointers, made block by block.
 */
enum {
    TILE = 32, /* tokens: a head's K and V of a tile stay in L1 */
    ROOM = TILE + 16, /* floats from one lane's scores to the next: those of a few tokens more are computed, not used */
    LINE = 64, /* bytes of a cache line */
};

/* Floats that fill cache lines. */
static int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

typedef struct {
    float **array;
    int64_t floats;
} kv_need;

/* Cuts a scratch into arrays, and returns the floats that they take. `scratch` NULL: only counts. */
static int64_t carve(const kv_need *needs, size_t count, float *scratch) {
    int64_t used = 0;
    for (size_t i = 0; i < count; i++) {
        if (scratch) *needs[i].array = scratch + used;
        used += whole_lines(needs[i].floats);
    }
    return used;
}

typedef struct {
    int64_t first, count;               /* tokens [first, first + count), count <= TILE */
    const char *k[TILE + 4], *v[TILE + 4]; /* of head 0; filled up with the last one */
} kv_tile;

static void tile_find(kv_tile *tile, const kv_attention *call, int64_t row, int64_t first, int64_t end) {
    const kv_layer *layer = call->layer;
    const int32_t *table = call->tables + row * call->table_stride;
    const int64_t k_size = kv_itemsize(kv_stored(layer, &layer->k)), block_size = layer->block_size;
    const int64_t v_size = kv_itemsize(kv_stored(layer, &layer->v));
    const int64_t k_step = layer->k.slot_stride * k_size, v_step = layer->v.slot_stride * v_size;
    int64_t index = first / block_size, slot = first % block_size, found = 0;
    tile->first = first;
    tile->count = end - first < TILE ? end - first : TILE;
    for (; found < tile->count; index++, slot = 0) {
        const int64_t left = tile->count - found, count = block_size - slot < left ? block_size - slot : left;
        const char *k = layer->k.base + table[index] * layer->k.block_stride * k_size + slot * k_step;
        const char *v = layer->v.base + table[index] * layer->v.block_stride * v_size + slot * v_step;
        for (int64_t i = 0; i < count; i++, found++) {
            tile->k[found] = k + i * k_step;
            tile->v[found] = v + i * v_step;
        }
    }
    for (; found < TILE + 4; found++) {
        tile->k[found] = tile->k[found - 1];
        tile->v[found] = tile->v[found - 1];
    }
}
