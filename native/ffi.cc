// What XLA calls: buffers are checked, given their names, and handed to the kernels with XLA's own threads.
#include <cstdint>
#include <string>
#include <string_view>

#include "attention.h"
#include "ffi.h"
#include "linear.h"
#include "pointwise.h"

namespace {

using namespace quire_ffi;

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Ints positions,
                     Ints destinations, Ints page_table, Ints kv_lens, Ints cu_q_lens, ffi::AnyBuffer k_pages,
                     ffi::AnyBuffer v_pages, Floats sinks, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::AnyBuffer> new_k_pages, ffi::Result<ffi::AnyBuffer> new_v_pages, float scale,
                     float soft_cap, int64_t window, std::string_view isa_name) {
  const auto bad = [](const std::string& what) { return ffi::Error::InvalidArgument("quire_attention: " + what); };
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;

  const auto type = q.element_type();
  if (type != ffi::F32 && type != ffi::BF16) return bad("q must be float32 or bfloat16");
  for (const auto* buffer : {&k, &v, &k_pages, &v_pages, &*out, &*new_k_pages, &*new_v_pages})
    if (buffer->element_type() != type) return bad("q, k, v, the pages and the output must have one type");
  if (q.dimensions().size() != 3 || k.dimensions().size() != 3 || k_pages.dimensions().size() != 5 ||
      page_table.dimensions().size() != 2)
    return bad("q and k must have 3 axes, the pages 5, the page table 2");

  quire::Attention a{};
  const int64_t pair = type == ffi::BF16 ? 2 : 1;
  a.element = type == ffi::BF16 ? quire::Element::kBfloat16 : quire::Element::kFloat32;
  a.num_tokens = q.dimensions()[0];
  a.num_heads = q.dimensions()[1];
  a.head_dim = q.dimensions()[2];
  a.num_kv_heads = k.dimensions()[1];
  a.num_rows = page_table.dimensions()[0];
  a.pages_per_row = page_table.dimensions()[1];
  a.num_pages = k_pages.dimensions()[0];
  a.page_size = k_pages.dimensions()[3];
  if (a.head_dim < 8 || a.head_dim % 8) return bad("the head size must be a multiple of 8");
  if (a.num_kv_heads < 1 || a.num_heads < 1 || a.num_heads % a.num_kv_heads)
    return bad("the query heads must be a multiple of the KV heads");
  if (a.page_size < 1 || window < 0) return bad("the page size must be positive and the window not negative");
  if (!(scale > 0)) return bad("the scale must be positive");
  if (!(soft_cap >= 0)) return bad("the soft cap must not be negative");
  for (const auto* buffer : {&k, &v})
    if (!has_shape(*buffer, {a.num_tokens, a.num_kv_heads, a.head_dim})) return bad("k and v must be [T, K, H]");
  for (const auto* buffer : {&k_pages, &*new_k_pages})
    if (!has_shape(*buffer, {a.num_pages, a.num_kv_heads, a.head_dim / pair, a.page_size, pair}))
      return bad("K pages must be [M, K, H / pair, Z, pair]");
  for (const auto* buffer : {&v_pages, &*new_v_pages})
    if (!has_shape(*buffer, {a.num_pages, a.num_kv_heads, (a.page_size + pair - 1) / pair, a.head_dim, pair}))
      return bad("V pages must be [M, K, ceil(Z / pair), H, pair]");
  if (!has_shape(*out, {a.num_tokens, a.num_heads, a.head_dim})) return bad("the output must be [T, N, H]");
  if (!has_shape(positions, {a.num_tokens}) || !has_shape(destinations, {a.num_tokens}) ||
      !has_shape(kv_lens, {a.num_rows}) || !has_shape(cu_q_lens, {a.num_rows + 1}))
    return bad("positions and destinations must be [T], kv_lens [B], cu_q_lens [B + 1]");
  const auto num_sinks = static_cast<int64_t>(sinks.element_count());
  if (num_sinks != 0 && num_sinks != a.num_heads) return bad("there must be a sink for each query head, or none");
  if (new_k_pages->untyped_data() != k_pages.untyped_data() || new_v_pages->untyped_data() != v_pages.untyped_data())
    return bad("the pages must be updated in place");

  a.scale = scale;
  a.soft_cap = soft_cap;
  a.window = window;
  a.q_TNH = q.untyped_data();
  a.k_TKH = k.untyped_data();
  a.v_TKH = v.untyped_data();
  a.positions_T = positions.typed_data();
  a.destinations_T = destinations.typed_data();
  a.page_table_BP = page_table.typed_data();
  a.kv_lens_B = kv_lens.typed_data();
  a.cu_q_lens_B1 = cu_q_lens.typed_data();
  a.sinks_N = num_sinks ? sinks.typed_data() : nullptr;
  a.k_pages = k_pages.untyped_data();
  a.v_pages = v_pages.untyped_data();
  a.out_TNH = out->untyped_data();
  quire::write_and_attend(a, isa, threads_of(pool));
  return ffi::Error::Success();
}

// -- matmuls ------------------------------------------------------------------------------------------------------

ffi::Error pack(ffi::ThreadPool pool, ffi::AnyBuffer matrix, ffi::Result<ffi::AnyBuffer> panels, bool transposed) {
  const auto bad = [](const char* what) { return ffi::Error::InvalidArgument(std::string("quire_pack: ") + what); };
  const auto type = matrix.element_type();
  if ((type != ffi::F32 && type != ffi::BF16 && type != ffi::S8) || panels->element_type() != type)
    return bad("the matrix must be float32, bfloat16 or int8, and the panels of its type");
  auto dims = matrix.dimensions();
  if (dims.size() != 2 && dims.size() != 3) return bad("the matrix must have 2 axes, and one more of experts");
  const bool has_experts = dims.size() == 3;
  const int64_t num_experts = has_experts ? dims[0] : 1, itemsize = type == ffi::F32 ? 4 : type == ffi::BF16 ? 2 : 1;
  const int64_t inner = dims[has_experts + transposed], columns = dims[has_experts + !transposed];
  const int64_t num_panels = quire::num_panels(columns), lines = quire::num_lines(inner, itemsize);
  if (has_experts ? !has_shape(*panels, {num_experts, num_panels, lines, quire::kPanel, 4 / itemsize})
                  : !has_shape(*panels, {num_panels, lines, quire::kPanel, 4 / itemsize}))
    return bad("the panels must be [out / 16, lines, 16, values in 4 bytes], of each expert");
  for (int64_t i = 0; i < num_experts; ++i) {
    const char* from = static_cast<const char*>(matrix.untyped_data()) + i * inner * columns * itemsize;
    char* to = static_cast<char*>(panels->untyped_data()) + i * num_panels * lines * quire::kLine;
    quire::pack({from, itemsize, inner, columns, transposed}, to, threads_of(pool));
  }
  return ffi::Error::Success();
}

// The sizes of a product from its buffers, checked; the packed weights must fit both, and there must be one for each of
// the groups, or one without any axis for it.
ffi::Error product_of(const ffi::AnyBuffer& x, const ffi::AnyBuffer& panels, const ffi::AnyBuffer& out,
                      int64_t itemsize, quire::Product& product, const Ints* group_sizes = nullptr) {
  const auto bad = [](const char* what) { return ffi::Error::InvalidArgument(std::string("quire_linear: ") + what); };
  if (x.dimensions().size() != 2 || out.dimensions().size() != 2 || x.dimensions()[0] != out.dimensions()[0])
    return bad("x must be [rows, in] and the output [rows, out]");
  if (out.element_type() != ffi::F32 && out.element_type() != ffi::BF16)
    return bad("the output must be float32 or bfloat16");
  product = {x.dimensions()[0],     x.dimensions()[1],  out.dimensions()[1],
             panels.untyped_data(), out.untyped_data(), out.element_type() == ffi::F32};
  const int64_t num_panels = quire::num_panels(product.columns), lines = quire::num_lines(product.inner, itemsize);
  const bool fits = group_sizes ? has_shape(panels, {static_cast<int64_t>(group_sizes->element_count()), num_panels,
                                                     lines, quire::kPanel, 4 / itemsize})
                                : has_shape(panels, {num_panels, lines, quire::kPanel, 4 / itemsize});
  if (panels.element_type() != (itemsize == 4 ? ffi::F32 : itemsize == 2 ? ffi::BF16 : ffi::S8) || !fits)
    return bad("the weights are not packed for this input and output");
  return ffi::Error::Success();
}

ffi::Error linear_bf16(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels, ffi::Result<ffi::AnyBuffer> out,
                       std::string_view isa_name) {
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  quire::Product product;
  if (ffi::Error error = product_of(x, panels, *out, 2, product); error.failure()) return error;
  if (x.element_type() != ffi::BF16) return ffi::Error::InvalidArgument("quire_linear: x must be bfloat16");
  quire::linear_bf16(isa, product, static_cast<const uint16_t*>(x.untyped_data()), threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error linear_int8(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels, ffi::AnyBuffer scale,
                       ffi::Result<ffi::AnyBuffer> out, std::string_view isa_name) {
  const auto bad = [](const char* what) { return ffi::Error::InvalidArgument(std::string("quire_linear: ") + what); };
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  quire::Product product;
  if (ffi::Error error = product_of(x, panels, *out, 1, product); error.failure()) return error;
  if (x.element_type() != ffi::F32 && x.element_type() != ffi::BF16) return bad("x must be float32 or bfloat16");
  if (scale.element_type() != ffi::F32 || static_cast<int64_t>(scale.element_count()) != product.columns)
    return bad("there must be one float32 scale for each output");
  quire::linear_int8(isa, product, x.untyped_data(), x.element_type() == ffi::F32,
                     static_cast<const float*>(scale.untyped_data()), threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error grouped(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels, Ints group_sizes,
                   ffi::Result<ffi::AnyBuffer> out, std::string_view isa_name) {
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  const bool float32 = x.element_type() == ffi::F32;
  if (!float32 && x.element_type() != ffi::BF16)
    return ffi::Error::InvalidArgument("quire_grouped: x must be float32 or bfloat16");
  quire::Product product;
  quire::Groups groups;
  if (ffi::Error error = product_of(x, panels, *out, float32 ? 4 : 2, product, &group_sizes); error.failure())
    return error;
  if (ffi::Error error = groups_of(group_sizes, product.rows, groups); error.failure()) return error;
  quire::grouped_float(isa, product, groups, x.untyped_data(), float32, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error grouped_int8(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels, Floats scale, Ints group_sizes,
                        ffi::Result<ffi::AnyBuffer> out, std::string_view isa_name) {
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  if (x.element_type() != ffi::F32 && x.element_type() != ffi::BF16)
    return ffi::Error::InvalidArgument("quire_grouped: x must be float32 or bfloat16");
  quire::Product product;
  quire::Groups groups;
  if (ffi::Error error = product_of(x, panels, *out, 1, product, &group_sizes); error.failure()) return error;
  if (ffi::Error error = groups_of(group_sizes, product.rows, groups); error.failure()) return error;
  if (!has_shape(scale, {groups.count, product.columns}))
    return ffi::Error::InvalidArgument("quire_grouped: there must be one scale for each output of each group");
  quire::grouped_int8(isa, product, groups, x.untyped_data(), x.element_type() == ffi::F32, scale.typed_data(),
                      threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error grouped_mxfp4(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U8> codes,
                         ffi::Buffer<ffi::U8> scales, Ints group_sizes, ffi::Result<ffi::AnyBuffer> out,
                         std::string_view isa_name) {
  const auto bad = [](const char* what) { return ffi::Error::InvalidArgument(std::string("quire_grouped: ") + what); };
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  const bool float32 = x.element_type() == ffi::F32;
  if ((!float32 && x.element_type() != ffi::BF16) || out->element_type() != x.element_type())
    return bad("x must be float32 or bfloat16, and the output of its type");
  if (x.dimensions().size() != 2 || out->dimensions().size() != 2 || x.dimensions()[0] != out->dimensions()[0])
    return bad("x must be [rows, in] and the output [rows, out]");
  const quire::Product product{x.dimensions()[0], x.dimensions()[1],   out->dimensions()[1],
                               nullptr,           out->untyped_data(), float32};
  quire::Groups groups;
  if (ffi::Error error = groups_of(group_sizes, product.rows, groups); error.failure()) return error;
  const int64_t num_panels = quire::num_panels(product.columns);
  const int64_t num_blocks = quire::ceil_div(product.inner, quire::kMxfp4Block);
  if (!has_shape(codes, {groups.count, num_panels, num_blocks * quire::kMxfp4Codes, quire::kPanel}) ||
      !has_shape(scales, {groups.count, num_panels, num_blocks, quire::kPanel}))
    return bad("codes must be [groups, out / 16, in / 2, 16], and scales [groups, out / 16, in / 32, 16]");
  quire::grouped_mxfp4(isa, product, groups, x.untyped_data(), float32, {codes.typed_data(), scales.typed_data()},
                       threads_of(pool));
  return ffi::Error::Success();
}

// -- between the matmuls -------------------------------------------------------------------------------------------

// All of one type, float32 or bfloat16; sets which.
template <class... Buffers>
ffi::Error one_type(const char* name, bool& bf16, const ffi::AnyBuffer& first, const Buffers&... others) {
  bf16 = first.element_type() == ffi::BF16;
  if ((!bf16 && first.element_type() != ffi::F32) || ((others.element_type() != first.element_type()) || ...))
    return ffi::Error::InvalidArgument(std::string(name) + ": all must be float32, or all bfloat16");
  return ffi::Error::Success();
}

ffi::Error add_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer delta, ffi::AnyBuffer weight,
                    ffi::Result<ffi::AnyBuffer> sum, ffi::Result<ffi::AnyBuffer> normed, float eps,
                    std::string_view isa_name) {
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  quire::AddNorm args{};
  if (ffi::Error error = one_type("quire_add_norm", args.bf16, x, delta, weight, *sum, *normed); error.failure())
    return error;
  if (x.dimensions().size() != 2) return ffi::Error::InvalidArgument("quire_add_norm: x must have 2 axes");
  args.rows = x.dimensions()[0];
  args.width = x.dimensions()[1];
  for (const auto* buffer : {&delta, &*sum, &*normed})
    if (!has_shape(*buffer, {args.rows, args.width}))
      return ffi::Error::InvalidArgument("quire_add_norm: what is added and the outputs must have the shape of x");
  if (!has_shape(weight, {args.width}) || args.width < 1)
    return ffi::Error::InvalidArgument("quire_add_norm: the weight must be as long as a row");
  args.eps = eps;
  args.x = x.untyped_data();
  args.delta = delta.untyped_data();
  args.weight = weight.untyped_data();
  args.sum = sum->untyped_data();
  args.normed = normed->untyped_data();
  quire::add_norm(isa, args, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error gate(ffi::ThreadPool pool, ffi::AnyBuffer gate_up, ffi::Result<ffi::AnyBuffer> out,
                std::string_view isa_name) {
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  quire::Gate args{};
  if (ffi::Error error = one_type("quire_gate", args.bf16, gate_up, *out); error.failure()) return error;
  if (out->dimensions().size() != 2) return ffi::Error::InvalidArgument("quire_gate: the output must have 2 axes");
  args.rows = out->dimensions()[0];
  args.width = out->dimensions()[1];
  if (!has_shape(gate_up, {args.rows, 2, args.width}) || args.width < 1)
    return ffi::Error::InvalidArgument("quire_gate: the input must be [rows, 2, width of the output]");
  args.gate_up = gate_up.untyped_data();
  args.out = out->untyped_data();
  quire::gate(isa, args, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error rotate(ffi::ThreadPool pool, ffi::AnyBuffer qkv, Floats cos, Floats sin, ffi::Result<ffi::AnyBuffer> q,
                  ffi::Result<ffi::AnyBuffer> k, ffi::Result<ffi::AnyBuffer> v, std::string_view isa_name) {
  const auto bad = [](const char* what) { return ffi::Error::InvalidArgument(std::string("quire_rotate: ") + what); };
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  quire::Rotate args{};
  if (ffi::Error error = one_type("quire_rotate", args.bf16, qkv, *q, *k, *v); error.failure()) return error;
  if (qkv.dimensions().size() != 4) return bad("the input must have 4 axes");
  args.tokens = qkv.dimensions()[0];
  args.kv_heads = qkv.dimensions()[1];
  args.group = qkv.dimensions()[2] - 2;
  args.head_dim = qkv.dimensions()[3];
  if (args.kv_heads < 1 || args.group < 1 || args.head_dim < 2 || args.head_dim % 2)
    return bad("each KV head needs queries, a key and a value of even size");
  if (!has_shape(*q, {args.tokens, args.kv_heads * args.group, args.head_dim}) ||
      !has_shape(*k, {args.tokens, args.kv_heads, args.head_dim}) ||
      !has_shape(*v, {args.tokens, args.kv_heads, args.head_dim}))
    return bad("the outputs must be [tokens, heads, head size]");
  for (const auto* table : {&cos, &sin})
    if (!has_shape(*table, {args.tokens, args.head_dim / 2})) return bad("the tables must be [tokens, head size / 2]");
  args.qkv = qkv.untyped_data();
  args.cos = cos.typed_data();
  args.sin = sin.typed_data();
  args.q = q->untyped_data();
  args.k = k->untyped_data();
  args.v = v->untyped_data();
  quire::rotate(isa, args, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

// What the library shows: the handlers that Python registers, and what it asks the library about itself.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // q
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<Ints>()            // positions
                                  .Arg<Ints>()            // destinations
                                  .Arg<Ints>()            // page table
                                  .Arg<Ints>()            // kv_lens
                                  .Arg<Ints>()            // cu_q_lens
                                  .Arg<ffi::AnyBuffer>()  // K pages
                                  .Arg<ffi::AnyBuffer>()  // V pages
                                  .Arg<Floats>()          // sinks
                                  .Ret<ffi::AnyBuffer>()  // output
                                  .Ret<ffi::AnyBuffer>()  // K pages
                                  .Ret<ffi::AnyBuffer>()  // V pages
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_pack, pack,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // matrix
                                  .Ret<ffi::AnyBuffer>()  // panels
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_linear_bf16, linear_bf16,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // panels
                                  .Ret<ffi::AnyBuffer>()  // output
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_linear_int8, linear_int8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // panels
                                  .Arg<ffi::AnyBuffer>()  // scale
                                  .Ret<ffi::AnyBuffer>()  // output
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_grouped, grouped,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // panels
                                  .Arg<Ints>()            // group sizes
                                  .Ret<ffi::AnyBuffer>()  // output
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_grouped_int8, grouped_int8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // panels
                                  .Arg<Floats>()          // scale
                                  .Arg<Ints>()            // group sizes
                                  .Ret<ffi::AnyBuffer>()  // output
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_grouped_mxfp4, grouped_mxfp4,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()        // x
                                  .Arg<ffi::Buffer<ffi::U8>>()  // codes
                                  .Arg<ffi::Buffer<ffi::U8>>()  // scales
                                  .Arg<Ints>()                  // group sizes
                                  .Ret<ffi::AnyBuffer>()        // output
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_add_norm, add_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // what is added to it
                                  .Arg<ffi::AnyBuffer>()  // weight
                                  .Ret<ffi::AnyBuffer>()  // sum
                                  .Ret<ffi::AnyBuffer>()  // normed
                                  .Attr<float>("eps")
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_gate, gate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // gate and up
                                  .Ret<ffi::AnyBuffer>()  // output
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_rotate, rotate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // queries, key and value of each KV head
                                  .Arg<Floats>()          // cosine
                                  .Arg<Floats>()          // sine
                                  .Ret<ffi::AnyBuffer>()  // q
                                  .Ret<ffi::AnyBuffer>()  // k
                                  .Ret<ffi::AnyBuffer>()  // v
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    quire_allocate, [](ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); },
    ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());  // memory that nobody has written to

// The instruction set by its index, from the plainest on; null past the last, "" for one this machine does not have.
extern "C" const char* quire_instruction_set(int index) {
  if (index < 0 || index >= quire::kNumIsas) return nullptr;
  const auto isa = static_cast<quire::Isa>(index);
  return quire::isa_supported(isa) ? quire::isa_name(isa) : "";
}

#pragma GCC visibility pop
