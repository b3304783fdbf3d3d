// What the parts of a context come to, put together and handed out.
#pragma once

#include <cstdint>

#include "attention.h"

namespace quire {

// What the rows of a tile have found in one part or in several: each row's output times `total`, the sum of
// 2^(score - top). A row that has seen nothing has a total of 0 and a top of minus infinity; its output is of no meaning.
struct Found {
  float* out;          // [X, H]
  float *top, *total;  // [X]
};

struct PartFunctions {
  // to += part. Parts are added in the order of the context, by whoever does it.
  void (*add)(const Found& to, const Found& part, int64_t num_rows, int64_t head_dim);
  // to[h] = from[h] * factor, in the element type.
  void (*store)(void* to, const float* from, float factor, int64_t head_dim);
};

PartFunctions part_functions(Isa isa, Element element);

}  // namespace quire
