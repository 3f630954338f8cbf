// Tensors of torch, through its stable interface: their numbers, new ones, and checks of those that come in.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace medusa {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t ANY = -1;  // size of a dimension

template <typename T> T* numbers(const Tensor& of) { return static_cast<T*>(of.data_ptr()); }
template <typename T> T* numbers(const std::optional<Tensor>& of) {
  return of ? static_cast<T*>(of->data_ptr()) : nullptr;
}

// An uninitialised tensor. A layer asks for many, and torch's dispatcher takes longer than its allocator.
inline Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  AtenTensorHandle tensor;
  int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(shape.size(), shape.data(), strides.data(), code,
                                                  aoti_torch_device_type_cpu(), 0, &tensor));
  return Tensor(tensor);
}

inline Tensor as_contiguous(const Tensor& given) {
  return given.is_contiguous() ? given : torch::stable::contiguous(given);
}

inline std::vector<int64_t> shape_of(const Tensor& given) {
  return {given.sizes().begin(), given.sizes().end()};
}

// Shapes and indices are checked where they come in: all that is read afterwards lies within its tensor.
inline bool has_shape(const Tensor& given, ScalarType type, const std::vector<int64_t>& shape) {
  bool fits = given.scalar_type() == type && given.is_contiguous();
  fits = fits && given.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); i++) fits = shape[i] == ANY || given.size(i) == shape[i];
  return fits;
}
inline bool has_shape_if_given(const std::optional<Tensor>& given, ScalarType type,
                               const std::vector<int64_t>& shape) {
  return !given || has_shape(*given, type, shape);
}
template <typename T> bool lies_within(const T* numbers, int64_t count, int64_t least, int64_t end) {
  return std::all_of(numbers, numbers + count, [&](T each) { return each >= least && each < end; });
}
inline bool are_indices(const Tensor& given, const std::vector<int64_t>& shape, int64_t least, int64_t end) {
  return has_shape(given, ScalarType::Long, shape) &&
         lies_within(numbers<int64_t>(given), given.numel(), least, end);
}

}  // namespace medusa
