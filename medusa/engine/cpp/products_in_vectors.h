// Products in vectors, for all formats of weights: rows in blocks whose sums stay in registers, by panels
// side by side.
//
// A format says how its weights are read: `Format::Panels<J>` are J panels, and what all blocks of rows share
// of them; their `multiply<M>` gives the sums (M, J, LANES) of a block of M rows. Each format is compiled in
// a file of its own.

#pragma once

#include <type_traits>

#include "product.h"

namespace medusa {

// Panels that are read side by side, at most. Narrow vectors need more sums under way than two panels have;
// with wide ones a pass of one node took a tenth longer with four.
constexpr int MOST_PANELS = LANES == 16 ? 2 : 4;

// Rows of a block, at most. Few registers hold the sums of 6 rows by two panels, where each number that is
// read of a row serves both.
constexpr int MOST_ROWS = REGISTERS == 32 ? 13 : 6;

// How far ahead weights are fetched, into the second cache: processors look no page ahead by themselves, and
// at eight pages two cores had read 1.3 times as much as at one.
constexpr int64_t PAGE = 4096, BYTES_AHEAD = 8 * PAGE;

// Weights that are fetched while a block is summed up, column after column.
struct Prefetch {
  const char* next;  // in the first of the panels
  int64_t step, panel_bytes;

  template <int J> void fetch() {
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) __builtin_prefetch(next + j * panel_bytes, 0, 2);
    next += step;
  }
};

template <typename Weight>
constexpr int PER_LANE = std::is_same_v<Weight, BFloat16> || std::is_same_v<Weight, int8_t> ? 2 : 1;

// Numbers of each lane of a panel, a multiple of PER_LANE.
template <typename Weight> int64_t padded_inputs(int64_t K) {
  return (K + PER_LANE<Weight> - 1) / PER_LANE<Weight> * PER_LANE<Weight>;
}

template <int M, int J> inline void store_sums(const Vec (&sums)[M][J], float* results) {
#pragma GCC unroll 13
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) store(results + (m * J + j) * LANES, sums[m][j]);
}

// The sums (M, J, LANES) of M rows with J panels of float32, bfloat16 or float16, the first of which is at
// `w`.
template <typename Weight, int M, int J>
[[gnu::noinline]] void multiply_block(const Product& product, const Weight* w, int64_t row, Prefetch prefetch,
                                      float* results) {
  constexpr int PER = PER_LANE<Weight>;
  const float* x = product.x + row * product.K;
  int64_t height = padded_inputs<Weight>(product.K), k = 0;
  Vec sums[M][J] = {};
  auto add_columns = [&]<int COUNT>() __attribute__((always_inline)) {
    prefetch.fetch<J>();
#pragma GCC unroll 2
    for (int i = 0; i < COUNT; i++) {
      Vec weights[J];  // one of each lane at a time: more would push sums out of the registers
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) weights[j] = widened(w + (j * height + k) * LANES, i);
#pragma GCC unroll 13
      for (int m = 0; m < M; m++) {
        Vec value = splat(x[m * product.K + k + i]);
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) sums[m][j] = multiply_add(value, weights[j], sums[m][j]);
      }
    }
  };
  for (; k + PER <= product.K; k += PER) add_columns.template operator()<PER>();
  if (k < product.K) add_columns.template operator()<1>();
  store_sums<M, J>(sums, results);
}

// J panels of a format that is read column after column.
template <int J> struct ColumnPanels {
  const Product& product;
  const char* weights;
  int64_t ahead, num_blocks;

  // What follows the thread's last panel is another thread's, and not fetched.
  ColumnPanels(const Product& product, int64_t panel, int64_t thread_end, int64_t num_blocks)
      : product(product),
        weights(product.panels + panel * product.panel_bytes),
        ahead(std::clamp((thread_end - panel - J) * product.panel_bytes, PAGE, BYTES_AHEAD)),
        num_blocks(num_blocks) {}

  // Blocks of rows share out what is fetched, so that memory is asked as evenly as can be.
  Prefetch prefetch(int64_t block, int64_t column_bytes) const {
    const char* next = weights + ahead + product.panel_bytes * block / num_blocks;
    return {next, column_bytes / num_blocks, product.panel_bytes};
  }
};

// J panels from `panel` on, each read once for all blocks of rows. The last block overlaps the one before it,
// and computes its rows to the same bits again.
template <typename Format, int M, int J>
void multiply_panels(const Product& product, int64_t panel, int64_t thread_end) {
  int64_t num_blocks = (product.M + M - 1) / M, column = panel * LANES;
  int64_t count = std::min<int64_t>(J * LANES, product.N - column);
  typename Format::template Panels<J> panels(product, panel, thread_end, num_blocks);
  for (int64_t block = 0; block < num_blocks; block++) {
    int64_t row = std::min(block * M, product.M - M);
    float results[M * J * LANES];
    panels.template multiply<M>(row, block, results);
    for (int m = 0; m < M; m++) write_outputs(product, results + m * J * LANES, row + m, column, count);
  }
}

// Panels that fit into the registers beside a block of so many rows.
template <typename Format> constexpr int panels_for(int rows) {
  return std::min(MOST_PANELS, (REGISTERS - Format::OTHER_REGISTERS) / (rows + 1));
}

// Multiplication in blocks of `rows` rows.
template <typename Format, int M = Format::MOST_ROWS> Multiply in_blocks_of(int64_t rows) {
  if constexpr (M > 1)
    if (rows < M) return in_blocks_of<Format, M - 1>(rows);
  return [](const Product& product, int64_t panel, int64_t end, int64_t thread_end) {
    constexpr int J = panels_for<Format>(M);
    for (; panel + J <= end; panel += J) multiply_panels<Format, M, J>(product, panel, thread_end);
    for (; panel < end; panel++) multiply_panels<Format, M, 1>(product, panel, thread_end);
  };
}

// Blocks of about equal height, as few as hold all rows.
template <typename Format> Plan plan_of_blocks(const Product& product) {
  int64_t num_blocks = (product.M + Format::MOST_ROWS - 1) / Format::MOST_ROWS;
  return {in_blocks_of<Format>((product.M + num_blocks - 1) / num_blocks), MOST_PANELS};
}

}  // namespace medusa
