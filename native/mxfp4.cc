// Panels of weights in 4 bits, expanded to what the products of linear_piece.h read.
#include <cstring>

#include "linear_piece.h"
#include "vector.h"

namespace quire {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(16)));

QUIRE_INLINE Words load_bytes(const uint8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, Words);
}

// Sixteen weights from their 4 bits, the sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, and half of each one's scale.
QUIRE_INLINE Floats decode(Words bits, Floats half_scale) {
  const Words magnitude = bits & 7u, exponent = magnitude >> 1;
  const Words has_implied_bit = reinterpret_cast<Words>(magnitude > 1u) & 2u;
  const Words shift = exponent - 1u - reinterpret_cast<Words>(exponent == 0u);
  const Words doubled = ((magnitude & 1u) | has_implied_bit) << shift;
  const Floats value = __builtin_convertvector(reinterpret_cast<Ints>(doubled), Floats) * half_scale;
  return as_floats(as_words(value) | (bits & 8u) << 28);
}

template <bool kFloat32>
QUIRE_INLINE void expand_panel(const uint8_t* codes, const uint8_t* scales, int64_t num_lines, char* to) {
  constexpr int64_t lines_of_code = kFloat32 ? 2 : 1;
  const int64_t num_codes = ceil_div(num_lines, lines_of_code);
  Floats half_scale = {};
  for (int64_t i = 0; i < num_codes; ++i) {
    if (i % kMxfp4Codes == 0) half_scale = as_floats(load_bytes(scales + i / kMxfp4Codes * kPanel) << 23) * 0.5f;
    const Words code = load_bytes(codes + i * kPanel);
    const Words first = as_words(decode(code & 15u, half_scale)), second = as_words(decode(code >> 4, half_scale));
    if (kFloat32) {
      std::memcpy(to + 2 * i * kLine, &first, sizeof(first));
      if (2 * i + 1 < num_lines) std::memcpy(to + (2 * i + 1) * kLine, &second, sizeof(second));
    } else {
      const Words both = first >> 16 | (second & 0xffff0000u);  // exact: they have two significant bits
      std::memcpy(to + i * kLine, &both, sizeof(both));
    }
  }
}

template <bool kFloat32>
QUIRE_INLINE void expand(const ProductPiece& piece, char* to) {
  const int64_t num_blocks = ceil_div(piece.product->inner, kMxfp4Block);
  for (int64_t panel = piece.first_panel; panel < piece.end_panel; ++panel, to += piece.lines * kLine) {
    const int64_t block = panel * num_blocks;
    expand_panel<kFloat32>(piece.codes + block * kMxfp4Codes * kPanel, piece.scales + block * kPanel, piece.lines, to);
  }
}

QUIRE_PLAIN void plain_to_f32(const ProductPiece& piece, char* to) { expand<true>(piece, to); }
QUIRE_PLAIN void plain_to_bf16(const ProductPiece& piece, char* to) { expand<false>(piece, to); }
#if QUIRE_X86
QUIRE_AVX2 void avx2_to_f32(const ProductPiece& piece, char* to) { expand<true>(piece, to); }
QUIRE_AVX2 void avx2_to_bf16(const ProductPiece& piece, char* to) { expand<false>(piece, to); }
QUIRE_AVX512 void avx512_to_f32(const ProductPiece& piece, char* to) { expand<true>(piece, to); }
QUIRE_AVX512 void avx512_to_bf16(const ProductPiece& piece, char* to) { expand<false>(piece, to); }
#endif

}  // namespace

ExpandPanels mxfp4_expansion(Isa isa, bool float32) {
#if QUIRE_X86
  if (isa >= Isa::kAvx512) return float32 ? avx512_to_f32 : avx512_to_bf16;
  if (isa == Isa::kAvx2) return float32 ? avx2_to_f32 : avx2_to_bf16;
#endif
  (void)isa;
  return float32 ? plain_to_f32 : plain_to_bf16;
}

}  // namespace quire
