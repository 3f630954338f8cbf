// Products in tile registers with weights that stay as a file has quantised them, rows in whole numbers: the
// same bits as in vectors.

#include "group_product.h"
#include "scratch.h"
#include "tiles.h"

namespace medusa {

#if !defined(HAS_TILES)
void multiply_pairs_in_tiles(const GroupProduct&, const Part&, int64_t, int64_t, int64_t, const Target&) {}
#else
namespace {

static_assert(MULTIPLIES_QUADS, "tiles read rows of 8 bits; a processor with tiles has AVX512-VNNI");

// Columns whose sums are kept until a row is finished with them.
constexpr int64_t CHUNK = 256;
constexpr int ROWS_ADDED = 4;  // at a time: additions of a row wait for each other

// Registers: sums of two groups by two panels, rows of two groups, weights of two panels.
template <typename F> TileRegisters registers_for(int64_t rows) {
  TileShape sums{rows, TILE_WIDTH}, numbers{rows, F::GROUP}, weights{F::GROUP / 4, TILE_WIDTH};
  return TileRegisters({sums, sums, sums, sums, numbers, numbers, weights, weights});
}

// What a thread needs of CHUNK columns of two panels.
template <typename F> struct Chunk {
  static constexpr int64_t GROUPS = CHUNK / F::GROUP, BLOCKS = CHUNK / F::BLOCK;
  alignas(CACHE_LINE) int8_t codes[2][CHUNK * LANES];  // less the code for zero, in quads
  alignas(CACHE_LINE) float scales[2][GROUPS][LANES];
  alignas(CACHE_LINE) float minima[2][GROUPS][LANES];        // of groups, or of blocks
  alignas(CACHE_LINE) float block_scales[2][BLOCKS][LANES];  // where scales are whole numbers
  alignas(CACHE_LINE)
      int32_t zeros[2][GROUPS][LANES];  // where groups have their own: less what codes are lowered by
  alignas(CACHE_LINE) int32_t sums[2][GROUPS][TILE_ROWS][LANES];

  // Reads `blocks` blocks of the panels.
  void widen(const FileType& type, const uint8_t* panels, int64_t panel_bytes, int64_t blocks) {
    Bytes table = table_of(F::IS_TABLE ? type.table : nullptr);
    Bytes zero = Bytes{} + static_cast<uint8_t>(type.zero);
    for (int j = 0; j < 2; j++)
      for (int64_t b = 0; b < blocks; b++) {
        const uint8_t* block = panels + j * panel_bytes + b * F::BLOCK_BYTES;
        for (int64_t line = 0; line < F::BLOCK_BYTES; line += CACHE_LINE)
          __builtin_prefetch(block + line + GROUP_BYTES_AHEAD, 0, 2);
        widen_codes(block, table, zero, codes[j] + b * F::BLOCK * LANES);
        widen_scales(type, block, j, b);
      }
  }

  // The products of a block of rows, from `x` on, with each group.
  void multiply(const int8_t* x, int64_t stride, int64_t groups) {
    for (int64_t group = 0; group < groups; group += 2) {
      multiply_group<0>(x, stride, group);
      multiply_group<1>(x, stride, group + 1);
    }
  }

  // Adds the sums of rows `m` to `m + ROWS_ADDED` of a block of `count` rows to `results` (rows, 2, LANES),
  // in the order of products in vectors. `row` is the first of these, and `panels` the first block, of this
  // chunk.
  void add(const WholeRows& rows, WholeRows::Row<F> row, int64_t m, int64_t count, int64_t blocks,
           const uint8_t* panels, int64_t panel_bytes, float* results) const {
    for (int j = 0; j < 2; j++) {
      Vec totals[ROWS_ADDED];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS_ADDED; r++) totals[r] = load(results + (2 * r + j) * LANES);
      for (int64_t b = 0; b < blocks; b++) {
        Vec of_block[ROWS_ADDED] = {};
#pragma GCC unroll 16
        for (int64_t g = 0; g < F::GROUPS; g++)
          add_group(rows, row, m, j, b * F::GROUPS + g, of_block, totals);
        const uint8_t* block = panels + j * panel_bytes + b * F::BLOCK_BYTES;
        if constexpr (F::HAS_WHOLE_SCALES) add_block(rows, row, j, b, block, of_block, totals);
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS_ADDED; r++)
        if (m + r < count) store(results + (2 * r + j) * LANES, totals[r]);
    }
  }

 private:
  [[gnu::always_inline]] void widen_codes(const uint8_t* block, Bytes table, Bytes zero, int8_t* to) {
    for (int64_t s = 0; s < F::SECTIONS; s++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        Bytes quads[2];
        Section<F::BITS>{block + F::CODES + s * F::SECTION_BYTES}.quads(i, quads[0], quads[1]);
        for (int quad = 0; quad < 2; quad++) {
          Bytes numbers = (F::IS_TABLE ? looked_up(table, quads[quad]) : quads[quad]) - zero;
          std::memcpy(to + (s * 8 + 2 * i + quad) * VECTOR_BYTES, &numbers, VECTOR_BYTES);
        }
      }
  }

  void widen_scales(const FileType& type, const uint8_t* block, int j, int64_t b) {
    for (int64_t g = 0; g < F::GROUPS; g++) {
      int64_t group = b * F::GROUPS + g;
      store(scales[j][group], group_scales<F>(block, g, type.has_bfloat16_scales));
      if constexpr (F::HAS_OWN_ZEROS)
        *reinterpret_cast<Int*>(zeros[j][group]) = zeros_at(block + F::ZEROS + g * LANES) - type.zero;
      if constexpr (F::HAS_MINIMA && !F::HAS_WHOLE_SCALES)
        store(minima[j][group], scales_at(block + F::MINIMA + g * LANES * 2, false));
    }
    if constexpr (F::HAS_WHOLE_SCALES) {
      store(block_scales[j][b], scales_at(block, type.has_bfloat16_scales));
      if constexpr (F::HAS_MINIMA) store(minima[j][b], scales_at(block + F::MINIMA, false));
    }
  }

  // In registers for even or for odd groups, so that one need not wait for the other.
  template <int ODD>
  [[gnu::always_inline]] void multiply_group(const int8_t* x, int64_t stride, int64_t group) {
    constexpr int SUMS = 2 * ODD, ROWS = 4 + ODD, WEIGHTS = 6;
    clear_tile<SUMS>();
    clear_tile<SUMS + 1>();
    load_tile<ROWS>(x + group * F::GROUP, stride);
    load_tile<WEIGHTS>(codes[0] + group * F::GROUP * LANES);
    load_tile<WEIGHTS + 1>(codes[1] + group * F::GROUP * LANES);
    multiply_tiles<int8_t, 0, SUMS, ROWS, WEIGHTS>();
    multiply_tiles<int8_t, 0, SUMS + 1, ROWS, WEIGHTS + 1>();
    store_tile<SUMS>(sums[0][group], TILE_WIDTH);
    store_tile<SUMS + 1>(sums[1][group], TILE_WIDTH);
  }

  [[gnu::always_inline]] void add_group(const WholeRows& rows, WholeRows::Row<F> row, int64_t m, int j,
                                        int64_t group, Vec (&of_block)[ROWS_ADDED],
                                        Vec (&totals)[ROWS_ADDED]) const {
    Vec scale = load(scales[j][group]);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS_ADDED; r++) {
      Int whole = *reinterpret_cast<const Int*>(sums[j][group][m + r]);
      if constexpr (F::HAS_OWN_ZEROS)
        whole -= *reinterpret_cast<const Int*>(zeros[j][group]) * row.corrections[r * rows.num_corrections + group];
      Vec sum = __builtin_convertvector(whole, Vec);
      if constexpr (F::HAS_WHOLE_SCALES)
        of_block[r] = multiply_add(sum, scale, of_block[r]);
      else
        totals[r] = multiply_add(sum * scale, splat(row.steps[r * rows.num_steps + group]), totals[r]);
    }
    if constexpr (!F::HAS_WHOLE_SCALES && F::HAS_MINIMA)
#pragma GCC unroll 4
      for (int r = 0; r < ROWS_ADDED; r++) {
        float sum = std::bit_cast<float>(row.corrections[r * rows.num_corrections + group]);
        totals[r] = multiply_add(load(minima[j][group]), splat(sum), totals[r]);
      }
  }

  [[gnu::always_inline]] void add_block(const WholeRows& rows, WholeRows::Row<F> row, int j, int64_t b,
                                        const uint8_t* block, const Vec (&of_block)[ROWS_ADDED],
                                        Vec (&totals)[ROWS_ADDED]) const {
    Int least[ROWS_ADDED] = {};
    if constexpr (F::HAS_MINIMA)
#pragma GCC unroll 8
      for (int pair = 0; pair < F::GROUPS / 2; pair++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS_ADDED; r++) {
          int32_t sums_of_pair = row.corrections[r * rows.num_corrections + b * F::GROUPS / 2 + pair];
          least[r] = minima_added(least[r], block + F::WHOLE_MINIMA + pair * 2 * LANES, sums_of_pair);
        }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS_ADDED; r++) {
      Vec step = splat(row.steps[r * rows.num_steps + b]);
      totals[r] = multiply_add(of_block[r] * load(block_scales[j][b]), step, totals[r]);
      if constexpr (F::HAS_MINIMA) {
        Vec minimum = __builtin_convertvector(least[r], Vec) * load(minima[j][b]);
        totals[r] = multiply_add(minimum, -step, totals[r]);
      }
    }
  }
};

// One pair of panels by all rows, `rows_of_block` at a time.
template <typename F>
void multiply_pair(const GroupProduct& product, const PanelPair& pair, int64_t rows_of_block,
                   const Target& to) {
  thread_local Chunk<F> chunk;
  thread_local Scratch scratch;
  const FileType& type = pair.part.type();
  const WholeRows& rows = product.rows[type.form];
  int64_t size = (product.M + TILE_ROWS) * 2 * LANES;  // the last block may reach beyond
  float* results = scratch.of(size);
  std::memset(results, 0, size * sizeof(float));
  for (int64_t k = 0; k < rows.width; k += CHUNK) {
    int64_t blocks = std::min(CHUNK, rows.width - k) / F::BLOCK;
    const uint8_t* panels = pair.panels + k / F::BLOCK * F::BLOCK_BYTES;
    chunk.widen(type, panels, pair.panel_bytes, blocks);
    for (int64_t first = 0; first < product.M; first += rows_of_block) {
      chunk.multiply(rows.row<F>(first, k).numbers, rows.stride, blocks * F::GROUPS);
      for (int64_t m = 0; m < rows_of_block; m += ROWS_ADDED) {
        float* of_rows = results + (first + m) * 2 * LANES;
        chunk.add(rows, rows.row<F>(first + m, k), m, rows_of_block, blocks, panels, pair.panel_bytes,
                  of_rows);
      }
    }
  }
  write_results(product, to, results, product.M, 2 * LANES, 0, pair.column, pair.width);
}

}  // namespace

void multiply_pairs_in_tiles(const GroupProduct& product, const Part& part, int64_t pair, int64_t end,
                             int64_t first_column, const Target& to) {
  int64_t num_blocks = (product.M + TILE_ROWS - 1) / TILE_ROWS;
  int64_t rows = (product.M + num_blocks - 1) / num_blocks;
  with_form(part.form(), [&]<typename F>() {
    TileRegisters registers = registers_for<F>(rows);
    for (; pair < end; pair++)
      multiply_pair<F>(product, PanelPair(product.weights, part, pair, first_column), rows, to);
  });
}
#endif

}  // namespace medusa
