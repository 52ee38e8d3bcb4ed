// What an instrumented kernel calls at every access to memory.
//
// Kernels are compiled with -fsanitize=thread, which makes the compiler announce each load and store, but they are
// linked with these functions in the place of the sanitizer's own. So the checks see everything that a kernel's text
// does, in whatever style it is written, and know more than the sanitizer could: buffers, lanes, and which barrier
// orders what.
#include "runtime.h"

namespace msl {

namespace {

inline void access(const void* address, uint64_t bytes, uint64_t align, bool writes, void* code) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  if (at - arena_begin >= arena_bytes) return;  // a thread's own memory, or the runtime's
  if (!state.launch->instrumented) return;      // a plain kernel announces few of its accesses
  const Region* region = region_of(at, bytes);
  if (!region) {
    char where[200];
    if (!describe_address(at, where, sizeof where)) where[0] = 0;
    stop(code, "out-of-bounds %s of %lu bytes: %s", writes ? "write" : "read", (unsigned long)bytes, where);
  }
  const uint64_t offset = at - reinterpret_cast<uintptr_t>(region->begin);
  if (writes && region->access == Access::read_only)
    stop(code, "write to read-only buffer '%s' (%lu bytes) at byte offset %lu", region->name,
         (unsigned long)region->bytes, (unsigned long)offset);
  if (offset % align)
    stop(code, "misaligned access to '%s' at byte offset %lu: a type with an alignment of %lu bytes", region->name,
         (unsigned long)offset, (unsigned long)align);
  check_access(*region, offset, bytes, writes, code);
  count_access(uint32_t(region - regions.data()), offset, bytes, writes, code);
}

}  // namespace

}  // namespace msl

#define MSL_CODE __builtin_return_address(0)
#define MSL_HOOKS(bytes)                                                                                            \
  void __tsan_read##bytes(void* p) { msl::access(p, bytes, bytes, false, MSL_CODE); }                        \
  void __tsan_write##bytes(void* p) { msl::access(p, bytes, bytes, true, MSL_CODE); }
#define MSL_UNALIGNED_HOOKS(bytes)                                                                                  \
  void __tsan_unaligned_read##bytes(void* p) { msl::access(p, bytes, 1, false, MSL_CODE); }                  \
  void __tsan_unaligned_write##bytes(void* p) { msl::access(p, bytes, 1, true, MSL_CODE); }

extern "C" {

MSL_HOOKS(1)
MSL_HOOKS(2)
MSL_HOOKS(4)
MSL_HOOKS(8)
MSL_HOOKS(16)
MSL_UNALIGNED_HOOKS(2)
MSL_UNALIGNED_HOOKS(4)
MSL_UNALIGNED_HOOKS(8)
MSL_UNALIGNED_HOOKS(16)
void __tsan_read_range(void* p, unsigned long bytes) { msl::access(p, bytes, 1, false, MSL_CODE); }
void __tsan_write_range(void* p, unsigned long bytes) { msl::access(p, bytes, 1, true, MSL_CODE); }
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  msl::access(from, bytes, 1, false, MSL_CODE);
  msl::access(to, bytes, 1, true, MSL_CODE);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  msl::access(from, bytes, 1, false, MSL_CODE);
  msl::access(to, bytes, 1, true, MSL_CODE);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  msl::access(to, bytes, 1, true, MSL_CODE);
  return std::memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void msl_copy(void* to, const void* from, size_t bytes, size_t align) {
  msl::access(from, bytes, align, false, MSL_CODE);
  msl::access(to, bytes, align, true, MSL_CODE);
  std::memmove(to, from, bytes);
}
}
