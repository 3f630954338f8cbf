// Products in vectors with weights of int8: rows are rounded to whole numbers of 16 bits, with a step for
// each run of 256. Products of a run are added as integers, which is exact in any order; runs are added in
// float32, in one order.

#include "products_in_vectors.h"

namespace medusa {
namespace {

// The weights of a pair of columns, two in each lane.
Pairs widened_pairs(const int8_t* from) {
#if defined(MEDUSA_AVX512)
  return (Pairs)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Pairs)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  typedef int8_t Narrow __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Narrow*>(from), Pairs);
#endif
}

// The sums (M, J, LANES) of M rows with J panels, the first of which is at `w`.
template <int M, int J>
[[gnu::noinline]] void multiply_int8_block(const Product& product, const int8_t* w, int64_t row,
                                           Prefetch prefetch, float* results) {
  int64_t pairs = padded_inputs<int8_t>(product.K) / 2, runs = runs_of(product.K);
  const int16_t* x = product.whole_x + row * runs * RUN;
  Vec sums[M][J] = {};
  for (int64_t run = 0; run < runs; run++) {
    Int whole[M][J] = {};
    for (int64_t k = run * RUN / 2; k < std::min(pairs, (run + 1) * RUN / 2); k++) {
      Pairs weights[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) weights[j] = widened_pairs(w + (j * pairs + k) * 2 * LANES);
      prefetch.fetch<J>();
#pragma GCC unroll 13
      for (int m = 0; m < M; m++) {
        int32_t pair;
        std::memcpy(&pair, x + m * runs * RUN + 2 * k, sizeof(pair));
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) whole[m][j] = pairs_added(whole[m][j], weights[j], pair);
      }
    }
#pragma GCC unroll 13
    for (int m = 0; m < M; m++) {
      Vec step = splat(product.run_steps[(row + m) * runs + run]);
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) {
        Vec sum = __builtin_convertvector(whole[m][j], Vec);
        sums[m][j] = multiply_add(sum, step, sums[m][j]);
      }
    }
  }
  store_sums<M, J>(sums, results);
}

struct Int8 {
  // Whole numbers, which are not added as they are multiplied, wait for no reading: more rows fit than of
  // floats.
  static constexpr int MOST_ROWS = REGISTERS == 32 ? 13 : 12;
  static constexpr int OTHER_REGISTERS = 3;  // a pair of a row, products before they are added, and a mask

  template <int J> struct Panels : ColumnPanels<J> {
    using ColumnPanels<J>::ColumnPanels;

    template <int M> void multiply(int64_t row, int64_t block, float* results) const {
      auto* weights = reinterpret_cast<const int8_t*>(this->weights);
      multiply_int8_block<M, J>(this->product, weights, row, this->prefetch(block, 2 * LANES), results);
    }
  };
};

// Rows in steps.
void round_rows(Product& product, Scratch& scratch) {
  int64_t runs = runs_of(product.K);
  float* steps = scratch.of(product.M * runs * (1 + RUN / 2));
  int16_t* whole = reinterpret_cast<int16_t*>(steps + product.M * runs);
  for (int64_t row = 0; row < product.M; row++)
    for (int64_t run = 0; run < runs; run++) {
      const float* x = product.x + row * product.K + run * RUN;
      int64_t count = std::min(RUN, product.K - run * RUN), index = row * runs + run;
      steps[index] = round_run(x, count, whole + index * RUN);
    }
  product.whole_x = whole;
  product.run_steps = steps;
}

}  // namespace

template <> Plan plan_in_vectors<int8_t>(Product& product, Scratch& scratch) {
  round_rows(product, scratch);
  return plan_of_blocks<Int8>(product);
}

}  // namespace medusa
