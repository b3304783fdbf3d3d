// Checks of what draws and scores tokens.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "draw.h"
#include "driver.h"
#include "sample.h"

namespace driver {

using quire::Isa;

// Rows of random logits, many of them equal: the share of rows whose draw is not among what sorting would keep.
double run_draw(Isa isa) {
  const int64_t rows = pick(1, 4), vocab = pick(1, 700);
  std::vector<float> logits(rows * vocab), inv_temperature(rows), top_p(rows), min_p(rows), uniform(rows);
  std::vector<int64_t> top_k(rows);
  for (float& logit : logits) logit = -static_cast<float>(pick(0, 40)) / pick(1, 3);
  for (int64_t row = 0; row < rows; ++row) {
    inv_temperature[row] = pick_of<float>({0.0f, 1.0f, 0.3f});
    top_k[row] = pick_of<int64_t>({0, 1, pick(1, vocab + 1)});
    top_p[row] = pick_of<float>({1.0f, 0.95f, pick(1, 99) / 100.0f});
    min_p[row] = pick_of<float>({0.0f, 0.0f, pick(1, 99) / 100.0f});
    uniform[row] = pick_of<float>({0.0f, 1.0f - 0x1p-24f, pick(0, 99) / 100.0f});
  }
  double wrong = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = logits.data() + row * vocab;
    quire::Draw how(inv_temperature[row]);
    how.top_k = top_k[row];
    how.top_p = top_p[row];
    how.min_p = min_p[row];
    how.uniform = uniform[row];
    const quire::Drawn drawn = quire::draw(isa, from, vocab, how);
    std::vector<int64_t> order(vocab);
    for (int64_t i = 0; i < vocab; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return from[a] > from[b]; });
    if (inv_temperature[row] == 0) {
      wrong += drawn.token != order[0];
      continue;
    }
    const auto weight = [&](int64_t i) { return std::exp(double(from[i] - from[order[0]]) * inv_temperature[row]); };
    if (top_k[row] > 0 && top_k[row] < vocab) order.resize(top_k[row]);
    double total = 0, before = 0;
    for (const int64_t i : order) total += weight(i);
    int64_t least = 0, most = 0;  // within rounding of an edge either side will do
    bool found = false;
    for (const int64_t i : order) {
      const bool heavy = weight(i) > 0 && weight(i) >= min_p[row] * (1 + 1e-6);
      least += heavy && (top_p[row] == 1 || before < top_p[row] * total * (1 - 1e-6));
      if (weight(i) >= min_p[row] * (1 - 1e-6) && (top_p[row] == 1 || before < top_p[row] * total * (1 + 1e-6))) {
        most += 1;
        found = found || (i == drawn.token && weight(i) > 0);
      }
      before += weight(i);
    }
    wrong += !found || drawn.num_kept < least || drawn.num_kept > most;
  }
  return wrong / rows;
}

// The largest of x, and the sum of exp((x - peak) * inv).
struct Softmax {
  double peak, mass = 0;

  Softmax(const std::vector<double>& x, double inv) : peak(*std::max_element(x.begin(), x.end())) {
    for (const double one : x) mass += std::exp((one - peak) * inv);
  }
};

// Samples that ask for everything at once: the share of those whose scores are not what a loop in double precision finds.
// Every other batch has what is out of range, and rows that are no numbers: of these all ids must exist.
double run_sample(Isa isa) {
  const bool is_hostile = pick(0, 1);
  const int64_t samples = pick(1, 4), vocab = pick(1, 700),
                words = quire::ceil_div(vocab, 32) - (is_hostile && vocab > 32);
  const int64_t num_top = pick_of<int64_t>({1, 20, 20, 100});
  const int64_t page_size = pick(1, 5), pages = pick(1, 9), rows = pick(1, 3), pages_per_row = pick(1, 6), biases = 3;
  const auto ints = [](int64_t n, int64_t low, int64_t high) {
    std::vector<int32_t> out(n);
    for (int32_t& one : out) one = pick(low, high);
    return out;
  };
  const auto floats = [](int64_t n, std::initializer_list<float> of) {
    std::vector<float> out(n);
    for (float& one : out) one = pick_of<float>(of);
    return out;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  std::vector<float> logits(samples * vocab), out(3 * samples), top_logprobs(2 * samples * num_top);
  std::vector<int32_t> token(samples), top_ids(2 * samples * num_top);
  for (float& logit : logits) logit = -static_cast<float>(pick(0, 40)) / pick(1, 3);
  for (int64_t i = 0; is_hostile && i < samples; ++i)
    logits[i * vocab + pick(0, vocab - 1)] = pick_of<float>({nan, infinity, -infinity});
  const auto tokens = ints(pages * page_size, -1, vocab),
             table = ints(rows * pages_per_row, -1, pages);  // some are none
  const auto position = ints(samples, is_hostile ? -9 : 0, pages_per_row * page_size + 2),
             prompt_len = ints(samples, 0, 9);
  const auto row = ints(samples, -is_hostile, rows - 1 + is_hostile),
             target = ints(samples, -1, vocab - 1 + is_hostile);
  const auto top_k = ints(samples, 0, is_hostile ? 9 : 0), index = ints(samples, 0, 3);
  const auto bias_ids = ints(samples * biases, -1, vocab);
  const auto temperature = floats(samples, {0, 1, 0.5}), top_p = floats(samples, {1, is_hostile ? 0.5f : 1});
  const auto min_p = floats(samples, {0, is_hostile ? 2.0f : 0});
  const auto sigma = floats(samples, {0, 0, 1.5}), repetition = floats(samples, {1, 1.3});
  const auto presence = floats(samples, {0, 0.5}), frequency = floats(samples, {0, -0.25});
  const auto bias = floats(samples * biases, {2, -1});
  std::vector<uint32_t> seed(2 * samples, 7), mask(samples * words);
  for (uint32_t& word : mask) word = pick(0, 0xFFFFFFFF);
  const std::unique_ptr<bool[]> wants(new bool[samples]), has_mask(new bool[samples]);
  for (int64_t i = 0; i < samples; ++i) {
    wants[i] = !is_hostile || pick(0, 1);
    has_mask[i] = pick(0, 1);
    mask[i * words] |= !is_hostile;
  }
  quire::Sample args{};
  args.num_samples = samples, args.vocab = vocab, args.num_top = num_top, args.logits = logits.data();
  args.num_pages = pages, args.page_size = page_size, args.num_rows = rows, args.pages_per_row = pages_per_row;
  args.tokens = tokens.data(), args.page_table = table.data(), args.position = position.data();
  args.want_logprobs = args.want_top = wants.get(), args.temperature = temperature.data(), args.top_k = top_k.data();
  args.top_p = top_p.data(), args.min_p = min_p.data(), args.top_n_sigma = sigma.data(), args.seed = seed.data();
  args.index = index.data(), args.target = target.data(), args.row = row.data(), args.prompt_len = prompt_len.data();
  args.repetition_penalty = repetition.data(), args.presence_penalty = presence.data();
  args.frequency_penalty = frequency.data(), args.num_biases = biases, args.bias_ids = bias_ids.data();
  args.bias = bias.data(), args.has_mask = has_mask.get(), args.mask_words = words, args.mask = mask.data();
  args.token = token.data(), args.kept_mass = out.data() + 2 * samples;
  args.model = {out.data(), top_ids.data(), top_logprobs.data()};
  args.processed = {out.data() + samples, top_ids.data() + samples * num_top, top_logprobs.data() + samples * num_top};
  quire::sample(isa, args, {2, run_on_threads});
  const auto exists = [&](int32_t id) { return id >= 0 && id < vocab; };
  const auto is_drawn = [&](int32_t id) { return exists(id) || (is_hostile && id == quire::kNotFinite); };
  if (!std::all_of(token.begin(), token.end(), is_drawn) || !std::all_of(top_ids.begin(), top_ids.end(), exists))
    return 1;
  if (is_hostile) return 0;

  const auto is_close = [](double a, double b) { return a == b || std::abs(a - b) < 1e-4 * (1 + std::abs(b)); };
  double wrong = 0;
  for (int64_t i = 0; i < samples; ++i) {
    std::vector<double> x(logits.begin() + i * vocab, logits.begin() + (i + 1) * vocab);
    const Softmax model(x, 1);
    bool good = target[i] < 0 || token[i] == target[i];
    good = good && is_close(args.model.logprob[i], x[token[i]] - model.peak - std::log(model.mass));
    std::vector<int64_t> seen(vocab), counts(vocab);
    for (int64_t column = 0; column < std::min<int64_t>(position[i], pages_per_row * page_size); ++column) {
      const int64_t page = table[row[i] * pages_per_row + column / page_size];
      const int64_t id = page < 0 || page >= pages ? -1 : tokens[page * page_size + column % page_size];
      if (!exists(id)) continue;
      seen[id] = 1;
      counts[id] += column >= prompt_len[i];
    }
    for (int64_t id = 0; id < vocab; ++id) {
      if (seen[id]) x[id] = x[id] > 0 ? x[id] / repetition[i] : x[id] * repetition[i];
      x[id] -= frequency[i] * counts[id] + presence[i] * (counts[id] > 0);
    }
    for (int64_t e = i * biases; e < (i + 1) * biases; ++e)
      if (exists(bias_ids[e])) x[bias_ids[e]] += bias[e];
    for (int64_t id = 0; has_mask[i] && id < vocab; ++id)
      if (!(mask[i * words + id / 32] >> id % 32 & 1)) x[id] = -infinity;
    const bool is_random = temperature[i] > 0;
    const double inv = is_random ? 1 / temperature[i] : 1;
    const Softmax whole(x, inv);
    bool is_clear = true;  // no token is within rounding of an edge, where either side will do
    if (sigma[i] > 0) {
      double sum = 0, squares = 0, count = 0;
      for (const double one : x)
        if (std::isfinite(one)) sum += one, count += 1;
      for (const double one : x)
        if (std::isfinite(one)) squares += (one - sum / count) * (one - sum / count);
      const double lowest = whole.peak - sigma[i] * std::sqrt(squares / count);
      for (double& one : x) {
        is_clear = is_clear && std::abs(one - lowest) > 1e-4;
        if (one < lowest) one = -infinity;
      }
    }
    if (is_clear) {
      const Softmax left(x, inv);
      const auto logprob = [&](int32_t id) { return is_random ? (x[id] - left.peak) * inv - std::log(left.mass) : 0; };
      if (is_random || target[i] < 0) good = good && is_close(args.processed.logprob[i], logprob(token[i]));
      if (!is_random && target[i] < 0) good = good && x[token[i]] > left.peak - 1e-4;
      good = good && is_close(args.kept_mass[i], is_random ? left.mass / whole.mass : 1);
      for (int64_t place = 0; place < std::min(is_random ? vocab : 1, num_top); ++place) {
        const int64_t at = i * num_top + place;
        good = good && is_close(args.processed.top_logprob[at], logprob(args.processed.top_id[at]));
      }
    }
    wrong += !good;
  }
  return wrong / samples;
}

// Whether counters give the numbers that JAX gives them, to the last bit.
bool run_uniform() {
  const struct {
    uint32_t seed[2];
    int32_t index, position;
    float expected;
  } cases[] = {{{0, 0}, 0, 0, 0x1.2181580000000p-2f},
               {{1, 2}, 3, 4, 0x1.8d40e00000000p-3f},
               {{0xFFFFFFFF, 0x12345678}, 127, 0x7FFFFFFF, 0x1.8ef89c0000000p-1f},
               {{0, 7}, 0x7FFFFFFF, 131072, 0x1.b852c00000000p-1f}};
  bool good = true;
  for (const auto& one : cases) good = good && quire::uniform_of(one.seed, one.index, one.position) == one.expected;
  return good;
}

}  // namespace driver
