// What a compiled kernel asks of the runtime (runtime/*.cpp): who am I, wait for the others, stop with a message.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

#define MSL_INLINE inline __attribute__((always_inline))

namespace msl {

constexpr uint32_t simd_width = 32;
constexpr size_t slot_bytes = 32;  // the largest value that a lane can hand to its simdgroup: a vec<long, 4>

struct Size3 {
  uint32_t x, y, z;
};

// The built-in values of one GPU thread.
struct ThreadInfo {
  Size3 position_in_grid, position_in_threadgroup, threadgroup_position;
  Size3 threadgroups_per_grid, threads_per_grid, threads_per_threadgroup;
  uint32_t index_in_threadgroup, lane, simdgroup;
};

// Where in the kernel's text threads wait for each other.
struct Site {
  const char* what;
  const char* file;
  uint32_t line, column;
};

// Turns the values that the active lanes brought (32 slots) into the values that they leave with, once for all.
using Combine = void (*)(uint32_t active, unsigned char* slots);

// The answer of a rendezvous: every lane's slot, and which lanes took part.
struct Exchange {
  const unsigned char* slots;
  uint32_t active;
};

enum BarrierScope : int { barrier_simdgroup, barrier_threadgroup };

using Where = std::source_location;

MSL_INLINE Site site(const char* what, const Where& where) {
  return {what, where.file_name(), where.line(), where.column()};
}

// One `threadgroup` variable of a kernel; the list lives in the kernel's shared object.
struct ThreadgroupVariable {
  const char* name;
  uint32_t bytes, align, offset;  // offset in the threadgroup's memory, chosen by the runtime
  ThreadgroupVariable* next;
};

}  // namespace msl

extern "C" {
extern const msl::ThreadInfo* msl_thread;       // of the running thread
extern unsigned char* msl_threadgroup_memory;   // of its threadgroup
void* msl_buffer(int index);                    // device memory bound to [[buffer(index)]]
void msl_barrier(msl::BarrierScope scope, int mem_flags, const msl::Site* site);
msl::Exchange msl_exchange(const void* value, size_t bytes, msl::Combine combine, const msl::Site* site);
void msl_copy(void* to, const void* from, size_t bytes, size_t align);  // one access that the checks can see
[[noreturn]] void msl_fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
}
