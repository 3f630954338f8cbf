// Weights that stay as a file has quantised them: whole numbers of 4 to 8 bits in groups, with a scale for each group.

#pragma once

#include "vectors.h"

// Whether these are such weights: bytes that begin with a Head.
bool are_group_quantised(const Tensor& weights);
// x (..., K) float32 that lies whole, bias (N,) float32 -> (..., N) float32
Tensor group_quantised_product(const Tensor& x, const Tensor& weights, const std::optional<Tensor>& bias, int64_t width);

// The operators; types are those of GGUF, and those of directories: see FILE_TYPES.
int64_t quantised_size(std::vector<int64_t> types, std::vector<int64_t> num_rows, int64_t num_inputs);
void begin_quantised(Tensor weights, std::vector<int64_t> types, std::vector<int64_t> num_rows, int64_t num_inputs, bool in_whole_numbers);
void pack_quantised(Tensor weights, int64_t part, Tensor file_rows, std::optional<Tensor> order);
Tensor unpack_quantised(Tensor weights);
Tensor quantised_rows(const Tensor& file_rows, const Tensor& ids, int64_t type, int64_t width);
