/* AVX2 with FMA and F16C: x86 since Haswell (2013) and Zen. */
#if defined(__x86_64__)

#define KV_ISA_NAME "avx2"
#define KV_NAME(x) x##_avx2
#define KV_SIMD_AVX2 1

#include <cpuid.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Before the instruction set is raised: this one must run everywhere. */
static int is_supported_avx2(void) {
    unsigned a, b, c = 0, d;
    __builtin_cpu_init(); /* and it asks whether the operating system saves the registers */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d)
        && (c & bit_F16C);
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>

#include "isa_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int kv_no_avx2; /* ISO C wants a declaration */
#endif
