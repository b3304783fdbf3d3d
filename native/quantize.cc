// Activations to int8. Compiled without contracting a product and a sum into one operation: what is rounded must be the
// product, as in plain JAX.
#include <algorithm>
#include <cstring>

#include "linear.h"

#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {
namespace {

constexpr float kSmallest = 1e-20f;  // so that a row of zeros has a scale, too

// A row of x as int8, padded with zeros; returns its scale. Written for the compiler to vectorise: magnitudes compare as
// whole numbers, among which a NaN is the largest and so stays loud, and adding 1.5 * 2^23 rounds to nearest even.
template <typename Value>
QUIRE_INLINE float quantize_row(const Value* x, int64_t inner, int64_t padded, int8_t* out) {
  const auto float_bits = [](Value value) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + sizeof(bits) - sizeof(value), &value, sizeof(value));
    return bits;
  };
  int32_t largest_bits = 0;
  for (int64_t i = 0; i < inner; ++i) {
    largest_bits = std::max(largest_bits, static_cast<int32_t>(float_bits(x[i]) & 0x7fffffff));
  }
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof(largest));
  if (largest < kSmallest) largest = kSmallest;
  const float inverse = 127.0f / largest;
  constexpr float kRounder = 12582912.0f;
  constexpr int32_t kRounderBits = 0x4b400000;
  for (int64_t i = 0; i < inner; ++i) {
    const uint32_t bits = float_bits(x[i]);
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    const float shifted = value * inverse + kRounder;
    int32_t rounded;
    std::memcpy(&rounded, &shifted, sizeof(rounded));
    out[i] = static_cast<int8_t>(rounded - kRounderBits);
  }
  std::memset(out + inner, 0, padded - inner);
  return largest * (1.0f / 127.0f);
}

QUIRE_INLINE void quantize_rows(const Activations& a, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) {
    int8_t* out = a.out + row * a.padded;
    a.scale[row] = a.float32
                       ? quantize_row(static_cast<const float*>(a.x) + row * a.inner, a.inner, a.padded, out)
                       : quantize_row(static_cast<const uint16_t*>(a.x) + row * a.inner, a.inner, a.padded, out);
  }
}

void plain_quantize(const Activations& a, int64_t first, int64_t end) { quantize_rows(a, first, end); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) void avx2_quantize(const Activations& a, int64_t first, int64_t end) {
  quantize_rows(a, first, end);
}
__attribute__((target("avx512f,avx512bw,avx512vl"))) void avx512_quantize(const Activations& a, int64_t first,
                                                                          int64_t end) {
  quantize_rows(a, first, end);
}
#endif

}  // namespace

void quantize(Isa isa, const Activations& activations, int64_t first_row, int64_t end_row) {
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) return avx512_quantize(activations, first_row, end_row);
  if (isa >= Isa::kAvx2) return avx2_quantize(activations, first_row, end_row);
#endif
  (void)isa;
  plain_quantize(activations, first_row, end_row);
}

}  // namespace quire
