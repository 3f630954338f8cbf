// What medusa.acceptance.sampling computes for all tokens of a vocabulary: the best of their scores, their
// noise, and the best of the sums of both.

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

// The `count` largest of `size` scores, the largest first.
void copy_largest(const float* scores, int64_t size, int64_t count, float* largest) {
  constexpr int64_t CHUNK = 16 * LANES;
  auto is_less_likely_kept = [](float a, float b) {
    return is_larger(a, b);
  };
  std::vector<float> kept(scores, scores + count);  // a heap: the least is in front
  std::make_heap(kept.begin(), kept.end(), is_less_likely_kept);
  for (int64_t begin = count; begin < size; begin += CHUNK) {
    int64_t end = std::min(begin + CHUNK, size), i = begin;
    Vec least = splat(kept.front());
    Int is_better = {};
    for (; i + LANES <= end; i += LANES) {
      Vec score = load(scores + i);
      is_better |= (score > least) | (score != score);
    }
    bool has_better = i < end;
    for (int lane = 0; lane < LANES; lane++) has_better |= is_better[lane] != 0;
    for (int64_t each = has_better ? begin : end; each < end; each++) {
      if (!is_larger(scores[each], kept.front())) continue;
      std::pop_heap(kept.begin(), kept.end(), is_less_likely_kept);
      kept.back() = scores[each];
      std::push_heap(kept.begin(), kept.end(), is_less_likely_kept);
    }
  }
  std::sort_heap(kept.begin(), kept.end(), is_less_likely_kept);
  std::copy(kept.begin(), kept.end(), largest);
}

// "lowbias32" (C. Wellons, 2018), of a number or of a vector of them.
template <typename Word> Word mixed(Word x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

typedef uint32_t Words32 __attribute__((vector_size(VECTOR_BYTES)));

// Which noise: that of a seed and a position.
struct NoiseKey {
  uint32_t first, second;

  NoiseKey(uint64_t seed, uint32_t position) {
    constexpr uint32_t GOLDEN = 0x9E3779B9u;
    uint32_t of_row =
        mixed(static_cast<uint32_t>(seed) ^ mixed(static_cast<uint32_t>(seed >> 32) + GOLDEN));
    first = mixed(position ^ of_row);
    second = mixed(first + GOLDEN);
  }

  // The 31 bits of a token, or of a vector of them.
  template <typename Word> Word bits_of(Word tokens) const {
    return mixed(mixed(tokens + first) ^ second) & 0x7FFFFFFFu;
  }
};

Words32 counted_from(uint32_t first) {
  Words32 numbers;
  for (int lane = 0; lane < LANES; lane++) numbers[lane] = first + lane;
  return numbers;
}

// ---- the largest of scores + noise

// Minus the uniform number in (0, 1) that the noise is made of, rounded as in Python.
constexpr float STEP = -0x1p-31f, LEAST = 0x1p-24f - 1;
float minus_uniform(uint32_t bits) {
  return std::max((static_cast<float>(static_cast<int32_t>(bits)) + 0.5f) * STEP, LEAST);
}
Vec minus_uniform(Words32 bits) {
  return larger((__builtin_convertvector((Int)bits, Vec) + 0.5f) * STEP, splat(LEAST));
}

// The noise can be no larger: -log(2^-32) = 22.181.
constexpr float MOST_NOISE = 22.2f;
// What a rough sum must reach to be looked at: the error of `rough_noise` is 0.03 at most, and float32 rounds.
float bound_below(double best) { return static_cast<float>(best - 0.1 - 0x1p-21 * std::abs(best)); }

// The logarithm of normal positive numbers, to 1e-4: a polynomial through the Chebyshev points of degree 4.
Vec rough_log(Vec x) {
  Int bits = (Int)x;
  Vec exponent = __builtin_convertvector((bits >> 23) - 127, Vec);
  Vec t = (Vec)((bits & 0x7FFFFF) | 0x3F800000) - 1.f;
  Vec of_mantissa = multiply_add(t, splat(-0.0543709336f), splat(0.216448708f));
  of_mantissa = multiply_add(t, of_mantissa, splat(-0.465020437f));
  of_mantissa = multiply_add(t, of_mantissa, splat(0.995965783f));
  of_mantissa = multiply_add(t, of_mantissa, splat(7.94207765e-05f));
  return multiply_add(exponent, splat(0.693147181f), of_mantissa);
}

Vec rough_noise(Words32 bits) {
  Vec x = minus_uniform(bits);
  // log(1 + x) is x where that is small, and 1 + x would lose its digits
  Vec minus_log = x > -0x1p-8f ? -x : -rough_log(1.f + x);
  return -rough_log(minus_log);
}

// To 1e-6: the least argument is 2^-32, and 1 - that rounds to 2^-54. (`std::log` of doubles would need a glibc
// that is newer than 2.28, which the wheel admits.)
double exact_noise(uint32_t bits) {
  double minus_log = -std::log1p(static_cast<double>(minus_uniform(bits)));
  return -std::log1p(minus_log - 1);
}

// The two largest sums, and the token of the first.
struct BestSum {
  double best = MINUS_INFINITY, second = MINUS_INFINITY;
  int64_t token = -1;

  void offer(double sum, int64_t of) {
    second = std::max(second, std::min(best, sum));
    if (sum > best) token = of;
    best = std::max(best, sum);
  }
  void offer(const BestSum& other) {
    offer(other.best, other.token);
    second = std::max(second, other.second);
  }
  // Whether float32 logarithms of any library, and the rounding of their sum, leave the first the first:
  // they are right to 1e-5, and the sum is rounded to 2^-24 of itself.
  bool is_certain() const { return best - second > 4e-5 + 4 * 0x1p-24 * std::abs(best); }
};

// Among `count` tokens from `begin`, of those whose sum can be as large as `floor`.
BestSum best_sum(const float* scores, NoiseKey key, int64_t begin, int64_t count, double floor) {
  constexpr int64_t CHUNK = 32 * LANES;
  BestSum found;
  alignas(VECTOR_BYTES) float rough[CHUNK];
  for (int64_t start = begin; start < begin + count; start += CHUNK) {
    int64_t width = std::min(CHUNK, begin + count - start), whole = width / LANES * LANES;
    float bound = bound_below(std::max(floor, found.best));
    Vec highest = splat(MINUS_INFINITY);
    for (int64_t i = 0; i < whole; i += LANES) highest = larger(load(scores + start + i), highest);
    bool may_win = whole < width;
    for (int lane = 0; lane < LANES; lane++) may_win |= highest[lane] + MOST_NOISE > bound;
    if (!may_win) continue;
    highest = splat(MINUS_INFINITY);
    for (int64_t i = 0; i < whole; i += LANES) {
      Vec sum = load(scores + start + i) + rough_noise(key.bits_of(counted_from(start + i)));
      store(rough + i, sum);
      highest = larger(sum, highest);
    }
    std::copy_n(scores + start + whole, width - whole, rough + whole);
    for (int64_t i = whole; i < width; i++) rough[i] += MOST_NOISE;
    may_win = whole < width;
    for (int lane = 0; lane < LANES; lane++) may_win |= highest[lane] > bound;
    if (!may_win) continue;
    for (int64_t i = 0; i < width; i++) {
      if (rough[i] <= bound_below(std::max(floor, found.best))) continue;
      int64_t token = start + i;
      found.offer(scores[token] + exact_noise(key.bits_of(static_cast<uint32_t>(token))), token);
    }
  }
  return found;
}

}  // namespace

// argmax(scores + noise) over the last dimension, with the noise of medusa.acceptance.sampling.gumbel_noise:
// scores (R, V) float32, seeds (R,), positions (R,) -> (R,) long. -1 where the last bits of the logarithms
// would decide, or a score is not finite.
Tensor noisy_argmax(Tensor scores, Tensor seeds, Tensor positions) {
  constexpr int64_t PIECE = 16384;
  scores = as_contiguous(scores);
  seeds = as_contiguous(seeds);
  positions = as_contiguous(positions);
  int64_t R = scores.dim() == 2 ? scores.size(0) : 0, V = R ? scores.size(1) : 0;
  STD_TORCH_CHECK(R && V && scores.scalar_type() == ScalarType::Float, "scores must be (R, V) float32");
  STD_TORCH_CHECK(has_shape(seeds, ScalarType::Long, {R}) && has_shape(positions, ScalarType::Long, {R}),
                  "seeds and positions must be (R,) long");
  Tensor chosen = new_tensor({R}, ScalarType::Long);
  int64_t num_pieces = (V + PIECE - 1) / PIECE;
  std::vector<BestSum> found(num_pieces);
  for (int64_t row = 0; row < R; row++) {
    const float* of_row = numbers<float>(scores) + row * V;
    NoiseKey key(numbers<int64_t>(seeds)[row], numbers<int64_t>(positions)[row]);
    int64_t& token = numbers<int64_t>(chosen)[row];
    token = first_largest(of_row, V);
    if (!std::isfinite(of_row[token])) {
      token = -1;
      continue;
    }
    double floor = of_row[token] + exact_noise(key.bits_of(static_cast<uint32_t>(token)));
    parallel_for(num_pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        found[i] = best_sum(of_row, key, i * PIECE, std::min(PIECE, V - i * PIECE), floor);
    });
    BestSum best;
    for (const BestSum& each : found) best.offer(each);
    token = best.is_certain() ? best.token : -1;
  }
  return chosen;
}

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

// The values of torch's topk, scores (R, V) float32 -> (R, count).
Tensor largest(const Tensor& given, int64_t count) {
  Tensor scores = as_contiguous(given);
  bool fits = has_shape(scores, ScalarType::Float, {ANY, ANY}) && count > 0 && count <= scores.size(1);
  STD_TORCH_CHECK(fits, "scores must be (R, V) float32, and count from 1 to V");
  int64_t R = scores.size(0), V = scores.size(1);
  Tensor found = new_tensor({R, count}, ScalarType::Float);
  parallel_for(R, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      copy_largest(numbers<float>(scores) + row * V, V, count, numbers<float>(found) + row * count);
  });
  return found;
}

// Puts `filler` where scores (R, V) float32 are below the edge of their row, (R, 1).
void cut_below(Tensor scores, const Tensor& edges, double filler) {
  bool fits = has_shape(scores, ScalarType::Float, {ANY, ANY}) && scores.is_contiguous();
  STD_TORCH_CHECK(fits && has_shape(edges, ScalarType::Float, {scores.size(0), 1}),
                  "scores must be (R, V) float32 in one piece, and edges (R, 1)");
  int64_t V = scores.size(1);
  Tensor of_rows = as_contiguous(edges);
  for (int64_t row = 0; row < scores.size(0); row++) {
    float* to = numbers<float>(scores) + row * V;
    float edge = numbers<float>(of_rows)[row], value = static_cast<float>(filler);
    int64_t i = 0;
    for (; i + LANES <= V; i += LANES) {
      Vec score = load(to + i);
      store(to + i, score < edge ? splat(value) : score);
    }
    for (; i < V; i++) to[i] = to[i] < edge ? value : to[i];
  }
}

// The bits of medusa.acceptance.sampling.hashed_bits: seeds (B,), positions (B, L) -> (B, L, V), of all tokens
// of a vocabulary or of `tokens` (B, C) int32 alone, (B, L, C).
Tensor hashed_bits(Tensor seeds, Tensor positions, int64_t vocab_size, std::optional<Tensor> tokens) {
  seeds = as_contiguous(seeds);
  positions = as_contiguous(positions);
  bool fits = has_shape(positions, ScalarType::Long, {ANY, ANY});
  STD_TORCH_CHECK(fits && has_shape(seeds, ScalarType::Long, {positions.size(0)}) && vocab_size >= 0,
                  "seeds must be (B,) long, and positions (B, L) long");
  int64_t B = positions.size(0), L = positions.size(1), width = vocab_size;
  if (tokens) {
    tokens = as_contiguous(*tokens);
    STD_TORCH_CHECK(has_shape(*tokens, ScalarType::Int, {B, ANY}), "tokens must be (B, C) int32");
    width = tokens->size(1);
  }
  Tensor bits = new_tensor({B, L, width}, ScalarType::Int);
  parallel_for(B * L, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      NoiseKey key(numbers<int64_t>(seeds)[i / L], numbers<int64_t>(positions)[i]);
      const int32_t* of_row = tokens ? numbers<int32_t>(*tokens) + i / L * width : nullptr;
      int32_t* to = numbers<int32_t>(bits) + i * width;
      for (int64_t at = 0; at < width; at += LANES) {
        size_t num_bytes = std::min<int64_t>(width - at, LANES) * sizeof(uint32_t);
        Words32 numbers_of = counted_from(at);
        if (of_row) std::memcpy(&numbers_of, of_row + at, num_bytes);
        Words32 found = key.bits_of(numbers_of);
        std::memcpy(to + at, &found, num_bytes);
      }
    }
  });
  return bits;
}

}  // namespace medusa
