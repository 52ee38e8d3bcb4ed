// Data races, and reads of memory that nothing has written: exact, for the accesses that a run makes.
//
// GPU threads are ordered by barriers only, and a barrier orders a whole threadgroup or a whole simdgroup at once. So
// an epoch counter per threadgroup and per simdgroup says everything that vector clocks would, and per byte it is
// enough to remember the last write and a summary of the reads that nothing has ordered since.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "runtime.h"

namespace msl {

namespace {

// The access of one thread, or of several that no barrier separates. All zero: none.
struct Stamp {
  uint32_t threadgroup = 0;  // counted from 1; 0: none yet
  uint32_t group_epoch = 0, simd_epoch = 0;
  uint16_t thread = 0;
  bool several_threads = false, several_simdgroups = false, several_threadgroups = false;

  uint32_t simdgroup() const { return thread / simd_width; }
};

struct Cell {
  Stamp write, reads;
};

// Per region, a cell per byte; none for read-only ones. calloc gives memory that costs nothing until it is touched.
std::vector<std::unique_ptr<Cell[], decltype(&std::free)>> cells;

// Whether no barrier lies between `before` and `now`, an access of one thread.
bool concurrent(const Stamp& before, const Stamp& now) {
  if (before.threadgroup == 0) return false;
  if (before.several_threadgroups || before.threadgroup != now.threadgroup) return true;
  if (before.group_epoch != now.group_epoch) return false;
  if (before.several_simdgroups || before.simdgroup() != now.simdgroup()) return true;
  if (before.simd_epoch != now.simd_epoch) return false;
  return before.several_threads || before.thread != now.thread;
}

// Adds a read to the summary of reads.
void add_read(Stamp& reads, const Stamp& now) {
  if (!concurrent(reads, now)) {
    reads = now;
    return;
  }
  reads.several_threadgroups |= reads.threadgroup != now.threadgroup;
  reads.several_simdgroups |= reads.simdgroup() != now.simdgroup();
  reads.several_threads |= reads.thread != now.thread;
}

Stamp stamp_now(Memory memory) {
  const ThreadInfo& thread = state.running->info;
  Stamp stamp;
  stamp.threadgroup = state.threadgroup_number;
  stamp.group_epoch = state.epochs.of[memory];
  stamp.simd_epoch = state.simdgroups[thread.simdgroup].epochs.of[memory];
  stamp.thread = uint16_t(thread.index_in_threadgroup);
  return stamp;
}

[[noreturn]] void stop_race(const Region& region, uint64_t offset, const Stamp& before, bool before_wrote, bool writes,
                            void* code) {
  char other[80];
  if (before.several_threads || before.several_simdgroups || before.several_threadgroups)
    std::snprintf(other, sizeof other, "several threads");
  else
    std::snprintf(other, sizeof other, "thread %u of threadgroup number %u", before.thread, before.threadgroup - 1);
  stop(code, "data race on %s '%s' at byte offset %lu: this thread %s what %s %s, no barrier in between",
       region.memory == local_memory ? "threadgroup variable" : "buffer", region.name, (unsigned long)offset,
       writes ? "writes" : "reads", other, before_wrote ? (writes ? "wrote" : "writes") : "read");
}

}  // namespace

void reset_checker() {
  cells.clear();
  for (const Region& region : regions) {
    const bool watched = region.access != Access::read_only;
    cells.emplace_back(watched ? static_cast<Cell*>(std::calloc(region.bytes + 1, sizeof(Cell))) : nullptr, &std::free);
  }
}

void check_access(const Region& region, uint64_t offset, uint64_t bytes, bool writes, void* code) {
  Cell* of_region = cells[size_t(&region - regions.data())].get();
  if (!of_region) return;
  const Stamp now = stamp_now(region.memory);
  for (uint64_t i = offset; i < offset + bytes; i++) {
    Cell& cell = of_region[i];
    if (region.memory == local_memory && cell.write.threadgroup != now.threadgroup) cell.write = {};
    if (region.memory == local_memory && cell.reads.threadgroup != now.threadgroup) cell.reads = {};
    if (concurrent(cell.write, now)) stop_race(region, i, cell.write, true, writes, code);
    if (writes) {
      if (concurrent(cell.reads, now)) stop_race(region, i, cell.reads, false, true, code);
      cell.write = now;
    } else {
      if (cell.write.threadgroup == 0 && region.access == Access::output)
        stop(code, "read of %s '%s' at byte offset %lu, which nothing has written",
             region.memory == local_memory ? "threadgroup variable" : "output", region.name, (unsigned long)i);
      add_read(cell.reads, now);
    }
  }
}

void finish_checker() {
  for (size_t i = 0; i < regions.size(); i++) {
    if (regions[i].memory != device_memory || regions[i].access != Access::output) continue;
    Buffer& buffer = state.launch->buffers[regions[i].buffer];
    for (uint64_t at = 0; at < buffer.bytes; at += buffer.element_bytes) {
      bool written = true;
      for (uint64_t k = at; k < at + buffer.element_bytes; k++) written &= cells[i][k].write.threadgroup != 0;
      if (!written && buffer.unwritten++ == 0) buffer.first_unwritten = at / buffer.element_bytes;
    }
  }
}

}  // namespace msl
