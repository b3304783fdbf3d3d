// Panels of blocked weights, from tensors of GGUF files and from matrices of floats.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bf16.h"
#include "blocked.h"
#include "vector.h"

namespace quire {
namespace {

// -- as they are stored ---------------------------------------------------------------------------------------------

// Bytes of a block of 32, of a K format of 256, as llama.cpp stores it.
constexpr int64_t kStoredBytes[kNumFormats] = {2 + 16, 2 + 2 + 16, 2 + 32, 2 + 2 + 12 + 128, 128 + 64 + 16 + 2};

// Four codes, a byte each.
uint32_t four(const uint8_t* codes) {
  uint32_t word;
  std::memcpy(&word, codes, sizeof(word));
  return word;
}
constexpr uint32_t kEach = 0x01010101;  // times a byte: it in all four

// One column of a panel.
template <Format kFormat>
struct Column {
  PanelLayout at;
  uint8_t* panel;
  int64_t index;

  // Of eight lines of a block the i-th, which has its values 4 i to 4 i + 3, in four lines of low bits; and those above.
  void put_codes(int64_t block, int64_t line, uint32_t codes) const {
    put_line(block * 4 + line % 4, (codes & 15 * kEach) << (line < 4 ? 0 : 4));
    if constexpr (kFormat == Format::kQ6_K)
      put_line(at.high / kLine + block * 2 + line / 4, (codes >> 4 & 3 * kEach) << (line % 4 * 2));
  }
  // To bits that are zero.
  void put_line(int64_t line, uint32_t bits) const {
    uint8_t* to = panel + line * kLine + index * 4;
    bits |= four(to);
    std::memcpy(to, &bits, sizeof(bits));
  }
  void put_half(int64_t part, int64_t i, const uint8_t* half) const {
    std::memcpy(panel + part + i * kHalves + index * 2, half, 2);
  }
  void put_byte(int64_t part, int64_t i, uint8_t byte) const { panel[part + i * kPanel + index] = byte; }
};

template <Format kFormat>
QUIRE_INLINE void put_block(Column<kFormat> to, int64_t block, const uint8_t* from) {
  to.put_half(to.at.scales, block, from);
  from += 2;
  if constexpr (kFormat == Format::kQ8_0) {
    for (int64_t line = 0; line < 8; ++line) to.put_line(block * 8 + line, four(from + 4 * line) ^ 128 * kEach);
    return;
  }
  if constexpr (kFormat == Format::kQ4_1) {
    to.put_half(to.at.minima, block, from);
    from += 2;
  }
  // Two codes share a byte in the file as they do in a panel: the i-th and the (i + 16)-th.
  for (int64_t line = 0; line < 4; ++line) to.put_line(block * 4 + line, four(from + 4 * line));
}

// Eight scales and eight minima of 6 bits are in 12 bytes; the high bits of the last four are over those of the first.
QUIRE_INLINE void put_block(Column<Format::kQ4_K> to, int64_t super, const uint8_t* from) {
  to.put_half(to.at.supers, 2 * super, from);
  to.put_half(to.at.supers, 2 * super + 1, from + 2);
  const uint8_t *packed = from + 4, *codes = from + 16;
  for (int64_t i = 0; i < 8; ++i) {
    const int64_t block = super * 8 + i;
    const uint8_t scale = i < 4 ? packed[i] & 63 : (packed[i + 4] & 15) | packed[i - 4] >> 6 << 4;
    const uint8_t minimum = i < 4 ? packed[i + 4] & 63 : packed[i + 4] >> 4 | packed[i] >> 6 << 4;
    to.put_byte(to.at.scales, block, scale);
    to.put_byte(to.at.minima, block, minimum);
    for (int64_t line = 0; line < 8; ++line)
      to.put_codes(block, line, four(codes + i / 2 * kBlock + 4 * line) >> (i % 2 * 4));
  }
}

QUIRE_INLINE void put_block(Column<Format::kQ6_K> to, int64_t super, const uint8_t* from) {
  const uint8_t *low = from, *high = from + 128, *scales = from + 192;
  to.put_half(to.at.supers, super, from + 208);
  for (int64_t i = 0; i < 8; ++i) {
    const int64_t block = super * 8 + i, half = i / 4, quarter = i % 4;
    to.put_byte(to.at.scales, 2 * block, scales[2 * i]);
    to.put_byte(to.at.scales, 2 * block + 1, scales[2 * i + 1]);
    for (int64_t line = 0; line < 8; ++line) {
      const uint32_t low_bits = four(low + half * 64 + quarter % 2 * 32 + 4 * line) >> (quarter / 2 * 4) & 15 * kEach;
      const uint32_t high_bits = four(high + half * 32 + 4 * line) >> (quarter * 2) & 3 * kEach;
      to.put_codes(block, line, low_bits | high_bits << 4);
    }
  }
}

template <Format kFormat>
void pack_columns(const StoredTensor& tensor, uint8_t* panels) {
  const PanelLayout at = panel_layout(kFormat, tensor.inner);
  const int64_t row_bytes = stored_row_bytes(kFormat, tensor.inner),
                block_bytes = kStoredBytes[static_cast<int>(kFormat)];
  for (int64_t index = 0; index < num_panels(tensor.columns); ++index) {
    uint8_t* panel = panels + index * at.end;
    std::memset(panel, 0, at.end);
    const int64_t first = index * kPanel, count = std::min(kPanel, tensor.columns - first);
    for (int64_t block = 0; block < row_bytes / block_bytes; ++block) {
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t* row = tensor.data + tensor.rows[first + i] * row_bytes;
        put_block(Column<kFormat>{at, panel, i}, block, row + block * block_bytes);
      }
    }
  }
}

// -- the nearest to floats ------------------------------------------------------------------------------------------

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number

QUIRE_INLINE Floats rounded_to_whole(Floats x) { return (x + kRounder) - kRounder; }
QUIRE_INLINE Floats smaller(Floats x, Floats y) { return x < y ? x : y; }
QUIRE_INLINE Floats larger(Floats x, Floats y) { return x > y ? x : y; }

// float16 by rounding to nearest even, and what it then is. Numbers of weights are far below its largest.
QUIRE_INLINE uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000;
  float magnitude = std::fabs(x);
  if (!(magnitude < 65520.0f)) return static_cast<uint16_t>(sign | (x != x ? 0x7e00 : 0x7c00));
  if (magnitude < 0x1p-14f)
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f)));
  std::memcpy(&bits, &magnitude, sizeof(bits));
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((bits >> 13) - (112 << 10)));
}

QUIRE_INLINE float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 0x3ff;
  float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY) : static_cast<float>(fraction) * 0x1p-24f;
  if (exponent > 0 && exponent < 31) {
    const uint32_t bits = static_cast<uint32_t>(exponent + 112) << 23 | static_cast<uint32_t>(fraction) << 13;
    std::memcpy(&magnitude, &bits, sizeof(magnitude));
  }
  return half & 0x8000 ? -magnitude : magnitude;
}

// One column of a panel, to be read.
struct ConstColumn {
  Format format;
  PanelLayout at;
  const uint8_t* panel;
  int64_t index;

  float half(int64_t part, int64_t i) const {
    uint16_t bits;
    std::memcpy(&bits, panel + part + i * kHalves + index * 2, sizeof(bits));
    return from_half(bits);
  }
  uint8_t byte(int64_t part, int64_t i) const { return panel[part + i * kPanel + index]; }
  float code(int64_t block, int64_t k) const {
    const int64_t line = k / 4, at_byte = index * 4 + k % 4;
    if (format == Format::kQ8_0) return static_cast<float>(panel[(block * 8 + line) * kLine + at_byte] - 128);
    const int four = panel[(block * 4 + line % 4) * kLine + at_byte] >> (line < 4 ? 0 : 4) & 15;
    if (format != Format::kQ6_K) return static_cast<float>(format == Format::kQ4_0 ? four - 8 : four);
    return static_cast<float>(
        (four | (panel[at.high + (block * 2 + line / 4) * kLine + at_byte] >> (line % 4 * 2) & 3) << 4) - 32);
  }
  float weight(int64_t block, int64_t k) const {
    const int64_t super = block / (kSuperBlock / kBlock);
    if (format == Format::kQ4_K) {
      const float minimum = half(at.supers, 2 * super + 1) * static_cast<float>(byte(at.minima, block));
      return half(at.supers, 2 * super) * static_cast<float>(byte(at.scales, block)) * code(block, k) - minimum;
    }
    if (format == Format::kQ6_K) {
      const auto scale = static_cast<int8_t>(byte(at.scales, 2 * block + k / 16));
      return half(at.supers, super) * static_cast<float>(scale) * code(block, k);
    }
    const float product = half(at.scales, block) * code(block, k);
    return format == Format::kQ4_1 ? product + half(at.minima, block) : product;
  }
};

struct Halved {
  uint16_t halves[kPanel];
  Floats values;
};
QUIRE_INLINE Halved halved(Floats x) {
  Halved out;
  for (int i = 0; i < kPanel; ++i) {
    out.halves[i] = to_half(x[i]);
    out.values[i] = from_half(out.halves[i]);
  }
  return out;
}

QUIRE_INLINE Floats inverse_of(Floats scale) { return scale > 0.0f ? 1.0f / scale : Floats{}; }

QUIRE_INLINE Floats codes_of(Floats x, Floats minimum, Floats inverse) {
  return smaller(larger(rounded_to_whole((x - minimum) * inverse), Floats{}), Floats{} + 15.0f);
}

struct Line {
  Floats scale, minimum;
};

// Scale and minimum of 16 columns' blocks. From those that reach from the least to the largest weight, and from narrower
// ones which cut off the ends, each moved to where the squares of the errors of its codes are least: the best.
QUIRE_INLINE Line best_line(const Floats (&x)[kBlock]) {
  Floats low = x[0], high = x[0], sum = {};
  for (const Floats& value : x) {
    low = smaller(low, value);
    high = larger(high, value);
    sum += value;
  }
  const Floats broken = sum * 0.0f;  // not a number where a weight is none, which then stays to be seen
  Line best = {(high - low) * (1.0f / 15), low};
  Floats least = Floats{} + INFINITY;
  for (int step = 0; step < 8; ++step) {
    const Floats cut = (high - low) * (0.02f * static_cast<float>(step));
    const Floats first = low + cut, inverse = inverse_of((high - low - 2.0f * cut) * (1.0f / 15));
    Floats codes = {}, squares = {}, products = {};
    for (const Floats& value : x) {
      const Floats code = codes_of(value, first, inverse);
      codes += code;
      squares += code * code;
      products += code * value;
    }
    const Floats spread = squares * static_cast<float>(kBlock) - codes * codes;
    const Floats scale = spread > 0.0f ? (products * static_cast<float>(kBlock) - codes * sum) / spread : best.scale;
    const Floats minimum = (sum - scale * codes) * (1.0f / kBlock);
    Floats error = {};
    const Floats again = inverse_of(scale);
    for (const Floats& value : x) {
      const Floats off = codes_of(value, minimum, again) * scale + minimum - value;
      error += off * off;
    }
    best.scale = error < least ? scale : best.scale;
    best.minimum = error < least ? minimum : best.minimum;
    least = smaller(error, least);
  }
  return {best.scale + broken, best.minimum + broken};
}

QUIRE_INLINE void put_codes(uint8_t* codes, int64_t block, Format format, const Floats (&x)[kBlock]) {
  for (int64_t k = 0; k < kBlock; ++k) {
    const int64_t line = k / 4;
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t byte = i * 4 + k % 4;
      const uint8_t code = static_cast<uint8_t>(static_cast<int32_t>(x[k][i]));
      if (format == Format::kQ8_0) {
        codes[(block * 8 + line) * kLine + byte] = code;
      } else {
        codes[(block * 4 + line % 4) * kLine + byte] |= static_cast<uint8_t>(code << (line < 4 ? 0 : 4));
      }
    }
  }
}

QUIRE_INLINE void nearest_block(Format format, const PanelLayout& at, uint8_t* panel, int64_t block,
                                Floats (&x)[kBlock]) {
  if (format == Format::kQ8_0) {
    Floats largest = {}, sum = {};
    for (const Floats& value : x) {
      largest = larger(largest, larger(value, -value));
      sum += value;
    }
    const Halved scale = halved(largest * (1.0f / 127) + sum * 0.0f);
    std::memcpy(panel + at.scales + block * kHalves, scale.halves, kHalves);
    const Floats inverse = inverse_of(scale.values);
    for (Floats& value : x)
      value = smaller(larger(rounded_to_whole(value * inverse), Floats{} - 127.0f), Floats{} + 127.0f) + 128.0f;
  } else {
    const Line line = best_line(x);
    const Halved scale = halved(line.scale), minimum = halved(line.minimum);
    std::memcpy(panel + at.scales + block * kHalves, scale.halves, kHalves);
    std::memcpy(panel + at.minima + block * kHalves, minimum.halves, kHalves);
    const Floats inverse = inverse_of(scale.values);
    for (Floats& value : x) value = codes_of(value, minimum.values, inverse);
  }
  put_codes(panel, block, format, x);
}

template <class Value>
QUIRE_INLINE void nearest_panel(const Matrix& matrix, Format format, int64_t index, uint8_t* panel) {
  const PanelLayout at = panel_layout(format, matrix.inner);
  std::memset(panel, 0, at.end);
  const auto* from = static_cast<const Value*>(matrix.data);
  const int64_t k_stride = matrix.transposed ? 1 : matrix.columns, n_stride = matrix.transposed ? matrix.inner : 1;
  const int64_t first = index * kPanel, count = std::min(kPanel, matrix.columns - first);
  for (int64_t block = 0; block < num_blocks(matrix.inner); ++block) {
    Floats x[kBlock] = {};
    const int64_t length = std::min(kBlock, matrix.inner - block * kBlock);
    for (int64_t k = 0; k < length; ++k) {
      for (int64_t i = 0; i < count; ++i)
        x[k][i] = to_float(from[(block * kBlock + k) * k_stride + (first + i) * n_stride]);
    }
    nearest_block(format, at, panel, block, x);
  }
}

using NearestPanel = void (*)(const Matrix&, Format, int64_t, uint8_t*);
template <class Value>
QUIRE_PLAIN void plain_panel(const Matrix& matrix, Format format, int64_t index, uint8_t* panel) {
  nearest_panel<Value>(matrix, format, index, panel);
}
#if QUIRE_X86
template <class Value>
QUIRE_AVX2 void avx2_panel(const Matrix& matrix, Format format, int64_t index, uint8_t* panel) {
  nearest_panel<Value>(matrix, format, index, panel);
}
template <class Value>
QUIRE_AVX512 void avx512_panel(const Matrix& matrix, Format format, int64_t index, uint8_t* panel) {
  nearest_panel<Value>(matrix, format, index, panel);
}
#endif

template <class Value>
NearestPanel panel_function(Isa isa) {
#if QUIRE_X86
  if (isa >= Isa::kAvx512) return avx512_panel<Value>;
  if (isa >= Isa::kAvx2) return avx2_panel<Value>;
#endif
  (void)isa;
  return plain_panel<Value>;
}

}  // namespace

int64_t stored_row_bytes(Format format, int64_t inner) {
  return inner / (has_super_blocks(format) ? kSuperBlock : kBlock) * kStoredBytes[static_cast<int>(format)];
}

void pack_stored(const StoredTensor& tensor, uint8_t* panels) {
  constexpr void (*kPack[kNumFormats])(const StoredTensor&,
                                       uint8_t*) = {pack_columns<Format::kQ4_0>, pack_columns<Format::kQ4_1>,
                                                    pack_columns<Format::kQ8_0>, pack_columns<Format::kQ4_K>,
                                                    pack_columns<Format::kQ6_K>};
  kPack[static_cast<int>(tensor.format)](tensor, panels);
}

void look_up_blocked(const Blocked& weights, int64_t panels, int64_t inner, const int32_t* columns, int64_t count,
                     void* out, bool out_float32, const Threads& threads) {
  std::vector<int64_t> offsets;
  int64_t offset = 0;
  for (int64_t i = 0; i < panels; ++i) {
    offsets.push_back(offset);
    offset += panel_layout(weights.formats[i], inner).end;
  }
  threads.run(count, [&](int64_t i) {
    const int64_t column = std::min<int64_t>(std::max(columns[i], 0), panels * kPanel - 1), index = column / kPanel;
    const Format format = weights.formats[index];
    const ConstColumn from{format, panel_layout(format, inner), weights.panels + offsets[index], column % kPanel};
    for (int64_t k = 0; k < inner; ++k) {
      const float value = from.weight(k / kBlock, k % kBlock);
      if (out_float32) {
        static_cast<float*>(out)[i * inner + k] = value;
      } else {
        static_cast<Bf16*>(out)[i * inner + k] = from_float<Bf16>(value);
      }
    }
  });
}

void pack_nearest(Isa isa, const Matrix& matrix, Format format, uint8_t* panels, const Threads& threads) {
  const int64_t panel_bytes = panel_layout(format, matrix.inner).end;
  const NearestPanel run = matrix.itemsize == 4 ? panel_function<float>(isa) : panel_function<Bf16>(isa);
  threads.run(num_panels(matrix.columns),
              [&](int64_t index) { run(matrix, format, index, panels + index * panel_bytes); });
}

}  // namespace quire
