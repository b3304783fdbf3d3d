// Products with AVX512's dot products and with the tiles of AMX.
#include "linear_piece.h"

#if QUIRE_X86

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "vector.h"

namespace quire {
namespace {

// -- AVX512 dot products --------------------------------------------------------------------------------------------

#define QUIRE_STORE __attribute__((target("avx512f,avx512bw,avx512vl")))
#define QUIRE_DOT_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define QUIRE_DOT_INT8 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

// Rounds to nearest even in integer arithmetic: AVX512 without BF16 has no instruction for it. A NaN stays one.
QUIRE_STORE QUIRE_INLINE __m256i to_bf16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}

// One row of one panel.
QUIRE_STORE QUIRE_INLINE void store_16(const ProductPiece& piece, int64_t row, int64_t panel, __m512 values) {
  const Product& product = *piece.product;
  const int64_t start = row * product.columns + panel * kPanel;
  const __mmask16 mask = static_cast<__mmask16>((1u << piece.columns_of(panel)) - 1);
  if (product.out_float32) {
    _mm512_mask_storeu_ps(static_cast<float*>(product.out) + start, mask, values);
  } else {
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(product.out) + start, mask, to_bf16(values));
  }
}

// Fused by name: what the compiler chooses to fuse might differ from one tile to the next.
QUIRE_STORE QUIRE_INLINE __m512 both_terms(const ProductPiece& piece, int64_t row, int64_t panel, __m512i first,
                                           __m512i second) {
  const __mmask16 mask = static_cast<__mmask16>((1u << piece.columns_of(panel)) - 1);
  const __m512 columns = _mm512_maskz_loadu_ps(mask, piece.column_scale + panel * kPanel);
  const __m512 scales[kTerms] = {_mm512_mul_ps(_mm512_set1_ps(piece.row_scale[row]), columns),
                                 _mm512_mul_ps(_mm512_set1_ps(piece.row_scale[row + 1]), columns)};
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), scales[1], _mm512_mul_ps(_mm512_cvtepi32_ps(first), scales[0]));
}

QUIRE_STORE QUIRE_INLINE int32_t four_bytes(const ProductPiece& piece, int64_t row, int64_t line) {
  int32_t value;
  std::memcpy(&value, piece.x + row * piece.x_stride + line * 4, sizeof(value));
  return value;
}

template <int kRows, int kPanels>
QUIRE_DOT_BF16 void dot_bf16_tile(const ProductPiece& piece, int64_t row, int64_t panel) {
  __m512 sums[kRows][kPanels];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) sums[r][p] = _mm512_setzero_ps();
  }
  const char* weights = piece.panel(panel);
  const int64_t panel_bytes = piece.lines * kLine;
  for (int64_t line = 0; line < piece.lines; ++line) {
    __m512bh lines[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      lines[p] = (__m512bh)_mm512_loadu_si512(weights + p * panel_bytes + line * kLine);
    }
    for (int r = 0; r < kRows; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(four_bytes(piece, row + r, line));
      for (int p = 0; p < kPanels; ++p) sums[r][p] = _mm512_dpbf16_ps(sums[r][p], pair, lines[p]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) store_16(piece, row + r, panel + p, sums[r][p]);
  }
}

// sum + dot products of four unsigned and four signed bytes. By name: for the intrinsic gcc 12 moves every sum to another
// register, and to memory.
QUIRE_DOT_INT8 QUIRE_INLINE void add_dots(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// The instruction multiplies unsigned by signed bytes: x + 128 goes in, and 128 * (sum of the column) comes off. The first
// tile of some panels computes that, `excess`, and those of their other rows read it.
//
// Unrolled by name, else the compiler keeps sums in memory.
template <int kRows, int kPanels, bool kFirst>
QUIRE_DOT_INT8 void dot_int8_tile(const ProductPiece& piece, int64_t row, int64_t panel, __m512i* excess) {
  __m512i sums[kRows][kPanels], comes_off[kPanels];
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) {
    if constexpr (kFirst) comes_off[p] = _mm512_setzero_si512();
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) sums[r][p] = _mm512_setzero_si512();
  }
  const char* weights = piece.panel(panel);
  const int64_t panel_bytes = piece.lines * kLine;
  const __m512i shift = _mm512_set1_epi8(static_cast<char>(128));
  for (int64_t line = 0; line < piece.lines; ++line) {
    __m512i lines[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      lines[p] = _mm512_loadu_si512(weights + p * panel_bytes + line * kLine);
      if constexpr (kFirst) add_dots(comes_off[p], shift, lines[p]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512i four = _mm512_xor_si512(_mm512_set1_epi32(four_bytes(piece, row + r, line)), shift);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) add_dots(sums[r][p], four, lines[p]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) {
    if constexpr (kFirst) excess[p] = comes_off[p];
#pragma GCC unroll 3
    for (int r = 0; r < kRows; r += kTerms) {
      const __m512i first = _mm512_sub_epi32(sums[r][p], excess[p]),
                    second = _mm512_sub_epi32(sums[r + 1][p], excess[p]);
      store_16(piece, (row + r) / kTerms, panel + p, both_terms(piece, row + r, panel + p, first, second));
    }
  }
}

// Accumulators fill the 32 registers: 5 rows of 4 panels; of int8, 3 rows of two terms, or 2 and what comes off each panel.
// The i-th takes i + 1 rows.
using Bf16Tile = void (*)(const ProductPiece&, int64_t row, int64_t panel);
constexpr Bf16Tile kDotBf16[][2] = {
    {dot_bf16_tile<1, 1>, dot_bf16_tile<1, 4>}, {dot_bf16_tile<2, 1>, dot_bf16_tile<2, 4>},
    {dot_bf16_tile<3, 1>, dot_bf16_tile<3, 4>}, {dot_bf16_tile<4, 1>, dot_bf16_tile<4, 4>},
    {dot_bf16_tile<5, 1>, dot_bf16_tile<5, 4>},
};
using Int8Tile = void (*)(const ProductPiece&, int64_t row, int64_t panel, __m512i* excess);
constexpr Int8Tile kDotInt8First[][2] = {
    {dot_int8_tile<2, 1, true>, dot_int8_tile<2, 4, true>},
    {dot_int8_tile<4, 1, true>, dot_int8_tile<4, 4, true>},
};
constexpr Int8Tile kDotInt8[][2] = {
    {dot_int8_tile<2, 1, false>, dot_int8_tile<2, 4, false>},
    {dot_int8_tile<4, 1, false>, dot_int8_tile<4, 4, false>},
    {dot_int8_tile<6, 1, false>, dot_int8_tile<6, 4, false>},
};

template <class RunPanels>
void four_panels_at_once(const ProductPiece& piece, RunPanels run_panels) {
  for (int64_t panel = piece.first_panel; panel < piece.end_panel;) {
    const bool four = panel + 4 <= piece.end_panel;
    run_panels(panel, four);
    panel += four ? 4 : 1;
  }
}

// -- AMX ----------------------------------------------------------------------------------------------------------

#define QUIRE_AMX __attribute__((target("avx512f,avx512bw,avx512vl,amx-tile,amx-bf16,amx-int8")))

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Three shapes of work. Up to 16 rows: sums of four panels in tiles 0 to 3. More: 16 rows by two panels, whose sums are in 0
// and 1, if those panels stay in the first cache; else 32 rows by two panels, in 0 and 1 (upper rows), 2 and 3 (lower rows).
// Weights are in 4, x in 5. What passes by only once is loaded past the first cache, so that the other stays there.
//
// As few tiles as that takes, even if one is loaded twice: it seems that what is renamed to is what no tile in use takes,
// and that there is half of it while the core's other thread runs, whoever's that is. bench/tiles.cc compares them.
QUIRE_AMX void configure_tiles(int64_t rows) {
  TileConfig config;
  for (int i = 0; i < 6; ++i) {
    config.bytes_per_row[i] = kLine;
    config.rows[i] = static_cast<uint8_t>(i == 4 ? 16 : rows);
  }
  // The compiler believes that the intrinsic reads 8 bytes and would drop the other stores.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Row by row: the panels of a row are neighbours in memory. Whole pairs of them, as bfloat16, are one line.
template <bool kInt8, int kPanels>
QUIRE_AMX QUIRE_INLINE void store_tiles(const ProductPiece& piece, int64_t row, int64_t rows, int64_t panel,
                                        const char* sums, int64_t stride) {
  const Product& product = *piece.product;
  const bool whole = (panel + kPanels) * kPanel <= product.columns && !product.out_float32;
  constexpr int64_t kStep = kInt8 ? kTerms : 1;
  for (int64_t r = 0; r < rows; r += kStep) {
    const auto values = [&](int p) QUIRE_AMX {
      const char* line = sums + r * stride + p * kLine;
      if constexpr (kInt8) {
        return both_terms(piece, row + r, panel + p, _mm512_load_si512(line), _mm512_load_si512(line + stride));
      } else {
        return _mm512_load_ps(reinterpret_cast<const float*>(line));
      }
    };
    const int64_t out_row = (row + r) / kStep;
    if (kPanels > 1 && whole) {
      uint16_t* out = static_cast<uint16_t*>(product.out) + out_row * product.columns + panel * kPanel;
      for (int p = 0; p < kPanels; p += 2) {
        const __m512i low = _mm512_castsi256_si512(to_bf16(values(p)));
        _mm512_storeu_si512(out + p * kPanel, _mm512_inserti64x4(low, to_bf16(values(p + 1)), 1));
      }
    } else {
      for (int p = 0; p < kPanels; ++p) store_16(piece, out_row, panel + p, values(p));
    }
  }
}

#define QUIRE_TILE_DOT(sum, x, weights) \
  if constexpr (kInt8) {                \
    _tile_dpbssd(sum, x, weights);      \
  } else {                              \
    _tile_dpbf16ps(sum, x, weights);    \
  }

constexpr int64_t kTile = 16 * kLine;

// The panels that this thread multiplies next, fetched line by line while it multiplies the present ones.
struct Ahead {
  const char* at;
  const char* end;
  int64_t each;  // lines at a step

  QUIRE_AMX QUIRE_INLINE void step() {
    for (int64_t i = 0; i < each && at < end; ++i, at += kLine) _mm_prefetch(at, _MM_HINT_T1);
  }
};

QUIRE_INLINE Ahead ahead_of(const ProductPiece& piece, int64_t num_steps) {
  const int64_t lines = (piece.next_end - piece.next) / kLine;
  return {piece.next, piece.next_end, (lines + num_steps - 1) / num_steps};
}

// Few rows: memory is the limit, and each panel is fetched a little ahead of itself.
constexpr int64_t kAhead = 4 * kTile;
QUIRE_AMX QUIRE_INLINE void fetch(const char* tile) {
  for (int i = 0; i < 16; ++i) _mm_prefetch(tile + i * kLine, _MM_HINT_T0);
}

// Up to 16 rows by 4 panels, or fewer panels at the end.
template <bool kInt8, int kPanels>
QUIRE_AMX void amx_one_row(const ProductPiece& piece, int64_t row, int64_t rows, int64_t panel) {
  _tile_zero(0);
  if constexpr (kPanels > 1) _tile_zero(1);
  if constexpr (kPanels > 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* x = piece.x + row * piece.x_stride;
  const char* weights = piece.panel(panel);
  const int64_t stride = piece.x_stride, panel_bytes = piece.lines * kLine;
  for (int64_t k = 0; k < piece.lines / 16; ++k) {
    _tile_loadd(5, x + k * kLine, stride);
    const char* tile = weights + k * kTile;
    fetch(tile + kAhead);
    _tile_loadd(4, tile, kLine);
    QUIRE_TILE_DOT(0, 5, 4);
    if constexpr (kPanels > 1) {
      fetch(tile + panel_bytes + kAhead);
      _tile_loadd(4, tile + panel_bytes, kLine);
      QUIRE_TILE_DOT(1, 5, 4);
    }
    if constexpr (kPanels > 2) {
      fetch(tile + 2 * panel_bytes + kAhead);
      _tile_loadd(4, tile + 2 * panel_bytes, kLine);
      QUIRE_TILE_DOT(2, 5, 4);
      fetch(tile + 3 * panel_bytes + kAhead);
      _tile_loadd(4, tile + 3 * panel_bytes, kLine);
      QUIRE_TILE_DOT(3, 5, 4);
    }
  }
  alignas(64) char sums[16 * 4 * kLine];
  _tile_stored(0, sums, 4 * kLine);
  if constexpr (kPanels > 1) _tile_stored(1, sums + kLine, 4 * kLine);
  if constexpr (kPanels > 2) {
    _tile_stored(2, sums + 2 * kLine, 4 * kLine);
    _tile_stored(3, sums + 3 * kLine, 4 * kLine);
  }
  store_tiles<kInt8, kPanels>(piece, row, rows, panel, sums, 4 * kLine);
}

// What two panels may take to stay in the first cache, of 48 KB on every processor with AMX.
constexpr int64_t kFirstCache = 40 << 10;

// 16 rows by 2 panels that stay in the first cache, or by the last one.
template <bool kInt8, int kPanels>
QUIRE_AMX void amx_few_panels(const ProductPiece& piece, int64_t row, int64_t panel, Ahead& ahead) {
  _tile_zero(0);
  if constexpr (kPanels > 1) _tile_zero(1);
  const char* x = piece.x + row * piece.x_stride;
  const char* weights = piece.panel(panel);
  const int64_t stride = piece.x_stride, panel_bytes = piece.lines * kLine;
  for (int64_t k = 0; k < piece.lines / 16; ++k) {
    const char* tile = weights + k * kTile;
    ahead.step();
    _tile_stream_loadd(5, x + k * kLine, stride);
    _tile_loadd(4, tile, kLine);
    QUIRE_TILE_DOT(0, 5, 4);
    if constexpr (kPanels > 1) {
      _tile_loadd(4, tile + panel_bytes, kLine);
      QUIRE_TILE_DOT(1, 5, 4);
    }
  }
  alignas(64) char sums[16 * 2 * kLine];
  _tile_stored(0, sums, 2 * kLine);
  if constexpr (kPanels > 1) _tile_stored(1, sums + kLine, 2 * kLine);
  store_tiles<kInt8, kPanels>(piece, row, 16, panel, sums, 2 * kLine);
}

// 32 rows by 2 panels, or by the last one.
template <bool kInt8, int kPanels>
QUIRE_AMX void amx_two_rows(const ProductPiece& piece, int64_t row, int64_t panel, Ahead& ahead) {
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (kPanels > 1) {
    _tile_zero(1);
    _tile_zero(3);
  }
  const char* x = piece.x + row * piece.x_stride;
  const char* weights = piece.panel(panel);
  const int64_t stride = piece.x_stride, panel_bytes = piece.lines * kLine;
  for (int64_t k = 0; k < piece.lines / 16; ++k) {
    const char *tile = weights + k * kTile, *upper = x + k * kLine;
    ahead.step();
    _tile_stream_loadd(4, tile, kLine);
    _tile_loadd(5, upper, stride);
    QUIRE_TILE_DOT(0, 5, 4);
    _tile_loadd(5, upper + 16 * stride, stride);
    QUIRE_TILE_DOT(2, 5, 4);
    if constexpr (kPanels > 1) {
      _tile_stream_loadd(4, tile + panel_bytes, kLine);
      QUIRE_TILE_DOT(3, 5, 4);
      _tile_loadd(5, upper, stride);
      QUIRE_TILE_DOT(1, 5, 4);
    }
  }
  alignas(64) char sums[32 * 2 * kLine];
  _tile_stored(0, sums, 2 * kLine);
  _tile_stored(2, sums + 16 * 2 * kLine, 2 * kLine);
  if constexpr (kPanels > 1) {
    _tile_stored(1, sums + kLine, 2 * kLine);
    _tile_stored(3, sums + 16 * 2 * kLine + kLine, 2 * kLine);
  }
  store_tiles<kInt8, kPanels>(piece, row, 32, panel, sums, 2 * kLine);
}

// Whole groups of 16 or 32 rows by two panels at a time. Returns the first row that is left.
template <bool kInt8>
QUIRE_AMX int64_t amx_many_rows(const ProductPiece& piece) {
  const bool few_panels = 2 * piece.lines * kLine <= kFirstCache;
  const int64_t at_once = few_panels ? 16 : 32, groups = (piece.end_row - piece.first_row) / at_once;
  if (piece.end_row - piece.first_row < 32) return piece.first_row;
  const auto two = few_panels ? amx_few_panels<kInt8, 2> : amx_two_rows<kInt8, 2>;
  const auto one = few_panels ? amx_few_panels<kInt8, 1> : amx_two_rows<kInt8, 1>;
  Ahead ahead = ahead_of(piece, groups * ((piece.end_panel - piece.first_panel + 1) / 2) * (piece.lines / 16));
  configure_tiles(16);
  for (int64_t panel = piece.first_panel; panel < piece.end_panel; panel += 2)
    for (int64_t i = 0; i < groups; ++i)
      (panel + 1 < piece.end_panel ? two : one)(piece, piece.first_row + i * at_once, panel, ahead);
  return piece.first_row + groups * at_once;
}

template <bool kInt8>
QUIRE_AMX void amx(const ProductPiece& piece) {
  for (int64_t row = amx_many_rows<kInt8>(piece); row < piece.end_row; row += 16) {
    const int64_t rows = std::min<int64_t>(16, piece.end_row - row);
    configure_tiles(rows);
    int64_t panel = piece.first_panel;
    for (; panel + 4 <= piece.end_panel; panel += 4) amx_one_row<kInt8, 4>(piece, row, rows, panel);
    for (; panel + 2 <= piece.end_panel; panel += 2) amx_one_row<kInt8, 2>(piece, row, rows, panel);
    if (panel < piece.end_panel) amx_one_row<kInt8, 1>(piece, row, rows, panel);
  }
  _tile_release();
}

}  // namespace

void dot_bf16(const ProductPiece& piece) {
  four_panels_at_once(piece, [&](int64_t panel, bool four) {
    for (int64_t row = piece.first_row; row < piece.end_row;) {
      const int64_t rows = std::min<int64_t>(5, piece.end_row - row);
      kDotBf16[rows - 1][four](piece, row, panel);
      row += rows;
    }
  });
}

void dot_int8(const ProductPiece& piece) {
  four_panels_at_once(piece, [&](int64_t panel, bool four) {
    __m512i excess[4];
    int64_t row = piece.first_row, rows = std::min<int64_t>(2 * kTerms, piece.end_row - row);
    kDotInt8First[rows / kTerms - 1][four](piece, row, panel, excess);
    for (row += rows; row < piece.end_row; row += rows) {
      rows = std::min<int64_t>(3 * kTerms, piece.end_row - row);
      kDotInt8[rows / kTerms - 1][four](piece, row, panel, excess);
    }
  });
}

void amx_bf16(const ProductPiece& piece) { amx<false>(piece); }
void amx_int8(const ProductPiece& piece) { amx<true>(piece); }

}  // namespace quire

#endif  // QUIRE_X86
