// The types of files: how a block of each is taken apart into codes, scales, minima and zeros.

#include <string>

#include "group_weights.h"
#include "operators.h"

namespace medusa {
namespace {

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

uint16_t two_bytes(const uint8_t* from) {
  uint16_t value;
  std::memcpy(&value, from, 2);
  return value;
}

// 32 codes of 4 bits, the first 16 in the lower halves of their bytes; `bits`: a fifth bit of each.
void half_bytes(const uint8_t* from, uint32_t bits, uint8_t* codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = (from[i] & 15) | (bits >> i & 1) << 4;
    codes[i + 16] = from[i] >> 4 | (bits >> (i + 16) & 1) << 4;
  }
}
uint32_t fifth_bits(const uint8_t* from) {
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  return bits;
}

// Blocks of 32 numbers: a scale, a minimum in some, and codes.
void take_q4_0(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  half_bytes(from + 2, 0, to.codes);
}
void take_q4_1(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  to.minimum = two_bytes(from + 2);
  half_bytes(from + 4, 0, to.codes);
}
void take_q5_0(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  half_bytes(from + 6, fifth_bits(from + 2), to.codes);
}
void take_q5_1(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  to.minimum = two_bytes(from + 2);
  half_bytes(from + 8, fifth_bits(from + 4), to.codes);
}
void take_q8_0(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  for (int i = 0; i < 32; i++) to.codes[i] = from[2 + i] ^ 128;
}
void take_mxfp4(const uint8_t* from, FileBlock& to) {
  // the scale is 2^(e - 128), a number of bfloat16; below 2^-126 one bit of its fraction
  to.scale = from[0] >= 2 ? (from[0] - 1) << 7 : 0x20 << from[0];
  half_bytes(from + 1, 0, to.codes);
}

// Blocks of 256 numbers: scales that are whole numbers, and codes in halves or quarters of bytes, whose other
// bits are elsewhere.
void take_q2_k(const uint8_t* from, FileBlock& to) {
  const uint8_t* packed = from + 16;
  for (int i = 0; i < 16; i++) {
    to.whole_scales[i] = from[i] & 15;
    to.whole_minima[i] = from[i] >> 4;
  }
  for (int k = 0; k < 256; k++) to.codes[k] = packed[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
  to.scale = two_bytes(from + 80);
  to.minimum = two_bytes(from + 82);
}
void take_q3_k(const uint8_t* from, FileBlock& to) {
  const uint8_t *high = from, *packed = from + 32, *scales = from + 96;
  for (int i = 0; i < 16; i++) {
    int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
    to.whole_scales[i] = (low | (scales[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32;
  }
  for (int k = 0; k < 256; k++) {
    int low = packed[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
    to.codes[k] = low | (high[k % 32] >> (k / 32) & 1) << 2;  // 4 is zero
  }
  to.scale = two_bytes(from + 108);
}
// 8 scales and 8 minima of 6 bits.
void six_bit_scales(const uint8_t* packed, FileBlock& to) {
  for (int i = 0; i < 4; i++) {
    to.whole_scales[i] = packed[i] & 63;
    to.whole_minima[i] = packed[i + 4] & 63;
    to.whole_scales[i + 4] = (packed[i + 8] & 15) | (packed[i] >> 2 & 48);
    to.whole_minima[i + 4] = packed[i + 8] >> 4 | (packed[i + 4] >> 2 & 48);
  }
}
void take_q4_k(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  to.minimum = two_bytes(from + 2);
  six_bit_scales(from + 4, to);
  const uint8_t* packed = from + 16;
  for (int part = 0; part < 4; part++)
    for (int i = 0; i < 32; i++) {
      to.codes[part * 64 + i] = packed[part * 32 + i] & 15;
      to.codes[part * 64 + 32 + i] = packed[part * 32 + i] >> 4;
    }
}
void take_q5_k(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  to.minimum = two_bytes(from + 2);
  six_bit_scales(from + 4, to);
  const uint8_t *high = from + 16, *packed = from + 48;
  for (int part = 0; part < 4; part++)
    for (int i = 0; i < 32; i++) {
      to.codes[part * 64 + i] = (packed[part * 32 + i] & 15) | (high[i] >> (2 * part) & 1) << 4;
      to.codes[part * 64 + 32 + i] = packed[part * 32 + i] >> 4 | (high[i] >> (2 * part + 1) & 1) << 4;
    }
}
void take_q6_k(const uint8_t* from, FileBlock& to) {
  const uint8_t *packed = from, *high = from + 128;
  for (int part = 0; part < 2; part++)
    for (int i = 0; i < 32; i++) {
      uint8_t first = packed[part * 64 + i], second = packed[part * 64 + 32 + i], bits = high[part * 32 + i];
      uint8_t* codes = to.codes + part * 128 + i;
      codes[0] = (first & 15) | (bits & 3) << 4;
      codes[32] = (second & 15) | (bits >> 2 & 3) << 4;
      codes[64] = first >> 4 | (bits >> 4 & 3) << 4;
      codes[96] = second >> 4 | (bits >> 6) << 4;
    }
  std::memcpy(to.whole_scales, from + 192, 16);
  to.scale = two_bytes(from + 208);
}
void take_iq4_xs(const uint8_t* from, FileBlock& to) {
  uint16_t high = two_bytes(from + 2);
  to.scale = two_bytes(from);
  for (int i = 0; i < 8; i++) {
    to.whole_scales[i] = ((from[4 + i / 2] >> (i % 2 * 4) & 15) | (high >> (2 * i) & 3) << 4) - 32;
    half_bytes(from + 8 + 16 * i, 0, to.codes + 32 * i);
  }
}

// Of directories: a scale, the zero where groups have their own, and 32 codes without a sign.
void take_four_bits_with_zero(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  to.zero = from[2];
  half_bytes(from + 3, 0, to.codes);
}
void take_eight_bits(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  std::memcpy(to.codes, from + 2, 32);
}
void take_eight_bits_with_zero(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  to.zero = from[2];
  std::memcpy(to.codes, from + 3, 32);
}

// Numbered as GGUF numbers them; from FIRST_OF_DIRECTORIES on, of directories. In the order of FileType: id,
// block, bytes, form, zero, table, has_bfloat16_scales, take_apart. Types that share a form share its zero.
constexpr FileType FILE_TYPES[] = {
    {2, 32, 18, Q4, 8, nullptr, false, take_q4_0},
    {3, 32, 20, Q4_MIN, 0, nullptr, false, take_q4_1},
    {6, 32, 22, Q5, 16, nullptr, false, take_q5_0},
    {7, 32, 24, Q5_MIN, 0, nullptr, false, take_q5_1},
    {8, 32, 34, Q8, 128, nullptr, false, take_q8_0},
    {10, 256, 84, K_Q2, 0, nullptr, false, take_q2_k},
    {11, 256, 110, K_Q3, 4, nullptr, false, take_q3_k},
    {12, 256, 144, K_Q4, 0, nullptr, false, take_q4_k},
    {13, 256, 176, K_Q5, 0, nullptr, false, take_q5_k},
    {14, 256, 210, K_Q6, 32, nullptr, false, take_q6_k},
    {20, 32, 18, TABLE, 128, IQ4_VALUES, false, take_q4_0},
    {23, 256, 136, K_TABLE, 128, IQ4_VALUES, false, take_iq4_xs},
    {39, 32, 17, TABLE, 128, MXFP4_VALUES, true, take_mxfp4},
    {1000, 32, 18, Q4, 8, nullptr, false, take_q4_0},
    {1001, 32, 18, Q4, 8, nullptr, true, take_q4_0},
    {1002, 32, 19, Q4_ZEROS, 0, nullptr, false, take_four_bits_with_zero},
    {1003, 32, 19, Q4_ZEROS, 0, nullptr, true, take_four_bits_with_zero},
    {1004, 32, 34, Q8, 128, nullptr, false, take_eight_bits},
    {1005, 32, 34, Q8, 128, nullptr, true, take_eight_bits},
    {1006, 32, 35, Q8_ZEROS, 128, nullptr, false, take_eight_bits_with_zero},
    {1007, 32, 35, Q8_ZEROS, 128, nullptr, true, take_eight_bits_with_zero},
};

// Rows are rounded once for all matrices of a form, so what depends on the code for zero is that form's.
constexpr bool types_of_a_form_share_its_zero() {
  for (const FileType& type : FILE_TYPES)
    for (const FileType& other : FILE_TYPES)
      if (type.form == other.form && type.zero != other.zero) return false;
  return true;
}
static_assert(types_of_a_form_share_its_zero(), "shift the codes of a type so that zero has its form's code");

constexpr bool blocks_are_those_of_their_forms() {
  for (const FileType& type : FILE_TYPES) {
    auto numbers = []<typename F>() { return F::HAS_WHOLE_SCALES ? F::BLOCK : F::GROUP; };
    if (type.block != with_form(type.form, numbers)) return false;
  }
  return true;
}
static_assert(blocks_are_those_of_their_forms(),
              "a block must be a group with its scale, or 256 numbers whose groups have whole scales");

}  // namespace

const FileType& file_type(int64_t id) {
  for (const FileType& type : FILE_TYPES)
    if (type.id == id) return type;
  throw std::runtime_error("weights of type " + std::to_string(id) +
                           " are not held in their own bits: FILE_TYPES lists those that are");
}

std::vector<int64_t> gguf_types() {
  std::vector<int64_t> ids;
  for (const FileType& type : FILE_TYPES)
    if (type.id < FIRST_OF_DIRECTORIES) ids.push_back(type.id);
  return ids;
}

}  // namespace medusa
