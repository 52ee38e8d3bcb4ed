// Stacks of the GPU threads and the switch between them.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "runtime.h"

// msl_switch(&from, to): saves what a function call must keep on this stack, its pointer in `from`, and returns on the
// stack `to`.
extern "C" void msl_switch(void** from, void* to);
#define MSL_TEXT_(x) #x
#define MSL_TEXT(x) MSL_TEXT_(x)
#define MSL_SYMBOL MSL_TEXT(__USER_LABEL_PREFIX__) "msl_switch"
#if defined(__x86_64__)
constexpr size_t saved_registers = 6;  // rbp rbx r12 r13 r14 r15, below the return address
asm(".text\n.globl " MSL_SYMBOL "\n" MSL_SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");
#else
constexpr size_t saved_registers = 20;  // x19..x30, d8..d15
constexpr size_t saved_link = 11;       // x30, where `ret` goes
asm(".text\n.globl " MSL_SYMBOL "\n.p2align 2\n" MSL_SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
#endif

extern "C" {
const msl::ThreadInfo* msl_thread = nullptr;
}

namespace msl {

namespace {

unsigned char* stacks = nullptr;  // kept from launch to launch
uint32_t num_stacks = 0;

void run_fiber() {
  state.launch->kernel();
  state.running->wait = Wait::returned;
  switch_to_scheduler();
  std::abort();  // a thread that has returned is never run again
}

}  // namespace

void prepare_stacks(uint32_t fibers) {
  if (fibers <= num_stacks) return;
  if (stacks) munmap(stacks, num_stacks * stack_bytes);
  void* memory = mmap(nullptr, fibers * stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  stacks = static_cast<unsigned char*>(memory);
  num_stacks = fibers;
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  for (uint32_t i = 0; i < fibers; i++) mprotect(stacks + i * stack_bytes, page, PROT_NONE);
}

void start_fiber(Fiber& fiber, uint32_t index) {
  unsigned char* bottom = stacks + index * stack_bytes;
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(bottom + stack_bytes);
  *--top = nullptr;  // where run_fiber would return to; it also aligns the stack
  *--top = reinterpret_cast<void*>(&run_fiber);
  fiber.stack_pointer = top - saved_registers;
#else
  void** top = reinterpret_cast<void**>(bottom + stack_bytes) - saved_registers;
  top[saved_link] = reinterpret_cast<void*>(&run_fiber);
  fiber.stack_pointer = top;
#endif
}

void switch_to(Fiber& fiber) {
  state.running = &fiber;
  msl_thread = &fiber.info;
  msl_switch(&state.scheduler_stack, fiber.stack_pointer);
}

void switch_to_scheduler() { msl_switch(&state.running->stack_pointer, state.scheduler_stack); }

}  // namespace msl
