// The operator `packed_product`: checks what comes in, and has threads multiply pieces of the weights'
// panels.

#include "group_quantised.h"
#include "operators.h"
#include "product.h"
#include "threads.h"
#include "tiles.h"
#include "twelve_bits.h"

namespace medusa {

[[gnu::noinline]] void write_outputs(const Product& product, const float* sums, int64_t row, int64_t column,
                                     int64_t count) {
  float* y = product.y + row * product.stride + column;
  int64_t n = 0;
  for (; n + LANES <= count; n += LANES) {
    Vec sum = load(sums + n);
    if (product.scales) sum *= load(product.scales + column + n);
    store(y + n, product.bias ? sum + load(product.bias + column + n) : sum);
  }
  for (; n < count; n++) {
    float sum = product.scales ? sums[n] * product.scales[column + n] : sums[n];
    y[n] = product.bias ? sum + product.bias[column + n] : sum;
  }
}

namespace {

// Rows that are multiplied together, at most; in tiles, their parts stay in the second cache while all
// weights pass by.
constexpr int64_t ROWS_AT_ONCE = 128;

// A product in pieces of its weights' panels.
struct SharedProduct : Work {
  std::vector<Tensor> kept;  // what the product's pointers lead to
  Scratch scratch;
  Product product;
  Plan plan;
  int64_t num_panels;

  int64_t units() const { return (num_panels + plan.panels_together - 1) / plan.panels_together; }
  int64_t first_panel(int64_t piece) const {
    return std::min(units() * piece / num_pieces * plan.panels_together, num_panels);
  }
  int64_t first_output(int64_t piece) const { return std::min(first_panel(piece) * LANES, product.N); }

  int64_t result_size(int64_t piece) const override {
    return product.M * (first_output(piece + 1) - first_output(piece));
  }
  void compute(int64_t piece, int64_t end, float* result) const override {
    Product mine = product;
    mine.stride = first_output(piece + 1) - first_output(piece);
    mine.y = result - first_output(piece);
    plan.multiply(mine, first_panel(piece), first_panel(piece + 1), first_panel(end));
  }
  void publish(int64_t piece, const float* result) const override {
    int64_t first = first_output(piece), count = first_output(piece + 1) - first;
    for (int64_t row = 0; row < product.M; row++)
      std::memcpy(product.y + row * product.stride + first, result + row * count, count * sizeof(float));
  }
  void run(int64_t first, int64_t last) const override {
    plan.multiply(product, first_panel(first), first_panel(last), first_panel(last));
  }
};

// Posts a product with a slice of weights of one format; `product` has all but a plan, and N outputs of the
// slice.
template <typename Weight>
void multiply(Product product, const Tensor& panels, Slice slice, const std::vector<Tensor>& kept,
              const Post& post) {
  constexpr bool IS_INT8 = std::is_same_v<Weight, int8_t>;
  constexpr bool IS_TWELVE_BITS = std::is_same_v<Weight, TwelveBits>;
  constexpr bool FITS_TILES = std::is_same_v<Weight, BFloat16> || IS_TWELVE_BITS || IS_INT8;
  bool in_tiles = FITS_TILES && has_tiles;
  int64_t K = product.K, per_lane = IS_INT8 ? (in_tiles ? 4 : 2) : std::is_same_v<Weight, BFloat16> ? 2 : 1;
  bool is_packed = IS_TWELVE_BITS
                       ? has_shape(panels, ScalarType::Byte, {ANY, twelve_bit_panel_bytes(K)})
                       : panels.dim() == 4 && panels.size(2) == LANES && panels.size(3) == per_lane;
  int64_t num_panels = (product.N + LANES - 1) / LANES;
  STD_TORCH_CHECK(is_packed && panels.size(0) == slice.count * num_panels,
                  "panels must be packed for this processor");
  STD_TORCH_CHECK(IS_TWELVE_BITS || panels.size(1) == (K + per_lane - 1) / per_lane,
                  "rows must be float32, of the weight's width");
  product.panels += slice.index * num_panels * product.panel_bytes;
  int64_t left = product.M;
  int64_t times = in_tiles ? (left + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE : std::min<int64_t>(left, 1);
  for (; times; times--) {
    product.M = (left + times - 1) / times;
    auto work = std::make_shared<SharedProduct>();
    work->kept = kept;
    work->product = product;
    work->num_panels = num_panels;
#if defined(HAS_TILES)
    if constexpr (FITS_TILES)
      if (in_tiles) work->plan = plan_in_tiles<Weight>(work->product, work->scratch);
#endif
    if (!in_tiles) work->plan = plan_in_vectors<Weight>(work->product, work->scratch);
    work->num_pieces = pieces_of(work->units(), work->plan.panels_together * product.panel_bytes);
    post(std::move(work));
    left -= product.M;
    product.x += product.M * K;
    product.y += product.M * product.N;
  }
}

}  // namespace

void post_product(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& scales,
                  const std::optional<Tensor>& bias, int64_t N, Slice slice, int64_t row, int64_t count,
                  float* y, const Post& post) {
  Product product;
  product.M = count;
  product.K = x.size(x.dim() - 1);
  product.N = product.stride = N;
  product.x = numbers<float>(x) + row * product.K;
  product.panels = numbers<char>(panels);
  product.panel_bytes = panels.size(0) ? panels.numel() * panels.element_size() / panels.size(0) : 0;
  product.scales = scales ? numbers<float>(scales) + slice.index * N : nullptr;
  product.bias = bias ? numbers<float>(bias) + slice.index * N : nullptr;
  product.y = y;
  std::vector<Tensor> kept{x, panels};
  for (const auto& each : {scales, bias})
    if (each) kept.push_back(*each);
  switch (panels.scalar_type()) {
    case ScalarType::Float: return multiply<float>(product, panels, slice, kept, post);
    case ScalarType::BFloat16: return multiply<BFloat16>(product, panels, slice, kept, post);
    case ScalarType::Half: return multiply<Half>(product, panels, slice, kept, post);
    case ScalarType::Char: return multiply<int8_t>(product, panels, slice, kept, post);
    case ScalarType::Byte: return multiply<TwelveBits>(product, panels, slice, kept, post);
    default:
      STD_TORCH_CHECK(false,
                      "panels must be float32, bfloat16, float16, int8, or bytes of twelve bits a weight");
  }
}

// x (..., K) float32, panels as product.h says or (P, twelve_bit_panel_bytes) bytes, scales and bias (N,)
// float32
// -> (..., N) float32
Tensor packed_product(const Tensor& given, const Tensor& panels, std::optional<Tensor> scales,
                      std::optional<Tensor> bias, int64_t width) {
  Tensor x = as_contiguous(given);
  int64_t K = x.dim() ? x.size(x.dim() - 1) : 0;
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "rows must be float32, of the weight's width");
  STD_TORCH_CHECK(panels.is_contiguous(), "panels must be packed for this processor");
  for (const auto& each : {scales, bias})
    STD_TORCH_CHECK(has_shape_if_given(each, ScalarType::Float, {width}),
                    "scales and bias must be (N,) float32");
  if (are_group_quantised(panels)) return group_quantised_product(x, panels, bias, width);
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = width;
  Tensor y = new_tensor(shape, ScalarType::Float);
  post_product(x, panels, scales, bias, width, {}, 0, K ? x.numel() / K : 0, numbers<float>(y), share);
  return y;
}

}  // namespace medusa
