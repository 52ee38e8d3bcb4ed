/* Scores beside attention: the second pass of KV_MASS.
 *
 * Rows of few queries export while they are decoded (head_export in decode.h). For a row of many, its newest query is
 * met with K once more, without V: next to nothing beside the chunk itself. KV_MASS needs what a query's weights
 * add up to before the first one is known, so all heads' scores are laid aside until then.
 */

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
