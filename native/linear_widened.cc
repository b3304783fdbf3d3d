// Products widened to float32 or int32: plain C++, and the same code compiled for AVX2 and AVX512.
#include <cstring>
#include <type_traits>
#include <utility>

#include "linear_piece.h"
#include "vector.h"

namespace quire {
namespace {

// A register of so many floats, and its bits.
template <int kWidth>
struct Register {
  typedef float Float __attribute__((vector_size(4 * kWidth)));
  typedef uint32_t Bits __attribute__((vector_size(4 * kWidth)));
};

// Rows of float32 by panels of float32 or bfloat16. All sums stay in registers of kWidth floats: unrolled by name, else
// the compiler keeps them in memory. A row's address is one of every third row's and a multiple of the stride, which is
// what an instruction can add up by itself.
template <int kItemsize, int kWidth, int kRows, int kPanels>
QUIRE_INLINE void float_tile(const ProductPiece& piece, int64_t row, int64_t panel) {
  using Float = typename Register<kWidth>::Float;
  using Bits = typename Register<kWidth>::Bits;
  constexpr int kEach = kPanel / kWidth, kParts = kPanels * kEach, kValues = 4 / kItemsize;
  const int64_t panel_bytes = piece.lines * kLine, stride = piece.x_stride;
  const char* weights = piece.panel(panel);
  fetch_output(piece, row, kRows, panel, kPanels);
  const char* thirds[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) thirds[i] = piece.x + (row + 3 * i) * stride;
  Float sums[kRows][kParts] = {};
  for (int64_t line = 0; line < piece.lines; ++line) {
    Bits lines[kParts];
#pragma GCC unroll 8
    for (int p = 0; p < kParts; ++p) {
      std::memcpy(&lines[p], weights + p / kEach * panel_bytes + line * kLine + p % kEach * sizeof(Bits), sizeof(Bits));
    }
#pragma GCC unroll 2
    for (int value = 0; value < kValues; ++value) {
      Float factors[kParts];
#pragma GCC unroll 8
      for (int p = 0; p < kParts; ++p) {
        const Bits bits = kItemsize == 4 ? lines[p] : value ? lines[p] & 0xffff0000u : lines[p] << 16;
        std::memcpy(&factors[p], &bits, sizeof(bits));
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        float one;
        std::memcpy(&one, thirds[r / 3] + r % 3 * stride + (line * kValues + value) * sizeof(one), sizeof(one));
#pragma GCC unroll 8
        for (int p = 0; p < kParts; ++p) sums[r][p] += factors[p] * one;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kPanels; ++i) {
      float values[kPanel];
      std::memcpy(values, &sums[r][i * kEach], sizeof(values));
      store_row(piece, row + r, panel + i, values);
    }
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
        sums[r] +=
            values * static_cast<int32_t>(static_cast<int8_t>(piece.x[(row + r) * piece.x_stride + line * 4 + byte]));
      }
    }
  }
  for (int r = 0; r < kRows; r += kTerms) {
    float values[kPanel] = {};
    for (int64_t i = 0; i < piece.columns_of(panel); ++i) {
      for (int t = r; t < r + kTerms; ++t) {
        values[i] +=
            static_cast<float>(sums[t][i]) * (piece.row_scale[row + t] * piece.column_scale[panel * kPanel + i]);
      }
    }
    store_row(piece, (row + r) / kTerms, panel, values);
  }
}

// Calls tile(how many rows, the first) for all rows of a piece, as many at once as there are registers for.
template <int kMostRows, int kLeastRows, class Tile>
QUIRE_INLINE void each_tile(const ProductPiece& piece, Tile tile) {
  const int64_t end = piece.end_row;
  int64_t row = piece.first_row;
  for (; row + kMostRows <= end; row += kMostRows) tile(std::integral_constant<int, kMostRows>{}, row);
  if constexpr (kMostRows > 8) {
    if (row + 8 <= end) tile(std::integral_constant<int, 8>{}, std::exchange(row, row + 8));
  }
  for (; row + 4 <= end; row += 4) tile(std::integral_constant<int, 4>{}, row);
  if (row + 2 <= end) tile(std::integral_constant<int, 2>{}, std::exchange(row, row + 2));
  if constexpr (kLeastRows == 1) {
    if (row < end) tile(std::integral_constant<int, 1>{}, row);
  }
}

template <int kItemsize, int kWidth, int kMostRows, int kPanels>
QUIRE_INLINE void float_panels(const ProductPiece& piece, int64_t panel) {
  each_tile<kMostRows, 1>(piece, [&](auto rows, int64_t row) __attribute__((always_inline)) {
    float_tile<kItemsize, kWidth, rows, kPanels>(piece, row, panel);
  });
}

template <int kItemsize, int kWidth, int kMostRows, int kPanels>
QUIRE_INLINE void widened(const ProductPiece& piece) {
  int64_t panel = piece.first_panel;
  for (; panel + kPanels <= piece.end_panel; panel += kPanels)
    float_panels<kItemsize, kWidth, kMostRows, kPanels>(piece, panel);
  for (; panel < piece.end_panel; ++panel) float_panels<kItemsize, kWidth, kMostRows, 1>(piece, panel);
}

QUIRE_INLINE void widened_int8(const ProductPiece& piece) {
  for (int64_t panel = piece.first_panel; panel < piece.end_panel; ++panel) {
    each_tile<4, kTerms>(piece, [&](auto rows, int64_t row)
                                    __attribute__((always_inline)) { widened_int8_rows<rows>(piece, row, panel); });
  }
}

}  // namespace

void plain_f32(const ProductPiece& piece) { widened<4, 4, 4, 1>(piece); }
void plain_bf16(const ProductPiece& piece) { widened<2, 4, 4, 1>(piece); }
void plain_int8(const ProductPiece& piece) { widened_int8(piece); }

#if QUIRE_X86

__attribute__((target("avx2,fma"))) void avx2_f32(const ProductPiece& piece) { widened<4, 8, 6, 1>(piece); }
__attribute__((target("avx2,fma"))) void avx2_bf16(const ProductPiece& piece) { widened<2, 8, 6, 1>(piece); }
__attribute__((target("avx2,fma"))) void avx2_int8(const ProductPiece& piece) { widened_int8(piece); }
__attribute__((target("avx512f"))) void avx512_f32(const ProductPiece& piece) { widened<4, 16, 12, 2>(piece); }
__attribute__((target("avx512f"))) void avx512_bf16(const ProductPiece& piece) { widened<2, 16, 12, 2>(piece); }
__attribute__((target("avx512f"))) void avx512_int8(const ProductPiece& piece) { widened_int8(piece); }

#endif

}  // namespace quire
