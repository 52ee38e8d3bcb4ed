/* Plain C with vectors of 16 bytes: whatever the compiler makes of them for the machine's baseline. */
#define KV_ISA_NAME "portable"
#define KV_NAME(x) x##_portable

static int is_supported_portable(void) { return 1; }

#if defined(__x86_64__) && !defined(__clang__) /* nearly every machine there has AVX2: this is for size */
#define KV_ONE_COPY 1
#endif

#include "isa_body.h"
