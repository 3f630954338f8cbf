// Products with weights that stay as a file has quantised them: rows in whole numbers, their products in
// vectors, and the pieces in which threads share the work.

#include "group_product.h"
#include "group_quantised.h"
#include "scratch.h"
#include "tensors.h"
#include "threads.h"
#include "tiles.h"

namespace medusa {
namespace {

// Rows that are multiplied together, at most. In 8 bits they stay in the second cache while all weights pass.
constexpr int64_t ROWS_AT_ONCE = 128;
// Rows of a block, at most: with AVX-512 their sums stay in registers.
constexpr int64_t MOST_BLOCK_ROWS = 8;

// ---- rows in whole numbers

// The correction for a group whose numbers have this sum, as WholeRows has it.
template <typename F>
void put_correction(int32_t sum, float step, int32_t zero, int64_t group, int32_t* corrections) {
  if constexpr (F::HAS_OWN_ZEROS)
    corrections[group] = sum;
  else if constexpr (F::HAS_ZERO)
    corrections[group] = -zero * sum;
  else if constexpr (!F::HAS_WHOLE_SCALES)
    corrections[group] = std::bit_cast<int32_t>(sum * step);
  else
    corrections[group / 2] = group % 2 ? (corrections[group / 2] & 0xffff) | sum << 16 : sum & 0xffff;
}

// A run of whole numbers, as WholeRows has them.
template <typename F> void put_numbers(const int8_t (&whole)[F::RUN], int8_t* to) {
  if constexpr (BYTES_OF_NUMBER<F> == 1) {
    std::memcpy(to, whole, F::RUN);
  } else {
    int16_t pairs[F::RUN];
    for (int64_t k = 0; k < F::RUN; k++) pairs[k] = whole[k / 4 * 4 + (k & 1) * 2 + (k >> 1 & 1)];
    std::memcpy(to, pairs, sizeof(pairs));
  }
}

template <typename F>
void round_row(const float* x, int64_t K, int32_t zero, const WholeRows& to, int64_t row) {
  int8_t* numbers = to.numbers + row * to.stride;
  float* steps = to.steps + row * to.num_steps;
  int32_t* corrections = to.corrections + row * to.num_corrections;
  for (int64_t run = 0; run < to.num_steps; run++) {
    int64_t first = run * F::RUN;
    float padded[F::RUN] = {};
    const float* from = x + first;
    if (first + F::RUN > K) {
      if (first < K) std::memcpy(padded, from, (K - first) * sizeof(float));
      from = padded;
    }
    int8_t whole[F::RUN];
    steps[run] = round_to_steps<F::RUN>(from, whole);
    for (int64_t group = 0; group < F::RUN / F::GROUP; group++) {
      int32_t sum = 0;
      for (int64_t k = 0; k < F::GROUP; k++) sum += whole[group * F::GROUP + k];
      put_correction<F>(sum, steps[run], zero, first / F::GROUP + group, corrections);
    }
    put_numbers<F>(whole, numbers + first * BYTES_OF_NUMBER<F>);
  }
}

// Rows in whole numbers for a form of the weights.
template <typename F> void round_rows(GroupProduct& product, const Part& part) {
  constexpr int64_t FEW_NUMBERS = 1 << 16;
  const FileType& type = part.type();
  int64_t width = part.num_blocks() * F::BLOCK, num_steps = width / F::RUN, groups = width / F::GROUP;
  int64_t num_corrections = F::HAS_WHOLE_SCALES && F::HAS_MINIMA ? groups / 2 : groups;
  int64_t M = product.M, num_rows = M + TILE_ROWS;  // the last block may reach beyond
  int64_t stride = (width * BYTES_OF_NUMBER<F> + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
  if (stride / CACHE_LINE % 2 == 0) stride += CACHE_LINE;
  float* memory = new float[num_rows * (num_steps + num_corrections + stride / 4) + CACHE_LINE / 4];
  product.memory[type.form].reset(memory);
  int8_t* numbers = reinterpret_cast<int8_t*>(at_line(memory));
  float* steps = reinterpret_cast<float*>(numbers + num_rows * stride);
  int32_t* corrections = reinterpret_cast<int32_t*>(steps + num_rows * num_steps);
  std::memset(numbers + M * stride, 0, (num_rows - M) * stride);
  std::memset(steps + M * num_steps, 0, (num_rows - M) * num_steps * sizeof(float));
  std::memset(corrections + M * num_corrections, 0, (num_rows - M) * num_corrections * sizeof(int32_t));
  WholeRows& rows = product.rows[type.form];
  rows = {numbers, steps, corrections, width, num_steps, num_corrections, stride};
  auto round = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      round_row<F>(product.x + row * product.K, product.K, type.zero, rows, row);
  };
  if (M * product.K < FEW_NUMBERS)
    round(0, M);
  else
    parallel_for(M, 1, round);
}

// Rows in whole numbers for each form of the weights.
void round_rows(GroupProduct& product) {
  for (const Part& part : product.weights) {
    if (product.memory[part.form()]) continue;
    with_form(part.form(), [&]<typename F>() { round_rows<F>(product, part); });
  }
}

// ---- in vectors

// sums + a lane's four codes times the four numbers of `quad`
inline Int quad_added(Int sums, Bytes codes, int32_t quad) {
#if defined(MEDUSA_AVX512) && defined(__AVX512VNNI__)
  return (Int)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(quad));
#elif defined(__AVX2__) && defined(__AVXVNNI__) && !defined(MEDUSA_AVX512)
  return (Int)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(quad));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
  return (Int)vusdotq_s32((int32x4_t)sums, (uint8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(quad)));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
  // codes are below 256, and this multiplies numbers up to 127: of 128 less, and 128 times the row's numbers
  int8x16_t row = vreinterpretq_s8_s32(vdupq_n_s32(quad));
  int32x4_t added = vdotq_s32((int32x4_t)sums, vreinterpretq_s8_u8((uint8x16_t)(codes ^ 128)), row);
  return (Int)vaddq_s32(added, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), row), 7));
#else
  Int four = (Int)codes;
  sums += (four & 255) * int8_t(quad) + (four >> 8 & 255) * int8_t(quad >> 8);
  return sums + (four >> 16 & 255) * int8_t(quad >> 16) + (four >> 24 & 255) * (quad >> 24);
#endif
}

// sums + a lane's four codes times four numbers of a row, which lie as pairs of 16 bits at `pairs`
inline Int quad_added(Int sums, Bytes codes, const int8_t* pairs) {
  int32_t even, odd;
  std::memcpy(&even, pairs, sizeof(even));
  std::memcpy(&odd, pairs + sizeof(even), sizeof(odd));
  sums = pairs_added(sums, (Pairs)((Words)codes & 255), even);
  return pairs_added(sums, (Pairs)((Words)codes >> 8), odd);
}

// Where four products of bytes take more than one instruction, two take one (SSSE3's maddubs), whose sums have
// 16 bits. So many pairs of quads of codes of `bits` bits fit in these; 0 where whole sums are as quick.
constexpr int pairs_of_quads_in_16_bits(int bits) {
  constexpr int MOST = 32767, MOST_OF_ROW = 127, PRODUCTS = 4;
  return MULTIPLIES_QUADS ? 0 : MOST / (((1 << bits) - 1) * MOST_OF_ROW * PRODUCTS);
}

// sums of 16 bits + a lane's four codes, of at most 6 bits, times the four numbers of `quad`, as two sums
inline Pairs quad_added(Pairs sums, Bytes codes, int32_t quad) {
#if defined(MEDUSA_AVX512)
  sums += (Pairs)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(quad));
#elif defined(__AVX2__)
  sums += (Pairs)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(quad));
#endif
  return sums;
}

// J panels that lie `panel_bytes` from each other, from some block on.
struct Panels {
  const uint8_t* block;
  int64_t panel_bytes;

  const uint8_t* of(int j) const { return block + j * panel_bytes; }
};

// A block of M rows by J panels: the parts of its inner loop, each for all of the block. `row` is the first
// of the rows, from the panels' block on; the numbers of the next begin `stride` bytes later, and so on.
//
// Products in tiles add the same numbers in the same order (group_products_in_tiles.cpp): change both. The
// tests compare their bits.
template <typename F, int M, int J> struct WholeBlock {
  using RowBlock = typename WholeRows::Row<F>;
  static constexpr int QUAD_PAIRS = F::GROUP / 8;  // of a group
  static constexpr int PAIRS_IN_16_BITS = HAS_LARGE_CODES<F> ? 0 : pairs_of_quads_in_16_bits(F::BITS);
  const WholeRows& rows;

  // What the sums of a group begin with: what its zero gives.
  [[gnu::always_inline]] void begin_group(Panels panels, RowBlock row, int64_t group,
                                          Int (&whole)[M][J]) const {
    if constexpr (F::HAS_ZERO)
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int j = 0; j < J; j++) whole[m][j] = Int{} + row.corrections[m * rows.num_corrections + group];
    if constexpr (F::HAS_OWN_ZEROS)
#pragma GCC unroll 2
      for (int j = 0; j < J; j++) {
        Int zeros = zeros_at(panels.of(j) + F::ZEROS + group * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) whole[m][j] = zeros * -row.corrections[m * rows.num_corrections + group];
      }
  }

  // Quads 2 i and 2 i + 1 of section `s` times the rows; `shorts` hold sums on their way to the whole ones.
  [[gnu::always_inline]] void add_quads(Panels panels, RowBlock row, int64_t s, int i, Bytes table,
                                        int64_t ahead, Pairs (&shorts)[M][J], Int (&whole)[M][J]) const {
    Bytes first[J], second[J];
#pragma GCC unroll 2
    for (int j = 0; j < J; j++) {
      const uint8_t* codes = panels.of(j) + F::CODES + s * F::SECTION_BYTES;
      Section<F::BITS>{codes}.quads(i, first[j], second[j]);
      if constexpr (F::IS_TABLE) {
        first[j] = looked_up(table, first[j]);
        second[j] = looked_up(table, second[j]);
      }
#pragma GCC unroll 2
      for (int64_t line = i * F::SECTION_BYTES / 4; line < (i + 1) * F::SECTION_BYTES / 4; line += CACHE_LINE)
        __builtin_prefetch(codes + line + ahead, 0, 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const int8_t* numbers = row.numbers + m * rows.stride + (s * SECTION + 8 * i) * BYTES_OF_NUMBER<F>;
      int32_t first_quad, second_quad;
      std::memcpy(&first_quad, numbers, 4);
      std::memcpy(&second_quad, numbers + 4, 4);
#pragma GCC unroll 2
      for (int j = 0; j < J; j++) {
        if constexpr (BYTES_OF_NUMBER<F> == 2) {
          whole[m][j] = quad_added(quad_added(whole[m][j], first[j], numbers), second[j], numbers + 8);
          asm("" : "+x"(whole[m][j]));  // or GCC adds all products of a group at its end, from memory
        } else if constexpr (!PAIRS_IN_16_BITS) {
          whole[m][j] = quad_added(quad_added(whole[m][j], first[j], first_quad), second[j], second_quad);
        } else {
          shorts[m][j] = quad_added(quad_added(shorts[m][j], first[j], first_quad), second[j], second_quad);
          if constexpr (M > 4) asm("" : "+x"(shorts[m][j]));
          if ((i + 1) % PAIRS_IN_16_BITS == 0 || (i + 1) % QUAD_PAIRS == 0) {
            whole[m][j] = pairs_added(whole[m][j], shorts[m][j], 0x10001);
            shorts[m][j] = Pairs{};
          }
        }
      }
    }
  }

  // Adds the whole sums of a group to those of the block where scales are whole numbers, else to the results.
  [[gnu::always_inline]] void end_group(Panels panels, RowBlock row, int64_t group, bool are_bfloat16,
                                        const Int (&whole)[M][J], Vec (&of_block)[M][J],
                                        Vec (&sums)[M][J]) const {
    Vec scales[J];
#pragma GCC unroll 2
    for (int j = 0; j < J; j++) scales[j] = group_scales<F>(panels.of(j), group, are_bfloat16);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      Vec step =
          splat(F::HAS_WHOLE_SCALES ? 0.f : row.steps[m * rows.num_steps + group * F::GROUP / F::RUN]);
#pragma GCC unroll 2
      for (int j = 0; j < J; j++) {
        Vec sum = __builtin_convertvector(whole[m][j], Vec);
        if constexpr (F::HAS_WHOLE_SCALES)
          of_block[m][j] = multiply_add(sum, scales[j], of_block[m][j]);
        else
          sums[m][j] = multiply_add(sum * scales[j], step, sums[m][j]);
      }
    }
    if constexpr (!F::HAS_WHOLE_SCALES && F::HAS_MINIMA)
#pragma GCC unroll 2
      for (int j = 0; j < J; j++) {
        Vec minima = scales_at(panels.of(j) + F::MINIMA + group * LANES * 2, false);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          float sum = std::bit_cast<float>(row.corrections[m * rows.num_corrections + group]);
          sums[m][j] = multiply_add(minima, splat(sum), sums[m][j]);
        }
      }
  }

  // Adds the sums of a block whose scales are whole numbers to the results, and what its minima give.
  [[gnu::always_inline]] void end_block(Panels panels, RowBlock row, bool are_bfloat16,
                                        const Vec (&of_block)[M][J], Vec (&sums)[M][J]) const {
#pragma GCC unroll 2
    for (int j = 0; j < J; j++) {
      const uint8_t* block = panels.of(j);
      Vec scale = scales_at(block, are_bfloat16);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        Vec step = splat(row.steps[m * rows.num_steps]);
        sums[m][j] = multiply_add(of_block[m][j] * scale, step, sums[m][j]);
        if constexpr (F::HAS_MINIMA) {
          Int least = {};
#pragma GCC unroll 8
          for (int pair = 0; pair < F::GROUPS / 2; pair++) {
            const uint8_t* minima = block + F::WHOLE_MINIMA + pair * 2 * LANES;
            least = minima_added(least, minima, row.corrections[m * rows.num_corrections + pair]);
          }
          Vec minimum = __builtin_convertvector(least, Vec) * scales_at(block + F::MINIMA, false);
          sums[m][j] = multiply_add(minimum, -step, sums[m][j]);
        }
      }
    }
  }
};

// The sums (M, J, LANES) of M rows from `first_row` on with J panels. Weights are fetched `ahead` bytes before
// they are read; 0 where an earlier block of rows has just read them.
template <typename F, int M, int J>
[[gnu::noinline]] void multiply_block(const WholeRows& rows, int64_t first_row, const FileType& type,
                                      Panels panels, int64_t ahead, float* results) {
  WholeBlock<F, M, J> block{rows};
  Bytes table = table_of(F::IS_TABLE ? type.table : nullptr);
  bool are_bfloat16 = type.has_bfloat16_scales;
  Vec sums[M][J] = {};
  for (int64_t k = 0; k < rows.width; k += F::BLOCK, panels.block += F::BLOCK_BYTES) {
    auto row = rows.row<F>(first_row, k);
    Vec of_block[M][J] = {};  // where scales are whole numbers: before the block's own scale
#pragma GCC unroll 2
    for (int j = 0; j < J; j++)
#pragma GCC unroll 8
      for (int64_t line = 0; line < F::CODES; line += CACHE_LINE)
        __builtin_prefetch(panels.of(j) + line + ahead, 0, 2);
    for (int64_t s = 0; s < F::SECTIONS; s++) {
      constexpr int GROUPS_OF_SECTION = SECTION / F::GROUP, QUAD_PAIRS = block.QUAD_PAIRS;
#pragma GCC unroll 2
      for (int place = 0; place < GROUPS_OF_SECTION; place++) {
        int64_t group = s * GROUPS_OF_SECTION + place;
        Int whole[M][J] = {};
        Pairs shorts[M][J] = {};
        block.begin_group(panels, row, group, whole);
#pragma GCC unroll 4
        for (int i = 0; i < QUAD_PAIRS; i++)
          block.add_quads(panels, row, s, place * QUAD_PAIRS + i, table, ahead, shorts, whole);
        block.end_group(panels, row, group, are_bfloat16, whole, of_block, sums);
      }
    }
    if constexpr (F::HAS_WHOLE_SCALES) block.end_block(panels, row, are_bfloat16, of_block, sums);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int j = 0; j < J; j++) store(results + (m * J + j) * LANES, sums[m][j]);
}

// A pair of panels by all rows, in blocks of M; J panels at a time have a place in the registers.
template <typename F, int M>
void multiply_pair_by_blocks(const GroupProduct& product, const PanelPair& pair, const Target& to) {
  constexpr int J = M <= 4 ? 2 : 1;
  const FileType& type = pair.part.type();
  const WholeRows& rows = product.rows[type.form];
  for (int j = 0; j < 2 && j * LANES < pair.width; j += J)
    for (int64_t row = 0; row < product.M; row += M) {
      float results[M * J * LANES];
      Panels panels{pair.panels + j * pair.panel_bytes, pair.panel_bytes};
      multiply_block<F, M, J>(rows, row, type, panels, row ? 0 : GROUP_BYTES_AHEAD, results);
      write_results(product, to, results, std::min<int64_t>(M, product.M - row), J * LANES, row,
                    pair.column + j * LANES, std::min<int64_t>(J * LANES, pair.width - j * LANES));
    }
}

template <typename F>
void multiply_pair(const GroupProduct& product, const PanelPair& pair, const Target& to) {
  int64_t num_blocks = (product.M + MOST_BLOCK_ROWS - 1) / MOST_BLOCK_ROWS;
  int64_t rows = (product.M + num_blocks - 1) / num_blocks;
  switch (rows) {
    case 1: return multiply_pair_by_blocks<F, 1>(product, pair, to);
    case 2: return multiply_pair_by_blocks<F, 2>(product, pair, to);
    case 3: return multiply_pair_by_blocks<F, 3>(product, pair, to);
    case 4: return multiply_pair_by_blocks<F, 4>(product, pair, to);
    case 5:
    case 6: return multiply_pair_by_blocks<F, 6>(product, pair, to);
    default: return multiply_pair_by_blocks<F, 8>(product, pair, to);
  }
}

void multiply_pairs_in_vectors(const GroupProduct& product, const Part& part, int64_t pair, int64_t end,
                               int64_t first_column, const Target& to) {
  with_form(part.form(), [&]<typename F>() {
    for (; pair < end; pair++)
      multiply_pair<F>(product, PanelPair(product.weights, part, pair, first_column), to);
  });
}

// ---- the pieces

// Bytes of all panels of a product; a range of these is a piece of it.
int64_t panel_bytes_of(const GroupProduct& product) {
  int64_t total = 0;
  for (const Part& part : product.weights)
    total += 2 * part.num_pairs() / product.slice.count * part.panel_bytes();
  return total;
}

// Calls body(part, pair, end, first_column) for the pairs of panels that begin between two bytes; the part's
// pair 0 would begin at `first_column`.
template <typename Body> void for_pairs(const GroupProduct& product, int64_t first, int64_t last, Body body) {
  int64_t before = 0, column = 0;
  for (const Part& part : product.weights) {
    int64_t size = 2 * part.panel_bytes(), num_pairs = part.num_pairs() / product.slice.count;
    int64_t skipped = product.slice.index * num_pairs;
    auto pair_from = [&](int64_t bytes) {
      return skipped + std::clamp<int64_t>((bytes - before + size - 1) / size, 0, num_pairs);
    };
    int64_t from = pair_from(first), to = pair_from(last);
    if (from < to) body(part, from, to, column - skipped * 2 * LANES);
    before += num_pairs * size;
    column += part.num_outputs / product.slice.count;
  }
}

// Products with the pairs of panels that begin between two bytes.
void multiply(const GroupProduct& product, int64_t first, int64_t last, const Target& to) {
  auto multiply_pairs = multiply_pairs_in_vectors;
  if (!product.in_whole_numbers())
    multiply_pairs = multiply_pairs_in_float32;
  else if (has_tiles && product.M >= LEAST_ROWS_IN_TILES)
    multiply_pairs = multiply_pairs_in_tiles;
  for_pairs(product, first, last,
            [&](const Part& part, int64_t pair, int64_t end, int64_t first_column) {
              multiply_pairs(product, part, pair, end, first_column, to);
            });
}

// A product of some rows, in pieces of its weights' bytes.
struct SharedProduct : Work {
  Tensor x, bytes;  // kept, as well as the bias: what the product's pointers lead to
  std::optional<Tensor> bias;
  GroupProduct product;
  float* y;
  int64_t size;

  SharedProduct(GroupProduct whole, const Tensor& x, const Tensor& bytes, const std::optional<Tensor>& bias,
                float* y)
      : x(x),
        bytes(bytes),
        bias(bias),
        product(std::move(whole)),
        y(y),
        size(panel_bytes_of(product)) {
    num_pieces = pieces_of(size, 1);
  }

  int64_t first_byte(int64_t piece) const { return size * piece / num_pieces; }
  // The first output of a piece and the one after its last.
  std::pair<int64_t, int64_t> outputs(int64_t piece) const {
    int64_t from = product.N, to = 0;
    auto widen = [&](const Part& part, int64_t pair, int64_t end, int64_t column) {
      from = std::min(from, column + pair * 2 * LANES);
      to = column + std::min(end * 2 * LANES, part.num_outputs);
    };
    for_pairs(product, first_byte(piece), first_byte(piece + 1), widen);
    return {std::min(from, to), to};
  }

  int64_t result_size(int64_t piece) const override {
    auto [from, to] = outputs(piece);
    return product.M * (to - from);
  }
  void compute(int64_t piece, int64_t, float* result) const override {
    auto [from, to] = outputs(piece);
    multiply(product, first_byte(piece), first_byte(piece + 1), {result - from, to - from});
  }
  void publish(int64_t piece, const float* result) const override {
    auto [from, to] = outputs(piece);
    int64_t count = to - from;
    for (int64_t row = 0; row < product.M; row++)
      std::memcpy(y + row * product.N + from, result + row * count, count * sizeof(float));
  }
  void run(int64_t from, int64_t to) const override {
    multiply(product, first_byte(from), first_byte(to), {y, product.N});
  }
};

}  // namespace

Tensor group_quantised_product(const Tensor& x, const Tensor& bytes, const std::optional<Tensor>& bias,
                               int64_t width) {
  GroupWeights weights(bytes);
  int64_t K = weights.num_inputs();
  STD_TORCH_CHECK(x.dim() && x.size(x.dim() - 1) == K && weights.num_outputs() == width,
                  "rows and results must have the widths of the weights");
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = width;
  Tensor y = new_tensor(shape, ScalarType::Float);
  int64_t rows_left = x.numel() / K, chunks_left = (rows_left + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const float* rows = numbers<float>(x);
  float* to = numbers<float>(y);
  for (; chunks_left; chunks_left--) {
    int64_t M = (rows_left + chunks_left - 1) / chunks_left;  // chunks of about one size
    GroupProduct product{weights, rows, numbers<float>(bias), M, K, width};
    if (product.in_whole_numbers()) round_rows(product);
    share(std::make_shared<SharedProduct>(std::move(product), x, bytes, bias, to));
    rows_left -= M;
    rows += M * K;
    to += M * width;
  }
  return y;
}

void post_group_quantised(const Tensor& x, const Tensor& bytes, const std::optional<Tensor>& bias,
                          const std::vector<Slice>& slices, const std::vector<int64_t>& counts, float* y,
                          const Post& post) {
  GroupWeights weights(bytes);
  int64_t K = weights.num_inputs();
  for (const Part& part : weights)
    for (const Slice& slice : slices)
      STD_TORCH_CHECK(part.num_outputs % (slice.count * 2 * LANES) == 0,
                      "slices of weights must be whole pairs of panels");
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == K, "rows must have the width of the weights");
  GroupProduct whole{weights, numbers<float>(x), nullptr, x.size(0), K, 0};
  if (whole.in_whole_numbers()) round_rows(whole);
  int64_t row = 0;
  for (size_t i = 0; i < slices.size(); i++) {
    whole.slice = slices[i];
    whole.N = weights.num_outputs() / slices[i].count;
    if (bias) whole.bias = numbers<float>(bias) + slices[i].index * whole.N;
    for (int64_t left = counts[i], M; left; left -= M, row += M) {
      M = std::min(left, ROWS_AT_ONCE);
      post(std::make_shared<SharedProduct>(whole.of_rows(row, M), x, bytes, bias, y + row * whole.N));
    }
  }
}

}  // namespace medusa
