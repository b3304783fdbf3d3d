#include "linear.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

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

// By the bytes of a weight.
RunPiece choose(Isa isa, int64_t itemsize) {
#if QUIRE_X86
  constexpr RunPiece kPieces[kNumIsas][3] = {{plain_int8, plain_bf16, plain_f32},
                                             {avx2_int8, avx2_bf16, avx2_f32},
                                             {avx512_int8, avx512_bf16, avx512_f32},
                                             {dot_int8, avx512_bf16, avx512_f32},
                                             {dot_int8, dot_bf16, avx512_f32},
                                             {amx_int8, amx_bf16, avx512_f32}};
  return kPieces[static_cast<int>(isa)][itemsize / 2];
#else
  (void)isa;
  return itemsize == 1 ? plain_int8 : itemsize == 2 ? plain_bf16 : plain_f32;
#endif
}

// -- cutting the work -----------------------------------------------------------------------------------------------

// Bytes of weights times rows below which waking another thread costs more than it saves.
constexpr int64_t kAlone = 64 << 10;
// Rows of x that stay in a core's second cache while panel after panel passes over them.
constexpr int64_t kRowBytes = 768 << 10;

// AMX takes 32 rows by two panels, all others as many rows as they have registers for by up to four.
bool has_tiles(RunPiece run) {
#if QUIRE_X86
  return run == amx_int8 || run == amx_bf16;
#else
  (void)run;
  return false;
#endif
}

// One product, or one group's part of a grouped one: some rows by all panels, cut into pieces.
struct Part {
  RunPiece run;
  ProductPiece whole;
  ExpandPanels expand;
  int64_t rows_at_once, panels_at_once, row_tasks, panel_tasks;

  Part(RunPiece run, const ProductPiece& piece, ExpandPanels expand = nullptr)
      : run(run), whole(piece), expand(expand) {
    const int64_t panels = num_panels(piece.product->columns), num_rows = piece.end_row - piece.first_row;
    const int64_t at_once = has_tiles(run) ? 32 : 12, most = std::max<int64_t>(64, kRowBytes / piece.x_stride);
    rows_at_once = round_up(ceil_div(num_rows, ceil_div(num_rows, most)), at_once);
    panels_at_once = num_rows > 64 && has_tiles(run) ? 2 : 4;
    if (panels * piece.lines * kLine * num_rows < kAlone) panels_at_once = panels;
    row_tasks = ceil_div(num_rows, rows_at_once);
    panel_tasks = ceil_div(panels, panels_at_once);
  }

  int64_t num_tasks() const { return row_tasks * panel_tasks; }

  ProductPiece piece(int64_t index) const {
    ProductPiece piece = whole;
    piece.first_row += index / panel_tasks * rows_at_once;
    piece.end_row = std::min(whole.end_row, piece.first_row + rows_at_once);
    piece.first_panel = index % panel_tasks * panels_at_once;
    piece.end_panel = std::min(num_panels(whole.product->columns), piece.first_panel + panels_at_once);
    return piece;
  }
};

// Panels stay in the thread's second cache between the two.
void run_expanded(const Part& part, ProductPiece piece) {
  static thread_local std::vector<char> memory;
  const int64_t panel_bytes = piece.lines * kLine, bytes = (piece.end_panel - piece.first_panel) * panel_bytes + kLine;
  if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(bytes);
  char* panels = memory.data() + (-reinterpret_cast<intptr_t>(memory.data()) & (kLine - 1));
  part.expand(piece, panels);
  Product product = *piece.product;
  product.packed = panels;
  piece.panels_before = piece.first_panel;
  piece.product = &product;
  part.run(piece);
}

void run_parts(const std::vector<Part>& parts, const Threads& threads) {
  std::vector<int64_t> ends;  // of each part's tasks
  ends.reserve(parts.size());
  for (const Part& part : parts) ends.push_back((ends.empty() ? 0 : ends.back()) + part.num_tasks());
  if (ends.empty()) return;
  const auto part_of = [&](int64_t task) { return std::upper_bound(ends.begin(), ends.end(), task) - ends.begin(); };
  const auto piece_of = [&](int64_t task) {
    const int64_t part = part_of(task);
    return parts[part].piece(task - (ends[part] - parts[part].num_tasks()));
  };
  run_ahead(threads, ends.back(), [&](int64_t now, int64_t next) {
    ProductPiece piece = piece_of(now);
    const Part& part = parts[part_of(now)];
    if (part.expand) {
      run_expanded(part, piece);
      return;
    }
    if (next < ends.back()) {
      const ProductPiece following = piece_of(next);
      piece.next = following.panel(following.first_panel);
      piece.next_end = following.panel(following.end_panel);
    }
    part.run(piece);
  });
}

// -- what is multiplied ---------------------------------------------------------------------------------------------

constexpr int64_t kValuesAtOnce = 32 << 10;  // of activations, copied or quantised by one task

// Rows of x, bfloat16 or float32, as the products read them: the inner dimension padded with zeros, and widened to float32
// where the machine has no products of bfloat16. Copied only where it has to be.
class FloatRows {
 public:
  FloatRows(Isa isa, const void* x, bool float32, int64_t rows, int64_t inner, const Threads& threads)
      : itemsize_(float32 ? sizeof(float) : sizeof(uint16_t)),
        widen_(!float32 && widens(isa)),
        padded_(padded_inner(inner, itemsize_)),
        data_(static_cast<const char*>(x)),
        copy_(padded_ == inner && !widen_ ? 0 : rows * stride()) {
    if (padded_ == inner && !widen_) return;
    const int64_t rows_at_once = std::max<int64_t>(1, kValuesAtOnce / padded_);
    threads.run(ceil_div(rows, rows_at_once), [&](int64_t task) {
      for (int64_t row = task * rows_at_once; row < std::min(rows, (task + 1) * rows_at_once); ++row) {
        const char* from = data_ + row * inner * itemsize_;
        char* to = copy_.data() + row * stride();
        const int64_t bytes = inner * (widen_ ? sizeof(float) : itemsize_);
        if (widen_) {
          for (int64_t i = 0; i < inner; ++i)
            reinterpret_cast<float*>(to)[i] = to_float(reinterpret_cast<const Bf16*>(from)[i]);
        } else {
          std::memcpy(to, from, bytes);
        }
        std::memset(to + bytes, 0, stride() - bytes);
      }
    });
    data_ = copy_.data();
  }

  ProductPiece piece(const Product& product) const {
    const int64_t lines = num_lines(product.inner, itemsize_);
    return {data_, stride(), lines, 0, product.rows, 0, 0, nullptr, nullptr, &product, nullptr, nullptr};
  }

 private:
  // Of widened rows an odd number of quarters of a kilobyte: rows that are multiplied together are read side by side, and if
  // they were a multiple of 4 KB apart would drive each other out of the first cache.
  int64_t stride() const { return widen_ ? round_up(padded_ * sizeof(float) - 256, 512) + 256 : padded_ * itemsize_; }

  int64_t itemsize_;
  bool widen_;
  int64_t padded_;
  const char* data_;
  Scratch copy_;
};

// Rows of x as int8.
class Int8Rows {
 public:
  Int8Rows(Isa isa, const Product& product, const void* x, bool x_float32, int64_t rows, const Threads& threads)
      : padded_(padded_inner(product.inner, sizeof(int8_t))),
        values_(kTerms * rows * padded_),
        scales_(kTerms * rows * sizeof(float)) {
    const Activations activations{x,      x_float32, product.inner, padded_, reinterpret_cast<int8_t*>(values_.data()),
                                  scale()};
    const int64_t rows_at_once = std::max<int64_t>(1, kValuesAtOnce / padded_);
    threads.run(ceil_div(rows, rows_at_once), [&](int64_t task) {
      quantize(isa, activations, task * rows_at_once, std::min(rows, (task + 1) * rows_at_once));
    });
  }

  ProductPiece piece(const Product& product, const float* column_scale) const {
    return {values_.data(), padded_, padded_ / 4, 0,       kTerms * product.rows, 0, 0,
            nullptr,        nullptr, &product,    scale(), column_scale};
  }

 private:
  float* scale() const { return reinterpret_cast<float*>(scales_.data()); }

  int64_t padded_;
  Scratch values_, scales_;
};

// A tile of one token is nearly empty. (Sums of integers are the same in any order; those of bfloat16 would not be.)
Part int8_part(Isa isa, const ProductPiece& whole) {
  const bool one = whole.end_row - whole.first_row == kTerms;
  return Part(choose(one ? std::min(isa, Isa::kAvx512Bf16) : isa, sizeof(int8_t)), whole);
}

// The rows of one group, and the product with its own weights.
struct Group {
  int64_t index, first_row, end_row;
  Product product;
};

// Those that have any rows. `itemsize` is that of packed weights, 0 where there are none.
std::vector<Group> each_group(const Product& product, const Groups& groups, int64_t itemsize) {
  const int64_t bytes = itemsize ? num_panels(product.columns) * num_lines(product.inner, itemsize) * kLine : 0;
  std::vector<Group> found;
  for (int64_t i = 0, row = 0; i < groups.count; row += groups.sizes[i++]) {
    if (groups.sizes[i] == 0) continue;
    found.push_back({i, row, row + groups.sizes[i], product});
    found.back().product.packed = static_cast<const char*>(product.packed) + i * bytes;
  }
  return found;
}

int64_t num_rows(const std::vector<Group>& groups) { return groups.empty() ? 0 : groups.back().end_row; }

// By packed weights of the type of x, or by those in 4 bits if there are any.
void run_groups(Isa isa, const Product& product, const Groups& groups, const void* x, bool float32, const Mxfp4* mxfp4,
                const Threads& threads) {
  const int64_t itemsize = float32 ? sizeof(float) : sizeof(uint16_t);
  const int64_t num_blocks = num_panels(product.columns) * ceil_div(product.inner, kMxfp4Block);
  const std::vector<Group> all = each_group(product, groups, mxfp4 ? 0 : itemsize);
  const FloatRows rows(isa, x, float32, num_rows(all), product.inner, threads);
  std::vector<Part> parts;
  for (const Group& group : all) {
    ProductPiece whole = rows.piece(group.product);
    whole.first_row = group.first_row;
    whole.end_row = group.end_row;
    if (mxfp4) {
      whole.codes = mxfp4->codes + group.index * num_blocks * kMxfp4Codes * kPanel;
      whole.scales = mxfp4->scales + group.index * num_blocks * kPanel;
    }
    parts.emplace_back(choose(isa, itemsize), whole, mxfp4 ? mxfp4_expansion(isa, float32) : nullptr);
  }
  run_parts(parts, threads);
  clear_behind(product, num_rows(all));
}

// Of floats as the bits they are: the sign of a zero does not count.
template <class Bits>
int32_t used_rows(const Bits* x, int64_t rows, int64_t inner) {
  for (; rows; --rows) {
    Bits found = 0;
    for (int64_t i = 0; i < inner; ++i) found |= static_cast<Bits>(x[(rows - 1) * inner + i] << 1);
    if (found) break;
  }
  return static_cast<int32_t>(rows);
}

template <class Value>
void pack_values(const Matrix& matrix, void* packed, const Threads& threads) {
  constexpr int64_t group = 4 / sizeof(Value);
  const int64_t inner = matrix.inner, columns = matrix.columns, lines = num_lines(inner, sizeof(Value));
  const int64_t k_stride = matrix.transposed ? 1 : columns, n_stride = matrix.transposed ? inner : 1;
  const Value* from = static_cast<const Value*>(matrix.data);
  threads.run(num_panels(columns), [&](int64_t panel) {
    Value* to = static_cast<Value*>(packed) + panel * lines * kPanel * group;
    std::memset(to, 0, lines * kLine);
    const int64_t first = panel * kPanel, count = std::min(kPanel, columns - first);
    for (int64_t k = 0; k < inner; ++k) {
      for (int64_t i = 0; i < count; ++i) {
        to[(k / group * kPanel + i) * group + k % group] = from[k * k_stride + (first + i) * n_stride];
      }
    }
  });
}

}  // namespace

void pack(const Matrix& matrix, void* packed, const Threads& threads) {
  if (matrix.itemsize == 4) return pack_values<uint32_t>(matrix, packed, threads);
  if (matrix.itemsize == 2) return pack_values<uint16_t>(matrix, packed, threads);
  pack_values<uint8_t>(matrix, packed, threads);
}

int32_t rows_in_use(const void* x, bool float32, int64_t rows, int64_t inner) {
  return float32 ? used_rows(static_cast<const uint32_t*>(x), rows, inner)
                 : used_rows(static_cast<const uint16_t*>(x), rows, inner);
}

void clear_behind(const Product& product, int64_t first_row) {
  const int64_t bytes = product.columns * (product.out_float32 ? sizeof(float) : sizeof(uint16_t));
  std::memset(static_cast<char*>(product.out) + first_row * bytes, 0, (product.rows - first_row) * bytes);
}

void grouped_float(Isa isa, const Product& product, const Groups& groups, const void* x, bool float32,
                   const Threads& threads) {
  run_groups(isa, product, groups, x, float32, nullptr, threads);
}

void grouped_mxfp4(Isa isa, const Product& product, const Groups& groups, const void* x, bool float32,
                   const Mxfp4& weights, const Threads& threads) {
  run_groups(isa, product, groups, x, float32, &weights, threads);
}

void grouped_int8(Isa isa, const Product& product, const Groups& groups, const void* x, bool x_float32,
                  const float* column_scale, const Threads& threads) {
  const std::vector<Group> all = each_group(product, groups, sizeof(int8_t));
  const Int8Rows rows(isa, product, x, x_float32, num_rows(all), threads);
  std::vector<Part> parts;
  for (const Group& group : all) {
    ProductPiece whole = rows.piece(group.product, column_scale + group.index * product.columns);
    whole.first_row = kTerms * group.first_row;
    whole.end_row = kTerms * group.end_row;
    parts.push_back(int8_part(isa, whole));
  }
  run_parts(parts, threads);
  clear_behind(product, num_rows(all));
}

void linear_bf16(Isa isa, const Product& product, const uint16_t* x, const Threads& threads) {
  const int32_t rows = rows_in_use(x, false, product.rows, product.inner);
  grouped_float(isa, product, {1, &rows}, x, false, threads);
}

void linear_int8(Isa isa, const Product& product, const void* x, bool x_float32, const float* column_scale,
                 const Threads& threads) {
  const int32_t rows = rows_in_use(x, x_float32, product.rows, product.inner);
  grouped_int8(isa, product, {1, &rows}, x, x_float32, column_scale, threads);
}

}  // namespace quire
