// The operators, as torch knows them (torch.ops.medusa), and functions of C for libraries that Inductor
// compiles.

#include "operators.h"

#include <torch/csrc/stable/library.h>

#include <cstdio>

#include "threads.h"
#include "tiles.h"

namespace medusa {
namespace {

int64_t lanes() { return LANES; }

// As torch calls them, in passes that are not compiled.
Tensor packed_product_in_eager_pass(const Tensor& x, const Tensor& panels, std::optional<Tensor> scales,
                                    std::optional<Tensor> bias, int64_t width) {
  in_compiled_pass(false);
  return packed_product(x, panels, scales, bias, width);
}
Tensor expert_products_in_eager_pass(const Tensor& x, const Tensor& choices, const Tensor& panels,
                                     std::optional<Tensor> scales, std::optional<Tensor> bias,
                                     int64_t num_experts, int64_t width) {
  in_compiled_pass(false);
  return expert_products(x, choices, panels, scales, bias, num_experts, width);
}
Tensor tree_attention_in_eager_pass(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const Tensor& seen, double scale, double cap,
                                    std::optional<Tensor> sinks) {
  in_compiled_pass(false);
  return tree_attention(query, key, value, seen, scale, cap, sinks);
}
std::tuple<Tensor, Tensor> matrix_rule_in_eager_pass(
    Tensor state, Tensor last, std::optional<Tensor> old_decay, std::optional<Tensor> old_key,
    std::optional<Tensor> old_written, std::optional<Tensor> path, std::optional<Tensor> num_kept, Tensor query,
    Tensor key, Tensor value, Tensor decay, std::optional<Tensor> beta, Tensor parents,
    std::optional<Tensor> rates) {
  in_compiled_pass(false);
  return matrix_rule(state, last, old_decay, old_key, old_written, path, num_kept, query, key, value, decay,
                     beta, parents, rates);
}

}  // namespace
}  // namespace medusa

STABLE_TORCH_LIBRARY(medusa, m) {
  // products and their weights
  m.def("packed_product(Tensor x, Tensor panels, Tensor? scales, Tensor? bias, int width) -> Tensor");
  m.def(
      "expert_products(Tensor x, Tensor choices, Tensor panels, Tensor? scales, Tensor? bias,"
      " int num_experts, int width) -> Tensor");
  m.def("narrowest(Tensor weight) -> int");
  m.def("pack(Tensor weight, Tensor(a!) panels, Tensor(b!)? scales, int row) -> ()");
  m.def("encode_twelve(Tensor weight, Tensor(a!) panels, int row) -> int");
  m.def("decode_twelve(Tensor panels, int num_outputs, int num_inputs) -> Tensor");
  m.def("twelve_size(int num_inputs) -> int");
  m.def("num_outliers(Tensor panels) -> int");
  m.def("quantised_size(int[] types, int[] num_rows, int num_inputs) -> int");
  m.def(
      "begin_quantised(Tensor(a!) weights, int[] types, int[] num_rows, int num_inputs,"
      " bool in_whole_numbers) -> ()");
  m.def("pack_quantised(Tensor(a!) weights, int part, Tensor file_rows, Tensor? order) -> ()");
  m.def("unpack_quantised(Tensor weights) -> Tensor");
  m.def("quantised_rows(Tensor file_rows, Tensor ids, int type, int width) -> Tensor");
  m.def("is_in_whole_numbers(Tensor weights) -> bool");
  m.def("gguf_types() -> int[]");
  // attention
  m.def(
      "tree_attention(Tensor query, Tensor key, Tensor value, Tensor seen, float scale, float cap,"
      " Tensor? sinks) -> Tensor");
  m.def(
      "seen_slots(Tensor lengths, Tensor depths, Tensor ancestors, int first, int end, bool by_range,"
      " int? window) -> Tensor");
  // layers that keep a state
  m.def(
      "matrix_rule(Tensor(a!) state, Tensor(b!) last, Tensor? old_decay, Tensor? old_key, Tensor? old_written,"
      " Tensor? path, Tensor? num_kept, Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta,"
      " Tensor parents, Tensor? rates) -> (Tensor, Tensor)");
  m.def("rows_at(Tensor before, Tensor nodes, Tensor places) -> Tensor");
  // between the products of a layer, in passes that are not compiled
  m.def("norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("sum_and_norm(Tensor x, Tensor more, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("gated(Tensor both) -> Tensor");
  m.def(
      "turned_queries(Tensor rows, Tensor cosines, Tensor sines, Tensor slots, Tensor(a!) keys,"
      " Tensor(b!) values) -> Tensor");
  // drafts
  m.def("remember(Tensor(a!) ring, Tensor(b!) latest, int total, Tensor text) -> int");
  m.def(
      "continuations(Tensor tokens, Tensor lengths, Tensor[] predictions, Tensor[] corpora, Tensor totals,"
      " Tensor odds, Tensor usual, Tensor(a!) trust, Tensor? source_guesses, int depth, int vocab_size)"
      " -> Tensor[]");
  m.def(
      "grow(Tensor logits, Tensor? sharpness, Tensor? noise, Tensor? expected_noise, Tensor? token_map,"
      " Tensor? columns,"
      " Tensor expected_tokens, Tensor children, Tensor shares,"
      " Tensor paths, Tensor? match_nodes, Tensor? path_logprob, Tensor? candidate_numbers,"
      " Tensor? largest_values, int num_wanted, int num_candidates, int fanout, int beam_width,"
      " bool has_match, float min_accept_prob) -> (Tensor[], bool)");
  m.def(
      "tree_of(Tensor root, Tensor[] levels, Tensor expected_tokens, Tensor children, Tensor shares,"
      " Tensor match_nodes, Tensor path_logprob, Tensor candidate_numbers, int num_nodes, int max_depth)"
      " -> Tensor[]");
  m.def("argmax(Tensor scores) -> Tensor");
  m.def("largest(Tensor scores, int count) -> Tensor");
  m.def("cut_below(Tensor(a!) scores, Tensor edges, float filler) -> ()");
  m.def("hashed_bits(Tensor seeds, Tensor positions, int vocab_size, Tensor? tokens=None) -> Tensor");
  m.def("noisy_argmax(Tensor scores, Tensor seeds, Tensor positions) -> Tensor");
  // the processor
  m.def("lanes() -> int");
  m.def("tiles(bool? wanted) -> bool");
  m.def("force_own_threads(bool forced) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(medusa, CPU, m) {
  m.impl("packed_product", TORCH_BOX(&medusa::packed_product_in_eager_pass));
  m.impl("expert_products", TORCH_BOX(&medusa::expert_products_in_eager_pass));
  m.impl("narrowest", TORCH_BOX(&medusa::narrowest));
  m.impl("pack", TORCH_BOX(&medusa::pack));
  m.impl("encode_twelve", TORCH_BOX(&medusa::encode_twelve));
  m.impl("decode_twelve", TORCH_BOX(&medusa::decode_twelve));
  m.impl("num_outliers", TORCH_BOX(&medusa::num_outliers));
  m.impl("begin_quantised", TORCH_BOX(&medusa::begin_quantised));
  m.impl("pack_quantised", TORCH_BOX(&medusa::pack_quantised));
  m.impl("unpack_quantised", TORCH_BOX(&medusa::unpack_quantised));
  m.impl("quantised_rows", TORCH_BOX(&medusa::quantised_rows));
  m.impl("is_in_whole_numbers", TORCH_BOX(&medusa::is_in_whole_numbers));
  m.impl("tree_attention", TORCH_BOX(&medusa::tree_attention_in_eager_pass));
  m.impl("seen_slots", TORCH_BOX(&medusa::seen_slots));
  m.impl("matrix_rule", TORCH_BOX(&medusa::matrix_rule_in_eager_pass));
  m.impl("rows_at", TORCH_BOX(&medusa::rows_at));
  m.impl("norm", TORCH_BOX(&medusa::norm));
  m.impl("sum_and_norm", TORCH_BOX(&medusa::sum_and_norm));
  m.impl("gated", TORCH_BOX(&medusa::gated));
  m.impl("turned_queries", TORCH_BOX(&medusa::turned_queries));
  m.impl("remember", TORCH_BOX(&medusa::remember));
  m.impl("continuations", TORCH_BOX(&medusa::continuations));
  m.impl("grow", TORCH_BOX(&medusa::grow));
  m.impl("tree_of", TORCH_BOX(&medusa::tree_of));
  m.impl("argmax", TORCH_BOX(&medusa::argmax));
  m.impl("largest", TORCH_BOX(&medusa::largest));
  m.impl("cut_below", TORCH_BOX(&medusa::cut_below));
  m.impl("hashed_bits", TORCH_BOX(&medusa::hashed_bits));
  m.impl("noisy_argmax", TORCH_BOX(&medusa::noisy_argmax));
}

// Those that are given no tensor.
STABLE_TORCH_LIBRARY_IMPL(medusa, CompositeExplicitAutograd, m) {
  m.impl("twelve_size", TORCH_BOX(&medusa::twelve_bit_panel_bytes));
  m.impl("quantised_size", TORCH_BOX(&medusa::quantised_size));
  m.impl("gguf_types", TORCH_BOX(&medusa::gguf_types));
  m.impl("lanes", TORCH_BOX(&medusa::lanes));
  m.impl("tiles", TORCH_BOX(&medusa::tiles));
  m.impl("force_own_threads", TORCH_BOX(&medusa::force_own_threads));
}

// ---- functions of C

namespace medusa {
namespace {

Tensor borrowed(AtenTensorHandle given) {
  AtenTensorHandle owned;
  aoti_torch_new_tensor_handle(given, &owned);
  return Tensor(owned);
}
std::optional<Tensor> borrowed(AtenTensorHandle* given) {
  return given ? std::optional(borrowed(*given)) : std::nullopt;
}

// Runs `hand_out` in a compiled pass; an exception must not leave a function of C.
template <typename HandOut> AOTITorchError in_c(HandOut hand_out) {
  in_compiled_pass(true);
  try {
    return hand_out();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return AOTI_TORCH_FAILURE;
  }
}

template <typename Compute> AOTITorchError handed_out(AtenTensorHandle* to, Compute compute) {
  return in_c([&] { return aoti_torch_new_tensor_handle(compute().get(), to); });
}

}  // namespace
}  // namespace medusa

#pragma GCC visibility push(default)
extern "C" {
AOTITorchError aoti_torch_cpu_packed_product(AtenTensorHandle x, AtenTensorHandle panels,
                                             AtenTensorHandle* scales, AtenTensorHandle* bias, int64_t width,
                                             AtenTensorHandle* to) {
  using medusa::borrowed;
  return medusa::handed_out(to, [&] {
    return medusa::packed_product(borrowed(x), borrowed(panels), borrowed(scales), borrowed(bias), width);
  });
}
AOTITorchError aoti_torch_cpu_expert_products(AtenTensorHandle x, AtenTensorHandle choices,
                                              AtenTensorHandle panels, AtenTensorHandle* scales,
                                              AtenTensorHandle* bias, int64_t num_experts, int64_t width,
                                              AtenTensorHandle* to) {
  using medusa::borrowed;
  return medusa::handed_out(to, [&] {
    return medusa::expert_products(borrowed(x), borrowed(choices), borrowed(panels), borrowed(scales),
                                   borrowed(bias), num_experts, width);
  });
}
AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle query, AtenTensorHandle key,
                                             AtenTensorHandle value, AtenTensorHandle seen, double scale,
                                             double cap, AtenTensorHandle* sinks, AtenTensorHandle* to) {
  using medusa::borrowed;
  return medusa::handed_out(to, [&] {
    return medusa::tree_attention(borrowed(query), borrowed(key), borrowed(value), borrowed(seen), scale, cap,
                                  borrowed(sinks));
  });
}
AOTITorchError aoti_torch_cpu_quantised_rows(AtenTensorHandle rows, AtenTensorHandle ids, int64_t type,
                                             int64_t width, AtenTensorHandle* to) {
  using medusa::borrowed;
  return medusa::handed_out(
      to, [&] { return medusa::quantised_rows(borrowed(rows), borrowed(ids), type, width); });
}
AOTITorchError aoti_torch_cpu_matrix_rule(AtenTensorHandle state, AtenTensorHandle last,
                                          AtenTensorHandle* old_decay, AtenTensorHandle* old_key,
                                          AtenTensorHandle* old_written, AtenTensorHandle* path,
                                          AtenTensorHandle* num_kept, AtenTensorHandle query, AtenTensorHandle key,
                                          AtenTensorHandle value, AtenTensorHandle decay, AtenTensorHandle* beta,
                                          AtenTensorHandle parents, AtenTensorHandle* rates,
                                          AtenTensorHandle* outputs, AtenTensorHandle* written) {
  using medusa::borrowed;
  return medusa::in_c([&] {
    auto [given_outputs, given_written] = medusa::matrix_rule(
        borrowed(state), borrowed(last), borrowed(old_decay), borrowed(old_key), borrowed(old_written),
        borrowed(path), borrowed(num_kept), borrowed(query), borrowed(key), borrowed(value), borrowed(decay),
        borrowed(beta), borrowed(parents), borrowed(rates));
    aoti_torch_new_tensor_handle(given_outputs.get(), outputs);
    return aoti_torch_new_tensor_handle(given_written.get(), written);
  });
}
AOTITorchError aoti_torch_cpu_rows_at(AtenTensorHandle before, AtenTensorHandle nodes, AtenTensorHandle places,
                                      AtenTensorHandle* to) {
  using medusa::borrowed;
  return medusa::handed_out(
      to, [&] { return medusa::rows_at(borrowed(before), borrowed(nodes), borrowed(places)); });
}
}  // extern "C"
#pragma GCC visibility pop
