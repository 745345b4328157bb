/* The kernels for processors with AVX-512 and its instructions for int8 (VNNI). */
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
#endif
#define WITH_AVX512
#define KERNELS avx512_kernels
#include "compute.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
