/* Which instruction sets this machine has. */
#include "isa.h"

extern const kv_isa kv_isa_portable;
#if defined(__x86_64__)
extern const kv_isa kv_isa_avx2, kv_isa_avx512;
#elif defined(__aarch64__)
extern const kv_isa kv_isa_neon;
#endif

/* Slowest first: the last one that this machine supports is the default. */
static const kv_isa *const compiled[] = {
    &kv_isa_portable,
#if defined(__x86_64__)
    &kv_isa_avx2,
    &kv_isa_avx512,
#elif defined(__aarch64__)
    &kv_isa_neon,
#endif
};

enum { NUM_COMPILED = sizeof compiled / sizeof compiled[0] };

const kv_isa *kv_isa_at(int index) {
    for (int i = 0; i < NUM_COMPILED; i++)
        if (compiled[i]->is_supported() && index-- == 0) return compiled[i];
    return NULL;
}

int kv_isa_count(void) {
    int count = 0;
    while (kv_isa_at(count) != NULL) count++;
    return count;
}

const char *kv_isa_name(const kv_isa *isa) { return isa->name; }

kv_tiling kv_isa_tiling(const kv_isa *isa) { return isa->tiling; }
