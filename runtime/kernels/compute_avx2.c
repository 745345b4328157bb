/* The kernels for processors with AVX2. */
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define KERNELS avx2_kernels
#include "compute.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
