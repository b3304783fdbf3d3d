// A token for each row of logits, by its temperature, top-k, top-p, min-p and its number in [0, 1): what
// `quire/device/sampler.py` draws with a dozen passes over the vocabulary, drawn while a row is in the cache.
//
// Knows no XLA and no JAX: pointers, sizes, and a way to run tasks on threads.
#pragma once

#include <cstdint>

#include "machine.h"

namespace quire {

struct Draw {
  int64_t num_rows, vocab;
  const float* logits;   // [rows, vocab]
  const bool* has_mask;  // whether only tokens whose bit is set may be drawn: bit t % 32 of word t // 32
  const uint32_t* mask;  // [rows, words]
  int64_t words;
  const float* inv_temperature;  // one over the temperature; 0 takes the likeliest token, and below 0 nobody asks
  const int32_t* top_k;  // 0 for all
  const float* top_p;    // 1 for all
  const float* min_p;    // 0 for all
  const float* uniform;
  int32_t* token;
  float* peak;        // the logit of the likeliest
  int32_t* num_kept;  // how many tokens could be drawn
  float* mass;        // what they weigh together, where the likeliest weighs 1
};

// The number in [0, 1) of a seed, a sequence index and a position, by the generator threefry2x32: to the last bit what
// JAX makes of `uniform(fold_in(fold_in(seed, index), position))`.
float uniform_of(const uint32_t seed[2], int32_t index, int32_t position);

void draw(Isa isa, const Draw& args, const Threads& threads);

}  // namespace quire
