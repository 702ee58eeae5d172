// Buffers and threadgroup variables: memory whose ends are watched and whose first
// contents are garbage.
#pragma once
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#define ADDRESS 1
#define THREAD 2
#define MEMORY 3
#if METALSIM_SANITIZER == ADDRESS
#include <sanitizer/common_interface_defs.h>
#elif METALSIM_SANITIZER == THREAD
#include <sanitizer/tsan_interface.h>
#elif METALSIM_SANITIZER == MEMORY
#include <sanitizer/msan_interface.h>
#endif

namespace metalsim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMaxThreadgroupBytes = 32768;

unsigned char poison;

[[noreturn]] void die(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "metalsim: error: ");
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n");
  _exit(3);
}

// Byte loops, as sanitizers intercept memset and memcpy and would see accesses.
void fill_bytes(void* p, unsigned char value, size_t n) {
  for (volatile unsigned char *c = (unsigned char*)p, *e = c + n; c != e; ++c)
    *c = value;
}

void copy_bytes(void* to, const void* from, size_t n) {
  for (size_t i = 0; i < n; ++i)
    ((volatile unsigned char*)to)[i] = ((const unsigned char*)from)[i];
}

struct Region {
  const char* name;
  unsigned char* data;
  size_t size;
  int id;
};

// Of fixed size: a fiber must not allocate, or ThreadSanitizer reports the executor.
struct RegionTable {
  Region items[256];
  size_t count = 0;
  Region* begin() { return items; }
  Region* end() { return items + count; }
  Region& add(Region r);
  Region* find(int id) {
    for (auto& r : *this)
      if (r.id == id) return &r;
    return nullptr;
  }
};
RegionTable buffers;    // the kernel's arguments
RegionTable variables;  // of the current threadgroup

// Without a sanitizer each region ends at an inaccessible page, so overruns fault.
unsigned char* allocate_guarded(size_t size) {
#if METALSIM_SANITIZER
  return (unsigned char*)calloc(1, size ? size : 1);
#else
  size_t usable = (size + 15) / 16 * 16, pages = (usable + kPage - 1) / kPage * kPage;
  auto* base = (unsigned char*)mmap(nullptr, pages + 2 * kPage, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  mprotect(base, kPage, PROT_NONE);
  mprotect(base + kPage + pages, kPage, PROT_NONE);
  return base + kPage + pages - usable;
#endif
}

Region& RegionTable::add(Region r) {
  if (count == sizeof items / sizeof *items)
    die("more than %zu buffers or threadgroup variables", count);
  return items[count++] = r;
}

void forget(Region& r) {  // back to uninitialised
  fill_bytes(r.data, poison, r.size);
#if METALSIM_SANITIZER == MEMORY
  __msan_poison(r.data, r.size);
#endif
}

}  // namespace
}  // namespace metalsim
