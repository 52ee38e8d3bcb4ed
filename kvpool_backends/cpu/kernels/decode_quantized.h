/* Decode on quantized planes: the numbers are multiplied as they are, their scales and biases come in once per group.
 *
 * q . k over a group is scale * sum(q_i n_i) + bias * sum(q_i), a weight times a value is (w * scale) n_i + w * bias:
 * no vector is ever dequantized. For that the scales and biases of a tile are laid out as floats first, group by group
 * with the tokens side by side.
 */
typedef float v4 __attribute__((vector_size(16)));

/* A group is few vectors where vectors are long: there its sums across lanes would cost more than a product for each
 * vector of numbers, which all queries share. */
enum { SCALE_NUMBERS = VL >= 16 };

KV_INLINE v4 v4_load(const float *p) { v4 x; memcpy(&x, p, sizeof x); return x; }

/* -------- scales and biases of a tile -------- */

/* `count` tokens of a head without gaps, [count][groups] with groups <= 4, to [groups][TILE]. */
KV_COPIES void lay_out_head(kv_dtype dtype, const char *from, const int groups, int64_t count, float *to) {
    const int64_t size = kv_itemsize(dtype);
    for (int64_t t = 0; t < count; t += VL) {
        const int64_t tokens = count - t < VL ? count - t : VL, length = tokens * groups;
        float some[4 * VL];
        for (int64_t i = 0; i < length; i += VL, from += VL * size)
            v_store(some + i, length - i < VL ? v_load_n_as(dtype, from, length - i) : v_load_as(dtype, from));
        for (int g = 0; g < groups; g++)
            if (tokens == VL) /* of a constant length: shuffled in registers */
                for (int j = 0; j < VL; j++) to[g * TILE + t + j] = some[j * groups + g];
            else
                for (int64_t j = 0; j < tokens; j++) to[g * TILE + t + j] = some[j * groups + g];
    }
}

/* Lines of `length` floats, a multiple of VL, of four tokens `step` bytes apart, to [length][TILE]. */
KV_INLINE void lay_out_four(kv_dtype dtype, const char *from, int64_t step, int64_t length, float *to) {
    for (int64_t i = 0; i < length; i += VL, from += VL * kv_itemsize(dtype)) {
        float some[4][VL];
        for (int t = 0; t < 4; t++) v_store(some[t], v_load_as(dtype, from + t * step));
        for (int j = 0; j < VL; j += 4, to += 4 * TILE) {
            const v4 a = v4_load(some[0] + j), b = v4_load(some[1] + j);
            const v4 c = v4_load(some[2] + j), d = v4_load(some[3] + j);
            const v4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            const v4 ba = __builtin_shufflevector(a, b, 2, 6, 3, 7), dc = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            const v4 columns[4] = {
                __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                __builtin_shufflevector(ba, dc, 0, 1, 4, 5), __builtin_shufflevector(ba, dc, 2, 3, 6, 7),
            };
            for (int k = 0; k < 4; k++) memcpy(to + k * TILE, &columns[k], sizeof columns[k]);
        }
    }
}

/* Of consecutive tokens [slot, slot + count) of a block, to [heads * groups][TILE] from token `at` of the tile on. */
KV_COPIES void lay_out_as(kv_dtype dtype, const kv_layer *layer, const kv_part *part, int64_t groups, int64_t block,
                          int64_t slot, int64_t count, int64_t at, float *out) {
    const int64_t heads = layer->num_kv_heads, size = kv_itemsize(dtype);
    const char *from = part->base + (block * part->block_stride + slot * part->slot_stride) * size;
    const int is_head_major = part->slot_stride == groups, is_token_major = part->head_stride == groups;
    if (is_head_major && (groups == 1 || groups == 2 || groups == 4)) {
        for (int64_t head = 0; head < heads; head++, from += part->head_stride * size) {
            float *to = out + head * groups * TILE + at;
            if (groups == 1) lay_out_head(dtype, from, 1, count, to);
            else if (groups == 2) lay_out_head(dtype, from, 2, count, to);
            else lay_out_head(dtype, from, 4, count, to);
        }
        return;
    }
    const int64_t lines = is_token_major ? 1 : heads, length = is_token_major ? heads * groups : groups;
    int64_t token = 0;
    for (; length % VL == 0 && token + 4 <= count; token += 4)
        for (int64_t line = 0; line < lines; line++)
            lay_out_four(dtype, from + (token * part->slot_stride + line * part->head_stride) * size,
                         part->slot_stride * size, length, out + line * groups * TILE + at + token);
    for (; token < count; token++)
        for (int64_t line = 0; line < lines; line++) {
            const char *numbers = from + (token * part->slot_stride + line * part->head_stride) * size;
            float *to = out + line * groups * TILE + at + token;
            for (int64_t i = 0; i < length; i += VL, numbers += VL * size) {
                const int64_t n = length - i < VL ? length - i : VL;
                float some[VL];
                v_store(some, n == VL ? v_load_as(dtype, numbers) : v_load_n_as(dtype, numbers, n));
                for (int64_t j = 0; j < n; j++) to[(i + j) * TILE] = some[j];
            }
        }
}

static void lay_out(const kv_layer *layer, const kv_part *part, int64_t groups, int64_t block, int64_t slot,
                    int64_t count, int64_t at, float *out) {
    switch (layer->dtype) {
    case KV_F16: lay_out_as(KV_F16, layer, part, groups, block, slot, count, at, out); break;
    case KV_BF16: lay_out_as(KV_BF16, layer, part, groups, block, slot, count, at, out); break;
    default: lay_out_as(KV_F32, layer, part, groups, block, slot, count, at, out);
    }
}

/* Scales and biases of one plane as floats, each [heads * groups][TILE]; tokens beyond the tile's are left alone. */
typedef struct { float *scales, *biases; } factors;

static void tile_factors(const kv_attention *call, int64_t row, const kv_tile *tile, const kv_plane *plane,
                         factors out) {
    const kv_layer *layer = call->layer;
    const int32_t *table = call->tables + row * call->table_stride;
    const int64_t groups = kv_groups(plane);
    for (int64_t at = 0; at < tile->count;) {
        const int64_t position = tile->first + at, slot = position % layer->block_size;
        const int64_t left = tile->count - at, room = layer->block_size - slot, count = room < left ? room : left;
        const int64_t block = table[position / layer->block_size];
        lay_out(layer, &plane->scales, groups, block, slot, count, at, out.scales);
        lay_out(layer, &plane->biases, groups, block, slot, count, at, out.biases);
        at += count;
    }
}

/* Asks for what tile_factors will read. */
KV_INLINE void fetch_factors(const kv_attention *call, int64_t row, const kv_tile *tile, const kv_part *part,
                             int64_t groups) {
    const kv_layer *layer = call->layer;
    const int32_t *table = call->tables + row * call->table_stride;
    const int64_t size = kv_itemsize(layer->dtype);
    const int is_head_major = part->slot_stride == groups;
    for (int64_t at = 0; at < tile->count; at += layer->block_size) {
        const int64_t position = tile->first + at;
        const char *block = part->base + table[position / layer->block_size] * part->block_stride * size;
        const int64_t lines = is_head_major ? layer->num_kv_heads : 1;
        const int64_t nbytes = layer->block_size * part->slot_stride * size;
        for (int64_t line = 0; line < lines; line++)
            for (int64_t byte = 0; byte < nbytes; byte += LINE)
                __builtin_prefetch(block + line * part->head_stride * size + byte, 0, 2);
    }
}

/* -------- the inner loops -------- */

/* scores[r * ROOM + t] = q[r] . k[t] for TOKENS tokens t and `rows` <= LANES queries r, as scores_of_some on floats,
 * without the biases. `scales` are those of the head at the first token. */
KV_INLINE void numbers_of_some(kv_dtype dtype, const int rows, const char *const *tokens, int64_t offset,
                               const kv_plane *plane, const float *q, const float *scales, float *scores,
                               const fetching *ahead, int64_t first) {
    const int64_t stride = padded(plane->dim), size = plane->group_size, groups = kv_groups(plane);
    const char *k[TOKENS];
    v4 total[LANES] = {{0}};
    vf sum[LANES][TOKENS] = {{{0}}};
    for (int t = 0; t < TOKENS; t++) {
        k[t] = tokens[t] + offset;
        /* at once: a group is too little work to ask in it */
        fetch(ahead->rows[first + t] + ahead->offset, ahead->step * (stride / PAIR));
    }
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t d = g * size; d < (g + 1) * size; d += PAIR)
            add_products(dtype, rows, k, d * kv_bits(dtype) / 8, SCALE_NUMBERS ? scales + g * TILE : NULL, q + d,
                         stride, sum);
        if (SCALE_NUMBERS) continue;
        const v4 scale = v4_load(scales + g * TILE);
        KV_UNROLL
        for (int r = 0; r < rows; r++) {
            total[r] += v4_load(sums_of_tokens(sum[r]).lane) * scale;
            KV_UNROLL
            for (int t = 0; t < TOKENS; t++) sum[r][t] = v_set(0);
        }
    }
    KV_UNROLL
    for (int r = 0; r < rows; r++) {
        if (SCALE_NUMBERS) total[r] = v4_load(sums_of_tokens(sum[r]).lane);
        memcpy(scores + r * ROOM, &total[r], sizeof total[r]);
    }
}

/* What the biases of a tile's keys add to the scores of all lanes of a head: each times the sum of a query's group. */
static void add_biases(float *scores, int64_t lanes, int64_t groups, const float *biases, const float *sums) {
    for (int64_t i = 0; i < lanes; i++, scores += ROOM, sums += groups)
        for (int64_t t = 0; t < TILE; t += VL) {
            vf score = v_load(scores + t);
            for (int64_t g = 0; g < groups; g++)
                score = v_fma(v_set(sums[g]), v_load(biases + g * TILE + t), score);
            v_store(scores + t, score);
        }
}

/* Weights times scales, and what the biases add: `scaled` [groups][lanes][ROOM], `shifts` [lanes][groups]. A weight of
 * 0 takes nothing from its token, NaN or not. */
static void scale_weights(const float *weights, int64_t lanes, int64_t groups, int64_t count, const float *scales,
                          const float *biases, float *scaled, float *shifts) {
    const int64_t whole = (count + VL - 1) / VL * VL;
    for (int64_t g = 0; g < groups; g++)
        for (int64_t i = 0; i < lanes; i++) {
            vf shift = v_set(0);
            for (int64_t t = 0; t < whole; t += VL) {
                const vf weight = v_load(weights + i * ROOM + t), none = v_set(0);
                const vi unused = weight == none;
                v_store(scaled + (g * lanes + i) * ROOM + t,
                        v_select(unused, none, weight * v_load(scales + g * TILE + t)));
                shift += v_select(unused, none, weight * v_load(biases + g * TILE + t));
            }
            shifts[i * groups + g] = v_sum(shift);
        }
}
