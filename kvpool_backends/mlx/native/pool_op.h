// One node of MLX's graph that works on the arrays of a pool where they lie.
//
// A node writes tokens, or attends, or both, or copies blocks. Its inputs are the newest handles of the pool arrays of
// one layer; where it changes them, its outputs are newer handles: other arrays to MLX, of the same memory. That is
// what no operation of MLX offers, and what keeps MLX from copying the pool when a read is still in flight.
//
// An older handle shows the new content: order is a matter of edges alone, and `native.pool.InPlacePool` sees to it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"

extern "C" {
#include "kvcpu.h"
}

namespace kvpool {

namespace mx = mlx::core;

// The functions of kvpool_backends.cpu in this process: one set of workers, one choice of instruction set.
struct Kernels {
  decltype(&kv_write) write = nullptr;
  decltype(&kv_attend) attend = nullptr;
  decltype(&kv_attend_scratch_nbytes) attend_scratch_nbytes = nullptr;
  decltype(&kv_copy_blocks) copy_blocks = nullptr;
};
inline Kernels kernels;

// A Metal kernel, specialised: its name in the library, the text to compile, and what MLX's device has made of it.
struct MetalText {
  std::string function, text;
  mutable void* pipeline = nullptr; // the device keeps it
};

// Kernels that write. The key is the dtype of the tokens, and whether their rows can be read in vectors.
using WriteTexts = std::map<std::pair<kv_dtype, bool>, MetalText>;

// The kernels of one pool.
struct MetalTexts {
  std::vector<WriteTexts> write; // one for K and V together; or one each, where a plane is packed
  MetalText copy_floats, copy_words, copy_factors; // scales and biases are factors
};

// Rows of a stored plane: the base array of the layer that has them; their offset, block, slot and head stride there;
// their length. All are in elements of the array.
struct Rows {
  int array;
  std::array<int64_t, 4> layout;
  int64_t length;
};

// Where the planes of a layer lie in its base arrays.
struct Layer {
  const kv_isa* isa;
  kv_layer planes; // bases are NULL
  std::array<std::array<Rows, 3>, 2> rows; // of K and V: floats, or words, scales and biases
  std::vector<const void*> addresses; // of the base arrays: they never change
  std::shared_ptr<const MetalTexts> metal; // null where nothing runs on a GPU

  int num_arrays() const { return static_cast<int>(addresses.size()); }
  int num_parts(int side) const { return (side == 0 ? planes.k : planes.v).bits == 0 ? 1 : 3; }
  kv_layer in(const std::vector<mx::array>& pools) const;
};

// The integers of one step, checked and copied: shared by all layers.
struct Step {
  int num_threads = 1;
  std::vector<int64_t> seq_lens, cu_q_lens; // empty: nothing to attend to
  std::vector<int32_t> tables; // [rows, table_stride]
  int64_t table_stride = 0;
  std::optional<mx::array> slots; // int64 [T]
};

// What attention takes beside arrays.
struct Attention {
  float scale = 0, soft_cap = 0;
  int64_t window = INT64_MAX;
  std::vector<float> sinks, slopes, mask; // empty: none
  int64_t mask_token_stride = 0, mask_head_stride = 0;
};

// A launch as MLX's metal_kernel has described it, of which each layer makes one like it.
struct MetalLaunch {
  static constexpr int FORMER = -1; // an input that is the output of the launch before
  std::shared_ptr<const MetalText> kernel;
  std::array<int, 3> grid, group;
  std::vector<int> sources; // of its inputs: numbers of inputs of the node
  std::vector<std::tuple<bool, bool, bool>> sizes; // whether it takes shape, strides, number of dimensions of an input
  mx::Shape shape; // of its output
  mx::Dtype dtype;
};

// Attention on a GPU: the launch that attends and, where contexts are split, the one that adds their parts up. The last
// one's output is the result.
struct MetalAttention {
  std::vector<MetalLaunch> launches;
  std::vector<mx::array> shared; // inputs that all layers have
  size_t num_varying; // those that each layer has of its own
};

struct Copies {
  int num_threads = 1;
  std::vector<int64_t> rows; // [K, 3]
  std::optional<mx::array> ids; // the same, int32
};

kv_dtype dtype_of(const mx::array& x); // throws std::invalid_argument

// Of a kernel that MLX has compiled under this name: the largest threadgroup that the GPU can run it with (with more
// registers per thread it is smaller), lanes of a simdgroup, bytes of threadgroup memory.
std::array<int64_t, 3> metal_limits(const std::string& function);

class PoolOp : public mx::Primitive {
 public:
  struct Parts {
    bool writes = false, attends = false;
    std::shared_ptr<const Layer> layer;
    std::shared_ptr<const Step> step;
    std::shared_ptr<const Attention> attention;
    std::shared_ptr<const MetalAttention> metal_attention;
    std::shared_ptr<const Copies> copies;

    // What its Metal kernel reads beside tokens. As an input of the node it is kept by MLX until the kernel has run; a
    // command buffer keeps nothing.
    void add_metal_inputs(std::vector<mx::array>& inputs) const {
      if (writes) inputs.push_back(*step->slots);
      if (copies != nullptr) inputs.push_back(*copies->ids);
      if (metal_attention != nullptr) {
        inputs.insert(inputs.end(), metal_attention->shared.begin(), metal_attention->shared.end());
      }
    }
  };

  // Inputs: the pool's arrays; k and v, if it writes; slots, ids of blocks or what attention of all layers shares, if
  // it runs on the GPU; q, if it attends on the CPU; then what varies with layers, if it attends on the GPU, or results
  // of reads that other primitives have done. Outputs: an empty array, which stands for the node; the result of
  // attention, if it attends; then the pool's arrays again.
  PoolOp(mx::Stream stream, Parts parts) : Primitive(stream), parts_(std::move(parts)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "KVPoolOp"; }

 private:
  // Number of the first output that is a pool array.
  int first_handle() const { return parts_.attends ? 2 : 1; }
  void place(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) const;
  void write_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs);
  void write_planes(const WriteTexts& texts, std::vector<const Rows*> planes, std::vector<const mx::array*> tokens,
                    const mx::array& slots, std::vector<mx::array>& outputs);
  void copy_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs);
  void attend_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs);
  void seal_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs);
  Parts parts_;
};

} // namespace kvpool
