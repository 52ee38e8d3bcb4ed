// What `paged_attention` has more where it exports scores: for each kind the parts that go behind the lines of
// paged_attention.metal that end in `scores: NAME`. Without scores nothing is there, and the text is what it would be
// if this file did not exist.
//
// An item that holds the newest query of its row says which one it is; its threadgroups pass every token that the
// query sees in this part of the context, once. So does the store.
//
// Inputs     observed          int32 [N]: of an item's queries the newest of the row; negative: another item's
//            columns           int32: C
// Output     exported          raw: float [B, Hk, HEAD_GROUPS, C], sums over a threadgroup's heads, over GROUP
//                              mass: float [B, Hq, C], what goes into exp; -INFINITY where it is hidden

// raw: item
const int observed_query = observed[item];
// raw: tile
  float sum_of_heads = 0.0f;
// raw: row
    if (r / HEADS == observed_query && visible) {
      sum_of_heads += score;
    }
// raw: end
  if (observed_query >= 0 && my_token >= seen_begin && my_token < seen_end) {
    const int64_t row = int64_t(batch_row) * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
    exported[row * columns + my_token] = sum_of_heads / float(GROUP);
  }

// mass: item
const int observed_query = observed[item];
// mass: row
    if (exists && r / HEADS == observed_query && my_token >= seen_begin && my_token < seen_end) {
      exported[(int64_t(batch_row) * num_q_heads + head) * columns + my_token] = visible ? score : -INFINITY;
    }
