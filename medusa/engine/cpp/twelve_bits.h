// Weights of bfloat16 in twelve bits, exactly: how a panel of them lies, and how it is widened.
//
// The exponents of a matrix are few. A weight is its lower byte (a bit of the exponent, and the fraction),
// and a code of four bits for its upper one: the sign, and 0 to 6 for seven that follow each other without
// it, or 7 for zero. A weight whose upper byte has no code is an outlier: a zero here, and stored separately;
// what it gives is added at the end of each sum. A panel is a header, the lower bytes of all its columns,
// their codes, and the outliers, with room for one in 256 weights. Zeros fill up the last columns.
//
// Bytes lie so that interleaving lower and upper ones gives pairs of a lane: in each 16, the first two
// columns of four lanes, then the next two. Codes lie as these do, those of the next four columns in the
// upper halves of their bytes.

#pragma once

#include "product.h"

namespace medusa {

struct alignas(64) TwelveBitHeader {
  uint8_t upper[16];  // the byte of each code
  uint32_t num_outliers;
};
struct Outlier {
  uint32_t column;
  uint16_t lane, bits;
};

inline int64_t padded_columns(int64_t K) { return (K + 31) / 32 * 32; }
inline int64_t outlier_room(int64_t K) { return padded_columns(K) * LANES / 256; }
int64_t twelve_bit_panel_bytes(int64_t K);

// Where the parts of a panel lie.
struct TwelveBitPanel {
  TwelveBitHeader* header;
  uint8_t *lower, *codes;
  Outlier* outliers;

  TwelveBitPanel(const char* panel, int64_t K) {
    header = reinterpret_cast<TwelveBitHeader*>(const_cast<char*>(panel));
    lower = reinterpret_cast<uint8_t*>(header + 1);
    codes = lower + padded_columns(K) * LANES;
    outliers = reinterpret_cast<Outlier*>(codes + padded_columns(K) * LANES / 2);
  }
  const Outlier* outliers_end() const { return outliers + header->num_outliers; }

  // Where a column of a lane has its lower byte within those of four columns, and its code within those of
  // eight.
  static int64_t place(int64_t lane, int64_t column) {
    return lane / 4 * 16 + column % 4 / 2 * 8 + lane % 4 * 2 + column % 2;
  }
};

inline Bytes upper_bytes(const TwelveBitHeader* header) {
  Bytes table;
  for (int i = 0; i < VECTOR_BYTES; i += 16)
    std::memcpy(reinterpret_cast<char*>(&table) + i, header->upper, 16);
  return table;
}

// Codes of four columns, or those in the upper halves of their bytes; `looked_up` reads the lower half of a
// byte alone.
inline Bytes codes_of(Bytes both, bool in_upper_half) {
  return in_upper_half ? (Bytes)((Words)both >> 4) : both;
}

// Eight columns of a panel in bfloat16, outliers as zeros.
constexpr int64_t EIGHT_COLUMNS = 8 * LANES * sizeof(BFloat16);
inline void widen_eight_columns(const uint8_t* lower, const uint8_t* codes, Bytes table, char* to) {
  Bytes both = load(codes);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    Bytes low = load(lower + half * 4 * LANES), high = looked_up(table, codes_of(both, half));
    Bytes pairs[2] = {interleaved(low, high, false), interleaved(low, high, true)};
    std::memcpy(to + half * sizeof(pairs), pairs, sizeof(pairs));
  }
}

// How far ahead of its columns a panel is fetched; its bytes and its codes are read side by side.
constexpr int64_t COLUMNS_AHEAD = 1024;

// The first K columns of J panels in bfloat16, each of which takes `wide_bytes`; the last eight of a panel
// may reach beyond.
void widen_panels(const char* panels, int64_t panel_bytes, int J, int64_t K, char* to, int64_t wide_bytes);

// Adds what the outliers of J panels give, to the sums (M, J, LANES) of M rows.
void add_outliers(const Product& product, const char* panels, int J, int64_t row, int64_t M, float* sums);

}  // namespace medusa
