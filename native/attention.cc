// The walk: which tasks there are, what each reads, how parts of one context are put together. The arithmetic of a tile
// is in a table of four functions for each instruction set and element type: plain ones here, vectors in
// attention_vector.inc.
//
// A tile is a few queries of one row with all G heads that share a KV head: its rows are (query, head). It visits its
// context in chunks of up to kChunk columns. A column is a position, counted so that each piece of a page starts at an
// even one (see Columns). For every chunk: scores = Q K^T, softmax with a running maximum and sum, out += weights V.
//
// What a tile's queries do not see may be anything, NaN too. Scores of such columns are never read, their weight is set
// to zero, and since 0 x NaN is NaN their V is never multiplied.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "bf16.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define QUIRE_X86 1
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr int64_t kChunk = 128;         // columns visited at a time
constexpr int64_t kTileRows = 64;       // rows of a tile, unless one query has more heads
constexpr int64_t kLine = 64;           // bytes
constexpr int64_t kMinPartColumns = 256;  // a shorter part of a context is not worth a task of its own
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896340736f;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// ---- elements -------------------------------------------------------------------------------------------------------

template <class T>
constexpr int64_t kPair = sizeof(T) == 2 ? 2 : 1;

// ---- columns --------------------------------------------------------------------------------------------------------

// Positions of a context and the columns they are computed in. A page is one piece, or several when it is larger than a
// chunk; a piece starts at an even column so that its positions pair up as they do in the page:
//
//   Z = 5   positions  0 1 2 3 4   5 6 7 8 9   10
//           columns    0 1 2 3 4 . 6 7 8 9 10 . 12      a dot is a column without a position
struct Columns {
  int64_t page_size, width, padded, per_page;

  explicit Columns(int64_t page_size)
      : page_size(page_size),
        width(std::min(page_size, kChunk)),
        padded(round_up(width, 2)),
        per_page(ceil_div(page_size, width)) {}

  int64_t piece(int64_t position) const {
    return position / page_size * per_page + position % page_size / width;
  }
  int64_t column(int64_t position) const {
    return piece(position) * padded + position % page_size % width;
  }
  int64_t pieces_per_chunk() const { return kChunk / padded; }
};

// One piece of a page, in the place where a tile meets it.
struct Piece {
  const void* k;  // [H / pair, Z, pair], from this piece's first position on
  const void* v;  // [positions / pair, H, pair]
  int64_t count;  // positions; 0 for a page outside the pool
  int64_t seen_begin, seen_end;  // of them, those that some query of the tile sees
};

// ---- a tile ---------------------------------------------------------------------------------------------------------

constexpr int64_t kScoreStride = kChunk + 16;  // floats; not a power of two, or the rows of a tile share cache sets

// What a thread works in. Rows are padded to 16, columns to 32, for the instruction set that wants whole tiles.
struct Scratch {
  int64_t num_rows = 0;  // X
  int64_t head_dim = 0;
  int64_t page_size = 0;
  int64_t padded = 0;           // columns of a piece
  float scale_log2e = 0;
  const void* q = nullptr;      // [X, H], as the functions of the table want it
  float* scores = nullptr;      // [X, kScoreStride]; weights after `soften`
  Bf16* weights = nullptr;      // [X, kScoreStride], where the table wants them in bfloat16
  void* values = nullptr;       // [kChunk / 2, H, 2] bfloat16, where the table wants V without its pages
  float* out = nullptr;         // [X, H]
  float* top = nullptr;         // [X] running maximum, of scores times log2(e)
  float* total = nullptr;       // [X] running sum
  int64_t* begin = nullptr;     // [X] first column seen, from the start of the context
  int64_t* end = nullptr;
};

// The arithmetic of one instruction set and element type.
struct Functions {
  bool float_queries;  // `q` is float32 whatever the element type
  void (*start)(Scratch&);
  // scores[x, i * padded + z] = q[x] . k[piece i, z]; a column without a position gets kNothing.
  void (*score)(Scratch&, const Piece* pieces, int64_t num_pieces);
  // Scores become weights; top and total move on, out shrinks with them. `column` is the chunk's first.
  void (*soften)(Scratch&, int64_t column, int64_t num_columns);
  // out[x] += weights[x] V. The next chunk's pieces are only named, so that they can be on their way.
  void (*accumulate)(Scratch&, const Piece* pieces, int64_t num_pieces, const Piece* next, int64_t num_next);
  void (*finish)(Scratch&);
};

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
constexpr Functions kPlainFunctions = {true, nothing, score_plain<T>, soften_plain, accumulate_plain<T>, nothing};

// ---- vectors --------------------------------------------------------------------------------------------------------

#if QUIRE_X86

namespace avx2 {
#define TARGET __attribute__((target("avx2,fma")))

using F = __m256;
using U = __m256i;
constexpr int kLanes = 8;
constexpr int kSums = 2;  // vectors of output for each of four rows: what sixteen registers hold
constexpr bool kDot = false;

TARGET inline U iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
TARGET inline U first(int64_t n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), iota()); }
TARGET inline F load(const float* p) { return _mm256_loadu_ps(p); }
TARGET inline F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
TARGET inline U load_pairs(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
TARGET inline U load_pairs_n(const void* p, int n) {
  return _mm256_maskload_epi32(static_cast<const int*>(p), first(n));
}
TARGET inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
TARGET inline void store_n(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
TARGET inline F set1(float x) { return _mm256_set1_ps(x); }
TARGET inline U set1_pair(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
TARGET inline F add(F a, F b) { return _mm256_add_ps(a, b); }
TARGET inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
TARGET inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
TARGET inline F max(F a, F b) { return _mm256_max_ps(a, b); }
TARGET inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
TARGET inline F low(U x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
TARGET inline F high(U x) { return _mm256_castsi256_ps(_mm256_and_si256(x, set1_pair(0xffff0000u))); }
TARGET inline U keep_bits(U x, uint32_t bits) { return _mm256_and_si256(x, set1_pair(bits)); }
TARGET inline float sum_of(F x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
TARGET inline float highest_of(F x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
TARGET inline F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TARGET inline F dot(F sum, U, U) { return sum; }
TARGET inline void store_narrow(Bf16*, F) {}
TARGET inline void shrink_eight(float* p, float by) { store(p, mul(load(p), set1(by))); }
TARGET inline F between(F x, int64_t begin, int64_t end, float other) {
  const U lanes = _mm256_andnot_si256(first(std::clamp<int64_t>(begin, 0, 8)), first(std::clamp<int64_t>(end, 0, 8)));
  return _mm256_blendv_ps(set1(other), x, _mm256_castsi256_ps(lanes));
}
TARGET inline F times_power_of_two(F y, F n, F x) {
  const F above = _mm256_cmp_ps(x, set1(-126), _CMP_NLT_UQ);  // NaN stays NaN
  const U power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(above, mul(y, _mm256_castsi256_ps(power)));
}

#include "attention_vector.inc"
#undef TARGET
}  // namespace avx2

namespace avx512_operations {
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

using F = __m512;
using U = __m512i;
constexpr int kLanes = 16;
constexpr int kSums = 4;

TARGET inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
TARGET inline F load(const float* p) { return _mm512_loadu_ps(p); }
TARGET inline F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
TARGET inline U load_pairs(const void* p) { return _mm512_loadu_si512(p); }
TARGET inline U load_pairs_n(const void* p, int n) { return _mm512_maskz_loadu_epi32(first(n), p); }
TARGET inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
TARGET inline void store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
TARGET inline F set1(float x) { return _mm512_set1_ps(x); }
TARGET inline U set1_pair(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
TARGET inline F add(F a, F b) { return _mm512_add_ps(a, b); }
TARGET inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
TARGET inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
TARGET inline F max(F a, F b) { return _mm512_max_ps(a, b); }
TARGET inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
TARGET inline F low(U x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
TARGET inline F high(U x) { return _mm512_castsi512_ps(_mm512_and_si512(x, set1_pair(0xffff0000u))); }
TARGET inline U keep_bits(U x, uint32_t bits) { return _mm512_and_si512(x, set1_pair(bits)); }
TARGET inline float sum_of(F x) { return _mm512_reduce_add_ps(x); }
TARGET inline float highest_of(F x) { return _mm512_reduce_max_ps(x); }
TARGET inline F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TARGET inline void shrink_eight(float* p, float by) {
  _mm256_storeu_ps(p, _mm256_mul_ps(_mm256_loadu_ps(p), _mm256_set1_ps(by)));
}
// Lanes from begin to end keep their value.
TARGET inline F between(F x, int64_t begin, int64_t end, float other) {
  const uint32_t lanes = first(std::clamp<int64_t>(end, 0, 16)) & ~first(std::clamp<int64_t>(begin, 0, 16));
  return _mm512_mask_mov_ps(set1(other), static_cast<__mmask16>(lanes), x);
}
// y * 2^n. Where x, which n was rounded from, is minus infinity, y is NaN and the answer 0.
TARGET inline F times_power_of_two(F y, F n, F x) {
  const __mmask16 above = _mm512_cmp_ps_mask(x, set1(-126), _CMP_NLT_UQ);  // NaN stays NaN
  return _mm512_maskz_scalef_ps(above, y, n);
}

}  // namespace avx512_operations

namespace avx512 {
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

constexpr int64_t kSide = 16;         // rows of a tile, and floats or pairs in each
constexpr int64_t kFewestRows = 12;  // below, a tile is mostly empty

bool fits(const Scratch& s) { return s.num_rows >= kFewestRows && s.head_dim % 32 == 0 && s.page_size % kSide == 0; }

TARGET void start(Scratch& s) {
  if (!fits(s)) return;
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
  };
  // Static: gcc sees only the first eight bytes being read, and would not store the others on the stack.
  static const Config config = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {kSide, kSide, kSide, kSide, kSide, kSide, kSide, kSide}};
  _tile_loadconfig(&config);
}

TARGET void finish(Scratch& s) {
  if (fits(s)) _tile_release();
}

// c[0..15, 0..15] and its neighbours right and below = (or +=) a b, over `depth` tiles. Strides in bytes.
struct Product {
  const char* a;         // rows of A; the second tile is 16 rows below
  int64_t a_stride;
  const char* b[2];      // pairs of rows of B; null for no second tile
  int64_t b_stride, b_depth;  // from row to row, from tile to tile
  char* c[2];
  int64_t c_stride;
  int64_t depth;
  bool lower;            // whether there are 16 more rows
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
    _tile_loadd(4, p.a + i * 64, p.a_stride);
    _tile_loadd(6, p.b[0] + i * p.b_depth, p.b_stride);
    _tile_dpbf16ps(0, 4, 6);
    if (right) {
      _tile_loadd(7, p.b[1] + i * p.b_depth, p.b_stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (p.lower) {
      _tile_loadd(5, p.a + a_below + i * 64, p.a_stride);
      _tile_dpbf16ps(2, 5, 6);
      if (right) _tile_dpbf16ps(3, 5, 7);
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

constexpr Functions kFunctions = {false, start, score, avx512_bf16::soften<true>, accumulate, finish};
#undef TARGET
}  // namespace amx

#endif  // QUIRE_X86

Functions functions(Isa isa, Element element) {
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
      return narrow ? avx512::kFunctions<Bf16> : avx512::kFunctions<float>;
#endif
    default:
      return narrow ? kPlainFunctions<Bf16> : kPlainFunctions<float>;
  }
}

// ---- tasks ----------------------------------------------------------------------------------------------------------

// A tile and the part of its context it visits here.
struct Task {
  int64_t row, kv_head;
  int64_t first_token, num_queries;
  int64_t first_position;            // of the first query
  int64_t begin_piece, end_piece;
  int64_t part = 0, num_parts = 1;
  int64_t split = -1;                // which split context this is a part of
  bool writes = false;               // the tile is the whole row: it writes the row's K and V itself
};

// A context visited in several parts: what each leaves, and how many are still under way.
struct Split {
  std::vector<float> left;  // [parts, X, H + 2]: out, top, total
  std::atomic<int64_t> waiting;

  Split(int64_t num_parts, int64_t num_rows, int64_t head_dim)
      : left(num_parts * num_rows * (head_dim + 2)), waiting(num_parts) {}
};

template <class T>
class Step {
 public:
  Step(const Attention& a, Isa isa, const Threads& threads)
      : a_(a), columns_(a.page_size), functions_(functions(isa, a.element)), threads_(threads) {
    group_ = a.num_heads / a.num_kv_heads;
    max_rows_ = std::max(kTileRows / group_, int64_t{1}) * group_;
  }

  void run() {
    plan();
    const bool alone = threads_.count < 2 || is_small();
    if (!to_write_.empty()) {
      for_each(alone, static_cast<int64_t>(to_write_.size()), [&](int64_t i) {
        for (int64_t t = to_write_[i].first; t < to_write_[i].second; ++t)
          for (int64_t head = 0; head < a_.num_kv_heads; ++head) write(t, head);
      });
    }
    const Threads self{1, [](int64_t n, const std::function<void(int64_t)>& task) {
                         for (int64_t i = 0; i < n; ++i) task(i);
                       }};
    // The KV heads of a page are neighbours in memory: one thread visits them one after the other if it has enough to do.
    const auto num_tasks = static_cast<int64_t>(tasks_.size());
    const int64_t at_once = std::clamp<int64_t>(num_tasks / (4 * threads_.count), 1, a_.num_kv_heads);
    run_ahead(alone ? self : threads_, ceil_div(num_tasks, at_once), [&](int64_t now, int64_t next) {
      const int64_t end = std::min((now + 1) * at_once, num_tasks);
      for (int64_t i = now * at_once; i < end; ++i) {
        const int64_t following = i + 1 < end ? i + 1 : next * at_once;
        attend(tasks_[i], following < num_tasks ? &tasks_[following] : nullptr);
      }
    });
  }

 private:
  static constexpr int64_t pair = kPair<T>;

  template <class F>
  void for_each(bool alone, int64_t n, const F& task) {
    if (alone || n < 2) {
      for (int64_t i = 0; i < n; ++i) task(i);
    } else {
      threads_.run(n, task);
    }
  }

  // Rows become tiles; whoever is in no row is zeroed. Rows never overlap, whatever cu_q_lens says.
  void plan() {
    int64_t covered = 0;
    for (int64_t row = 0; row < a_.num_rows; ++row) {
      const int64_t begin = std::clamp<int64_t>(a_.cu_q_lens_B1[row], covered, a_.num_tokens);
      const int64_t end = std::clamp<int64_t>(a_.cu_q_lens_B1[row + 1], begin, a_.num_tokens);
      leave_out(covered, begin);
      if (begin < end) plan_row(row, begin, end);
      covered = end;
    }
    leave_out(covered, a_.num_tokens);
    split_long_contexts();
  }

  void plan_row(int64_t row, int64_t begin, int64_t end) {
    const int64_t kv_len = std::clamp<int64_t>(a_.kv_lens_B[row], 0, a_.pages_per_row * a_.page_size);
    const int64_t per_tile = max_rows_ / group_;
    const bool whole = end - begin <= per_tile;
    if (!whole) add_writes(begin, end);
    for (int64_t token = begin; token < end; token += per_tile) {
      Task task{};
      task.row = row;
      task.first_token = token;
      task.num_queries = std::min(per_tile, end - token);
      task.first_position = kv_len - (end - token);
      task.writes = whole;
      const int64_t last = task.first_position + task.num_queries - 1;
      if (last >= 0) {
        task.begin_piece = columns_.piece(first_seen(std::max<int64_t>(task.first_position, 0)));
        task.end_piece = columns_.piece(last) + 1;
      }
      for (task.kv_head = 0; task.kv_head < a_.num_kv_heads; ++task.kv_head) tasks_.push_back(task);
    }
  }

  void leave_out(int64_t begin, int64_t end) {
    if (begin == end) return;
    const int64_t width = a_.num_heads * a_.head_dim;
    std::memset(static_cast<T*>(a_.out_TNH) + begin * width, 0, (end - begin) * width * sizeof(T));
    add_writes(begin, end);
  }

  void add_writes(int64_t begin, int64_t end) {
    constexpr int64_t few = 32;
    for (; begin < end; begin += few) to_write_.emplace_back(begin, std::min(begin + few, end));
  }

  int64_t first_seen(int64_t position) const {
    return a_.window ? std::max<int64_t>(position - a_.window + 1, 0) : 0;
  }

  // In columns times rows; the constant stands for reading K and V, which all rows share.
  int64_t cost(const Task& task) const {
    return (task.end_piece - task.begin_piece) * columns_.padded * (16 + task.num_queries * group_);
  }

  bool is_small() const {
    constexpr int64_t bytes_worth_a_thread = 128 << 10;
    int64_t num_pieces = 0;
    for (const Task& task : tasks_) num_pieces += task.end_piece - task.begin_piece;
    return num_pieces * columns_.padded * a_.head_dim * 2 * static_cast<int64_t>(sizeof(T)) < bytes_worth_a_thread;
  }

  // So that no task is more than a fraction of what a thread has to do.
  void split_long_contexts() {
    if (threads_.count < 2 || is_small()) return;
    int64_t total = 0;
    for (const Task& task : tasks_) total += cost(task);
    const int64_t share = ceil_div(total, 4 * threads_.count);
    std::vector<Task> tasks;
    tasks.reserve(tasks_.size());
    for (size_t i = 0; i < tasks_.size(); i += a_.num_kv_heads) {  // the KV heads of one tile
      const Task& whole = tasks_[i];
      const int64_t num_pieces = whole.end_piece - whole.begin_piece;
      const int64_t most_parts = num_pieces * columns_.padded / kMinPartColumns;
      const int64_t num_parts = std::max<int64_t>(std::min(ceil_div(cost(whole), share), most_parts), 1);
      if (num_parts > 1 && whole.writes) add_writes(whole.first_token, whole.first_token + whole.num_queries);
      const auto first_split = static_cast<int64_t>(splits_.size());
      for (int64_t part = 0; part < num_parts; ++part) {
        for (int64_t head = 0; head < a_.num_kv_heads; ++head) {
          Task task = tasks_[i + head];
          if (num_parts > 1) {
            if (part == 0) splits_.push_back(std::make_unique<Split>(num_parts, task.num_queries * group_, a_.head_dim));
            task.split = first_split + head;
            task.part = part;
            task.num_parts = num_parts;
            task.writes = false;
            task.begin_piece = whole.begin_piece + num_pieces * part / num_parts;
            task.end_piece = whole.begin_piece + num_pieces * (part + 1) / num_parts;
          }
          tasks.push_back(task);
        }
      }
    }
    tasks_ = std::move(tasks);
  }

  void write(int64_t token, int64_t kv_head) const {
    const int64_t destination = a_.destinations_T[token];
    if (destination < 0 || destination >= a_.num_pages * a_.page_size) return;
    const int64_t offset = destination % a_.page_size, head_dim = a_.head_dim;
    const int64_t page = destination / a_.page_size;
    const int64_t from = (token * a_.num_kv_heads + kv_head) * head_dim;
    const T* k = static_cast<const T*>(a_.k_TKH) + from;
    const T* v = static_cast<const T*>(a_.v_TKH) + from;
    T* k_page = static_cast<T*>(a_.k_pages) + k_start(page, kv_head) + offset * pair;
    T* v_page = static_cast<T*>(a_.v_pages) + v_start(page, kv_head) + offset / pair * head_dim * pair + offset % pair;
    for (int64_t h = 0; h < head_dim; h += pair) std::memcpy(k_page + h * a_.page_size, k + h, pair * sizeof(T));
    for (int64_t h = 0; h < head_dim; ++h) v_page[h * pair] = v[h];
  }

  int64_t k_start(int64_t page, int64_t kv_head) const {
    return (page * a_.num_kv_heads + kv_head) * a_.head_dim * a_.page_size;
  }
  int64_t v_start(int64_t page, int64_t kv_head) const {
    return (page * a_.num_kv_heads + kv_head) * a_.head_dim * round_up(a_.page_size, pair);
  }

  // `following` is what this thread does next.
  void attend(const Task& task, const Task* following) {
    if (task.writes)
      for (int64_t i = 0; i < task.num_queries; ++i) write(task.first_token + i, task.kv_head);
    Scratch s = scratch(task);
    load_queries(task, s);
    functions_.start(s);
    const int64_t seen_begin = *std::min_element(s.begin, s.begin + s.num_rows);
    const int64_t seen_end = *std::max_element(s.end, s.end + s.num_rows);
    const int64_t per_chunk = columns_.pieces_per_chunk();
    Piece both[2][kChunk];
    Piece *pieces = both[0], *next = both[1];
    const auto look_up = [&](const Task& from, int64_t first, Piece* to) {
      const int64_t count = std::clamp<int64_t>(from.end_piece - first, 0, per_chunk);
      for (int64_t i = 0; i < count; ++i) to[i] = piece(from, first + i, seen_begin, seen_end);
      return count;
    };
    int64_t num_pieces = look_up(task, task.begin_piece, pieces);
    for (int64_t first = task.begin_piece; first < task.end_piece; first += per_chunk) {
      functions_.score(s, pieces, num_pieces);
      functions_.soften(s, first * columns_.padded, num_pieces * columns_.padded);
      int64_t num_next = look_up(task, first + per_chunk, next);
      if (num_next == 0 && following) num_next = look_up(*following, following->begin_piece, next);
      functions_.accumulate(s, pieces, num_pieces, next, num_next);
      std::swap(pieces, next);
      num_pieces = num_next;
    }
    functions_.finish(s);
    if (task.split < 0) {
      store(task, s);
    } else {
      leave(task, s);
    }
  }

  Piece piece(const Task& task, int64_t index, int64_t seen_begin, int64_t seen_end) const {
    const int64_t in_row = index / columns_.per_page;
    const int64_t offset = index % columns_.per_page * columns_.width;
    const int64_t page = a_.page_table_BP[task.row * a_.pages_per_row + in_row];
    if (page < 0 || page >= a_.num_pages) return {nullptr, nullptr, 0, 0, 0};
    Piece piece;
    piece.k = static_cast<const T*>(a_.k_pages) + k_start(page, task.kv_head) + offset * pair;
    piece.v = static_cast<const T*>(a_.v_pages) + v_start(page, task.kv_head) + offset * a_.head_dim;
    piece.count = std::min(columns_.width, a_.page_size - offset);
    const int64_t column = index * columns_.padded;
    piece.seen_begin = std::clamp<int64_t>(seen_begin - column, 0, piece.count);
    piece.seen_end = std::clamp<int64_t>(seen_end - column, piece.seen_begin, piece.count);
    return piece;
  }

  // Carved out of one allocation that the thread keeps.
  Scratch scratch(const Task& task) {
    const int64_t rows = round_up(max_rows_, 16), head_dim = round_up(a_.head_dim, 16);
    const int64_t floats = rows * (2 * head_dim + kScoreStride + 2) + kChunk * head_dim;
    const int64_t bytes = floats * 4 + rows * (kScoreStride * 2 + 16) + 16 * kLine;
    static thread_local std::vector<char> memory;
    if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(bytes);
    char* at = memory.data();
    auto take = [&](int64_t size) {
      at += -reinterpret_cast<intptr_t>(at) & (kLine - 1);
      return std::exchange(at, at + size);
    };
    Scratch s;
    s.num_rows = task.num_queries * group_;
    s.head_dim = a_.head_dim;
    s.page_size = a_.page_size;
    s.padded = columns_.padded;
    s.scale_log2e = a_.scale * kLog2E;
    s.q = take(rows * head_dim * 4);
    s.out = reinterpret_cast<float*>(take(rows * head_dim * 4));
    s.scores = reinterpret_cast<float*>(take(rows * kScoreStride * 4));
    s.weights = reinterpret_cast<Bf16*>(take(rows * kScoreStride * 2));
    s.values = take(kChunk * head_dim * 2);
    s.top = reinterpret_cast<float*>(take(rows * 4));
    s.total = reinterpret_cast<float*>(take(rows * 4));
    s.begin = reinterpret_cast<int64_t*>(take(rows * 8));
    s.end = reinterpret_cast<int64_t*>(take(rows * 8));
    return s;
  }

  void load_queries(const Task& task, Scratch& s) const {
    const int64_t head_dim = a_.head_dim;
    auto* q = static_cast<char*>(const_cast<void*>(s.q));
    for (int64_t x = 0; x < s.num_rows; ++x) {
      const int64_t token = task.first_token + x / group_, head = task.kv_head * group_ + x % group_;
      const T* from = static_cast<const T*>(a_.q_TNH) + (token * a_.num_heads + head) * head_dim;
      if (functions_.float_queries) {
        float* to = reinterpret_cast<float*>(q) + x * head_dim;
        for (int64_t h = 0; h < head_dim; ++h) to[h] = to_float(from[h]);
      } else {
        std::memcpy(q + x * head_dim * sizeof(T), from, head_dim * sizeof(T));
      }
      const int64_t position = task.first_position + x / group_;
      s.begin[x] = position < 0 ? 0 : columns_.column(first_seen(position));
      s.end[x] = position < 0 ? 0 : columns_.column(position) + 1;
      s.top[x] = kNothing;
      s.total[x] = 0;
    }
    std::fill(s.out, s.out + s.num_rows * head_dim, 0.0f);
  }

  void store(const Task& task, const Scratch& s) const {
    for (int64_t x = 0; x < s.num_rows; ++x) store_row(task, x, s.out + x * a_.head_dim, s.total[x]);
  }

  void store_row(const Task& task, int64_t x, const float* out, float total) const {
    const int64_t token = task.first_token + x / group_, head = task.kv_head * group_ + x % group_;
    T* to = static_cast<T*>(a_.out_TNH) + (token * a_.num_heads + head) * a_.head_dim;
    const float factor = total == 0 ? 0 : 1 / total;  // a query that sees nothing
    for (int64_t h = 0; h < a_.head_dim; ++h) to[h] = from_float<T>(out[h] * factor);
  }

  // Keeps what a part found; the last one to come puts the parts together.
  void leave(const Task& task, const Scratch& s) {
    Split& split = *splits_[task.split];
    const int64_t width = a_.head_dim + 2;
    for (int64_t x = 0; x < s.num_rows; ++x) {
      float* to = split.left.data() + (task.part * s.num_rows + x) * width;
      std::copy_n(s.out + x * a_.head_dim, a_.head_dim, to);
      to[a_.head_dim] = s.top[x];
      to[a_.head_dim + 1] = s.total[x];
    }
    if (split.waiting.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (int64_t x = 0; x < s.num_rows; ++x) {
      auto left = [&](int64_t part) { return split.left.data() + (part * s.num_rows + x) * width; };
      float top = kNothing, total = 0;
      for (int64_t part = 0; part < task.num_parts; ++part) top = std::max(top, left(part)[a_.head_dim]);
      float* out = s.out + x * a_.head_dim;
      std::fill(out, out + a_.head_dim, 0.0f);
      for (int64_t part = 0; part < task.num_parts; ++part) {
        const float* from = left(part);
        if (from[a_.head_dim + 1] == 0) continue;  // it saw nothing
        const float shrink = std::exp2(from[a_.head_dim] - top);
        total += from[a_.head_dim + 1] * shrink;
        for (int64_t h = 0; h < a_.head_dim; ++h) out[h] += from[h] * shrink;
      }
      store_row(task, x, out, total);
    }
  }

  const Attention& a_;
  const Columns columns_;
  const Functions functions_;
  const Threads& threads_;
  int64_t group_, max_rows_;
  std::vector<Task> tasks_;
  std::vector<std::unique_ptr<Split>> splits_;
  std::vector<std::pair<int64_t, int64_t>> to_write_;  // tokens, before anybody attends
};

}  // namespace

void write_and_attend(const Attention& a, Isa isa, const Threads& threads) {
  if (a.element == Element::kFloat32) {
    Step<float>(a, isa, threads).run();
  } else {
    Step<Bf16>(a, isa, threads).run();
  }
}

}  // namespace quire
