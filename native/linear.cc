#include "linear.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "bf16.h"

#if QUIRE_X86
#include <immintrin.h>
#endif

#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {
namespace {

// -- what every path shares --------------------------------------------------------------------------------------

// Scratch on a 64-byte boundary.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(static_cast<char*>(::operator new(bytes, std::align_val_t{kLine}))) {}
  ~Scratch() { ::operator delete(data_, std::align_val_t{kLine}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return data_; }

 private:
  char* data_;
};

// One piece of a product: some panels, some rows. x is [rows, lines * 4 bytes]; of int8, where two rows are the terms of
// one row of the output, always whole pairs.
struct Piece {
  const char* x;
  int64_t lines;  // of 64 bytes in a panel: the padded inner dimension in groups of four bytes
  int64_t first_row, end_row;
  int64_t first_panel, end_panel;
  int64_t next_panel, next_end_panel;  // of the piece that this thread has next; equal if none
  const Product* product;
  const float* row_scale;     // int8 only
  const float* column_scale;  // int8 only

  int64_t x_stride() const { return lines * 4; }
  const char* panel(int64_t i) const { return static_cast<const char*>(product->packed) + i * lines * kLine; }
  int64_t columns_of(int64_t panel_index) const {
    return std::min(kPanel, product->columns - panel_index * kPanel);
  }
};

void store_row(const Piece& piece, int64_t row, int64_t panel, const float* values) {
  const Product& product = *piece.product;
  const int64_t start = row * product.columns + panel * kPanel, count = piece.columns_of(panel);
  if (product.out_float32) {
    std::memcpy(static_cast<float*>(product.out) + start, values, count * sizeof(float));
  } else {
    Bf16* out = static_cast<Bf16*>(product.out) + start;
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<Bf16>(values[i]);
  }
}

using RunPiece = void (*)(const Piece&);

// -- widened to float32 or int32: plain C++, and the same code compiled for AVX2 and AVX512 ------------------------

// 64 bytes as the compiler's own vectors: one register with AVX512, two with AVX2, four elsewhere.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

template <int kRows>
QUIRE_INLINE void widened_bf16_rows(const Piece& piece, int64_t row, int64_t panel) {
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
QUIRE_INLINE void widened_int8_rows(const Piece& piece, int64_t row, int64_t panel) {
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
QUIRE_INLINE void widened(const Piece& piece) {
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

void plain_bf16(const Piece& piece) { widened<false>(piece); }
void plain_int8(const Piece& piece) { widened<true>(piece); }

#if QUIRE_X86

__attribute__((target("avx2,fma"))) void avx2_bf16(const Piece& piece) { widened<false>(piece); }
__attribute__((target("avx2,fma"))) void avx2_int8(const Piece& piece) { widened<true>(piece); }
__attribute__((target("avx512f"))) void avx512_bf16(const Piece& piece) { widened<false>(piece); }
__attribute__((target("avx512f"))) void avx512_int8(const Piece& piece) { widened<true>(piece); }

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
QUIRE_STORE QUIRE_INLINE void store_16(const Piece& piece, int64_t row, int64_t panel, __m512 values) {
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
QUIRE_STORE QUIRE_INLINE __m512 both_terms(const Piece& piece, int64_t row, int64_t panel, __m512i first,
                                           __m512i second) {
  const __mmask16 mask = static_cast<__mmask16>((1u << piece.columns_of(panel)) - 1);
  const __m512 columns = _mm512_maskz_loadu_ps(mask, piece.column_scale + panel * kPanel);
  const __m512 scales[kTerms] = {_mm512_mul_ps(_mm512_set1_ps(piece.row_scale[row]), columns),
                                 _mm512_mul_ps(_mm512_set1_ps(piece.row_scale[row + 1]), columns)};
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), scales[1], _mm512_mul_ps(_mm512_cvtepi32_ps(first), scales[0]));
}

QUIRE_STORE QUIRE_INLINE int32_t four_bytes(const Piece& piece, int64_t row, int64_t line) {
  int32_t value;
  std::memcpy(&value, piece.x + row * piece.x_stride() + line * 4, sizeof(value));
  return value;
}

template <int kRows, int kPanels>
QUIRE_DOT_BF16 void dot_bf16_tile(const Piece& piece, int64_t row, int64_t panel) {
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

// The instruction multiplies unsigned by signed bytes: x + 128 goes in, and 128 * (sum of the column) comes off.
template <int kRows, int kPanels>
QUIRE_DOT_INT8 void dot_int8_tile(const Piece& piece, int64_t row, int64_t panel) {
  __m512i sums[kRows][kPanels], excess[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    excess[p] = _mm512_setzero_si512();
    for (int r = 0; r < kRows; ++r) sums[r][p] = _mm512_setzero_si512();
  }
  const char* weights = piece.panel(panel);
  const int64_t panel_bytes = piece.lines * kLine;
  const __m512i shift = _mm512_set1_epi8(static_cast<char>(128));
  for (int64_t line = 0; line < piece.lines; ++line) {
    __m512i lines[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      lines[p] = _mm512_loadu_si512(weights + p * panel_bytes + line * kLine);
      excess[p] = _mm512_dpbusd_epi32(excess[p], shift, lines[p]);
    }
    for (int r = 0; r < kRows; ++r) {
      const __m512i four = _mm512_xor_si512(_mm512_set1_epi32(four_bytes(piece, row + r, line)), shift);
      for (int p = 0; p < kPanels; ++p) sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], four, lines[p]);
    }
  }
  for (int r = 0; r < kRows; r += kTerms) {
    for (int p = 0; p < kPanels; ++p) {
      const __m512i first = _mm512_sub_epi32(sums[r][p], excess[p]);
      const __m512i second = _mm512_sub_epi32(sums[r + 1][p], excess[p]);
      store_16(piece, (row + r) / kTerms, panel + p, both_terms(piece, row + r, panel + p, first, second));
    }
  }
}

using RunTile = void (*)(const Piece&, int64_t row, int64_t panel);

// Accumulators fill the 32 registers: up to 5 rows of 4 panels; of int8, up to 2 rows of two terms, and what comes off
// each panel.
constexpr RunTile kDotBf16[][2] = {
    {dot_bf16_tile<1, 1>, dot_bf16_tile<1, 4>}, {dot_bf16_tile<2, 1>, dot_bf16_tile<2, 4>},
    {dot_bf16_tile<3, 1>, dot_bf16_tile<3, 4>}, {dot_bf16_tile<4, 1>, dot_bf16_tile<4, 4>},
    {dot_bf16_tile<5, 1>, dot_bf16_tile<5, 4>},
};
constexpr RunTile kDotInt8[][2] = {
    {dot_int8_tile<2, 1>, dot_int8_tile<2, 4>},
    {dot_int8_tile<4, 1>, dot_int8_tile<4, 4>},
};

// The i-th of the tiles takes i + 1 times so many rows.
template <int64_t kStep, size_t kTiles>
void dot(const Piece& piece, const RunTile (&tiles)[kTiles][2]) {
  for (int64_t panel = piece.first_panel; panel < piece.end_panel;) {
    const bool four = panel + 4 <= piece.end_panel;
    for (int64_t row = piece.first_row; row < piece.end_row;) {
      const int64_t rows = std::min<int64_t>(kTiles * kStep, piece.end_row - row);
      tiles[rows / kStep - 1][four](piece, row, panel);
      row += rows;
    }
    panel += four ? 4 : 1;
  }
}

void dot_bf16(const Piece& piece) { dot<1>(piece, kDotBf16); }
void dot_int8(const Piece& piece) { dot<kTerms>(piece, kDotInt8); }

// -- AMX ----------------------------------------------------------------------------------------------------------

#define QUIRE_AMX __attribute__((target("avx512f,avx512bw,avx512vl,amx-tile,amx-bf16,amx-int8")))

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Two shapes of work. Up to 16 rows: sums of four panels in tiles 0 to 3. 32 rows: sums of two panels in 0 and 1 (upper
// rows), 2 and 3 (lower rows). Weights are in 4, x in 5.
//
// As few tiles as that takes, even if one is loaded twice: it seems that what is renamed to is what no tile in use takes,
// and that there is half of it while the core's other thread runs, whoever's that is. Then two rows of tiles by two panels
// reach 480 GFLOP/s with eight tiles, 650 with seven, 700 with six; undisturbed 1,700, 1,700 and 1,640 (bench/tiles.cc).
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
QUIRE_AMX QUIRE_INLINE void store_tiles(const Piece& piece, int64_t row, int64_t rows, int64_t panel, const char* sums,
                                        int64_t stride) {
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

QUIRE_INLINE Ahead ahead_of(const Piece& piece, int64_t num_steps) {
  const int64_t lines = (piece.next_end_panel - piece.next_panel) * piece.lines;
  const char* start = piece.panel(piece.next_panel);
  return {start, start + lines * kLine, (lines + num_steps - 1) / num_steps};
}

// Few rows: memory is the limit, and each panel is fetched a little ahead of itself.
constexpr int64_t kAhead = 4 * kTile;
QUIRE_AMX QUIRE_INLINE void fetch(const char* tile) {
  for (int i = 0; i < 16; ++i) _mm_prefetch(tile + i * kLine, _MM_HINT_T0);
}

// Up to 16 rows by 4 panels, or fewer panels at the end.
template <bool kInt8, int kPanels>
QUIRE_AMX void amx_one_row(const Piece& piece, int64_t row, int64_t rows, int64_t panel) {
  _tile_zero(0);
  if constexpr (kPanels > 1) _tile_zero(1);
  if constexpr (kPanels > 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* x = piece.x + row * piece.x_stride();
  const char* weights = piece.panel(panel);
  const int64_t stride = piece.x_stride(), panel_bytes = piece.lines * kLine;
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

// 32 rows by 2 panels, or by the last one.
template <bool kInt8, int kPanels>
QUIRE_AMX void amx_two_rows(const Piece& piece, int64_t row, int64_t panel, Ahead& ahead) {
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (kPanels > 1) {
    _tile_zero(1);
    _tile_zero(3);
  }
  const char* x = piece.x + row * piece.x_stride();
  const char* weights = piece.panel(panel);
  const int64_t stride = piece.x_stride(), panel_bytes = piece.lines * kLine;
  for (int64_t k = 0; k < piece.lines / 16; ++k) {
    const char *tile = weights + k * kTile, *upper = x + k * kLine;
    ahead.step();
    _tile_loadd(4, tile, kLine);
    _tile_loadd(5, upper, stride);
    QUIRE_TILE_DOT(0, 5, 4);
    _tile_loadd(5, upper + 16 * stride, stride);
    QUIRE_TILE_DOT(2, 5, 4);
    if constexpr (kPanels > 1) {
      _tile_loadd(4, tile + panel_bytes, kLine);
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

template <bool kInt8>
QUIRE_AMX void amx(const Piece& piece) {
  const int64_t num_rows = piece.end_row - piece.first_row, pairs = (piece.end_panel - piece.first_panel + 1) / 2;
  const int64_t whole_end = piece.first_row + num_rows / 32 * 32;
  if (whole_end > piece.first_row) {
    Ahead ahead = ahead_of(piece, num_rows / 32 * pairs * (piece.lines / 16));
    configure_tiles(16);
    for (int64_t panel = piece.first_panel; panel < piece.end_panel; panel += 2) {
      const auto two_rows = panel + 1 < piece.end_panel ? amx_two_rows<kInt8, 2> : amx_two_rows<kInt8, 1>;
      for (int64_t row = piece.first_row; row < whole_end; row += 32) two_rows(piece, row, panel, ahead);
    }
  }
  for (int64_t row = whole_end; row < piece.end_row; row += 16) {
    const int64_t rows = std::min<int64_t>(16, piece.end_row - row);
    configure_tiles(rows);
    int64_t panel = piece.first_panel;
    for (; panel + 4 <= piece.end_panel; panel += 4) amx_one_row<kInt8, 4>(piece, row, rows, panel);
    for (; panel + 2 <= piece.end_panel; panel += 2) amx_one_row<kInt8, 2>(piece, row, rows, panel);
    if (panel < piece.end_panel) amx_one_row<kInt8, 1>(piece, row, rows, panel);
  }
  _tile_release();
}

void amx_bf16(const Piece& piece) { amx<false>(piece); }
void amx_int8(const Piece& piece) { amx<true>(piece); }

#endif  // QUIRE_X86

RunPiece choose(Isa isa, bool int8) {
#if QUIRE_X86
  constexpr RunPiece kPieces[kNumIsas][2] = {{plain_bf16, plain_int8},
                                             {avx2_bf16, avx2_int8},
                                             {avx512_bf16, avx512_int8},
                                             {dot_bf16, dot_int8},
                                             {amx_bf16, amx_int8}};
  return kPieces[static_cast<int>(isa)][int8];
#else
  (void)isa;
  return int8 ? plain_int8 : plain_bf16;
#endif
}

// -- cutting the work -----------------------------------------------------------------------------------------------

// Bytes of weights times rows below which waking another thread costs more than it saves.
constexpr int64_t kAlone = 64 << 10;
// Rows of x that stay in a core's second cache while panel after panel passes over them.
constexpr int64_t kRowBytes = 768 << 10;

void run_pieces(RunPiece run_piece, Piece whole, const Threads& threads) {
  const Product& product = *whole.product;
  const int64_t panels = num_panels(product.columns);
  const int64_t row_bytes = whole.x_stride();
  const int64_t rows_at_once = std::max<int64_t>(64, kRowBytes / row_bytes / 32 * 32);
  const int64_t num_rows = whole.end_row, row_tasks = (num_rows + rows_at_once - 1) / rows_at_once;
  int64_t panels_at_once = num_rows <= 64 ? 4 : 2;
  if (panels * whole.lines * kLine * num_rows < kAlone) panels_at_once = panels;
  const int64_t panel_tasks = (panels + panels_at_once - 1) / panels_at_once;
  const auto piece_of = [&](int64_t index) {
    Piece piece = whole;
    const int64_t rows = index / panel_tasks, columns = index % panel_tasks;
    piece.first_row = rows * rows_at_once;
    piece.end_row = std::min(num_rows, piece.first_row + rows_at_once);
    piece.first_panel = columns * panels_at_once;
    piece.end_panel = std::min(panels, piece.first_panel + panels_at_once);
    return piece;
  };
  const int64_t num_pieces = row_tasks * panel_tasks;
  run_ahead(threads, num_pieces, [&](int64_t now, int64_t next) {
    Piece piece = piece_of(now);
    if (next < num_pieces) {
      const Piece following = piece_of(next);
      piece.next_panel = following.first_panel;
      piece.next_end_panel = following.end_panel;
    }
    run_piece(piece);
  });
}

constexpr int64_t kValuesAtOnce = 32 << 10;  // of activations, quantised by one task

}  // namespace

void pack(const Matrix& matrix, void* packed, const Threads& threads) {
  const int64_t itemsize = matrix.itemsize, inner = matrix.inner, columns = matrix.columns;
  const int64_t group = 4 / itemsize, lines = num_lines(inner, itemsize);
  const int64_t k_stride = matrix.transposed ? 1 : columns, n_stride = matrix.transposed ? inner : 1;
  const char* from = static_cast<const char*>(matrix.data);
  threads.run(num_panels(columns), [&](int64_t panel) {
    char* to = static_cast<char*>(packed) + panel * lines * kLine;
    std::memset(to, 0, lines * kLine);
    const int64_t first = panel * kPanel, count = std::min(kPanel, columns - first);
    for (int64_t k = 0; k < inner; ++k) {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(to + ((k / group * kPanel + i) * group + k % group) * itemsize,
                    from + (k * k_stride + (first + i) * n_stride) * itemsize, itemsize);
      }
    }
  });
}

void linear_bf16(Isa isa, const Product& product, const uint16_t* x, const Threads& threads) {
  const int64_t padded = padded_inner(product.inner, sizeof(uint16_t));
  const char* rows = reinterpret_cast<const char*>(x);
  const bool copy = padded != product.inner;
  Scratch scratch(copy ? product.rows * padded * sizeof(uint16_t) : 0);
  if (copy) {
    for (int64_t row = 0; row < product.rows; ++row) {
      uint16_t* to = reinterpret_cast<uint16_t*>(scratch.data()) + row * padded;
      std::memcpy(to, x + row * product.inner, product.inner * sizeof(uint16_t));
      std::memset(to + product.inner, 0, (padded - product.inner) * sizeof(uint16_t));
    }
    rows = scratch.data();
  }
  const Piece whole{rows, padded / 2, 0, product.rows, 0, 0, 0, 0, &product, nullptr, nullptr};
  run_pieces(choose(isa, false), whole, threads);
}

void linear_int8(Isa isa, const Product& product, const void* x, bool x_float32, const float* column_scale,
                 const Threads& threads) {
  const int64_t padded = padded_inner(product.inner, sizeof(int8_t));
  Scratch scratch(kTerms * product.rows * padded), scales(kTerms * product.rows * sizeof(float));
  float* row_scale = reinterpret_cast<float*>(scales.data());
  const Activations activations{x, x_float32, product.inner, padded, reinterpret_cast<int8_t*>(scratch.data()), row_scale};
  const int64_t rows_at_once = std::max<int64_t>(1, kValuesAtOnce / padded);
  threads.run((product.rows + rows_at_once - 1) / rows_at_once, [&](int64_t task) {
    quantize(isa, activations, task * rows_at_once, std::min(product.rows, (task + 1) * rows_at_once));
  });
  const Piece whole{scratch.data(), padded / 4, 0, kTerms * product.rows, 0, 0, 0, 0, &product, row_scale, column_scale};
  // A tile of one token is nearly empty. (Sums of integers are the same in any order; those of bfloat16 would not be.)
  if (isa == Isa::kAmx && product.rows == 1) isa = Isa::kAvx512Bf16;
  run_pieces(choose(isa, true), whole, threads);
}

}  // namespace quire
