// Products widened to float32 or int32: plain C++, and the same code compiled for AVX2 and AVX512.
#include <cstring>

#include "linear_piece.h"
#include "vector.h"

namespace quire {
namespace {

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
  for (int r = 0; r < kRows; ++r) {
    float values[kPanel];
    std::memcpy(values, &sums[r], sizeof(values));
    store_row(piece, row + r, panel, values);
  }
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

template <bool kInt8>
QUIRE_INLINE void widened(const ProductPiece& piece) {
  for (int64_t panel = piece.first_panel; panel < piece.end_panel; ++panel) {
    int64_t row = piece.first_row;
    for (; row + 4 <= piece.end_row; row += 4) {
      kInt8 ? widened_int8_rows<4>(piece, row, panel) : widened_bf16_rows<4>(piece, row, panel);
    }
    for (constexpr int kStep = kInt8 ? kTerms : 1; row < piece.end_row; row += kStep) {
      kInt8 ? widened_int8_rows<kTerms>(piece, row, panel) : widened_bf16_rows<1>(piece, row, panel);
    }
  }
}

}  // namespace

void plain_bf16(const ProductPiece& piece) { widened<false>(piece); }
void plain_int8(const ProductPiece& piece) { widened<true>(piece); }

#if QUIRE_X86

__attribute__((target("avx2,fma"))) void avx2_bf16(const ProductPiece& piece) { widened<false>(piece); }
__attribute__((target("avx2,fma"))) void avx2_int8(const ProductPiece& piece) { widened<true>(piece); }
__attribute__((target("avx512f"))) void avx512_bf16(const ProductPiece& piece) { widened<false>(piece); }
__attribute__((target("avx512f"))) void avx512_int8(const ProductPiece& piece) { widened<true>(piece); }

#endif

}  // namespace quire
