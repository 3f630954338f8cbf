// What the other products know of weights that stay as a file has quantised them: group_weights.h says how
// they lie.

#pragma once

#include "tensors.h"
#include "threads.h"

namespace medusa {

// A part of a matrix's outputs: number `index` of `count` equal parts.
struct Slice {
  int64_t index = 0, count = 1;
};

// Whether these are such weights: bytes that begin with their header.
bool are_group_quantised(const Tensor& weights);
// Refuses weights of another number of outputs.
void check_width(const Tensor& weights, int64_t num_outputs);
// x (..., K) float32, contiguous; bias (N,) float32 -> (..., N) float32
Tensor group_quantised_product(const Tensor& x, const Tensor& weights, const std::optional<Tensor>& bias,
                               int64_t width);
// Posts the products of rows x (R, K): of `counts[i]` rows, after those of the ones before, with slice
// `slices[i]`; bias (slices, N), results to y (R, N).
void post_group_quantised(const Tensor& x, const Tensor& weights, const std::optional<Tensor>& bias,
                          const std::vector<Slice>& slices, const std::vector<int64_t>& counts, float* y,
                          const Post& post);

}  // namespace medusa
