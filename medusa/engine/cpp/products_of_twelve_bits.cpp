// Products in vectors with weights of bfloat16 in twelve bits, which are widened in the registers.

#include "products_in_vectors.h"
#include "twelve_bits.h"

namespace medusa {

void widen_panels(const char* panels, int64_t panel_bytes, int J, int64_t K, char* to, int64_t wide_bytes) {
  for (int j = 0; j < J; j++) {
    const TwelveBitPanel panel(panels + j * panel_bytes, K);
    Bytes table = upper_bytes(panel.header);
    for (int64_t k = 0; k < K; k += 8) {
      char* wide = to + j * wide_bytes + k / 8 * EIGHT_COLUMNS;
      widen_eight_columns(panel.lower + k * LANES, panel.codes + k / 2 * LANES, table, wide);
    }
  }
}

void add_outliers(const Product& product, const char* panels, int J, int64_t row, int64_t M, float* sums) {
  for (int j = 0; j < J; j++) {
    const TwelveBitPanel panel(panels + j * product.panel_bytes, product.K);
    for (const Outlier* each = panel.outliers; each < panel.outliers_end(); each++)
      for (int64_t m = 0; m < M; m++) {
        float& sum = sums[(m * J + j) * LANES + each->lane];
        sum =
            multiply_add(widened(BFloat16{each->bits}), product.x[(row + m) * product.K + each->column], sum);
      }
  }
}

namespace {

// Where registers are few, blocks of rows are small: from so many on a panel is widened once for all of them.
// Widening it for each made 64 rows a sixth slower.
constexpr bool MAY_WIDEN = REGISTERS < 32;
constexpr int64_t BLOCKS_TO_WIDEN = 4;

// The sums (M, J, LANES) of M rows with J panels, the first of which is at `panel`, without their outliers.
// `next`: how many bytes behind these panels the thread's next ones begin; 0 where they are its last.
template <int M, int J>
[[gnu::noinline]] void multiply_twelve_bit_block(const Product& product, const char* panel, int64_t row,
                                                 int64_t next, float* results) {
  const float* x = product.x + row * product.K;
  const TwelveBitPanel first(panel, product.K);
  const uint8_t *lower = first.lower, *codes = first.codes;
  int64_t panel_bytes = product.panel_bytes;
  Vec sums[M][J] = {};
  Bytes tables[J];
  for (int j = 0; j < J; j++) {
    tables[j] = upper_bytes(reinterpret_cast<const TwelveBitHeader*>(panel + j * panel_bytes));
    __builtin_prefetch(reinterpret_cast<const char*>(first.outliers) + j * panel_bytes, 0, 3);  // for the end
    __builtin_prefetch(panel + next + j * panel_bytes, 0, 3);
  }
  int64_t columns = padded_columns(product.K), ahead = std::min(columns, COLUMNS_AHEAD), k = 0;
  int64_t lower_ahead = ahead * LANES, codes_ahead = ahead * LANES / 2;
  auto add_eight_columns = [&]<bool ARE_ALL_THERE>() __attribute__((always_inline)) {
    Bytes both[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) {
      both[j] = load(codes + j * panel_bytes);
      __builtin_prefetch(codes + j * panel_bytes + codes_ahead, 0, 2);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      Int pairs[J][2];
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) {
        const uint8_t* from = lower + j * panel_bytes + half * 4 * LANES;
        __builtin_prefetch(from + lower_ahead, 0, 2);
        Bytes low = load(from), high = looked_up(tables[j], codes_of(both[j], half));
        pairs[j][0] = (Int)interleaved(low, high, false);
        pairs[j][1] = (Int)interleaved(low, high, true);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        if (!ARE_ALL_THERE && k + 4 * half + i >= product.K) return;
        Vec weights[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; j++)
          weights[j] = (Vec)(i % 2 ? pairs[j][i / 2] & ~0xffff : pairs[j][i / 2] << 16);
#pragma GCC unroll 13
        for (int m = 0; m < M; m++) {
          Vec value = splat(x[m * product.K + k + 4 * half + i]);
#pragma GCC unroll 4
          for (int j = 0; j < J; j++) sums[m][j] = multiply_add(value, weights[j], sums[m][j]);
        }
      }
    }
    k += 8;
    lower += 8 * LANES;
    codes += 4 * LANES;
  };
  while (k + 8 <= std::min(product.K, columns - ahead)) add_eight_columns.template operator()<true>();
  // the last columns of these panels are under way: the first of the next ones are fetched
  lower_ahead = next ? next - k * LANES : 0;
  codes_ahead = next ? next - k * LANES / 2 : 0;
  while (k + 8 <= product.K) add_eight_columns.template operator()<true>();
  if (k < product.K) add_eight_columns.template operator()<false>();
  store_sums<M, J>(sums, results);
}

struct TwelveBitFormat {
  static constexpr int MOST_ROWS = REGISTERS == 32 ? 11 : 6;
  static constexpr int OTHER_REGISTERS = 2;  // a number of a row, and a mask

  template <int J> struct Panels : ColumnPanels<J> {
    int64_t next;                 // as multiply_twelve_bit_block says
    BFloat16* widened = nullptr;  // all columns, where many blocks of rows read them

    Panels(const Product& product, int64_t panel, int64_t thread_end, int64_t num_blocks)
        : ColumnPanels<J>(product, panel, thread_end, num_blocks),
          next(panel + 2 * J <= thread_end ? J * product.panel_bytes : 0) {
      if (!MAY_WIDEN || num_blocks < BLOCKS_TO_WIDEN) return;
      thread_local Scratch scratch;
      int64_t wide_bytes = padded_inputs<BFloat16>(product.K) * LANES * sizeof(BFloat16);
      char* wide = reinterpret_cast<char*>(scratch.of((J * wide_bytes + EIGHT_COLUMNS) / sizeof(float)));
      widen_panels(this->weights, product.panel_bytes, J, product.K, wide, wide_bytes);
      widened = reinterpret_cast<BFloat16*>(wide);
    }

    template <int M> void multiply(int64_t row, int64_t block, float* results) const {
      const Product& product = this->product;
      if (!widened) multiply_twelve_bit_block<M, J>(product, this->weights, row, next, results);
      if constexpr (MAY_WIDEN) {
        Prefetch prefetch = this->prefetch(block, 2 * LANES * sizeof(BFloat16));
        if (widened) multiply_block<BFloat16, M, J>(product, widened, row, prefetch, results);
      }
      add_outliers(product, this->weights, J, row, M, results);
    }
  };
};

}  // namespace

template <> Plan plan_in_vectors<TwelveBits>(Product& product, Scratch&) {
  return plan_of_blocks<TwelveBitFormat>(product);
}

}  // namespace medusa
