// The operators of torch, as operators.cpp registers them; each is described where it is defined. These files
// call others:
//
//   products.cpp -> products_in_vectors.h, of each format: products_of_floats.cpp, products_of_int8.cpp,
//                   products_of_twelve_bits.cpp; products_in_tiles.cpp
//   products.cpp -> group_products.cpp (in vectors), group_products_in_tiles.cpp, group_products_in_float32.cpp
//   expert_products.cpp -> products.cpp, group_products.cpp
//   all of them  -> threads.cpp, which shares their work out

#pragma once

#include "tensors.h"

#include <tuple>

namespace medusa {

// products.cpp
Tensor packed_product(const Tensor& x, const Tensor& panels, std::optional<Tensor> scales,
                      std::optional<Tensor> bias, int64_t width);
// expert_products.cpp
Tensor expert_products(const Tensor& x, const Tensor& choices, const Tensor& panels,
                       std::optional<Tensor> scales, std::optional<Tensor> bias, int64_t num_experts,
                       int64_t width);
// packing.cpp
int64_t narrowest(const Tensor& weight);
void pack(const Tensor& weight, const Tensor& panels, const std::optional<Tensor>& scales, int64_t row);
// twelve_bits.cpp
int64_t encode_twelve(const Tensor& weight, const Tensor& panels, int64_t row);
Tensor decode_twelve(const Tensor& panels, int64_t num_outputs, int64_t num_inputs);
int64_t twelve_bit_panel_bytes(int64_t num_inputs);
int64_t num_outliers(const Tensor& panels);
// file_types.cpp: the types of GGUF that can be packed, as it numbers them
std::vector<int64_t> gguf_types();
// group_packing.cpp; types are those, and those of directories
int64_t quantised_size(std::vector<int64_t> types, std::vector<int64_t> num_rows, int64_t num_inputs);
void begin_quantised(Tensor weights, std::vector<int64_t> types, std::vector<int64_t> num_rows,
                     int64_t num_inputs, bool in_whole_numbers);
void pack_quantised(Tensor weights, int64_t part, Tensor file_rows, std::optional<Tensor> order);
Tensor unpack_quantised(Tensor weights);
Tensor quantised_rows(const Tensor& file_rows, const Tensor& ids, int64_t type, int64_t width);
bool is_in_whole_numbers(const Tensor& weights);
// attention.cpp
Tensor tree_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& seen,
                      double scale, double cap, std::optional<Tensor> sinks);
Tensor seen_slots(const Tensor& lengths, Tensor depths, Tensor ancestors, int64_t first, int64_t end,
                  bool by_range, std::optional<int64_t> window);
// matrix_states.cpp
std::tuple<Tensor, Tensor> matrix_rule(Tensor state, Tensor last, std::optional<Tensor> old_decay,
                                       std::optional<Tensor> old_key, std::optional<Tensor> old_written,
                                       std::optional<Tensor> path, std::optional<Tensor> num_kept, Tensor query,
                                       Tensor key, Tensor value, Tensor decay, std::optional<Tensor> beta,
                                       const Tensor& parents, std::optional<Tensor> rates);
Tensor rows_at(const Tensor& before, const Tensor& nodes, const Tensor& places);
// layer_steps.cpp
Tensor norm(const Tensor& x, const Tensor& weight, double eps);
std::tuple<Tensor, Tensor> sum_and_norm(const Tensor& x, const Tensor& more, const Tensor& weight, double eps);
Tensor gated(const Tensor& both);
Tensor turned_queries(const Tensor& rows, const Tensor& cosines, const Tensor& sines, const Tensor& slots,
                      Tensor keys, Tensor values);
// dynamic_trees.cpp
std::tuple<std::vector<Tensor>, bool> grow(
    Tensor logits, std::optional<Tensor> sharpness, std::optional<Tensor> noise,
    std::optional<Tensor> expected_noise,
    std::optional<Tensor> token_map, std::optional<Tensor> columns, const Tensor& expected_tokens,
    const Tensor& children, const Tensor& shares, const Tensor& paths, std::optional<Tensor> match_nodes,
    std::optional<Tensor> path_logprob, std::optional<Tensor> candidate_numbers,
    std::optional<Tensor> largest_values, int64_t num_wanted, int64_t num_candidates, int64_t fanout,
    int64_t beam_width, bool has_match, double min_accept_prob);
std::vector<Tensor> tree_of(const Tensor& root, std::vector<Tensor> levels, const Tensor& expected_tokens,
                            const Tensor& children, const Tensor& shares, const Tensor& match_nodes,
                            const Tensor& path_logprob, const Tensor& candidate_numbers, int64_t num_nodes,
                            int64_t max_depth);
// suffix_matches.cpp
int64_t remember(Tensor ring, Tensor latest, int64_t total, Tensor text);
std::vector<Tensor> continuations(Tensor tokens, const Tensor& lengths, std::vector<Tensor> predictions,
                                  std::vector<Tensor> corpora, const Tensor& totals, const Tensor& odds,
                                  const Tensor& usual, Tensor trust, std::optional<Tensor> source_guesses,
                                  int64_t depth, int64_t vocab_size);
// sampling.cpp
Tensor argmax(const Tensor& scores);
Tensor largest(const Tensor& scores, int64_t count);
void cut_below(Tensor scores, const Tensor& edges, double filler);
Tensor hashed_bits(Tensor seeds, Tensor positions, int64_t vocab_size, std::optional<Tensor> tokens);
Tensor noisy_argmax(Tensor scores, Tensor seeds, Tensor positions);

}  // namespace medusa
