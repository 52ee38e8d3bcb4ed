/* A tile: some consecutive tokens of one row's context, found by the block table, and the stream of cache lines that
 * fetches a tile's K or V ahead of use. Block sizes need no code of their own: a tile is a list of runs inside blocks.
 */
enum { TILE = 64, LINE = 64 };

typedef struct {
    int64_t first, count;                                               /* tokens [first, first + count), count <= TILE */
    int64_t num_runs;
    struct { int64_t block, slot, count; } runs[TILE];
    const char *k[TILE], *v[TILE];                                      /* of head 0; k repeats its last to a multiple of 4 */
} kv_tile;

static void tile_find(kv_tile *tile, const kv_attention *call, int64_t row, int64_t first, int64_t end) {
    const kv_layer *layer = call->layer;
    const int32_t *table = call->tables + row * call->table_stride;
    const int64_t size = kv_itemsize(layer->dtype), block_size = layer->block_size;
    tile->first = first;
    tile->count = end - first < TILE ? end - first : TILE;
    tile->num_runs = 0;
    int64_t index = first / block_size, slot = first % block_size, found = 0;
    for (; found < tile->count; index++, slot = 0) {
        const int64_t left = tile->count - found, block = table[index];
        const int64_t count = block_size - slot < left ? block_size - slot : left;
        const char *k = layer->k.base + (block * layer->k.block_stride + slot * layer->k.slot_stride) * size;
        const char *v = layer->v.base + (block * layer->v.block_stride + slot * layer->v.slot_stride) * size;
        tile->runs[tile->num_runs].block = block;
        tile->runs[tile->num_runs].slot = slot;
        tile->runs[tile->num_runs++].count = count;
        for (int64_t i = 0; i < count; i++, found++) {
            tile->k[found] = k + i * layer->k.slot_stride * size;
            tile->v[found] = v + i * layer->v.slot_stride * size;
        }
    }
    for (; found % 4 != 0; found++) tile->k[found] = tile->k[found - 1];
}

/* -------- the stream -------- */

/* Whether a token's heads, or a head's tokens, lie one after the other. */
static int is_token_major(const kv_layer *layer, const kv_plane *plane) {
    return plane->head_stride == plane->dim && plane->slot_stride == plane->dim * layer->num_kv_heads;
}
static int is_head_major(const kv_plane *plane) { return plane->slot_stride == plane->dim; }

/* Cache lines of one plane of one tile, in the order of their use. */
typedef struct {
    const char *at, *end;       /* of the current piece of memory */
    const kv_tile *tile;
    const kv_plane *plane;
    int64_t size, run, head, num_heads; /* the next piece; num_heads: 1 when a piece has all heads, 0: nothing to fetch */
} kv_stream;

static kv_stream stream_of(const kv_layer *layer, const kv_plane *plane, const kv_tile *tile) {
    kv_stream stream = {0};
    stream.tile = tile;
    stream.plane = plane;
    stream.size = kv_itemsize(layer->dtype);
    if (is_token_major(layer, plane)) stream.num_heads = 1;
    else if (is_head_major(plane)) stream.num_heads = layer->num_kv_heads;
    return stream;
}

static int stream_next_piece(kv_stream *stream) {
    const kv_tile *tile = stream->tile;
    const kv_plane *plane = stream->plane;
    if (stream->head >= stream->num_heads) return 0;
    const int64_t start = tile->runs[stream->run].block * plane->block_stride +
                          tile->runs[stream->run].slot * plane->slot_stride + stream->head * plane->head_stride;
    stream->at = plane->base + start * stream->size;
    stream->end = stream->at + tile->runs[stream->run].count * plane->slot_stride * stream->size;
    if (++stream->run == tile->num_runs) stream->run = 0, stream->head++;
    return 1;
}

/* Asks for the next `lines` cache lines. */
KV_INLINE void stream_fetch(kv_stream *stream, int64_t lines) {
    for (; lines > 0; lines--) {
        if (stream->at >= stream->end && !stream_next_piece(stream)) return;
        __builtin_prefetch(stream->at, 0, KV_HINT);
        stream->at += LINE;
    }
}
