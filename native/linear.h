// Matrix products of activations with weights that were packed once: bfloat16, and int8 with dynamic activations.
//
//   out[M, N] = x[M, K] * weight[K, N]
//
// Grouped products have several weights, each for the rows next to each other that are its group; those in float32, too.
//
// Knows no XLA and no JAX: pointers, sizes, and a way to run tasks on threads.
//
// The packed layout is panels of 16 columns. Inside a panel the inner dimension goes in groups of as many values as fill
// four bytes (1 of float32, 2 of bfloat16, 4 of int8), so that one 64-byte line holds one group of each of the 16 columns:
//
//   float32  [N/16, K, 16, 1]        bfloat16  [N/16, K/2, 16, 2]        int8  [N/16, K/4, 16, 4]
//
// That line is the operand of a dot-product instruction, and 16 of them are a tile of AMX. Columns are padded to 16 and
// the inner dimension to 64 bytes, both with zeros. A row's result does not depend on how many rows there are: every
// path adds up the inner dimension in the same order whatever M is. Rows of zeros at the end, which is what a step is padded
// with, are not multiplied: their products are zeros.
#pragma once

#include <cstdint>

#include "machine.h"

namespace quire {

constexpr int64_t kPanel = 16;

// The inner dimension as packed, in values; and in lines of a panel.
inline int64_t padded_inner(int64_t inner, int64_t itemsize) { return round_up(inner, kLine / itemsize); }
inline int64_t num_lines(int64_t inner, int64_t itemsize) { return padded_inner(inner, itemsize) * itemsize / 4; }
inline int64_t num_panels(int64_t columns) { return round_up(columns, kPanel) / kPanel; }

// A matrix of values of 1, 2 or 4 bytes, [inner, columns] or transposed.
struct Matrix {
  const void* data;
  int64_t itemsize, inner, columns;
  bool transposed;
};

void pack(const Matrix& matrix, void* packed, const Threads& threads);

struct Product {
  int64_t rows;
  int64_t inner;
  int64_t columns;
  const void* packed;
  void* out;  // [rows, columns], bfloat16 or float32
  bool out_float32;
};

// How many rows of x, bfloat16 or float32 [rows, inner], there are up to the last that is not all zeros.
int32_t rows_in_use(const void* x, bool float32, int64_t rows, int64_t inner);

// Zeros in the rows of the output from one on.
void clear_behind(const Product& product, int64_t first_row);

// x is bfloat16 [rows, inner].
void linear_bf16(Isa isa, const Product& product, const uint16_t* x, const Threads& threads);

// x is bfloat16 or float32 [rows, inner]; each row becomes two rows of int8, the second what the first leaves, and
// out[m, n] is the sum over both terms of float(sum_k q[m, k] * w[k, n]) * (row_scale[m] * column_scale[n]).
void linear_int8(Isa isa, const Product& product, const void* x, bool x_float32, const float* column_scale,
                 const Threads& threads);

// The rows of a grouped product: sizes[0] for the first weight, then sizes[1] for the second, and so on. None is negative,
// and together they are at most the product's rows; what is behind them becomes zeros and costs nothing.
struct Groups {
  int64_t count;
  const int32_t* sizes;
};

// As above, but product.packed is the weights of all groups, one after the other.
void grouped_float(Isa isa, const Product& product, const Groups& groups, const void* x, bool float32,
                   const Threads& threads);

// column_scale is [groups, columns].
void grouped_int8(Isa isa, const Product& product, const Groups& groups, const void* x, bool x_float32,
                  const float* column_scale, const Threads& threads);

// MXFP4: 4 bits a weight, and 32 of them along the inner dimension share a power of two. Of each group, as the rest is:
//
//   codes   [N/16, K/2, 16]   two weights next to each other along the inner dimension in a byte, the first in the low bits
//   scales  [N/16, K/32, 16]  exponents, 127 more than they are
//
// with K and N padded to 32 and 16.
constexpr int64_t kMxfp4Block = 32, kMxfp4Codes = kMxfp4Block / 2;

struct Mxfp4 {
  const uint8_t *codes, *scales;
};

// Expands a few panels at a time to the type of x. product.packed is not read.
void grouped_mxfp4(Isa isa, const Product& product, const Groups& groups, const void* x, bool float32,
                   const Mxfp4& weights, const Threads& threads);

// An activation is so many int8 numbers.
constexpr int64_t kTerms = 2;

// Rows of activations, float32 or bfloat16 [rows, inner], to int8 [rows, terms, padded] with zeros behind, and a scale for
// each term of each.
struct Activations {
  const void* x;
  bool float32;
  int64_t inner, padded;
  int8_t* out;
  float* scale;
};

void quantize(Isa isa, const Activations& activations, int64_t first_row, int64_t end_row);

}  // namespace quire
