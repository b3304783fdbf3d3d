// Which tokens top-k and top-p leave to draw from: the threshold that `quire/device/cut.py` finds by halving, found in
// one pass over the likelier tokens.
//
// Knows no XLA and no JAX: pointers, sizes, and a way to run tasks on threads.
#pragma once

#include <cstdint>

#include "machine.h"

namespace quire {

struct Cut {
  int64_t num_rows, vocab;
  const float* weights;  // [rows, vocab], from 0 to 1: probabilities over that of the likeliest token
  const int32_t* top_k;  // 0 for all
  const float* top_p;    // 1 for all
  float* threshold;      // everything above it is kept
  int32_t* num_ties;     // and so many of those exactly at it, the first ones
};

void cut(Isa isa, const Cut& cut, const Threads& threads);

}  // namespace quire
