// Products in float32 with weights that stay as a file has quantised them: a block of two panels is widened,
// and multiplied by all rows.

#include "group_product.h"
#include "scratch.h"

namespace medusa {
namespace {

using Widened = float[2][MOST_COLUMNS * LANES];

// Sums (M, 2, LANES) of M rows += `count` columns of x, the first of which is at `x`, times widened panels.
template <int M>
[[gnu::always_inline]] inline void add_columns(const float* x, int64_t K, int64_t count, const Widened& wide,
                                               float* results) {
  Vec sums[M][2];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) sums[m][j] = load(results + (m * 2 + j) * LANES);
  for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      Vec value = splat(x[m * K + i]);
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++) sums[m][j] = multiply_add(value, load(wide[j] + i * LANES), sums[m][j]);
    }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) store(results + (m * 2 + j) * LANES, sums[m][j]);
}

// The same for all rows, in blocks whose sums stay in registers.
void add_columns_of_all(const GroupProduct& product, int64_t k, int64_t count, const Widened& wide,
                        float* results) {
  constexpr int ROWS = 8;
  int64_t row = 0;
  auto x = [&] {
    return product.x + row * product.K + k;
  };
  auto sums = [&] {
    return results + row * 2 * LANES;
  };
  for (; row + ROWS <= product.M; row += ROWS) add_columns<ROWS>(x(), product.K, count, wide, sums());
  for (; row + 2 <= product.M; row += 2) add_columns<2>(x(), product.K, count, wide, sums());
  for (; row < product.M; row++) add_columns<1>(x(), product.K, count, wide, sums());
}

void multiply_pair(const GroupProduct& product, const PanelPair& pair, const Target& to) {
  thread_local Scratch scratch;
  float* results = scratch.of(product.M * 2 * LANES);
  std::memset(results, 0, product.M * 2 * LANES * sizeof(float));
  const FileType& type = pair.part.type();
  const BlockForm& form = pair.part.block();
  Widened wide;
  const uint8_t* blocks = pair.panels;
  for (int64_t k = 0; k < product.K; k += form.columns, blocks += form.bytes) {
    for (int j = 0; j < 2; j++) {
      const uint8_t* block = blocks + j * pair.panel_bytes;
      for (int64_t line = 0; line < form.bytes; line += CACHE_LINE)
        __builtin_prefetch(block + line + GROUP_BYTES_AHEAD, 0, 2);
      form.widen(type, block, wide[j]);
    }
    add_columns_of_all(product, k, std::min(form.columns, product.K - k), wide, results);
  }
  write_results(product, to, results, product.M, 2 * LANES, 0, pair.column, pair.width);
}

}  // namespace

void multiply_pairs_in_float32(const GroupProduct& product, const Part& part, int64_t pair, int64_t end,
                               int64_t first_column, const Target& to) {
  for (; pair < end; pair++) multiply_pair(product, PanelPair(product.weights, part, pair, first_column), to);
}

}  // namespace medusa
