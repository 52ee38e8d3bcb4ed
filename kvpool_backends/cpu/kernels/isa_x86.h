/* The templates for the instruction sets KV_TARGET. Headers of the system come first: their functions must run
 * everywhere. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KV_PRAGMA_TEXT(...) _Pragma(#__VA_ARGS__)
#define KV_PRAGMA(...) KV_PRAGMA_TEXT(__VA_ARGS__)

#if defined(__clang__)
KV_PRAGMA(clang attribute push(__attribute__((target(KV_TARGET))), apply_to = function))
#else
KV_PRAGMA(GCC target(KV_TARGET))
#endif

#include <immintrin.h>

#include "isa_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
