// A token of one row of logits, by its temperature, top-k, top-p, min-p and its number in [0, 1): what
// `_draw` of `quire/device/sampler.py` does with a dozen passes over the vocabulary, done while the row is in the cache.
//
// Knows no XLA and no JAX: pointers and sizes.
#pragma once

#include <cstdint>

#include "machine.h"

namespace quire {

// How a token is drawn. Filled by name: four of the five fields are floats, which the compiler cannot tell apart.
struct Draw {
  explicit Draw(float inv_temperature) : inv_temperature(inv_temperature) {}

  float inv_temperature;  // one over the temperature; 0 takes the likeliest token
  int64_t top_k = 0;      // 0 for all
  float top_p = 1;        // 1 for all
  float min_p = 0;        // 0 for all
  float uniform = 0;
};

struct Drawn {
  int64_t token;
  float peak;        // the logit of the likeliest; NaN if any logit is
  int64_t num_kept;  // how many tokens could be drawn
  float mass;        // what they weigh together, where the likeliest weighs 1
  float whole_mass;  // what all tokens weigh
};

Drawn draw(Isa isa, const float* logits, int64_t vocab, const Draw& how);

// Tokens whose weights are added up together: the draw first finds the tile, then the token in it.
constexpr int64_t kTile = 256;

// The largest logit of each tile; NaN if one of its logits is.
void find_peaks(Isa isa, const float* logits, int64_t vocab, float* peaks);

// The number in [0, 1) of a seed, a sequence index and a position, by the generator threefry2x32: to the last bit what
// JAX makes of `uniform(fold_in(fold_in(seed, index), position))`.
float uniform_of(const uint32_t seed[2], int32_t index, int32_t position);

}  // namespace quire
