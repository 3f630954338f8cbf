// Products in tile registers, where they are, with weights of bfloat16, twelve bits and int8.
//
// A register holds 16 rows of 64 bytes, and two are multiplied in 16 cycles: a pass of 16 rows takes little
// longer than one of a single row, which waits for memory. Tiles hold bfloat16 or int8. So rows are
// multiplied in parts whose sum they are, exactly: a float32 is that of three bfloat16, and a whole number of
// 16 bits that of two of 8.

#include "tiles.h"

#include <algorithm>
#include <utility>

#include "product.h"
#include "twelve_bits.h"

#if defined(HAS_TILES) && !defined(TILES_HEADER)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace medusa {
namespace {

// Whether the system lets this process use tile registers, for which it must ask.
bool are_tiles_allowed() {
#if defined(TILES_HEADER)
  return true;
#elif defined(HAS_TILES)
  // Documentation/arch/x86/xstate.rst of Linux
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool allowed = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
  return allowed;
#else
  return false;
#endif
}

}  // namespace

bool has_tiles = are_tiles_allowed();

bool tiles(std::optional<bool> wanted) {
  return has_tiles = wanted.value_or(has_tiles) && are_tiles_allowed();
}

#if defined(HAS_TILES)
namespace {

// What tiles hold of weights of a format, and in how many parts rows are.
template <typename Weight>
using InTile = std::conditional_t<std::is_same_v<Weight, TwelveBits>, BFloat16, Weight>;
template <typename InTile> constexpr int PARTS = std::is_same_v<InTile, int8_t> ? 2 : 3;

// Calls `body` with each constant below N: instructions name registers by constants.
template <int N, typename Body> [[gnu::always_inline]] inline void each(Body body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body.template operator()<I>(), ...);
  }(std::make_integer_sequence<int, N>{});
}

// ---- rows in parts

// A row in parts, which lie `stride` bytes from each other; of int8 weights, the steps of its runs as well.
template <typename InTile>
void split_row(const float* x, int64_t K, char* to, int64_t stride, float* run_steps);

template <> void split_row<BFloat16>(const float* x, int64_t K, char* to, int64_t stride, float*) {
  for (int64_t k = 0; k < K; k += 32, to += 3 * stride) {
    float padded[32] = {};
    const float* from = x + k;
    if (K - k < 32) from = static_cast<const float*>(std::memcpy(padded, from, (K - k) * sizeof(float)));
    __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
    for (int part = 0; part < 3; part++) {
      // each part is the nearest number of bfloat16 to what the parts before it leave
      __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      _mm512_store_si512(to + part * stride, rounded);
      low -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(rounded)), 16);
      high -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(rounded, 1)), 16);
    }
  }
}

template <> void split_row<int8_t>(const float* x, int64_t K, char* to, int64_t stride, float* run_steps) {
  alignas(64) int16_t whole[RUN];
  for (int64_t k = 0; k < K; k += TILE_WIDTH, to += 2 * stride) {
    if (k % RUN == 0) *run_steps++ = round_run(x + k, std::min(RUN, K - k), whole);
    for (int64_t half = 0; half < TILE_WIDTH; half += 32) {
      __m512i numbers = _mm512_load_si512(whole + k % RUN + half);
      __m256i upper = _mm512_cvtepi16_epi8(_mm512_srai_epi16(numbers, 8));
      __m256i lower = _mm512_cvtepi16_epi8(numbers);
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + half), upper);
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + stride + half), lower);
    }
  }
}

template <typename InTile> TiledRows tiled_rows(const Product& product, Scratch& scratch) {
  int64_t num_blocks = (product.M + TILE_ROWS - 1) / TILE_ROWS;
  int64_t rows = (product.M + num_blocks - 1) / num_blocks;
  int64_t runs = runs_of(product.K), steps = (product.K * sizeof(InTile) + TILE_WIDTH - 1) / TILE_WIDTH;
  int64_t block_bytes = steps * PARTS<InTile> * rows * TILE_WIDTH;
  int64_t part_numbers = (num_blocks * block_bytes + TILE_WIDTH) / sizeof(float);
  char* parts = reinterpret_cast<char*>(at_line(scratch.of(part_numbers + num_blocks * rows * runs)));
  float* run_steps = reinterpret_cast<float*>(parts + num_blocks * block_bytes);
  TiledRows tiled{num_blocks, rows, steps, block_bytes, parts, run_steps};
  for (int64_t row = 0; row < num_blocks * rows; row++) {
    int64_t block = row / rows, within = row % rows;
    const float* x = product.x + (tiled.first_row(block, product.M) + within) * product.K;
    char* to = parts + block * block_bytes + within * TILE_WIDTH;
    split_row<InTile>(x, product.K, to, rows * TILE_WIDTH, run_steps + row * runs);
  }
  return tiled;
}

// ---- panels, tile by tile
//
// `tile(j, step)` is a tile of a panel. `prepare(j, step, from, to)` is called while it is multiplied, in
// sixteenths `from` to `to` of the step: it fetches what is read later.

// J panels of `panel_bytes`; what is missing of the last tile are zeros. Tiles are fetched AHEAD steps before
// they are multiplied.
template <int J, int AHEAD> struct PlainPanels {
  const char* weights;
  int64_t panel_bytes, steps;
  alignas(64) char last_tiles[J][TILE_BYTES];

  PlainPanels(const char* weights, int64_t panel_bytes, int64_t steps)
      : weights(weights), panel_bytes(panel_bytes), steps(steps) {}

  const char* tile(int j, int64_t step) {
    const char* whole = weights + j * panel_bytes + step * TILE_BYTES;
    int64_t left = panel_bytes - step * TILE_BYTES;
    if (left >= TILE_BYTES) return whole;
    std::memset(last_tiles[j] + left, 0, TILE_BYTES - left);
    return static_cast<const char*>(std::memcpy(last_tiles[j], whole, left));
  }
  void prepare(int j, int64_t step, int from, int to) const {
    int64_t next_step = step + AHEAD;
    int64_t of_next_panels = next_step < steps ? 0 : J * panel_bytes - steps * TILE_BYTES;
    const char* next = weights + j * panel_bytes + next_step * TILE_BYTES + of_next_panels;
    for (int line = from; line < to; line++) __builtin_prefetch(next + line * TILE_WIDTH, 0, 3);
  }
};

// The same where they were widened before: meanwhile the thread's next ones are fetched, some lines of
// `later` a step.
template <int J> struct WidenedPanels : PlainPanels<J, 1> {
  const char* later;
  int64_t lines;

  WidenedPanels(const char* widened, int64_t wide_bytes, int64_t steps, const char* later, int64_t lines)
      : PlainPanels<J, 1>(widened, wide_bytes, steps), later(later), lines(lines) {}

  void prepare(int j, int64_t step, int from, int to) {
    PlainPanels<J, 1>::prepare(j, step, from, to);
    if (j > 0 || from > 0) return;
    for (int64_t line = 0; line < lines; line++, later += TILE_WIDTH) __builtin_prefetch(later, 0, 2);
  }
};

// J panels in twelve bits: the tiles of the next step are widened while those of this one are multiplied.
// Bytes and codes are fetched as they are for vectors. `next`: how many bytes behind these panels the
// thread's next ones begin; 0 where they are its last.
template <int J> struct TwelveBitPanels {
  const uint8_t *lower, *codes;
  int64_t panel_bytes, steps, next;
  Bytes tables[J];
  alignas(64) char tiles[2][J][TILE_BYTES];

  TwelveBitPanels(const char* weights, int64_t panel_bytes, int64_t K, int64_t next)
      : panel_bytes(panel_bytes), steps(padded_columns(K) / 32), next(next) {
    const TwelveBitPanel first(weights, K);
    lower = first.lower;
    codes = first.codes;
    for (int j = 0; j < J; j++) {
      tables[j] = upper_bytes(reinterpret_cast<const TwelveBitHeader*>(weights + j * panel_bytes));
      __builtin_prefetch(reinterpret_cast<const char*>(first.outliers) + j * panel_bytes, 0,
                         3);  // for the end
      __builtin_prefetch(weights + next + j * panel_bytes, 0, 3);
      prepare(j, -1, 0, 16);
    }
  }

  const char* tile(int j, int64_t step) const { return tiles[step & 1][j]; }
  void prepare(int j, int64_t step, int from, int to) {
    if (++step == steps) return;
    int64_t columns = 32 * steps, ahead = std::min(columns, COLUMNS_AHEAD);
    for (int eight = from / 4; eight < to / 4; eight++) {
      int64_t k = 32 * step + 8 * eight;
      const uint8_t* from_lower = lower + j * panel_bytes + k * LANES;
      const uint8_t* from_codes = codes + j * panel_bytes + k / 2 * LANES;
      bool is_inside = k < columns - ahead;  // what is fetched lies in these panels, not in the next ones
      int64_t later = is_inside ? ahead : ahead - columns, of_next = is_inside ? 0 : next;
      if (is_inside || next) {
        __builtin_prefetch(from_lower + later * LANES + of_next, 0, 2);
        __builtin_prefetch(from_lower + later * LANES + of_next + TILE_WIDTH, 0, 2);
        __builtin_prefetch(from_codes + later / 2 * LANES + of_next, 0, 2);
      }
      widen_eight_columns(from_lower, from_codes, tables[j], tiles[step & 1][j] + eight * EIGHT_COLUMNS);
    }
  }
};

// ---- multiplication

// B blocks by J panels of bfloat16. For few blocks, which wait for memory, there are up to six sums, and each
// panel is loaded anew for each part of each block, from the first cache. For more, up to four, and two
// panels ARE_HELD for all parts.
template <typename Weight, int B, int J, bool ARE_HELD, typename Panels>
void multiply_blocks(const Product& product, int64_t block, int64_t panel, Panels panels) {
  constexpr int P = PARTS<BFloat16>;
  const TiledRows& tiled = product.tiled;
  int64_t part_bytes = tiled.rows * TILE_WIDTH;
  const char* x = tiled.parts + block * tiled.block_bytes;
  each<B * J>([]<int TILE>() { clear_tile<TILE>(); });
  for (int64_t step = 0; step < tiled.steps; step++, x += P * part_bytes)
    each<P * B>([&]<int PASS>() {
      constexpr int PART = PASS / B, BLOCK = PASS % B, ROWS = ARE_HELD ? 4 + BLOCK : 6;
      load_tile<ROWS>(x + BLOCK * tiled.block_bytes + PART * part_bytes);
      each<J>([&]<int j>() {
        constexpr int WEIGHTS = ARE_HELD ? 6 + j : 7;
        if constexpr (!ARE_HELD || PASS == 0) load_tile<WEIGHTS>(panels.tile(j, step));
        multiply_tiles<BFloat16, PART, BLOCK * J + j, ROWS, WEIGHTS>();
        panels.prepare(j, step, 16 * PASS / (P * B), 16 * (PASS + 1) / (P * B));
      });
    });
  alignas(64) float sums[B][TILE_ROWS][J * LANES];
  each<B>([&]<int BLOCK>() {
    each<J>([&]<int j>() { store_tile<BLOCK * J + j>(sums[BLOCK][0] + j * LANES, sizeof(sums[BLOCK][0])); });
  });
  int64_t column = panel * LANES, count = std::min<int64_t>(J * LANES, product.N - column);
  for (int b = 0; b < B; b++) {
    int64_t first = tiled.first_row(block + b, product.M);
    if constexpr (std::is_same_v<Weight, TwelveBits>) {
      const char* weights = product.panels + panel * product.panel_bytes;
      add_outliers(product, weights, J, first, tiled.rows, sums[b][0]);
    }
    for (int64_t row = 0; row < tiled.rows; row++)
      write_outputs(product, sums[b][row], first + row, column, count);
  }
}

// A block by J panels of int8: whole sums of a run in registers, for each part of the rows; then runs in
// float32.
template <int J> void multiply_int8_block(const Product& product, int64_t block, int64_t panel) {
  const TiledRows& tiled = product.tiled;
  int64_t part_bytes = tiled.rows * TILE_WIDTH, runs = runs_of(product.K);
  const char* x = tiled.parts + block * tiled.block_bytes;
  const float* run_steps = tiled.run_steps + block * tiled.rows * runs;
  PlainPanels<J, 2> panels(product.panels + panel * product.panel_bytes, product.panel_bytes, tiled.steps);
  alignas(64) Vec sums[TILE_ROWS][J] = {};
  alignas(64) Int whole[J][2][TILE_ROWS];
  each<4>([]<int TILE>() { clear_tile<TILE>(); });
  for (int64_t step = 0; step < tiled.steps; step++, x += 2 * part_bytes) {
    each<2>([&]<int PART>() { load_tile<4 + PART>(x + PART * part_bytes); });
    each<J>([&]<int j>() {
      load_tile<7>(panels.tile(j, step));
      each<2>([&]<int PART>() {
        multiply_tiles<int8_t, PART, 2 * j + PART, 4 + PART, 7>();
        panels.prepare(j, step, 8 * PART, 8 * PART + 8);
      });
    });
    bool ends_run = (step + 1) * TILE_WIDTH % RUN == 0 || step + 1 == tiled.steps;
    if (!ends_run) continue;
    each<J>([&]<int j>() {
      each<2>([&]<int PART>() {
        store_tile<2 * j + PART>(whole[j][PART], TILE_WIDTH);
        clear_tile<2 * j + PART>();
      });
    });
    for (int64_t row = 0; row < tiled.rows; row++) {
      Vec run_step = splat(run_steps[row * runs + step * TILE_WIDTH / RUN]);
      for (int j = 0; j < J; j++) {
        Vec sum = __builtin_convertvector((whole[j][0][row] << 8) + whole[j][1][row], Vec);
        sums[row][j] = multiply_add(sum, run_step, sums[row][j]);
      }
    }
  }
  int64_t column = panel * LANES, count = std::min<int64_t>(J * LANES, product.N - column);
  for (int64_t row = 0; row < tiled.rows; row++) {
    auto* of_row = reinterpret_cast<const float*>(sums[row]);
    write_outputs(product, of_row, tiled.first_row(block, product.M) + row, column, count);
  }
}

// Blocks of rows up to which a product waits for memory.
constexpr int64_t FEW_BLOCKS = 3;

// J panels from `panel` on by all blocks of rows, two of these at a time where they have a place.
template <typename Weight, int J, bool ARE_HELD>
void multiply_panels(const Product& product, int64_t panel, int64_t thread_end) {
  const TiledRows& tiled = product.tiled;
  const char* weights = product.panels + panel * product.panel_bytes;
  if constexpr (std::is_same_v<Weight, int8_t>) {
    for (int64_t block = 0; block < tiled.num_blocks; block++) multiply_int8_block<J>(product, block, panel);
    return;
  }
  auto multiply_with = [&](auto panels_for) {
    for (int64_t block = 0; block < tiled.num_blocks; block += 2)
      if (block + 1 == tiled.num_blocks)
        multiply_blocks<Weight, 1, J, ARE_HELD>(product, block, panel, panels_for(block));
      else if constexpr (J <= 3)
        multiply_blocks<Weight, 2, J, ARE_HELD>(product, block, panel, panels_for(block));
  };
  if constexpr (std::is_same_v<Weight, BFloat16>)
    multiply_with([&](int64_t) { return PlainPanels<J, 1>(weights, product.panel_bytes, tiled.steps); });
  if constexpr (std::is_same_v<Weight, TwelveBits>) {
    bool has_next = panel + 2 * J <= thread_end;
    int64_t next = has_next ? J * product.panel_bytes : 0;
    if (tiled.num_blocks == 1)
      return multiply_with(
          [&](int64_t) { return TwelveBitPanels<J>(weights, product.panel_bytes, product.K, next); });
    // widened once for all blocks
    thread_local Scratch scratch;
    int64_t wide_bytes = tiled.steps * TILE_BYTES, steps = (tiled.num_blocks + 1) / 2 * tiled.steps;
    char* widened =
        reinterpret_cast<char*>(at_line(scratch.of((J * wide_bytes + TILE_WIDTH) / sizeof(float))));
    widen_panels(weights, product.panel_bytes, J, padded_columns(product.K), widened, wide_bytes);
    int64_t lines = (next / TILE_WIDTH + steps - 1) / steps;
    multiply_with([&](int64_t block) {
      const char* later = weights + J * product.panel_bytes + block / 2 * tiled.steps * lines * TILE_WIDTH;
      return WidenedPanels<J>(widened, wide_bytes, tiled.steps, later, lines);
    });
  }
}

template <typename Weight>
void multiply_in_tiles(const Product& product, int64_t panel, int64_t end, int64_t thread_end) {
  constexpr bool IS_INT8 = std::is_same_v<Weight, int8_t>;
  bool are_few = product.tiled.num_blocks <= FEW_BLOCKS;
  TileShape shapes[8];  // registers below `first_weights` hold as many rows as a block, the others 16
  int first_weights = are_few || IS_INT8 ? 7 : 6;
  for (int i = 0; i < 8; i++) shapes[i] = {i < first_weights ? product.tiled.rows : TILE_ROWS, TILE_WIDTH};
  TileRegisters registers(shapes);
  auto multiply = [&]<int J, bool ARE_HELD>() {
    for (; panel + J <= end; panel += J) multiply_panels<Weight, J, ARE_HELD>(product, panel, thread_end);
  };
  if constexpr (!IS_INT8) {
    if (product.tiled.num_blocks == 1) multiply.template operator()<6, false>();
    if (are_few) {
      multiply.template operator()<3, false>();
      multiply.template operator()<1, false>();
    }
  }
  multiply.template operator()<2, true>();
  multiply.template operator()<1, true>();
}

}  // namespace

template <typename Weight> Plan plan_in_tiles(Product& product, Scratch& scratch) {
  product.tiled = tiled_rows<InTile<Weight>>(product, scratch);
  int64_t num_blocks = product.tiled.num_blocks;
  int64_t together = std::is_same_v<Weight, int8_t> ? 2
                     : num_blocks == 1              ? 6
                     : num_blocks <= FEW_BLOCKS     ? 3
                                                    : 2;
  return {multiply_in_tiles<Weight>, together};
}
template Plan plan_in_tiles<BFloat16>(Product&, Scratch&);
template Plan plan_in_tiles<TwelveBits>(Product&, Scratch&);
template Plan plan_in_tiles<int8_t>(Product&, Scratch&);
#endif

}  // namespace medusa
