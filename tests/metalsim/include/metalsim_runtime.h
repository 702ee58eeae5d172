// Interface between a simulated kernel (which includes metal_stdlib) and the executor.
// Results come back through out-parameters so that MemorySanitizer, which does not see
// into the executor, never consults stale return-value shadow.
#pragma once
#include <cstddef>
#include <cstdint>

namespace metalsim {

constexpr unsigned kSimdWidth = 32;
constexpr unsigned kMaxLaneBytes = 64;

struct ThreadAttributes {
  uint32_t position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  uint32_t grid_size[3], threads_per_threadgroup[3], dispatch_threads[3],
      threadgroups_per_grid[3];
  uint32_t index_in_threadgroup, index_in_simdgroup, simdgroup_index, simdgroups;

  uint32_t dispatch_count() const {
    return dispatch_threads[0] * dispatch_threads[1] * dispatch_threads[2];
  }
};

struct SimdView {  // what one lane sees after all active lanes published a value
  const unsigned char* values;  // kSimdWidth slots of kMaxLaneBytes
  uint32_t active;              // bit per participating lane
  uint32_t lane;
};

// Publish `size` bytes and wait for the other lanes of the simdgroup at the same source
// line.
void simd_exchange(const void* value, unsigned size, const char* operation, int line,
                   SimdView* view);
// Wait for every thread of the threadgroup. `orders_memory` is false for
// mem_flags::mem_none.
void threadgroup_wait(const char* operation, int line, bool orders_memory);
void simdgroup_wait(int line, bool orders_memory);
void lane_index(uint32_t* lane);
void threadgroup_allocate(int id, const char* name, size_t size, void** address);
[[noreturn]] void fail(const char* message, const char* operation, int line);

}  // namespace metalsim

extern "C" void metalsim_kernel_entry(void* const* buffers,
                                      const metalsim::ThreadAttributes* thread);
