"""The C interface of the kernels, kernels/kvcpu.h."""
from libc.stdint cimport int32_t, int64_t


cdef extern from "kvcpu.h" nogil:
    ctypedef enum kv_dtype:
        KV_F32
        KV_F16
        KV_BF16
        KV_F8

    ctypedef struct kv_part:
        char* base
        int64_t block_stride, slot_stride, head_stride

    ctypedef struct kv_plane:
        char* base
        int64_t block_stride, slot_stride, head_stride, dim
        int64_t bits, group_size
        kv_part scales, biases

    ctypedef struct kv_layer:
        kv_plane k, v
        kv_dtype dtype
        int64_t num_blocks, block_size, num_kv_heads

    ctypedef struct kv_tokens:
        char* base
        kv_dtype dtype
        int64_t token_stride, head_stride, dim_stride

    ctypedef enum kv_score_kind:
        KV_RAW
        KV_MASS

    ctypedef struct kv_scores:
        kv_score_kind kind
        float* out
        int64_t row_stride, head_stride, columns

    ctypedef struct kv_attention:
        const kv_layer* layer
        kv_tokens q, out
        int64_t num_rows, num_tokens, num_q_heads
        const int32_t* tables
        int64_t table_stride
        const int64_t* seq_lens
        const int64_t* cu_q_lens
        float scale, soft_cap
        int64_t window
        const float* sinks
        const float* slopes
        const float* mask
        int64_t mask_token_stride, mask_head_stride
        kv_scores scores
        int (*ask)() noexcept nogil

    ctypedef struct kv_isa:
        pass

    int64_t kv_attend_scratch_nbytes(const kv_isa* isa, const kv_attention* call, int num_threads)
    int kv_attend(const kv_isa* isa, const kv_attention* call, void* scratch, int num_threads)
    void kv_write(const kv_isa* isa, const kv_layer* layer, const kv_tokens* k, const kv_tokens* v,
                  const int64_t* slots, int64_t num_tokens, int num_threads)
    void kv_copy_blocks(const kv_layer* layers, int64_t num_layers, const int64_t* copies, int64_t num_copies,
                        int num_threads)
    void kv_compact(const kv_layer* layers, int64_t num_layers, const int64_t* blocks, const int64_t* keep,
                    int64_t num_kept, int num_threads)
    void kv_gather(const kv_isa* isa, const kv_layer* layer, const int64_t* blocks, int64_t num_tokens,
                   const kv_tokens* k, const kv_tokens* v, int num_threads)
    ctypedef enum kv_task:
        KV_ZERO
        KV_EXPORT
        KV_IMPORT
    void kv_blocks(kv_task task, const kv_layer* layers, int64_t num_layers, const int64_t* blocks,
                   int64_t num_blocks, char* data, int num_threads)
    float kv_read_sum(const kv_isa* isa, const char* bytes, int64_t nbytes, int num_threads)
    int kv_isa_count()
    const kv_isa* kv_isa_at(int index)
    const char* kv_isa_name(const kv_isa* isa)
    ctypedef struct kv_tiling:
        int tokens, keys, queries, vectors
        const char* layout
    kv_tiling kv_isa_tiling(const kv_isa* isa)
