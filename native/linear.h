// Matrix products of activations with weights that were packed once: bfloat16, and int8 with dynamic activations.
//
//   out[M, N] = x[M, K] * weight[K, N]
//
// Knows no XLA and no JAX: pointers, sizes, and a way to run tasks on threads.
//
// The packed layout is panels of 16 columns. Inside a panel the inner dimension goes in groups of as many values as fill
// four bytes (2 of bfloat16, 4 of int8), so that one 64-byte line holds one group of each of the 16 columns:
//
//   bfloat16  [N/16, K/2, 16, 2]        int8  [N/16, K/4, 16, 4]
//
// That line is the operand of a dot-product instruction, and 16 of them are a tile of AMX. Columns are padded to 16 and
// the inner dimension to 64 bytes, both with zeros. A row's result does not depend on how many rows there are: every
// path adds up the inner dimension in the same order whatever M is.
#pragma once

#include <cstdint>

#include "machine.h"

namespace quire {

constexpr int64_t kPanel = 16;

// The inner dimension as packed, in values; and in lines of a panel.
inline int64_t padded_inner(int64_t inner, int64_t itemsize) { return round_up(inner, kLine / itemsize); }
inline int64_t num_lines(int64_t inner, int64_t itemsize) { return padded_inner(inner, itemsize) * itemsize / 4; }
inline int64_t num_panels(int64_t columns) { return round_up(columns, kPanel) / kPanel; }

// A matrix of values of 1 or 2 bytes, [inner, columns] or transposed.
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

// x is bfloat16 [rows, inner].
void linear_bf16(Isa isa, const Product& product, const uint16_t* x, const Threads& threads);

// x is bfloat16 or float32 [rows, inner]; each row becomes two rows of int8, the second what the first leaves, and
// out[m, n] is the sum over both terms of float(sum_k q[m, k] * w[k, n]) * (row_scale[m] * column_scale[n]).
void linear_int8(Isa isa, const Product& product, const void* x, bool x_float32, const float* column_scale,
                 const Threads& threads);

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
