#include "pointwise.h"

#include <algorithm>
#include <cstring>

#include "vector.h"

namespace quire {
namespace {

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
  sweep(args.width,
        [&](int64_t i, int64_t n) { store(out + i, silu(load(gate + i, n)) * load(gate + args.width + i, n), n); });
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

#define QUIRE_ROWS(attributes, name)                                                               \
  template <class Args, void (*kFloat)(const Args&, int64_t), void (*kBf16)(const Args&, int64_t)> \
  attributes void name(const Args& args, int64_t begin, int64_t end) {                             \
    for (int64_t row = begin; row < end; ++row) args.bf16 ? kBf16(args, row) : kFloat(args, row);  \
  }

#if QUIRE_X86
QUIRE_ROWS(QUIRE_AVX2, avx2_rows)
QUIRE_ROWS(QUIRE_AVX512, avx512_rows)
#endif
QUIRE_ROWS(QUIRE_PLAIN, plain_rows)

// A thread is worth waking for this many values.
constexpr int64_t kValuesAtOnce = 16 << 10;

template <class Args, void (*kFloat)(const Args&, int64_t), void (*kBf16)(const Args&, int64_t)>
void run(Isa isa, const Args& args, int64_t rows, int64_t values_a_row, const Threads& threads) {
  auto run_rows = plain_rows<Args, kFloat, kBf16>;
#if QUIRE_X86
  if (isa == Isa::kAvx2) run_rows = avx2_rows<Args, kFloat, kBf16>;
  if (isa >= Isa::kAvx512) run_rows = avx512_rows<Args, kFloat, kBf16>;
#else
  (void)isa;
#endif
  const int64_t at_once = std::max<int64_t>(1, kValuesAtOnce / values_a_row);
  const int64_t num_tasks = (rows + at_once - 1) / at_once;
  if (num_tasks < 2) return run_rows(args, 0, rows);
  threads.run(num_tasks, [&](int64_t task) { run_rows(args, task * at_once, std::min(rows, (task + 1) * at_once)); });
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
