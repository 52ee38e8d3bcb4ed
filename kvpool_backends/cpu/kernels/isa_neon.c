/* NEON of 64-bit ARM, where every machine has it. */
#if defined(__aarch64__)

#define KV_ISA_NAME "neon"
#define KV_NAME(x) x##_neon
#define KV_SIMD_NEON 1

#include <arm_neon.h>

static int is_supported_neon(void) { return 1; }

#include "isa_body.h"

#else
typedef int kv_no_neon; /* ISO C wants a declaration */
#endif
