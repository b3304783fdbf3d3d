// The driver's check of blocked weights: from stored bytes and from floats, whole and in groups.
#include "blocked.h"
#include "driver.h"

using namespace driver;
using quire::Format;
using quire::Isa;

namespace {

// Rows of random blocks whose float16 numbers, two bytes of each from `at` on, are between 2^-10 and 2^-3.
std::vector<uint8_t> random_rows(Format format, int64_t rows, int64_t inner) {
  const int64_t row_bytes = quire::stored_row_bytes(format, inner);
  const int64_t unit = quire::has_super_blocks(format) ? quire::kSuperBlock : quire::kBlock;
  const int64_t block_bytes = row_bytes / (inner / unit);
  std::vector<uint8_t> bytes(rows * row_bytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(pick(0, 255));
  for (int64_t start = 0; start < rows * row_bytes; start += block_bytes) {
    const bool two = format == Format::kQ4_1 || format == Format::kQ4_K;
    const int64_t at = format == Format::kQ6_K ? block_bytes - 2 : 0;
    for (int64_t i = 0; i < (two ? 2 : 1); ++i) bytes[start + at + 2 * i + 1] = static_cast<uint8_t>(pick(0x14, 0x2f));
  }
  return bytes;
}

}  // namespace

namespace driver {

// One matmul with blocked weights; returns the worst error as a share of what is allowed: the rounding of x.
double run_blocked(quire::Isa isa, bool narrow) {
  const Format format = static_cast<Format>(pick(0, quire::kNumFormats - 1));
  const bool super = quire::has_super_blocks(format), nearest = !super && format != Format::kQ4_0 && pick(0, 1);
  const int64_t rows = pick_of({pick(1, 6), pick(1, 60)}), columns = pick(1, 50), groups = pick(1, 3);
  const int64_t inner = nearest ? pick(1, 150) : pick(1, 3) * (super ? quire::kSuperBlock : quire::kBlock);
  const int64_t panels = quire::num_panels(columns);
  const std::vector<uint8_t> formats(panels, static_cast<uint8_t>(format));
  const int64_t bytes = quire::blocked_bytes(formats.data(), panels, inner);
  const quire::Threads threads{3, run_on_threads};
  std::unique_ptr<uint8_t[]> packed(new uint8_t[groups * bytes]);
  for (int64_t group = 0; group < groups; ++group) {
    if (nearest) {
      Array matrix(narrow, inner * columns);
      matrix.fill_normal();
      const bool transposed = pick(0, 1);
      quire::pack_nearest(isa, {matrix.bytes.get(), narrow ? 2 : 4, inner, columns, transposed}, format,
                          packed.get() + group * bytes, threads);
    } else {
      const std::vector<uint8_t> data = random_rows(format, columns, inner);
      std::vector<int32_t> order(columns);
      for (int64_t i = 0; i < columns; ++i) order[i] = static_cast<int32_t>(columns - 1 - i);
      quire::pack_stored({format, inner, columns, data.data(), order.data()}, packed.get() + group * bytes);
    }
  }
  Array x(narrow, rows * inner), out(narrow, rows * columns);
  x.fill_normal();
  for (int64_t i = pick_of({rows, pick(0, rows)}) * inner; i < x.size; ++i) x.set(i, 0);  // padding
  for (int64_t i = 0; i < out.size; ++i) out.set(i, NAN);
  const quire::Product product{rows, inner, columns, nullptr, out.bytes.get(), !narrow};
  const quire::Blocked weights{reinterpret_cast<const Format*>(formats.data()), packed.get(), bytes};
  std::vector<int32_t> sizes(groups, static_cast<int32_t>(rows / groups));
  if (groups == 1) {
    quire::linear_blocked(isa, product, weights, x.bytes.get(), !narrow, threads);
  } else {
    quire::grouped_blocked(isa, product, {groups, sizes.data()}, weights, x.bytes.get(), !narrow, threads);
  }

  std::vector<int32_t> all(columns);
  for (int64_t i = 0; i < columns; ++i) all[i] = static_cast<int32_t>(i);
  double worst = 0;
  for (int64_t group = 0; group < groups; ++group) {
    Array decoded(false, columns * inner);
    const quire::Blocked one{weights.formats, packed.get() + group * bytes, bytes};
    quire::look_up_blocked(one, panels, inner, all.data(), columns, decoded.bytes.get(), true, threads);
    for (int64_t row = group * sizes[group]; row < (group + 1) * sizes[group]; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        double want = 0, allowed = 1e-4;
        for (int64_t first = 0; first < inner; first += quire::kBlock) {
          const int64_t end = std::min(first + quire::kBlock, inner);
          double largest = 0, magnitude = 0;
          for (int64_t k = first; k < end; ++k) {
            want += x.get(row * inner + k) * decoded.get(column * inner + k);
            largest = std::max(largest, std::abs(x.get(row * inner + k)));
            magnitude += std::abs(decoded.get(column * inner + k));
          }
          allowed += largest * magnitude * (0.51 / 127 + 1e-5);
        }
        const double rounding = narrow ? std::abs(want) / 128 : 0;
        worst = worse(worst, std::abs(out.get(row * columns + column) - want) / (allowed + rounding));
      }
    }
  }
  for (int64_t i = groups * sizes[0] * columns; i < rows * columns; ++i) worst = worse(worst, out.get(i) == 0 ? 0 : 2);
  return worst;
}

}  // namespace driver
