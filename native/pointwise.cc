#include "pointwise.h"

#include <algorithm>
#include <cstring>

#include "bf16.h"

#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {
namespace {

// 16 floats as the compiler's own vectors: one register with AVX512, two with AVX2, four elsewhere. The code below is
// compiled once for each.
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

QUIRE_INLINE Floats silu(Floats x) {
  const Floats power = x * -1.44269504088896340736f, most = Floats{} + 126.0f;
  const Floats inside = power > most ? most : power < -most ? -most : power;
  const Floats out = x / (exp2(inside) + 1.0f);
  return power > most ? x * 0.0f : out;  // minus infinity is NaN, as in JAX
}

template <class T>
QUIRE_INLINE void add_norm_row(const AddNorm& args, int64_t row) {
  const int64_t width = args.width;
  const T* x = static_cast<const T*>(args.x) + row * width;
  const T* delta = static_cast<const T*>(args.delta) + row * width;
  const T* weight = static_cast<const T*>(args.weight);
  T* sum = static_cast<T*>(args.sum) + row * width;
  T* normed = static_cast<T*>(args.normed) + row * width;
  Floats squares = {};
  sweep(width, [&](int64_t i, int64_t n) {
    const Floats both = as_stored<T>(load(x + i, n) + load(delta + i, n));
    store(sum + i, both, n);
    squares += both * both;
  });
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += squares[i];
  const float scale = 1 / std::sqrt(total / static_cast<float>(width) + args.eps);
  sweep(width, [&](int64_t i, int64_t n) {
    store(normed + i, as_stored<T>(load(sum + i, n) * scale) * load(weight + i, n), n);
  });
}

template <class T>
QUIRE_INLINE void gate_row(const Gate& args, int64_t row) {
  const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.width;
  T* out = static_cast<T*>(args.out) + row * args.width;
  sweep(args.width, [&](int64_t i, int64_t n) {
    store(out + i, silu(load(gate + i, n)) * load(gate + args.width + i, n), n);
  });
}

template <class T>
QUIRE_INLINE void rotate_row(const Rotate& args, int64_t token) {
  const int64_t head_dim = args.head_dim, half = head_dim / 2;
  const float *cos = args.cos + token * half, *sin = args.sin + token * half;
  const auto turn = [&](const T* from, T* to) {
    sweep(half, [&](int64_t i, int64_t n) {
      const Floats c = load(cos + i, n), s = load(sin + i, n);
      const Floats first = load(from + i, n), second = load(from + half + i, n);
      store(to + i, first * c - second * s, n);
      store(to + half + i, second * c + first * s, n);
    });
  };
  for (int64_t kv_head = 0; kv_head < args.kv_heads; ++kv_head) {
    const int64_t index = token * args.kv_heads + kv_head;
    const T* from = static_cast<const T*>(args.qkv) + index * (args.group + 2) * head_dim;
    T* q = static_cast<T*>(args.q) + index * args.group * head_dim;
    for (int64_t i = 0; i < args.group; ++i) turn(from + i * head_dim, q + i * head_dim);
    turn(from + args.group * head_dim, static_cast<T*>(args.k) + index * head_dim);
    std::memcpy(static_cast<T*>(args.v) + index * head_dim, from + (args.group + 1) * head_dim, head_dim * sizeof(T));
  }
}

// -- the same for each instruction set ------------------------------------------------------------------------------

#define QUIRE_ROWS(attributes, name)                                                          \
  template <class Args, void (*kFloat)(const Args&, int64_t), void (*kBf16)(const Args&, int64_t)> \
  attributes void name(const Args& args, int64_t begin, int64_t end) {                        \
    for (int64_t row = begin; row < end; ++row) args.bf16 ? kBf16(args, row) : kFloat(args, row); \
  }

#if defined(__x86_64__)
#define QUIRE_AVX2 __attribute__((target("avx2,fma"), flatten))
#define QUIRE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"), flatten))
QUIRE_ROWS(QUIRE_AVX2, avx2_rows)
QUIRE_ROWS(QUIRE_AVX512, avx512_rows)
#endif
QUIRE_ROWS(__attribute__((flatten)), plain_rows)

// A thread is worth waking for this many values.
constexpr int64_t kValuesAtOnce = 16 << 10;

template <class Args, void (*kFloat)(const Args&, int64_t), void (*kBf16)(const Args&, int64_t)>
void run(Isa isa, const Args& args, int64_t rows, int64_t values_a_row, const Threads& threads) {
  auto run_rows = plain_rows<Args, kFloat, kBf16>;
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) run_rows = avx2_rows<Args, kFloat, kBf16>;
  if (isa >= Isa::kAvx512) run_rows = avx512_rows<Args, kFloat, kBf16>;
#else
  (void)isa;
#endif
  const int64_t at_once = std::max<int64_t>(1, kValuesAtOnce / values_a_row);
  const int64_t num_tasks = (rows + at_once - 1) / at_once;
  if (num_tasks < 2) return run_rows(args, 0, rows);
  threads.run(num_tasks, [&](int64_t task) {
    run_rows(args, task * at_once, std::min(rows, (task + 1) * at_once));
  });
}

}  // namespace

void add_norm(Isa isa, const AddNorm& args, const Threads& threads) {
  run<AddNorm, add_norm_row<float>, add_norm_row<Bf16>>(isa, args, args.rows, args.width, threads);
}

void gate(Isa isa, const Gate& args, const Threads& threads) {
  run<Gate, gate_row<float>, gate_row<Bf16>>(isa, args, args.rows, args.width, threads);
}

void rotate(Isa isa, const Rotate& args, const Threads& threads) {
  const int64_t values = args.kv_heads * (args.group + 2) * args.head_dim;
  run<Rotate, rotate_row<float>, rotate_row<Bf16>>(isa, args, args.tokens, values, threads);
}

}  // namespace quire
