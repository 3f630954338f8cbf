// The operator `expert_products`: rows times the matrices of the experts that they choose.

#include "group_quantised.h"
#include "operators.h"
#include "product.h"
#include "threads.h"

namespace medusa {
namespace {

// Works that are done as one: their pieces follow each other, and threads meet once.
struct Together : Work {
  std::vector<std::shared_ptr<const Work>> works;
  std::vector<int64_t> begins;  // the first piece of each

  void add(std::shared_ptr<const Work> work) {
    begins.push_back(num_pieces);
    num_pieces += work->num_pieces;
    works.push_back(std::move(work));
  }
  // The work that a piece belongs to.
  size_t at(int64_t piece) const {
    return std::upper_bound(begins.begin(), begins.end(), piece) - begins.begin() - 1;
  }

  int64_t result_size(int64_t piece) const override {
    size_t i = at(piece);
    return works[i]->result_size(piece - begins[i]);
  }
  void compute(int64_t piece, int64_t end, float* result) const override {
    size_t i = at(piece);
    works[i]->compute(piece - begins[i], std::min(end - begins[i], works[i]->num_pieces), result);
  }
  void publish(int64_t piece, const float* result) const override {
    size_t i = at(piece);
    works[i]->publish(piece - begins[i], result);
  }
  void run(int64_t first, int64_t last) const override {
    for (size_t i = at(first); i < works.size() && begins[i] < last; i++)
      works[i]->run(std::max(first - begins[i], int64_t(0)), std::min(last - begins[i], works[i]->num_pieces));
  }
};

}  // namespace

// The products of rows with the experts that they choose: x (R, K) or, for each choice its own, (R, C, K);
// choices (R, C) long. The outputs of `num_experts` matrices lie below each other in `panels`, each with N of
// them, whole pairs of panels; scales and bias (num_experts * N,) -> (R, C, N) float32.
//
// An expert's rows are multiplied together, and all experts are one work.
Tensor expert_products(const Tensor& given, const Tensor& choices, const Tensor& panels,
                       std::optional<Tensor> scales, std::optional<Tensor> bias, int64_t num_experts,
                       int64_t N) {
  constexpr int64_t ROWS_OF_A_THREAD = 16;
  Tensor x = as_contiguous(given), which = as_contiguous(choices);
  STD_TORCH_CHECK(which.dim() == 2 && num_experts > 0 && are_indices(which, {ANY, ANY}, 0, num_experts),
                  "choices must be (R, C) numbers of experts");
  int64_t R = which.size(0), C = which.size(1), count = R * C;
  bool is_of_rows = has_shape(x, ScalarType::Float, {R, ANY});
  STD_TORCH_CHECK(is_of_rows || has_shape(x, ScalarType::Float, {R, C, ANY}),
                  "rows must be (R, K) or (R, C, K) float32");
  STD_TORCH_CHECK(panels.is_contiguous() && N % (2 * LANES) == 0, "panels must be packed for this processor");
  for (const auto& each : {scales, bias})
    STD_TORCH_CHECK(has_shape_if_given(each, ScalarType::Float, {num_experts * N}),
                    "scales and bias must be (experts * N,) float32");
  if (are_group_quantised(panels)) check_width(panels, num_experts * N);
  // choices in the order of their experts
  std::vector<int64_t> first(num_experts + 1), order(count), counts;
  std::vector<Slice> slices;
  for (int64_t i = 0; i < count; i++) first[numbers<int64_t>(which)[i] + 1]++;
  for (int64_t expert = 0; expert < num_experts; expert++) {
    if (first[expert + 1]) {
      slices.push_back({expert, num_experts});
      counts.push_back(first[expert + 1]);
    }
    first[expert + 1] += first[expert];
  }
  for (int64_t i = 0; i < count; i++) order[first[numbers<int64_t>(which)[i]]++] = i;

  int64_t K = x.size(x.dim() - 1);
  Tensor sorted = new_tensor({count, K}, ScalarType::Float);
  Tensor results = new_tensor({count, N}, ScalarType::Float), y = new_tensor({R, C, N}, ScalarType::Float);
  parallel_for(count, ROWS_OF_A_THREAD, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      std::memcpy(numbers<float>(sorted) + i * K,
                  numbers<float>(x) + (is_of_rows ? order[i] / C : order[i]) * K, K * sizeof(float));
  });
  auto together = std::make_shared<Together>();
  Post post = [&](std::shared_ptr<const Work> work) { together->add(std::move(work)); };
  if (are_group_quantised(panels)) {
    post_group_quantised(sorted, panels, bias, slices, counts, numbers<float>(results), post);
  } else {
    for (size_t i = 0, row = 0; i < slices.size(); row += counts[i++])
      post_product(sorted, panels, scales, bias, N, slices[i], row, counts[i],
                   numbers<float>(results) + row * N, post);
  }
  if (together->num_pieces) share(together);
  parallel_for(count, ROWS_OF_A_THREAD, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      std::memcpy(numbers<float>(y) + order[i] * N, numbers<float>(results) + i * N, N * sizeof(float));
  });
  return y;
}

}  // namespace medusa
