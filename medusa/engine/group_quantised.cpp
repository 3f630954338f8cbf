// Products with weights that stay as a file has quantised them (GGUF; GPTQ, AWQ and other whole numbers with a scale a group).
//
// A weight is a whole number, its code, of 4, 5, 6 or 8 bits. A group of 16 or 32 weights of an output shares a scale, and in
// some formats a minimum, or the code that stands for zero. So a file's numbers are here in their own bits, and none is changed.
//
// They are multiplied in one of two ways:
// - In whole numbers: each row is rounded to 8 bits, with a step for each 32 numbers, or for 256 where a file's scales are
//   whole numbers themselves (as llama.cpp does). Sums of a group are exact in any order; groups are added in one order.
// - In float32: a block of weights is widened to float32 and multiplied by rows as they are, column after column.
// Either way the bits of a row's result depend on that row alone.
//
// How weights lie: a Head, a Part for each matrix, and the parts' panels. A panel holds LANES outputs, and consists of blocks
// of columns. A block is: float16 scales (of each group, or of the block), minima likewise; where scales are whole numbers,
// those of each group and its minima; zeros where each group has its own; then the codes, in sections of 32 columns. A section's columns are eight quads of four,
// each as a vector of LANES times four bytes. Two quads share a vector of half bytes; what codes have beyond 4 bits is in
// vectors of single bits (a bit a quad) or of pairs of bits (two a quad).

#include "group_quantised.h"
#include "threads.h"
#include "tiles.h"

#include <array>

namespace {

constexpr int64_t VECTOR = LANES * 4;  // bytes
constexpr int64_t SECTION = 32;
constexpr int64_t LINE = 64;

template <int BITS_, int GROUP_, bool HAS_WHOLE_SCALES_, bool HAS_MINIMA_, bool IS_TABLE_, bool HAS_OWN_ZEROS_ = false>
struct Form {
  static constexpr int BITS = BITS_;          // of a code
  static constexpr int64_t GROUP = GROUP_;    // columns that share a scale
  static constexpr bool HAS_WHOLE_SCALES = HAS_WHOLE_SCALES_;  // of 8 bits, times one number for the block
  static constexpr bool HAS_MINIMA = HAS_MINIMA_;
  static constexpr bool IS_TABLE = IS_TABLE_;  // codes are places in a table of 16 numbers
  static constexpr bool HAS_OWN_ZEROS = HAS_OWN_ZEROS_;  // which code stands for zero, each group says

  static constexpr int64_t BLOCK = HAS_WHOLE_SCALES ? 256 : HAS_OWN_ZEROS ? 128 : 64;
  static constexpr int64_t GROUPS = BLOCK / GROUP;
  static constexpr int64_t SECTIONS = BLOCK / SECTION;
  static constexpr int64_t STEP = HAS_WHOLE_SCALES ? 256 : GROUP;  // numbers of a row that are rounded together
  static constexpr bool HAS_ZERO = !HAS_MINIMA && !HAS_OWN_ZEROS;  // a code that stands for zero in all groups, other than 0

  // Where the parts of a block begin.
  static constexpr int64_t NUM_SCALES = HAS_WHOLE_SCALES ? 1 : GROUPS;  // float16, for each lane
  static constexpr int64_t MINIMA = NUM_SCALES * LANES * 2;
  static constexpr int64_t WHOLE_SCALES = MINIMA * (HAS_MINIMA ? 2 : 1);
  static constexpr int64_t WHOLE_MINIMA = WHOLE_SCALES + (HAS_WHOLE_SCALES ? GROUPS * LANES : 0);  // of two groups in turn
  static constexpr int64_t ZEROS = WHOLE_MINIMA + (HAS_WHOLE_SCALES && HAS_MINIMA ? GROUPS * LANES : 0);
  static constexpr int64_t END = ZEROS + (HAS_OWN_ZEROS ? GROUPS * LANES : 0);
  static constexpr int64_t CODES = (END + VECTOR - 1) / VECTOR * VECTOR;
  static constexpr int64_t SECTION_BYTES = VECTOR * (BITS == 8 ? 8 : BITS);
  static constexpr int64_t BLOCK_BYTES = CODES + SECTIONS * SECTION_BYTES;
};

// ---------------------------------------------------------------------------------------------- the types of files

enum FormId : int32_t { Q4, Q4_MIN, Q5, Q5_MIN, Q8, TABLE, K_Q2, K_Q3, K_Q4, K_Q5, K_Q6, K_TABLE, Q4_ZEROS, Q8_ZEROS, NUM_FORMS };

// Calls `body` with the form of this number.
template <typename Body>
auto with_form(int32_t id, Body body) {
  switch (id) {
    case Q4: return body.template operator()<Form<4, 32, false, false, false>>();
    case Q4_MIN: return body.template operator()<Form<4, 32, false, true, false>>();
    case Q5: return body.template operator()<Form<5, 32, false, false, false>>();
    case Q5_MIN: return body.template operator()<Form<5, 32, false, true, false>>();
    case Q8: return body.template operator()<Form<8, 32, false, false, false>>();
    case TABLE: return body.template operator()<Form<4, 32, false, false, true>>();
    case K_Q2: return body.template operator()<Form<4, 16, true, true, false>>();
    case K_Q3: return body.template operator()<Form<4, 16, true, false, false>>();
    case K_Q4: return body.template operator()<Form<4, 32, true, true, false>>();
    case K_Q5: return body.template operator()<Form<5, 32, true, true, false>>();
    case K_Q6: return body.template operator()<Form<6, 16, true, false, false>>();
    case K_TABLE: return body.template operator()<Form<4, 32, true, false, true>>();
    case Q4_ZEROS: return body.template operator()<Form<4, 32, false, false, false, true>>();
    case Q8_ZEROS: return body.template operator()<Form<8, 32, false, false, false, true>>();
    default: STD_TORCH_CHECK(false, "weights of an unknown form");
  }
}

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A row's block as its file has it, taken apart. Scales are the bits of float16, or of bfloat16.
struct FileBlock {
  uint8_t codes[256];
  uint16_t scale, minimum;
  uint8_t zero;
  int8_t whole_scales[16];
  uint8_t whole_minima[16];
};

struct FileType {
  int64_t id, block, bytes;  // numbers and bytes of a block in the file
  FormId form;
  int32_t zero;  // what a code is less than its number; of a table, of the numbers as they are kept; where groups have their own
                 // zeros, what codes are lowered by to have 8 bits with a sign
  const int8_t* table;
  bool has_bfloat16_scales;
  void (*take_apart)(const uint8_t* from, FileBlock& to);
};

uint16_t two_bytes(const uint8_t* from) {
  uint16_t value;
  std::memcpy(&value, from, 2);
  return value;
}

// 32 codes of 4 bits, the first 16 in the lower halves of their bytes; `bits`: a fifth of each.
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

void of_q4_0(const uint8_t* from, FileBlock& to) { to.scale = two_bytes(from), half_bytes(from + 2, 0, to.codes); }
void of_q4_1(const uint8_t* from, FileBlock& to) { to.scale = two_bytes(from), to.minimum = two_bytes(from + 2), half_bytes(from + 4, 0, to.codes); }
void of_q5_0(const uint8_t* from, FileBlock& to) { to.scale = two_bytes(from), half_bytes(from + 6, fifth_bits(from + 2), to.codes); }
void of_q5_1(const uint8_t* from, FileBlock& to) { to.scale = two_bytes(from), to.minimum = two_bytes(from + 2), half_bytes(from + 8, fifth_bits(from + 4), to.codes); }
void of_q8_0(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from);
  for (int i = 0; i < 32; i++) to.codes[i] = from[2 + i] ^ 128;
}
void of_mxfp4(const uint8_t* from, FileBlock& to) {
  // the scale is 2^(e - 128), a number of bfloat16; below 2^-126 one bit of its fraction
  to.scale = from[0] >= 2 ? (from[0] - 1) << 7 : 0x20 << from[0];
  half_bytes(from + 1, 0, to.codes);
}

void of_q2_k(const uint8_t* from, FileBlock& to) {
  const uint8_t* packed = from + 16;
  for (int i = 0; i < 16; i++) to.whole_scales[i] = from[i] & 15, to.whole_minima[i] = from[i] >> 4;
  for (int k = 0; k < 256; k++) to.codes[k] = packed[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
  to.scale = two_bytes(from + 80), to.minimum = two_bytes(from + 82);
}
void of_q3_k(const uint8_t* from, FileBlock& to) {
  const uint8_t *high = from, *packed = from + 32, *scales = from + 96;
  for (int i = 0; i < 16; i++) {
    int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
    to.whole_scales[i] = (low | (scales[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32;
  }
  for (int k = 0; k < 256; k++)  // from -4 to 3; 4 is zero
    to.codes[k] = (packed[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3) | (high[k % 32] >> (k / 32) & 1) << 2;
  to.scale = two_bytes(from + 108);
}
void k_scales(const uint8_t* packed, FileBlock& to) {  // 8 scales and 8 minima of 6 bits
  for (int i = 0; i < 4; i++) {
    to.whole_scales[i] = packed[i] & 63, to.whole_minima[i] = packed[i + 4] & 63;
    to.whole_scales[i + 4] = (packed[i + 8] & 15) | (packed[i] >> 2 & 48);
    to.whole_minima[i + 4] = packed[i + 8] >> 4 | (packed[i + 4] >> 2 & 48);
  }
}
void of_q4_k(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from), to.minimum = two_bytes(from + 2), k_scales(from + 4, to);
  const uint8_t* packed = from + 16;
  for (int part = 0; part < 4; part++)
    for (int i = 0; i < 32; i++) to.codes[part * 64 + i] = packed[part * 32 + i] & 15, to.codes[part * 64 + 32 + i] = packed[part * 32 + i] >> 4;
}
void of_q5_k(const uint8_t* from, FileBlock& to) {
  to.scale = two_bytes(from), to.minimum = two_bytes(from + 2), k_scales(from + 4, to);
  const uint8_t *high = from + 16, *packed = from + 48;
  for (int part = 0; part < 4; part++)
    for (int i = 0; i < 32; i++) {
      to.codes[part * 64 + i] = (packed[part * 32 + i] & 15) | (high[i] >> (2 * part) & 1) << 4;
      to.codes[part * 64 + 32 + i] = packed[part * 32 + i] >> 4 | (high[i] >> (2 * part + 1) & 1) << 4;
    }
}
void of_q6_k(const uint8_t* from, FileBlock& to) {
  const uint8_t *packed = from, *high = from + 128;
  for (int part = 0; part < 2; part++)
    for (int i = 0; i < 32; i++) {
      uint8_t first = packed[part * 64 + i], second = packed[part * 64 + 32 + i], bits = high[part * 32 + i];
      uint8_t* codes = to.codes + part * 128 + i;
      codes[0] = (first & 15) | (bits & 3) << 4, codes[32] = (second & 15) | (bits >> 2 & 3) << 4;
      codes[64] = first >> 4 | (bits >> 4 & 3) << 4, codes[96] = second >> 4 | (bits >> 6) << 4;
    }
  std::memcpy(to.whole_scales, from + 192, 16);
  to.scale = two_bytes(from + 208);
}
void of_iq4_xs(const uint8_t* from, FileBlock& to) {
  uint16_t high = two_bytes(from + 2);
  to.scale = two_bytes(from);
  for (int i = 0; i < 8; i++) {
    to.whole_scales[i] = ((from[4 + i / 2] >> (i % 2 * 4) & 15) | (high >> (2 * i) & 3) << 4) - 32;
    half_bytes(from + 8 + 16 * i, 0, to.codes + 32 * i);
  }
}

// Of directories: a scale, the zero where groups have their own, and 32 codes without a sign.
void of_four_bits_with_zero(const uint8_t* from, FileBlock& to) { to.scale = two_bytes(from), to.zero = from[2], half_bytes(from + 3, 0, to.codes); }
void of_eight_bits(const uint8_t* from, FileBlock& to) { to.scale = two_bytes(from), std::memcpy(to.codes, from + 2, 32); }
void of_eight_bits_with_zero(const uint8_t* from, FileBlock& to) { to.scale = two_bytes(from), to.zero = from[2], std::memcpy(to.codes, from + 3, 32); }

constexpr FileType FILE_TYPES[] = {  // numbered as GGUF numbers them; from 1000 on, of directories
    {2, 32, 18, Q4, 8, nullptr, false, of_q4_0},
    {3, 32, 20, Q4_MIN, 0, nullptr, false, of_q4_1},
    {6, 32, 22, Q5, 16, nullptr, false, of_q5_0},
    {7, 32, 24, Q5_MIN, 0, nullptr, false, of_q5_1},
    {8, 32, 34, Q8, 128, nullptr, false, of_q8_0},
    {10, 256, 84, K_Q2, 0, nullptr, false, of_q2_k},
    {11, 256, 110, K_Q3, 4, nullptr, false, of_q3_k},
    {12, 256, 144, K_Q4, 0, nullptr, false, of_q4_k},
    {13, 256, 176, K_Q5, 0, nullptr, false, of_q5_k},
    {14, 256, 210, K_Q6, 32, nullptr, false, of_q6_k},
    {20, 32, 18, TABLE, 128, IQ4_VALUES, false, of_q4_0},
    {23, 256, 136, K_TABLE, 128, IQ4_VALUES, false, of_iq4_xs},
    {39, 32, 17, TABLE, 128, MXFP4_VALUES, true, of_mxfp4},
    {1000, 32, 18, Q4, 8, nullptr, false, of_q4_0},
    {1001, 32, 18, Q4, 8, nullptr, true, of_q4_0},
    {1002, 32, 19, Q4_ZEROS, 0, nullptr, false, of_four_bits_with_zero},
    {1003, 32, 19, Q4_ZEROS, 0, nullptr, true, of_four_bits_with_zero},
    {1004, 32, 34, Q8, 128, nullptr, false, of_eight_bits},
    {1005, 32, 34, Q8, 128, nullptr, true, of_eight_bits},
    {1006, 32, 35, Q8_ZEROS, 128, nullptr, false, of_eight_bits_with_zero},
    {1007, 32, 35, Q8_ZEROS, 128, nullptr, true, of_eight_bits_with_zero},
};

const FileType& file_type(int64_t id) {
  for (const FileType& type : FILE_TYPES)
    if (type.id == id) return type;
  STD_TORCH_CHECK(false, "no weights can be packed of type ", id);
}

// ------------------------------------------------------------------------------------------------- how weights lie

constexpr char MAGIC[8] = {'g', 'r', 'o', 'u', 'p', 'e', 'd', '1'};
constexpr int64_t MOST_PARTS = 64;

struct alignas(LINE) Head {
  char magic[8];
  int32_t num_parts, in_whole_numbers, lanes;
};
struct alignas(LINE) Part {
  int64_t type, num_outputs, num_inputs, offset;  // offset: of its panels, from the head

  const FileType& of() const { return file_type(type); }
  int64_t blocks() const { return with_form(of().form, [&]<typename F>() { return (num_inputs + F::BLOCK - 1) / F::BLOCK; }); }
  int64_t panel_size() const { return with_form(of().form, [&]<typename F>() { return blocks() * F::BLOCK_BYTES; }); }
  int64_t pairs() const { return (num_outputs + 2 * LANES - 1) / (2 * LANES); }  // of panels
  int64_t size() const { return (2 * pairs() * panel_size() + LINE - 1) / LINE * LINE; }
};

struct Weights {
  const Head* head;
  const Part* parts;

  explicit Weights(const Tensor& bytes) {
    STD_TORCH_CHECK(are_group_quantised(bytes), "weights must be bytes that were packed for this processor");
    head = numbers<Head>(bytes);
    parts = reinterpret_cast<const Part*>(head + 1);
    int64_t size = bytes.numel();
    STD_TORCH_CHECK(head->num_parts > 0 && head->num_parts <= MOST_PARTS && size >= int64_t(sizeof(Head) + head->num_parts * sizeof(Part)), "weights must be whole");
    for (const Part& part : *this) STD_TORCH_CHECK(part.num_inputs == parts->num_inputs && part.offset + part.size() <= size, "weights must be whole");
  }
  const Part* begin() const { return parts; }
  const Part* end() const { return parts + head->num_parts; }
  uint8_t* panels(const Part& part) const { return reinterpret_cast<uint8_t*>(const_cast<Head*>(head)) + part.offset; }
  int64_t num_outputs() const {
    int64_t sum = 0;
    for (const Part& part : *this) sum += part.num_outputs;
    return sum;
  }
};

// ---------------------------------------------------------------------------------------------------------- packing

// Quads 2 i and 2 i + 1 of a section.
template <int BITS>
void put_quads(uint8_t* section, int i, Bytes first, Bytes second) {
  auto put = [&](int64_t place, Bytes more) {
    Bytes both = load(section + place * VECTOR) | more;
    std::memcpy(section + place * VECTOR, &both, VECTOR);
  };
  if constexpr (BITS == 8) {
    std::memcpy(section + 2 * i * VECTOR, &first, VECTOR);
    std::memcpy(section + (2 * i + 1) * VECTOR, &second, VECTOR);
  } else {
    put(i, (first & 15) | second << 4);
    if constexpr (BITS == 5) put(4, (first >> 4) << 2 * i | (second >> 4) << (2 * i + 1));
    if constexpr (BITS == 6) put(4 + i / 2, (first >> 4) << (i % 2 * 4) | (second >> 4) << (i % 2 * 4 + 2));
  }
}

// Columns of `count` lanes of a block, which are zeros before, from the rows' blocks in the file.
template <typename F>
void pack_block(const FileType& type, const uint8_t* const (&rows)[LANES], int64_t count, int64_t columns, uint8_t* to) {
  FileBlock blocks[LANES];
  for (int64_t k = 0; k < columns; k += type.block) {
    int64_t group = F::HAS_WHOLE_SCALES ? 0 : k / F::GROUP;  // files have a block for each
    for (int64_t lane = 0; lane < count; lane++) {
      FileBlock& block = blocks[lane];
      type.take_apart(rows[lane] + k / type.block * type.bytes, block);
      reinterpret_cast<uint16_t*>(to)[group * LANES + lane] = block.scale;
      if constexpr (F::HAS_MINIMA) reinterpret_cast<uint16_t*>(to + F::MINIMA)[group * LANES + lane] = block.minimum;
      if constexpr (F::HAS_OWN_ZEROS) to[F::ZEROS + group * LANES + lane] = block.zero;
      for (int64_t g = 0; F::HAS_WHOLE_SCALES && g < F::GROUPS; g++) {
        to[F::WHOLE_SCALES + g * LANES + lane] = block.whole_scales[g];
        if constexpr (F::HAS_MINIMA) to[F::WHOLE_MINIMA + g / 2 * 2 * LANES + lane * 2 + g % 2] = block.whole_minima[g];
      }
    }
    for (int64_t i = 0; i < type.block; i += 8) {
      Bytes quads[2] = {};
      for (int64_t lane = 0; lane < count; lane++)
        for (int quad = 0; quad < 2; quad++) std::memcpy(reinterpret_cast<uint8_t*>(&quads[quad]) + lane * 4, blocks[lane].codes + i + 4 * quad, 4);
      int64_t column = k + i;
      put_quads<F::BITS>(to + F::CODES + column / SECTION * F::SECTION_BYTES, column % SECTION / 8, quads[0], quads[1]);
    }
  }
}

// ------------------------------------------------------------------------------------------------ reading weights

template <int BITS>
struct Section {
  const uint8_t* codes;

  // The codes of quads 2 i and 2 i + 1.
  void quads(int i, Bytes& first, Bytes& second) const {
    typedef uint16_t Words __attribute__((vector_size(VECTOR)));
    if constexpr (BITS == 8) {
      first = load(codes + 2 * i * VECTOR), second = load(codes + (2 * i + 1) * VECTOR);
      return;
    }
    Bytes both = load(codes + i * VECTOR);
    first = both & 15, second = (Bytes)((Words)both >> 4) & 15;
    if constexpr (BITS == 5) {
      Words bits = (Words)load(codes + 4 * VECTOR);
      first |= (Bytes)(i < 3 ? bits << (4 - 2 * i) : bits >> 2) & 16;
      second |= (Bytes)(i < 2 ? bits << (3 - 2 * i) : bits >> (2 * i - 3)) & 16;
    }
    if constexpr (BITS == 6) {
      Words bits = (Words)load(codes + (4 + i / 2) * VECTOR);
      first |= (Bytes)(i % 2 ? bits : bits << 4) & 48;
      second |= (Bytes)(i % 2 ? bits >> 2 : bits << 2) & 48;
    }
  }
};

inline Bytes table_of(const int8_t* values) {  // as numbers from 0 to 255
  Bytes table = {};
  for (int i = 0; values && i < VECTOR; i++) table[i] = static_cast<uint8_t>(values[i % 16] + 128);
  return table;
}

inline Vec scales_at(const uint8_t* from, bool are_bfloat16) {
  if (!are_bfloat16) return widened(reinterpret_cast<const Half*>(from), 0);
  typedef Several<uint16_t> Bits;
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const Bits*>(from), Int) << 16);
}
inline Vec whole_scales_at(const uint8_t* from) {
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const Several<int8_t>*>(from), Int), Vec);
}
inline Int zeros_at(const uint8_t* from) { return __builtin_convertvector(*reinterpret_cast<const Several<uint8_t>*>(from), Int); }
inline Vec whole_minima_at(const uint8_t* from, int second) {
  typedef Several<uint16_t> Both;
  Int both = __builtin_convertvector(*reinterpret_cast<const Both*>(from), Int);
  return __builtin_convertvector(second ? both >> 8 : both & 255, Vec);
}

// The numbers of a block, (BLOCK, LANES) float32: exactly those of the file.
template <typename F>
void widen_block(const FileType& type, const uint8_t* block, float* to) {
  Bytes table = table_of(type.table);
  for (int64_t s = 0; s < F::SECTIONS; s++) {
    Section<F::BITS> section{block + F::CODES + s * F::SECTION_BYTES};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      Bytes quads[2];
      section.quads(i, quads[0], quads[1]);
      int64_t group = (s * SECTION + 8 * i) / F::GROUP;
      Int zero = F::HAS_OWN_ZEROS ? zeros_at(block + F::ZEROS + group * LANES) : Int{} + type.zero;
      Vec scale, minimum = {};
      if constexpr (F::HAS_WHOLE_SCALES) {
        scale = scales_at(block, type.has_bfloat16_scales) * whole_scales_at(block + F::WHOLE_SCALES + group * LANES);
        if constexpr (F::HAS_MINIMA) minimum = scales_at(block + F::MINIMA, false) * whole_minima_at(block + F::WHOLE_MINIMA + group / 2 * 2 * LANES, group % 2);
      } else {
        scale = scales_at(block + group * LANES * 2, type.has_bfloat16_scales);
        if constexpr (F::HAS_MINIMA) minimum = scales_at(block + F::MINIMA + group * LANES * 2, false);
      }
      for (int quad = 0; quad < 2; quad++) {
        Int codes = (Int)(F::IS_TABLE ? looked_up(table, quads[quad]) : quads[quad]);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
          Vec number = scale * __builtin_convertvector((codes >> 8 * k & 255) - zero, Vec);
          if constexpr (F::HAS_MINIMA) number = F::HAS_WHOLE_SCALES ? number - minimum : number + minimum;
          store(to + (s * SECTION + 8 * i + 4 * quad + k) * LANES, number);
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ rows in whole numbers

// sums + a lane's four codes times the four numbers of `quad`
inline Int quad_added(Int sums, Bytes codes, int32_t quad) {
#if defined(WIDEST) && defined(__AVX512VNNI__)
  return (Int)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(quad));
#elif defined(__AVX2__) && defined(__AVXVNNI__) && !defined(WIDEST)
  return (Int)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(quad));
#elif defined(__x86_64__) && (defined(WIDEST) || defined(__AVX2__))
  // columns 0 and 2 of a lane, then 1 and 3, as pairs of 16 bits
  typedef int16_t Words __attribute__((vector_size(VECTOR)));
  typedef uint16_t Plain __attribute__((vector_size(VECTOR)));
  Words row = (Words)(Int{} + quad), even = (Words)((Plain)row << 8) >> 8, odd = row >> 8;
  Words even_codes = (Words)((Plain)codes & 255), odd_codes = (Words)((Plain)codes >> 8);
#if defined(WIDEST)
  return sums + (Int)_mm512_madd_epi16((__m512i)even_codes, (__m512i)even) + (Int)_mm512_madd_epi16((__m512i)odd_codes, (__m512i)odd);
#else
  return sums + (Int)_mm256_madd_epi16((__m256i)even_codes, (__m256i)even) + (Int)_mm256_madd_epi16((__m256i)odd_codes, (__m256i)odd);
#endif
#elif defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
  return (Int)vusdotq_s32((int32x4_t)sums, (uint8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(quad)));
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
  // codes are below 256, and this multiplies numbers up to 127: of 128 less, and 128 times the row's numbers
  int8x16_t row = vreinterpretq_s8_s32(vdupq_n_s32(quad));
  int32x4_t added = vdotq_s32((int32x4_t)sums, vreinterpretq_s8_u8((uint8x16_t)(codes ^ 128)), row);
  return (Int)vaddq_s32(added, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), row), 7));
#else
  Int four = (Int)codes;
  return sums + (four & 255) * int8_t(quad) + (four >> 8 & 255) * int8_t(quad >> 8) + (four >> 16 & 255) * int8_t(quad >> 16) + (Int)((four >> 24) & 255) * (quad >> 24);
#endif
}

// sums + a lane's two minima times the two numbers of `pair`
inline Int minima_added(Int sums, const uint8_t* minima, int32_t pair) {
  typedef int16_t Words __attribute__((vector_size(VECTOR)));
  typedef uint8_t Narrow __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
  Words both = __builtin_convertvector(*reinterpret_cast<const Narrow*>(minima), Words);
#if defined(WIDEST) && defined(__AVX512VNNI__)
  return (Int)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)both, _mm512_set1_epi32(pair));
#elif defined(WIDEST)
  return sums + (Int)_mm512_madd_epi16((__m512i)both, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
  return sums + (Int)_mm256_madd_epi16((__m256i)both, _mm256_set1_epi32(pair));
#else
  Int whole = (Int)both;
  return sums + (whole << 16 >> 16) * int32_t(int16_t(pair)) + (whole >> 16) * (pair >> 16);
#endif
}

// Rows rounded to 8 bits. `aside` has for each group of a row what its sum (of numbers) gives beside the codes:
// - where a code stands for zero: minus that code times the sum, with which sums of products begin;
// - where that code is each group's own: the sum;
// - for whole minima: the sums of two groups as a pair of 16 bits;
// - for other minima: the sum times the step, a float32.
struct Rows {
  int8_t* numbers;  // (rows, padded K)
  float* steps;     // (rows, padded K / STEP)
  int32_t* aside;   // (rows, padded K / GROUP); of whole minima, half as many
  int64_t width, num_steps, num_aside;
  int64_t stride;  // bytes from row to row: an odd number of lines, or rows would share few places of the first cache
};

// Numbers as whole ones up to 127 times a step, which this gives; not finite where one of them is not.
template <int64_t COUNT>
float rounded(const float* x, int8_t* to) {
  Vec highest = {}, spoilt = {};
  for (int64_t k = 0; k < COUNT; k += LANES) {
    Vec value = load(x + k);
    highest = larger(value < 0.f ? -value : value, highest);
    spoilt += value - value;
  }
  float most = 0, broken = 0;
  for (int lane = 0; lane < LANES; lane++) most = std::max(most, highest[lane]), broken += spoilt[lane];
  Vec per_step = all(most > 0 ? 127.f / most : 0.f);
  for (int64_t k = 0; k < COUNT; k += LANES) {
    Int whole = (Int)(load(x + k) * per_step + ROUNDER) - (Int)all(ROUNDER);
    *reinterpret_cast<Several<int8_t>*>(to + k) = __builtin_convertvector(whole, Several<int8_t>);
  }
  return most / 127.f + broken;
}

template <typename F>
void round_row(const float* x, int64_t K, int32_t zero, const Rows& to, int64_t row) {
  int8_t* numbers = to.numbers + row * to.stride;
  float* steps = to.steps + row * to.num_steps;
  int32_t* aside = to.aside + row * to.num_aside;
  for (int64_t step = 0; step < to.num_steps; step++) {
    int64_t first = step * F::STEP;
    float padded[F::STEP] = {};
    const float* from = x + first;
    if (first + F::STEP > K) from = static_cast<const float*>(std::memcpy(padded, from, std::max<int64_t>(0, K - first) * sizeof(float)));
    steps[step] = rounded<F::STEP>(from, numbers + first);
    for (int64_t group = first / F::GROUP; group < (first + F::STEP) / F::GROUP; group++) {
      int32_t sum = 0;
      for (int64_t k = 0; k < F::GROUP; k++) sum += numbers[group * F::GROUP + k];
      if constexpr (F::HAS_OWN_ZEROS) aside[group] = sum;
      else if constexpr (F::HAS_ZERO) aside[group] = -zero * sum;
      else if constexpr (!F::HAS_WHOLE_SCALES) aside[group] = std::bit_cast<int32_t>(sum * steps[step]);
      else aside[group / 2] = group % 2 ? (aside[group / 2] & 0xffff) | sum << 16 : sum & 0xffff;
    }
  }
}

// -------------------------------------------------------------------------------------------------- whole products

// How far ahead weights are fetched, into the second cache.
constexpr int64_t AHEAD = 8 * 4096;

// The sums (M, J, LANES) of M rows with J panels, the first of which is at `panels`.
template <typename F, int M, int J>
[[gnu::noinline]] void whole_block(const Rows& rows, int64_t row, const FileType& type, const uint8_t* panels, int64_t size, int64_t ahead, float* results) {
  Vec sums[M][J] = {};
  Bytes table = table_of(F::IS_TABLE ? type.table : nullptr);
  bool are_bfloat16 = type.has_bfloat16_scales;
  const int8_t* x = rows.numbers + row * rows.stride;
  const float* steps = rows.steps + row * rows.num_steps;
  const int32_t* aside = rows.aside + row * rows.num_aside;
  for (int64_t k = 0; k < rows.width; k += F::BLOCK, panels += F::BLOCK_BYTES) {
    Vec parts[M][J] = {};  // where scales are whole numbers: the block's, before its own scale
#pragma GCC unroll 2
    for (int j = 0; j < J; j++)
#pragma GCC unroll 8
      for (int64_t line = 0; line < F::CODES; line += LINE) __builtin_prefetch(panels + j * size + line + ahead, 0, 2);
    for (int64_t s = 0; s < F::SECTIONS; s++) {
      const uint8_t* codes = panels + F::CODES + s * F::SECTION_BYTES;
#pragma GCC unroll 2
      for (int half = 0; half < SECTION / F::GROUP; half++) {
        constexpr int VECTORS = F::GROUP / 8;
        int64_t group = s * (SECTION / F::GROUP) + half;
        Int whole[M][J] = {};
        if constexpr (F::HAS_ZERO)
#pragma GCC unroll 8
          for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int j = 0; j < J; j++) whole[m][j] = Int{} + aside[m * rows.num_aside + k / F::GROUP + group];
        if constexpr (F::HAS_OWN_ZEROS)
#pragma GCC unroll 2
          for (int j = 0; j < J; j++) {
            Int zeros = zeros_at(panels + j * size + F::ZEROS + group * LANES);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) whole[m][j] = zeros * -aside[m * rows.num_aside + k / F::GROUP + group];
          }
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) {
          int at = half * VECTORS + i;
          Bytes first[J], second[J];
#pragma GCC unroll 2
          for (int j = 0; j < J; j++) {
            const uint8_t* of = codes + j * size;
            Section<F::BITS>{of}.quads(at, first[j], second[j]);
            if constexpr (F::IS_TABLE) first[j] = looked_up(table, first[j]), second[j] = looked_up(table, second[j]);
#pragma GCC unroll 2
            for (int64_t line = at * F::SECTION_BYTES / 4; line < (at + 1) * F::SECTION_BYTES / 4; line += LINE) __builtin_prefetch(of + line + ahead, 0, 2);
          }
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) {
            int32_t one, other;
            std::memcpy(&one, x + m * rows.stride + k + s * SECTION + 8 * at, 4);
            std::memcpy(&other, x + m * rows.stride + k + s * SECTION + 8 * at + 4, 4);
#pragma GCC unroll 2
            for (int j = 0; j < J; j++) whole[m][j] = quad_added(quad_added(whole[m][j], first[j], one), second[j], other);
          }
        }
        Vec scales[J];
#pragma GCC unroll 2
        for (int j = 0; j < J; j++)
          scales[j] = F::HAS_WHOLE_SCALES ? whole_scales_at(panels + j * size + F::WHOLE_SCALES + group * LANES) : scales_at(panels + j * size + group * LANES * 2, are_bfloat16);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          Vec step = all(F::HAS_WHOLE_SCALES ? 0.f : steps[m * rows.num_steps + (k + group * F::GROUP) / F::STEP]);
#pragma GCC unroll 2
          for (int j = 0; j < J; j++) {
            Vec sum = __builtin_convertvector(whole[m][j], Vec);
            if constexpr (F::HAS_WHOLE_SCALES) parts[m][j] = multiply_add(sum, scales[j], parts[m][j]);
            else sums[m][j] = multiply_add(sum * scales[j], step, sums[m][j]);
          }
        }
        if constexpr (!F::HAS_WHOLE_SCALES && F::HAS_MINIMA)
#pragma GCC unroll 2
          for (int j = 0; j < J; j++) {
            Vec minima = scales_at(panels + j * size + F::MINIMA + group * LANES * 2, false);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m][j] = multiply_add(minima, all(std::bit_cast<float>(aside[m * rows.num_aside + k / F::GROUP + group])), sums[m][j]);
          }
      }
    }
    if constexpr (F::HAS_WHOLE_SCALES)
#pragma GCC unroll 2
      for (int j = 0; j < J; j++) {
        const uint8_t* block = panels + j * size;
        Vec scale = scales_at(block, are_bfloat16);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          Vec step = all(steps[m * rows.num_steps + k / F::STEP]);
          sums[m][j] = multiply_add(parts[m][j] * scale, step, sums[m][j]);
          if constexpr (F::HAS_MINIMA) {
            Int least = {};
#pragma GCC unroll 8
            for (int pair = 0; pair < F::GROUPS / 2; pair++) least = minima_added(least, block + F::WHOLE_MINIMA + pair * 2 * LANES, aside[m * rows.num_aside + k / F::GROUP / 2 + pair]);
            sums[m][j] = multiply_add(__builtin_convertvector(least, Vec) * scales_at(block + F::MINIMA, false), -step, sums[m][j]);
          }
        }
      }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int j = 0; j < J; j++) store(results + (m * J + j) * LANES, sums[m][j]);
}

// ------------------------------------------------------------------------------------------------ float32 products

// The same in float32: J panels are widened a block at a time.
template <typename F, int J>
void float_blocks(const float* x, int64_t M, int64_t K, const FileType& type, const uint8_t* panels, int64_t size, float* results) {
  constexpr int ROWS = 8;
  float wide[J][F::BLOCK * LANES];
  std::memset(results, 0, M * J * LANES * sizeof(float));
  for (int64_t k = 0; k < K; k += F::BLOCK, panels += F::BLOCK_BYTES) {
    int64_t columns = std::min(F::BLOCK, K - k);
#pragma GCC unroll 2
    for (int j = 0; j < J; j++) {
      for (int64_t line = 0; line < F::BLOCK_BYTES; line += LINE) __builtin_prefetch(panels + j * size + line + AHEAD, 0, 2);
      widen_block<F>(type, panels + j * size, wide[j]);
    }
    auto add = [&]<int COUNT>(int64_t row) __attribute__((always_inline)) {
      Vec sums[COUNT][J];
#pragma GCC unroll 8
      for (int m = 0; m < COUNT; m++)
#pragma GCC unroll 2
        for (int j = 0; j < J; j++) sums[m][j] = load(results + ((row + m) * J + j) * LANES);
      for (int64_t i = 0; i < columns; i++)
#pragma GCC unroll 8
        for (int m = 0; m < COUNT; m++) {
          Vec value = all(x[(row + m) * K + k + i]);
#pragma GCC unroll 2
          for (int j = 0; j < J; j++) sums[m][j] = multiply_add(value, load(wide[j] + i * LANES), sums[m][j]);
        }
#pragma GCC unroll 8
      for (int m = 0; m < COUNT; m++)
#pragma GCC unroll 2
        for (int j = 0; j < J; j++) store(results + ((row + m) * J + j) * LANES, sums[m][j]);
    };
    int64_t row = 0;
    for (; row + ROWS <= M; row += ROWS) add.template operator()<ROWS>(row);
    for (; row + 2 <= M; row += 2) add.template operator()<2>(row);
    for (; row < M; row++) add.template operator()<1>(row);
  }
}

// ---------------------------------------------------------------------------------------------------- all of it

// Rows that are multiplied together, at most: in 8 bits they stay in the second cache while all weights pass by.
constexpr int64_t ROWS_AT_ONCE = 128;
constexpr int64_t MOST_ROWS = 8;  // of a block whose sums stay in registers

struct Task {
  Weights weights;
  const float *x, *bias;
  int64_t M, K, N;
  std::array<Rows, NUM_FORMS> rows;                             // of each form that takes part
  std::array<std::unique_ptr<float[]>, NUM_FORMS> memory = {};  // where these lie
};

// Where results go: that of a row and a column of the whole product lies at row * stride + column.
struct Target {
  float* at;
  int64_t stride;
};

void finish(const Task& task, const Target& to, const float* results, int64_t count, int64_t row, int64_t column, int64_t width, int64_t lanes) {
  for (int64_t m = 0; m < count; m++) {
    const float* from = results + m * lanes;
    float* y = to.at + (row + m) * to.stride + column;
    for (int64_t n = 0; n < width; n++) y[n] = task.bias ? from[n] + task.bias[column + n] : from[n];
  }
}

// One pair of panels by all rows, whose blocks have M of them.
template <typename F, int M>
void pair_by_blocks(const Task& task, const Target& to, const Part& part, const uint8_t* panels, int64_t column, int64_t width) {
  const Rows& rows = task.rows[part.of().form];
  constexpr int J = M <= 4 ? 2 : 1;
  int64_t size = part.panel_size();
  for (int j = 0; j < 2 && j * LANES < width; j += J)
    for (int64_t row = 0; row < task.M; row += M) {
      float results[M * J * LANES];
      whole_block<F, M, J>(rows, row, part.of(), panels + j * size, size, row ? 0 : AHEAD, results);
      finish(task, to, results, std::min<int64_t>(M, task.M - row), row, column + j * LANES, std::min<int64_t>(J * LANES, width - j * LANES), J * LANES);
    }
}

// ------------------------------------------------------------------------------------ the same in tile registers

#if defined(HAS_TILES)
// Rows from which on a pass is computed in tiles; a few blocks of rows are faster in vectors.
constexpr int64_t LEAST_ROWS_IN_TILES = 17;
// Columns whose sums are kept until a row is finished with them.
constexpr int64_t CHUNK = 256;

// Registers: sums of two groups by two panels, rows of two groups, weights of two panels.
template <typename F>
TileRegisters registers_for(int64_t rows) {
  TileShape sums{rows, TILE_WIDTH}, numbers{rows, F::GROUP}, weights{F::GROUP / 4, TILE_WIDTH};
  return TileRegisters({sums, sums, sums, sums, numbers, numbers, weights, weights});
}

// What a thread needs of a chunk of two panels.
template <typename F>
struct TileChunk {
  static constexpr int64_t GROUPS = CHUNK / F::GROUP, BLOCKS = CHUNK / F::BLOCK;
  alignas(LINE) int8_t codes[2][CHUNK * LANES];  // less the code for zero, in quads
  alignas(LINE) float scales[2][GROUPS][LANES];
  alignas(LINE) float minima[2][GROUPS][LANES];        // of groups, or of blocks
  alignas(LINE) float block_scales[2][BLOCKS][LANES];  // where scales are whole numbers
  alignas(LINE) int32_t zeros[2][GROUPS][LANES];       // where groups have their own: less what codes are lowered by
  alignas(LINE) int32_t sums[2][GROUPS][TILE_ROWS][LANES];

  void widen(const FileType& type, const uint8_t* panels, int64_t size, int64_t blocks) {
    Bytes table = table_of(F::IS_TABLE ? type.table : nullptr), zero = Bytes{} + static_cast<uint8_t>(type.zero);
    for (int j = 0; j < 2; j++)
      for (int64_t b = 0; b < blocks; b++) {
        const uint8_t* block = panels + j * size + b * F::BLOCK_BYTES;
        for (int64_t line = 0; line < F::BLOCK_BYTES; line += LINE) __builtin_prefetch(block + line + AHEAD, 0, 2);
        for (int64_t s = 0; s < F::SECTIONS; s++)
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            Bytes quads[2];
            Section<F::BITS>{block + F::CODES + s * F::SECTION_BYTES}.quads(i, quads[0], quads[1]);
            for (int quad = 0; quad < 2; quad++) {
              Bytes numbers = (F::IS_TABLE ? looked_up(table, quads[quad]) : quads[quad]) - zero;
              std::memcpy(codes[j] + ((b * F::SECTIONS + s) * 8 + 2 * i + quad) * VECTOR, &numbers, VECTOR);
            }
          }
        for (int64_t g = 0; g < F::GROUPS; g++) {
          Vec scale = F::HAS_WHOLE_SCALES ? whole_scales_at(block + F::WHOLE_SCALES + g * LANES) : scales_at(block + g * LANES * 2, type.has_bfloat16_scales);
          store(scales[j][b * F::GROUPS + g], scale);
          if constexpr (F::HAS_OWN_ZEROS) *reinterpret_cast<Int*>(zeros[j][b * F::GROUPS + g]) = zeros_at(block + F::ZEROS + g * LANES) - type.zero;
          if constexpr (F::HAS_MINIMA && !F::HAS_WHOLE_SCALES) store(minima[j][b * F::GROUPS + g], scales_at(block + F::MINIMA + g * LANES * 2, false));
        }
        if constexpr (F::HAS_WHOLE_SCALES) store(block_scales[j][b], scales_at(block, type.has_bfloat16_scales));
        if constexpr (F::HAS_WHOLE_SCALES && F::HAS_MINIMA) store(minima[j][b], scales_at(block + F::MINIMA, false));
      }
  }

  // Products of a block of rows, from `x` on, with each group.
  void multiply(const int8_t* x, int64_t stride, int64_t groups) {
    for (int64_t group = 0; group < groups; group += 2) {
      auto one = [&]<int ODD>() __attribute__((always_inline)) {
        constexpr int SUMS = 2 * ODD, ROWS = 4 + ODD;
        int64_t g = group + ODD;
        clear_tile<SUMS>(), clear_tile<SUMS + 1>();
        load_tile<ROWS>(x + g * F::GROUP, stride);
        load_tile<6>(codes[0] + g * F::GROUP * LANES), load_tile<7>(codes[1] + g * F::GROUP * LANES);
        multiply_tiles<int8_t, 0, SUMS, ROWS, 6>(), multiply_tiles<int8_t, 0, SUMS + 1, ROWS, 7>();
        store_tile<SUMS>(sums[0][g], TILE_WIDTH), store_tile<SUMS + 1>(sums[1][g], TILE_WIDTH);
      };
      one.template operator()<0>(), one.template operator()<1>();
    }
  }

  // Adds the sums of ROWS_ADDED rows of this chunk to `results` (rows, 2, LANES), in the order of `whole_block`; rows from
  // `count` on are left out.
  static constexpr int ROWS_ADDED = 4;  // additions of a row wait for each other
  void add(const Rows& rows, int64_t row, int64_t m, int64_t count, int64_t k, int64_t blocks, const uint8_t* panels, int64_t size, float* results) const {
    const float* steps = rows.steps + row * rows.num_steps + k / F::STEP;
    const int32_t* aside = rows.aside + row * rows.num_aside + k / F::GROUP / (F::HAS_WHOLE_SCALES && F::HAS_MINIMA ? 2 : 1);
    for (int j = 0; j < 2; j++) {
      Vec totals[ROWS_ADDED];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS_ADDED; r++) totals[r] = load(results + (2 * r + j) * LANES);
      for (int64_t b = 0; b < blocks; b++) {
        Vec parts[ROWS_ADDED] = {};
#pragma GCC unroll 16
        for (int64_t g = 0; g < F::GROUPS; g++) {
          int64_t group = b * F::GROUPS + g;
          Vec scale = load(scales[j][group]);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS_ADDED; r++) {
            Int whole = *reinterpret_cast<const Int*>(sums[j][group][m + r]);
            if constexpr (F::HAS_OWN_ZEROS) whole -= *reinterpret_cast<const Int*>(zeros[j][group]) * aside[r * rows.num_aside + group];
            Vec sum = __builtin_convertvector(whole, Vec);
            if constexpr (F::HAS_WHOLE_SCALES) parts[r] = multiply_add(sum, scale, parts[r]);
            else totals[r] = multiply_add(sum * scale, all(steps[r * rows.num_steps + group]), totals[r]);
          }
          if constexpr (!F::HAS_WHOLE_SCALES && F::HAS_MINIMA)
#pragma GCC unroll 4
            for (int r = 0; r < ROWS_ADDED; r++) totals[r] = multiply_add(load(minima[j][group]), all(std::bit_cast<float>(aside[r * rows.num_aside + group])), totals[r]);
        }
        if constexpr (F::HAS_WHOLE_SCALES) {
          Int least[ROWS_ADDED] = {};
          const uint8_t* whole_minima = panels + j * size + b * F::BLOCK_BYTES + F::WHOLE_MINIMA;
          if constexpr (F::HAS_MINIMA)
#pragma GCC unroll 8
            for (int pair = 0; pair < F::GROUPS / 2; pair++)
#pragma GCC unroll 4
              for (int r = 0; r < ROWS_ADDED; r++) least[r] = minima_added(least[r], whole_minima + pair * 2 * LANES, aside[r * rows.num_aside + b * F::GROUPS / 2 + pair]);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS_ADDED; r++) {
            Vec step = all(steps[r * rows.num_steps + b]);
            totals[r] = multiply_add(parts[r] * load(block_scales[j][b]), step, totals[r]);
            if constexpr (F::HAS_MINIMA) totals[r] = multiply_add(__builtin_convertvector(least[r], Vec) * load(minima[j][b]), -step, totals[r]);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS_ADDED; r++)
        if (m + r < count) store(results + (2 * r + j) * LANES, totals[r]);
    }
  }
};

// One pair of panels by all rows, `rows_of_block` at a time.
template <typename F>
void pair_in_tiles(const Task& task, const Target& to, const Part& part, int64_t rows_of_block, const uint8_t* panels, int64_t column, int64_t width) {
  thread_local TileChunk<F> chunk;
  thread_local Scratch scratch;
  const Rows& rows = task.rows[part.of().form];
  int64_t size = part.panel_size();
  float* results = scratch.of((task.M + TILE_ROWS) * 2 * LANES);
  std::memset(results, 0, (task.M + TILE_ROWS) * 2 * LANES * sizeof(float));
  for (int64_t k = 0; k < rows.width; k += CHUNK) {
    int64_t blocks = std::min(CHUNK, rows.width - k) / F::BLOCK;
    const uint8_t* from = panels + k / F::BLOCK * F::BLOCK_BYTES;
    chunk.widen(part.of(), from, size, blocks);
    for (int64_t first = 0; first < task.M; first += rows_of_block) {
      chunk.multiply(rows.numbers + first * rows.stride + k, rows.stride, blocks * F::GROUPS);
      for (int64_t m = 0; m < rows_of_block; m += chunk.ROWS_ADDED) chunk.add(rows, first + m, m, rows_of_block, k, blocks, from, size, results + (first + m) * 2 * LANES);
    }
  }
  finish(task, to, results, task.M, 0, column, width, 2 * LANES);
}
#endif

template <typename F>
void multiply_pair(const Task& task, const Target& to, const Part& part, int64_t pair, int64_t column) {
  const uint8_t* panels = task.weights.panels(part) + 2 * pair * part.panel_size();
  int64_t width = std::min(2 * int64_t(LANES), part.num_outputs - 2 * LANES * pair);
  column += 2 * LANES * pair;
  if (!task.weights.head->in_whole_numbers) {
    thread_local Scratch scratch;
    float* results = scratch.of(task.M * 2 * LANES);
    float_blocks<F, 2>(task.x, task.M, task.K, part.of(), panels, part.panel_size(), results);
    return finish(task, to, results, task.M, 0, column, width, 2 * LANES);
  }
  int64_t blocks = (task.M + MOST_ROWS - 1) / MOST_ROWS, rows = (task.M + blocks - 1) / blocks;
  switch (rows) {
    case 1: return pair_by_blocks<F, 1>(task, to, part, panels, column, width);
    case 2: return pair_by_blocks<F, 2>(task, to, part, panels, column, width);
    case 3: return pair_by_blocks<F, 3>(task, to, part, panels, column, width);
    case 4: return pair_by_blocks<F, 4>(task, to, part, panels, column, width);
    case 5: case 6: return pair_by_blocks<F, 6>(task, to, part, panels, column, width);
    default: return pair_by_blocks<F, 8>(task, to, part, panels, column, width);
  }
}

// Rows in whole numbers for each form of the weights.
void round_rows(Task& task) {
  std::array<bool, NUM_FORMS> is_done{};
  for (const Part& part : task.weights) {
    const FileType& type = part.of();
    if (std::exchange(is_done[type.form], true)) continue;  // types that share a form have the same zero
    with_form(type.form, [&]<typename F>() {
      int64_t width = part.blocks() * F::BLOCK, steps = width / F::STEP, groups = width / F::GROUP;
      int64_t aside = F::HAS_WHOLE_SCALES && F::HAS_MINIMA ? groups / 2 : groups;
      int64_t num_rows = task.M + 2 * MOST_ROWS;  // the last block may reach beyond
      int64_t stride = (width + LINE - 1) / LINE * LINE;
      if (stride / LINE % 2 == 0) stride += LINE;
      float* memory = new float[num_rows * (steps + aside + stride / 4) + LINE / 4];
      task.memory[type.form].reset(memory);
      Rows& rows = task.rows[type.form];
      int8_t* numbers = reinterpret_cast<int8_t*>(memory) + (-reinterpret_cast<uintptr_t>(memory) & (LINE - 1));
      rows = {numbers, reinterpret_cast<float*>(numbers + num_rows * stride), nullptr, width, steps, aside, stride};
      rows.aside = reinterpret_cast<int32_t*>(rows.steps + num_rows * steps);
      std::memset(numbers + task.M * stride, 0, (num_rows - task.M) * stride);
      std::memset(rows.steps + task.M * steps, 0, (num_rows - task.M) * steps * sizeof(float));
      std::memset(rows.aside + task.M * aside, 0, (num_rows - task.M) * aside * sizeof(int32_t));
      auto round = [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) round_row<F>(task.x + row * task.K, task.K, type.zero, rows, row);
      };
      if (task.M * task.K < 1 << 16) round(0, task.M);
      else parallel_for(task.M, 1, round);
    });
  }
}

// Bytes of all panels; a range of these is a piece of a product.
int64_t bytes_of(const Weights& weights) {
  int64_t total = 0;
  for (const Part& part : weights) total += part.pairs() * part.panel_size();
  return total;
}

// Calls body(part, pair, end, column) for the pairs of panels that begin between two bytes, which are outputs from `column` on.
template <typename Body>
void for_pairs(const Weights& weights, int64_t first, int64_t last, Body body) {
  int64_t before = 0, column = 0;
  for (const Part& part : weights) {
    int64_t size = part.panel_size(), pairs = part.pairs();
    auto pair_from = [&](int64_t bytes) { return std::clamp<int64_t>((bytes - before + size - 1) / size, 0, pairs); };
    if (int64_t from = pair_from(first), to = pair_from(last); from < to) body(part, from, to, column);
    before += pairs * size, column += part.num_outputs;
  }
}

// Products with the pairs of panels that begin between two bytes.
void multiply(const Task& task, int64_t first, int64_t last, const Target& to) {
  for_pairs(task.weights, first, last, [&](const Part& part, int64_t pair, int64_t end, int64_t column) {
    with_form(part.of().form, [&]<typename F>() {
#if defined(HAS_TILES)
      if (task.weights.head->in_whole_numbers && has_tiles && task.M >= LEAST_ROWS_IN_TILES) {
        int64_t blocks = (task.M + TILE_ROWS - 1) / TILE_ROWS, rows = (task.M + blocks - 1) / blocks, size = part.panel_size();
        TileRegisters registers = registers_for<F>(rows);
        for (; pair < end; pair++) {
          const uint8_t* panels = task.weights.panels(part) + 2 * pair * size;
          int64_t before = 2 * LANES * pair, width = std::min<int64_t>(2 * LANES, part.num_outputs - before);
          pair_in_tiles<F>(task, to, part, rows, panels, column + before, width);
        }
        return;
      }
#endif
      for (; pair < end; pair++) multiply_pair<F>(task, to, part, pair, column);
    });
  });
}

// A product of some rows, in pieces of its weights' bytes.
struct SharedProduct : Work {
  Tensor x, bytes;
  std::optional<Tensor> bias;
  Task task;
  float* y;
  int64_t size;

  SharedProduct(Task given, const Tensor& x, const Tensor& bytes, const std::optional<Tensor>& bias, float* y)
      : x(x), bytes(bytes), bias(bias), task(std::move(given)), y(y), size(bytes_of(task.weights)) {
    num_pieces = pieces_of(size, 1);
  }
  int64_t first(int64_t piece) const { return size * piece / num_pieces; }
  // The first output of a piece and the one after its last.
  std::pair<int64_t, int64_t> outputs(int64_t piece) const {
    int64_t from = task.N, to = 0;
    for_pairs(task.weights, first(piece), first(piece + 1), [&](const Part& part, int64_t pair, int64_t end, int64_t column) {
      from = std::min(from, column + pair * 2 * LANES), to = column + std::min(end * 2 * LANES, part.num_outputs);
    });
    return {std::min(from, to), to};
  }
  int64_t result_size(int64_t piece) const override {
    auto [from, to] = outputs(piece);
    return task.M * (to - from);
  }
  void compute(int64_t piece, int64_t, float* result) const override {
    auto [from, to] = outputs(piece);
    multiply(task, first(piece), first(piece + 1), {result - from, to - from});
  }
  void publish(int64_t piece, const float* result) const override {
    auto [from, to] = outputs(piece);
    for (int64_t row = 0; row < task.M; row++) std::memcpy(y + row * task.N + from, result + row * (to - from), (to - from) * sizeof(float));
  }
  void run(int64_t from, int64_t to) const override { multiply(task, first(from), first(to), {y, task.N}); }
};

}  // namespace

bool are_group_quantised(const Tensor& weights) {
  if (!has_shape(weights, ScalarType::Byte, {-1}) || weights.numel() < int64_t(sizeof(Head))) return false;
  const Head* head = numbers<Head>(weights);
  return !std::memcmp(head->magic, MAGIC, sizeof(MAGIC)) && head->lanes == LANES;
}

Tensor group_quantised_product(const Tensor& x, const Tensor& bytes, const std::optional<Tensor>& bias, int64_t width) {
  Weights weights(bytes);
  int64_t K = weights.parts->num_inputs;
  STD_TORCH_CHECK(x.dim() && x.size(x.dim() - 1) == K && weights.num_outputs() == width, "rows must be float32, of the weight's width");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = width;
  Tensor y = made(shape, ScalarType::Float);
  int64_t left = x.numel() / K, chunks = (left + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const float* rows = numbers<float>(x);
  float* to = numbers<float>(y);
  for (int64_t M; chunks; chunks--, rows += M * K, to += M * width, left -= M) {
    M = (left + chunks - 1) / chunks;
    Task task{weights, rows, numbers<float>(bias), M, K, width, {}};
    if (weights.head->in_whole_numbers) round_rows(task);
    share(std::make_shared<SharedProduct>(std::move(task), x, bytes, bias, to));
  }
  return y;
}

// Bytes that matrices of `num_rows` rows take together.
int64_t quantised_size(std::vector<int64_t> types, std::vector<int64_t> num_rows, int64_t num_inputs) {
  int64_t size = sizeof(Head) + types.size() * sizeof(Part);
  for (size_t i = 0; i < types.size(); i++) size += Part{types[i], num_rows[i], num_inputs, 0}.size();
  return size;
}

void begin_quantised(Tensor weights, std::vector<int64_t> types, std::vector<int64_t> num_rows, int64_t num_inputs, bool in_whole_numbers) {
  STD_TORCH_CHECK(types.size() == num_rows.size() && !types.empty() && types.size() <= MOST_PARTS, "there must be 1 to 64 matrices, each with a type");
  STD_TORCH_CHECK(has_shape(weights, ScalarType::Byte, {quantised_size(types, num_rows, num_inputs)}), "weights must have the size of their matrices");
  Head* head = numbers<Head>(weights);
  *head = {};
  std::memcpy(head->magic, MAGIC, sizeof(MAGIC));
  head->num_parts = types.size(), head->in_whole_numbers = in_whole_numbers, head->lanes = LANES;
  int64_t offset = sizeof(Head) + types.size() * sizeof(Part);
  Part* parts = reinterpret_cast<Part*>(head + 1);
  for (size_t i = 0; i < types.size(); i++) {
    STD_TORCH_CHECK(num_inputs % file_type(types[i]).block == 0, "a row must be whole blocks of its type");
    parts[i] = {types[i], num_rows[i], num_inputs, offset};
    offset += parts[i].size();
  }
}

// Rows as a file has them (N, bytes) become matrix `part`; `order` (N,) long: the row that becomes each output.
void pack_quantised(Tensor bytes, int64_t index, Tensor file_rows, std::optional<Tensor> order) {
  Weights weights(bytes);
  STD_TORCH_CHECK(index >= 0 && index < weights.head->num_parts, "there is no such matrix");
  const Part& part = weights.parts[index];
  const FileType& type = part.of();
  int64_t row_bytes = part.num_inputs / type.block * type.bytes, N = part.num_outputs;
  STD_TORCH_CHECK(has_shape(file_rows, ScalarType::Byte, {N, row_bytes}), "rows must be bytes of the matrix's type and width");
  STD_TORCH_CHECK(!order || are_indices(*order, {N}, 0, N), "an order must name each row");
  const uint8_t* from = numbers<uint8_t>(file_rows);
  const int64_t* of = numbers<int64_t>(order);
  int64_t size = part.panel_size();
  torch::stable::parallel_for(0, 2 * part.pairs(), 1, [&](int64_t begin, int64_t end) {
    with_form(type.form, [&]<typename F>() {
      for (int64_t panel = begin; panel < end; panel++) {
        uint8_t* to = weights.panels(part) + panel * size;
        std::memset(to, 0, size);
        int64_t count = std::clamp<int64_t>(N - panel * LANES, 0, LANES);
        for (int64_t block = 0; block < part.blocks(); block++, to += F::BLOCK_BYTES) {
          const uint8_t* rows[LANES] = {};
          for (int64_t lane = 0; lane < count; lane++) {
            int64_t row = panel * LANES + lane;
            rows[lane] = from + (of ? of[row] : row) * row_bytes + block * F::BLOCK / type.block * type.bytes;
          }
          pack_block<F>(type, rows, count, std::min(F::BLOCK, part.num_inputs - block * F::BLOCK), to);
        }
      }
    });
  });
}

// The matrices below each other, (N, K) float32.
Tensor unpack_quantised(Tensor bytes) {
  Weights weights(bytes);
  int64_t K = weights.parts->num_inputs;
  Tensor result = made({weights.num_outputs(), K}, ScalarType::Float);
  float* to = numbers<float>(result);
  for (const Part& part : weights) {
    torch::stable::parallel_for(0, (part.num_outputs + LANES - 1) / LANES, 1, [&](int64_t begin, int64_t end) {
      with_form(part.of().form, [&]<typename F>() {
        float wide[F::BLOCK * LANES];
        for (int64_t panel = begin; panel < end; panel++)
          for (int64_t block = 0; block < part.blocks(); block++) {
            widen_block<F>(part.of(), weights.panels(part) + panel * part.panel_size() + block * F::BLOCK_BYTES, wide);
            for (int64_t lane = 0; lane < LANES && panel * LANES + lane < part.num_outputs; lane++)
              for (int64_t k = 0; k < F::BLOCK && block * F::BLOCK + k < K; k++) to[(panel * LANES + lane) * K + block * F::BLOCK + k] = wide[k * LANES + lane];
          }
      });
    });
    to += part.num_outputs * K;
  }
  return result;
}

// Rows `ids` (...) long of a matrix as a file has it, (V, bytes): (..., width) float32, each number as the file means it.
Tensor quantised_rows(const Tensor& file_rows, const Tensor& ids, int64_t id, int64_t width) {
  const FileType& type = file_type(id);
  int64_t row_bytes = width / type.block * type.bytes;
  STD_TORCH_CHECK(width % type.block == 0 && has_shape(file_rows, ScalarType::Byte, {-1, row_bytes}), "rows must be bytes of their type and width");
  Tensor which = whole(ids);
  STD_TORCH_CHECK(which.scalar_type() == ScalarType::Long && lies_within(numbers<int64_t>(which), which.numel(), 0, file_rows.size(0)), "ids must be those of rows");
  std::vector<int64_t> shape(ids.sizes().begin(), ids.sizes().end());
  shape.push_back(width);
  Tensor result = made(shape, ScalarType::Float);
  auto widen = [&](int64_t begin, int64_t end) {
    with_form(type.form, [&]<typename F>() {
      std::vector<uint8_t> block(F::BLOCK_BYTES);
      float wide[F::BLOCK * LANES];
      for (int64_t i = begin; i < end; i++) {
        const uint8_t* row = numbers<uint8_t>(file_rows) + numbers<int64_t>(which)[i] * row_bytes;
        float* to = numbers<float>(result) + i * width;
        for (int64_t k = 0; k < width; k += F::BLOCK) {
          int64_t count = std::min(F::BLOCK, width - k);
          std::fill(block.begin(), block.end(), 0);
          const uint8_t* rows[LANES] = {row + k / type.block * type.bytes};
          pack_block<F>(type, rows, 1, count, block.data());
          widen_block<F>(type, block.data(), wide);
          for (int64_t j = 0; j < count; j++) to[k + j] = wide[j * LANES];
        }
      }
    });
  };
  int64_t count = which.numel();
  if (count * width < 1 << 16) widen(0, count);
  else parallel_for(count, 16, widen);
  return result;
}
