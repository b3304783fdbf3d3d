// Activations to int8. Compiled without contracting a product and a sum into one operation: what is rounded must be the
// product, as in plain JAX.
#include <algorithm>
#include <cstring>

#include "bf16.h"
#include "blocked.h"
#include "linear.h"
#include "vector.h"

namespace quire {
namespace {

constexpr float kSmallest = 1e-20f;  // so that a row of zeros has a scale, too

QUIRE_INLINE float from_bits(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

QUIRE_INLINE int32_t to_bits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// One term of a row: value(i) by the largest magnitude of them; returns the scale. Written for the compiler to vectorise:
// magnitudes compare as whole numbers, among which a NaN is the largest and so stays loud, and adding 1.5 * 2^23 rounds
// to nearest even.
template <typename ValueAt>
QUIRE_INLINE float quantize_term(ValueAt value, int64_t inner, int64_t padded, int8_t* out) {
  int32_t largest_bits = 0;
  for (int64_t i = 0; i < inner; ++i) largest_bits = std::max(largest_bits, to_bits(value(i)) & 0x7fffffff);
  float largest = from_bits(largest_bits);
  if (largest < kSmallest) largest = kSmallest;
  const float inverse = 127.0f / largest;
  constexpr float kRounder = 12582912.0f;
  constexpr int32_t kRounderBits = 0x4b400000;
  for (int64_t i = 0; i < inner; ++i) {
    out[i] = static_cast<int8_t>(to_bits(value(i) * inverse + kRounder) - kRounderBits);
  }
  std::memset(out + inner, 0, padded - inner);
  return largest * (1.0f / 127.0f);
}

template <typename Value>
QUIRE_INLINE void quantize_row(const Value* x, const Activations& a, int64_t row) {
  int8_t* first = a.out + row * kTerms * a.padded;
  float* scale = a.scale + row * kTerms;
  scale[0] = quantize_term([&](int64_t i) { return to_float(x[i]); }, a.inner, a.padded, first);
  const float first_scale = scale[0];
  const auto left = [&](int64_t i) { return to_float(x[i]) - static_cast<float>(first[i]) * first_scale; };
  scale[1] = quantize_term(left, a.inner, a.padded, first + a.padded);
}

QUIRE_INLINE void quantize_rows(const Activations& a, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) {
    if (a.float32) {
      quantize_row(static_cast<const float*>(a.x) + row * a.inner, a, row);
    } else {
      quantize_row(static_cast<const Bf16*>(a.x) + row * a.inner, a, row);
    }
  }
}

void plain_quantize(const Activations& a, int64_t first, int64_t end) { quantize_rows(a, first, end); }
#if QUIRE_X86
__attribute__((target("avx2"))) void avx2_quantize(const Activations& a, int64_t first, int64_t end) {
  quantize_rows(a, first, end);
}
__attribute__((target("avx512f,avx512bw,avx512vl"))) void avx512_quantize(const Activations& a, int64_t first,
                                                                          int64_t end) {
  quantize_rows(a, first, end);
}
#endif

// The values of one block of one row, the scale, and sums of the values times the scale.
template <typename Value>
QUIRE_INLINE void quantize_block(const Value* x, int64_t length, ActivationBlock& to, int64_t row) {
  float values[kBlock] = {};
  for (int64_t i = 0; i < length; ++i) values[i] = to_float(x[i]);
  int8_t* out = to.values[row];
  const float scale = quantize_term([&](int64_t i) { return values[i]; }, kBlock, kBlock, out);
  int32_t low = 0, high = 0;
  for (int64_t i = 0; i < kBlock / 2; ++i) {
    low += out[i];
    high += out[i + kBlock / 2];
  }
  to.scale[row] = scale;
  to.sum[row] = static_cast<float>(low + high) * scale;
  to.low_sum[row] = static_cast<float>(low) * scale;
  to.high_sum[row] = static_cast<float>(high) * scale;
}

template <typename Value>
QUIRE_INLINE void quantize_blocks(const Value* x, int64_t rows, int64_t inner, ActivationBlock* blocks) {
  const int64_t whole = inner / kBlock;
  for (int64_t row = 0; row < rows; ++row, x += inner) {
    for (int64_t i = 0; i < whole; ++i) quantize_block(x + i * kBlock, kBlock, blocks[i], row);
    if (whole * kBlock < inner) quantize_block(x + whole * kBlock, inner - whole * kBlock, blocks[whole], row);
  }
}

QUIRE_INLINE void quantize_rows_of_tile(const void* x, bool float32, int64_t rows, int64_t inner,
                                        ActivationBlock* blocks) {
  if (float32) {
    quantize_blocks(static_cast<const float*>(x), rows, inner, blocks);
  } else {
    quantize_blocks(static_cast<const Bf16*>(x), rows, inner, blocks);
  }
}

void plain_tile(const void* x, bool float32, int64_t rows, int64_t inner, ActivationBlock* blocks) {
  quantize_rows_of_tile(x, float32, rows, inner, blocks);
}
#if QUIRE_X86
__attribute__((target("avx2"))) void avx2_tile(const void* x, bool float32, int64_t rows, int64_t inner,
                                               ActivationBlock* blocks) {
  quantize_rows_of_tile(x, float32, rows, inner, blocks);
}
__attribute__((target("avx512f,avx512bw,avx512vl"))) void avx512_tile(const void* x, bool float32, int64_t rows,
                                                                      int64_t inner, ActivationBlock* blocks) {
  quantize_rows_of_tile(x, float32, rows, inner, blocks);
}
#endif

}  // namespace

void quantize_tile(Isa isa, const void* x, bool float32, int64_t rows, int64_t inner, ActivationBlock* blocks) {
#if QUIRE_X86
  if (isa >= Isa::kAvx512) return avx512_tile(x, float32, rows, inner, blocks);
  if (isa >= Isa::kAvx2) return avx2_tile(x, float32, rows, inner, blocks);
#endif
  (void)isa;
  plain_tile(x, float32, rows, inner, blocks);
}

void quantize(Isa isa, const Activations& activations, int64_t first_row, int64_t end_row) {
#if QUIRE_X86
  if (isa >= Isa::kAvx512) return avx512_quantize(activations, first_row, end_row);
  if (isa >= Isa::kAvx2) return avx2_quantize(activations, first_row, end_row);
#endif
  (void)isa;
  plain_quantize(activations, first_row, end_row);
}

}  // namespace quire
