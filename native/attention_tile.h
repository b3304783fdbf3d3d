// The arithmetic of a tile: a few queries of one row with all G heads that share a KV head; its rows are (query, head).
//
// It visits a part of its context in chunks of up to kChunk columns. A column is a position, counted so that each piece
// of a page starts at an even one. For every chunk: scores = Q K^T, softmax with a running maximum and sum, out += weights
// V. What becomes of a row does not depend on the other rows of the tile: neither on what they see nor on how many they
// are.
//
// What a tile's queries do not see may be anything, NaN too. Scores of such columns are never read, their weight is set
// to zero, and since 0 x NaN is NaN their V is never multiplied.
#pragma once

#include <cstdint>
#include <limits>

#include "attention.h"
#include "bf16.h"

namespace quire {

constexpr int64_t kChunk = 128;                // columns visited at a time
constexpr int64_t kScoreStride = kChunk + 16;  // floats; not a power of two, or the rows of a tile share cache sets
constexpr float kNothing = -std::numeric_limits<float>::infinity();

template <class T>
constexpr int64_t kPair = sizeof(T) == 2 ? 2 : 1;

// One piece of a page, in the place where a tile meets it.
struct Piece {
  const void* k;                 // [H / pair, Z, pair], from this piece's first position on
  const void* v;                 // [positions / pair, H, pair]
  int64_t count;                 // positions; 0 for a page outside the pool, or before the table
  int64_t seen_begin, seen_end;  // of them, those that some query of the tile sees; 0 and 0 if there are none
};

// What a thread works in. Rows are padded to 16, columns to 32, for the instruction set that wants whole tiles.
struct Scratch {
  int64_t num_rows = 0;  // X
  int64_t head_dim = 0;
  int64_t page_size = 0;
  int64_t padded = 0;  // columns of a piece
  float scale_log2e = 0;
  const void* q = nullptr;   // [X, H], as the functions of the table want it
  float* scores = nullptr;   // [X, kScoreStride]; weights after `soften`
  Bf16* weights = nullptr;   // [X, kScoreStride], where the table wants them in bfloat16
  void* values = nullptr;    // [kChunk / 2, H, 2] bfloat16, what the table wants of V without what is not seen
  float* out = nullptr;      // [X, H]
  float* top = nullptr;      // [X] running maximum, of scores times log2(e)
  float* total = nullptr;    // [X] running sum
  float* shrink = nullptr;   // [X] what a higher maximum leaves of the sum so far
  float* sum_out = nullptr;  // the same three of the parts before, of which the functions know nothing
  float* sum_top = nullptr;
  float* sum_total = nullptr;
  int64_t* begin = nullptr;  // [X] first column seen, from the start of the context
  int64_t* end = nullptr;
};

// The arithmetic of one instruction set and element type.
struct TileFunctions {
  bool float_queries;  // `q` is float32 whatever the element type
  void (*start)(Scratch&);
  // scores[x, i * padded + z] = q[x] . k[piece i, z]; a column without a position gets kNothing.
  void (*score)(Scratch&, const Piece* pieces, int64_t num_pieces);
  // Scores become weights; top and total move on, out shrinks with them. `column` is the chunk's first.
  void (*soften)(Scratch&, int64_t column, int64_t num_columns);
  // out[x] += weights[x] V. The next chunk's pieces are only named, so that they can be on their way.
  void (*accumulate)(Scratch&, const Piece* pieces, int64_t num_pieces, const Piece* next, int64_t num_next);
  void (*finish)(Scratch&);
};

// Those of an instruction set that this machine has.
TileFunctions tile_functions(Isa isa, Element element);

}  // namespace quire
