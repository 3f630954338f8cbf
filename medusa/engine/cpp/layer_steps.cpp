// What stands between the products and the attention of a decoder layer, one operator each: for passes that
// torch has not compiled, where a layer would be fifty small operators, and calling them would take as long as
// half of its products. Each row is computed by itself, so its bits do not depend on the rows beside it.

#include <cmath>

#include "operators.h"
#include "threads.h"
#include "vectors.h"

namespace medusa {
namespace {

constexpr int64_t GRAIN = 1 << 14;  // numbers that are worth another thread

void check_rows(const Tensor& x, const char* what) {
  bool fits = x.scalar_type() == ScalarType::Float && x.is_contiguous() && x.dim() > 0;
  STD_TORCH_CHECK(fits && x.size(x.dim() - 1) % LANES == 0, what,
                  " must be (..., W) float32, contiguous, with a W of whole vectors");
}

// Calls body(row) for all rows of `x`, of `width` numbers.
template <typename Body> void for_rows(const Tensor& x, int64_t width, const Body& body) {
  parallel_for(x.numel() / width, std::max<int64_t>(1, GRAIN / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) body(row);
  });
}

void norm_of_row(const float* x, const float* weight, float eps, int64_t width, float* to) {
  Vec squares = {};
  for (int64_t i = 0; i < width; i += LANES) squares = multiply_add(load(x + i), load(x + i), squares);
  Vec scale = splat(1.f / std::sqrt(sum_of(squares) / width + eps));
  for (int64_t i = 0; i < width; i += LANES) store(to + i, load(x + i) * scale * load(weight + i));
}

void check_weight(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(has_shape(weight, ScalarType::Float, {x.size(x.dim() - 1)}), "weight must be (W,) float32");
}

}  // namespace

// x / sqrt(mean(x^2) + eps) * weight over the last dimension, x (..., W) and weight (W,).
Tensor norm(const Tensor& x, const Tensor& weight, double eps) {
  check_rows(x, "rows of a norm");
  check_weight(x, weight);
  int64_t width = x.size(x.dim() - 1);
  Tensor normed = new_tensor(shape_of(x), ScalarType::Float);
  for_rows(x, width, [&](int64_t row) {
    norm_of_row(numbers<float>(x) + row * width, numbers<float>(weight), eps, width,
                numbers<float>(normed) + row * width);
  });
  return normed;
}

// The sum of two tensors (..., W), and its norm.
std::tuple<Tensor, Tensor> sum_and_norm(const Tensor& x, const Tensor& more, const Tensor& weight, double eps) {
  check_rows(x, "rows of a sum");
  check_weight(x, weight);
  STD_TORCH_CHECK(has_shape(more, ScalarType::Float, shape_of(x)), "both parts of a sum must have one shape");
  int64_t width = x.size(x.dim() - 1);
  Tensor sum = new_tensor(shape_of(x), ScalarType::Float), normed = new_tensor(shape_of(x), ScalarType::Float);
  for_rows(x, width, [&](int64_t row) {
    const float *a = numbers<float>(x) + row * width, *b = numbers<float>(more) + row * width;
    float* to = numbers<float>(sum) + row * width;
    for (int64_t i = 0; i < width; i += LANES) store(to + i, load(a + i) + load(b + i));
    norm_of_row(to, numbers<float>(weight), eps, width, numbers<float>(normed) + row * width);
  });
  return {sum, normed};
}

// silu(gate) * up of rows (..., 2 W) that hold both, gate first: (..., W).
Tensor gated(const Tensor& both) {
  check_rows(both, "gates");
  std::vector<int64_t> shape = shape_of(both);
  int64_t width = shape.back() /= 2;
  STD_TORCH_CHECK(width % LANES == 0, "gates must have a width of whole vectors");
  Tensor result = new_tensor(shape, ScalarType::Float);
  for_rows(both, 2 * width, [&](int64_t row) {
    const float *gates = numbers<float>(both) + row * 2 * width, *ups = gates + width;
    float* to = numbers<float>(result) + row * width;
    for (int64_t i = 0; i < width; i += LANES) {
      Vec gate = load(gates + i), small = exponential(-absolute(gate));
      Vec share = gate < 0.f ? small : splat(1.f);
      store(to + i, gate * (share / (small + 1.f)) * load(ups + i));
    }
  });
  return result;
}

// The queries (B, H, N, D) of rows (B, N, (H + 2 H') D) that hold queries, keys and values; keys and values go to
// `slots` (B, N) of `keys` and `values` (B, H', S, D). Queries and keys are turned by the angles whose cosines
// and sines (B or 1, N, D) are given, halves of a head against each other.
Tensor turned_queries(const Tensor& rows, const Tensor& cosines, const Tensor& sines, const Tensor& slots,
                      Tensor keys, Tensor values) {
  check_rows(rows, "queries, keys and values");
  STD_TORCH_CHECK(rows.dim() == 3 && keys.dim() == 4, "rows must be (B, N, W), and keys (B, H', S, D)");
  int64_t B = rows.size(0), N = rows.size(1), W = rows.size(2);
  int64_t kept = keys.size(1), S = keys.size(2), D = keys.size(3), half = D / 2;
  int64_t H = W / D - 2 * kept;
  for (const Tensor* each : {&keys, &values}) {
    bool fits = each->scalar_type() == ScalarType::Float && each->dim() == 4 && each->stride(3) == 1;
    fits = fits && each->size(0) == B && each->size(1) == kept && each->size(2) == S && each->size(3) == D;
    STD_TORCH_CHECK(fits, "keys and values must be (B, H', S, D) float32 with contiguous rows");
  }
  bool fits = D > 0 && half % LANES == 0 && D % 2 == 0 && W % D == 0 && H > 0;
  STD_TORCH_CHECK(fits, "heads must have a width of twice whole vectors");
  for (const Tensor* each : {&cosines, &sines})
    STD_TORCH_CHECK(each->dim() == 3 && (each->size(0) == B || each->size(0) == 1) &&
                        has_shape(*each, ScalarType::Float, {ANY, N, D}),
                    "cosines and sines must be (B or 1, N, D) float32");
  STD_TORCH_CHECK(are_indices(slots, {B, N}, 0, S), "slots must be (B, N) long, of those of keys and values");
  Tensor queries = new_tensor({B, H, N, D}, ScalarType::Float);
  parallel_for(B * N, std::max<int64_t>(1, GRAIN / W), [&](int64_t begin, int64_t end) {
    for (int64_t node = begin; node < end; node++) {
      int64_t row = node / N, n = node % N, slot = numbers<int64_t>(slots)[node];
      const float* from = numbers<float>(rows) + node * W;
      const float* cosine = numbers<float>(cosines) + (cosines.size(0) == 1 ? n : node) * D;
      const float* sine = numbers<float>(sines) + (sines.size(0) == 1 ? n : node) * D;
      for (int64_t head = 0; head < H + kept; head++, from += D) {
        float* to = head < H ? numbers<float>(queries) + ((row * H + head) * N + n) * D
                             : numbers<float>(keys) + row * keys.stride(0) + (head - H) * keys.stride(1) +
                                   slot * keys.stride(2);
        for (int64_t i = 0; i < half; i += LANES) {
          Vec first = load(from + i), second = load(from + half + i);
          store(to + i, first * load(cosine + i) - second * load(sine + i));
          store(to + half + i, second * load(cosine + half + i) + first * load(sine + half + i));
        }
      }
      for (int64_t head = 0; head < kept; head++, from += D)
        std::copy_n(from, D,
                    numbers<float>(values) + row * values.stride(0) + head * values.stride(1) +
                        slot * values.stride(2));
    }
  });
  return queries;
}

}  // namespace medusa
