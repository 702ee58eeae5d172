#!/bin/sh
# Runs a Python with glibc's allocator told to keep big blocks. Otherwise each large
# temporary is mapped and faulted in anew, and training is several times slower.
GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4000000000:glibc.malloc.trim_threshold=8000000000:glibc.malloc.top_pad=1000000000:glibc.malloc.arena_max=1
export GLIBC_TUNABLES
exec python "$@"
