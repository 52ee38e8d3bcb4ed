// The Metal standard library and, last, Metal's own keywords. Precompiled; every kernel starts with it.
#pragma once
#include "entry.h"
#include "math.h"
#include "scalar.h"
#include "simd.h"
#include "simdgroup_matrix.h"
#include "vector.h"

#define __METAL__ 1
#define __METAL_VERSION__ 310
#define __HAVE_BFLOAT__ 1
#define METAL_FUNC inline
#define METAL_CONST const

// Address spaces are one here; lint.py asks clang, where there is one, whether a kernel mixes them up.
#define device
#define constant
#define threadgroup
#define thread
