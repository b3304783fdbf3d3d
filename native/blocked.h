// Products with weights that are kept as GGUF files store them: 4, 6 or 8 bits each, in blocks of 32 along the inner
// dimension that share a scale and perhaps a minimum.
//
//   weight = scale * code + minimum, where code is a whole number from 0 on
//
// Knows no XLA and no JAX: pointers, sizes, and a way to run tasks on threads.
//
// A matrix is panels of 16 columns, one behind the other, each in a format of its own and a multiple of 64 bytes. Inside a
// panel lie the codes of all blocks, then their scales, and so on; a half is 16 bits of float16, one for each column:
//
//            codes of a block         what follows them, of all blocks                                     bits a weight
//   kQ4_0    4 lines                  scale, a half; the minimum is -8 scales                                4.5
//   kQ4_1    4 lines                  scale, a half; minimum, a half                                         5
//   kQ8_0    8 lines                  scale, a half; the minimum is -128 scales                              8.5
//   kQ4_K    4 lines                  scale and minimum, a byte each, of d and of -dmin: halves of 8 blocks  4.63
//   kQ6_K    4 lines, 2 of high bits  scale, a signed byte for each 16, of d; the minimum is -32 scales      6.56
//
// A line is 64 bytes: four values along the inner dimension of each column, the operand of a dot product. Codes of 4 bits
// are two lines in one, the i-th in the low and the (i + 4)-th in the high bits; the 2 high bits of 6 are four in one. The
// inner dimension is padded with zeros to 32 (of the last two formats it is a multiple of 256).
//
// Activations become int8 with a scale for each block of each row. Codes and activations are multiplied and added as whole
// numbers; blocks are added in float32 in one order, so that a row's result does not depend on how many rows there are.
#pragma once

#include <cstdint>

#include "linear.h"

namespace quire {

enum class Format : uint8_t { kQ4_0, kQ4_1, kQ8_0, kQ4_K, kQ6_K };
constexpr int kNumFormats = 5;

constexpr int64_t kBlock = 32;           // weights
constexpr int64_t kSuperBlock = 256;     // weights whose scales share one, of the K formats
constexpr int64_t kHalves = 2 * kPanel;  // bytes of one half for each column of a panel

inline int64_t num_blocks(int64_t inner) { return ceil_div(inner, kBlock); }

inline bool has_super_blocks(Format format) { return format == Format::kQ4_K || format == Format::kQ6_K; }

// Where the parts of a panel begin, in bytes from its start; and where it ends.
struct PanelLayout {
  int64_t high, scales, minima, supers, end;
};

inline PanelLayout panel_layout(Format format, int64_t inner) {
  const int64_t blocks = num_blocks(inner), super_blocks = ceil_div(blocks, kSuperBlock / kBlock);
  const bool minima = format == Format::kQ4_1 || format == Format::kQ4_K;
  PanelLayout at;
  at.high = blocks * (format == Format::kQ8_0 ? 8 : 4) * kLine;
  at.scales = at.high + blocks * (format == Format::kQ6_K ? 2 : 0) * kLine;
  at.minima = at.scales + blocks * (format == Format::kQ4_K ? kPanel : kHalves);
  at.supers = at.minima + blocks * (!minima ? 0 : format == Format::kQ4_K ? kPanel : kHalves);
  at.end = round_up(at.supers + super_blocks *
                                    (format == Format::kQ4_K   ? 2
                                     : format == Format::kQ6_K ? 1
                                                               : 0) *
                                    kHalves,
                    kLine);
  return at;
}

struct Blocked {
  const Format* formats;  // of each panel
  const uint8_t* panels;
  int64_t bytes;  // of all panels
};

// Sizes, or -1 if a format is none, or if it does not go with the inner dimension.
int64_t blocked_bytes(const uint8_t* formats, int64_t panels, int64_t inner);

// x is bfloat16 or float32 [rows, inner]. product.packed is not read.
void linear_blocked(Isa isa, const Product& product, const Blocked& weights, const void* x, bool x_float32,
                    const Threads& threads);

// The same for groups of rows with matrices of their own, which all have the same formats.
void grouped_blocked(Isa isa, const Product& product, const Groups& groups, const Blocked& weights, const void* x,
                     bool x_float32, const Threads& threads);

// Columns of a matrix, as rows of bfloat16 or float32 [columns, inner]: those of an embedding, whose tokens are columns. One
// that there is not becomes the last.
void look_up_blocked(const Blocked& weights, int64_t panels, int64_t inner, const int32_t* columns, int64_t count,
                     void* out, bool out_float32, const Threads& threads);

// A tensor of a GGUF file, [rows, inner] in blocks of one format, to panels: column i is row rows[i] of the tensor. There
// are columns in sixteens, but for the last.
struct StoredTensor {
  Format format;
  int64_t inner, columns;
  const uint8_t* data;
  const int32_t* rows;
};
int64_t stored_row_bytes(Format format, int64_t inner);
void pack_stored(const StoredTensor& tensor, uint8_t* panels);

// The nearest there is, by squares, to a matrix of bfloat16 or float32: kQ4_1 or kQ8_0.
void pack_nearest(Isa isa, const Matrix& matrix, Format format, uint8_t* panels, const Threads& threads);

// Rows of activations, sixteen a tile; of each block of a tile the values, [row][value], and what belongs to them.
constexpr int64_t kTileRows = 16;
struct ActivationBlock {
  int8_t values[kTileRows][kBlock];
  float scale[kTileRows];
  float sum[kTileRows];                           // of the values, times their scale
  float low_sum[kTileRows], high_sum[kTileRows];  // of the first 16 and the others
};

// Makes the blocks of one tile from its rows, up to 16; what would be those of other rows stays as it is.
void quantize_tile(Isa isa, const void* x, bool float32, int64_t rows, int64_t inner, ActivationBlock* blocks);

// Some rows of a tile by one panel, to out[row][column].
using RunBlockedTile = void (*)(const uint8_t* panel, int64_t inner, const ActivationBlock* x, int64_t first_row,
                                float (*out)[kPanel]);

// For 2^i rows.
RunBlockedTile blocked_tile(Isa isa, Format format, int log2_rows);
constexpr int kMaxLog2Rows = 4;

}  // namespace quire
