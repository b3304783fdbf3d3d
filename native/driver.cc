// The kernels without Python: random steps and matmuls in every instruction set, against loops in double precision.
// Every array is its own allocation of exactly its size, and what nobody owns is NaN, so that AddressSanitizer sees an access outside
// and the comparison sees one inside.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "attention.h"
#include "driver.h"
#include "linear.h"
#include "pointwise.h"

namespace {

using quire::Isa;
using namespace driver;

struct Step {
  quire::Attention a{};
  bool narrow;
  std::vector<int64_t> kv_lens, q_lens;

  int64_t pair() const { return narrow ? 2 : 1; }
  int64_t k_at(int64_t page, int64_t head, int64_t z, int64_t h) const {
    return (((page * a.num_kv_heads + head) * (a.head_dim / pair()) + h / pair()) * a.page_size + z) * pair() +
           h % pair();
  }
  int64_t v_at(int64_t page, int64_t head, int64_t z, int64_t h) const {
    const int64_t pairs = (a.page_size + pair() - 1) / pair();
    return (((page * a.num_kv_heads + head) * pairs + z / pair()) * a.head_dim + h) * pair() + z % pair();
  }
};

// One random step. Returns the largest error, relative to what rounding allows: above 1 is a failure.
double run(Isa isa, bool narrow) {
  Step step;
  step.narrow = narrow;
  quire::Attention& a = step.a;
  a.element = narrow ? quire::Element::kBfloat16 : quire::Element::kFloat32;
  a.page_size = pick_of<int64_t>({1, 2, 3, 5, 8, 15, 16, 16, 16, 17, 32, 100, 129, 144});
  a.head_dim = pick_of<int64_t>({8, 16, 24, 32, 40, 64, 64, 80, 128});
  a.num_kv_heads = pick(1, 3);
  a.num_heads = a.num_kv_heads * pick_of<int64_t>({1, 2, 3, 4, 7, 8, 16, 65});
  a.window = pick_of<int64_t>({0, 0, 1, 7, 100});
  a.scale = 1 / std::sqrt(static_cast<float>(a.head_dim));
  a.soft_cap = pick_of<float>({0, 0, 2});

  const bool decode = pick(0, 1) == 1;
  const int64_t rows = pick(1, 5), pad_rows = pick(0, 2), longest = pick_of<int64_t>({5, 40, 200, 1500});
  std::vector<int32_t> kv_lens, cu_q_lens = {0}, table, destinations, positions;
  int64_t used = 0;
  for (int64_t i = 0; i < rows; ++i) {
    kv_lens.push_back(static_cast<int32_t>(pick(1, longest)));
    const int64_t q_len = decode ? 1 : std::min<int64_t>(pick(1, 80), kv_lens.back());
    cu_q_lens.push_back(static_cast<int32_t>(cu_q_lens.back() + q_len));
    a.pages_per_row = std::max(a.pages_per_row, (kv_lens.back() + a.page_size - 1) / a.page_size);
    used += (kv_lens.back() + a.page_size - 1) / a.page_size;
  }
  a.pages_per_row += pick(0, 2);
  a.num_pages = used + pick(0, 3);
  a.num_rows = rows + pad_rows;
  std::vector<int32_t> pages(a.num_pages);
  for (int64_t i = 0; i < a.num_pages; ++i) pages[i] = static_cast<int32_t>(i);
  std::shuffle(pages.begin(), pages.end(), random_bits);
  table.assign(a.num_rows * a.pages_per_row, pick_of<int32_t>({0, -1, 1 << 30}));  // past kv_len it may be anything
  for (int64_t i = 0, next = 0; i < rows; ++i)
    for (int64_t p = 0; p * a.page_size < kv_lens[i]; ++p) table[i * a.pages_per_row + p] = pages[next++];
  for (int64_t i = 0; i < pad_rows; ++i) {
    kv_lens.push_back(0);
    cu_q_lens.push_back(cu_q_lens.back());
  }
  const int64_t num_tokens = cu_q_lens.back();
  a.num_tokens = num_tokens + pick(0, 3);

  Array q(narrow, a.num_tokens * a.num_heads * a.head_dim), out(narrow, q.size);
  Array k(narrow, a.num_tokens * a.num_kv_heads * a.head_dim), v(narrow, k.size);
  Array k_pages(narrow, a.num_pages * a.num_kv_heads * a.head_dim * a.page_size);
  const int64_t padded = (a.page_size + step.pair() - 1) / step.pair() * step.pair();
  Array v_pages(narrow, a.num_pages * a.num_kv_heads * a.head_dim * padded);
  for (Array* array : {&q, &k, &v}) array->fill_normal();
  const float poison = pick_of<float>({std::nanf(""), std::numeric_limits<float>::infinity()});
  for (Array* array : {&k_pages, &v_pages, &out}) array->fill(poison);

  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t q_len = cu_q_lens[i + 1] - cu_q_lens[i], old = kv_lens[i] - q_len;
    const int64_t before = a.window ? pick(0, 20) * a.page_size : 0;  // what a window has left behind
    for (int64_t position = 0; position < kv_lens[i]; ++position) {
      const int32_t page = table[i * a.pages_per_row + position / a.page_size];
      const int64_t z = position % a.page_size;
      if (position >= old) {
        destinations.push_back(static_cast<int32_t>(page * a.page_size + z));
        positions.push_back(static_cast<int32_t>(before + position));
        continue;
      }
      for (int64_t head = 0; head < a.num_kv_heads; ++head)
        for (int64_t h = 0; h < a.head_dim; ++h) {
          k_pages.set(step.k_at(page, head, z, h), normal(random_bits));
          v_pages.set(step.v_at(page, head, z, h), normal(random_bits));
        }
    }
  }
  while (static_cast<int64_t>(destinations.size()) < a.num_tokens)
    destinations.push_back(pick_of<int32_t>({static_cast<int32_t>(a.num_pages * a.page_size), -1, 1 << 30}));
  positions.resize(a.num_tokens);

  const Ints positions_T(positions), destinations_T(destinations), table_BP(table), kv_lens_B(kv_lens);
  const Ints cu_q_lens_B1(cu_q_lens);
  a.q_TNH = q.bytes.get();
  a.k_TKH = k.bytes.get();
  a.v_TKH = v.bytes.get();
  a.positions_T = positions_T.data.get();
  a.destinations_T = destinations_T.data.get();
  a.page_table_BP = table_BP.data.get();
  a.kv_lens_B = kv_lens_B.data.get();
  a.cu_q_lens_B1 = cu_q_lens_B1.data.get();
  std::vector<float> sinks(a.num_heads);
  for (float& sink : sinks) sink = pick_of<float>({-1000, -1, 0, 2, 5});
  a.sinks_N = pick(0, 1) ? sinks.data() : nullptr;
  a.k_pages = k_pages.bytes.get();
  a.v_pages = v_pages.bytes.get();
  a.out_TNH = out.bytes.get();
  quire::write_and_attend(a, isa, {pick_of<int64_t>({1, 3}), run_on_threads});

  double worst = 0;
  auto compare = [&](double got, double want) {
    const double allowed = narrow ? 1e-2 + 1e-2 * std::abs(want) : 1e-5 + 1e-5 * std::abs(want);
    const double error = std::abs(got - want) / allowed;
    worst = std::isnan(error) ? 1e9 : std::max(worst, error);
  };
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t stride = num_tokens * a.num_heads / 64;  // the loops below are slow: some heads of many
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t t = cu_q_lens[i]; t < cu_q_lens[i + 1]; ++t)
      for (int64_t n = pick(0, stride); n < a.num_heads; n += 1 + pick(0, stride)) {
        const int64_t position = kv_lens[i] - (cu_q_lens[i + 1] - t);
        const int64_t first = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
        std::vector<double> weights, want(a.head_dim, 0.0);
        double top = -INFINITY, total = 0;
        for (int64_t c = first; c <= position; ++c) {
          const int32_t page = table[i * a.pages_per_row + c / a.page_size];
          double score = 0;
          for (int64_t h = 0; h < a.head_dim; ++h)
            score += q.get((t * a.num_heads + n) * a.head_dim + h) *
                     k_pages.get(step.k_at(page, n / group, c % a.page_size, h));
          score *= a.scale;
          weights.push_back(a.soft_cap > 0 ? a.soft_cap * std::tanh(score / a.soft_cap) : score);
          top = std::max(top, weights.back());
        }
        if (a.sinks_N) total += std::exp(a.sinks_N[n] - top);
        for (int64_t c = first; c <= position; ++c) {
          const int32_t page = table[i * a.pages_per_row + c / a.page_size];
          const double weight = std::exp(weights[c - first] - top);
          total += weight;
          for (int64_t h = 0; h < a.head_dim; ++h)
            want[h] += weight * v_pages.get(step.v_at(page, n / group, c % a.page_size, h));
        }
        for (int64_t h = 0; h < a.head_dim; ++h)
          compare(out.get((t * a.num_heads + n) * a.head_dim + h), want[h] / total);
      }
  for (int64_t i = num_tokens * a.num_heads * a.head_dim; i < out.size; ++i) compare(out.get(i), 0);
  return worst;
}

// One matmul with packed weights, bfloat16 or int8; returns the worst error as a share of what is allowed.
double run_linear(Isa isa, bool int8) {
  const int64_t rows = pick_of({pick(1, 40), pick(1, 200)}), inner = pick(1, 150), columns = pick(1, 70);
  const int64_t itemsize = int8 ? 1 : 2;
  const bool transposed = pick(0, 1), wide = pick(0, 1);
  Array x(!(int8 && pick(0, 1)), rows * inner), weight(true, inner * columns), out(!wide, rows * columns);
  std::vector<int8_t> whole(inner * columns);
  std::vector<float> scale(columns);
  std::normal_distribution<float> normal;
  const int64_t used = pick_of({rows, pick(0, rows)});  // behind them padding
  for (int64_t i = 0; i < x.size; ++i) x.set(i, i < used * inner ? normal(random_bits) : 0.0f);
  for (int64_t i = 0; i < out.size; ++i) out.set(i, NAN);
  for (int64_t i = 0; i < weight.size; ++i) {
    weight.set(i, normal(random_bits));
    whole[i] = static_cast<int8_t>(pick(-127, 127));
  }
  for (float& s : scale) s = std::abs(normal(random_bits));
  std::unique_ptr<char[]> packed(
      new char[quire::num_panels(columns) * quire::num_lines(inner, itemsize) * quire::kLine]);
  const void* data = int8 ? static_cast<const void*>(whole.data()) : weight.bytes.get();
  const quire::Threads threads{3, run_on_threads};
  quire::pack({data, itemsize, inner, columns, transposed}, packed.get(), threads);
  const quire::Product product{rows, inner, columns, packed.get(), out.bytes.get(), wide};
  if (int8) {
    quire::linear_int8(isa, product, x.bytes.get(), !x.narrow, scale.data(), threads);
  } else {
    quire::linear_bf16(isa, product, reinterpret_cast<const uint16_t*>(x.bytes.get()), threads);
  }
  double worst = 0;
  for (int64_t row = 0; row < rows; ++row) {
    double largest = 0;
    for (int64_t k = 0; k < inner; ++k) largest = std::max(largest, std::abs(x.get(row * inner + k)));
    for (int64_t n = 0; n < columns; ++n) {
      double sum = 0, allowed = 1e-30;
      for (int64_t k = 0; k < inner; ++k) {
        const int64_t at = transposed ? n * inner + k : k * columns + n;
        const double w = int8 ? whole[at] : weight.get(at), term = x.get(row * inner + k) * w;
        sum += term;
        // Half a step of the second int8 number (the first leaves half a step of its own), or the rounding of float32.
        allowed += int8 ? std::abs(w) * largest / (127.0 * 127) * 0.26 + std::abs(term) * 2e-6 : std::abs(term) * 2e-6;
      }
      const double factor = int8 ? scale[n] : 1;
      allowed = allowed * factor + std::abs(out.get(row * columns + n)) * (wide ? 1e-6 : 0x1p-8);
      worst = worse(worst, std::abs(out.get(row * columns + n) - sum * factor) / allowed);
    }
  }
  return worst;
}

// The same groups by weights in 4 bits, against a matmul by the same weights expanded, which must be the same.
double run_mxfp4(Isa isa, bool narrow, const quire::Groups& groups, const Array& x, int64_t rows, int64_t inner,
                 int64_t columns) {
  const quire::Threads threads{3, run_on_threads};
  const int64_t itemsize = narrow ? 2 : 4, panels = quire::num_panels(columns);
  const int64_t blocks = quire::ceil_div(inner, quire::kMxfp4Block);
  std::vector<uint8_t> codes(groups.count * panels * blocks * quire::kMxfp4Codes * quire::kPanel);
  std::vector<uint8_t> scales(groups.count * panels * blocks * quire::kPanel);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(pick(0, 255));
  for (uint8_t& scale : scales) scale = static_cast<uint8_t>(pick(110, 130));
  Array weight(narrow, groups.count * inner * columns), out(narrow, rows * columns), want(narrow, rows * columns);
  for (int64_t g = 0; g < groups.count; ++g)
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t n = 0; n < columns; ++n) {
        const int64_t panel = g * panels + n / quire::kPanel, lane = n % quire::kPanel;
        const int byte = codes[(panel * blocks * quire::kMxfp4Codes + k / 2) * quire::kPanel + lane];
        const int bits = k % 2 ? byte >> 4 : byte & 15;
        const int scale = scales[(panel * blocks + k / quire::kMxfp4Block) * quire::kPanel + lane];
        constexpr float kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        weight.set((g * inner + k) * columns + n, std::ldexp((bits & 8 ? -1 : 1) * kMagnitudes[bits & 7], scale - 127));
      }
  const int64_t bytes = panels * quire::num_lines(inner, itemsize) * quire::kLine;
  std::unique_ptr<char[]> packed(new char[groups.count * bytes]);
  for (int64_t g = 0; g < groups.count; ++g)
    quire::pack({weight.bytes.get() + g * inner * columns * itemsize, itemsize, inner, columns, false},
                packed.get() + g * bytes, threads);
  quire::grouped_float(isa, {rows, inner, columns, packed.get(), want.bytes.get(), !narrow}, groups, x.bytes.get(),
                       !narrow, threads);
  quire::grouped_mxfp4(isa, {rows, inner, columns, nullptr, out.bytes.get(), !narrow}, groups, x.bytes.get(), !narrow,
                       {codes.data(), scales.data()}, threads);
  double worst = 0;
  for (int64_t i = 0; i < out.size; ++i) worst = worse(worst, out.get(i) == want.get(i) ? 0 : 2);
  return worst;
}

// A grouped matmul, each group against a loop; then in int8, each against a matmul of its own, which must be the same.
// What belongs to empty groups, and rows behind the last, are NaN.
double run_grouped(Isa isa, bool narrow) {
  const int64_t count = pick(1, 6), inner = pick(1, 100), columns = pick(1, 50), behind = pick(0, 3);
  std::vector<int32_t> counts(count);
  int64_t total = 0;
  for (int32_t& size : counts) total += size = static_cast<int32_t>(pick_of<int64_t>({0, 1, pick(0, 50)}));
  const Ints sizes(counts);
  const quire::Groups groups{count, sizes.data.get()};
  const quire::Threads threads{3, run_on_threads};
  const int64_t rows = total + behind, itemsize = narrow ? 2 : 4;
  Array x(narrow, rows * inner), weight(narrow, count * inner * columns), out(narrow, rows * columns);
  x.fill_normal();
  weight.fill_normal();
  out.fill(std::nanf(""));
  for (int64_t i = total * inner; i < x.size; ++i) x.set(i, std::nanf(""));
  std::vector<int8_t> whole(weight.size);
  for (int8_t& value : whole) value = static_cast<int8_t>(pick(-127, 127));
  std::vector<float> scale(count * columns);
  for (float& s : scale) s = std::abs(std::normal_distribution<float>()(random_bits));
  const auto panel_bytes = [&](int64_t size) {
    return quire::num_panels(columns) * quire::num_lines(inner, size) * quire::kLine;
  };
  std::unique_ptr<char[]> packed(new char[count * panel_bytes(itemsize)]), packed8(new char[count * panel_bytes(1)]);
  for (int64_t g = 0; g < count; ++g) {
    for (int64_t i = 0; counts[g] == 0 && i < inner * columns; ++i) weight.set(g * inner * columns + i, std::nanf(""));
    const char* from = weight.bytes.get() + g * inner * columns * itemsize;
    quire::pack({from, itemsize, inner, columns, false}, packed.get() + g * panel_bytes(itemsize), threads);
    quire::pack({whole.data() + g * inner * columns, 1, inner, columns, false}, packed8.get() + g * panel_bytes(1),
                threads);
  }
  const quire::Product product{rows, inner, columns, packed.get(), out.bytes.get(), !narrow};
  quire::grouped_float(isa, product, groups, x.bytes.get(), !narrow, threads);
  double worst = 0;
  for (int64_t g = 0, row = 0; g < count; ++g) {
    for (const int64_t end = row + counts[g]; row < end; ++row) {
      for (int64_t n = 0; n < columns; ++n) {
        double sum = 0, allowed = 1e-30;
        for (int64_t k = 0; k < inner; ++k) {
          const double term = x.get(row * inner + k) * weight.get((g * inner + k) * columns + n);
          sum += term;
          allowed += std::abs(term) * 2e-6;
        }
        const double got = out.get(row * columns + n);
        worst = worse(worst, std::abs(got - sum) / (allowed + std::abs(got) * (narrow ? 0x1p-8 : 1e-6)));
      }
    }
  }
  for (int64_t i = total * columns; i < out.size; ++i) worst = worse(worst, std::abs(out.get(i)));

  Array out8(false, rows * columns), alone(false, rows * columns);
  quire::Product product8{rows, inner, columns, packed8.get(), out8.bytes.get(), true};
  quire::grouped_int8(isa, product8, groups, x.bytes.get(), !narrow, scale.data(), threads);
  for (int64_t g = 0, row = 0; g < count; row += counts[g++]) {
    if (counts[g] == 0) continue;
    const quire::Product one{counts[g], inner, columns, packed8.get() + g * panel_bytes(1), alone.bytes.get(), true};
    quire::linear_int8(isa, one, x.bytes.get() + row * inner * itemsize, !narrow, scale.data() + g * columns, threads);
    for (int64_t i = 0; i < counts[g] * columns; ++i)
      worst = worse(worst, alone.get(i) == out8.get(row * columns + i) ? 0 : 2);
  }
  return worse(worst, run_mxfp4(isa, narrow, groups, x, rows, inner, columns));
}

// Every output against a loop in double precision; the worst error, where 1 is what is allowed.
double run_pointwise(Isa isa, bool narrow) {
  const quire::Threads threads{3, run_on_threads};
  const double allowed = narrow ? 0x1p-7 : 4e-6;
  double worst = 0;
  const auto compare = [&](double found, double expected) {
    worst = worse(worst, std::abs(found - expected) / (allowed * (std::abs(expected) + 1.0 / 8)));
  };
  const int64_t rows = pick(1, 200), width = pick(1, 300);
  Array x(narrow, rows * width), delta(narrow, rows * width), weight(narrow, width), sum(narrow, rows * width),
      normed(narrow, rows * width), gate_up(narrow, rows * 2 * width), gated(narrow, rows * width);
  for (Array* array : {&x, &delta, &weight, &gate_up}) array->fill_normal();
  quire::add_norm(isa,
                  {narrow, rows, width, 1e-5f, x.bytes.get(), delta.bytes.get(), weight.bytes.get(), sum.bytes.get(),
                   normed.bytes.get()},
                  threads);
  quire::gate(isa, {narrow, rows, width, gate_up.bytes.get(), gated.bytes.get()}, threads);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = row * width; i < (row + 1) * width; ++i) squares += sum.get(i) * sum.get(i);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
    for (int64_t i = 0; i < width; ++i) {
      const int64_t at = row * width + i;
      compare(sum.get(at), x.get(at) + delta.get(at));
      compare(normed.get(at), sum.get(at) * scale * weight.get(i));
      const double g = gate_up.get(row * 2 * width + i), up = gate_up.get((row * 2 + 1) * width + i);
      compare(gated.get(at), g / (1 + std::exp(-g)) * up);
    }
  }
  const int64_t kv_heads = pick(1, 3), group = pick(1, 4), half = pick(1, 40), head_dim = 2 * half;
  Array qkv(narrow, rows * kv_heads * (group + 2) * head_dim), q(narrow, rows * kv_heads * group * head_dim),
      k(narrow, rows * kv_heads * head_dim), v(narrow, rows * kv_heads * head_dim), cos(false, rows * half),
      sin(false, rows * half);
  for (Array* array : {&qkv, &cos, &sin}) array->fill_normal();
  quire::rotate(isa,
                {narrow, rows, kv_heads, group, head_dim, qkv.bytes.get(),
                 reinterpret_cast<const float*>(cos.bytes.get()), reinterpret_cast<const float*>(sin.bytes.get()),
                 q.bytes.get(), k.bytes.get(), v.bytes.get()},
                threads);
  for (int64_t i = 0; i < rows * kv_heads; ++i) {
    for (int64_t head = 0; head < group + 2; ++head) {
      const Array& out = head < group ? q : head == group ? k : v;
      const int64_t from = (i * (group + 2) + head) * head_dim;
      const int64_t to = (head < group ? i * group + head : i) * head_dim;
      for (int64_t h = 0; h < half; ++h) {
        const double first = qkv.get(from + h), second = qkv.get(from + half + h);
        const bool turned = head <= group;
        const double c = turned ? cos.get(i / kv_heads * half + h) : 1,
                     s = turned ? sin.get(i / kv_heads * half + h) : 0;
        compare(out.get(to + h), first * c - second * s);
        compare(out.get(to + half + h), second * c + first * s);
      }
    }
  }
  return worst;
}

}  // namespace

// driver [steps for each instruction set and type]
int main(int argc, char** argv) {
  const int steps = argc > 1 ? static_cast<int>(std::strtol(argv[1], nullptr, 10)) : 20;
  bool good = true;
  for (int i = 0; i < quire::kNumIsas; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (!quire::isa_supported(isa)) {
      std::printf("%-12s not on this machine\n", quire::isa_name(isa));
      continue;
    }
    // The worst of many runs of each kind.
    const auto repeat = [&](const char* what, double (*run_once)(Isa, bool), const char* plain, const char* other) {
      for (const bool flag : {false, true}) {
        double worst = 0;
        for (int step = 0; step < steps; ++step) worst = std::max(worst, run_once(isa, flag));
        std::printf("%-12s %-8s %d %s, worst error %.2f of what is allowed\n", quire::isa_name(isa),
                    flag ? other : plain, steps, what, worst);
        good = good && worst <= 1;
      }
    };
    repeat("steps", run, "float32", "bfloat16");
    repeat("matmuls", run_linear, "bfloat16", "int8");
    repeat("grouped matmuls", run_grouped, "float32", "bfloat16");
    repeat("blocked matmuls", driver::run_blocked, "float32", "bfloat16");
    repeat("times between", run_pointwise, "float32", "bfloat16");
    const auto count = [&](const char* what, double (*run)(Isa)) {
      double wrong = 0;
      for (int step = 0; step < steps; ++step) wrong += run(isa);
      std::printf("%-12s %-8s %d batches, %.2f of them wrong\n", quire::isa_name(isa), what, steps, wrong);
      good = good && wrong == 0;
    };
    count("draw", run_draw);
    count("sample", run_sample);
  }
  const bool is_uniform = run_uniform();
  std::printf("uniform numbers are %s\n", is_uniform ? "JAX's" : "NOT those of JAX");
  return good && is_uniform ? 0 : 1;
}
