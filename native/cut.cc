#include "cut.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

// Weights order like their bits. A bin is all weights that share the exponent and 6 bits behind it: 1.6% wide.
constexpr int kShift = 17;
constexpr int kNumBins = (0x3F800000 >> kShift) + 1;

int bin_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return std::min<int>(bits >> kShift, kNumBins - 1);
}

struct Scratch {
  std::vector<float> likelier, in_bin;
  std::vector<double> mass;
  std::vector<int32_t> count;
};

double sum_plain(const float* weights, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += weights[i];
  return sum;
}

// Weights of at least `floor`, in order; returns how many.
int64_t collect_plain(const float* weights, int64_t n, float floor, float* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    out[count] = weights[i];
    count += weights[i] >= floor;
  }
  return count;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) double sum_avx512(const float* weights, int64_t n) {
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm256_loadu_ps(weights + i)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm256_loadu_ps(weights + i + 8)));
  }
  return _mm512_reduce_add_pd(_mm512_add_pd(low, high)) + sum_plain(weights + i, n - i);
}

__attribute__((target("avx512f"))) int64_t collect_avx512(const float* weights, int64_t n, float floor, float* out) {
  const __m512 limit = _mm512_set1_ps(floor);
  int64_t i = 0, count = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512 w = _mm512_loadu_ps(weights + i);
    const __mmask16 keep = _mm512_cmp_ps_mask(w, limit, _CMP_GE_OQ);
    if (keep == 0) continue;  // nearly always
    _mm512_mask_compressstoreu_ps(out + count, keep, w);
    count += __builtin_popcount(keep);
  }
  return count + collect_plain(weights + i, n - i, floor, out + count);
}
#endif

// Walks the tokens from the likeliest on until `enough(count, mass)`: the weight of the last one taken, how many are
// above it, and what they weigh. A whole bin at a time, then one by one inside the bin that decides.
struct Edge {
  float weight;
  int64_t num_above;
  double mass_above;
};

template <class Enough>
Edge walk(Scratch& scratch, int64_t num, const Enough& enough) {
  int64_t count = 0;
  double mass = 0;
  int bin = kNumBins - 1;
  for (; bin > 0; --bin) {
    if (scratch.count[bin] == 0) continue;
    if (enough(count + scratch.count[bin], mass + scratch.mass[bin])) break;
    count += scratch.count[bin];
    mass += scratch.mass[bin];
  }
  scratch.in_bin.clear();
  for (int64_t i = 0; i < num; ++i)
    if (bin_of(scratch.likelier[i]) == bin) scratch.in_bin.push_back(scratch.likelier[i]);
  std::sort(scratch.in_bin.begin(), scratch.in_bin.end(), std::greater<float>());
  Edge edge{0.0f, count, mass};
  for (const float weight : scratch.in_bin) {
    if (weight != edge.weight) edge = {weight, count, mass};
    count += 1;
    mass += weight;
    if (enough(count, mass)) return edge;
  }
  return {0.0f, count, mass};  // rounding: everything is needed
}

void cut_row(Isa isa, const Cut& cut, int64_t row, Scratch& scratch) {
  const float* weights = cut.weights + row * cut.vocab;
  const int64_t top_k = cut.top_k[row];
  const double top_p = cut.top_p[row];
  float& threshold = cut.threshold[row];
  int32_t& num_ties = cut.num_ties[row];
  threshold = 0.0f;
  num_ties = std::numeric_limits<int32_t>::max();
  const bool by_count = top_k > 0 && top_k < cut.vocab, by_mass = top_p < 1.0;
  if (!by_count && !by_mass) return;

#if defined(__x86_64__)
  const bool wide = isa >= Isa::kAvx512;
  const auto sum = wide ? sum_avx512 : sum_plain;
  const auto collect = wide ? collect_avx512 : collect_plain;
#else
  (void)isa;
  const auto sum = sum_plain;
  const auto collect = collect_plain;
#endif
  double total = 0;
  float floor = std::numeric_limits<float>::min();  // what weighs nothing is never drawn
  if (!by_count) {
    total = sum(weights, cut.vocab);
    // Tokens below this weigh less than 1 - top_p together, so those above it reach top_p.
    floor = std::max(floor, static_cast<float>(0.999 * (1.0 - top_p) * total / cut.vocab));
  }
  scratch.likelier.resize(cut.vocab);
  const int64_t num = collect(weights, cut.vocab, floor, scratch.likelier.data());
  scratch.count.assign(kNumBins, 0);
  scratch.mass.assign(kNumBins, 0.0);
  for (int64_t i = 0; i < num; ++i) {
    const int bin = bin_of(scratch.likelier[i]);
    scratch.count[bin] += 1;
    scratch.mass[bin] += scratch.likelier[i];
  }

  int64_t limit = num;
  if (by_count) {
    const Edge edge = walk(scratch, num, [&](int64_t count, double) { return count >= top_k; });
    threshold = edge.weight;
    num_ties = top_k - edge.num_above;
    limit = std::min(limit, top_k);
    total = edge.mass_above + (limit - edge.num_above) * static_cast<double>(edge.weight);
  }
  if (by_mass) {
    const double goal = top_p * total;
    const Edge edge =
        walk(scratch, num, [&](int64_t count, double mass) { return mass >= goal || count >= limit; });
    threshold = edge.weight;
    if (edge.weight == 0) return;
    const int64_t needed = static_cast<int64_t>((goal - edge.mass_above) / edge.weight * (1 - 1e-12)) + 1;
    num_ties = std::max<int64_t>(std::min(needed, limit - edge.num_above), 1);
  }
}

}  // namespace

void cut(Isa isa, const Cut& cut, const Threads& threads) {
  threads.run(cut.num_rows, [&](int64_t row) {
    static thread_local Scratch scratch;
    cut_row(isa, cut, row, scratch);
  });
}

}  // namespace quire
