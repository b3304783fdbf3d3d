// A table of functions for each instruction set and element type: plain ones here, vectors in attention_vector.inc.
#include "attention_tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention_operations.h"
#include "vector.h"

namespace quire {
namespace {

void nothing(Scratch&) {}

// Columns without a position may lie between two that are seen.
void clear_gaps(Scratch& s, const Piece* pieces, int64_t num_pieces) {
  for (int64_t i = 0; i < num_pieces; ++i) {
    if (pieces[i].count == s.padded) continue;
    for (int64_t x = 0; x < s.num_rows; ++x) {
      float* scores = s.scores + x * kScoreStride + i * s.padded;
      std::fill(scores + pieces[i].count, scores + s.padded, kNothing);
    }
  }
}

// Whether of the pair at z one position is not seen.
template <class T>
bool is_edge(const Piece& piece, int64_t z) {
  return kPair<T> == 2 && (z < piece.seen_begin || z + 1 >= piece.seen_end);
}

// Such pairs of V to the place of their columns in `values`, with zeros for the position that is not seen: it may be
// anything, and 0 x NaN is NaN.
void copy_edges(const Scratch& s, const Piece* pieces, int64_t num_pieces) {
  for (int64_t i = 0; i < num_pieces; ++i) {
    const Piece& piece = pieces[i];
    if (piece.seen_begin == piece.seen_end) continue;
    for (const int64_t z : {piece.seen_begin / 2 * 2, (piece.seen_end - 1) / 2 * 2}) {
      if (!is_edge<Bf16>(piece, z)) continue;
      const uint32_t seen = z < piece.seen_begin ? 0xffff0000u : 0xffffu;
      const char* from = static_cast<const char*>(piece.v) + z * s.head_dim * sizeof(Bf16);
      char* to = static_cast<char*>(s.values) + (i * s.padded + z) * s.head_dim * sizeof(Bf16);
      for (int64_t h = 0; h < s.head_dim; ++h) {
        uint32_t both;
        std::memcpy(&both, from + h * sizeof both, sizeof both);
        both &= seen;
        std::memcpy(to + h * sizeof both, &both, sizeof both);
      }
    }
  }
}

// ---- plain C++ ------------------------------------------------------------------------------------------------------

template <class T>
void score_plain(Scratch& s, const Piece* pieces, int64_t num_pieces) {
  constexpr int64_t pair = kPair<T>;
  const auto* q = static_cast<const float*>(s.q);
  for (int64_t i = 0; i < num_pieces; ++i) {
    const auto* k = static_cast<const T*>(pieces[i].k);
    const int64_t count = pieces[i].count;
    for (int64_t x = 0; x < s.num_rows; ++x) {
      float* scores = s.scores + x * kScoreStride + i * s.padded;
      std::fill(scores, scores + count, 0.0f);
      for (int64_t h = 0; h < s.head_dim; ++h) {
        const float factor = q[x * s.head_dim + h];
        const T* row = k + h / pair * s.page_size * pair + h % pair;
        for (int64_t z = 0; z < count; ++z) scores[z] += factor * to_float(row[z * pair]);
      }
    }
  }
  clear_gaps(s, pieces, num_pieces);
}

void soften_plain(Scratch& s, int64_t column, int64_t num_columns) {
  for (int64_t x = 0; x < s.num_rows; ++x) {
    float* scores = s.scores + x * kScoreStride;
    const int64_t begin = std::clamp<int64_t>(s.begin[x] - column, 0, num_columns);
    const int64_t end = std::clamp<int64_t>(s.end[x] - column, begin, num_columns);
    float top = s.top[x];
    for (int64_t c = begin; c < end; ++c) {
      scores[c] *= s.scale_log2e;
      top = scores[c] > top ? scores[c] : top;
    }
    std::fill(scores, scores + begin, 0.0f);
    std::fill(scores + end, scores + num_columns, 0.0f);
    if (top == kNothing) {  // nothing seen yet
      std::fill(scores + begin, scores + end, 0.0f);
      continue;
    }
    float sum = 0;
    for (int64_t c = begin; c < end; ++c) {
      scores[c] = std::exp2(scores[c] - top);
      sum += scores[c];
    }
    const float shrink = std::exp2(s.top[x] - top);
    s.top[x] = top;
    s.total[x] = s.total[x] * shrink + sum;
    float* out = s.out + x * s.head_dim;
    for (int64_t h = 0; h < s.head_dim; ++h) out[h] *= shrink;
  }
}

template <class T>
void accumulate_plain(Scratch& s, const Piece* pieces, int64_t num_pieces, const Piece*, int64_t) {
  constexpr int64_t pair = kPair<T>;
  for (int64_t i = 0; i < num_pieces; ++i) {
    const auto* v = static_cast<const T*>(pieces[i].v);
    for (int64_t x = 0; x < s.num_rows; ++x) {
      const float* weights = s.scores + x * kScoreStride + i * s.padded;
      float* out = s.out + x * s.head_dim;
      for (int64_t z = pieces[i].seen_begin; z < pieces[i].seen_end; ++z) {
        const T* row = v + z / pair * s.head_dim * pair + z % pair;
        for (int64_t h = 0; h < s.head_dim; ++h) out[h] += weights[z] * to_float(row[h * pair]);
      }
    }
  }
}

template <class T>
constexpr TileFunctions kPlainFunctions = {true, nothing, score_plain<T>, soften_plain, accumulate_plain<T>, nothing};

// ---- vectors --------------------------------------------------------------------------------------------------------

#if QUIRE_X86

namespace avx2 {
#define TARGET __attribute__((target("avx2,fma")))
using namespace avx2_operations;
#include "attention_vector.inc"
#undef TARGET
}  // namespace avx2

namespace avx512 {
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
using namespace avx512_operations;
constexpr bool kDot = false;
TARGET inline F dot(F sum, U, U) { return sum; }
TARGET inline void store_narrow(Bf16*, F) {}
#include "attention_vector.inc"
#undef TARGET
}  // namespace avx512

namespace avx512_bf16 {
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
using namespace avx512_operations;
constexpr bool kDot = true;
TARGET inline F dot(F sum, U a, U b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
TARGET inline void store_narrow(Bf16* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
#include "attention_vector.inc"
#undef TARGET
}  // namespace avx512_bf16

// ---- tiles ----------------------------------------------------------------------------------------------------------

// AMX multiplies 16 rows by 16 columns over 32 dimensions (or 32 columns by 16 dimensions of V) in one instruction. A
// page of K is such a tile as it lies; V of a chunk is first copied out of its pages, without what is not seen.
namespace amx {
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))

constexpr int64_t kSide = 16;  // rows of a tile, and floats or pairs in each

// Whatever the number of rows: a tile adds up in another order than a dot product.
bool fits(const Scratch& s) { return s.head_dim % 32 == 0 && s.page_size % kSide == 0; }

struct alignas(64) Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

// For so many rows of queries: products are in tiles 0 to 3, queries or weights in 5, K or V in 4.
constexpr Config config_of(int64_t rows) {
  const auto few = static_cast<uint8_t>(rows);
  return {1, 0, {}, {64, 64, 64, 64, 64, 64}, {few, few, few, few, kSide, few}};
}

// Constants: gcc sees only the first eight bytes being read, and would not store the others on the stack.
constexpr Config kConfigs[kSide] = {config_of(1),  config_of(2),  config_of(3),  config_of(4),
                                    config_of(5),  config_of(6),  config_of(7),  config_of(8),
                                    config_of(9),  config_of(10), config_of(11), config_of(12),
                                    config_of(13), config_of(14), config_of(15), config_of(16)};

TARGET void start(Scratch& s) {
  if (fits(s)) _tile_loadconfig(&kConfigs[std::min(s.num_rows, kSide) - 1]);
}

TARGET void finish(Scratch& s) {
  if (fits(s)) _tile_release();
}

// c[0..15, 0..15] and its neighbours right and below = (or +=) a b, over `depth` tiles. Strides in bytes. Six tiles are
// used, not eight: see linear_x86.cc.
struct Product {
  const char* a;  // rows of A; the second tile is 16 rows below
  int64_t a_stride;
  const char* b[2];           // pairs of rows of B; null for no second tile
  int64_t b_stride, b_depth;  // from row to row, from tile to tile
  char* c[2];
  int64_t c_stride;
  int64_t depth;
  bool lower;  // whether there are 16 more rows
  bool add;
};

TARGET void multiply(const Product& p) {
  asm volatile("" ::: "memory");  // gcc does not know that loading a tile reads memory
  const bool right = p.b[1] != nullptr;
  const int64_t a_below = kSide * p.a_stride, c_below = kSide * p.c_stride;
  if (p.add) {
    _tile_loadd(0, p.c[0], p.c_stride);
    if (right) _tile_loadd(1, p.c[1], p.c_stride);
    if (p.lower) _tile_loadd(2, p.c[0] + c_below, p.c_stride);
    if (right && p.lower) _tile_loadd(3, p.c[1] + c_below, p.c_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < p.depth; ++i) {
    // b[0] is never null. NOLINTNEXTLINE(clang-analyzer-core.NullPointerArithm)
    _tile_loadd(4, p.b[0] + i * p.b_depth, p.b_stride);
    _tile_loadd(5, p.a + i * 64, p.a_stride);
    _tile_dpbf16ps(0, 5, 4);
    if (p.lower) {
      _tile_loadd(5, p.a + a_below + i * 64, p.a_stride);
      _tile_dpbf16ps(2, 5, 4);
    }
    if (right) {
      _tile_loadd(4, p.b[1] + i * p.b_depth, p.b_stride);
      if (p.lower) {
        _tile_dpbf16ps(3, 5, 4);
        _tile_loadd(5, p.a + i * 64, p.a_stride);
      }
      _tile_dpbf16ps(1, 5, 4);
    }
  }
  _tile_stored(0, p.c[0], p.c_stride);
  if (right) _tile_stored(1, p.c[1], p.c_stride);
  if (p.lower) _tile_stored(2, p.c[0] + c_below, p.c_stride);
  if (right && p.lower) _tile_stored(3, p.c[1] + c_below, p.c_stride);
}

TARGET void score(Scratch& s, const Piece* pieces, int64_t num_pieces) {
  if (!fits(s)) return avx512_bf16::score<Bf16>(s, pieces, num_pieces);
  const Bf16* keys[kChunk / kSide];
  int64_t columns[kChunk / kSide], num_groups = 0;
  for (int64_t i = 0; i < num_pieces; ++i)
    for (int64_t z = 0; z < pieces[i].count; z += kSide) {
      keys[num_groups] = static_cast<const Bf16*>(pieces[i].k) + z * 2;
      columns[num_groups++] = i * s.padded + z;
    }
  Product p{};
  p.a_stride = s.head_dim * 2;
  p.b_stride = s.page_size * 4;
  p.b_depth = kSide * p.b_stride;
  p.c_stride = kScoreStride * 4;
  p.depth = s.head_dim / 32;
  for (int64_t x = 0; x < s.num_rows; x += 2 * kSide) {
    p.a = static_cast<const char*>(s.q) + x * p.a_stride;
    p.lower = x + kSide < s.num_rows;
    for (int64_t g = 0; g < num_groups; g += 2) {
      const bool right = g + 1 < num_groups;
      p.b[0] = reinterpret_cast<const char*>(keys[g]);
      p.b[1] = right ? reinterpret_cast<const char*>(keys[g + 1]) : nullptr;
      p.c[0] = reinterpret_cast<char*>(s.scores + x * kScoreStride + columns[g]);
      p.c[1] = right ? reinterpret_cast<char*>(s.scores + x * kScoreStride + columns[g + 1]) : nullptr;
      multiply(p);
    }
  }
  clear_gaps(s, pieces, num_pieces);
}

// V of a chunk as [columns / 2, H, 2], zero where no query looks. Returns its columns, a multiple of 32.
TARGET int64_t gather_values(Scratch& s, const Piece* pieces, int64_t num_pieces) {
  const int64_t width = round_up(num_pieces * s.padded, 32);
  auto* to = static_cast<uint32_t*>(s.values);
  for (int64_t c = 0; c < width; c += 2, to += s.head_dim) {
    const int64_t i = c / s.padded, z = c % s.padded;
    uint32_t seen = 0;
    if (i < num_pieces) {
      if (z >= pieces[i].seen_begin && z < pieces[i].seen_end) seen |= 0xffffu;
      if (z + 1 >= pieces[i].seen_begin && z + 1 < pieces[i].seen_end) seen |= 0xffff0000u;
    }
    if (seen == 0) {
      std::memset(to, 0, s.head_dim * 4);
      continue;
    }
    const auto* from = static_cast<const Bf16*>(pieces[i].v) + z * s.head_dim;
    const __m512i bits = _mm512_set1_epi32(static_cast<int>(seen));
    for (int64_t h = 0; h < s.head_dim; h += kSide)
      _mm512_storeu_si512(to + h, _mm512_and_si512(_mm512_loadu_si512(from + h * 2), bits));
  }
  return width;
}

TARGET void accumulate(Scratch& s, const Piece* pieces, int64_t num_pieces, const Piece* next, int64_t num_next) {
  if (!fits(s)) return avx512_bf16::accumulate<Bf16>(s, pieces, num_pieces, next, num_next);
  Product p{};
  p.depth = gather_values(s, pieces, num_pieces) / 32;
  p.a_stride = kScoreStride * 2;
  p.b_stride = s.head_dim * 4;
  p.b_depth = kSide * p.b_stride;
  p.c_stride = s.head_dim * 4;
  p.add = true;
  for (int64_t x = 0; x < s.num_rows; x += 2 * kSide) {
    p.a = reinterpret_cast<const char*>(s.weights + x * kScoreStride);
    p.lower = x + kSide < s.num_rows;
    for (int64_t h = 0; h < s.head_dim; h += 2 * kSide) {
      for (int64_t j = 0; j < 2; ++j) {
        p.b[j] = static_cast<const char*>(s.values) + (h + j * kSide) * 4;
        p.c[j] = reinterpret_cast<char*>(s.out + x * s.head_dim + h + j * kSide);
      }
      multiply(p);
    }
  }
}

constexpr TileFunctions kFunctions = {false, start, score, avx512_bf16::soften<true>, accumulate, finish};
#undef TARGET
}  // namespace amx

#endif  // QUIRE_X86

}  // namespace

TileFunctions tile_functions(Isa isa, Element element) {
  const bool narrow = element == Element::kBfloat16;
  switch (isa) {
#if QUIRE_X86
    case Isa::kAmx:
      return narrow ? amx::kFunctions : avx512::kFunctions<float>;
    case Isa::kAvx512Bf16:
      return narrow ? avx512_bf16::kFunctions<Bf16> : avx512::kFunctions<float>;
    case Isa::kAvx2:
      return narrow ? avx2::kFunctions<Bf16> : avx2::kFunctions<float>;
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
      return narrow ? avx512::kFunctions<Bf16> : avx512::kFunctions<float>;
#endif
    default:
      return narrow ? kPlainFunctions<Bf16> : kPlainFunctions<float>;
  }
}

}  // namespace quire
