// Vectors that the compiler turns into those of each instruction set: what is written with them is compiled once for each
// set, by giving the outermost function one of the attributes at the end.
#pragma once

#include <cstdint>
#include <cstring>

#include "bf16.h"
#include "machine.h"

#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

// 16 floats: one register with AVX512, two with AVX2, four elsewhere.
constexpr int64_t kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

QUIRE_INLINE Floats as_floats(Words bits) {
  Floats out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

QUIRE_INLINE Words as_words(Floats x) {
  Words out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

// The first n of 16, zeros behind.
template <class T>
QUIRE_INLINE Floats load(const T* from, int64_t n) {
  if constexpr (sizeof(T) == 4) {
    Floats out = {};
    n == kLanes ? std::memcpy(&out, from, sizeof out) : std::memcpy(&out, from, n * sizeof(T));
    return out;
  } else {
    Halves halves = {};
    n == kLanes ? std::memcpy(&halves, from, sizeof halves) : std::memcpy(&halves, from, n * sizeof(T));
    return as_floats(__builtin_convertvector(halves, Words) << 16);
  }
}

QUIRE_INLINE Words rounded(Floats x) {
  const Words bits = as_words(x);
  const Words nearest = bits + (0x7fff + (bits >> 16 & 1));
  return (x == x ? nearest : (bits | 0x400000)) >> 16;
}

template <class T>
QUIRE_INLINE void store(T* to, Floats x, int64_t n) {
  if constexpr (sizeof(T) == 4) {
    n == kLanes ? std::memcpy(to, &x, sizeof x) : std::memcpy(to, &x, n * sizeof(T));
  } else {
    const Halves halves = __builtin_convertvector(rounded(x), Halves);
    n == kLanes ? std::memcpy(to, &halves, sizeof halves) : std::memcpy(to, &halves, n * sizeof(T));
  }
}

// What x is once it has been stored.
template <class T>
QUIRE_INLINE Floats as_stored(Floats x) {
  if constexpr (sizeof(T) == 4) return x;
  return as_floats(rounded(x) << 16);
}

template <class Step>
QUIRE_INLINE void sweep(int64_t width, Step step) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) step(i, kLanes);
  if (i < width) step(i, width - i);
}

// 2^x to 1e-7 for x of at most 126 in magnitude.
QUIRE_INLINE Floats exp2(Floats x) {
  const Floats magic = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats whole = (x + magic) - magic, part = x - whole;
  Floats y = part * 1.5403530e-4f + 1.3333558e-3f;
  y = y * part + 9.6181291e-3f;
  y = y * part + 5.5504109e-2f;
  y = y * part + 2.4022651e-1f;
  y = y * part + 6.9314718e-1f;
  y = y * part + 1.0f;
  const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
  Floats factor;
  std::memcpy(&factor, &power, sizeof factor);
  return y * factor;
}

}  // namespace quire

// Everything called is inlined, so that all of it is compiled for the set.
#define QUIRE_PLAIN __attribute__((flatten))
#if QUIRE_X86
#define QUIRE_AVX2 __attribute__((target("avx2,fma"), flatten))
#define QUIRE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"), flatten))
#endif
