#include "attention_parts.h"

#include "attention_tile.h"
#include "vector.h"

namespace quire {
namespace {

// 2^(top - highest), and something finite where there is no top.
QUIRE_INLINE Floats what_is_left(Floats top, Floats highest) {
  const Floats power = top - highest, least = Floats{} - 126.0f;
  return exp2(power > least ? power : least);
}

QUIRE_INLINE void add_rows(const Found& to, const Found& part, int64_t num_rows, int64_t head_dim) {
  sweep(num_rows, [&](int64_t x, int64_t n) {
    const Floats top = load(to.top + x, n), other = load(part.top + x, n), highest = top > other ? top : other;
    const Floats left = what_is_left(top, highest), other_left = what_is_left(other, highest);
    store(to.top + x, highest, n);
    store(to.total + x, load(to.total + x, n) * left + load(part.total + x, n) * other_left, n);
    for (int64_t i = 0; i < n; ++i) {
      float* out = to.out + (x + i) * head_dim;
      const float* added = part.out + (x + i) * head_dim;
      if (other[i] == kNothing) continue;  // it saw nothing there: its zeros may have met what is not a number
      if (top[i] == kNothing) {
        std::memcpy(out, added, head_dim * sizeof(float));
        continue;
      }
      sweep(head_dim, [&](int64_t h, int64_t m) {
        store(out + h, load(out + h, m) * left[i] + load(added + h, m) * other_left[i], m);
      });
    }
  });
}

template <class T>
QUIRE_INLINE void store_row(void* to, const float* from, float factor, int64_t head_dim) {
  sweep(head_dim, [&](int64_t h, int64_t n) { store(static_cast<T*>(to) + h, load(from + h, n) * factor, n); });
}

#define QUIRE_PARTS(attributes, name)                                                                  \
  attributes void add_##name(const Found& to, const Found& part, int64_t num_rows, int64_t head_dim) { \
    add_rows(to, part, num_rows, head_dim);                                                            \
  }                                                                                                    \
  template <class T>                                                                                   \
  attributes void store_##name(void* to, const float* from, float factor, int64_t head_dim) {          \
    store_row<T>(to, from, factor, head_dim);                                                          \
  }                                                                                                    \
  constexpr PartFunctions kParts_##name[] = {{add_##name, store_##name<float>}, {add_##name, store_##name<Bf16>}};

QUIRE_PARTS(QUIRE_PLAIN, plain)
#if QUIRE_X86
QUIRE_PARTS(QUIRE_AVX2, avx2)
QUIRE_PARTS(QUIRE_AVX512, avx512)
#endif

}  // namespace

PartFunctions part_functions(Isa isa, Element element) {
  const bool narrow = element == Element::kBfloat16;
#if QUIRE_X86
  if (isa >= Isa::kAvx512) return kParts_avx512[narrow];
  if (isa == Isa::kAvx2) return kParts_avx2[narrow];
#else
  (void)isa;
#endif
  return kParts_plain[narrow];
}

}  // namespace quire
