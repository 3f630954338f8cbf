// What medusa.acceptance.sampling computes for all tokens of a vocabulary: the best of their scores, and
// their noise.

#include <cmath>

#include "operators.h"
#include "threads.h"
#include "vectors.h"

namespace medusa {
namespace {

// Whether `a` counts as larger than `b`, as in torch: what is no number is the largest.
bool is_larger(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The first of the largest of `count` scores.
int64_t first_largest(const float* scores, int64_t count) {
  constexpr int64_t CHUNK = 64 * LANES;  // whose largest is found in whole vectors
  int64_t best = 0;
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    int64_t end = std::min(begin + CHUNK, count), i = begin;
    Vec highest = splat(scores[best]), is_no_number = {};
    for (; i + LANES <= end; i += LANES) {
      Vec score = load(scores + i);
      highest = larger(score, highest);
      is_no_number += score != score ? splat(1.f) : Vec{};
    }
    bool is_better = false;
    for (int lane = 0; lane < LANES; lane++)
      is_better |= highest[lane] > scores[best] || is_no_number[lane] > 0;
    // numbers one by one: all of a chunk that has a better one, and those beyond the last whole vector
    for (int64_t each = is_better ? begin : i; each < end; each++)
      if (is_larger(scores[each], scores[best])) best = each;
  }
  return best;
}

// "lowbias32" (C. Wellons, 2018), of a number or of a vector of them.
template <typename Word> Word mixed(Word x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

}  // namespace

// torch's argmax over the last dimension, scores (..., V) float32 -> (...): torch itself reads one by one.
Tensor argmax(const Tensor& given) {
  bool is_float = given.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(is_float && given.dim() && given.size(given.dim() - 1) > 0,
                  "scores must be (..., V) float32");
  Tensor scores = as_contiguous(given);
  std::vector<int64_t> shape = shape_of(scores);
  int64_t V = shape.back();
  shape.pop_back();
  Tensor found = new_tensor(shape, ScalarType::Long);
  for (int64_t row = 0; row < scores.numel() / V; row++)
    numbers<int64_t>(found)[row] = first_largest(numbers<float>(scores) + row * V, V);
  return found;
}

// The bits of medusa.acceptance.sampling.hashed_bits: seeds (B,), positions (B, L) -> (B, L, V)
Tensor hashed_bits(Tensor seeds, Tensor positions, int64_t V) {
  constexpr uint32_t GOLDEN = 0x9E3779B9u;
  typedef uint32_t Words32 __attribute__((vector_size(VECTOR_BYTES)));
  seeds = as_contiguous(seeds);
  positions = as_contiguous(positions);
  bool fits = has_shape(positions, ScalarType::Long, {ANY, ANY});
  STD_TORCH_CHECK(fits && has_shape(seeds, ScalarType::Long, {positions.size(0)}) && V >= 0,
                  "seeds must be (B,) long, and positions (B, L) long");
  int64_t B = positions.size(0), L = positions.size(1);
  Tensor bits = new_tensor({B, L, V}, ScalarType::Int);
  Words32 lanes;
  for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
  parallel_for(B * L, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      uint64_t seed = numbers<int64_t>(seeds)[i / L];
      uint32_t position = numbers<int64_t>(positions)[i];
      uint32_t of_row =
          mixed(static_cast<uint32_t>(seed) ^ mixed(static_cast<uint32_t>(seed >> 32) + GOLDEN));
      uint32_t first = mixed(position ^ of_row), second = mixed(first + GOLDEN);
      int32_t* to = numbers<int32_t>(bits) + i * V;
      for (int64_t token = 0; token < V; token += LANES) {
        Words32 found = mixed(mixed(lanes + (static_cast<uint32_t>(token) + first)) ^ second) & 0x7FFFFFFFu;
        std::memcpy(to + token, &found, std::min<int64_t>(V - token, LANES) * sizeof(uint32_t));
      }
    }
  });
  return bits;
}

}  // namespace medusa
