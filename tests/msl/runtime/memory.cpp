// Memory of a launch: one reserved arena in which every buffer, and the threadgroup memory, lies between guard pages.
//
// A buffer ends at its guard (even seeds) or begins at it (odd ones), so plain runs see overruns on either side. The
// rest of its pages is filled with a pattern that is checked when the launch ends. Instrumented runs check every
// access.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

extern "C" {
unsigned char* msl_threadgroup_memory = nullptr;
}

namespace msl {

uintptr_t arena_begin = 0;
uint64_t arena_bytes = 0;
std::vector<Region> regions;

namespace {

constexpr uint64_t guard_bytes = 16 << 20;
constexpr uint64_t largest_alignment = 32;  // of a type that a kernel can access: vec<long, 4>
constexpr uint64_t red_zone_bytes = 64;   // between threadgroup variables
constexpr unsigned char poison = 0xff;    // NaN as float, -1 as int
constexpr unsigned char canary = 0x5c;

struct Pages {
  unsigned char* begin;
  uint64_t bytes;
};
std::vector<Pages> buffer_pages;
Pages threadgroup_pages;

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

// Lays the kernel's threadgroup variables out; returns the bytes they take with their red zones.
uint64_t place_threadgroup_variables() {
  Launch& launch = *state.launch;
  uint64_t used = red_zone_bytes, named = 0;
  for (ThreadgroupVariable* v = launch.variables; v; v = v->next) {
    v->offset = uint32_t(round_up(used, v->align));
    used = v->offset + round_up(v->bytes, 16) + red_zone_bytes;
    named = round_up(named, v->align) + v->bytes;
  }
  launch.threadgroup_bytes = uint32_t(named);
  return used;
}

void add_threadgroup_regions() {
  for (ThreadgroupVariable* v = state.launch->variables; v; v = v->next)
    regions.push_back({msl_threadgroup_memory + v->offset, v->bytes, v->name, Access::output, local_memory, UINT32_MAX});
}

void fill_buffer(const Region& region, const Pages& pages, const Buffer& buffer) {
  std::memset(pages.begin, canary, pages.bytes);
  if (buffer.access == Access::output) {
    std::memset(region.begin, poison, region.bytes);
  } else if (buffer.bytes) {
    std::memcpy(region.begin, buffer.data, region.bytes);
  }
  if (buffer.access == Access::read_only) mprotect(pages.begin, pages.bytes, PROT_READ);
}

}  // namespace

void map_memory() {
  Launch& launch = *state.launch;
  const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE));
  const uint64_t local = round_up(place_threadgroup_variables(), page);
  uint64_t total = guard_bytes + local + guard_bytes;
  for (uint32_t i = 0; i < launch.num_buffers; i++)
    total += std::max(round_up(launch.buffers[i].bytes, page), page) + guard_bytes;
  void* memory = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  arena_begin = reinterpret_cast<uintptr_t>(memory);
  arena_bytes = total;

  unsigned char* at = static_cast<unsigned char*>(memory) + guard_bytes;
  const auto open = [&](uint64_t bytes) {
    mprotect(at, bytes, PROT_READ | PROT_WRITE);
    const Pages pages{at, bytes};
    at += bytes + guard_bytes;
    return pages;
  };
  regions.clear();
  buffer_pages.clear();
  for (uint32_t i = 0; i < launch.num_buffers; i++) {
    const Buffer& buffer = launch.buffers[i];
    const Pages pages = open(std::max(round_up(buffer.bytes, page), page));
    unsigned char* end_fit = pages.begin + pages.bytes - round_up(buffer.bytes, largest_alignment);
    unsigned char* begin = launch.seed % 2 ? pages.begin : end_fit;
    regions.push_back({begin, buffer.bytes, buffer.name, buffer.access, device_memory, i});
    buffer_pages.push_back(pages);
    fill_buffer(regions.back(), pages, buffer);
  }
  threadgroup_pages = open(local);
  msl_threadgroup_memory = threadgroup_pages.begin;
  add_threadgroup_regions();
}

void unmap_memory() {
  munmap(reinterpret_cast<void*>(arena_begin), arena_bytes);
  arena_begin = arena_bytes = 0;
  regions.clear();
}

void copy_back() {
  Launch& launch = *state.launch;
  for (uint32_t i = 0; i < launch.num_buffers; i++)
    if (launch.buffers[i].access != Access::read_only && launch.buffers[i].bytes)
      std::memcpy(launch.buffers[i].data, regions[i].begin, regions[i].bytes);
}

void poison_threadgroup_memory() {
  std::memset(threadgroup_pages.begin, canary, threadgroup_pages.bytes);
  for (const Region& region : regions)
    if (region.memory == local_memory) std::memset(region.begin, poison, region.bytes);
}

void check_threadgroup_memory() {
  for (const Region& region : regions) {
    if (region.memory != local_memory) continue;
    const unsigned char* end = region.begin + region.bytes;
    for (uint64_t i = 0; i < red_zone_bytes; i++) {
      if (end[i] != canary)
        return report("write past the end of threadgroup variable '%s' (%lu bytes) at byte offset %lu", region.name,
                      (unsigned long)region.bytes, (unsigned long)(region.bytes + i));
      if (region.begin[-1 - int64_t(i)] != canary)
        return report("write before the start of threadgroup variable '%s' at byte offset -%lu", region.name,
                      (unsigned long)(i + 1));
    }
  }
}

void check_slack() {
  for (size_t i = 0; i < buffer_pages.size(); i++) {
    const Pages& pages = buffer_pages[i];
    const Region& region = regions[i];
    for (const unsigned char* p = pages.begin; p < pages.begin + pages.bytes; p++) {
      if (p == region.begin) p += region.bytes;
      if (p == pages.begin + pages.bytes) break;
      if (*p != canary)
        return report("out-of-bounds write to buffer '%s' (%lu bytes) at byte offset %ld", region.name,
                      (unsigned long)region.bytes, long(p - region.begin));
    }
  }
}

const Region* region_of(uintptr_t address, uint64_t bytes) {
  static size_t last = 0;
  const auto holds = [&](const Region& r) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(r.begin);
    return address >= begin && address + bytes <= begin + r.bytes;
  };
  if (last < regions.size() && holds(regions[last])) return &regions[last];
  for (size_t i = 0; i < regions.size(); i++)
    if (holds(regions[i])) return last = i, &regions[i];
  return nullptr;
}

bool describe_address(uintptr_t address, char* text, size_t text_bytes) {
  if (address - arena_begin >= arena_bytes) return false;
  const Region* nearest = nullptr;
  uint64_t nearest_distance = UINT64_MAX;
  for (const Region& region : regions) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(region.begin), end = begin + region.bytes;
    const uint64_t distance = address < begin ? begin - address : address >= end ? address - end + 1 : 0;
    if (distance < nearest_distance) nearest = &region, nearest_distance = distance;
  }
  if (!nearest) return false;
  std::snprintf(text, text_bytes, "%s '%s' (%lu bytes) at byte offset %ld",
                nearest->memory == local_memory ? "threadgroup variable" : "buffer", nearest->name,
                (unsigned long)nearest->bytes, long(address - reinterpret_cast<uintptr_t>(nearest->begin)));
  return true;
}

}  // namespace msl

extern "C" {

void* msl_buffer(int index) {
  return uint32_t(index) < msl::state.launch->num_buffers && msl::state.launch->buffers[index].name
             ? msl::regions[size_t(index)].begin
             : nullptr;
}
}
