// Writes and copies by the kernels of kvpool_backends.metal, dispatched through MLX's own Metal device. Attention is
// not here: it changes nothing, so mx.fast.metal_kernel runs it.
//
// Buffers of the pool are bound as outputs. That is what MLX derives its barriers and fences from: who binds the buffer
// later, in this encoder or another, waits for the kernel. A read by another primitive binds it as an input only, and a
// write in a later encoder would not wait for it; so after such a read comes a node that has its result as an input and
// the buffer as an output (`seal_metal`), and launches nothing.
#include <algorithm>
#include <array>
#include <stdexcept>

#include "mlx/backend/metal/device.h"
#include "pool_op.h"

namespace kvpool {

namespace {

constexpr const char* PRELUDE =
    "#include <metal_stdlib>\nusing namespace metal;\ntypedef half float16_t;\ntypedef bfloat bfloat16_t;\n";
constexpr int CHUNK = 4; // elements that a thread moves
constexpr int GROUP_THREADS = 256;

MTL::ComputePipelineState* pipeline(mx::metal::Device& device, const MetalText& kernel) {
  auto* library = device.get_library(kernel.function, [&kernel] { return PRELUDE + kernel.text; });
  return device.get_kernel(kernel.function, library);
}

// Rows are runs of elements that begin where a chunk may begin.
bool has_vectors(const mx::array& x) {
  auto whole = [](int64_t n) { return n % CHUNK == 0; };
  return x.strides(2) == 1 && whole(x.strides(0)) && whole(x.strides(1)) &&
      x.offset() % (CHUNK * int64_t(x.itemsize())) == 0;
}

void dispatch(mx::metal::CommandEncoder& encoder, size_t x, size_t y, size_t z) {
  const size_t rows = std::max<size_t>(1, std::min<size_t>(y, GROUP_THREADS / x));
  encoder.dispatch_threads(MTL::Size(x, y, z), MTL::Size(x, rows, 1));
}

} // namespace

int64_t metal_max_threads(const std::string& function) {
  auto& device = mx::metal::device(mx::Device::gpu);
  auto* library = device.get_library(function, [&function]() -> std::string {
    throw std::invalid_argument("[max_threads] MLX has not compiled a kernel " + function);
  });
  return int64_t(device.get_kernel(function, library)->maxTotalThreadsPerThreadgroup());
}

void PoolOp::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  if (parts_.attends || parts_.layer->metal == nullptr) {
    throw std::runtime_error("[kvpool] attention on the GPU is a metal_kernel, the native extension writes");
  }
  place(inputs, outputs);
  if (parts_.copies != nullptr) {
    copy_metal(inputs, outputs);
  } else if (parts_.writes) {
    write_metal(inputs, outputs);
  } else {
    seal_metal(inputs, outputs);
  }
}

void PoolOp::write_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const Layer& layer = *parts_.layer;
  const mx::array* tokens = &inputs[layer.num_arrays()];
  const mx::array &k = tokens[0], &v = tokens[1], &slots = tokens[2];
  if (slots.size() == 0) return;
  const kv_plane *ks = &layer.planes.k, *vs = &layer.planes.v;
  const std::array<int64_t, 8> layout = {layer.offset[0], ks->block_stride, ks->slot_stride, ks->head_stride,
                                         layer.offset[1], vs->block_stride, vs->slot_stride, vs->head_stride};
  const std::array<int64_t, 6> strides = {k.strides(0), k.strides(1), k.strides(2),
                                          v.strides(0), v.strides(1), v.strides(2)};
  const auto& kernel = layer.metal->write.at({dtype_of(k), has_vectors(k) && has_vectors(v)});
  auto& device = mx::metal::device(stream().device);
  auto& encoder = mx::metal::get_command_encoder(stream());
  encoder.set_compute_pipeline_state(pipeline(device, kernel));
  encoder.set_output_array(outputs[first_handle() + layer.array_of[0]], 0);
  encoder.set_output_array(outputs[first_handle() + layer.array_of[1]], 1);
  encoder.set_input_array(k, 2);
  encoder.set_input_array(v, 3);
  encoder.set_input_array(slots, 4);
  encoder.set_bytes(layout.data(), int(layout.size()), 5);
  encoder.set_bytes(strides.data(), int(strides.size()), 6);
  dispatch(encoder, std::max(ks->dim, vs->dim) / CHUNK, layer.planes.num_kv_heads, slots.size());
}

void PoolOp::copy_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const Layer& layer = *parts_.layer;
  const mx::array& ids = inputs[layer.num_arrays()];
  auto& device = mx::metal::device(stream().device);
  auto& encoder = mx::metal::get_command_encoder(stream());
  encoder.set_compute_pipeline_state(pipeline(device, layer.metal->copy_blocks));
  const kv_plane* planes[] = {&layer.planes.k, &layer.planes.v};
  for (int i = 0; i < 2; i++) {
    const kv_plane& plane = *planes[i];
    const std::array<int64_t, 4> layout = {layer.offset[i], plane.block_stride, plane.slot_stride, plane.head_stride};
    encoder.set_output_array(outputs[first_handle() + layer.array_of[i]], 0);
    encoder.set_input_array(ids, 1);
    encoder.set_bytes(layout.data(), int(layout.size()), 2);
    dispatch(encoder, plane.dim / CHUNK, layer.planes.num_kv_heads * layer.planes.block_size, ids.shape(0));
  }
}

void PoolOp::seal_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::metal::get_command_encoder(stream());
  for (size_t i = parts_.layer->num_arrays(); i < inputs.size(); i++) {
    if (inputs[i].size() > 0) encoder.set_input_array(inputs[i], 0);
  }
  for (int i = 0; i < parts_.layer->num_arrays(); i++) {
    encoder.register_output_array(outputs[first_handle() + i]);
  }
}

} // namespace kvpool
