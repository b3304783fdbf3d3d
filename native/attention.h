// Fused KV write and ragged paged attention on a CPU. Knows nothing of XLA, JAX or Python.
//
// Letters: T packed tokens, B rows, P pages per row, M pages in the pool, Z page size, N query heads, K KV heads,
// G = N / K, H head size. An element is float32 or bfloat16; `pair` is 1 for float32 and 2 for bfloat16.
//
//   K pages  [M, K, H / pair, Z, pair]         a vector holds the same dimensions of consecutive positions
//   V pages  [M, K, ceil(Z / pair), H, pair]   a vector holds consecutive dimensions of the same positions
//
// so neither product needs a sum across a vector, and both are what a bfloat16 dot instruction or tile takes.
//
// What a token gets is the same to the last bit whatever else is in the batch, however its row is cut into steps and
// however many threads there are: a context is added up in parts that begin at fixed positions, each part in chunks
// that do, and the parts one after the other (attention.cc); which instructions do it depends on no number of rows.
#pragma once

#include <cstdint>

#include "machine.h"

namespace quire {

enum class Element { kFloat32, kBfloat16 };

struct Attention {
  Element element;
  int64_t num_tokens;     // T
  int64_t num_rows;       // B
  int64_t pages_per_row;  // P
  int64_t num_pages;      // M
  int64_t page_size;      // Z
  int64_t num_heads;      // N
  int64_t num_kv_heads;   // K
  int64_t head_dim;       // H, a multiple of 8
  float scale;            // above 0
  float soft_cap;         // scores s, already scaled, become soft_cap * tanh(s / soft_cap); 0 for none
  int64_t window;         // positions a token sees, itself included; 0 for all before it

  const void* q_TNH;
  const void* k_TKH;
  const void* v_TKH;
  const int32_t* positions_T;     // in the sequence: a row's table may begin at a later page than its first
  const int32_t* destinations_T;  // page * Z + offset; anything outside the pool is dropped
  const int32_t* page_table_BP;   // a page outside the pool is as if masked
  const int32_t* kv_lens_B;
  const int32_t* cu_q_lens_B1;
  const float* sinks_N;  // a score of each head that every softmax has, without a value; null for none

  void* k_pages;
  void* v_pages;
  void* out_TNH;
};

// Writes this step's K and V, then attends. `isa` must be supported.
void write_and_attend(const Attention& attention, Isa isa, const Threads& threads);

}  // namespace quire
