/* AVX2 with FMA and F16C: x86 since Haswell (2013) and Zen. */
#if defined(__x86_64__)

#define KV_ISA_NAME "avx2"
#define KV_NAME(x) x##_avx2
#define KV_SIMD_AVX2 1
#define KV_TARGET "avx2,fma,f16c"

#include <cpuid.h>

/* Before the instruction set is raised: this one must run everywhere. */
static int is_supported_avx2(void) {
    unsigned a, b, c = 0, d;
    __builtin_cpu_init(); /* and it asks whether the operating system saves the registers */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d)
        && (c & bit_F16C);
}

#include "isa_x86.h"

#else
typedef int kv_no_avx2; /* ISO C wants a declaration */
#endif
