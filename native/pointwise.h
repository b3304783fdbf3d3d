// What lies between the matmuls of a layer, row by row: residual and norm, rotation, gate. float32 or bfloat16 in memory,
// float32 in between, rounded where a program of separate operations would round.
#pragma once

#include <cstdint>

#include "machine.h"

namespace quire {

// sum = x + delta; normed = sum / sqrt(mean(sum^2) + eps) * weight.
struct AddNorm {
  bool bf16;
  int64_t rows, width;
  float eps;
  const void *x, *delta;  // [rows, width]
  const void* weight;     // [width]
  void *sum, *normed;     // [rows, width]
};

void add_norm(Isa isa, const AddNorm& args, const Threads& threads);

// out = silu(gate) * up.
struct Gate {
  bool bf16;
  int64_t rows, width;
  const void* gate_up;  // [rows, 2, width]
  void* out;            // [rows, width]
};

void gate(Isa isa, const Gate& args, const Threads& threads);

// The pair (i, i + head_dim / 2) of every query and key head turned by its token's angle; values as they are.
struct Rotate {
  bool bf16;
  int64_t tokens, kv_heads, group, head_dim;
  const void* qkv;         // [tokens, kv_heads, group + 2, head_dim]: queries, key, value of each KV head
  const float *cos, *sin;  // [tokens, head_dim / 2]
  void *q, *k, *v;         // [tokens, heads, head_dim]
};

void rotate(Isa isa, const Rotate& args, const Threads& threads);

}  // namespace quire
