// Runs a launch: threadgroups one after another; in a threadgroup every simdgroup until all its lanes wait for
// something that only other simdgroups can give. Which lane, simdgroup and threadgroup goes first is up to the seed.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "runtime.h"

namespace msl {

State state;

namespace {

constexpr uint32_t threadgroup_bytes_max = 32768;  // of every Apple GPU

sigjmp_buf after_fault;
pthread_t launching_thread;
alignas(16) unsigned char signal_stack[64 << 10];

void append_thread(char* text, size_t text_bytes) {
  const size_t used = std::strlen(text);
  const Size3& group = state.threadgroup;
  if (!state.running) return;
  const ThreadInfo& thread = state.running->info;
  const Size3& at = thread.position_in_threadgroup;
  std::snprintf(text + used, text_bytes - used,
                " [threadgroup (%u, %u, %u), thread (%u, %u, %u), simdgroup %u, lane %u]", group.x, group.y, group.z,
                at.x, at.y, at.z, thread.simdgroup, thread.lane);
}

void vreport(const char* format, va_list arguments) {
  if (state.failed) return;
  state.failed = true;
  Launch& launch = *state.launch;
  std::vsnprintf(launch.error, sizeof launch.error, format, arguments);
  append_thread(launch.error, sizeof launch.error);
}

// A kernel touched memory that it may not: a guard page, a read-only buffer, a wild address.
void on_fault(int number, siginfo_t* info, void* context) {
  if (!pthread_equal(launching_thread, pthread_self())) {  // somebody else's: fault again, without this handler
    signal(number, SIG_DFL);
    return;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
  char where[200];
  if (!describe_address(address, where, sizeof where)) {
    report("access to address %p, which is no memory of this launch (a null or wild pointer, a buffer that is not "
           "bound, a misaligned vector, or the thread's stack of 64 KiB is full)", info->si_addr);
  } else if (region_of(address, 1)) {
    report("write to read-only %s", where);
  } else {
    report("out-of-bounds access to %s", where);
  }
#if defined(__x86_64__) && defined(__linux__)
  state.launch->error_address = uint64_t(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__) && defined(__linux__)
  state.launch->error_address = static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#else
  (void)context;
#endif
  siglongjmp(after_fault, 1);
}

bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

bool same_site(const Fiber& a, const Fiber& b) {
  return a.wait == b.wait && a.site.line == b.site.line && a.site.column == b.site.column &&
         same_text(a.site.what, b.site.what) && same_text(a.site.file, b.site.file);
}

void report_divergence(Fiber& waiting, const Fiber& other, const char* group) {
  state.running = &waiting;
  char elsewhere[300];
  if (other.wait == Wait::returned) {
    std::snprintf(elsewhere, sizeof elsewhere, "has returned");
  } else {
    std::snprintf(elsewhere, sizeof elsewhere, "waits in %s at %s:%u", other.site.what, other.site.file,
                  other.site.line);
  }
  report("divergent %s: this thread waits in %s at %s:%u, but thread %u of the same %s %s", waiting.site.what,
         waiting.site.what, waiting.site.file, waiting.site.line, other.info.index_in_threadgroup, group, elsewhere);
}

// All lanes wait. Lets them leave a simd operation or simdgroup barrier; false if they are in neither.
bool resolve_simdgroup(Simdgroup& group) {
  Fiber* lanes = &state.fibers[group.first];
  Fiber* leader = nullptr;
  for (uint32_t i = 0; i < group.size && !leader; i++)
    if (lanes[i].wait == Wait::simd_operation || lanes[i].wait == Wait::simdgroup_barrier) leader = &lanes[i];
  if (!leader) return false;
  uint32_t active = 0;
  for (uint32_t i = 0; i < group.size; i++) {
    if (lanes[i].wait == Wait::returned) continue;
    if (!same_site(*leader, lanes[i])) return report_divergence(*leader, lanes[i], "simdgroup"), false;
    active |= 1u << i;
  }
  const bool is_barrier = leader->wait == Wait::simdgroup_barrier;
  Launch& launch = *state.launch;
  (is_barrier ? launch.simdgroup_barriers : launch.simd_operations)++;
  if (is_barrier) {
    for (uint32_t memory = 0; memory < num_memories; memory++)
      group.epochs.of[memory] += leader->mem_flags >> memory & 1;
  } else {
    std::memcpy(group.result, group.brought, sizeof group.result);
    if (leader->combine) leader->combine(active, group.result);
  }
  for (uint32_t i = 0; i < group.size; i++) {
    if (lanes[i].wait == Wait::returned) continue;
    lanes[i].active = active;
    lanes[i].wait = Wait::ready;
  }
  return true;
}

void run_simdgroup(Simdgroup& group) {
  uint32_t order[simd_width];
  do {
    std::iota(order, order + group.size, 0);
    if (state.launch->seed) std::shuffle(order, order + group.size, state.random);
    for (uint32_t i = 0; i < group.size; i++) {
      Fiber& fiber = state.fibers[group.first + order[i]];
      if (fiber.wait == Wait::ready) switch_to(fiber);
      if (state.failed) return;
    }
    if (state.launch->instrumented) flush_traffic();
  } while (resolve_simdgroup(group) && !state.failed);
}

// Every thread waits at a threadgroup barrier or has returned. Opens the barrier; false when the threadgroup is done.
bool resolve_threadgroup() {
  Fiber* leader = nullptr;
  for (Fiber& fiber : state.fibers)
    if (fiber.wait == Wait::threadgroup_barrier) {
      leader = &fiber;
      break;
    }
  if (!leader) return false;
  for (const Fiber& fiber : state.fibers)
    if (!same_site(*leader, fiber)) return report_divergence(*leader, fiber, "threadgroup"), false;
  state.launch->threadgroup_barriers++;
  for (uint32_t memory = 0; memory < num_memories; memory++) state.epochs.of[memory] += leader->mem_flags >> memory & 1;
  for (Fiber& fiber : state.fibers) fiber.wait = Wait::ready;
  return true;
}

Size3 divided_up(const uint32_t grid[3], const uint32_t group[3]) {
  const auto groups = [&](int axis) { return (grid[axis] + group[axis] - 1) / group[axis]; };
  return {groups(0), groups(1), groups(2)};
}

// Creates the threads of a threadgroup; at the grid's edges there may be fewer, as dispatchThreads does it.
void start_threadgroup(const Size3& position, const Size3& groups) {
  const Launch& launch = *state.launch;
  const Size3 first{position.x * launch.group[0], position.y * launch.group[1], position.z * launch.group[2]};
  const Size3 size{std::min(launch.group[0], launch.grid[0] - first.x),
                   std::min(launch.group[1], launch.grid[1] - first.y),
                   std::min(launch.group[2], launch.grid[2] - first.z)};
  const uint32_t threads = size.x * size.y * size.z;
  state.threadgroup = position;
  state.running = nullptr;
  state.epochs = {};
  state.simdgroups.resize((threads + simd_width - 1) / simd_width);
  for (uint32_t i = 0; i < state.simdgroups.size(); i++) {
    state.simdgroups[i].first = i * simd_width;
    state.simdgroups[i].size = std::min(simd_width, threads - i * simd_width);
    state.simdgroups[i].epochs = {};
  }
  state.fibers.resize(threads);
  for (uint32_t i = 0; i < threads; i++) {
    Fiber& fiber = state.fibers[i];
    fiber = {};
    ThreadInfo& info = fiber.info;
    info.position_in_threadgroup = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    info.position_in_grid = {first.x + info.position_in_threadgroup.x, first.y + info.position_in_threadgroup.y,
                             first.z + info.position_in_threadgroup.z};
    info.threadgroup_position = position;
    info.threadgroups_per_grid = groups;
    info.threads_per_grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
    info.threads_per_threadgroup = size;
    info.index_in_threadgroup = i;
    info.lane = i % simd_width;
    info.simdgroup = i / simd_width;
    start_fiber(fiber, i);
  }
}

void run_threadgroup() {
  std::vector<uint32_t> order(state.simdgroups.size());
  poison_threadgroup_memory();
  do {
    std::iota(order.begin(), order.end(), 0);
    if (state.launch->seed) std::shuffle(order.begin(), order.end(), state.random);
    for (const uint32_t i : order) {
      run_simdgroup(state.simdgroups[i]);
      if (state.failed) return;
    }
    check_threadgroup_memory();
  } while (!state.failed && resolve_threadgroup() && !state.failed);
}

void run_grid() {
  Launch& launch = *state.launch;
  const Size3 groups = divided_up(launch.grid, launch.group);
  std::vector<uint32_t> order(uint64_t(groups.x) * groups.y * groups.z);
  std::iota(order.begin(), order.end(), 0);
  if (launch.seed) std::shuffle(order.begin(), order.end(), state.random);
  for (const uint32_t i : order) {
    state.threadgroup_number = i + 1;
    start_threadgroup({i % groups.x, i / groups.x % groups.y, i / (groups.x * groups.y)}, groups);
    run_threadgroup();
    if (state.failed) return;
    launch.threadgroups++;
  }
}

}  // namespace

void report(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vreport(format, arguments);
  va_end(arguments);
}

void stop(void* code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vreport(format, arguments);
  va_end(arguments);
  state.launch->error_address = reinterpret_cast<uint64_t>(code);
  switch_to_scheduler();  // and never comes back
  std::abort();
}

}  // namespace msl

using namespace msl;

extern "C" {

void msl_fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vreport(format, arguments);
  va_end(arguments);
  switch_to_scheduler();
  std::abort();
}

void msl_barrier(BarrierScope scope, int mem_flags, const Site* site) {
  Fiber& fiber = *state.running;
  fiber.wait = scope == barrier_threadgroup ? Wait::threadgroup_barrier : Wait::simdgroup_barrier;
  fiber.site = *site;
  fiber.mem_flags = mem_flags;
  switch_to_scheduler();
}

Exchange msl_exchange(const void* value, size_t bytes, Combine combine, const Site* site) {
  Fiber& fiber = *state.running;
  Simdgroup& group = state.simdgroups[fiber.info.simdgroup];
  std::memcpy(group.brought + slot_bytes * fiber.info.lane, value, bytes);
  fiber.wait = Wait::simd_operation;
  fiber.site = *site;
  fiber.combine = combine;
  switch_to_scheduler();
  return {group.result, fiber.active};
}

// Runs the launch; 0, or 1 with a message in launch->error. Buffers are copied in and, if all went well, out.
int msl_launch(Launch* launch) {
  state.launch = launch;
  state.failed = false;
  state.running = nullptr;
  state.random.seed(launch->seed);
  map_memory();
  if (launch->threadgroup_bytes > threadgroup_bytes_max)
    report("threadgroup memory of %u bytes, the limit is %u", launch->threadgroup_bytes, threadgroup_bytes_max);
  prepare_stacks(launch->group[0] * launch->group[1] * launch->group[2]);
  if (launch->instrumented) reset_checker(), reset_traffic();

  launching_thread = pthread_self();
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  stack_t own = {}, old_stack;
  own.ss_sp = signal_stack;
  own.ss_size = sizeof signal_stack;
  sigaltstack(&own, &old_stack);
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  if (!state.failed && !sigsetjmp(after_fault, 1)) run_grid();
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);

  state.running = nullptr;
  if (!state.failed) check_slack();
  if (!state.failed) {
    if (launch->instrumented) finish_checker(), finish_traffic();
    copy_back();
  }
  unmap_memory();
  return state.failed;
}
}
