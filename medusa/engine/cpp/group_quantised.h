// What the other products know of weights that stay as a file has quantised them: group_weights.h says how
// they lie.

#pragma once

#include "tensors.h"

namespace medusa {

// Whether these are such weights: bytes that begin with their header.
bool are_group_quantised(const Tensor& weights);
// x (..., K) float32, contiguous; bias (N,) float32 -> (..., N) float32
Tensor group_quantised_product(const Tensor& x, const Tensor& weights, const std::optional<Tensor>& bias,
                               int64_t width);

}  // namespace medusa
