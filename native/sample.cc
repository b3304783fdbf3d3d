#include "sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "draw.h"
#include "vector.h"

namespace quire {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kMinTemperature = 1e-20f;  // a lower temperature is this one
constexpr float kRounding = 1e-6f;         // log-probabilities that differ by less may have the same weight

// The largest logits and where they are, of equal ones the first; NaN is none of them.
struct Top {
  int64_t count = 0;
  std::vector<float> logits;
  std::vector<int32_t> ids;
};

struct Scratch {
  std::vector<float> logits, peaks;
  std::vector<int32_t> seen, counts;
  Top top;
};

// -- passes over a row ----------------------------------------------------------------------------------------------

// Leaves the tokens whose bit is set; those past the last bit have none.
QUIRE_INLINE void mask(float* x, int64_t vocab, const uint32_t* bits, int64_t words) {
  const Floats nothing = Floats{} + kNever;
  const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t num_bits = std::min(vocab, 32 * words);
  sweep(num_bits, [&](int64_t i, int64_t n) {
    const Words is_set = (Words{} + (bits[i / 32] >> i % 32)) >> lanes & 1;
    store(x + i, is_set != 0 ? load(x + i, n) : nothing, n);
  });
  std::fill(x + num_bits, x + vocab, kNever);
}

// The sum of `value(x)` over the finite logits, and how many these are.
template <class Value>
QUIRE_INLINE std::pair<double, int64_t> sum_finite(const float* x, int64_t vocab, const Value& value) {
  double total = 0;
  int64_t count = 0;
  for (int64_t begin = 0; begin < vocab; begin += kTile) {
    Floats sum = {};
    Ints finite = {};
    sweep(std::min(kTile, vocab - begin), [&](int64_t i, int64_t n) {
      Floats logit = load(x + begin + i, n);
      for (int64_t lane = n; lane < kLanes; ++lane) logit[lane] = kNever;
      const Ints is_finite = logit - logit == 0.0f;
      finite -= is_finite;
      sum += is_finite ? value(logit) : Floats{};
    });
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      total += sum[lane];
      count += finite[lane];
    }
  }
  return {total, count};
}

// The standard deviation of the finite logits, divided by their number: -inf cannot be drawn.
QUIRE_INLINE float deviation(const float* x, int64_t vocab) {
  const auto [sum, count] = sum_finite(x, vocab, [](Floats logit) { return logit; });
  const float mean = sum / count;
  const auto [squares, _] = sum_finite(x, vocab, [&](Floats logit) { return (logit - mean) * (logit - mean); });
  return std::sqrt(squares / count);
}

// Leaves the tokens that are not below `lowest`: NaN stays.
QUIRE_INLINE void cut_below(float* x, int64_t vocab, float lowest) {
  const Floats nothing = Floats{} + kNever;
  sweep(vocab, [&](int64_t i, int64_t n) {
    const Floats logit = load(x + i, n);
    store(x + i, logit < lowest ? nothing : logit, n);
  });
}

// How many tokens come before one: those that are likelier by more than rounding, and of equal ones the first.
QUIRE_INLINE int64_t rank(const float* x, int64_t vocab, int64_t token, float inv_temperature) {
  int64_t count = std::count(x, x + token, x[token]);
  Ints likelier = {};
  sweep(vocab, [&](int64_t i, int64_t n) {
    Floats more = load(x + i, n) - x[token];
    for (int64_t lane = n; lane < kLanes; ++lane) more[lane] = 0;
    likelier -= more * inv_temperature > kRounding;
  });
  for (int64_t lane = 0; lane < kLanes; ++lane) count += likelier[lane];
  return count;
}

// The passes, compiled for one instruction set.
struct Passes {
  void (*mask)(float*, int64_t, const uint32_t*, int64_t);
  float (*deviation)(const float*, int64_t);
  void (*cut_below)(float*, int64_t, float);
  int64_t (*rank)(const float*, int64_t, int64_t, float);
};

#define QUIRE_PASSES(attributes, name)                                                                     \
  attributes void mask_##name(float* x, int64_t vocab, const uint32_t* bits, int64_t words) {              \
    mask(x, vocab, bits, words);                                                                           \
  }                                                                                                        \
  attributes float deviation_##name(const float* x, int64_t vocab) { return deviation(x, vocab); }         \
  attributes void cut_below_##name(float* x, int64_t vocab, float lowest) { cut_below(x, vocab, lowest); } \
  attributes int64_t rank_##name(const float* x, int64_t vocab, int64_t token, float inv_temperature) {    \
    return rank(x, vocab, token, inv_temperature);                                                         \
  }

QUIRE_PASSES(QUIRE_PLAIN, plain)
#if QUIRE_X86
QUIRE_PASSES(QUIRE_AVX2, avx2)
QUIRE_PASSES(QUIRE_AVX512, avx512)
#endif

Passes passes_for(Isa isa) {
#if QUIRE_X86
  if (isa >= Isa::kAvx512) return {mask_avx512, deviation_avx512, cut_below_avx512, rank_avx512};
  if (isa == Isa::kAvx2) return {mask_avx2, deviation_avx2, cut_below_avx2, rank_avx2};
#endif
  (void)isa;
  return {mask_plain, deviation_plain, cut_below_plain, rank_plain};
}

// -- penalties --------------------------------------------------------------------------------------------------------

bool has_penalty(const Sample& args, int64_t i) {
  return args.repetition_penalty[i] != 1 || args.presence_penalty[i] != 0 || args.frequency_penalty[i] != 0;
}

// Makes tokens that the sample's row has seen less likely: by its pages up to the position drawn.
void penalise(const Sample& args, int64_t i, float* x, Scratch& scratch) {
  scratch.counts.resize(args.vocab);  // zeros: what is counted is taken back below
  scratch.seen.clear();
  const bool has_row = args.row[i] >= 0 && args.row[i] < args.num_rows;
  const int64_t length = has_row ? std::min<int64_t>(args.position[i], args.pages_per_row * args.page_size) : 0;
  for (int64_t begin = 0; begin < length; begin += args.page_size) {
    const int64_t page = args.page_table[args.row[i] * args.pages_per_row + begin / args.page_size];
    if (page < 0 || page >= args.num_pages) continue;
    const int64_t end = std::min(begin + args.page_size, length);
    for (int64_t column = begin; column < end; ++column) {
      const int32_t token = args.tokens[page * args.page_size + column - begin];
      if (token < 0 || token >= args.vocab) continue;
      int32_t& count = scratch.counts[token];  // 1, and how often it is in the output
      if (count == 0) {
        scratch.seen.push_back(token);
        count = 1;
      }
      count += column >= args.prompt_len[i];
    }
  }
  const float repetition = args.repetition_penalty[i];
  for (const int32_t token : scratch.seen) {
    const int32_t count = scratch.counts[token] - 1;
    x[token] = x[token] > 0 ? x[token] / repetition : x[token] * repetition;
    x[token] -= args.frequency_penalty[i] * count;
    if (count > 0) x[token] -= args.presence_penalty[i];
    scratch.counts[token] = 0;
  }
}

// -- log-probabilities ------------------------------------------------------------------------------------------------

// What tokens were drawn from: one of logit x had the probability exp((x - peak) * inv_temperature) / mass.
struct Distribution {
  float peak, inv_temperature, mass;

  float logprob(float x) const { return (x - peak) * inv_temperature - std::log(mass); }
};

// Puts the `num_top` largest logits of a row into `scratch.top`.
void find_top(Isa isa, const float* x, int64_t vocab, int64_t num_top, Scratch& scratch) {
  Top& top = scratch.top;
  top.count = 0;
  top.logits.resize(num_top);
  top.ids.resize(num_top);
  float* const logits = top.logits.data();
  int32_t* const ids = top.ids.data();
  scratch.peaks.resize(ceil_div(vocab, kTile));
  find_peaks(isa, x, vocab, scratch.peaks.data());
  const auto is_among = [&](float logit) { return top.count < num_top || logit > logits[num_top - 1]; };
  for (int64_t begin = 0; begin < vocab; begin += kTile) {
    const float peak = scratch.peaks[begin / kTile];  // NaN where the tile has one
    if (peak == peak && !is_among(peak)) continue;    // nearly always
    for (int64_t id = begin; id < std::min(begin + kTile, vocab); ++id) {
      if (x[id] != x[id] || !is_among(x[id])) continue;
      const int64_t place = std::upper_bound(logits, logits + top.count, x[id], std::greater<float>()) - logits;
      top.count = std::min(top.count + 1, num_top);
      std::move_backward(logits + place, logits + top.count - 1, logits + top.count);
      std::move_backward(ids + place, ids + top.count - 1, ids + top.count);
      logits[place] = x[id];
      ids[place] = id;
    }
  }
}

// Writes the first `most` of them; those that are not there are token 0, which has no probability in such a place.
void write_top(const Top& top, const Distribution& from, int64_t most, int64_t i, int64_t num_top, const Scores& to) {
  for (int64_t place = 0; place < num_top; ++place) {
    to.top_id[i * num_top + place] = place < top.count ? top.ids[place] : 0;
    to.top_logprob[i * num_top + place] = place < std::min(most, top.count) ? from.logprob(top.logits[place]) : kNever;
  }
}

// -- a sample ---------------------------------------------------------------------------------------------------------

void sample_row(Isa isa, const Sample& args, int64_t i, Scratch& scratch) {
  const Passes passes = passes_for(isa);
  const int64_t vocab = args.vocab;
  const float* model_logits = args.logits + i * vocab;
  const float* logits = model_logits;
  const bool is_random = args.temperature[i] > 0, is_given = args.target[i] >= 0;
  const bool want_logprobs = args.want_logprobs[i] || args.want_top[i];
  const float inv_temperature = is_random ? 1 / std::max(args.temperature[i], kMinTemperature) : 1;

  // Logits, changed in a copy: penalties, biases, the mask.
  const int32_t* bias_ids = args.bias_ids + i * args.num_biases;
  const bool has_bias = std::any_of(bias_ids, bias_ids + args.num_biases, [](int32_t id) { return id >= 0; });
  const bool cuts_sigma = args.top_n_sigma[i] > 0;
  if (has_penalty(args, i) || has_bias || args.has_mask[i] || cuts_sigma) {
    scratch.logits.assign(logits, logits + vocab);
    logits = scratch.logits.data();
  }
  if (has_penalty(args, i)) penalise(args, i, scratch.logits.data(), scratch);
  for (int64_t e = 0; has_bias && e < args.num_biases; ++e)
    if (bias_ids[e] >= 0 && bias_ids[e] < vocab) scratch.logits[bias_ids[e]] += args.bias[i * args.num_biases + e];
  if (args.has_mask[i]) passes.mask(scratch.logits.data(), vocab, args.mask + i * args.mask_words, args.mask_words);

  // What is drawn from: top-n-sigma of these, then temperature, top-k, top-p, min-p.
  float whole_mass = 0;
  if (cuts_sigma) {
    const Drawn whole = draw(isa, logits, vocab, Draw(is_random && want_logprobs ? inv_temperature : 0));
    whole_mass = whole.mass;
    const float lowest = whole.peak - args.top_n_sigma[i] * passes.deviation(logits, vocab);
    passes.cut_below(scratch.logits.data(), vocab, lowest);
  }
  Draw how(is_random ? inv_temperature : 0);
  how.top_k = args.top_k[i];
  how.top_p = args.top_p[i];
  how.min_p = args.min_p[i];
  how.uniform = uniform_of(args.seed + 2 * i, args.index[i], args.position[i]);
  const Drawn drawn = draw(isa, logits, vocab, how);
  if (!cuts_sigma) whole_mass = drawn.whole_mass;
  const int64_t token = is_given ? std::min<int64_t>(args.target[i], vocab - 1) : drawn.token;
  const float model_peak = logits == model_logits ? drawn.peak : draw(isa, model_logits, vocab, Draw(0)).peak;
  args.token[i] = is_given || std::isfinite(model_peak) ? token : kNotFinite;

  // Log-probabilities: 0 where nobody asked.
  args.model.logprob[i] = args.processed.logprob[i] = 0;
  args.kept_mass[i] = 1;
  for (const Scores& scores : {args.model, args.processed}) {
    std::fill_n(scores.top_id + i * args.num_top, args.num_top, 0);
    std::fill_n(scores.top_logprob + i * args.num_top, args.num_top, 0.0f);
  }
  if (!want_logprobs) return;
  const Distribution from{drawn.peak, inv_temperature, drawn.mass};
  const bool is_cut =
      is_random && (args.top_k[i] > 0 || args.top_p[i] < 1 || args.min_p[i] > 0 || args.top_n_sigma[i] > 0);
  const bool is_possible =  // what was drawn could be drawn
      !(is_given && is_cut) || passes.rank(logits, vocab, token, inv_temperature) < drawn.num_kept;
  args.processed.logprob[i] = is_possible ? from.logprob(logits[token]) : kNever;
  if (is_cut) args.kept_mass[i] = drawn.mass / whole_mass;
  const bool is_plain = logits == model_logits && is_random && inv_temperature == 1;
  const Drawn plain = is_plain ? drawn : draw(isa, model_logits, vocab, Draw(1));
  const Distribution model{plain.peak, 1, plain.whole_mass};
  args.model.logprob[i] = model.logprob(model_logits[token]);
  if (!args.want_top[i]) return;
  find_top(isa, model_logits, vocab, args.num_top, scratch);
  write_top(scratch.top, model, vocab, i, args.num_top, args.model);
  if (logits != model_logits) find_top(isa, logits, vocab, args.num_top, scratch);
  write_top(scratch.top, from, drawn.num_kept, i, args.num_top, args.processed);
}

}  // namespace

void sample(Isa isa, const Sample& args, const Threads& threads) {
  threads.run(args.num_samples, [&](int64_t i) {
    static thread_local Scratch scratch;
    sample_row(isa, args, i, scratch);
  });
}

}  // namespace quire
