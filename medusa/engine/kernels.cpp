// Operators of torch for a CPU. For passes of few rows, a product with packed weights and tree attention; for drafts, what grows a dynamic tree.
//
// Every sum has one order that depends on nothing but the row itself: not on how many rows take part, on which
// thread computes it, or on what lies in slots that the row does not see. So the logits of a node are the same
// to the last bit alone, in a tree and in a batch.
//
// Vectors are the compiler's own (vector_size), as wide as the processor that this is compiled for has them.

#include "group_quantised.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"

// ---------------------------------------------------------------- weights, widened to float32 in the register

// Weight `i` of each lane.
static inline Vec widened(const float* from, int i) { return load(from); }

// Both weights of a lane lie in one number of 32 bits: nothing is moved from lane to lane.
static inline Vec widened(const BFloat16* from, int i) {
  Int both = *reinterpret_cast<const Several<int32_t>*>(from);
  return (Vec)(i ? both & ~0xffff : both << 16);
}

// -------------------------------------------------------- int8 weights, multiplied in pairs by numbers of 16 bits

typedef int16_t Pairs __attribute__((vector_size(LANES * 4)));

static inline Pairs widened_pairs(const int8_t* from) {
#if defined(WIDEST)
  return (Pairs)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Pairs)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  typedef int8_t Narrow __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Narrow*>(from), Pairs);
#endif
}

// sums + a lane's two weights times the two numbers of `pair`
static inline Int pairs_added(Int sums, Pairs weights, int32_t pair) {
#if defined(WIDEST) && defined(__AVX512VNNI__)
  return (Int)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(WIDEST)
  return sums + (Int)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
  return sums + (Int)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(pair));
#elif defined(__x86_64__)
  return sums + (Int)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(pair));
#else
  Int both = (Int)weights;
  return sums + (both << 16 >> 16) * static_cast<int16_t>(pair) + (both >> 16) * (pair >> 16);
#endif
}

constexpr int64_t RUN = 256;        // numbers of a row that share a step: 32,767 * 128 * 256 < 2^31
constexpr float STEPS = 32767.f;

// Numbers as `rounded` whole ones times a step; the step is not finite where one of them is not.
static float rounded(const float* x, int64_t count, int16_t* rounded) {
  Vec highest = {}, spoilt = {};
  float padded[RUN] = {};
  if (count < RUN) x = static_cast<const float*>(std::memcpy(padded, x, count * sizeof(float)));
  for (int64_t k = 0; k < RUN; k += LANES) {
    Vec value = load(x + k);
    highest = larger(value < 0.f ? -value : value, highest);
    spoilt += value - value;
  }
  float most = 0, broken = 0;
  for (int lane = 0; lane < LANES; lane++) most = std::max(most, highest[lane]), broken += spoilt[lane];
  Vec per_step = all(most > 0 ? STEPS / most : 0.f);
  for (int64_t k = 0; k < RUN; k += LANES) {
    Int whole = (Int)(load(x + k) * per_step + ROUNDER) - (Int)all(ROUNDER);
    *reinterpret_cast<Several<int16_t>*>(rounded + k) = __builtin_convertvector(whole, Several<int16_t>);
  }
  return most / STEPS + broken;
}

// ------------------------------------------------------------------------------- bfloat16 in twelve bits, exactly

// The exponents of a matrix are few. A weight is its lower byte (a bit of the exponent, and the fraction), and a code of four
// bits for its upper one: the sign, and 0 to 6 for seven that follow each other without it, or 7 for zero. A weight whose
// upper byte has no code is a zero there and is kept apart; what it gives is added at the end of each sum. A panel is a Head,
// the lower bytes of all its columns, their codes, and the weights apart, with room for one in 256. Zeros fill up the last
// columns.
//
// Bytes lie so that zipping lower and upper ones gives pairs of a lane: in each 16, the first two columns of four lanes, then
// the next two. Codes lie as these do, those of the next four columns in the upper halves of their bytes.
struct Twelve {};
struct alignas(64) Head { uint8_t upper[16]; uint32_t num_apart; };  // upper: the byte of each code
struct Apart { uint32_t column; uint16_t lane, bits; };

static int64_t coded_columns(int64_t K) { return (K + 31) / 32 * 32; }
static int64_t room_apart(int64_t K) { return coded_columns(K) * LANES / 256; }
static int64_t coded_size(int64_t K) {
  int64_t size = sizeof(Head) + coded_columns(K) * LANES * 3 / 2 + room_apart(K) * sizeof(Apart);
  return (size + 63) / 64 * 64;
}

// Where the parts of a panel lie.
struct Coded {
  Head* head;
  uint8_t *bytes, *codes;
  Apart* apart;

  Coded(const char* panel, int64_t K) {
    head = reinterpret_cast<Head*>(const_cast<char*>(panel));
    bytes = reinterpret_cast<uint8_t*>(head + 1);
    codes = bytes + coded_columns(K) * LANES;
    apart = reinterpret_cast<Apart*>(codes + coded_columns(K) * LANES / 2);
  }
};

// In each 16 bytes, the first 8 of `a` and of `b` in turn; or the second.
static inline Bytes zipped(Bytes a, Bytes b, bool second) {
#if defined(WIDEST)
  return second ? (Bytes)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b) : (Bytes)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return second ? (Bytes)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b) : (Bytes)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
  return second ? (Bytes)vzip2q_u8((uint8x16_t)a, (uint8x16_t)b) : (Bytes)vzip1q_u8((uint8x16_t)a, (uint8x16_t)b);
#else
  Bytes both;
  for (int i = 0; i < LANES * 4; i++) both[i] = (i % 2 ? b : a)[i / 16 * 16 + 8 * second + i % 16 / 2];
  return both;
#endif
}

static inline Bytes upper_bytes(const Head* head) {
  Bytes table;
  for (int i = 0; i < LANES * 4; i += 16) std::memcpy(reinterpret_cast<char*>(&table) + i, head->upper, 16);
  return table;
}

// Codes of four columns, and those in the upper halves of their bytes.
static inline Bytes codes_of(Bytes both, bool in_upper_half) {
  typedef uint16_t Words __attribute__((vector_size(LANES * 4)));
  return in_upper_half ? (Bytes)((Words)both >> 4) : both;  // `looked_up` reads the lower half of a byte alone
}

// ------------------------------------------------------------------------------------------------- the product

// Weights lie in panels (N / LANES, K / PER_LANE, LANES, PER_LANE). A block is M rows by J panels; its sums stay in
// registers.
template <typename W>
constexpr int PER_LANE = std::is_same_v<W, BFloat16> || std::is_same_v<W, int8_t> ? 2 : 1;
template <typename W>
static inline int64_t height_of(int64_t K) { return (K + PER_LANE<W> - 1) / PER_LANE<W>; }
// Rows of a block, at most. Few registers hold the sums of 6 rows by two panels, where each number that is read of a row
// serves both; whole numbers, which are not added as they are multiplied, wait for no reading.
template <typename W>
constexpr int MOST_ROWS = REGISTERS == 32 ? (std::is_same_v<W, Twelve> ? 11 : 13) : std::is_same_v<W, int8_t> ? 12 : 6;
// Panels that are read side by side, at most. Narrow vectors need more sums under way than two panels have; with wide
// ones a pass of one node took a tenth longer with four.
constexpr int STREAMS = LANES == 16 ? 2 : 4;
// How far ahead weights are fetched, into the second cache: processors look no page ahead by themselves, and at eight
// pages two cores had read 1.3 times as much as at one.
constexpr int64_t PAGE = 4096, AHEAD = 8 * PAGE;
// Weights that are fetched while a block is summed up. Blocks of rows that share panels share out what follows these, so
// that memory is asked as evenly as can be.
struct Ahead {
  const char* next;  // in the first of the panels, which are `size` bytes each
  int64_t apart, size;
  template <int J> void fetch() {
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) __builtin_prefetch(next + j * size, 0, 2);
    next += apart;
  }
};
template <typename W>
constexpr int panels_for(int rows) {
  constexpr int others = std::is_same_v<W, int8_t> ? 3 : 2;  // registers for numbers of a row, products before they are added, and a mask
  return std::min(STREAMS, (REGISTERS - others) / (rows + 1));
}

// Rows in blocks that a tile holds, the last one over rows of the one before it.
struct Blocks {
  int64_t count, rows, steps, size;  // size: bytes of a block (steps, parts, rows, TILE_WIDTH)
  char* parts;
  float* scales;  // of int8 weights (blocks * rows, runs): the step of the numbers

  int64_t first(int64_t block, int64_t M) const { return std::min(block * rows, M - rows); }
};

struct Product {
  const float* x;         // (M, K)
  const int16_t* rounded; // (M, runs, RUN) of int8 weights: x in steps
  const float* steps;     // (M, runs)
  const char* panels;
  int64_t size;         // bytes of a panel
  const float* scales;  // (N,) of int8 weights, or null
  const float* bias;    // (N,), or null
  float* y;             // the result of a row and an output lies at row * stride + output
  int64_t stride;
  int64_t M, K, N;
  Blocks blocks;        // rows for tiles
};

[[gnu::noinline]] static void finished(const Product& of, const float* sums, int64_t row, int64_t column, int64_t count) {
  float* y = of.y + row * of.stride + column;
  int64_t n = 0;
  for (; n + LANES <= count; n += LANES) {
    Vec sum = load(sums + n);
    if (of.scales) sum *= load(of.scales + column + n);
    store(y + n, of.bias ? sum + load(of.bias + column + n) : sum);
  }
  for (; n < count; n++) {
    float sum = of.scales ? sums[n] * of.scales[column + n] : sums[n];
    y[n] = of.bias ? sum + of.bias[column + n] : sum;
  }
}

template <typename W, int M, int J>
static inline void sum_up(const Product& of, const W* w, int64_t row, Ahead ahead, Vec (&sums)[M][J]) {
  constexpr int PER = PER_LANE<W>;
  const float* x = of.x + row * of.K;
  int64_t height = height_of<W>(of.K) * PER, k = 0;
  auto add = [&]<int COUNT>() __attribute__((always_inline)) {
    ahead.fetch<J>();
#pragma GCC unroll 2
    for (int i = 0; i < COUNT; i++) {
      Vec weights[J];  // one of each lane at a time: more would push sums out of the registers
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) weights[j] = widened(w + (j * height + k) * LANES, i);
#pragma GCC unroll 13
      for (int m = 0; m < M; m++) {
        Vec value = all(x[m * of.K + k + i]);
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) sums[m][j] = multiply_add(value, weights[j], sums[m][j]);
      }
    }
  };
  for (; k + PER <= of.K; k += PER) add.template operator()<PER>();
  if (k < of.K) add.template operator()<1>();
}

template <int M, int J>
static inline void sum_up(const Product& of, const int8_t* w, int64_t row, Ahead ahead, Vec (&sums)[M][J]) {
  int64_t pairs = height_of<int8_t>(of.K), runs = (of.K + RUN - 1) / RUN;
  const int16_t* x = of.rounded + row * runs * RUN;
  for (int64_t run = 0; run < runs; run++) {
    Int whole[M][J] = {};
    for (int64_t k = run * RUN / 2; k < std::min(pairs, (run + 1) * RUN / 2); k++) {
      Pairs weights[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) weights[j] = widened_pairs(w + (j * pairs + k) * 2 * LANES);
      ahead.fetch<J>();
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
      Vec step = all(of.steps[(row + m) * runs + run]);
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) sums[m][j] = multiply_add(__builtin_convertvector(whole[m][j], Vec), step, sums[m][j]);
    }
  }
}

// How far ahead of its columns a panel in twelve bits is fetched; its bytes and its codes are read side by side.
constexpr int64_t COLUMNS_AHEAD = 1024;

// `next`: how many bytes behind these panels the thread's next ones begin; 0 where they are its last
template <int M, int J>
static inline void sum_up(const Product& of, const Twelve* w, int64_t row, int64_t next, Vec (&sums)[M][J]) {
  const float* x = of.x + row * of.K;
  const char* panel = reinterpret_cast<const char*>(w);
  const Coded first(panel, of.K);
  const uint8_t *bytes = first.bytes, *codes = first.codes;
  Bytes tables[J];
  for (int j = 0; j < J; j++) {
    tables[j] = upper_bytes(reinterpret_cast<const Head*>(panel + j * of.size));
    __builtin_prefetch(reinterpret_cast<const char*>(first.apart) + j * of.size, 0, 3);  // for the end
    __builtin_prefetch(panel + next + j * of.size, 0, 3);
  }
  int64_t columns = coded_columns(of.K), ahead = std::min(columns, COLUMNS_AHEAD), k = 0;
  int64_t bytes_ahead = ahead * LANES, codes_ahead = ahead * LANES / 2;
  auto add = [&]<bool ARE_ALL_THERE>() __attribute__((always_inline)) {
    Bytes both[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) both[j] = load(codes + j * of.size), __builtin_prefetch(codes + j * of.size + codes_ahead, 0, 2);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      Int pairs[J][2];
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) {
        const uint8_t* from = bytes + j * of.size + half * 4 * LANES;
        __builtin_prefetch(from + bytes_ahead, 0, 2);
        Bytes lower = load(from), upper = looked_up(tables[j], codes_of(both[j], half));
        pairs[j][0] = (Int)zipped(lower, upper, false), pairs[j][1] = (Int)zipped(lower, upper, true);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        if (!ARE_ALL_THERE && k + 4 * half + i >= of.K) return;
        Vec weights[J];
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) weights[j] = (Vec)(i % 2 ? pairs[j][i / 2] & ~0xffff : pairs[j][i / 2] << 16);
#pragma GCC unroll 13
        for (int m = 0; m < M; m++) {
          Vec value = all(x[m * of.K + k + 4 * half + i]);
#pragma GCC unroll 4
          for (int j = 0; j < J; j++) sums[m][j] = multiply_add(value, weights[j], sums[m][j]);
        }
      }
    }
    k += 8, bytes += 8 * LANES, codes += 4 * LANES;
  };
  while (k + 8 <= std::min(of.K, columns - ahead)) add.template operator()<true>();
  bytes_ahead = next ? next - k * LANES : 0, codes_ahead = next ? next - k * LANES / 2 : 0;
  while (k + 8 <= of.K) add.template operator()<true>();
  if (k < of.K) add.template operator()<false>();
}

// The sums (M, J, LANES) of M rows with J panels, the first of which is at `w`.
template <typename W, int M, int J, typename Following>
[[gnu::noinline]] static void block(const Product& of, const char* w, int64_t row, Following following, float* results) {
  Vec sums[M][J] = {};
  sum_up(of, reinterpret_cast<const W*>(w), row, following, sums);
#pragma GCC unroll 13
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) store(results + (m * J + j) * LANES, sums[m][j]);
}

// Blocks of rows from which on a panel in twelve bits is widened once for all of them: where registers are few, blocks are
// small, and widening it for each made 64 rows a sixth slower.
constexpr int64_t BLOCKS_TO_WIDEN = REGISTERS == 32 ? std::numeric_limits<int64_t>::max() : 4;

// Eight columns of a panel in sixteen bits, those apart as zeros.
constexpr int64_t EIGHT_COLUMNS = 8 * LANES * sizeof(BFloat16);
static inline void widen_eight(const uint8_t* bytes, const uint8_t* codes, Bytes table, char* to) {
  Bytes both = load(codes);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    Bytes lower = load(bytes + half * 4 * LANES), upper = looked_up(table, codes_of(both, half));
    Bytes pairs[2] = {zipped(lower, upper, false), zipped(lower, upper, true)};
    std::memcpy(to + half * sizeof(pairs), pairs, sizeof(pairs));
  }
}

// All columns of J panels, each of which takes `wide` bytes; the last eight of a panel may reach beyond.
static void widen(const char* from, int64_t size, int J, int64_t K, char* to, int64_t wide) {
  for (int j = 0; j < J; j++) {
    const Coded panel(from + j * size, K);
    Bytes table = upper_bytes(panel.head);
    for (int64_t k = 0; k < K; k += 8) widen_eight(panel.bytes + k * LANES, panel.codes + k / 2 * LANES, table, to + j * wide + k / 8 * EIGHT_COLUMNS);
  }
}

// Adds what the weights give that J panels keep apart, to the results (M, J, LANES) of M rows.
[[gnu::noinline]] static void add_apart(const Product& of, const char* panels, int J, int64_t row, int64_t M, float* results) {
  for (int j = 0; j < J; j++) {
    const Coded panel(panels + j * of.size, of.K);
    for (const Apart* each = panel.apart; each < panel.apart + panel.head->num_apart; each++)
      for (int64_t m = 0; m < M; m++) {
        float& sum = results[(m * J + j) * LANES + each->lane];
        sum = multiply_add(std::bit_cast<float>(uint32_t(each->bits) << 16), of.x[(row + m) * of.K + each->column], sum);
      }
  }
}

// J panels from `panel` on, each read once for all blocks of rows. The last block overlaps the one before it, and computes
// its rows to the same bits again.
template <typename W, int M, int J>
static void panels_times_rows(const Product& of, int64_t panel, int64_t last) {
  const char* w = of.panels + panel * of.size;
  int64_t blocks = (of.M + M - 1) / M, ahead = std::clamp((last - panel - J) * of.size, PAGE, AHEAD);  // what follows the last panel is another thread's
  thread_local Scratch scratch;
  char* widened = nullptr;
  if (std::is_same_v<W, Twelve> && blocks >= BLOCKS_TO_WIDEN) {
    int64_t wide = height_of<BFloat16>(of.K) * 2 * LANES * sizeof(BFloat16);
    widened = reinterpret_cast<char*>(scratch.of((J * wide + EIGHT_COLUMNS) / sizeof(float)));
    widen(w, of.size, J, of.K, widened, wide);
  }
  for (int64_t each = 0; each < blocks; each++) {
    int64_t row = std::min(each * M, of.M - M), column = panel * LANES;
    float results[M * J * LANES];
    auto following = [&](int64_t bytes) { return Ahead{w + ahead + of.size * each / blocks, bytes / blocks, of.size}; };  // by column
    if constexpr (std::is_same_v<W, Twelve>) {
      if (widened) block<BFloat16, M, J>(of, widened, row, following(2 * LANES * sizeof(BFloat16)), results);
      else block<W, M, J>(of, w, row, panel + 2 * J <= last ? J * of.size : int64_t(0), results);
      add_apart(of, w, J, row, M, results);
    } else {
      block<W, M, J>(of, w, row, following(PER_LANE<W> * LANES * sizeof(W)), results);
    }
    for (int m = 0; m < M; m++) finished(of, results + m * J * LANES, row + m, column, std::min<int64_t>(J * LANES, of.N - column));
  }
}

constexpr int64_t ROWS_AT_ONCE = 128;

// What multiplies rows by the panels of a range.
// `last`: up to which panel the thread is likely to go on.
using Multiply = void (*)(const Product& of, int64_t panel, int64_t end, int64_t last);

template <typename W, int M = MOST_ROWS<W>>
static Multiply in_blocks_of(int64_t rows) {
  if constexpr (M > 1) if (rows < M) return in_blocks_of<W, M - 1>(rows);
  return [](const Product& of, int64_t panel, int64_t end, int64_t last) {
    constexpr int J = panels_for<W>(M);
    for (; panel + J <= end; panel += J) panels_times_rows<W, M, J>(of, panel, last);
    for (; panel < end; panel++) panels_times_rows<W, M, 1>(of, panel, last);
  };
}

// ------------------------------------------------------------------- the same in tile registers, where they are

// Such a register holds 16 rows of 64 bytes, and two are multiplied in 16 cycles: a pass of 16 rows takes little longer
// than one of a single row, which waits for memory. Tiles hold bfloat16 or int8. So rows are multiplied in parts whose
// sum they are, exactly: a float32 is that of three bfloat16, and a whole number of 16 bits that of two of 8.
#if defined(HAS_TILES)
template <typename W> using InTile = std::conditional_t<std::is_same_v<W, Twelve>, BFloat16, W>;
template <typename W> constexpr int PARTS = std::is_same_v<W, int8_t> ? 2 : 3;

// Calls `body` with each constant below N.
template <int N, typename Body> [[gnu::always_inline]] static inline void each(Body body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) { (body.template operator()<I>(), ...); }(std::make_integer_sequence<int, N>{});
}

// Rows in parts, which lie `apart`; of int8 weights, the steps of the numbers as well.
template <typename W> static void take_apart(const float* x, int64_t K, char* to, int64_t apart, float* steps);
template <> void take_apart<BFloat16>(const float* x, int64_t K, char* to, int64_t apart, float*) {
  for (int64_t k = 0; k < K; k += 32, to += 3 * apart) {
    float padded[32] = {};
    const float* from = K - k < 32 ? static_cast<const float*>(std::memcpy(padded, x + k, (K - k) * sizeof(float))) : x + k;
    __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
    for (int part = 0; part < 3; part++) {
      __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      _mm512_store_si512(to + part * apart, rounded);
      low -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(rounded)), 16);
      high -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(rounded, 1)), 16);
    }
  }
}

template <> void take_apart<int8_t>(const float* x, int64_t K, char* to, int64_t apart, float* steps) {
  alignas(64) int16_t whole[RUN];
  for (int64_t k = 0; k < K; k += TILE_WIDTH, to += 2 * apart) {
    if (k % RUN == 0) *steps++ = rounded(x + k, std::min(RUN, K - k), whole);
    for (int64_t half = 0; half < TILE_WIDTH; half += 32) {
      __m512i numbers = _mm512_load_si512(whole + k % RUN + half);
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + half), _mm512_cvtepi16_epi8(_mm512_srai_epi16(numbers, 8)));
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + apart + half), _mm512_cvtepi16_epi8(numbers));
    }
  }
}

template <typename W>  // W: what tiles hold
static Blocks blocks_of(const Product& of, Scratch& scratch) {
  int64_t count = (of.M + TILE_ROWS - 1) / TILE_ROWS, rows = (of.M + count - 1) / count, runs = (of.K + RUN - 1) / RUN;
  int64_t steps = (of.K * sizeof(W) + TILE_WIDTH - 1) / TILE_WIDTH, size = steps * PARTS<W> * rows * TILE_WIDTH;
  float* memory = scratch.of((count * size + TILE_WIDTH) / sizeof(float) + count * rows * runs);
  char* parts = reinterpret_cast<char*>(memory) + (-reinterpret_cast<uintptr_t>(memory) & (TILE_WIDTH - 1));
  Blocks blocks{count, rows, steps, size, parts, reinterpret_cast<float*>(parts + count * size)};
  for (int64_t row = 0; row < count * rows; row++) {
    const float* x = of.x + (blocks.first(row / rows, of.M) + row % rows) * of.K;
    take_apart<W>(x, of.K, parts + row / rows * size + row % rows * TILE_WIDTH, rows * TILE_WIDTH, blocks.scales + row * runs);
  }
  return blocks;
}

// J panels of `size` bytes, tile after tile; what is missing of the last one are zeros. Tiles are fetched AHEAD steps before
// they are multiplied, a sixteenth after the other.
template <int J, int AHEAD>
struct Panels {
  const char* w;
  int64_t size, steps;
  alignas(64) char ends[J][TILE_BYTES];

  Panels(const char* w, int64_t size, int64_t steps) : w(w), size(size), steps(steps) {}

  const char* tile(int j, int64_t step) {
    const char* whole = w + j * size + step * TILE_BYTES;
    int64_t left = size - step * TILE_BYTES;
    if (left >= TILE_BYTES) return whole;
    std::memset(ends[j] + left, 0, TILE_BYTES - left);
    return static_cast<const char*>(std::memcpy(ends[j], whole, left));
  }
  void prepare(int j, int64_t step, int from, int to) const {
    int64_t next_step = step + AHEAD, of_next_panels = next_step < steps ? 0 : J * size - steps * TILE_BYTES;
    const char* next = w + j * size + next_step * TILE_BYTES + of_next_panels;
    for (int line = from; line < to; line++) __builtin_prefetch(next + line * TILE_WIDTH, 0, 3);
  }
};

// The same where they were widened before: meanwhile the thread's next ones are fetched, some lines of `later` a step.
template <int J>
struct WidenedPanels : Panels<J, 1> {
  const char* later;
  int64_t lines;

  void prepare(int j, int64_t step, int from, int to) {
    Panels<J, 1>::prepare(j, step, from, to);
    for (int64_t line = 0; j == 0 && from == 0 && line < lines; line++, later += TILE_WIDTH) __builtin_prefetch(later, 0, 2);
  }
};

// J panels in twelve bits: the tiles of the next step are widened while those of this one are multiplied. Bytes and codes are
// fetched as they are for vectors.
template <int J>
struct TwelvePanels {
  const uint8_t *bytes, *codes;
  int64_t size, steps, next;
  Bytes tables[J];
  alignas(64) char tiles[2][J][TILE_BYTES];

  TwelvePanels(const char* w, int64_t size, int64_t K, int64_t next) : size(size), steps(coded_columns(K) / 32), next(next) {
    const Coded first(w, K);
    bytes = first.bytes, codes = first.codes;
    for (int j = 0; j < J; j++) {
      tables[j] = upper_bytes(reinterpret_cast<const Head*>(w + j * size));
      __builtin_prefetch(reinterpret_cast<const char*>(first.apart) + j * size, 0, 3);  // for the end
      __builtin_prefetch(w + next + j * size, 0, 3);
      prepare(j, -1, 0, 16);
    }
  }
  const char* tile(int j, int64_t step) const { return tiles[step & 1][j]; }
  void prepare(int j, int64_t step, int from, int to) {
    if (++step == steps) return;
    int64_t columns = 32 * steps, ahead = std::min(columns, COLUMNS_AHEAD);
    for (int eight = from / 4; eight < to / 4; eight++) {
      int64_t k = 32 * step + 8 * eight, of_bytes = j * size + k * LANES, of_codes = j * size + k / 2 * LANES;
      bool is_inside = k < columns - ahead;
      int64_t later = is_inside ? ahead : ahead - columns, of_next = is_inside ? 0 : next;
      if (is_inside || next) {
        __builtin_prefetch(bytes + of_bytes + later * LANES + of_next, 0, 2);
        __builtin_prefetch(bytes + of_bytes + later * LANES + of_next + TILE_WIDTH, 0, 2);
        __builtin_prefetch(codes + of_codes + later / 2 * LANES + of_next, 0, 2);
      }
      widen_eight(bytes + of_bytes, codes + of_codes, tables[j], tiles[step & 1][j] + eight * EIGHT_COLUMNS);
    }
  }
};

// B blocks by J panels. For few blocks, which wait for memory, there are up to six sums, and each panel is loaded anew for
// each part of each block, from the first cache. For more, up to four, and two panels ARE_HELD for all parts.
template <typename W, int B, int J, bool ARE_HELD, typename Tiles>
static void block_in_tiles(const Product& of, const Blocks& blocks, int64_t block, int64_t panel, Tiles panels) {
  constexpr int P = PARTS<BFloat16>;
  int64_t apart = blocks.rows * TILE_WIDTH;
  const char* x = blocks.parts + block * blocks.size;
  each<B * J>([]<int T>() { clear_tile<T>(); });
  for (int64_t step = 0; step < blocks.steps; step++, x += P * apart)
    each<P * B>([&]<int of_rows>() {
      constexpr int part = of_rows / B, b = of_rows % B, ROWS = ARE_HELD ? 4 + b : 6;
      load_tile<ROWS>(x + b * blocks.size + part * apart);
      each<J>([&]<int j>() {
        constexpr int WEIGHTS = ARE_HELD ? 6 + j : 7;
        if constexpr (!ARE_HELD || of_rows == 0) load_tile<WEIGHTS>(panels.tile(j, step));
        multiply_tiles<BFloat16, part, b * J + j, ROWS, WEIGHTS>();
        panels.prepare(j, step, 16 * of_rows / (P * B), 16 * (of_rows + 1) / (P * B));
      });
    });
  alignas(64) float sums[B][TILE_ROWS][J * LANES];
  each<B>([&]<int b>() { each<J>([&]<int j>() { store_tile<b * J + j>(sums[b][0] + j * LANES, sizeof(sums[b][0])); }); });
  int64_t column = panel * LANES, count = std::min<int64_t>(J * LANES, of.N - column);
  for (int b = 0; b < B; b++) {
    int64_t first = blocks.first(block + b, of.M);
    if constexpr (std::is_same_v<W, Twelve>) add_apart(of, of.panels + panel * of.size, J, first, blocks.rows, sums[b][0]);
    for (int64_t row = 0; row < blocks.rows; row++) finished(of, sums[b][row], first + row, column, count);
  }
}

template <int J>
static void int8_block_in_tiles(const Product& of, const Blocks& blocks, int64_t block, int64_t panel) {
  int64_t apart = blocks.rows * TILE_WIDTH;
  const char* x = blocks.parts + block * blocks.size;
  const float* scales = blocks.scales + block * blocks.rows * ((of.K + RUN - 1) / RUN);
  Panels<J, 2> panels(of.panels + panel * of.size, of.size, blocks.steps);
  alignas(64) Vec sums[TILE_ROWS][J] = {};
  alignas(64) Int whole[J][2][TILE_ROWS];
  each<4>([]<int T>() { clear_tile<T>(); });
  for (int64_t step = 0; step < blocks.steps; step++, x += 2 * apart) {
    each<2>([&]<int part>() { load_tile<4 + part>(x + part * apart); });
    each<J>([&]<int j>() {
      load_tile<7>(panels.tile(j, step));
      each<2>([&]<int part>() { multiply_tiles<int8_t, part, 2 * j + part, 4 + part, 7>(), panels.prepare(j, step, 8 * part, 8 * part + 8); });
    });
    if ((step + 1) * TILE_WIDTH % RUN && step + 1 < blocks.steps) continue;
    each<J>([&]<int j>() { each<2>([&]<int part>() { store_tile<2 * j + part>(whole[j][part], TILE_WIDTH), clear_tile<2 * j + part>(); }); });
    for (int64_t row = 0; row < blocks.rows; row++) {
      Vec scale = all(scales[row * ((of.K + RUN - 1) / RUN) + step * TILE_WIDTH / RUN]);
      for (int j = 0; j < J; j++) sums[row][j] = multiply_add(__builtin_convertvector((whole[j][0][row] << 8) + whole[j][1][row], Vec), scale, sums[row][j]);
    }
  }
  int64_t column = panel * LANES, count = std::min<int64_t>(J * LANES, of.N - column);
  for (int64_t row = 0; row < blocks.rows; row++) finished(of, reinterpret_cast<float*>(sums[row]), blocks.first(block, of.M) + row, column, count);
}

constexpr int64_t FEW_BLOCKS = 3;

// J panels from `panel` on by all blocks of rows; `last` is the end of this thread's.
template <typename W, int J, bool ARE_HELD>
static void panels_in_tiles(const Product& of, const Blocks& blocks, int64_t panel, int64_t last) {
  const char* w = of.panels + panel * of.size;
  if constexpr (std::is_same_v<W, int8_t>) {
    for (int64_t block = 0; block < blocks.count; block++) int8_block_in_tiles<J>(of, blocks, block, panel);
    return;
  }
  auto multiply = [&](auto panels_for) {
    for (int64_t block = 0; block < blocks.count; block += 2)
      if (block + 1 == blocks.count) block_in_tiles<W, 1, J, ARE_HELD>(of, blocks, block, panel, panels_for(block));
      else if constexpr (J <= 3) block_in_tiles<W, 2, J, ARE_HELD>(of, blocks, block, panel, panels_for(block));
  };
  if constexpr (std::is_same_v<W, BFloat16>) multiply([&](int64_t) { return Panels<J, 1>(w, of.size, blocks.steps); });
  if constexpr (std::is_same_v<W, Twelve>) {
    bool has_next = panel + 2 * J <= last;
    if (blocks.count == 1) return multiply([&](int64_t) { return TwelvePanels<J>(w, of.size, of.K, has_next ? J * of.size : 0); });
    thread_local Scratch scratch;
    int64_t wide = blocks.steps * TILE_BYTES, steps = (blocks.count + 1) / 2 * blocks.steps;
    char* widened = reinterpret_cast<char*>(scratch.of((J * wide + TILE_WIDTH) / sizeof(float)));
    widened += -reinterpret_cast<uintptr_t>(widened) & (TILE_WIDTH - 1);
    widen(w, of.size, J, coded_columns(of.K), widened, wide);
    int64_t lines = has_next ? (J * of.size / TILE_WIDTH + steps - 1) / steps : 0;
    multiply([&](int64_t block) { return WidenedPanels<J>{{widened, wide, blocks.steps}, w + J * of.size + block / 2 * blocks.steps * lines * TILE_WIDTH, lines}; });
  }
}

template <typename W>
static void multiply_in_tiles(const Product& of, int64_t panel, int64_t end, int64_t last) {
  const Blocks& blocks = of.blocks;
  bool are_few = blocks.count <= FEW_BLOCKS;
  TileShape shapes[8];  // registers below `first_weights` hold as many rows as a block, the others 16
  int first_weights = are_few || std::is_same_v<W, int8_t> ? 7 : 6;
  for (int i = 0; i < 8; i++) shapes[i] = {i < first_weights ? blocks.rows : TILE_ROWS, TILE_WIDTH};
  TileRegisters registers(shapes);
  auto multiply = [&]<int J, bool ARE_HELD>() {
    for (; panel + J <= end; panel += J) panels_in_tiles<W, J, ARE_HELD>(of, blocks, panel, last);
  };
  if constexpr (!std::is_same_v<W, int8_t>) {
    if (blocks.count == 1) multiply.template operator()<6, false>();
    if (are_few) multiply.template operator()<3, false>(), multiply.template operator()<1, false>();
  }
  multiply.template operator()<2, true>();
  multiply.template operator()<1, true>();
}
#endif

// Whether products of bfloat16 and int8 are computed in tile registers; `wanted` that they shall be, where there are any.
bool has_tiles = are_tiles_allowed();
static bool tiles(std::optional<bool> wanted) { return has_tiles = wanted.value_or(has_tiles) && are_tiles_allowed(); }

// Rows in steps, for int8 weights in vectors.
static void round_rows(Product& of, Scratch& scratch) {
  int64_t runs = (of.K + RUN - 1) / RUN;
  float* steps = scratch.of(of.M * runs * (1 + RUN / 2));
  int16_t* numbers = reinterpret_cast<int16_t*>(steps + of.M * runs);
  for (int64_t row = 0; row < of.M; row++)
    for (int64_t run = 0; run < runs; run++)
      steps[row * runs + run] = rounded(of.x + row * of.K + run * RUN, std::min(RUN, of.K - run * RUN), numbers + (row * runs + run) * RUN);
  of.rounded = numbers, of.steps = steps;
}

// A product in pieces of its weights' panels.
struct SharedProduct : Work {
  std::vector<Tensor> kept;
  Product of;
  Scratch scratch;
  Multiply multiply;
  int64_t num_panels, together;  // `together`: panels that a thread multiplies side by side, at most

  int64_t units() const { return (num_panels + together - 1) / together; }
  int64_t panel(int64_t piece) const { return std::min(units() * piece / num_pieces * together, num_panels); }
  int64_t output(int64_t piece) const { return std::min(panel(piece) * LANES, of.N); }

  int64_t result_size(int64_t piece) const override { return of.M * (output(piece + 1) - output(piece)); }
  void compute(int64_t piece, int64_t end, float* result) const override {
    Product mine = of;
    mine.stride = output(piece + 1) - output(piece), mine.y = result - output(piece);
    multiply(mine, panel(piece), panel(piece + 1), panel(end));
  }
  void publish(int64_t piece, const float* result) const override {
    int64_t first = output(piece), count = output(piece + 1) - first;
    for (int64_t row = 0; row < of.M; row++) std::memcpy(of.y + row * of.stride + first, result + row * count, count * sizeof(float));
  }
  void run(int64_t first, int64_t last) const override { multiply(of, panel(first), panel(last), panel(last)); }
};

static void multiply_all(std::shared_ptr<SharedProduct> work) {
  work->num_pieces = pieces_of(work->units(), work->together * work->of.size);
  share(std::move(work));
}

template <typename W>
static void product_of(Product of, const Tensor& panels, std::vector<Tensor> kept) {
  constexpr bool fits_tiles = std::is_same_v<W, BFloat16> || std::is_same_v<W, Twelve> || std::is_same_v<W, int8_t>;
  bool in_tiles = fits_tiles && has_tiles;
  int64_t per_lane = std::is_same_v<W, int8_t> && in_tiles ? 4 : PER_LANE<W>;
  bool is_packed = std::is_same_v<W, Twelve> ? has_shape(panels, ScalarType::Byte, {-1, coded_size(of.K)}) : panels.dim() == 4 && panels.size(2) == LANES && panels.size(3) == per_lane;
  STD_TORCH_CHECK(is_packed && panels.size(0) == (of.N + LANES - 1) / LANES, "panels must be packed for this processor");
  STD_TORCH_CHECK(panels.dim() == 2 || panels.size(1) == (of.K + per_lane - 1) / per_lane, "rows must be float32, of the weight's width");
  // Rows that are multiplied together, at most; in tiles, their parts stay in the second cache while all weights pass by.
  int64_t left = of.M, parts = in_tiles ? (left + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE : std::min<int64_t>(left, 1);
  for (; parts; parts--, of.x += of.M * of.K, of.y += of.M * of.N, left -= of.M) {
    of.M = (left + parts - 1) / parts;
    auto work = std::make_shared<SharedProduct>();
    work->kept = kept, work->of = of, work->num_panels = panels.size(0);
#if defined(HAS_TILES)
    if constexpr (fits_tiles) if (in_tiles) {
      work->of.blocks = blocks_of<InTile<W>>(of, work->scratch), work->multiply = multiply_in_tiles<W>;
      work->together = std::is_same_v<W, int8_t> ? 2 : work->of.blocks.count == 1 ? 6 : work->of.blocks.count <= FEW_BLOCKS ? 3 : 2;
      multiply_all(std::move(work));
      continue;
    }
#endif
    if constexpr (std::is_same_v<W, int8_t>) round_rows(work->of, work->scratch);
    int64_t blocks = (of.M + MOST_ROWS<W> - 1) / MOST_ROWS<W>;
    work->multiply = in_blocks_of<W>((of.M + blocks - 1) / blocks);
    work->together = STREAMS;
    multiply_all(std::move(work));
  }
}

// x (..., K) float32, panels (P, K / PER_LANE, LANES, PER_LANE) or (P, coded_size) bytes, scales and bias (N,) float32 -> (..., N) float32
static Tensor product(const Tensor& given, const Tensor& panels, std::optional<Tensor> scales, std::optional<Tensor> bias, int64_t width) {
  Tensor x = whole(given);
  int64_t K = x.dim() ? x.size(x.dim() - 1) : 0, M = K ? x.numel() / K : 0;
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "rows must be float32, of the weight's width");
  STD_TORCH_CHECK(panels.is_contiguous(), "panels must be packed for this processor");
  for (const auto& each : {scales, bias}) STD_TORCH_CHECK(!each || has_shape(*each, ScalarType::Float, {width}), "scales and bias must be (N,) float32");
  if (are_group_quantised(panels)) return group_quantised_product(x, panels, bias, width);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = width;
  Tensor y = made(shape, ScalarType::Float);
  int64_t size = panels.size(0) ? panels.numel() * panels.element_size() / panels.size(0) : 0;
  Product of{numbers<float>(x), nullptr, nullptr, numbers<char>(panels), size, numbers<float>(scales),
             numbers<float>(bias), numbers<float>(y), width, M, K, width, {}};
  std::vector<Tensor> kept{x, panels};
  for (const auto& each : {scales, bias}) if (each) kept.push_back(*each);
  switch (panels.scalar_type()) {
    case ScalarType::Float: product_of<float>(of, panels, kept); break;
    case ScalarType::BFloat16: product_of<BFloat16>(of, panels, kept); break;
    case ScalarType::Half: product_of<Half>(of, panels, kept); break;
    case ScalarType::Char: product_of<int8_t>(of, panels, kept); break;
    case ScalarType::Byte: product_of<Twelve>(of, panels, kept); break;
    default: STD_TORCH_CHECK(false, "panels must be float32, bfloat16, float16, int8, or bytes of twelve bits a weight");
  }
  return y;
}

// ---------------------------------------------------------------------------------------------- packing weights

// Whether float16 holds this float32 exactly: a normal number with 10 bits of fraction, or a multiple of 2^-24.
static inline bool is_half(uint32_t bits) {
  uint32_t size = bits & 0x7fffffff;
  int exponent = int(size >> 23) - 127;
  if (size == 0) return true;
  if (exponent > 15 || exponent < -24) return size == 0x7f800000;
  if (exponent >= -14) return !(bits & 0x1fff);
  return !((0x800000 | (bits & 0x7fffff)) & ((1u << (-1 - exponent)) - 1));
}

static inline void narrowed(float value, float* to) { *to = value; }
static inline void narrowed(float value, BFloat16* to) { to->bits = std::bit_cast<uint32_t>(value) >> 16; }
static inline void narrowed(float value, Half* to) {  // of what float16 holds
  uint32_t bits = std::bit_cast<uint32_t>(value), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  uint32_t half = size >= 0x7f800000 ? 0x7c00 | (size >> 13 & 0x3ff) : std::bit_cast<uint32_t>(std::bit_cast<float>(size) * 0x1p-112f) >> 13;
  to->bits = sign | half;
}

// 0, 1 or 2: the narrowest of bfloat16, float16 and float32 that holds every number of `weight` exactly.
template <typename Source>
static int64_t narrowest_of(const Source* from, int64_t count) {
  constexpr int64_t PART = 1 << 16;
  std::atomic<bool> fits_bfloat16 = true, fits_half = true;
  torch::stable::parallel_for(0, (count + PART - 1) / PART, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end && (fits_bfloat16 || fits_half); part++) {
      int64_t last = std::min(count, (part + 1) * PART);
      if (fits_bfloat16) {
        uint32_t low = 0;
        for (int64_t i = part * PART; i < last; i++) low |= std::bit_cast<uint32_t>(widened(from[i]));
        if (low & 0xffff) fits_bfloat16 = false;
      }
      if (fits_half) {
        bool fits = true;
        for (int64_t i = part * PART; i < last && fits; i++) fits = is_half(std::bit_cast<uint32_t>(widened(from[i])));
        if (!fits) fits_half = false;
      }
    }
  });
  return fits_bfloat16 ? 0 : fits_half ? 1 : 2;
}

static int64_t narrowest(const Tensor& weight) {
  STD_TORCH_CHECK(weight.is_contiguous(), "a weight must lie whole");
  switch (weight.scalar_type()) {
    case ScalarType::BFloat16: return 0;
    case ScalarType::Half: return narrowest_of(numbers<Half>(weight), weight.numel());
    case ScalarType::Float: return narrowest_of(numbers<float>(weight), weight.numel());
    default: STD_TORCH_CHECK(false, "a weight must be float32, bfloat16 or float16");
  }
}

// Some lanes of a panel from their rows, `PER` numbers of a lane at a time.
template <int PER, typename W>
static void interleave(const W* rows, int64_t lanes, int64_t K, W* panel) {
  int64_t k = 0;
  for (; k + PER <= K; k += PER, panel += LANES * PER)
    for (int64_t lane = 0; lane < lanes; lane++) std::memcpy(panel + lane * PER, rows + lane * K + k, PER * sizeof(W));
  for (int64_t lane = 0; lane < lanes && k < K; lane++)
    for (int i = 0; i < PER; i++) panel[lane * PER + i] = k + i < K ? rows[lane * K + k + i] : W{};
}

// Numbers as whole ones up to 127 times a scale, which this gives; above 0 where all are 0.
template <typename Source>
static float in_int8(const Source* from, int64_t K, std::vector<float>& wide, int8_t* to) {
  wide.assign((K + LANES - 1) / LANES * LANES, 0.f);
  for (int64_t k = 0; k < K; k++) wide[k] = widened(from[k]);
  Vec highest = {};
  for (size_t k = 0; k < wide.size(); k += LANES) {
    Vec value = load(wide.data() + k);
    highest = larger(value < 0.f ? -value : value, highest);
  }
  float most = std::numeric_limits<float>::min();
  for (int lane = 0; lane < LANES; lane++) most = std::max(most, highest[lane]);
  float scale = most / 127.f;
  for (size_t k = 0; k < wide.size(); k += LANES) {
    Int whole = (Int)(load(wide.data() + k) / scale + ROUNDER) - (Int)all(ROUNDER);
    store(wide.data() + k, (Vec)whole);
  }
  for (int64_t k = 0; k < K; k++) to[k] = static_cast<int8_t>(std::bit_cast<int32_t>(wide[k]));
  return scale;
}

// Rows of a weight (N, K) at the outputs from `row` on of panels (P, K / PER, LANES, PER); what is missing of a lane is 0.
template <typename Source, typename W, int PER>
static void packed(const Tensor& weight, const Tensor& panels, const std::optional<Tensor>& scales, int64_t row) {
  int64_t N = weight.size(0), K = weight.size(1), size = panels.size(1) * LANES * PER;
  const Source* from = numbers<Source>(weight);
  W* to = numbers<W>(panels);
  int64_t first_panel = row / LANES, num_panels = (row + N + LANES - 1) / LANES - first_panel;
  torch::stable::parallel_for(0, num_panels, 1, [&](int64_t begin, int64_t end) {
    std::vector<W> held;
    std::vector<float> wide;
    for (int64_t panel = first_panel + begin; panel < first_panel + end; panel++) {
      int64_t first = std::max(row, panel * LANES), last = std::min(row + N, (panel + 1) * LANES), lanes = last - first;
      const Source* rows = from + (first - row) * K;
      if constexpr (std::is_same_v<Source, W>) {
        interleave<PER>(rows, lanes, K, to + panel * size + (first - panel * LANES) * PER);
        continue;
      }
      held.resize(LANES * K);
      for (int64_t lane = 0; lane < lanes; lane++) {
        const Source* given = rows + lane * K;
        W* narrow = held.data() + lane * K;
        if constexpr (std::is_same_v<W, int8_t>) {
          numbers<float>(scales)[first + lane] = in_int8(given, K, wide, narrow);
        } else {
          for (int64_t k = 0; k < K; k++) narrowed(widened(given[k]), narrow + k);
        }
      }
      interleave<PER>(held.data(), lanes, K, to + panel * size + (first - panel * LANES) * PER);
    }
  });
}

// The least of seven upper bytes without their sign that follow each other and are had by most of these weights. Four counts,
// as a number that was just written is slow to read.
static int least_upper_byte(const std::vector<uint16_t>& weights) {
  int64_t counts[4][128] = {}, held = 0, most = 0;
  for (size_t i = 0; i < weights.size(); i += 4)
    for (int part = 0; part < 4; part++) counts[part][weights[i + part] >> 8 & 127]++;
  auto count = [&](int upper) { return counts[0][upper] + counts[1][upper] + counts[2][upper] + counts[3][upper]; };
  int least = 1;
  for (int highest = 1; highest < 128; highest++) {
    held += count(highest) - (highest > 7 ? count(highest - 7) : 0);
    if (held > most) most = held, least = std::max(highest - 6, 1);
  }
  return least;
}

// A panel in twelve bits of its weights in pairs of a lane. Gives how many lie apart, or would if there were room.
static int64_t encode(const std::vector<uint16_t>& weights, int64_t K, const Coded& panel) {
  int least = least_upper_byte(weights);
  int64_t num_apart = 0, room = room_apart(K);
  *panel.head = {};
  for (int code = 0; code < 7; code++) panel.head->upper[code] = std::min(least + code, 127), panel.head->upper[code + 8] = panel.head->upper[code] | 128;
  panel.head->upper[15] = 128;
  for (size_t first = 0; first < weights.size(); first += 4 * LANES) {
    const uint16_t* from = weights.data() + first;
    uint8_t bytes[4 * LANES], codes[4 * LANES], are_others = 0;
    for (int i = 0; i < 4 * LANES; i++) {
      uint8_t upper = from[i] >> 8, size = upper & 127, code = size - least;
      are_others |= (size > 0) & (code > 6);
      bytes[i] = from[i];
      codes[i] = (size ? code : 7) | (upper >> 4 & 8);
    }
    for (int i = 0; are_others && i < 4 * LANES; i++)
      if (uint8_t size = from[i] >> 8 & 127; size && uint8_t(size - least) > 6) {
        int64_t column = first / LANES + i / (2 * LANES) * 2 + i % 2;
        if (num_apart++ < room) panel.apart[num_apart - 1] = {uint32_t(column), uint16_t(i % (2 * LANES) / 2), from[i]};
        bytes[i] = 0, codes[i] = 7;
      }
    bool is_upper = first / (4 * LANES) % 2;
    for (int part = 0; part < 4 * LANES; part += 8) {
      int place = part % (2 * LANES) * 2 + part / (2 * LANES) * 8;  // as `zipped` reads them
      std::memcpy(panel.bytes + first + place, bytes + part, 8);
      uint8_t* to = panel.codes + first / (8 * LANES) * 4 * LANES + place;
      for (int i = 0; i < 8; i++) to[i] = is_upper ? to[i] | codes[part + i] << 4 : codes[part + i];
    }
  }
  panel.head->num_apart = std::min(num_apart, room);
  return num_apart;
}

template <typename Source>
static int64_t encoded_from(const Tensor& weight, const Tensor& panels, int64_t row) {
  int64_t N = weight.size(0), K = weight.size(1);
  std::atomic<int64_t> num_apart = 0;
  std::atomic<bool> fits = true;
  torch::stable::parallel_for(0, (N + LANES - 1) / LANES, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint16_t> wide(coded_columns(K) * LANES), narrow;
    for (int64_t panel = begin; panel < end && fits; panel++) {
      const Source* rows = numbers<Source>(weight) + panel * LANES * K;
      int64_t lanes = std::min<int64_t>(LANES, N - panel * LANES);
      if (lanes < LANES) std::fill(wide.begin(), wide.end(), 0);
      if constexpr (std::is_same_v<Source, BFloat16>) {
        interleave<2>(reinterpret_cast<const uint16_t*>(rows), lanes, K, wide.data());
      } else {
        narrow.resize(lanes * K);
        for (int64_t i = 0; i < lanes * K; i++) narrow[i] = std::bit_cast<uint32_t>(rows[i]) >> 16;
        interleave<2>(narrow.data(), lanes, K, wide.data());
      }
      int64_t found = encode(wide, K, Coded(numbers<char>(panels) + (row / LANES + panel) * panels.size(1), K));
      num_apart += found;
      if (found > room_apart(K)) fits = false;
    }
  });
  return fits ? num_apart.load() : -1;
}

// Packs a weight (N, K) of numbers that bfloat16 holds at the outputs from `row` on, a multiple of LANES, of panels in twelve
// bits. Gives how many weights lie apart; -1 where a panel has no room for its own.
static int64_t encode_twelve(const Tensor& weight, const Tensor& panels, int64_t row) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && row >= 0 && row % LANES == 0, "a weight must lie whole, and begin with a panel");
  STD_TORCH_CHECK(has_shape(panels, ScalarType::Byte, {-1, coded_size(weight.size(1))}) && row + weight.size(0) <= panels.size(0) * LANES, "panels must be those of such a weight");
  switch (weight.scalar_type()) {
    case ScalarType::BFloat16: return encoded_from<BFloat16>(weight, panels, row);
    case ScalarType::Float: return encoded_from<float>(weight, panels, row);
    default: STD_TORCH_CHECK(false, "a weight must be bfloat16, or float32 that bfloat16 holds");
  }
}

// The weight (N, K) bfloat16 of panels in twelve bits
static Tensor decode_twelve(const Tensor& panels, int64_t N, int64_t K) {
  STD_TORCH_CHECK(has_shape(panels, ScalarType::Byte, {(N + LANES - 1) / LANES, coded_size(K)}), "panels must be those of such a weight");
  Tensor weight = made({N, K}, ScalarType::BFloat16);
  torch::stable::parallel_for(0, panels.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * LANES; first < end * LANES; first += LANES) {
      const Coded panel(numbers<char>(panels) + first / LANES * panels.size(1), K);
      BFloat16* to = numbers<BFloat16>(weight) + first * K;
      for (int64_t lane = 0; lane < std::min<int64_t>(LANES, N - first); lane++)
        for (int64_t k = 0; k < K; k++) {
          int64_t place = lane / 4 * 16 + k % 4 / 2 * 8 + lane % 4 * 2 + k % 2;  // as `zipped` reads them
          uint8_t lower = panel.bytes[k / 4 * 4 * LANES + place], codes = panel.codes[k / 8 * 4 * LANES + place];
          to[lane * K + k].bits = panel.head->upper[k % 8 < 4 ? codes & 15 : codes >> 4] << 8 | lower;
        }
      for (const Apart* each = panel.apart; each < panel.apart + panel.head->num_apart; each++) to[each->lane * K + each->column].bits = each->bits;
    }
  });
  return weight;
}

template <typename Source>
static void packed_from(const Tensor& weight, const Tensor& panels, const std::optional<Tensor>& scales, int64_t row) {
  switch (panels.scalar_type()) {
    case ScalarType::Float: return packed<Source, float, 1>(weight, panels, scales, row);
    case ScalarType::BFloat16: return packed<Source, BFloat16, 2>(weight, panels, scales, row);
    case ScalarType::Half: return packed<Source, Half, 1>(weight, panels, scales, row);
    case ScalarType::Char: return panels.size(3) == 4 ? packed<Source, int8_t, 4>(weight, panels, scales, row) : packed<Source, int8_t, 2>(weight, panels, scales, row);
    default: STD_TORCH_CHECK(false, "panels must be float32, bfloat16, float16 or int8");
  }
}

// Packs a weight into its place in panels, exactly, or in int8 with the scales (outputs,) of its rows.
static void pack(const Tensor& weight, const Tensor& panels, const std::optional<Tensor>& scales, int64_t row) {
  int64_t per_lane = panels.size(3);
  STD_TORCH_CHECK(weight.is_contiguous() && panels.is_contiguous() && weight.dim() == 2 && panels.dim() == 4, "weights must lie whole");
  STD_TORCH_CHECK(panels.size(2) == LANES && panels.size(1) == (weight.size(1) + per_lane - 1) / per_lane, "panels must be those of such a weight");
  STD_TORCH_CHECK(row >= 0 && row + weight.size(0) <= panels.size(0) * LANES, "the rows must have a place in the panels");
  STD_TORCH_CHECK((panels.scalar_type() == ScalarType::Char) == scales.has_value() && (!scales || scales->numel() >= row + weight.size(0)), "int8 has a scale for each row");
  switch (weight.scalar_type()) {
    case ScalarType::Float: return packed_from<float>(weight, panels, scales, row);
    case ScalarType::BFloat16: return packed_from<BFloat16>(weight, panels, scales, row);
    case ScalarType::Half: return packed_from<Half>(weight, panels, scales, row);
    default: STD_TORCH_CHECK(false, "a weight must be float32, bfloat16 or float16");
  }
}

// ---------------------------------------------------------------------------------------------- tree attention

// e^x for x <= 0 to 2 units in the last place, 0 below -87, and NaN for NaN (Cephes' expf: Cody-Waite reduction, a polynomial).
static inline Vec exponential(Vec x) {
  Vec rounder = all(12582912.f), n = (x * 1.44269504f + rounder) - rounder;
  Vec r = multiply_add(n, all(2.12194440e-4f), multiply_add(n, all(-0.693359375f), x));
  Vec p = all(1.9875691500e-4f);
  for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = multiply_add(p, r, all(factor));
  p = multiply_add(p, r * r, r + 1.f);
  Int power = (__builtin_convertvector(larger(n, all(-127.f)), Int) + 127) << 23;
  return x < -87.f ? all(0.f) : p * (Vec)power;
}

template <bool HIGH, int... LANE>
static inline Vec zipped(Vec a, Vec b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (LANE / 2 + (HIGH ? LANES / 2 : 0) + (LANE % 2 ? LANES : 0))...);
#else
  return __builtin_shuffle(a, b, Int{(LANE / 2 + (HIGH ? LANES / 2 : 0) + (LANE % 2 ? LANES : 0))...});
#endif
}

// Adds each half of a vector to the other, of two vectors at a time.
static inline Vec halves_added(Vec a, Vec b) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
  return zipped<false>(a, b, lanes) + zipped<true>(a, b, lanes);
}

// Scores of M queries with LANES slots, four slots at a time: the sums over their lanes come out in the order of the
// slots, when those four lie LANES / 4 apart.
template <int M>
static inline void score_block(const float* queries, const float* const (&keys)[LANES], int64_t width, float* scores, int64_t apart) {
  constexpr int GROUPS = LANES / 4;
  int64_t whole = width / LANES * LANES;
  Vec of_group[M][GROUPS];
#pragma GCC unroll 4
  for (int group = 0; group < GROUPS; group++) {
    Vec parts[M][4] = {};
    for (int64_t d = 0; d < whole; d += LANES) {
      Vec key[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) key[i] = load(keys[group + i * GROUPS] + d);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        Vec query = load(queries + m * width + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) parts[m][i] = multiply_add(query, key[i], parts[m][i]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) of_group[m][group] = halves_added(halves_added(parts[m][0], parts[m][2]), halves_added(parts[m][1], parts[m][3]));
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++) {
    Vec* sums = of_group[m];
    if constexpr (GROUPS == 4) store(scores + m * apart, halves_added(halves_added(sums[0], sums[2]), halves_added(sums[1], sums[3])));
    else if constexpr (GROUPS == 2) store(scores + m * apart, halves_added(sums[0], sums[1]));
    else store(scores + m * apart, sums[0]);
    for (int lane = 0; whole < width && lane < LANES; lane++)
      for (int64_t d = whole; d < width; d++) scores[m * apart + lane] = multiply_add(queries[m * width + d], keys[lane][d], scores[m * apart + lane]);
  }
}

template <int M>
static inline void score_queries(int64_t count, const float* queries, const float* const (&keys)[LANES], int64_t width, float* scores, int64_t apart) {
  for (; count >= M; count -= M, queries += M * width, scores += M * apart) score_block<M>(queries, keys, width, scores, apart);
  if constexpr (M > 1) if (count) score_queries<M - 1>(count, queries, keys, width, scores, apart);
}

// Queries (count, width) times the keys of `slots` slots -> scores (count, slots rounded up to LANES), rows `apart`. Between
// queries the next keys are fetched, and the values of these slots (slots, value_width), which are read next.
static void score(int64_t count, const float* queries, const float* keys, int64_t stride, int64_t slots, int64_t width, float* scores, int64_t apart, const float* values, int64_t value_stride, int64_t value_width) {
  constexpr int64_t M = REGISTERS == 32 ? 4 : 2;
  int64_t groups = (count + M - 1) / M;
  for (int64_t slot = 0; slot < slots; slot += LANES) {
    const float* block[LANES];
    for (int lane = 0; lane < LANES; lane++) block[lane] = keys + std::min(slot + lane, slots - 1) * stride;
    for (int64_t group = 0; group < groups; group++) {
      for (int64_t lane = LANES * group / groups; lane < LANES * (group + 1) / groups; lane++) {
        for (int64_t d = 0; d < width; d += 16) __builtin_prefetch(keys + (slot + LANES + lane) * stride + d);
        for (int64_t d = 0; d < value_width; d += 16) __builtin_prefetch(values + (slot + lane) * value_stride + d, 0, 2);
      }
      score_queries<M>(std::min(M, count - group * M), queries + group * M * width, block, width, scores + group * M * apart + slot, apart);
    }
  }
}

template <int M, int J>
static void summed(const float* weights, int64_t stride, const float* values, int64_t apart, int64_t count, float* sums, int64_t width) {
  Vec parts[M][J] = {};
  for (int64_t s = 0; s < count; s++) {
    Vec value[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) value[j] = load(values + s * apart + j * LANES);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      Vec weight = all(weights[m * stride + s]);
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) parts[m][j] = multiply_add(weight, value[j], parts[m][j]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) store(sums + m * width + j * LANES, parts[m][j]);
}

template <int M>
static void sum_rows(const float* weights, int64_t stride, const float* values, int64_t apart, int64_t count, float* sums, int64_t width) {
  constexpr int J = REGISTERS == 32 ? 4 : 2;
  int64_t d = 0;
  for (; d + J * LANES <= width; d += J * LANES) summed<M, J>(weights, stride, values + d, apart, count, sums + d, width);
  for (; d + LANES <= width; d += LANES) summed<M, 1>(weights, stride, values + d, apart, count, sums + d, width);
  for (; d < width; d++)
    for (int m = 0; m < M; m++) {
      float sum = 0;
      for (int64_t s = 0; s < count; s++) sum = multiply_add(weights[m * stride + s], values[s * apart + d], sum);
      sums[m * width + d] = sum;
    }
}

// weights (rows, count) times values (count, width), slot after slot -> sums (rows, width).
template <int M = 6>
static void sum_values(int64_t rows, const float* weights, int64_t stride, const float* values, int64_t apart, int64_t count, float* sums, int64_t width) {
  for (; rows >= M; rows -= M, weights += M * stride, sums += M * width) sum_rows<M>(weights, stride, values, apart, count, sums, width);
  if constexpr (M > 1) if (rows) sum_values<M - 1>(rows, weights, stride, values, apart, count, sums, width);
}

constexpr int64_t CHUNK = 128;        // positions that are summed apart from others, and then added in order
constexpr int64_t MOST_QUERIES = 48;  // of one key head that are taken together
constexpr int64_t JOINED = 1 << 16;   // numbers of chunks that one thread adds in the time it takes to wake another
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Attention {
  const float *query, *key, *value;  // (B, H, N, D), (B, H', S, D), (B, H', S, E), strides below
  int64_t query_strides[3], key_strides[3], value_strides[3];
  const int32_t* seen;   // (B, N, 2 + T): first and end of the slots that a node sees; then for each node of the tree,
                         // which lie in the slots from the end on, 1 + its depth where it is seen, else 0
  const float* sinks;    // (H,), or null
  float* output;         // (B, N, H, E)
  int64_t B, heads, groups, N, D, E, T;
  float scale, cap;      // cap 0: none
};

// What the queries of some nodes of one row and key head make of it, chunk by chunk.
struct Partial {
  float *highest, *total, *sums;  // (chunks, Q), (chunks, Q), (chunks, Q, E)
};

static inline float sum_of(Vec lanes) {
  float halves[LANES];
  store(halves, lanes);
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) halves[lane] += halves[lane + half];
  return halves[0];
}

// One chunk of positions. A position before `end` lies in the slot of its number. A node of the tree stands at `end`
// and its depth, whatever its slot is: where it will lie once it is committed.
static void attend_chunk(const Attention& of, int64_t row, int64_t group, int64_t first, int64_t nodes, int64_t chunk, const Partial& partial) {
  thread_local Scratch scratch;
  int64_t shared = of.heads / of.groups, Q = shared * nodes, from = chunk * CHUNK, D = of.D, E = of.E, T = of.T;
  int64_t tree_slots = (T + LANES - 1) / LANES * LANES;
  float* queries = scratch.of(Q * (D + CHUNK + tree_slots));
  float *scores = queries + Q * D, *tree_scores = scores + Q * CHUNK;
  const int32_t* seen = of.seen + (row * of.N + first) * (2 + T);
  const float* keys = of.key + row * of.key_strides[0] + group * of.key_strides[1];
  const float* values = of.value + row * of.value_strides[0] + group * of.value_strides[1];
  int64_t key_stride = of.key_strides[2], value_stride = of.value_strides[2];
  for (int64_t q = 0; q < Q; q++)
    std::memcpy(queries + q * D, of.query + row * of.query_strides[0] + (group * shared + q / nodes) * of.query_strides[1] + (first + q % nodes) * of.query_strides[2], D * sizeof(float));
  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
  for (int64_t node = 0; node < nodes; node++) {
    begin = std::min<int64_t>(begin, seen[node * (2 + T)]);
    end = std::max<int64_t>(end, seen[node * (2 + T) + 1]);
  }
  int64_t low = std::max(from, begin / LANES * LANES), high = std::min(from + CHUNK, end);  // slots that some node sees
  if (low < high) score(Q, queries, keys + low * key_stride, key_stride, high - low, D, scores + low - from, CHUNK, values + low * value_stride, value_stride, E);
  bool has_tree = T && end + T > from && end < from + CHUNK;
  if (has_tree) score(Q, queries, keys + end * key_stride, key_stride, T, D, tree_scores, tree_slots, values + end * value_stride, value_stride, E);
  for (int64_t q = 0; q < Q; q++) {
    const int32_t* sees = seen + q % nodes * (2 + T);
    float* mine = scores + q * CHUNK;
    int64_t visible = std::clamp<int64_t>(sees[0] - from, 0, CHUNK), next = std::clamp<int64_t>(sees[1] - from, 0, CHUNK);
    std::fill(mine, mine + std::min(visible, next), NOTHING);
    std::fill(mine + next, mine + CHUNK, NOTHING);
    if (has_tree)
      for (int64_t node = 0; node < T; node++) {
        int64_t position = sees[1] + sees[2 + node] - 1 - from;
        if (sees[2 + node] && position >= 0 && position < CHUNK) mine[position] = tree_scores[q * tree_slots + node], next = std::max(next, position + 1);
      }
    int64_t whole = (next + LANES - 1) / LANES * LANES;
    Vec highest = all(NOTHING), total = all(0.f);
    for (int64_t s = 0; s < whole; s += LANES) {
      Vec score = load(mine + s) * of.scale;
      if (of.cap > 0) {
        Vec size = score < 0.f ? -score : score, small = exponential(size * (-2.f / of.cap));  // tanh, of any sign
        Vec bent = (1.f - small) / (1.f + small) * of.cap;
        score = size == -NOTHING ? score : score < 0.f ? -bent : bent;
      }
      store(mine + s, score);
      highest = larger(score, highest);
    }
    float top = NOTHING;
    for (int lane = 0; lane < LANES; lane++) top = highest[lane] > top || std::isnan(highest[lane]) ? highest[lane] : top;
    for (int64_t s = 0; s < whole; s += LANES) {
      Vec score = load(mine + s), weight = score == NOTHING ? all(0.f) : exponential(score - top);  // NaN stays NaN
      total += weight;
      store(mine + s, weight);
    }
    std::fill(mine + whole, mine + std::max(whole, high - from), 0.f);
    partial.highest[q] = top;
    partial.total[q] = sum_of(total);
  }
  sum_values(Q, scores + std::max<int64_t>(low - from, 0), CHUNK, values + low * value_stride, value_stride, std::max<int64_t>(high - low, 0), partial.sums, E);
  if (has_tree)
    for (int64_t q = 0; q < Q; q++) {
      const int32_t* sees = seen + q % nodes * (2 + T);
      float* sums = partial.sums + q * E;
      for (int64_t node = 0; node < T; node++) {
        int64_t position = sees[1] + sees[2 + node] - 1 - from;
        if (!sees[2 + node] || position < 0 || position >= CHUNK) continue;
        float weight = scores[q * CHUNK + position];
        const float* value = values + (end + node) * value_stride;
        for (int64_t d = 0; d < E; d++) sums[d] = multiply_add(weight, value[d], sums[d]);
      }
    }
}

// Attention of some nodes, a chunk of a row's key head in each piece; the last chunks, which are not whole, come last.
struct SharedAttention : Work {
  std::vector<Tensor> kept;
  Attention of;
  int64_t first, nodes, first_chunk, pairs, chunks, Q;
  float* partials;  // (pairs, chunks, Q * (2 + E))
  mutable std::atomic<int64_t> next = 0;  // `run` gives pieces to whoever is free

  int64_t result_size(int64_t = 0) const override { return Q * (2 + of.E); }
  void compute(int64_t piece, int64_t, float* result) const override {
    int64_t pair = piece % pairs, chunk = piece / pairs;
    attend_chunk(of, pair / of.groups, pair % of.groups, first, nodes, first_chunk + chunk, {result, result + Q, result + 2 * Q});
  }
  void publish(int64_t piece, const float* result) const override { std::memcpy(partials_of(piece), result, result_size() * sizeof(float)); }
  void run(int64_t, int64_t) const override {
    for (int64_t piece = next++; piece < num_pieces; piece = next++) compute(piece, 0, partials_of(piece));
  }
  float* partials_of(int64_t piece) const { return partials + (piece % pairs * chunks + piece / pairs) * result_size(); }
};

static void attend_nodes(const Attention& of, int64_t first, int64_t nodes, const std::vector<Tensor>& kept) {
  thread_local Scratch scratch;
  int64_t shared = of.heads / of.groups, Q = shared * nodes, first_chunk = std::numeric_limits<int64_t>::max(), end_chunk = 0;
  for (int64_t row = 0; row < of.B; row++)
    for (int64_t node = first; node < first + nodes; node++) {
      const int32_t* sees = of.seen + (row * of.N + node) * (2 + of.T);
      int64_t end = sees[1];
      for (int64_t other = 0; other < of.T; other++) end = std::max<int64_t>(end, sees[1] + sees[2 + other]);
      first_chunk = std::min<int64_t>(first_chunk, sees[0] / CHUNK);
      end_chunk = std::max(end_chunk, (end + CHUNK - 1) / CHUNK);
    }
  int64_t chunks = std::max<int64_t>(end_chunk - first_chunk, 0), per_chunk = Q * (2 + of.E), pairs = of.B * of.groups;
  float* memory = scratch.of(pairs * chunks * per_chunk);
  auto partial = [&](int64_t pair, int64_t chunk) {
    float* of_chunk = memory + (pair * chunks + chunk) * per_chunk;
    return Partial{of_chunk, of_chunk + Q, of_chunk + 2 * Q};
  };
  auto work = std::make_shared<SharedAttention>();
  work->num_pieces = pairs * chunks, work->kept = kept, work->of = of, work->first = first, work->nodes = nodes;
  work->first_chunk = first_chunk, work->pairs = pairs, work->chunks = chunks, work->Q = Q, work->partials = memory;
  share(std::move(work));
  parallel_for(pairs * Q, std::max<int64_t>(1, JOINED / (chunks * of.E + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t each = begin; each < end; each++) {
      int64_t pair = each / Q, q = each % Q, head = pair % of.groups * shared + q / nodes;
      float *output = of.output + ((pair / of.groups * of.N + first + q % nodes) * of.heads + head) * of.E, top = of.sinks ? of.sinks[head] : NOTHING;
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        float highest = partial(pair, chunk).highest[q];
        top = highest > top || std::isnan(highest) ? highest : top;
      }
      float total = of.sinks ? std::exp(of.sinks[head] - top) : 0.f;
      std::fill(output, output + of.E, 0.f);
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        Partial part = partial(pair, chunk);
        if (part.total[q] == 0) continue;
        float weight = std::exp(part.highest[q] - top);
        const float* sums = part.sums + q * of.E;
        total = multiply_add(weight, part.total[q], total);
        for (int64_t d = 0; d < of.E; d++) output[d] = multiply_add(weight, sums[d], output[d]);
      }
      for (int64_t d = 0; d < of.E; d++) output[d] /= total;
    }
  });
}

// What nodes `first` to `end` of trees see, as medusa.base.attention.seen_slots says: lengths (B,), depths (R, N) and ancestors (R, N, N) with R 1 or B
// -> (B, 1, M, 2 + T) int32. A chain `by_range` has T = 0.
static Tensor seen_slots(const Tensor& lengths, Tensor depths, Tensor ancestors, int64_t first, int64_t end, bool by_range, std::optional<int64_t> window) {
  depths = whole(depths);
  if (!by_range) ancestors = whole(ancestors);
  int64_t B = lengths.numel(), N = depths.size(1), T = by_range ? 0 : end, M = end - first;
  bool is_tree = (depths.size(0) == 1 || depths.size(0) == B) && (by_range || has_shape(ancestors, ScalarType::Bool, {depths.size(0), N, N}));
  STD_TORCH_CHECK(lengths.scalar_type() == ScalarType::Long && lengths.dim() == 1 && has_shape(depths, ScalarType::Long, {-1, N}) && is_tree && 0 <= first && first <= end && end <= N,
                  "lengths must be (B,) long, depths (R, N) long, ancestors (R, N, N) bool, and the nodes among these");
  Tensor seen = made({B, 1, M, 2 + T}, ScalarType::Int);
  for (int64_t row = 0; row < B; row++) {
    int64_t tree = depths.size(0) > 1 ? row : 0, length = numbers<int64_t>(lengths)[row * lengths.stride(0)];
    const int64_t* depth_of = numbers<int64_t>(depths) + tree * N;
    for (int64_t node = first; node < end; node++) {
      int32_t* sees = numbers<int32_t>(seen) + (row * M + node - first) * (2 + T);
      int64_t position = length + depth_of[node], past = by_range ? position + 1 : length;
      sees[0] = window ? std::min(std::max<int64_t>(position - *window + 1, 0), past) : 0;
      sees[1] = past;
      const bool* is_ancestor = numbers<bool>(ancestors) + (tree * N + node) * N;
      for (int64_t other = 0; other < T; other++) sees[2 + other] = is_ancestor[other] && (!window || depth_of[node] - depth_of[other] < *window) ? depth_of[other] + 1 : 0;
    }
  }
  return seen;
}

// query (B, H, N, D), key (B, H', S, D), value (B, H', S, E), seen (B, 1, N, 2 + T) int32 -> (B, N, H, E)
static Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& seen, double scale, double cap, std::optional<Tensor> sinks) {
  for (const Tensor* each : {&query, &key, &value})
    STD_TORCH_CHECK(each->scalar_type() == ScalarType::Float && each->dim() == 4 && each->stride(3) == 1, "queries, keys and values must be float32 with whole rows");
  int64_t B = query.size(0), heads = query.size(1), N = query.size(2), S = key.size(2), E = value.size(3), groups = std::max<int64_t>(key.size(1), 1), shared = heads / groups;
  bool fits = key.size(0) == B && key.size(1) == groups && key.size(3) == query.size(3) && heads % groups == 0;
  STD_TORCH_CHECK(fits && value.size(0) == B && value.size(1) == groups && value.size(2) == S, "queries must be (B, H, N, D), keys (B, H', S, D) and values (B, H', S, E), with H' a divisor of H");
  STD_TORCH_CHECK(!sinks || has_shape(*sinks, ScalarType::Float, {heads}), "sinks must be (H,) float32");
  STD_TORCH_CHECK(has_shape(seen, ScalarType::Int, {B, 1, N, -1}) && seen.size(3) >= 2, "seen must be (B, 1, N, 2 + T) int32");
  for (const int32_t *node = numbers<int32_t>(seen), T = seen.size(3) - 2, *last = node + seen.numel(); node < last; node += 2 + T)
    STD_TORCH_CHECK(node[0] >= 0 && node[1] >= 0 && node[1] + T <= S && lies_within(node + 2, T, 0, T + 1), "what a node sees must lie in the slots of keys and values");
  Tensor output = made({B, N, heads, E}, ScalarType::Float);
  Attention of{numbers<float>(query), numbers<float>(key), numbers<float>(value),
               {query.stride(0), query.stride(1), query.stride(2)}, {key.stride(0), key.stride(1), key.stride(2)}, {value.stride(0), value.stride(1), value.stride(2)},
               numbers<int32_t>(seen), numbers<float>(sinks), numbers<float>(output),
               B, heads, key.size(1), N, query.size(3), E, seen.size(3) - 2, static_cast<float>(scale), static_cast<float>(cap)};
  std::vector<Tensor> kept{query, key, value, seen};
  if (sinks) kept.push_back(*sinks);
  int64_t together = std::max<int64_t>(1, MOST_QUERIES / shared);
  for (int64_t first = 0; first < N; first += together) attend_nodes(of, first, std::min(together, N - first), kept);
  return output;
}

// ------------------------------------------------------------------------------------------------------- drafts

constexpr float WORST = -1e30f;  // as medusa.drafters.dynamic.WORST

// The `count` largest of what is offered, largest first; of equals those that were offered first.
struct Largest {
  size_t count;
  std::vector<std::pair<float, int64_t>> kept = {};

  void offer(float value, int64_t at) {
    if (kept.size() == count && !(value > kept.back().first)) return;
    if (kept.size() == count) kept.pop_back();
    kept.insert(std::upper_bound(kept.begin(), kept.end(), value, [](float offered, const auto& each) { return offered > each.first; }), {value, at});
  }
};

// log(sum(e^x)) of `size` numbers, which are followed by room for a vector.
static float log_sum_exp(float* x, int64_t size) {
  for (int64_t i = size; i % LANES; i++) x[i] = NOTHING;
  Vec highest = all(NOTHING), total = {};
  for (int64_t i = 0; i < size; i += LANES) highest = larger(load(x + i), highest);
  float top = NOTHING;
  for (int lane = 0; lane < LANES; lane++) top = std::max(top, highest[lane]);
  for (int64_t i = 0; i < size; i += LANES) total += exponential(load(x + i) - top);
  return top + std::log(sum_of(total));
}

static float log_add_exp(float a, float b) { return a == b ? a + std::log(2.f) : std::max(a, b) + std::log1p(std::exp(-std::abs(a - b))); }

// Whether `a` counts as larger than `b`, as in torch: what is no number is the largest.
static inline bool is_larger(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The first of the largest of `count` scores.
static int64_t first_largest(const float* scores, int64_t count) {
  constexpr int64_t CHUNK = 64 * LANES;  // whose largest is found in whole vectors
  int64_t best = 0;
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    int64_t end = std::min(begin + CHUNK, count), i = begin;
    Vec highest = all(scores[best]), spoilt = {};
    for (; i + LANES <= end; i += LANES) {
      Vec score = load(scores + i);
      highest = larger(score, highest);
      spoilt += score != score ? all(1.f) : Vec{};
    }
    bool is_better = false;
    for (int lane = 0; lane < LANES; lane++) is_better |= highest[lane] > scores[best] || spoilt[lane] > 0;
    for (int64_t each = is_better ? begin : i; each < end; each++)
      if (is_larger(scores[each], scores[best])) best = each;
  }
  return best;
}

// torch's argmax over the last dimension, scores (..., V) float32 -> (...): torch itself reads one by one.
static Tensor argmax(const Tensor& given) {
  STD_TORCH_CHECK(given.dim() && given.scalar_type() == ScalarType::Float && given.size(given.dim() - 1) > 0, "scores must be (..., V) float32");
  Tensor scores = whole(given);
  std::vector<int64_t> shape(scores.sizes().begin(), scores.sizes().end());
  int64_t V = shape.back();
  shape.pop_back();
  Tensor found = made(shape, ScalarType::Long);
  for (int64_t row = 0; row < scores.numel() / V; row++) numbers<int64_t>(found)[row] = first_largest(numbers<float>(scores) + row * V, V);
  return found;
}

// What all nodes of a level are grown by.
struct Level {
  int64_t columns, fanout;
  const int64_t *token_map, *column_of;  // or null

  int64_t token(int64_t column) const { return token_map ? token_map[column] : column; }

  // The `fanout` best tokens after a node, then the `width` tokens expected there (`nodes` of them, 0 for none), and the logarithms of their shares.
  void follow(const float* logits, float sharpness, const float* noise, int64_t width, const int64_t* nodes, const int64_t* expected, const float* chance, int64_t* tokens, float* shares) const {
    thread_local Scratch scratch;
    float *scores = scratch.of(columns + LANES), left = 1;
    for (int64_t i = 0; i < columns; i++) scores[i] = logits[i] * sharpness;
    float sum = log_sum_exp(scores, columns);
    for (int64_t i = 0; i < columns; i++) scores[i] -= sum;
    for (int64_t w = 0; w < width; w++) left -= nodes[w] ? chance[nodes[w]] : 0.f;
    float others = std::log(left), *own = shares + fanout, total = NOTHING;
    for (int64_t w = 0; w < width; w++) {
      int64_t token = tokens[fanout + w] = expected[nodes[w]], column = column_of ? column_of[token] : token;  // a token of which heads and base have no output is not expected
      own[w] = NOTHING;
      if (!nodes[w]) continue;
      if (column >= 0 && column < columns) own[w] = std::isnan(scores[column]) ? WORST : scores[column] + others, scores[column] = NOTHING;
      own[w] = log_add_exp(own[w], std::log(chance[nodes[w]])) + (noise ? noise[token] : 0.f);
      total = log_add_exp(total, own[w]);
    }
    if (noise) {
      for (int64_t i = 0; i < columns; i++) scores[i] += noise[token(i)];
      total = log_add_exp(log_sum_exp(scores, columns) + others, total);
      others -= total;
      for (int64_t w = 0; w < width; w++) own[w] -= total;
    }
    Largest best{static_cast<size_t>(fanout)};
    for (int64_t i = 0; i < columns; i++) best.offer(std::isnan(scores[i]) ? WORST : scores[i], i);
    for (int64_t i = 0; i < fanout; i++) tokens[i] = token(best.kept[i].second), shares[i] = best.kept[i].first + others;
    for (int64_t i = 0; i < fanout + width; i++) shares[i] = shares[i] >= WORST ? std::min(shares[i], 0.f) : WORST;
  }
};

// A text to look for the last tokens in: one in memory, or the newest `capacity` tokens of a corpus. Positions count from its beginning.
struct Text {
  const int64_t* tokens;
  const int32_t* ring;
  int64_t first, end, capacity;

  int64_t at(int64_t position) const { return tokens ? tokens[position] : ring[position % capacity]; }
};

constexpr int64_t MAX_MATCH = 16, MAX_PLACES = 16, MAX_WALK = 64, MAX_CHILDREN = 3, SPARE_NODES = 32;
constexpr int64_t NUM_SOURCES = 3, CORPUS = 2;  // the text itself, its prediction, its corpus
constexpr float LEARNING_RATE = 0.05f, MOST_TRUST = 1.5f;
constexpr int64_t LEAST_OF_SEVERAL = 4;  // tokens that agree at places of a corpus, and beside the best of the others: shorter ones say less than the heads
constexpr int64_t ORDERS[] = {8, LEAST_OF_SEVERAL};  // by so many tokens places of a corpus are found, by more at first

// Where the last tokens stood before.
struct Place {
  const Text* text;
  int64_t position, source;
  uint64_t agrees;  // which tokens, the last one's bit first: of equally long matches the one that agrees further back too

  int64_t length() const { return std::countl_one(agrees << (64 - MAX_MATCH)); }
};

// The places that agree furthest with the end of a text, whose last token is at `last`; of equals those that were offered first.
struct Places {
  const int64_t *text, last;
  std::vector<Place> kept = {};

  bool agrees(const Text& in, int64_t position, int64_t back) const { return back <= last && position - back >= in.first && in.at(position - back) == text[last - back]; }

  void offer(const Text& in, int64_t position, int64_t source) {
    Place place{&in, position, source, 0};
    bool is_inside = true;  // what stands before the beginning of a text is another one
    for (int64_t i = 0; i < MAX_MATCH; i++) {
      is_inside = is_inside && position - i >= in.first && in.at(position - i) >= 0;
      place.agrees = place.agrees << 1 | (is_inside && agrees(in, position, i));
    }
    if (kept.size() == MAX_PLACES && kept.back().agrees >= place.agrees) return;
    if (kept.size() == MAX_PLACES) kept.pop_back();
    kept.insert(std::upper_bound(kept.begin(), kept.end(), place, [](const Place& a, const Place& b) { return a.agrees > b.agrees; }), place);
  }

  void look_in(const Text& in, int64_t source) {
    for (int64_t position = in.end - 2; position >= in.first; position--)
      if (in.at(position) == text[last]) offer(in, position, source);
  }
};

// A corpus: its newest `capacity` tokens, and for each order which place had the same tokens before (`links`, positions + 1) and which has them now (`latest`, by
// their hash). Hash chains, as zlib finds matches (RFC 1951, section 4).
struct Corpus {
  int32_t *ring, *latest;
  int64_t capacity, size;

  Corpus(const Tensor& all, const Tensor& newest) : ring(numbers<int32_t>(all)), latest(numbers<int32_t>(newest)), capacity(all.size(1)), size(newest.size(1)) {}

  int32_t& link(int64_t order, int64_t position) const { return ring[(order + 1) * capacity + position % capacity]; }

  // The entry for the last tokens of a text, of an order.
  template <typename Token> int32_t& entry(int64_t order, const Token* last) const {
    uint64_t hash = 0;
    for (int64_t i = 0; i < ORDERS[order]; i++) hash = (hash ^ static_cast<uint64_t>(last[-i])) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    return latest[order * size + hash % size];
  }

  // Offers places of the text that ends at `last`: of each order the newest, while those of the orders before have left room.
  void look(Places& places, const Text& all) const {
    for (int64_t order = 0; order < 2; order++) {
      if (places.last + 1 < ORDERS[order]) continue;
      int64_t next = entry(order, places.text + places.last);
      for (int64_t step = 0, found = 0; step < MAX_WALK && next > all.first && found < MAX_PLACES; step++, next = link(order, next - 1)) {
        bool is_match = true, is_known = order > 0;
        for (int64_t i = 0; i < ORDERS[order]; i++) is_match &= places.agrees(all, next - 1, i);
        for (int64_t i = 0; i < ORDERS[0]; i++) is_known &= places.agrees(all, next - 1, i);
        bool goes_on = next < all.end && all.at(next) >= 0;
        if (is_match && !is_known && goes_on) places.offer(all, next - 1, CORPUS), found++;
      }
    }
  }
};

static void check_corpus(const Tensor& ring, const Tensor& latest, int64_t total) {
  bool is_one = has_shape(ring, ScalarType::Int, {3, -1}) && has_shape(latest, ScalarType::Int, {2, -1}) && ring.size(1) && latest.size(1);
  STD_TORCH_CHECK(is_one && total >= 0, "a corpus must be (3, C) and (2, C') int32");
}

// Adds `text` behind the `total` tokens that a corpus was given so far, and gives their new number.
static int64_t remember(Tensor ring, Tensor latest, int64_t total, Tensor text) {
  text = whole(text);
  check_corpus(ring, latest, total);
  STD_TORCH_CHECK(are_indices(text, {-1}, 0, std::numeric_limits<int32_t>::max()), "a text must be (T,) long token ids, of 31 bits");
  Corpus corpus(ring, latest);
  const int64_t* tokens = numbers<int64_t>(text);
  for (int64_t i = -1; i < text.numel(); i++, total++) {
    corpus.ring[total % corpus.capacity] = i < 0 ? -1 : tokens[i];  // -1 stands between texts
    for (int64_t order = 0; order < 2; order++) {
      corpus.link(order, total) = 0;
      if (i + 1 >= ORDERS[order]) std::swap(corpus.link(order, total), corpus.entry(order, tokens + i)), corpus.entry(order, tokens + i) = total + 1;
    }
  }
  return total;
}

// What each source said the last time would follow: a text's length then, and of the best place the tokens that agreed, 0 for none, and the token that followed.
struct Said {
  int64_t length;
  struct { int64_t matched, token; } of[NUM_SOURCES];
};

// Believes a source a little more (`trust`: the logarithm of what its odds are multiplied by) where it was right more often than usual, and less where it was not;
// `usual` (sources, MAX_MATCH + 1) are the logarithms of the odds that it is right. Online logistic regression with one weight a source.
static void learn(float* trust, const Said& said, const int64_t* text, int64_t length, const float* usual) {
  for (int64_t source = 0; source < NUM_SOURCES && said.length < length; source++) {
    auto [matched, token] = said.of[source];
    STD_TORCH_CHECK(said.length >= 0 && matched >= 0 && matched <= MAX_MATCH, "what was said must come from the search before");
    if (!matched) continue;
    float expected = 1 / (1 + std::exp(-usual[source * (MAX_MATCH + 1) + matched] - trust[source])), came = text[said.length] == token;
    trust[source] = std::clamp(trust[source] + LEARNING_RATE * (came - expected), -MOST_TRUST, MOST_TRUST);
  }
}

// What may follow each row's tokens (B, S), `lengths` of them: where the last ones stood before in the row itself, in its prediction and in its corpus (`corpora` holds
// two tensors a row, empty ones for none, of `totals` tokens), each place counts `odds` (sources, MAX_MATCH + 1) against the heads' 1 by the tokens that agree, one more
// after each, times what `trust` (sources,) says, which learns from what was `said` (B, 7) for the same rows before. A token that is none of `vocab_size`, which the base
// can read and not write, ends what is expected. Gives trees below the last token, as medusa.drafters.suffix.Continuations has them.
static std::vector<Tensor> continuations(Tensor tokens, const Tensor& lengths, std::vector<Tensor> predictions, std::vector<Tensor> corpora, const Tensor& totals, const Tensor& odds,
                                         const Tensor& usual, Tensor trust, std::optional<Tensor> said, int64_t depth, int64_t vocab_size) {
  tokens = whole(tokens);
  STD_TORCH_CHECK(has_shape(tokens, ScalarType::Long, {-1, -1}) && depth >= 0, "tokens must be (B, S) long");
  int64_t B = tokens.size(0), S = tokens.size(1), T = depth ? depth + SPARE_NODES : 1, W = MAX_CHILDREN;
  STD_TORCH_CHECK(are_indices(lengths, {B}, 1, S + 1), "lengths must be (B,) long, of 1 to S tokens");
  for (const Tensor& each : {odds, usual}) STD_TORCH_CHECK(has_shape(each, ScalarType::Float, {NUM_SOURCES, MAX_MATCH + 1}), "odds must be (sources, 17) float32");
  STD_TORCH_CHECK(has_shape(trust, ScalarType::Float, {NUM_SOURCES}), "trust must be (sources,) float32");
  STD_TORCH_CHECK(predictions.empty() || static_cast<int64_t>(predictions.size()) == B, "there must be a prediction for each row, or none");
  STD_TORCH_CHECK(!said || has_shape(*said, ScalarType::Long, {-1, sizeof(Said) / sizeof(int64_t)}), "what was said must be (B, 7) long");
  for (const Tensor& each : predictions) STD_TORCH_CHECK(!each.numel() || has_shape(each, ScalarType::Long, {-1}), "predictions must be (P,) long");
  STD_TORCH_CHECK(corpora.empty() || (static_cast<int64_t>(corpora.size()) == 2 * B && are_indices(totals, {B}, 0, std::numeric_limits<int32_t>::max())), "there must be a corpus for each row, or none");
  for (int64_t row = 0; row < static_cast<int64_t>(corpora.size()) / 2; row++)
    if (corpora[2 * row].numel()) check_corpus(corpora[2 * row], corpora[2 * row + 1], numbers<int64_t>(totals)[row]);
  Tensor found = made({B, T}, ScalarType::Long), parents = made({B, T}, ScalarType::Long), children = made({B, T, W}, ScalarType::Long), shares = made({B, T}, ScalarType::Float), matched = made({B}, ScalarType::Long);
  Tensor says = made({B, sizeof(Said) / sizeof(int64_t)}, ScalarType::Long);
  std::memset(numbers<int64_t>(says), 0, sizeof(Said) * B);
  std::memset(numbers<int64_t>(children), 0, sizeof(int64_t) * B * T * W);
  for (int64_t row = 0; row < B; row++) {
    const int64_t* text = numbers<int64_t>(tokens) + row * S;
    int64_t length = numbers<int64_t>(lengths)[row], *node_tokens = numbers<int64_t>(found) + row * T, *above = numbers<int64_t>(parents) + row * T;
    int64_t* below = numbers<int64_t>(children) + row * T * W;
    float* votes = numbers<float>(shares) + row * T;
    std::fill_n(node_tokens, T, text[length - 1]), std::fill_n(above, T, 0), std::fill_n(votes, T, 0.f);
    auto say = [&](const Tensor& all) { return reinterpret_cast<Said*>(numbers<int64_t>(all)) + row; };
    if (said && said->size(0) == B) learn(numbers<float>(trust), *say(*said), text, length, numbers<float>(usual));
    Places places{text, length - 1};
    Text own{text, nullptr, 0, length, 0}, expected{}, remembered{};
    if (depth && predictions.size()) expected = {numbers<int64_t>(predictions[row]), nullptr, 0, predictions[row].numel(), 0}, places.look_in(expected, 1);
    if (depth) places.look_in(own, 0);
    if (depth && corpora.size() && corpora[2 * row].numel()) {
      Corpus corpus(corpora[2 * row], corpora[2 * row + 1]);
      int64_t total = numbers<int64_t>(totals)[row];
      remembered = {nullptr, corpus.ring, std::max<int64_t>(total - corpus.capacity, 0), total, corpus.capacity};
      corpus.look(places, remembered);
    }
    numbers<int64_t>(matched)[row] = places.kept.empty() ? 0 : places.kept[0].length();
    say(says)->length = length;
    int64_t num_nodes = 1;
    bool has_best = false;
    for (const Place& place : places.kept) {
      auto& [agreed, next] = say(says)->of[place.source];
      if (!agreed) agreed = place.length(), next = place.text->at(place.position + 1);
      if (has_best && place.length() < LEAST_OF_SEVERAL) continue;
      has_best |= place.source != CORPUS;
      // Equally long places of a corpus count as one does together, each by how often its continuation followed; a row has few, and those add up.
      auto is_equal = [&](const Place& other) { return other.source == CORPUS && other.length() == place.length(); };
      int64_t num_equal = place.source == CORPUS ? std::count_if(places.kept.begin(), places.kept.end(), is_equal) : 1;
      const float *counts = numbers<float>(odds) + place.source * (MAX_MATCH + 1), trusted = std::exp(numbers<float>(trust)[place.source]) / num_equal;
      for (int64_t node = 0, ahead = 0; ahead < depth; ahead++) {
        int64_t position = place.position + 1 + (place.text == &own ? ahead % (length - 1 - place.position) : ahead);
        if (position >= place.text->end || place.text->at(position) < 0 || place.text->at(position) >= vocab_size) break;
        int64_t token = place.text->at(position), *child = below + node * W, *end = child + W;
        while (child < end && *child && node_tokens[*child] != token) child++;
        if (child == end || (!*child && num_nodes == T)) break;
        if (!*child) node_tokens[num_nodes] = token, above[num_nodes] = node, *child = num_nodes++;
        node = *child;
        votes[node] += trusted * counts[std::min(place.length() + ahead, MAX_MATCH)];
      }
    }
    for (int64_t node = 0; node < num_nodes; node++) {  // from votes to shares, of all children at once
      float all = 1;
      for (int64_t w = 0; w < W; w++) all += below[node * W + w] ? votes[below[node * W + w]] : 0.f;
      for (int64_t w = 0; w < W; w++) if (below[node * W + w]) votes[below[node * W + w]] /= all;
    }
  }
  return {found, parents, children, shares, matched, says};
}

// What `continuations` has found, for outputs of V tokens.
static void check_expected(const Tensor& expected, const Tensor& children, const Tensor& chances, int64_t B, int64_t V) {
  int64_t T = expected.dim() == 2 ? expected.size(1) : 0;
  STD_TORCH_CHECK(T && are_indices(expected, {B, T}, 0, V), "what is expected must be tokens (B, T) long that are outputs");
  STD_TORCH_CHECK(are_indices(children, {B, T, -1}, 0, T) && has_shape(chances, ScalarType::Float, {B, T}), "children (B, T, W) long and shares (B, T) must be of the nodes of what is expected");
}

// A level: logits (B, M, C) of what follows the M nodes of the beam at `paths` (B, M, depth), with sharpness (B,) and noise (B, depths, V) in
// sampled rows; token_map (C,), column_of (V,); what is expected: its tokens, children and shares as above, and the beam's nodes in it, `at` (B, M), -1 for none; its worth
// (B, M) and numbers `beam` (B, M), where it is not the root. Gives tokens, values, above (B, M F) of the candidates, the first of them number `first`, and of
// the `width` best paths, fewer where no row has so many that are as probable as `least_worth`, at, worth, beam, and their places in the beam above; then the
// `wanted` largest values of all levels, `leading` (B, wanted) those of the levels before. Says whether a node below can be worth more than the last of these, and
// the most probable ones are, in the mean of the rows, as probable as `least_worth`.
static std::tuple<std::vector<Tensor>, bool> grow(Tensor logits, std::optional<Tensor> sharpness, std::optional<Tensor> noise, std::optional<Tensor> token_map, std::optional<Tensor> column_of,
                                const Tensor& expected, const Tensor& children, const Tensor& chances, const Tensor& paths, std::optional<Tensor> at, std::optional<Tensor> worth,
                                std::optional<Tensor> beam, std::optional<Tensor> leading, int64_t wanted, int64_t first, int64_t fanout, int64_t width, bool is_expected, double least_worth) {
  logits = whole(logits);
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 3 && fanout <= logits.size(2), "logits must be (B, M, C) float32 of as many columns as are wanted");
  int64_t B = logits.size(0), M = logits.size(1), C = logits.size(2), depth = paths.size(2), V = column_of ? column_of->numel() : C, T = expected.size(1), spread = is_expected ? children.size(2) : 0;
  int64_t F = fanout + spread;
  check_expected(expected, children, chances, B, V);
  STD_TORCH_CHECK(M > 0 && depth > 0 && fanout > 0 && width > 0 && wanted > 0 && has_shape(paths, ScalarType::Long, {B, M, depth}), "paths must be (B, M, depth) long");
  STD_TORCH_CHECK(!at || are_indices(*at, {B, M}, -1, T), "the beam must lie among the nodes of what is expected");
  STD_TORCH_CHECK((!worth || has_shape(*worth, ScalarType::Float, {B, M})) && (!beam || has_shape(*beam, ScalarType::Long, {B, M})), "worth and numbers of the beam must be (B, M)");
  STD_TORCH_CHECK(!leading || has_shape(*leading, ScalarType::Float, {B, wanted}), "leading values must be (B, wanted) float32");
  STD_TORCH_CHECK(!sharpness || has_shape(*sharpness, ScalarType::Float, {B}), "sharpness must be (B,) float32");
  STD_TORCH_CHECK((!column_of || has_shape(*column_of, ScalarType::Long, {V})) && (!token_map || (column_of && has_shape(*token_map, ScalarType::Long, {C}))), "a token map must be (C,) long, and the columns of all tokens (V,) long");
  if (noise) {
    bool fits = noise->scalar_type() == ScalarType::Float && noise->dim() == 3 && noise->size(0) == B && noise->size(1) >= depth && noise->size(2) >= V && noise->stride(2) == 1;
    STD_TORCH_CHECK(fits && (!token_map || are_indices(*token_map, {C}, 0, V)), "noise must be (B, depths, V) float32");
  }
  std::vector<int64_t> nothing(spread, 0);
  Level level{C, fanout, numbers<int64_t>(token_map), numbers<int64_t>(column_of)};
  Tensor tokens = made({B, M * F}, ScalarType::Long), values = made({B, M * F}, ScalarType::Float), above = made({B, M * F}, ScalarType::Long);
  auto nodes_after = [&](int64_t node) {
    int64_t from = at ? numbers<int64_t>(at)[node] : 0;
    return from < 0 ? nothing.data() : numbers<int64_t>(children) + (node / M * T + from) * spread;
  };
  parallel_for(B * M, 1, [&](int64_t begin, int64_t end) {
    for (int64_t node = begin; node < end; node++) {
      int64_t row = node / M;
      level.follow(numbers<float>(logits) + node * C, sharpness ? numbers<float>(sharpness)[row] : 1.f, noise ? numbers<float>(noise) + row * noise->stride(0) + (depth - 1) * noise->stride(1) : nullptr,
                   spread, nodes_after(node), numbers<int64_t>(expected) + row * T, numbers<float>(chances) + row * T, numbers<int64_t>(tokens) + node * F, numbers<float>(values) + node * F);
      for (int64_t i = node * F; i < (node + 1) * F; i++) {
        numbers<float>(values)[i] += worth ? numbers<float>(worth)[node] : 0.f;
        numbers<int64_t>(above)[i] = beam ? numbers<int64_t>(beam)[node] : -1;
      }
    }
  });
  Tensor leads = made({B, wanted}, ScalarType::Float);
  std::vector<Largest> bests(B, Largest{static_cast<size_t>(std::min(width, M * F))});
  int64_t W = 1;
  bool goes_on = false;
  double likely = 0;
  for (int64_t row = 0; row < B; row++) {
    Largest &best = bests[row], ahead{static_cast<size_t>(wanted)};
    for (int64_t i = 0; i < wanted; i++) ahead.offer(leading ? numbers<float>(leading)[row * wanted + i] : NOTHING, i);
    for (int64_t i = 0; i < M * F; i++) best.offer(numbers<float>(values)[row * M * F + i], i), ahead.offer(numbers<float>(values)[row * M * F + i], i);
    for (int64_t i = 0; i < wanted; i++) numbers<float>(leads)[row * wanted + i] = ahead.kept[i].first;
    goes_on |= best.kept[0].first > ahead.kept.back().first;
    likely += std::exp(best.kept[0].first);
    W = std::max<int64_t>(W, std::count_if(best.kept.begin(), best.kept.end(), [&](const auto& each) { return std::exp(each.first) >= least_worth; }));
  }
  goes_on &= likely >= least_worth * B;
  Tensor best_paths = made({B, W, depth + 1}, ScalarType::Long), best_at = made({B, W}, ScalarType::Long), best_worth = made({B, W}, ScalarType::Float);
  Tensor best_beam = made({B, W}, ScalarType::Long), parents = made({B, W}, ScalarType::Long);
  for (int64_t row = 0; row < B; row++)
    for (int64_t w = 0; w < W; w++) {
      auto [value, i] = bests[row].kept[w];
      int64_t to = row * W + w, node = row * M + i / F, *path = numbers<int64_t>(best_paths) + to * (depth + 1);
      std::copy_n(numbers<int64_t>(paths) + node * depth, depth, path);
      path[depth] = numbers<int64_t>(tokens)[row * M * F + i];
      int64_t reached = i % F < fanout ? 0 : nodes_after(node)[i % F - fanout];
      numbers<int64_t>(best_at)[to] = reached ? reached : -1;
      numbers<float>(best_worth)[to] = value;
      numbers<int64_t>(best_beam)[to] = first + i;
      numbers<int64_t>(parents)[to] = i / F;
    }
  return {{tokens, values, above, best_paths, best_at, best_worth, best_beam, parents, leads}, goes_on};
}

// The tree of root (B,) and the `nodes` - 1 candidates worth most, of `levels`: tokens, values and above of each; the beam of the last with at, worth
// (B, M), below which what is expected goes on alone. Gives tokens, parents, depths (B, N), ancestors (B, N, N), lineage (B, N, L) and worth (B, N). No candidate is
// worth more than the one above it, which comes before it.
static std::vector<Tensor> tree_of(const Tensor& root, std::vector<Tensor> levels, const Tensor& expected, const Tensor& children, const Tensor& chances, const Tensor& at, const Tensor& worth,
                                   const Tensor& beam, int64_t nodes, int64_t max_depth) {
  struct Candidate { int64_t token, above, depth; float value; };
  STD_TORCH_CHECK(root.scalar_type() == ScalarType::Long && root.is_contiguous() && nodes > 0 && max_depth >= 0 && levels.size() % 3 == 0, "a tree must have a root (B,) long");
  check_expected(expected, children, chances, root.numel(), std::numeric_limits<int64_t>::max());
  STD_TORCH_CHECK(beam.dim() == 2 && are_indices(at, {root.numel(), beam.size(1)}, -1, expected.size(1)), "the beam must lie among the nodes of what is expected");
  int64_t B = root.numel(), N = nodes, L = max_depth + 1, T = expected.size(1), W = children.size(2), num_levels = levels.size() / 3, M = beam.size(1), num_candidates = 0;
  for (int64_t level = 0; level < num_levels; level++) {
    int64_t size = levels[3 * level].dim() == 2 ? levels[3 * level].size(1) : -1;
    num_candidates += size;
    bool fits = has_shape(levels[3 * level], ScalarType::Long, {B, size}) && has_shape(levels[3 * level + 1], ScalarType::Float, {B, size});
    STD_TORCH_CHECK(fits && are_indices(levels[3 * level + 2], {B, size}, -1, num_candidates), "a level must be tokens, values and candidates above, (B, C) each");
  }
  STD_TORCH_CHECK(are_indices(beam, {B, M}, -1, num_candidates) && has_shape(worth, ScalarType::Float, {B, M}), "numbers of the beam must be those of candidates");
  Tensor tokens = made({B, N}, ScalarType::Long), parents = made({B, N}, ScalarType::Long), depths = made({B, N}, ScalarType::Long), ancestors = made({B, N, N}, ScalarType::Bool);
  Tensor lineage = made({B, N, L}, ScalarType::Long), values = made({B, N}, ScalarType::Float);
  std::vector<Candidate> found;
  std::vector<int64_t> order, node_of, number(T);  // of the candidate that a node of what is expected is
  for (int64_t row = 0; row < B; row++) {
    found.clear();
    for (int64_t level = 0; level < num_levels; level++) {
      int64_t size = levels[3 * level].size(1);
      for (int64_t i = row * size; i < (row + 1) * size; i++)
        found.push_back({numbers<int64_t>(levels[3 * level])[i], numbers<int64_t>(levels[3 * level + 2])[i], level + 1, numbers<float>(levels[3 * level + 1])[i]});
    }
    std::fill(number.begin(), number.end(), -1);
    for (int64_t m = row * M; m < (row + 1) * M; m++)
      if (int64_t node = numbers<int64_t>(at)[m]; node >= 0) number[node] = numbers<int64_t>(beam)[m];
    for (int64_t node = 0; node < T; node++)
      for (int64_t w = 0; w < W && number[node] >= 0; w++)
        if (int64_t child = numbers<int64_t>(children)[(row * T + node) * W + w]) {
          Candidate above = found[number[node]];
          found.push_back({numbers<int64_t>(expected)[row * T + child], number[node], above.depth + 1, above.value + std::log(numbers<float>(chances)[row * T + child])});
          number[child] = found.size() - 1;
        }
    while (static_cast<int64_t>(found.size()) < N - 1) found.push_back({numbers<int64_t>(root)[row], -1, 1, NOTHING});
    order.resize(found.size()), node_of.resize(found.size());
    for (size_t i = 0; i < found.size(); i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return found[a].value > found[b].value; });
    for (int64_t node = 0; node < N; node++) {
      Candidate of = node ? found[order[node - 1]] : Candidate{numbers<int64_t>(root)[row], -1, 0, 0.f};
      if (node) node_of[order[node - 1]] = node;
      int64_t at = row * N + node, parent = of.above < 0 ? 0 : node_of[of.above], over = row * N + parent;
      numbers<int64_t>(tokens)[at] = of.token;
      numbers<int64_t>(parents)[at] = parent;
      numbers<int64_t>(depths)[at] = of.depth;
      numbers<float>(values)[at] = of.value;
      for (int64_t other = 0; other < N; other++) numbers<bool>(ancestors)[at * N + other] = other == node || (node && numbers<bool>(ancestors)[over * N + other]);
      for (int64_t level = 0; level < L; level++) numbers<int64_t>(lineage)[at * L + level] = level < of.depth ? numbers<int64_t>(lineage)[over * L + level] : node;
    }
  }
  return {tokens, parents, depths, ancestors, lineage, values};
}

static int64_t lanes() { return LANES; }

// ------------------------------------------------------------------------------------------------- sampling

// "lowbias32" (C. Wellons, 2018), of a number or of a vector of them
template <typename Word> static inline Word mixed(Word x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du, x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The bits of medusa.acceptance.sampling.hashed_bits: seeds (B,), positions (B, L) -> (B, L, V)
static Tensor hashed_bits(Tensor seeds, Tensor positions, int64_t V) {
  constexpr uint32_t GOLDEN = 0x9E3779B9u;
  typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
  seeds = whole(seeds), positions = whole(positions);
  STD_TORCH_CHECK(has_shape(positions, ScalarType::Long, {-1, -1}) && has_shape(seeds, ScalarType::Long, {positions.size(0)}) && V >= 0, "seeds must be (B,) long, and positions (B, L) long");
  int64_t B = positions.size(0), L = positions.size(1);
  Tensor bits = made({B, L, V}, ScalarType::Int);
  Words within;
  for (int lane = 0; lane < LANES; lane++) within[lane] = lane;
  parallel_for(B * L, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      uint64_t seed = numbers<int64_t>(seeds)[i / L];
      uint32_t row = mixed(static_cast<uint32_t>(seed) ^ mixed(static_cast<uint32_t>(seed >> 32) + GOLDEN));
      uint32_t first = mixed(static_cast<uint32_t>(numbers<int64_t>(positions)[i]) ^ row), second = mixed(first + GOLDEN);
      int32_t* to = numbers<int32_t>(bits) + i * V;
      for (int64_t token = 0; token < V; token += LANES) {
        Words found = mixed(mixed(within + (static_cast<uint32_t>(token) + first)) ^ second) & 0x7FFFFFFFu;
        std::memcpy(to + token, &found, std::min<int64_t>(V - token, LANES) * sizeof(uint32_t));
      }
    }
  });
  return bits;
}

// As torch calls them, in passes that are not compiled.
static Tensor called_product(const Tensor& x, const Tensor& panels, std::optional<Tensor> scales, std::optional<Tensor> bias, int64_t width) {
  in_compiled_pass(false);
  return product(x, panels, scales, bias, width);
}
static Tensor called_attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& seen, double scale, double cap, std::optional<Tensor> sinks) {
  in_compiled_pass(false);
  return attend(query, key, value, seen, scale, cap, sinks);
}

STABLE_TORCH_LIBRARY(medusa, m) {
  m.def("hashed_bits(Tensor seeds, Tensor positions, int vocab_size) -> Tensor");
  m.def("argmax(Tensor scores) -> Tensor");
  m.def("packed_product(Tensor x, Tensor panels, Tensor? scales, Tensor? bias, int width) -> Tensor");
  m.def("narrowest(Tensor weight) -> int");
  m.def("pack(Tensor weight, Tensor(a!) panels, Tensor(b!)? scales, int row) -> ()");
  m.def("encode_twelve(Tensor weight, Tensor(a!) panels, int row) -> int");
  m.def("decode_twelve(Tensor panels, int num_outputs, int num_inputs) -> Tensor");
  m.def("twelve_size(int num_inputs) -> int");
  m.def("tree_attention(Tensor query, Tensor key, Tensor value, Tensor seen, float scale, float cap, Tensor? sinks) -> Tensor");
  m.def("seen_slots(Tensor lengths, Tensor depths, Tensor ancestors, int first, int end, bool by_range, int? window) -> Tensor");
  m.def("remember(Tensor(a!) ring, Tensor(b!) latest, int total, Tensor text) -> int");
  m.def("continuations(Tensor tokens, Tensor lengths, Tensor[] predictions, Tensor[] corpora, Tensor totals, Tensor odds, Tensor usual, Tensor(a!) trust, Tensor? said, int depth, int vocab_size) -> Tensor[]");
  m.def("grow(Tensor logits, Tensor? sharpness, Tensor? noise, Tensor? token_map, Tensor? column_of, Tensor expected, Tensor children, Tensor chances, Tensor paths, Tensor? at, Tensor? worth, Tensor? beam, Tensor? leading, int wanted, int first, int fanout, int width, bool is_expected, float least_worth) -> (Tensor[], bool)");
  m.def("tree_of(Tensor root, Tensor[] levels, Tensor expected, Tensor children, Tensor chances, Tensor at, Tensor worth, Tensor beam, int nodes, int max_depth) -> Tensor[]");
  m.def("quantised_size(int[] types, int[] num_rows, int num_inputs) -> int");
  m.def("begin_quantised(Tensor(a!) weights, int[] types, int[] num_rows, int num_inputs, bool in_whole_numbers) -> ()");
  m.def("pack_quantised(Tensor(a!) weights, int part, Tensor file_rows, Tensor? order) -> ()");
  m.def("unpack_quantised(Tensor weights) -> Tensor");
  m.def("quantised_rows(Tensor file_rows, Tensor ids, int type, int width) -> Tensor");
  m.def("lanes() -> int");
  m.def("tiles(bool? wanted) -> bool");
  m.def("force_own_threads(bool forced) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(medusa, CPU, m) {
  m.impl("argmax", TORCH_BOX(&argmax));
  m.impl("packed_product", TORCH_BOX(&called_product));
  m.impl("narrowest", TORCH_BOX(&narrowest));
  m.impl("pack", TORCH_BOX(&pack));
  m.impl("encode_twelve", TORCH_BOX(&encode_twelve));
  m.impl("decode_twelve", TORCH_BOX(&decode_twelve));
  m.impl("tree_attention", TORCH_BOX(&called_attend));
  m.impl("seen_slots", TORCH_BOX(&seen_slots));
  m.impl("grow", TORCH_BOX(&grow));
  m.impl("tree_of", TORCH_BOX(&tree_of));
  m.impl("remember", TORCH_BOX(&remember));
  m.impl("continuations", TORCH_BOX(&continuations));
  m.impl("hashed_bits", TORCH_BOX(&hashed_bits));
  m.impl("begin_quantised", TORCH_BOX(&begin_quantised));
  m.impl("pack_quantised", TORCH_BOX(&pack_quantised));
  m.impl("unpack_quantised", TORCH_BOX(&unpack_quantised));
  m.impl("quantised_rows", TORCH_BOX(&quantised_rows));
}
STABLE_TORCH_LIBRARY_IMPL(medusa, CompositeExplicitAutograd, m) {
  m.impl("lanes", TORCH_BOX(&lanes));
  m.impl("twelve_size", TORCH_BOX(&coded_size));
  m.impl("quantised_size", TORCH_BOX(&quantised_size));
  m.impl("tiles", TORCH_BOX(&tiles));
  m.impl("force_own_threads", TORCH_BOX(&force_own_threads));
}

// The same for libraries that Inductor compiles, which call functions of C.
static Tensor borrowed(AtenTensorHandle given) {
  AtenTensorHandle owned;
  aoti_torch_new_tensor_handle(given, &owned);
  return Tensor(owned);
}
static std::optional<Tensor> borrowed(AtenTensorHandle* given) { return given ? std::optional(borrowed(*given)) : std::nullopt; }
template <typename Compute>
static AOTITorchError handed_out(AtenTensorHandle* to, Compute compute) {
  in_compiled_pass(true);
  try {
    return aoti_torch_new_tensor_handle(compute().get(), to);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return AOTI_TORCH_FAILURE;
  }
}
extern "C" AOTITorchError aoti_torch_cpu_packed_product(AtenTensorHandle x, AtenTensorHandle panels, AtenTensorHandle* scales, AtenTensorHandle* bias, int64_t width, AtenTensorHandle* to) {
  return handed_out(to, [&] { return product(borrowed(x), borrowed(panels), borrowed(scales), borrowed(bias), width); });
}
extern "C" AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle seen, double scale, double cap, AtenTensorHandle* sinks, AtenTensorHandle* to) {
  return handed_out(to, [&] { return attend(borrowed(query), borrowed(key), borrowed(value), borrowed(seen), scale, cap, borrowed(sinks)); });
}
extern "C" AOTITorchError aoti_torch_cpu_quantised_rows(AtenTensorHandle rows, AtenTensorHandle ids, int64_t type, int64_t width, AtenTensorHandle* to) {
  return handed_out(to, [&] { return quantised_rows(borrowed(rows), borrowed(ids), type, width); });
}
