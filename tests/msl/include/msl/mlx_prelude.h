// What MLX puts in front of a custom kernel, as far as kernels may rely on it here.
#pragma once
#include "all.h"

using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
