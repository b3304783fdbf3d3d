#include "linear.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "linear_piece.h"

namespace quire {
namespace {

// Scratch on a 64-byte boundary.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(static_cast<char*>(::operator new(bytes, std::align_val_t{kLine}))) {}
  ~Scratch() { ::operator delete(data_, std::align_val_t{kLine}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return data_; }

 private:
  char* data_;
};

RunPiece choose(Isa isa, bool int8) {
#if QUIRE_X86
  constexpr RunPiece kPieces[kNumIsas][2] = {{plain_bf16, plain_int8},
                                             {avx2_bf16, avx2_int8},
                                             {avx512_bf16, avx512_int8},
                                             {dot_bf16, dot_int8},
                                             {amx_bf16, amx_int8}};
  return kPieces[static_cast<int>(isa)][int8];
#else
  (void)isa;
  return int8 ? plain_int8 : plain_bf16;
#endif
}

// -- cutting the work -----------------------------------------------------------------------------------------------

// Bytes of weights times rows below which waking another thread costs more than it saves.
constexpr int64_t kAlone = 64 << 10;
// Rows of x that stay in a core's second cache while panel after panel passes over them.
constexpr int64_t kRowBytes = 768 << 10;

void run_pieces(RunPiece run_piece, ProductPiece whole, const Threads& threads) {
  const Product& product = *whole.product;
  const int64_t panels = num_panels(product.columns);
  const int64_t row_bytes = whole.x_stride();
  const int64_t rows_at_once = std::max<int64_t>(64, kRowBytes / row_bytes / 32 * 32);
  const int64_t num_rows = whole.end_row, row_tasks = (num_rows + rows_at_once - 1) / rows_at_once;
  int64_t panels_at_once = num_rows <= 64 ? 4 : 2;
  if (panels * whole.lines * kLine * num_rows < kAlone) panels_at_once = panels;
  const int64_t panel_tasks = (panels + panels_at_once - 1) / panels_at_once;
  const auto piece_of = [&](int64_t index) {
    ProductPiece piece = whole;
    const int64_t rows = index / panel_tasks, columns = index % panel_tasks;
    piece.first_row = rows * rows_at_once;
    piece.end_row = std::min(num_rows, piece.first_row + rows_at_once);
    piece.first_panel = columns * panels_at_once;
    piece.end_panel = std::min(panels, piece.first_panel + panels_at_once);
    return piece;
  };
  const int64_t num_pieces = row_tasks * panel_tasks;
  run_ahead(threads, num_pieces, [&](int64_t now, int64_t next) {
    ProductPiece piece = piece_of(now);
    if (next < num_pieces) {
      const ProductPiece following = piece_of(next);
      piece.next_panel = following.first_panel;
      piece.next_end_panel = following.end_panel;
    }
    run_piece(piece);
  });
}

constexpr int64_t kValuesAtOnce = 32 << 10;  // of activations, quantised by one task

}  // namespace

void pack(const Matrix& matrix, void* packed, const Threads& threads) {
  const int64_t itemsize = matrix.itemsize, inner = matrix.inner, columns = matrix.columns;
  const int64_t group = 4 / itemsize, lines = num_lines(inner, itemsize);
  const int64_t k_stride = matrix.transposed ? 1 : columns, n_stride = matrix.transposed ? inner : 1;
  const char* from = static_cast<const char*>(matrix.data);
  threads.run(num_panels(columns), [&](int64_t panel) {
    char* to = static_cast<char*>(packed) + panel * lines * kLine;
    std::memset(to, 0, lines * kLine);
    const int64_t first = panel * kPanel, count = std::min(kPanel, columns - first);
    for (int64_t k = 0; k < inner; ++k) {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(to + ((k / group * kPanel + i) * group + k % group) * itemsize,
                    from + (k * k_stride + (first + i) * n_stride) * itemsize, itemsize);
      }
    }
  });
}

void linear_bf16(Isa isa, const Product& product, const uint16_t* x, const Threads& threads) {
  const int64_t padded = padded_inner(product.inner, sizeof(uint16_t));
  const char* rows = reinterpret_cast<const char*>(x);
  const bool copy = padded != product.inner;
  Scratch scratch(copy ? product.rows * padded * sizeof(uint16_t) : 0);
  if (copy) {
    for (int64_t row = 0; row < product.rows; ++row) {
      uint16_t* to = reinterpret_cast<uint16_t*>(scratch.data()) + row * padded;
      std::memcpy(to, x + row * product.inner, product.inner * sizeof(uint16_t));
      std::memset(to + product.inner, 0, (padded - product.inner) * sizeof(uint16_t));
    }
    rows = scratch.data();
  }
  const ProductPiece whole{rows, padded / 2, 0, product.rows, 0, 0, 0, 0, &product, nullptr, nullptr};
  run_pieces(choose(isa, false), whole, threads);
}

void linear_int8(Isa isa, const Product& product, const void* x, bool x_float32, const float* column_scale,
                 const Threads& threads) {
  const int64_t padded = padded_inner(product.inner, sizeof(int8_t));
  Scratch scratch(kTerms * product.rows * padded), scales(kTerms * product.rows * sizeof(float));
  float* row_scale = reinterpret_cast<float*>(scales.data());
  const Activations activations{x, x_float32, product.inner, padded, reinterpret_cast<int8_t*>(scratch.data()), row_scale};
  const int64_t rows_at_once = std::max<int64_t>(1, kValuesAtOnce / padded);
  threads.run((product.rows + rows_at_once - 1) / rows_at_once, [&](int64_t task) {
    quantize(isa, activations, task * rows_at_once, std::min(product.rows, (task + 1) * rows_at_once));
  });
  const ProductPiece whole{scratch.data(), padded / 4, 0, kTerms * product.rows, 0, 0, 0, 0, &product, row_scale, column_scale};
  // A tile of one token is nearly empty. (Sums of integers are the same in any order; those of bfloat16 would not be.)
  if (isa == Isa::kAmx && product.rows == 1) isa = Isa::kAvx512Bf16;
  run_pieces(choose(isa, true), whole, threads);
}

}  // namespace quire
