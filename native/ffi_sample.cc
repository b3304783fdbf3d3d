// What XLA calls to sample: buffers are checked, given their names, and handed to `sample`.
#include <cstdint>
#include <string>
#include <string_view>

#include "ffi.h"
#include "sample.h"

namespace {

using namespace quire_ffi;

ffi::Error sample(ffi::ThreadPool pool, Floats logits, Ints tokens, Ints page_table, Ints position, Bools want_logprobs,
                  Bools want_top, Floats temperature, Ints top_k, Floats top_p, Floats min_p, Floats top_n_sigma,
                  Words seed, Ints index, Ints target, Ints row, Ints prompt_len, Floats repetition_penalty,
                  Floats presence_penalty, Floats frequency_penalty, Ints bias_ids, Floats bias, Bools has_mask,
                  Words mask, ffi::Result<Ints> token, ffi::Result<Floats> logprob, ffi::Result<Ints> top_id,
                  ffi::Result<Floats> top_logprob, ffi::Result<Floats> processed_logprob, ffi::Result<Floats> kept_mass,
                  ffi::Result<Ints> processed_top_id, ffi::Result<Floats> processed_top_logprob,
                  std::string_view isa_name) {
  const auto bad = [](const char* what) { return ffi::Error::InvalidArgument(std::string("quire_sample: ") + what); };
  quire::Isa isa;
  if (ffi::Error error = choose_isa(isa_name, isa); error.failure()) return error;
  if (logits.dimensions().size() != 2 || logits.dimensions()[1] < 1) return bad("logits must be [S, V]");
  if (tokens.dimensions().size() != 2 || page_table.dimensions().size() != 2)
    return bad("the tokens of pages must be [M, Z], and the page table [B, P]");
  const int64_t samples = logits.dimensions()[0];
  if (top_id->dimensions().size() != 3 || top_id->dimensions()[2] < 1) return bad("top_id must be [S, 1, X]");
  const int64_t num_top = top_id->dimensions()[2], tops = samples * num_top;
  bool fits = has_shape(seed, {samples, 2});
  for (const Ints* one : {&position, &top_k, &index, &target, &row, &prompt_len})
    fits = fits && has_shape(*one, {samples});
  for (const Floats* one :
       {&temperature, &top_p, &min_p, &top_n_sigma, &repetition_penalty, &presence_penalty, &frequency_penalty})
    fits = fits && has_shape(*one, {samples});
  for (const Bools* one : {&want_logprobs, &want_top, &has_mask}) fits = fits && has_shape(*one, {samples});
  if (!fits) return bad("the seed must be [S, 2], and all but biases and mask [S]");
  if (bias_ids.dimensions().size() != 2 || bias_ids.dimensions()[0] != samples ||
      !has_shape(bias, {samples, bias_ids.dimensions()[1]}))
    return bad("bias_ids and bias must be [S, E]");
  if (mask.dimensions().size() != 2 || mask.dimensions()[0] != samples) return bad("mask must be [S, W]");
  const auto has_size = [](const auto& buffer, int64_t size) { return int64_t(buffer.element_count()) == size; };
  if (!has_size(*token, samples) || !has_size(*logprob, samples) || !has_size(*processed_logprob, samples) ||
      !has_size(*kept_mass, samples))
    return bad("a sample has one token, and one of each score");
  if (!has_size(*top_id, tops) || !has_size(*top_logprob, tops) || !has_size(*processed_top_id, tops) ||
      !has_size(*processed_top_logprob, tops))
    return bad("the alternatives must be [S, 1, X], of one X");

  quire::Sample args{};
  args.num_samples = samples;
  args.vocab = logits.dimensions()[1];
  args.num_top = num_top;
  args.logits = logits.typed_data();
  args.num_pages = tokens.dimensions()[0];
  args.page_size = tokens.dimensions()[1];
  args.num_rows = page_table.dimensions()[0];
  args.pages_per_row = page_table.dimensions()[1];
  args.tokens = tokens.typed_data();
  args.page_table = page_table.typed_data();
  args.position = position.typed_data();
  args.want_logprobs = want_logprobs.typed_data();
  args.want_top = want_top.typed_data();
  args.temperature = temperature.typed_data();
  args.top_k = top_k.typed_data();
  args.top_p = top_p.typed_data();
  args.min_p = min_p.typed_data();
  args.top_n_sigma = top_n_sigma.typed_data();
  args.seed = seed.typed_data();
  args.index = index.typed_data();
  args.target = target.typed_data();
  args.row = row.typed_data();
  args.prompt_len = prompt_len.typed_data();
  args.repetition_penalty = repetition_penalty.typed_data();
  args.presence_penalty = presence_penalty.typed_data();
  args.frequency_penalty = frequency_penalty.typed_data();
  args.num_biases = bias_ids.dimensions()[1];
  args.bias_ids = bias_ids.typed_data();
  args.bias = bias.typed_data();
  args.has_mask = has_mask.typed_data();
  args.mask_words = mask.dimensions()[1];
  args.mask = mask.typed_data();
  args.token = token->typed_data();
  args.model = {logprob->typed_data(), top_id->typed_data(), top_logprob->typed_data()};
  args.processed = {processed_logprob->typed_data(), processed_top_id->typed_data(),
                    processed_top_logprob->typed_data()};
  args.kept_mass = kept_mass->typed_data();
  quire::sample(isa, args, threads_of(pool));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_sample, sample,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()  // logits
                                  .Arg<Ints>()    // tokens of pages
                                  .Arg<Ints>()    // page table
                                  .Arg<Ints>()    // position, and what follows in `SampleInputs`
                                  .Arg<Bools>()   // want_logprobs
                                  .Arg<Bools>()   // want_top
                                  .Arg<Floats>()  // temperature
                                  .Arg<Ints>()    // top_k
                                  .Arg<Floats>()  // top_p
                                  .Arg<Floats>()  // min_p
                                  .Arg<Floats>()  // top_n_sigma
                                  .Arg<Words>()   // seed
                                  .Arg<Ints>()    // index
                                  .Arg<Ints>()    // target
                                  .Arg<Ints>()    // row
                                  .Arg<Ints>()    // prompt_len
                                  .Arg<Floats>()  // repetition_penalty
                                  .Arg<Floats>()  // presence_penalty
                                  .Arg<Floats>()  // frequency_penalty
                                  .Arg<Ints>()    // bias_ids
                                  .Arg<Floats>()  // bias
                                  .Arg<Bools>()   // has_mask
                                  .Arg<Words>()   // mask
                                  .Ret<Ints>()    // tokens, and what follows in `StepOutput`
                                  .Ret<Floats>()  // logprobs
                                  .Ret<Ints>()    // top_ids
                                  .Ret<Floats>()  // top_logprobs
                                  .Ret<Floats>()  // processed_logprobs
                                  .Ret<Floats>()  // kept_mass
                                  .Ret<Ints>()    // processed_top_ids
                                  .Ret<Floats>()  // processed_top_logprobs
                                  .Attr<std::string_view>("isa"));

#pragma GCC visibility pop
