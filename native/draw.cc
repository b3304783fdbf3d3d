#include "draw.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "vector.h"

#if QUIRE_X86
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
  std::vector<float> peaks, weights, likelier, in_bin;
  std::vector<double> sums, mass;
  std::vector<int32_t> count;
};

// -- passes over a row ----------------------------------------------------------------------------------------------

QUIRE_INLINE void peaks_of(const float* logits, int64_t vocab, float* peaks) {
  for (int64_t tile = 0; tile * kTile < vocab; ++tile) {
    const float* from = logits + tile * kTile;
    Floats most = Floats{} + from[0];
    Ints is_nan = {};
    sweep(std::min(kTile, vocab - tile * kTile), [&](int64_t i, int64_t n) {
      Floats x = load(from + i, n);
      for (int64_t lane = n; lane < kLanes; ++lane) x[lane] = from[0];
      most = x > most ? x : most;
      is_nan |= x != x;
    });
    float peak = most[0];
    int32_t has_nan = is_nan[0];
    for (int64_t lane = 1; lane < kLanes; ++lane) {
      peak = std::max(peak, most[lane]);
      has_nan |= is_nan[lane];
    }
    peaks[tile] = has_nan ? std::numeric_limits<float>::quiet_NaN() : peak;
  }
}

QUIRE_INLINE double total_of(Floats x) {
  float total = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) total += x[lane];
  return total;
}

// exp((logit - peak) * inv_temperature) of each token, 0 where that is below 2^-126, and the sum of each tile.
QUIRE_INLINE void weigh(const float* logits, int64_t vocab, float peak, float inv_temperature, float* weights,
                        double* sums) {
  const float factor = inv_temperature * 1.44269504088896340736f;
  const Floats least = Floats{} - 126.0f;
  for (int64_t tile = 0; tile * kTile < vocab; ++tile) {
    Floats sum = {};
    sweep(std::min(kTile, vocab - tile * kTile), [&](int64_t i, int64_t n) {
      const Floats power = (load(logits + tile * kTile + i, n) - peak) * factor;
      Floats weight = power < least ? Floats{} : exp2(power < least ? least : power);
      store(weights + tile * kTile + i, weight, n);
      for (int64_t lane = n; lane < kLanes; ++lane) weight[lane] = 0;
      sum += weight;
    });
    sums[tile] = total_of(sum);
  }
}

// Makes weights below `least` 0; returns how many are left, with the sum of each tile.
QUIRE_INLINE int64_t keep_from(float least, float* weights, int64_t vocab, double* sums) {
  int64_t count = 0;
  for (int64_t tile = 0; tile * kTile < vocab; ++tile) {
    Floats sum = {};
    Ints kept = {};
    sweep(std::min(kTile, vocab - tile * kTile), [&](int64_t i, int64_t n) {
      const Floats weight = load(weights + tile * kTile + i, n);
      const Floats left = weight >= least ? weight : Floats{};
      store(weights + tile * kTile + i, left, n);
      kept -= left > 0.0f;
      sum += left;
    });
    sums[tile] = total_of(sum);
    for (int64_t lane = 0; lane < kLanes; ++lane) count += kept[lane];
  }
  return count;
}

// Weights of at least `least`, in order; returns how many.
int64_t collect(const float* weights, int64_t n, float least, float* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    out[count] = weights[i];
    count += weights[i] >= least;
  }
  return count;
}

#if QUIRE_X86
__attribute__((target("avx512f"))) int64_t collect_avx512(const float* weights, int64_t n, float least, float* out) {
  const __m512 limit = _mm512_set1_ps(least);
  int64_t i = 0, count = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512 w = _mm512_loadu_ps(weights + i);
    const __mmask16 keep = _mm512_cmp_ps_mask(w, limit, _CMP_GE_OQ);
    if (keep == 0) continue;  // nearly always
    _mm512_mask_compressstoreu_ps(out + count, keep, w);
    count += __builtin_popcount(keep);
  }
  return count + collect(weights + i, n - i, least, out + count);
}
#endif

// The passes, compiled for one instruction set.
struct Passes {
  void (*find_peaks)(const float*, int64_t, float*);
  void (*weigh)(const float*, int64_t, float, float, float*, double*);
  int64_t (*keep_from)(float, float*, int64_t, double*);
  int64_t (*collect)(const float*, int64_t, float, float*);
};

#define QUIRE_PASSES(attributes, name)                                                                           \
  attributes void find_peaks_##name(const float* x, int64_t vocab, float* peaks) { peaks_of(x, vocab, peaks); }  \
  attributes void weigh_##name(const float* x, int64_t vocab, float peak, float inv_temperature, float* weights, \
                               double* sums) {                                                                   \
    weigh(x, vocab, peak, inv_temperature, weights, sums);                                                       \
  }                                                                                                              \
  attributes int64_t keep_from_##name(float least, float* weights, int64_t vocab, double* sums) {                \
    return keep_from(least, weights, vocab, sums);                                                               \
  }

QUIRE_PASSES(QUIRE_PLAIN, plain)
#if QUIRE_X86
QUIRE_PASSES(QUIRE_AVX2, avx2)
QUIRE_PASSES(QUIRE_AVX512, avx512)
#endif

Passes passes_for(Isa isa) {
#if QUIRE_X86
  if (isa >= Isa::kAvx512) return {find_peaks_avx512, weigh_avx512, keep_from_avx512, collect_avx512};
  if (isa == Isa::kAvx2) return {find_peaks_avx2, weigh_avx2, keep_from_avx2, collect};
#endif
  (void)isa;
  return {find_peaks_plain, weigh_plain, keep_from_plain, collect};
}

// -- top-k and top-p ------------------------------------------------------------------------------------------------

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
  return bin > 0 ? edge : Edge{0.0f, count, mass};  // rounding: this bin, or everything, is needed
}

// What top-k and top-p leave: everything above `weight`, and of those exactly at it so many, the first ones.
struct Threshold {
  float weight;
  int64_t num_above, num_ties;
};

Threshold find_threshold(const Passes& passes, const Draw& how, int64_t vocab, double total, Scratch& scratch) {
  const bool by_count = how.top_k > 0 && how.top_k < vocab;
  const double top_p = how.top_p;
  float least = std::numeric_limits<float>::min();  // what weighs nothing is never drawn
  // Tokens below this weigh less than 1 - top_p together, so those above it reach top_p.
  if (!by_count) least = std::max(least, static_cast<float>(0.999 * (1.0 - top_p) * total / vocab));
  scratch.likelier.resize(vocab);
  const int64_t num = passes.collect(scratch.weights.data(), vocab, least, scratch.likelier.data());
  scratch.count.assign(kNumBins, 0);
  scratch.mass.assign(kNumBins, 0.0);
  for (int64_t i = 0; i < num; ++i) {
    const int bin = bin_of(scratch.likelier[i]);
    scratch.count[bin] += 1;
    scratch.mass[bin] += scratch.likelier[i];
  }

  int64_t limit = num;
  Threshold out{0.0f, vocab, 0};
  if (by_count) {
    limit = std::min<int64_t>(num, how.top_k);
    const Edge edge = walk(scratch, num, [&](int64_t count, double) { return count >= limit; });
    out = {edge.weight, edge.num_above, limit - edge.num_above};
    total = edge.mass_above + out.num_ties * static_cast<double>(edge.weight);
  }
  if (top_p < 1.0) {
    const double goal = top_p * total;
    const Edge edge = walk(scratch, num, [&](int64_t count, double mass) { return mass >= goal || count >= limit; });
    if (edge.weight == 0) return out;
    const int64_t needed = static_cast<int64_t>((goal - edge.mass_above) / edge.weight * (1 - 1e-12)) + 1;
    out = {edge.weight, edge.num_above, std::max<int64_t>(std::min(needed, limit - edge.num_above), 1)};
  }
  return out;
}

// -- the counter ----------------------------------------------------------------------------------------------------

using Pair = std::array<uint32_t, 2>;

// 20 rounds of threefry2x32 (Salmon and others, 2011) over two words under a key.
Pair threefry(Pair key, Pair x) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  x[0] += keys[0];
  x[1] += keys[1];
  for (uint32_t group = 0; group < 5; ++group) {
    for (const int rotation : kRotations[group % 2]) {
      x[0] += x[1];
      x[1] = (x[1] << rotation | x[1] >> (32 - rotation)) ^ x[0];
    }
    x[0] += keys[(group + 1) % 3];
    x[1] += keys[(group + 2) % 3] + group + 1;
  }
  return x;
}

// -- a row ----------------------------------------------------------------------------------------------------------

// The first index whose cumulative value exceeds the point, and how far into it the point lies: never one of value 0.
// If rounding puts the point past the end, the last index that has any.
template <class T>
std::pair<int64_t, double> invert(const T* values, int64_t n, double point) {
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(values[i] > 0)) continue;
    if (point < values[i]) return {i, point};
    point -= values[i];
    last = i;
  }
  return {last, static_cast<double>(values[last])};
}

Drawn draw_row(const Passes& passes, const float* logits, int64_t vocab, const Draw& how, Scratch& scratch) {
  const int64_t num_tiles = ceil_div(vocab, kTile);
  scratch.peaks.resize(num_tiles);
  passes.find_peaks(logits, vocab, scratch.peaks.data());
  const auto is_nan = [](float peak) { return peak != peak; };
  auto first_peak = std::find_if(scratch.peaks.begin(), scratch.peaks.end(), is_nan);
  if (first_peak == scratch.peaks.end()) first_peak = std::max_element(scratch.peaks.begin(), scratch.peaks.end());
  const float peak = *first_peak;
  if (how.inv_temperature == 0) {
    const float* from = logits + (first_peak - scratch.peaks.begin()) * kTile;
    return {std::min<int64_t>(std::find(from, logits + vocab, peak) - logits, vocab - 1), peak, 1, 1, 1};
  }

  scratch.weights.resize(vocab);
  scratch.sums.resize(num_tiles);
  float* weights = scratch.weights.data();
  passes.weigh(logits, vocab, peak, how.inv_temperature, weights, scratch.sums.data());
  double total = std::accumulate(scratch.sums.begin(), scratch.sums.end(), 0.0);
  const float whole_mass = total;
  int64_t num_kept = vocab;
  const bool is_cut = (how.top_k > 0 && how.top_k < vocab) || how.top_p < 1;
  if (total > 0 && (is_cut || how.min_p > 0)) {
    Threshold threshold{0.0f, vocab, 0};
    if (is_cut) threshold = find_threshold(passes, how, vocab, total, scratch);
    num_kept = passes.keep_from(std::max(threshold.weight, how.min_p), weights, vocab, scratch.sums.data());
    const int64_t enough = threshold.num_above + threshold.num_ties;
    if (num_kept > enough) {  // of those at the threshold, the last ones are too many
      for (int64_t i = vocab - 1; num_kept > enough; --i) {
        if (weights[i] != threshold.weight) continue;
        weights[i] = 0;
        num_kept -= 1;
      }
      passes.keep_from(threshold.weight, weights, vocab, scratch.sums.data());
    }
    total = std::accumulate(scratch.sums.begin(), scratch.sums.end(), 0.0);
  }
  Drawn drawn{vocab - 1, peak, num_kept, static_cast<float>(total), whole_mass};
  if (!(total > 0)) return drawn;  // not a number: whatever is drawn, it exists
  const auto [tile, rest] = invert(scratch.sums.data(), num_tiles, how.uniform * total);
  const int64_t begin = tile * kTile;
  drawn.token = begin + invert(weights + begin, std::min(kTile, vocab - begin), rest).first;
  return drawn;
}

}  // namespace

float uniform_of(const uint32_t seed[2], int32_t index, int32_t position) {
  Pair key = {seed[0], seed[1]};
  for (const int32_t number : {index, position}) key = threefry(key, {0, static_cast<uint32_t>(number)});
  const Pair words = threefry(key, {0, 0});
  const uint32_t bits = (words[0] ^ words[1]) >> 9 | 0x3F800000;  // 1 and 23 bits behind the point
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number - 1;
}

void find_peaks(Isa isa, const float* logits, int64_t vocab, float* peaks) {
  passes_for(isa).find_peaks(logits, vocab, peaks);
}

Drawn draw(Isa isa, const float* logits, int64_t vocab, const Draw& how) {
  static thread_local Scratch scratch;
  return draw_row(passes_for(isa), logits, vocab, how, scratch);
}

}  // namespace quire
