// Stands in for MLX's header of this name where there is no Metal: what is encoded is written down.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace MTL {

struct Size {
  Size(size_t width, size_t height, size_t depth) : width(width), height(height), depth(depth) {}
  size_t width, height, depth;
};
struct Library {
  std::string text;
};
struct ComputePipelineState {
  std::string function, text;
  size_t maxTotalThreadsPerThreadgroup() const { return text.size(); }
  size_t threadExecutionWidth() const { return 32; }
  size_t staticThreadgroupMemoryLength() const { return function.size(); }
};

} // namespace MTL

namespace mlx::core::metal {

// An array that is bound, or a copy of bytes.
struct Binding {
  bool is_output = false;
  const void* address = nullptr;
  size_t nbytes = 0, counted = 0; // counted: elements, in MLX's rule for the end of a command buffer
  std::string bytes;
};
struct Launch {
  std::string function, text;
  std::map<int, Binding> bindings;
  std::vector<size_t> grid, group;
};

class CommandEncoder {
 public:
  void set_compute_pipeline_state(MTL::ComputePipelineState* kernel) { kernel_ = kernel; }
  void set_input_array(const array& a, int index, int64_t offset = 0) { bind(false, a, index, offset); }
  void set_output_array(array& a, int index, int64_t offset = 0) { bind(true, a, index, offset); }
  void register_output_array(const array& a) { registered.push_back(a.data<char>()); }
  template <typename T>
  void set_bytes(const T* values, int n, int index) {
    bindings_[index] = {false, nullptr, 0, 0, std::string(reinterpret_cast<const char*>(values), n * sizeof(T))};
  }
  void add_temporary(array x) { temporaries.push_back(std::move(x)); }
  void dispatch_threads(MTL::Size grid, MTL::Size group) {
    launches.push_back({kernel_->function, kernel_->text, bindings_, {grid.width, grid.height, grid.depth},
                        {group.width, group.height, group.depth}});
  }
  std::vector<Launch> launches;
  std::vector<array> temporaries;
  std::vector<const void*> registered, seen; // outputs without a launch; arrays that were bound as inputs

 private:
  void bind(bool is_output, const array& a, int index, int64_t offset) {
    const char* first = a.data<char>() + offset;
    bindings_[index] = {is_output, first, a.nbytes(), a.data_size(), {}};
    if (!is_output) seen.push_back(first);
  }
  MTL::ComputePipelineState* kernel_ = nullptr;
  std::map<int, Binding> bindings_; // like the real one it keeps what was bound for an earlier launch
};

class Device {
 public:
  MTL::Library* get_library(const std::string& name, const std::function<std::string()>& builder) {
    if (!libraries_.count(name)) libraries_[name] = {builder()};
    return &libraries_[name];
  }
  MTL::ComputePipelineState* get_kernel(const std::string& name, MTL::Library* library) {
    kernels_[name] = {name, library->text};
    return &kernels_[name];
  }

 private:
  std::map<std::string, MTL::Library> libraries_;
  std::map<std::string, MTL::ComputePipelineState> kernels_;
};

inline Device& device(mlx::core::Device) {
  static Device the_device;
  return the_device;
}
inline CommandEncoder& get_command_encoder(Stream) {
  static CommandEncoder the_encoder;
  return the_encoder;
}

} // namespace mlx::core::metal
