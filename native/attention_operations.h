// The vector operations that attention_vector.inc is written in, for AVX2 and for AVX512.
#pragma once

#include "machine.h"

#if QUIRE_X86

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "bf16.h"

namespace quire {
namespace {

namespace avx2_operations {
#define TARGET __attribute__((target("avx2,fma")))

using F = __m256;
using U = __m256i;
constexpr int kLanes = 8;
// Rows that go through together by vectors of each, as many sums as sixteen registers hold: scores are kRows by kKeys, output
// kManyRows by kManySums as long as there are so many rows, and then up to 4 by kSums.
constexpr int kRows = 4, kKeys = 1, kManyRows = 4, kManySums = 2, kSums = 2;
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
// sum + a b. By name: for the intrinsic gcc 12 moves many sums to other registers, and to memory.
TARGET inline void add_product(F& sum, F a, F b) { __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
TARGET inline F low(U x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
TARGET inline F high(U x) { return _mm256_castsi256_ps(_mm256_and_si256(x, set1_pair(0xffff0000u))); }
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

#undef TARGET
}  // namespace avx2_operations

namespace avx512_operations {
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))

using F = __m512;
using U = __m512i;
constexpr int kLanes = 16;
constexpr int kRows = 6, kKeys = 2, kManyRows = 12, kManySums = 2, kSums = 4;

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
TARGET inline void add_product(F& sum, F a, F b) { __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
TARGET inline F low(U x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
TARGET inline F high(U x) { return _mm512_castsi512_ps(_mm512_and_si512(x, set1_pair(0xffff0000u))); }
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

#undef TARGET
}  // namespace avx512_operations

}  // namespace
}  // namespace quire

#endif  // QUIRE_X86
