// One fiber a Metal thread: its stack, and how the executor switches to it and back.
#pragma once
#include <vector>

#include "metalsim_runtime.h"
#include "regions.h"

namespace metalsim {
namespace {

constexpr size_t kStackBytes = METALSIM_SANITIZER == THREAD ? 128 * 1024 : 512 * 1024;

enum class State { Ready, AtSimd, AtBarrier, Done };

struct Fiber {
  ThreadAttributes attributes;
  State state;
  const char* operation;
  int line;
  unsigned char published[kMaxLaneBytes];
  unsigned published_size;
  SimdView* view;
  void* stack_pointer;
  unsigned char* stack;
  void* sanitizer_context = nullptr;
};

std::vector<void*> buffer_pointers;
Fiber* current;
void* scheduler_stack_pointer;
char finished;  // ThreadSanitizer: orders every thread before the results are read
void* scheduler_context;
const void* scheduler_stack;
size_t scheduler_stack_size;

asm(".text\n.globl metalsim_switch\n.type metalsim_switch,@function\nmetalsim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
extern "C" void metalsim_switch(void** save, void* load);

void resume(Fiber& f) {
  current = &f;
#if METALSIM_SANITIZER == ADDRESS
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, f.stack, kStackBytes);
#elif METALSIM_SANITIZER == THREAD
  __tsan_switch_to_fiber(f.sanitizer_context, __tsan_switch_to_fiber_no_sync);
#endif
  metalsim_switch(&scheduler_stack_pointer, f.stack_pointer);
#if METALSIM_SANITIZER == ADDRESS
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void suspend(bool finished = false) {
  Fiber& f = *current;
#if METALSIM_SANITIZER == ADDRESS
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(finished ? nullptr : &fake, scheduler_stack,
                                 scheduler_stack_size);
#elif METALSIM_SANITIZER == THREAD
  __tsan_switch_to_fiber(scheduler_context, __tsan_switch_to_fiber_no_sync);
#endif
  metalsim_switch(&f.stack_pointer, scheduler_stack_pointer);
#if METALSIM_SANITIZER == ADDRESS
  __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_stack_size);
#endif
}

void fiber_main() {
#if METALSIM_SANITIZER == ADDRESS
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
  metalsim_kernel_entry(buffer_pointers.data(), &current->attributes);
#if METALSIM_SANITIZER == THREAD
  __tsan_release(&finished);
#endif
  current->state = State::Done;
  suspend(true);
}

void start(Fiber& f) {
  f.state = State::Ready;
#if METALSIM_SANITIZER == THREAD
  // A new thread on this stack: forget what the previous one did there.
  mmap(f.stack + kPage, kStackBytes - kPage, PROT_READ | PROT_WRITE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
#endif
  void** top = (void**)(f.stack + kStackBytes - 56);  // entry needs rsp = 8 mod 16
  *--top = (void*)fiber_main;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f.stack_pointer = top;
#if METALSIM_SANITIZER == THREAD
  if (f.sanitizer_context) __tsan_destroy_fiber(f.sanitizer_context);
  f.sanitizer_context = __tsan_create_fiber(0);
#endif
}

}  // namespace
}  // namespace metalsim
