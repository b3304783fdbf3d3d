// One piece of a product, and the functions that compute it: what linear.cc cuts, and each instruction set multiplies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "bf16.h"
#include "linear.h"
#include "vector.h"

namespace quire {

// One piece of a product: some panels, some rows. x has the inner dimension as the panels have it, and their type, but that
// bfloat16 is float32 where `widens(isa)`. Of int8, where two rows are the terms of one row of the output, always whole
// pairs.
struct ProductPiece {
  const char* x;
  int64_t x_stride;  // bytes
  int64_t lines;     // of 64 bytes in a panel: the padded inner dimension in groups of four bytes
  int64_t first_row, end_row;
  int64_t first_panel, end_panel;
  const char *next, *next_end;  // the panels of the piece that this thread has next; equal if none
  const Product* product;
  const float* row_scale;                             // int8 only
  const float* column_scale;                          // int8 only
  const uint8_t *codes = nullptr, *scales = nullptr;  // MXFP4 only, of this group
  int64_t panels_before = 0;                          // in the product, of the first that is in memory

  const char* panel(int64_t i) const {
    return static_cast<const char*>(product->packed) + (i - panels_before) * lines * kLine;
  }
  int64_t columns_of(int64_t panel_index) const { return std::min(kPanel, product->columns - panel_index * kPanel); }
};

QUIRE_INLINE void store_row(const ProductPiece& piece, int64_t row, int64_t panel, const float* values) {
  const Product& product = *piece.product;
  const int64_t start = row * product.columns + panel * kPanel, count = piece.columns_of(panel);
  const Floats row_of_panel = load(values, kPanel);
  if (product.out_float32) {
    store(static_cast<float*>(product.out) + start, row_of_panel, count);
  } else {
    store(static_cast<Bf16*>(product.out) + start, row_of_panel, count);
  }
}

// From memory, while the products that it will hold are computed.
QUIRE_INLINE void fetch_output(const ProductPiece& piece, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
  const Product& product = *piece.product;
  const int64_t bytes = product.out_float32 ? sizeof(float) : sizeof(Bf16);
  const char* out = static_cast<const char*>(product.out) + (row * product.columns + panel * kPanel) * bytes;
  for (int64_t r = 0; r < rows; ++r, out += product.columns * bytes) {
    for (int64_t at = 0; at < panels * kPanel * bytes; at += kLine) __builtin_prefetch(out + at, 1);
  }
}

// Has no products of bfloat16: they are computed in float32.
inline bool widens(Isa isa) { return isa < Isa::kAvx512Bf16; }

using RunPiece = void (*)(const ProductPiece&);

// Makes the piece's panels, float32 or bfloat16, of its codes.
using ExpandPanels = void (*)(const ProductPiece&, char* panels);
ExpandPanels mxfp4_expansion(Isa isa, bool float32);

// One for each instruction set, in linear_widened.cc and linear_x86.cc.
void plain_f32(const ProductPiece& piece);
void plain_bf16(const ProductPiece& piece);
void plain_int8(const ProductPiece& piece);
#if QUIRE_X86
void avx2_f32(const ProductPiece& piece);
void avx2_bf16(const ProductPiece& piece);
void avx2_int8(const ProductPiece& piece);
void avx512_f32(const ProductPiece& piece);
void avx512_bf16(const ProductPiece& piece);
void avx512_int8(const ProductPiece& piece);
void dot_bf16(const ProductPiece& piece);
void dot_int8(const ProductPiece& piece);
void amx_bf16(const ProductPiece& piece);
void amx_int8(const ProductPiece& piece);
#endif

}  // namespace quire
