/* Scores beside attention: the newest query of a row that chunk.h computes, and the second pass of KV_MASS.
 *
 * Rows of few queries export while they are decoded (head_export in decode.h). For a row of many, its newest query is
 * met with K once more, without V: next to nothing beside the chunk itself. KV_MASS needs what a query's weights
 * add up to before the first one is known, so all heads' scores are laid aside until then.
 */

/* A partial result here: the largest score and the sum of each lane. */
static int64_t score_floats(const kv_attention *call) { return 2 * whole_lines(call->num_q_heads); }

static void score_part(const kv_attention *call, int64_t row, int64_t begin, int64_t end, float *scratch,
                       float *partial) {
    decoding run = decoding_of(call, row, 1, scratch);
    kv_tile tile;
    run.largest = partial;
    run.sum = partial + whole_lines(run.num_lanes);
    decoding_load_queries(&run);
    memset(run.sum, 0, (size_t)run.num_lanes * sizeof(float));
    for (int64_t lane = 0; lane < run.num_lanes; lane++) run.largest[lane] = -INFINITY;
    for (; begin < end; begin += tile.count) {
        tile_find(&tile, call, row, begin, end);
        decoding_find_factors(&run, &tile);
        for (int64_t head = 0; head < call->layer->num_kv_heads; head++) {
            head_scores(&run, &tile, head, 0);
            head_weights(&run, &tile, head);
        }
    }
}

static void score_merge(const kv_attention *call, int64_t row, const float *partials, int64_t num_partials,
                        float *scratch) {
    const decoding run = decoding_of(call, row, 1, scratch);
    const int64_t step = score_floats(call);
    for (int64_t lane = 0; lane < run.num_lanes; lane++) {
        float largest = -INFINITY, sum = 0;
        for (int64_t i = 0; i < num_partials; i++)
            if (partials[i * step + lane] > largest) largest = partials[i * step + lane];
        for (int64_t i = 0; i < num_partials; i++) {
            const float part_sum = partials[i * step + whole_lines(run.num_lanes) + lane];
            if (part_sum != 0) sum += part_sum * expf(partials[i * step + lane] - largest);
        }
        lane_factor(&run, lane, largest, sum);
    }
}

static void mass_part(const kv_attention *call, int64_t row, int64_t begin, int64_t end) {
    const kv_scores *scores = &call->scores;
    const int64_t stride = kv_score_stride(call->seq_lens[row]), num_kv_heads = call->layer->num_kv_heads;
    const int64_t group = call->num_q_heads / num_kv_heads;
    for (int64_t head = 0; head < num_kv_heads; head++) {
        const float *lanes = scores->lanes + scores->first_lane[row] + head * group * stride;
        const float *largest = scores->largest + row * call->num_q_heads + head * group;
        const float *share = scores->share + row * call->num_q_heads + head * group;
        float *out = scores->out + row * scores->row_stride + head * scores->head_stride;
        for (int64_t t = begin; t < end; t += VL) {
            const int64_t n = end - t < VL ? end - t : VL;
            vf sum = {0};
            for (int64_t i = 0; i < group; i++)
                sum = v_fma(v_exp(v_load_n(lanes + i * stride + t, n) - largest[i]), v_set(share[i]), sum);
            memcpy(out + t, &sum, (size_t)n * sizeof(float));
        }
    }
}
