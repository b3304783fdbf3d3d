// Products widened to float32 or int32: plain C++, and the same code compiled for AVX2 and AVX512.
#include <cstring>

#include "linear_piece.h"
#include "vector.h"

namespace quire {
namespace {

template <int kRows>
QUIRE_INLINE void store_rows(const ProductPiece& piece, int64_t row, int64_t panel, const Floats (&sums)[kRows]) {
  for (int r = 0; r < kRows; ++r) {
    float values[kPanel];
    std::memcpy(values, &sums[r], sizeof(values));
    store_row(piece, row + r, panel, values);
  }
}

template <int kRows>
QUIRE_INLINE void f32_rows(const ProductPiece& piece, int64_t row, int64_t panel) {
  const char* weights = piece.panel(panel);
  Floats sums[kRows] = {};
  for (int64_t line = 0; line < piece.lines; ++line) {
    Floats values;
    std::memcpy(&values, weights + line * kLine, sizeof(values));
    for (int r = 0; r < kRows; ++r) {
      float one;
      std::memcpy(&one, piece.x + (row + r) * piece.x_stride() + line * 4, sizeof(one));
      sums[r] += values * one;
    }
  }
  store_rows(piece, row, panel, sums);
}

template <int kRows>
QUIRE_INLINE void widened_bf16_rows(const ProductPiece& piece, int64_t row, int64_t panel) {
  const char* weights = piece.panel(panel);
  Floats sums[kRows] = {};
  for (int64_t line = 0; line < piece.lines; ++line) {
    Ints pairs;
    std::memcpy(&pairs, weights + line * kLine, sizeof(pairs));
    const Ints low = pairs << 16, high = pairs & static_cast<int32_t>(0xffff0000);
    Floats even, odd;
    std::memcpy(&even, &low, sizeof(even));
    std::memcpy(&odd, &high, sizeof(odd));
    for (int r = 0; r < kRows; ++r) {
      uint32_t two;
      std::memcpy(&two, piece.x + (row + r) * piece.x_stride() + line * 4, sizeof(two));
      sums[r] += even * to_float(Bf16{static_cast<uint16_t>(two)});
      sums[r] += odd * to_float(Bf16{static_cast<uint16_t>(two >> 16)});
    }
  }
  store_rows(piece, row, panel, sums);
}

template <int kRows>
QUIRE_INLINE void widened_int8_rows(const ProductPiece& piece, int64_t row, int64_t panel) {
  const char* weights = piece.panel(panel);
  Ints sums[kRows] = {};
  for (int64_t line = 0; line < piece.lines; ++line) {
    Ints fours;
    std::memcpy(&fours, weights + line * kLine, sizeof(fours));
    for (int byte = 0; byte < 4; ++byte) {
      const Ints values = (fours << (24 - 8 * byte)) >> 24;
      for (int r = 0; r < kRows; ++r) {
        sums[r] += values * static_cast<int32_t>(
            static_cast<int8_t>(piece.x[(row + r) * piece.x_stride() + line * 4 + byte]));
      }
    }
  }
  for (int r = 0; r < kRows; r += kTerms) {
    float values[kPanel] = {};
    for (int64_t i = 0; i < piece.columns_of(panel); ++i) {
      for (int t = r; t < r + kTerms; ++t) {
        values[i] += static_cast<float>(sums[t][i]) *
                     (piece.row_scale[row + t] * piece.column_scale[panel * kPanel + i]);
      }
    }
    store_row(piece, (row + r) / kTerms, panel, values);
  }
}

template <int kRows, int kItemsize>
QUIRE_INLINE void rows_of(const ProductPiece& piece, int64_t row, int64_t panel) {
  if constexpr (kItemsize == 4) f32_rows<kRows>(piece, row, panel);
  if constexpr (kItemsize == 2) widened_bf16_rows<kRows>(piece, row, panel);
  if constexpr (kItemsize == 1) widened_int8_rows<kRows>(piece, row, panel);
}

template <int kItemsize>
QUIRE_INLINE void widened(const ProductPiece& piece) {
  constexpr int kStep = kItemsize == 1 ? kTerms : 1;
  for (int64_t panel = piece.first_panel; panel < piece.end_panel; ++panel) {
    int64_t row = piece.first_row;
    for (; row + 4 <= piece.end_row; row += 4) rows_of<4, kItemsize>(piece, row, panel);
    for (; row < piece.end_row; row += kStep) rows_of<kStep, kItemsize>(piece, row, panel);
  }
}

}  // namespace

void plain_f32(const ProductPiece& piece) { widened<4>(piece); }
void plain_bf16(const ProductPiece& piece) { widened<2>(piece); }
void plain_int8(const ProductPiece& piece) { widened<1>(piece); }

#if QUIRE_X86

__attribute__((target("avx2,fma"))) void avx2_f32(const ProductPiece& piece) { widened<4>(piece); }
__attribute__((target("avx2,fma"))) void avx2_bf16(const ProductPiece& piece) { widened<2>(piece); }
__attribute__((target("avx2,fma"))) void avx2_int8(const ProductPiece& piece) { widened<1>(piece); }
__attribute__((target("avx512f"))) void avx512_f32(const ProductPiece& piece) { widened<4>(piece); }
__attribute__((target("avx512f"))) void avx512_bf16(const ProductPiece& piece) { widened<2>(piece); }
__attribute__((target("avx512f"))) void avx512_int8(const ProductPiece& piece) { widened<1>(piece); }

#endif

}  // namespace quire
