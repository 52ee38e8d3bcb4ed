// Counts what simdgroups move: bytes, and lines of 128 bytes (memory transactions).
//
// On a GPU the 32 lanes of a simdgroup execute an access together. Here they run one after another, so the accesses are
// put together again: those of the same instruction, each lane's n-th since all lanes last met at a barrier or simd
// operation, are one access of the simdgroup.
#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "runtime.h"

namespace msl {

namespace {

constexpr uint64_t line_bytes = 128;

struct LaneAccess {
  uint32_t site, occurrence, region;
  uint32_t writes, bytes;
  uint64_t offset;
};
std::vector<LaneAccess> pending;  // of the running simdgroup, since its lanes last met

std::unordered_map<void*, uint32_t> sites;  // by the address of the instruction
struct Occurrences {
  uint64_t meeting = 0;
  uint32_t of_lane[simd_width];
};
std::vector<Occurrences> occurrences;  // by site
uint64_t meeting = 1;

constexpr unsigned char was_read = 1, was_written = 2;
std::vector<std::vector<unsigned char>> touched;  // per device buffer, per byte

uint32_t site_of(void* code) {
  static void* last_code = nullptr;
  static uint32_t last_site = 0;
  if (code == last_code && last_site < occurrences.size()) return last_site;
  const auto [at, added] = sites.try_emplace(code, uint32_t(occurrences.size()));
  if (added) occurrences.emplace_back();
  last_code = code;
  return last_site = at->second;
}

// One access of a simdgroup: [first, last) sorted by offset, all to one buffer.
void count_simdgroup_access(const LaneAccess* first, const LaneAccess* last) {
  Buffer& buffer = state.launch->buffers[first->region];
  Traffic& traffic = first->writes ? buffer.written : buffer.read;
  traffic.accesses++;
  uint64_t line = UINT64_MAX, used_of_line = 0, end = 0;  // end: everything below is counted
  const auto close_line = [&] {
    if (line == UINT64_MAX) return;
    traffic.transactions++;
    traffic.full_transactions += used_of_line == std::min(line_bytes, buffer.bytes - line * line_bytes);
  };
  for (const LaneAccess* a = first; a != last; a++) {
    traffic.lane_bytes += a->bytes;
    for (uint64_t at = std::max(a->offset, end); at < a->offset + a->bytes;) {
      if (at / line_bytes != line) {
        close_line();
        line = at / line_bytes;
        used_of_line = 0;
      }
      const uint64_t stop_at = std::min(a->offset + a->bytes, (line + 1) * line_bytes);
      used_of_line += stop_at - at;
      traffic.bytes += stop_at - at;
      at = stop_at;
    }
    end = std::max(end, a->offset + a->bytes);
  }
  close_line();
}

}  // namespace

void reset_traffic() {
  pending.clear();
  sites.clear();
  occurrences.clear();
  meeting = 1;
  touched.assign(state.launch->num_buffers, {});
  for (uint32_t i = 0; i < state.launch->num_buffers; i++) touched[i].resize(state.launch->buffers[i].bytes);
}

void count_access(uint32_t index, uint64_t offset, uint64_t bytes, bool writes, void* code) {
  const Region& region = regions[index];
  if (region.memory == local_memory) return;
  const uint32_t site = site_of(code);
  Occurrences& of_site = occurrences[site];
  if (of_site.meeting != meeting) of_site = {meeting, {}};
  const uint32_t occurrence = of_site.of_lane[state.running->info.lane]++;
  pending.push_back({site, occurrence, region.buffer, writes, uint32_t(bytes), offset});
  std::vector<unsigned char>& bytes_touched = touched[region.buffer];
  for (uint64_t i = offset; i < offset + bytes; i++) bytes_touched[i] |= writes ? was_written : was_read;
}

void flush_traffic() {
  const auto same_access = [](const LaneAccess& a, const LaneAccess& b) {
    return a.site == b.site && a.occurrence == b.occurrence && a.region == b.region && a.writes == b.writes;
  };
  std::sort(pending.begin(), pending.end(), [](const LaneAccess& a, const LaneAccess& b) {
    return std::tie(a.site, a.occurrence, a.region, a.writes, a.offset) <
           std::tie(b.site, b.occurrence, b.region, b.writes, b.offset);
  });
  for (size_t i = 0, k; i < pending.size(); i = k) {
    for (k = i + 1; k < pending.size() && same_access(pending[i], pending[k]);) k++;
    count_simdgroup_access(&pending[i], pending.data() + k);
  }
  pending.clear();
  meeting++;
}

void finish_traffic() {
  for (uint32_t i = 0; i < state.launch->num_buffers; i++) {
    for (const unsigned char byte : touched[i]) {
      state.launch->buffers[i].read.distinct_bytes += (byte & was_read) != 0;
      state.launch->buffers[i].written.distinct_bytes += (byte & was_written) != 0;
    }
  }
}

}  // namespace msl
