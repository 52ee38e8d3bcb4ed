#include "pool_op.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "mlx/backend/cpu/encoder.h"

namespace kvpool {

namespace {

constexpr size_t HANDLE_ELEMENTS = 8;

kv_tokens tokens_of(const mx::array& x) {
  auto stride = [&x](int i) { return x.shape(i) > 1 ? x.strides(i) : 0; };
  return {const_cast<char*>(x.data<char>()), dtype_of(x), stride(0), stride(1), stride(2)};
}

// Memory for kernels, one piece per thread of MLX: as much as its largest call has needed.
void* scratch(int64_t nbytes) {
  struct Memory {
    void* data = nullptr;
    int64_t nbytes = 0;
    ~Memory() { std::free(data); }
  };
  static thread_local Memory memory;
  if (nbytes > memory.nbytes) {
    std::free(memory.data);
    memory.data = nullptr;
    memory.nbytes = 0;
    const int64_t room = (nbytes + nbytes / 2 + 4095) / 4096 * 4096;
    if (posix_memalign(&memory.data, 64, room) != 0) {
      memory.data = nullptr;
      throw std::bad_alloc();
    }
    memory.nbytes = room;
  }
  return memory.data;
}

void attend(const Layer& layer, const kv_layer& planes, const Step& step, const Attention& how, kv_tokens q,
            kv_tokens out, int64_t num_tokens, int64_t num_q_heads) {
  kv_attention call{};
  call.layer = &planes;
  call.q = q;
  call.out = out;
  call.num_rows = static_cast<int64_t>(step.seq_lens.size());
  call.num_tokens = num_tokens;
  call.num_q_heads = num_q_heads;
  call.tables = step.tables.data();
  call.table_stride = step.table_stride;
  call.seq_lens = step.seq_lens.data();
  call.cu_q_lens = step.cu_q_lens.data();
  call.scale = how.scale;
  call.soft_cap = how.soft_cap;
  call.window = how.window;
  call.sinks = how.sinks.empty() ? nullptr : how.sinks.data();
  call.slopes = how.slopes.empty() ? nullptr : how.slopes.data();
  call.mask = how.mask.empty() ? nullptr : how.mask.data();
  call.mask_token_stride = how.mask_token_stride;
  call.mask_head_stride = how.mask_head_stride;
  void* memory = scratch(kernels.attend_scratch_nbytes(layer.isa, &call, step.num_threads));
  kernels.attend(layer.isa, &call, memory, step.num_threads);
}

} // namespace

kv_dtype dtype_of(const mx::array& x) {
  if (x.dtype() == mx::float32) return KV_F32;
  if (x.dtype() == mx::float16) return KV_F16;
  if (x.dtype() == mx::bfloat16) return KV_BF16;
  throw std::invalid_argument("[kvpool] tokens are float32, float16 or bfloat16");
}

kv_layer Layer::in(const std::vector<mx::array>& pools) const {
  kv_layer layer = planes;
  kv_plane* sides[] = {&layer.k, &layer.v};
  for (int i = 0; i < 2; i++) {
    auto first = [&](int part, kv_dtype stored) {
      const Rows& at = rows[i][part];
      return const_cast<char*>(pools[at.array].data<char>()) + at.layout[0] * kv_itemsize(stored);
    };
    sides[i]->base = first(0, kv_stored(&layer, sides[i]));
    if (num_parts(i) == 1) continue;
    sides[i]->scales.base = first(1, layer.dtype);
    sides[i]->biases.base = first(2, layer.dtype);
  }
  return layer;
}

// Memory for the results; the pool's own memory for its new handles.
void PoolOp::place(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) const {
  const Layer& layer = *parts_.layer;
  for (int i = 0; i < layer.num_arrays(); i++) {
    if (inputs[i].data<char>() != layer.addresses[i]) {
      throw std::runtime_error(
          "[kvpool] an array of the pool is not where it was: something else than the pool's owner made this handle");
    }
  }
  for (int i = 0; i < first_handle(); i++) {
    outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
  }
  for (int i = 0; i < layer.num_arrays(); i++) {
    // MLX ends a command buffer when its kernels bind too many elements, and counts a handle by this size. Kernels find
    // the pool's memory by its address, so the handle may claim a few of its elements.
    const size_t counted = std::min<size_t>(inputs[i].data_size(), HANDLE_ELEMENTS);
    outputs[first_handle() + i].copy_shared_buffer(inputs[i], inputs[i].strides(), inputs[i].flags(), counted);
  }
}

void PoolOp::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  if (parts_.metal_attention != nullptr) throw std::runtime_error("[kvpool] the node was built for a GPU");
  place(inputs, outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  const kv_layer planes = parts_.layer->in(inputs);
  size_t next = parts_.layer->num_arrays();
  // What a task captures lives until it has run; MLX itself keeps the buffers of the inputs for as long.
  if (parts_.copies != nullptr) {
    encoder.dispatch([planes, copies = parts_.copies] {
      kernels.copy_blocks(&planes, 1, copies->rows.data(), int64_t(copies->rows.size() / 3), copies->num_threads);
    });
  }
  if (parts_.writes) {
    const kv_tokens k = tokens_of(inputs[next]), v = tokens_of(inputs[next + 1]);
    next += 2;
    encoder.dispatch([planes, k, v, layer = parts_.layer, step = parts_.step] {
      const auto& slots = *step->slots;
      kernels.write(layer->isa, &planes, &k, &v, slots.data<int64_t>(), int64_t(slots.size()), step->num_threads);
    });
  }
  if (parts_.attends && outputs[1].size() > 0) {
    const auto& queries = inputs[next];
    const kv_tokens q = tokens_of(queries), out = tokens_of(outputs[1]);
    encoder.dispatch([planes, q, out, num_tokens = int64_t(queries.shape(0)), num_q_heads = int64_t(queries.shape(1)),
                      layer = parts_.layer, step = parts_.step, attention = parts_.attention] {
      attend(*layer, planes, *step, *attention, q, out, num_tokens, num_q_heads);
    });
  }
}

#ifndef KVPOOL_METAL
std::array<int64_t, 3> metal_limits(const std::string&) {
  throw std::runtime_error("[metal_limits] the native extension was built without Metal");
}

void PoolOp::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error("[kvpool] the native extension was built without Metal");
}
#endif

} // namespace kvpool
