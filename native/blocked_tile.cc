// The arithmetic of blocked_tile.inc for each instruction set.
#include <cstring>

#include "blocked.h"
#include "vector.h"

#if QUIRE_X86
#include <immintrin.h>
#endif

namespace quire {
namespace {

inline int32_t four_bytes(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof(four));
  return four;
}

namespace plain {

#define TARGET
#if QUIRE_X86
// SSE2 multiplies int32 in many instructions. Unrolled, these loops take 13 s longer to compile and are not faster: with one
// or two rows they are a quarter to a half slower.
#define LINES_LOOP _Pragma("GCC unroll 1")
#else
#define LINES_LOOP
#endif
using F = Floats;
using I = Words;
constexpr int64_t kWidth = 16;

constexpr uint32_t in_each_byte(uint32_t byte) { return byte * 0x01010101u; }

template <uint32_t kByte>
inline I and_bytes(I x) {
  return x & in_each_byte(kByte);
}
inline I or_bytes(I x, I y) { return x | y; }
template <int kBits>
inline I shift_right(I x) {
  return x >> kBits;
}
template <int kBits>
inline I shift_left(I x) {
  return x << kBits;
}
inline I load_bytes(const uint8_t* from) {
  I line;
  std::memcpy(&line, from, sizeof(line));
  return line;
}
inline I zeros() { return I{}; }
template <bool kWide>
inline I dot(I sum, I line, const int8_t* x) {
  for (int i = 0; i < 4; ++i) sum += (line >> 8 * i & 255u) * static_cast<uint32_t>(static_cast<int32_t>(x[i]));
  return sum;
}
inline F to_floats(I x) { return __builtin_convertvector(reinterpret_cast<Ints>(x), Floats); }
inline F set1(float x) { return F{} + x; }
inline F mul(F x, F y) { return x * y; }
inline F fma(F x, F y, F z) { return x * y + z; }
// The smallest have no exponent. As float32 their bits would be those of numbers that XLA's threads take for zero.
inline F load_halves(const uint8_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  const Words words = __builtin_convertvector(halves, Words), exponent = words >> 10 & 31u;
  const F small = __builtin_convertvector(reinterpret_cast<Ints>(words & 0x3ffu), Floats) * 0x1p-24f;
  const Words shifted =
      ((words & 0x7fffu) << 13) + (reinterpret_cast<Words>(exponent == 31u) & (112u << 23)) + (112u << 23);
  return as_floats((exponent == 0u ? as_words(small) : shifted) | (words & 0x8000u) << 16);
}
inline F load_unsigned(const uint8_t* from) {
  F out;
  for (int i = 0; i < 16; ++i) out[i] = from[i];
  return out;
}
inline F load_signed(const uint8_t* from) {
  F out;
  for (int i = 0; i < 16; ++i) out[i] = static_cast<int8_t>(from[i]);
  return out;
}
inline void store(float* to, F x) { std::memcpy(to, &x, sizeof(x)); }

#include "blocked_tile.inc"
#undef LINES_LOOP
#undef TARGET

}  // namespace plain

#if QUIRE_X86

#define LINES_LOOP

namespace avx2 {

#define TARGET __attribute__((target("avx2,fma,f16c")))
using F = __m256;
using I = __m256i;
constexpr int64_t kWidth = 8;

template <uint32_t kByte>
TARGET inline I and_bytes(I x) {
  return _mm256_and_si256(x, _mm256_set1_epi8(kByte));
}
TARGET inline I or_bytes(I x, I y) { return _mm256_or_si256(x, y); }
template <int kBits>
TARGET inline I shift_right(I x) {
  return _mm256_srli_epi16(x, kBits);
}
template <int kBits>
TARGET inline I shift_left(I x) {
  return _mm256_slli_epi16(x, kBits);
}
TARGET inline I load_bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const I*>(from)); }
TARGET inline I zeros() { return _mm256_setzero_si256(); }
// Pairs of products of bytes are added in 16 bits, which pairs of 63 * 127 fit and those of 255 * 127 do not.
template <bool kWide>
TARGET inline I dot(I sum, I line, const int8_t* four) {
  const I x = _mm256_set1_epi32(four_bytes(four));
  if constexpr (kWide) {
    const I even = _mm256_madd_epi16(_mm256_and_si256(line, _mm256_set1_epi16(255)),
                                     _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const I odd = _mm256_madd_epi16(_mm256_srli_epi16(line, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
  } else {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(line, x), _mm256_set1_epi16(1)));
  }
}
TARGET inline F to_floats(I x) { return _mm256_cvtepi32_ps(x); }
TARGET inline F set1(float x) { return _mm256_set1_ps(x); }
TARGET inline F mul(F x, F y) { return _mm256_mul_ps(x, y); }
TARGET inline F fma(F x, F y, F z) { return _mm256_fmadd_ps(x, y, z); }
TARGET inline F load_halves(const uint8_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
TARGET inline F load_unsigned(const uint8_t* from) {
  return to_floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
TARGET inline F load_signed(const uint8_t* from) {
  return to_floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
TARGET inline void store(float* to, F x) { _mm256_storeu_ps(to, x); }

#include "blocked_tile.inc"
#undef TARGET

}  // namespace avx2

namespace avx512_vnni {

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
using F = __m512;
using I = __m512i;
constexpr int64_t kWidth = 16;

template <uint32_t kByte>
TARGET inline I and_bytes(I x) {
  return _mm512_and_si512(x, _mm512_set1_epi8(kByte));
}
TARGET inline I or_bytes(I x, I y) { return _mm512_or_si512(x, y); }
template <int kBits>
TARGET inline I shift_right(I x) {
  return _mm512_srli_epi16(x, kBits);
}
template <int kBits>
TARGET inline I shift_left(I x) {
  return _mm512_slli_epi16(x, kBits);
}
TARGET inline I load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
TARGET inline I zeros() { return _mm512_setzero_si512(); }
template <bool kWide>
TARGET inline I dot(I sum, I line, const int8_t* four) {
  // By name: for the intrinsic gcc 12 moves sums about, and reads x by an instruction of its own.
  typedef int32_t Four __attribute__((may_alias, aligned(1)));
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(line), "m"(*reinterpret_cast<const Four*>(four)));
  return sum;
}
TARGET inline F to_floats(I x) { return _mm512_cvtepi32_ps(x); }
TARGET inline F set1(float x) { return _mm512_set1_ps(x); }
TARGET inline F mul(F x, F y) { return _mm512_mul_ps(x, y); }
TARGET inline F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
TARGET inline F load_halves(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
TARGET inline F load_unsigned(const uint8_t* from) {
  return to_floats(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
TARGET inline F load_signed(const uint8_t* from) {
  return to_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
TARGET inline void store(float* to, F x) { _mm512_storeu_ps(to, x); }

#include "blocked_tile.inc"
#undef TARGET

}  // namespace avx512_vnni

#undef LINES_LOOP

#endif

}  // namespace

RunBlockedTile blocked_tile(Isa isa, Format format, int log2_rows) {
#if QUIRE_X86
  if (isa >= Isa::kAvx512Vnni) return avx512_vnni::tile_of(format, log2_rows);
  if (isa >= Isa::kAvx2) return avx2::tile_of(format, log2_rows);
#endif
  (void)isa;
  return plain::tile_of(format, log2_rows);
}

}  // namespace quire
