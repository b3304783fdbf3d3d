#include "blocked.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "bf16.h"

namespace quire {
namespace {

// Rows that stay in a core's second cache while panel after panel passes over them, in bytes.
constexpr int64_t kRowBytes = 512 << 10;
// Codes times rows below which waking another thread costs more than it saves.
constexpr int64_t kAlone = 64 << 10;
constexpr int64_t kPanelsAtOnce = 4;

// Rows next to each other that are multiplied with one matrix.
struct Span {
  int64_t first_row, end_row;
  const uint8_t* panels;

  int64_t num_tiles() const { return ceil_div(end_row - first_row, kTileRows); }
};

void store(const Product& product, int64_t first_row, int64_t rows, int64_t panel, const float (*values)[kPanel]) {
  const int64_t first = panel * kPanel, count = std::min(kPanel, product.columns - first);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t start = (first_row + r) * product.columns + first;
    if (product.out_float32) {
      std::memcpy(static_cast<float*>(product.out) + start, values[r], count * sizeof(float));
    } else {
      Bf16* out = static_cast<Bf16*>(product.out) + start;
      for (int64_t i = 0; i < count; ++i) out[i] = from_float<Bf16>(values[r][i]);
    }
  }
}

class Run {
 public:
  Run(Isa isa, const Product& product, const Format* formats, std::vector<Span> spans)
      : isa_(isa), product_(product), formats_(formats), spans_(std::move(spans)), blocks_(num_blocks(product.inner)) {
    int64_t tiles = 0;
    for (const Span& span : spans_) {
      first_tiles_.push_back(tiles);
      tiles += span.num_tiles();
    }
    first_tiles_.push_back(tiles);
    x_.reset(new ActivationBlock[tiles * blocks_]);
    int64_t at = 0;
    for (int64_t i = 0; i < num_panels(product.columns); ++i) {
      offsets_.push_back(at);
      at += panel_layout(formats[i], product.inner).end;
    }
  }

  void quantize(const void* x, bool float32, const Threads& threads) {
    threads.run(first_tiles_.back(), [&](int64_t tile) {
      const Span& span = span_of(tile);
      const int64_t row = first_row(span, tile), itemsize = float32 ? sizeof(float) : sizeof(uint16_t);
      quantize_tile(isa_, static_cast<const char*>(x) + row * product_.inner * itemsize, float32,
                    std::min(kTileRows, span.end_row - row), product_.inner, x_.get() + tile * blocks_);
    });
  }

  // A task is some tiles of one span by some panels.
  void multiply(const Threads& threads) {
    struct Task {
      int64_t first_tile, end_tile, first_panel, end_panel;
    };
    const int64_t panels = num_panels(product_.columns);
    const int64_t tiles_at_once =
        std::max<int64_t>(1, kRowBytes / (blocks_ * static_cast<int64_t>(sizeof(ActivationBlock))));
    std::vector<Task> tasks;
    for (size_t i = 0; i < spans_.size(); ++i) {
      const int64_t rows = spans_[i].end_row - spans_[i].first_row;
      const int64_t at_once = product_.inner * product_.columns * rows < kAlone ? panels : kPanelsAtOnce;
      for (int64_t tile = first_tiles_[i]; tile < first_tiles_[i + 1]; tile += tiles_at_once) {
        for (int64_t panel = 0; panel < panels; panel += at_once) {
          tasks.push_back(
              {tile, std::min(tile + tiles_at_once, first_tiles_[i + 1]), panel, std::min(panel + at_once, panels)});
        }
      }
    }
    threads.run(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
      const Task& task = tasks[i];
      const Span& span = span_of(task.first_tile);
      for (int64_t panel = task.first_panel; panel < task.end_panel; ++panel) {
        for (int64_t tile = task.first_tile; tile < task.end_tile; ++tile) multiply_tile(span, tile, panel);
      }
    });
  }

 private:
  const Span& span_of(int64_t tile) const {
    return spans_[std::upper_bound(first_tiles_.begin(), first_tiles_.end(), tile) - first_tiles_.begin() - 1];
  }
  int64_t first_row(const Span& span, int64_t tile) const {
    return span.first_row + (tile - first_tiles_[&span - spans_.data()]) * kTileRows;
  }

  void multiply_tile(const Span& span, int64_t tile, int64_t panel) const {
    const int64_t row = first_row(span, tile), rows = std::min(kTileRows, span.end_row - row);
    alignas(kLine) float out[kTileRows][kPanel];
    for (int64_t done = 0; done < rows;) {
      int log2_rows = kMaxLog2Rows;
      while ((int64_t{1} << log2_rows) > rows - done) --log2_rows;
      blocked_tile(isa_, formats_[panel], log2_rows)(span.panels + offsets_[panel], product_.inner,
                                                     x_.get() + tile * blocks_, done, out + done);
      done += int64_t{1} << log2_rows;
    }
    store(product_, row, rows, panel, out);
  }

  Isa isa_;
  const Product& product_;
  const Format* formats_;
  std::vector<Span> spans_;
  int64_t blocks_;
  std::vector<int64_t> first_tiles_;  // of each span, and where the last one's end
  std::vector<int64_t> offsets_;      // of each panel, in bytes
  std::unique_ptr<ActivationBlock[]> x_;
};

}  // namespace

int64_t blocked_bytes(const uint8_t* formats, int64_t panels, int64_t inner) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < panels; ++i) {
    const Format format = static_cast<Format>(formats[i]);
    if (formats[i] >= kNumFormats || (has_super_blocks(format) && inner % kSuperBlock)) return -1;
    bytes += panel_layout(format, inner).end;
  }
  return bytes;
}

void grouped_blocked(Isa isa, const Product& product, const Groups& groups, const Blocked& weights, const void* x,
                     bool x_float32, const Threads& threads) {
  std::vector<Span> spans;
  int64_t row = 0;
  for (int64_t i = 0; i < groups.count; row += groups.sizes[i++]) {
    if (groups.sizes[i]) spans.push_back({row, row + groups.sizes[i], weights.panels + i * weights.bytes});
  }
  if (!spans.empty()) {
    Run run(isa, product, weights.formats, spans);
    run.quantize(x, x_float32, threads);
    run.multiply(threads);
  }
  clear_behind(product, row);
}

void linear_blocked(Isa isa, const Product& product, const Blocked& weights, const void* x, bool x_float32,
                    const Threads& threads) {
  const int32_t rows = rows_in_use(x, x_float32, product.rows, product.inner);
  grouped_blocked(isa, product, {1, &rows}, weights, x, x_float32, threads);
}

}  // namespace quire
