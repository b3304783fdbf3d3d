// What XLA calls for blocked weights: buffers are checked, given their names, and handed to the kernels.
#include <cstdint>
#include <string>
#include <string_view>

#include "blocked.h"
#include "ffi.h"

namespace {

using namespace quire_ffi;

// The sizes of a product with blocked weights, checked; their formats and bytes must fit it.
ffi::Error blocked_of(const ffi::AnyBuffer& x, const Bytes& panels, int64_t num_experts, const Bytes& formats,
                      const ffi::AnyBuffer& out, quire::Product& product, quire::Blocked& weights) {
  const auto bad = [](const char* what) { return ffi::Error::InvalidArgument(std::string("quire_blocked: ") + what); };
  for (const auto* buffer : {&x, &out})
    if (buffer->element_type() != ffi::F32 && buffer->element_type() != ffi::BF16)
      return bad("x and the output must be float32 or bfloat16");
  if (x.dimensions().size() != 2 || out.dimensions().size() != 2 || x.dimensions()[0] != out.dimensions()[0])
    return bad("x must be [rows, in] and the output [rows, out]");
  product = {x.dimensions()[0], x.dimensions()[1],  out.dimensions()[1],
             nullptr,           out.untyped_data(), out.element_type() == ffi::F32};
  const int64_t num_panels = quire::num_panels(product.columns);
  const int64_t bytes =
      has_shape(formats, {num_panels}) ? quire::blocked_bytes(formats.typed_data(), num_panels, product.inner) : -1;
  if (bytes < 0) return bad("there must be a format for each 16 outputs, which fits the input");
  if (static_cast<int64_t>(panels.element_count()) != num_experts * bytes)
    return bad("the weights have not the size that their formats, input and output make");
  weights = {reinterpret_cast<const quire::Format*>(formats.typed_data()), panels.typed_data(), bytes};
  return ffi::Error::Success();
}

ffi::Error linear_blocked(ffi::ThreadPool pool, ffi::AnyBuffer x, Bytes panels, Bytes formats,
                          ffi::Result<ffi::AnyBuffer> out, std::string_view isa_name) {
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  quire::Product product;
  quire::Blocked weights;
  if (ffi::Error error = blocked_of(x, panels, 1, formats, *out, product, weights); error.failure()) return error;
  quire::linear_blocked(isa, product, weights, x.untyped_data(), x.element_type() == ffi::F32, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error grouped_blocked(ffi::ThreadPool pool, ffi::AnyBuffer x, Bytes panels, Bytes formats, Ints group_sizes,
                           ffi::Result<ffi::AnyBuffer> out, std::string_view isa_name) {
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  quire::Product product;
  quire::Blocked weights;
  quire::Groups groups;
  const auto num_experts = static_cast<int64_t>(group_sizes.element_count());
  if (ffi::Error error = blocked_of(x, panels, num_experts, formats, *out, product, weights); error.failure())
    return error;
  if (ffi::Error error = groups_of(group_sizes, product.rows, groups); error.failure()) return error;
  quire::grouped_blocked(isa, product, groups, weights, x.untyped_data(), x.element_type() == ffi::F32,
                         threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error look_up(ffi::ThreadPool pool, Bytes panels, Bytes formats, Ints rows, ffi::Result<ffi::AnyBuffer> out) {
  quire::Blocked weights;
  const auto bad = [](const char* what) { return ffi::Error::InvalidArgument(std::string("quire_look_up: ") + what); };
  if (out->dimensions().size() != 2 || !has_shape(rows, {out->dimensions()[0]}))
    return bad("the output must be [rows, in]");
  if (out->element_type() != ffi::F32 && out->element_type() != ffi::BF16)
    return bad("the output must be float32 or bfloat16");
  const auto num_panels = static_cast<int64_t>(formats.element_count());
  const int64_t inner = out->dimensions()[1], bytes = quire::blocked_bytes(formats.typed_data(), num_panels, inner);
  if (bytes < 0 || static_cast<int64_t>(panels.element_count()) != bytes)
    return bad("the weights have not the size that their formats and the output make");
  weights = {reinterpret_cast<const quire::Format*>(formats.typed_data()), panels.typed_data(), bytes};
  quire::look_up_blocked(weights, num_panels, inner, rows.typed_data(), static_cast<int64_t>(rows.element_count()),
                         out->untyped_data(), out->element_type() == ffi::F32, threads_of(pool));
  return ffi::Error::Success();
}

ffi::Error pack_nearest(ffi::ThreadPool pool, ffi::AnyBuffer matrix, ffi::Result<Bytes> panels, bool transposed,
                        int64_t format) {
  const auto bad = [](const char* what) {
    return ffi::Error::InvalidArgument(std::string("quire_pack_nearest: ") + what);
  };
  const auto type = matrix.element_type();
  if (type != ffi::F32 && type != ffi::BF16) return bad("the matrix must be float32 or bfloat16");
  const auto dims = matrix.dimensions();
  if (dims.size() != 2 && dims.size() != 3) return bad("the matrix must have 2 axes, and one more of experts");
  if (format != static_cast<int64_t>(quire::Format::kQ4_1) && format != static_cast<int64_t>(quire::Format::kQ8_0))
    return bad("the format must be q4_1 or q8_0");
  const bool has_experts = dims.size() == 3;
  const int64_t num_experts = has_experts ? dims[0] : 1, itemsize = type == ffi::F32 ? 4 : 2;
  const int64_t inner = dims[has_experts + transposed], columns = dims[has_experts + !transposed];
  const auto code = static_cast<uint8_t>(format);
  const int64_t bytes = quire::num_panels(columns) * quire::blocked_bytes(&code, 1, inner);
  if (has_experts ? !has_shape(*panels, {num_experts, bytes}) : !has_shape(*panels, {bytes}))
    return bad("the panels have not the size that the format, input and output make");
  for (int64_t i = 0; i < num_experts; ++i) {
    const char* from = static_cast<const char*>(matrix.untyped_data()) + i * inner * columns * itemsize;
    quire::pack_nearest(quire::best_isa(), {from, itemsize, inner, columns, transposed},
                        static_cast<quire::Format>(code), panels->typed_data() + i * bytes, threads_of(pool));
  }
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_linear_blocked, linear_blocked,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<Bytes>()           // panels
                                  .Arg<Bytes>()           // format of each
                                  .Ret<ffi::AnyBuffer>()  // output
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_grouped_blocked, grouped_blocked,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<Bytes>()           // panels of each group
                                  .Arg<Bytes>()           // format of each panel of a group
                                  .Arg<Ints>()            // group sizes
                                  .Ret<ffi::AnyBuffer>()  // output
                                  .Attr<std::string_view>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_look_up_blocked, look_up,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Bytes>()             // panels
                                  .Arg<Bytes>()             // format of each
                                  .Arg<Ints>()              // columns
                                  .Ret<ffi::AnyBuffer>());  // those columns, as rows

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_pack_nearest, pack_nearest,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // matrix
                                  .Ret<Bytes>()           // panels
                                  .Attr<bool>("transposed")
                                  .Attr<int64_t>("format"));

// Called as it is, not by XLA: on the host, while a model is loaded. The caller has checked the sizes.
extern "C" void quire_pack_stored(int format, int64_t inner, int64_t columns, const uint8_t* data, const int32_t* rows,
                                  uint8_t* panels) {
  quire::pack_stored({static_cast<quire::Format>(format), inner, columns, data, rows}, panels);
}

#pragma GCC visibility pop
