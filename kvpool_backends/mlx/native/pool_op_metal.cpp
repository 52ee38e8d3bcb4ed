// Writes, copies and attention by the kernels of kvpool_backends.metal, dispatched through MLX's own Metal device.
// Attention changes nothing, so mx.fast.metal_kernel could run it, and does so where scores are asked for. But it
// writes a text for each launch. Here a layer repeats what MLX has described for the first one.
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

// Compiles the kernel at its first use.
MTL::ComputePipelineState* pipeline_of(const MetalText& kernel) {
  if (kernel.pipeline == nullptr) {
    auto& device = mx::metal::device(mx::Device::gpu);
    auto* library = device.get_library(kernel.function, [&kernel] { return PRELUDE + kernel.text; });
    kernel.pipeline = device.get_kernel(kernel.function, library);
  }
  return static_cast<MTL::ComputePipelineState*>(kernel.pipeline);
}

// Returns the encoder of a stream with this kernel set.
mx::metal::CommandEncoder& encoder_with(const MetalText& kernel, mx::Stream stream) {
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(pipeline_of(kernel));
  return encoder;
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

std::array<int64_t, 3> metal_limits(const std::string& function) {
  auto& device = mx::metal::device(mx::Device::gpu);
  auto* library = device.get_library(function, [&function]() -> std::string {
    throw std::invalid_argument("[metal_limits] MLX has not compiled a kernel " + function);
  });
  const auto* pipeline = device.get_kernel(function, library);
  return {int64_t(pipeline->maxTotalThreadsPerThreadgroup()), int64_t(pipeline->threadExecutionWidth()),
          int64_t(pipeline->staticThreadgroupMemoryLength())};
}

void PoolOp::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  if ((parts_.attends && parts_.metal_attention == nullptr) || parts_.layer->metal == nullptr) {
    throw std::runtime_error("[kvpool] the node was built for the CPU");
  }
  place(inputs, outputs);
  if (parts_.metal_attention != nullptr) {
    attend_metal(inputs, outputs);
  } else if (parts_.copies != nullptr) {
    copy_metal(inputs, outputs);
  } else if (parts_.writes) {
    write_metal(inputs, outputs);
  } else {
    seal_metal(inputs, outputs);
  }
}

void PoolOp::write_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const Layer& layer = *parts_.layer;
  const auto& texts = layer.metal->write;
  const mx::array* tokens = &inputs[layer.num_arrays()]; // k, v, slots
  const auto& slots = tokens[2];
  if (slots.size() == 0) return;
  if (texts.size() == 1) {
    write_planes(texts[0], {&layer.rows[0][0], &layer.rows[1][0]}, {tokens, tokens + 1}, slots, outputs);
    return;
  }
  for (int side = 0; side < 2; side++) {
    const mx::array* x = tokens + side;
    const Rows* rows = layer.rows[side].data();
    if (layer.num_parts(side) == 1) { // given twice, the kernel has no dimensions of a second plane
      write_planes(texts[side], {rows, rows}, {x, x}, slots, outputs);
    } else {
      write_planes(texts[side], {rows, rows + 1, rows + 2}, {x}, slots, outputs);
    }
  }
}

// Writes K and V; or words, scales and biases, of which the latter two have the same layout.
void PoolOp::write_planes(const WriteTexts& texts, std::vector<const Rows*> planes,
                          std::vector<const mx::array*> tokens, const mx::array& slots,
                          std::vector<mx::array>& outputs) {
  const bool vectors = std::all_of(tokens.begin(), tokens.end(), [](auto* x) { return has_vectors(*x); });
  auto& encoder = encoder_with(texts.at({dtype_of(*tokens[0]), vectors}), stream());
  std::vector<int64_t> layout, strides;
  for (int i = 0; i < 2; i++) layout.insert(layout.end(), planes[i]->layout.begin(), planes[i]->layout.end());
  int index = 0, width = 0;
  for (const auto* plane : planes) encoder.set_output_array(outputs[first_handle() + plane->array], index++);
  for (const auto* x : tokens) {
    encoder.set_input_array(*x, index++);
    strides.insert(strides.end(), {x->strides(0), x->strides(1), x->strides(2)});
    width = std::max(width, x->shape(2));
  }
  encoder.set_input_array(slots, index++);
  encoder.set_bytes(layout.data(), int(layout.size()), index++);
  encoder.set_bytes(strides.data(), int(strides.size()), index);
  dispatch(encoder, width / CHUNK, parts_.layer->planes.num_kv_heads, slots.size());
}

void PoolOp::copy_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const Layer& layer = *parts_.layer;
  const MetalTexts& texts = *layer.metal;
  const mx::array& ids = inputs[layer.num_arrays()];
  for (int side = 0; side < 2; side++) {
    const int num_parts = layer.num_parts(side);
    for (int part = 0; part < num_parts; part++) {
      const Rows& rows = layer.rows[side][part];
      const auto& kernel = part > 0 ? texts.copy_factors : num_parts > 1 ? texts.copy_words : texts.copy_floats;
      auto& encoder = encoder_with(kernel, stream());
      encoder.set_output_array(outputs[first_handle() + rows.array], 0);
      encoder.set_input_array(ids, 1);
      encoder.set_bytes(rows.layout.data(), int(rows.layout.size()), 2);
      dispatch(encoder, part > 0 ? rows.length : rows.length / CHUNK,
               layer.planes.num_kv_heads * layer.planes.block_size, ids.shape(0));
    }
  }
}

void PoolOp::attend_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const auto& launches = parts_.metal_attention->launches;
  const int num_handles = parts_.layer->num_arrays();
  std::optional<mx::array> former;
  for (const auto& launch : launches) {
    auto& encoder = encoder_with(*launch.kernel, stream());
    int index = 0;
    for (size_t i = 0; i < launch.sources.size(); i++) {
      const int source = launch.sources[i];
      const mx::array& x = source == MetalLaunch::FORMER ? *former : inputs[source];
      if (source >= 0 && source < num_handles) {
        encoder.set_output_array(outputs[first_handle() + source], index++); // as in `seal_metal`
      } else {
        encoder.set_input_array(x, index++);
      }
      if (x.ndim() == 0) continue;
      const auto [shape, strides, ndim] = launch.sizes[i];
      const int n = int(x.ndim());
      if (shape) encoder.set_bytes(x.shape().data(), n, index++);
      if (strides) encoder.set_bytes(x.strides().data(), n, index++);
      if (ndim) encoder.set_bytes(&n, 1, index++);
    }
    const bool is_last = &launch == &launches.back();
    mx::array sums(launch.shape, launch.dtype, nullptr, {});
    if (!is_last) {
      sums.set_data(mx::allocator::malloc(sums.nbytes()));
      encoder.add_temporary(sums);
    }
    encoder.set_output_array(is_last ? outputs[1] : sums, index);
    const auto& [x, y, z] = launch.group;
    const size_t most = pipeline_of(*launch.kernel)->maxTotalThreadsPerThreadgroup();
    if (size_t(x) * y * z > most) {
      throw std::runtime_error("[attend] the GPU runs " + launch.kernel->function + " with " + std::to_string(most) +
                               " threads at most, it needs " + std::to_string(x * y * z));
    }
    const auto& grid = launch.grid;
    encoder.dispatch_threads(MTL::Size(grid[0], grid[1], grid[2]),
                             MTL::Size(std::min(x, grid[0]), std::min(y, grid[1]), std::min(z, grid[2])));
    former = sums;
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
