/* AVX-512 F, BW, VL, DQ: x86 servers since Skylake-SP, Zen since 4. */
#if defined(__x86_64__)

#define KV_ISA_NAME "avx512"
#define KV_NAME(x) x##_avx512
#define KV_SIMD_AVX512 1
#define KV_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"

/* Before the instruction set is raised: this one must run everywhere. */
static int is_supported_avx512(void) {
    __builtin_cpu_init(); /* and it asks whether the operating system saves the registers */
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#include "isa_x86.h"

#else
typedef int kv_no_avx512; /* ISO C wants a declaration */
#endif
