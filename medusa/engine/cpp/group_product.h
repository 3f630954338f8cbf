// A product of rows with weights that stay as a file has quantised them, in the form in which its parts pass
// it on: group_products.cpp cuts it into pieces, and this and group_products_in_tiles.cpp compute pairs of
// panels.
//
// They are multiplied in one of two ways:
//
// - In whole numbers: each row is rounded to 8 bits, with a step for a run of 32 numbers, or of 256 where a
//   file's scales are whole numbers themselves (as llama.cpp does). Sums of a group are exact in any order;
//   groups are added in one order.
// - In float32: a block of weights is widened to float32 and multiplied by rows as they are, column after
//   column.
//
// Either way the bits of a row's result depend on that row alone.

#pragma once

#include <array>
#include <memory>

#include "group_quantised.h"
#include "group_weights.h"

namespace medusa {

// How far ahead weights are fetched, into the second cache.
constexpr int64_t GROUP_BYTES_AHEAD = 8 * 4096;

// Whether four products of bytes are added in one instruction.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !(defined(__AVXVNNI__) && !defined(MEDUSA_AVX512))
constexpr bool MULTIPLIES_QUADS = false;
#else
constexpr bool MULTIPLIES_QUADS = true;
#endif

// Whether codes are as large as 255, as those of a table are: sums of two of their products need 32 bits.
template <typename F> constexpr bool HAS_LARGE_CODES = F::IS_TABLE || F::BITS == 8;

// Numbers of a row lie in 8 bits; or in 16, columns 0, 2, 1 and 3 of each quad, for products of pairs.
template <typename F> constexpr int64_t BYTES_OF_NUMBER = HAS_LARGE_CODES<F> && !MULTIPLIES_QUADS ? 2 : 1;

// Rows rounded to 8 bits. A weight is its code less the code for zero, or its code less a minimum, so the
// products of codes lack a term that has the sum of a group's numbers for its factor. `corrections` hold this
// factor for each group of a row, in the way that its form needs:
//
// - HAS_ZERO: minus the code for zero times the sum; sums of products begin with it;
// - HAS_OWN_ZEROS: the sum;
// - HAS_MINIMA, and HAS_WHOLE_SCALES: the sums of two groups as a pair of 16 bits;
// - HAS_MINIMA alone: the sum times the step, a float32.
struct WholeRows {
  int8_t* numbers;  // (rows, padded K), of BYTES_OF_NUMBER each
  float* steps;     // (rows, padded K / RUN)
  int32_t* corrections;  // (rows, padded K / GROUP); of whole minima, half as many
  int64_t width, num_steps, num_corrections;
  // Bytes from row to row: an odd number of lines, or rows would share few places of the first cache.
  int64_t stride;

  // A row of these, from column k on.
  template <typename F> struct Row {
    const int8_t* numbers;
    const float* steps;
    const int32_t* corrections;
  };
  template <typename F> Row<F> row(int64_t index, int64_t k = 0) const {
    constexpr int64_t GROUPS_TOGETHER = F::HAS_WHOLE_SCALES && F::HAS_MINIMA ? 2 : 1;
    return {numbers + index * stride + k * BYTES_OF_NUMBER<F>, steps + index * num_steps + k / F::RUN,
            corrections + index * num_corrections + k / F::GROUP / GROUPS_TOGETHER};
  }
};

struct GroupProduct {
  GroupWeights weights;
  const float *x, *bias;
  int64_t M, K, N;
  std::array<WholeRows, NUM_FORMS> rows = {};                   // of each form that takes part
  std::array<std::shared_ptr<float[]>, NUM_FORMS> memory = {};  // where these lie
  Slice slice = {};  // of the outputs of each part

  // The same product of `count` rows, from `first` on.
  GroupProduct of_rows(int64_t first, int64_t count) const {
    GroupProduct some = *this;
    some.x += first * K;
    some.M = count;
    for (WholeRows& each : some.rows) {
      if (!each.numbers) continue;
      each.numbers += first * each.stride;
      each.steps += first * each.num_steps;
      each.corrections += first * each.num_corrections;
    }
    return some;
  }
  bool in_whole_numbers() const { return weights.header->in_whole_numbers; }
};

// Where results go: that of a row and a column of the whole product lies at row * stride + column.
struct Target {
  float* data;
  int64_t stride;
};

// A pair of panels of a part, which are outputs `column` to `column + width`.
struct PanelPair {
  const Part& part;
  const uint8_t* panels;
  int64_t panel_bytes, column, width;

  PanelPair(const GroupWeights& weights, const Part& part, int64_t pair, int64_t first_column)
      : part(part),
        panel_bytes(part.panel_bytes()),
        column(first_column + 2 * LANES * pair),
        width(std::min<int64_t>(2 * LANES, part.num_outputs - 2 * LANES * pair)) {
    panels = weights.panels(part) + 2 * pair * panel_bytes;
  }
};

// Sums (num_rows, num_lanes) of rows from `row` on become `width` results from `column` on, plus their bias.
inline void write_results(const GroupProduct& product, const Target& to, const float* sums, int64_t num_rows,
                          int64_t num_lanes, int64_t row, int64_t column, int64_t width) {
  for (int64_t m = 0; m < num_rows; m++) {
    const float* from = sums + m * num_lanes;
    float* y = to.data + (row + m) * to.stride + column;
    for (int64_t n = 0; n < width; n++) y[n] = product.bias ? from[n] + product.bias[column + n] : from[n];
  }
}

// sums + a lane's two whole minima times the two numbers of `pair`
inline Int minima_added(Int sums, const uint8_t* minima, int32_t pair) {
  typedef uint8_t Narrow __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
  return pairs_added(sums, __builtin_convertvector(*reinterpret_cast<const Narrow*>(minima), Pairs), pair);
}

// Rows from which on a pass is computed in tiles; a few blocks of rows are faster in vectors.
constexpr int64_t LEAST_ROWS_IN_TILES = 17;

// Products of all rows, in whole numbers, with pairs `pair` to `end` of a part, whose outputs begin at
// `first_column`; in tile registers, where they are.
void multiply_pairs_in_tiles(const GroupProduct& product, const Part& part, int64_t pair, int64_t end,
                             int64_t first_column, const Target& to);
// In float32.
void multiply_pairs_in_float32(const GroupProduct& product, const Part& part, int64_t pair, int64_t end,
                               int64_t first_column, const Target& to);

}  // namespace medusa
