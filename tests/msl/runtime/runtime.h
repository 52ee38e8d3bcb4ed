// Inside of the runtime: the launch that Python describes, and the state that its parts share.
//
// One launch runs at a time (Python holds a lock), on one CPU thread. Its GPU threads are fibers.
#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include "msl/runtime.h"

namespace msl {

// What the simdgroups of a launch moved to or from one buffer. Lanes that touch the same byte in the same access count
// once in `bytes`; a transaction is a line of 128 bytes that an access touches; it is full when all its bytes are used.
struct Traffic {
  uint64_t bytes, lane_bytes, accesses, transactions, full_transactions, distinct_bytes;
};

enum class Access : uint32_t { read_only, output, in_out };

struct Buffer {  // mirrored by launch.py
  void* data;
  uint64_t bytes;
  const char* name;
  Access access;
  uint32_t element_bytes;
  uint64_t unwritten, first_unwritten;  // elements that nothing wrote
  Traffic read, written;
};

struct Launch {  // mirrored by launch.py
  Buffer* buffers;
  void (*kernel)();
  ThreadgroupVariable* variables;
  uint32_t num_buffers;
  uint32_t grid[3], group[3];
  uint32_t seed;
  uint32_t instrumented;
  uint32_t threadgroup_bytes;
  uint64_t threadgroups, threadgroup_barriers, simdgroup_barriers, simd_operations;
  uint64_t error_address;  // in the kernel's code
  char error[1024];
};

enum class Wait : uint8_t { ready, simd_operation, simdgroup_barrier, threadgroup_barrier, returned };

struct Fiber {
  void* stack_pointer;
  ThreadInfo info;
  Wait wait;
  Site site;
  int mem_flags;
  Combine combine;
  uint32_t active;
};

// Synchronisation so far, per kind of memory: accesses of two threads of a threadgroup are ordered when a barrier that
// names this memory lies between them.
enum Memory : uint32_t { device_memory, local_memory, num_memories };
struct Epochs {
  uint32_t of[num_memories];
};

struct Simdgroup {
  uint32_t first, size;
  Epochs epochs;
  alignas(32) unsigned char brought[simd_width * slot_bytes], result[simd_width * slot_bytes];
};

// A stretch of memory that kernels may access, inside the arena.
struct Region {
  unsigned char* begin;
  uint64_t bytes;
  const char* name;
  Access access;
  Memory memory;
  uint32_t buffer;  // index in Launch::buffers
};

struct State {
  Launch* launch = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  Fiber* running = nullptr;
  void* scheduler_stack = nullptr;
  Size3 threadgroup{};
  uint32_t threadgroup_number = 0;  // counted from 1
  Epochs epochs{};
  std::mt19937 random;
  bool failed = false;
};
extern State state;

// fiber.cpp
constexpr size_t stack_bytes = 64 << 10;
void prepare_stacks(uint32_t fibers);
void start_fiber(Fiber& fiber, uint32_t index);
void switch_to(Fiber& fiber);
void switch_to_scheduler();

// memory.cpp
void map_memory();
void unmap_memory();
void copy_back();
void poison_threadgroup_memory();
void check_threadgroup_memory();
void check_slack();
extern uintptr_t arena_begin;
extern uint64_t arena_bytes;
extern std::vector<Region> regions;
const Region* region_of(uintptr_t address, uint64_t bytes);
// Says what lies at an address that is in no region: "'k' (64 bytes) at byte offset 64".
bool describe_address(uintptr_t address, char* text, size_t text_bytes);

// checker.cpp: races, and reads of what nothing wrote
void reset_checker();
void check_access(const Region& region, uint64_t offset, uint64_t bytes, bool writes, void* code);
void finish_checker();

// traffic.cpp
void reset_traffic();
void count_access(uint32_t region, uint64_t offset, uint64_t bytes, bool writes, void* code);
void flush_traffic();  // all lanes of the running simdgroup wait: what comes next is another access
void finish_traffic();

// scheduler.cpp
void report(const char* format, ...) __attribute__((format(printf, 1, 2)));  // keeps the first message only
[[noreturn]] void stop(void* code, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace msl
