// Logits -> tokens and log-probabilities of samples, one row of logits each: all that `quire/device/sampler.py` does to
// a row, done while it is in the cache. What a sample does not ask for costs nothing.
//
// Knows no XLA and no JAX: pointers, sizes, and a way to run tasks on threads.
#pragma once

#include <cstdint>

#include "machine.h"

namespace quire {

constexpr int32_t kNotFinite = -2;  // instead of a token, where a logit is NaN or +inf, or all of them are -inf

// Log-probabilities of one kind: of the model's own distribution, or of what was drawn from.
struct Scores {
  float* logprob;      // of the token
  int32_t* top_id;     // [samples, num_top], the likeliest first
  float* top_logprob;  // the same
};

struct Sample {
  int64_t num_samples, vocab;
  int64_t num_top;      // alternatives beside a token, at least 1
  const float* logits;  // [samples, vocab]

  // What rows have seen: token ids in pages, and the pages of each row.
  int64_t num_pages, page_size, num_rows, pages_per_row;
  const int32_t* tokens;      // [pages, page size]
  const int32_t* page_table;  // [rows, pages per row]

  // `SampleInputs`, in its order; one for each sample where nothing else is said.
  const int32_t* position;
  const bool *want_logprobs, *want_top;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p, *top_n_sigma;
  const uint32_t* seed;  // [samples, 2]
  const int32_t *index, *target, *row, *prompt_len;
  const float *repetition_penalty, *presence_penalty, *frequency_penalty;
  int64_t num_biases;
  const int32_t* bias_ids;  // [samples, biases], below 0 for none
  const float* bias;        // the same
  const bool* has_mask;
  int64_t mask_words;
  const uint32_t* mask;  // [samples, words]: bit t % 32 of word t // 32 allows token t

  int32_t* token;
  Scores model, processed;
  float* kept_mass;
};

void sample(Isa isa, const Sample& args, const Threads& threads);

}  // namespace quire
