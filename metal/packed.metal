// `paged_attention` over planes of 8 or 4 bits: what takes the place of the lines of paged_attention.metal that end in
// `packed k: NAME` where keys are packed, of those that end in `packed v: NAME` where values are. With neither nothing
// is replaced, and the text is what it would be if this file did not exist.
//
// Packed numbers are never made a plane of floats: queries meet the numbers of K, and a group's scale and bias come in
// once per lane; numbers of V become floats in registers, once for all queries.
//
// Template   K_BITS, V_BITS    8 or 4, of what is packed
//            SIZE              elements that have a scale and a bias
// Inputs     k_pool, v_pool    of what is packed, the words
//            k_scales, k_biases, v_scales, v_biases   base arrays of T
//            layout            int64 [16]: then the same of scales and biases

// k: rows
using Keys = kv::PackedRows<T, DIM, K_BITS, SIZE>;
// k: head
const kv::Head k_head = kv::head_of(layout, kv_head), k_factors = kv::head_of(layout + 8, kv_head);
// k: query
kv::Chunk<Q> query[ROWS][Keys::PER_LANE];
float sum_of_query[ROWS][Keys::PER_LANE];
// k: sum
    sum_of_query[r][j] = kv::dot(query[r][j], float4(1.0f));
  }
// k: first
    const device uint* first = k_pool + k_head.row(block, (tile + t) % BLOCK_SIZE);
    const int64_t factor = k_factors.row(block, (tile + t) % BLOCK_SIZE);
// k: load
    keys.load(first, k_head.slot_stride, k_scales + factor, k_biases + factor, k_factors.slot_stride, skipped - t,
              num_tokens - t, lane);
// k: dot
            products[i] += keys.dot(a + i, j, query[r][j], sum_of_query[r][j]);

// v: rows
using Values = kv::PackedRows<T, VALUE_DIM, V_BITS, SIZE>;
// v: head
const kv::Head v_head = kv::head_of(layout + 4, kv_head), v_factors = kv::head_of(layout + 12, kv_head);
// v: first
    const device uint* first = v_pool + v_head.row(block, (tile + t) % BLOCK_SIZE);
    const int64_t factor = v_factors.row(block, (tile + t) % BLOCK_SIZE);
// v: load
    rows.load(first, v_head.slot_stride, v_scales + factor, v_biases + factor, v_factors.slot_stride, skipped - t,
              num_tokens - t, lane);
// v: add
            values[r][j] += w * rows.floats(a, j);
