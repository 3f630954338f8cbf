// Weights that stay as a file has quantised them (GGUF; GPTQ, AWQ and other whole numbers with a scale a
// group): their forms, how they lie in memory, and how they are read.
//
// A weight is a whole number, its code, of 4, 5, 6 or 8 bits; those of 2 and 3 bits are held in 4. A group of
// 16 or 32 weights of an output shares a scale, and in some formats a minimum, or the code that stands for
// zero. No number of a file is changed.
//
// Weights are a header, a Part for each matrix, and the parts' panels. A panel holds LANES outputs, and
// consists of blocks of columns. A block is: scales of 16 bits (of each group, or of the block), minima
// likewise; where scales are whole numbers, those of each group and its minima; zeros where each group has
// its own; then the codes, in sections of 32 columns. A section's columns are eight quads of four, each as a
// vector of LANES times four bytes. Two quads share a vector of half bytes; what codes have beyond 4 bits is
// in vectors of single bits (a bit a quad) or of pairs of bits (two a quad).

#pragma once

#include <stdexcept>

#include "number_formats.h"

namespace torch::stable {
class Tensor;
}

namespace medusa {

constexpr int64_t SECTION = 32;  // columns

// ---- forms

struct FormOptions {
  int bits;                       // of a code
  int64_t group = 32;             // columns that share a scale
  bool has_whole_scales = false;  // of 8 bits, times one number for the block
  bool has_minima = false;
  bool is_table = false;       // codes are places in a table of 16 numbers
  bool has_own_zeros = false;  // which code stands for zero, each group says
};

template <FormOptions OPTIONS> struct Form {
  static constexpr int BITS = OPTIONS.bits;
  static constexpr int64_t GROUP = OPTIONS.group;
  static constexpr bool HAS_WHOLE_SCALES = OPTIONS.has_whole_scales;
  static constexpr bool HAS_MINIMA = OPTIONS.has_minima;
  static constexpr bool IS_TABLE = OPTIONS.is_table;
  static constexpr bool HAS_OWN_ZEROS = OPTIONS.has_own_zeros;
  static constexpr bool HAS_ZERO = !HAS_MINIMA && !HAS_OWN_ZEROS;  // one for all groups, other than code 0

  static constexpr int64_t BLOCK = HAS_WHOLE_SCALES ? 256 : HAS_OWN_ZEROS ? 128 : 64;
  static constexpr int64_t GROUPS = BLOCK / GROUP;
  static constexpr int64_t SECTIONS = BLOCK / SECTION;
  static constexpr int64_t RUN = HAS_WHOLE_SCALES ? 256 : GROUP;  // numbers of a row that share a step

  // Where the parts of a block begin.
  static constexpr int64_t NUM_SCALES = HAS_WHOLE_SCALES ? 1 : GROUPS;  // float16, for each lane
  static constexpr int64_t MINIMA = NUM_SCALES * LANES * 2;
  static constexpr int64_t WHOLE_SCALES = MINIMA * (HAS_MINIMA ? 2 : 1);
  static constexpr int64_t WHOLE_MINIMA =
      WHOLE_SCALES + (HAS_WHOLE_SCALES ? GROUPS * LANES : 0);  // pairs of groups
  static constexpr int64_t ZEROS = WHOLE_MINIMA + (HAS_WHOLE_SCALES && HAS_MINIMA ? GROUPS * LANES : 0);
  static constexpr int64_t END = ZEROS + (HAS_OWN_ZEROS ? GROUPS * LANES : 0);
  static constexpr int64_t CODES = (END + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES;
  static constexpr int64_t SECTION_BYTES = VECTOR_BYTES * BITS;
  static constexpr int64_t BLOCK_BYTES = CODES + SECTIONS * SECTION_BYTES;
};

enum FormId : int32_t {
  Q4,
  Q4_MIN,
  Q5,
  Q5_MIN,
  Q8,
  TABLE,
  K_Q2,
  K_Q3,
  K_Q4,
  K_Q5,
  K_Q6,
  K_TABLE,
  Q4_ZEROS,
  Q8_ZEROS,
  NUM_FORMS
};

// Calls `body` with the form of this number.
template <typename Body> constexpr auto with_form(int32_t id, Body body) {
  using Options = FormOptions;
  constexpr bool YES = true;
  auto call = [&]<FormOptions OPTIONS>() {
    return body.template operator()<Form<OPTIONS>>();
  };
  switch (id) {
    case Q4: return call.template operator()<Options{.bits = 4}>();
    case Q4_MIN: return call.template operator()<Options{.bits = 4, .has_minima = YES}>();
    case Q5: return call.template operator()<Options{.bits = 5}>();
    case Q5_MIN: return call.template operator()<Options{.bits = 5, .has_minima = YES}>();
    case Q8: return call.template operator()<Options{.bits = 8}>();
    case TABLE: return call.template operator()<Options{.bits = 4, .is_table = YES}>();
    case K_Q2:
      return call
          .template operator()<Options{.bits = 4, .group = 16, .has_whole_scales = YES, .has_minima = YES}>();
    case K_Q3: return call.template operator()<Options{.bits = 4, .group = 16, .has_whole_scales = YES}>();
    case K_Q4:
      return call.template operator()<Options{.bits = 4, .has_whole_scales = YES, .has_minima = YES}>();
    case K_Q5:
      return call.template operator()<Options{.bits = 5, .has_whole_scales = YES, .has_minima = YES}>();
    case K_Q6: return call.template operator()<Options{.bits = 6, .group = 16, .has_whole_scales = YES}>();
    case K_TABLE:
      return call.template operator()<Options{.bits = 4, .has_whole_scales = YES, .is_table = YES}>();
    case Q4_ZEROS: return call.template operator()<Options{.bits = 4, .has_own_zeros = YES}>();
    case Q8_ZEROS: return call.template operator()<Options{.bits = 8, .has_own_zeros = YES}>();
    default: throw std::runtime_error("weights must be of a known form");
  }
}

// ---- the types of files

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
  // A number is its scale times (code - zero). Of a table: what its numbers are raised by to have no sign.
  // Where groups have their own zeros: what codes and zeros are both lowered by in tiles, to have 8 bits with
  // a sign.
  int32_t zero;
  const int8_t* table;
  bool has_bfloat16_scales;
  void (*take_apart)(const uint8_t* from, FileBlock& to);
};

// The type of this number; file_types.cpp lists them.
const FileType& file_type(int64_t id);
// From this number on, types are not GGUF's, but those of directories.
constexpr int64_t FIRST_OF_DIRECTORIES = 1000;

// What is done with blocks of any form in the same way; group_packing.cpp has these functions.
constexpr int64_t MOST_COLUMNS = 256;
struct BlockForm {
  int64_t columns, bytes;
  // Packs `num_columns` columns of the first `num_lanes` lanes, from the rows' blocks in the file; `block` is
  // zeros.
  void (*pack)(const FileType& type, const uint8_t* const (&rows)[LANES], int64_t num_lanes,
               int64_t num_columns, uint8_t* block);
  // The numbers of a block, (columns, LANES) float32: exactly those of the file.
  void (*widen)(const FileType& type, const uint8_t* block, float* to);
};
const BlockForm& block_form(FormId id);

// ---- how weights lie

constexpr int64_t MOST_PARTS = 64;

struct alignas(CACHE_LINE) GroupHeader {
  char magic[8];
  int32_t num_parts, in_whole_numbers, lanes;
};

// A matrix. Its panels go in pairs, which are read side by side.
struct alignas(CACHE_LINE) Part {
  int64_t type_id, num_outputs, num_inputs, offset;  // offset: of its panels, from the header

  const FileType& type() const { return file_type(type_id); }
  FormId form() const { return type().form; }
  const BlockForm& block() const { return block_form(form()); }
  int64_t num_blocks() const { return (num_inputs + block().columns - 1) / block().columns; }
  int64_t panel_bytes() const { return num_blocks() * block().bytes; }
  int64_t num_pairs() const { return (num_outputs + 2 * LANES - 1) / (2 * LANES); }
  int64_t bytes() const {
    return (2 * num_pairs() * panel_bytes() + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
  }
};

struct GroupWeights {
  const GroupHeader* header;
  const Part* parts;

  // Checks that `bytes` are weights that were packed for this processor.
  explicit GroupWeights(const torch::stable::Tensor& bytes);

  const Part* begin() const { return parts; }
  const Part* end() const { return parts + header->num_parts; }
  int64_t num_inputs() const { return parts->num_inputs; }
  int64_t num_outputs() const;
  uint8_t* panels(const Part& part) const {
    return reinterpret_cast<uint8_t*>(const_cast<GroupHeader*>(header)) + part.offset;
  }
};

// ---- reading a block

template <int BITS> struct Section {
  const uint8_t* codes;

  // The codes of quads 2 i and 2 i + 1.
  void quads(int i, Bytes& first, Bytes& second) const {
    if constexpr (BITS == 8) {
      first = load(codes + 2 * i * VECTOR_BYTES);
      second = load(codes + (2 * i + 1) * VECTOR_BYTES);
      return;
    }
    Bytes both = load(codes + i * VECTOR_BYTES);
    first = both & 15;
    second = (Bytes)((Words)both >> 4) & 15;
    if constexpr (BITS == 5) {
      Words bits = (Words)load(codes + 4 * VECTOR_BYTES);
      first |= (Bytes)(i < 3 ? bits << (4 - 2 * i) : bits >> 2) & 16;
      second |= (Bytes)(i < 2 ? bits << (3 - 2 * i) : bits >> (2 * i - 3)) & 16;
    }
    if constexpr (BITS == 6) {
      Words bits = (Words)load(codes + (4 + i / 2) * VECTOR_BYTES);
      first |= (Bytes)(i % 2 ? bits : bits << 4) & 48;
      second |= (Bytes)(i % 2 ? bits >> 2 : bits << 2) & 48;
    }
  }
};

// A type's table of numbers, as numbers from 0 to 255.
inline Bytes table_of(const int8_t* values) {
  Bytes table = {};
  for (int i = 0; values && i < VECTOR_BYTES; i++) table[i] = static_cast<uint8_t>(values[i % 16] + 128);
  return table;
}

// What a block has of each lane, at `from`.
inline Vec scales_at(const uint8_t* from, bool are_bfloat16) {
  if (!are_bfloat16) return widened(reinterpret_cast<const Half*>(from), 0);
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const PerLane<uint16_t>*>(from), Int) << 16);
}
inline Vec whole_scales_at(const uint8_t* from) {
  return __builtin_convertvector(widened_signed(from), Vec);
}
inline Int zeros_at(const uint8_t* from) { return widened_unsigned(from); }
inline Vec whole_minima_at(const uint8_t* from, int second) {
  Int both = __builtin_convertvector(*reinterpret_cast<const PerLane<uint16_t>*>(from), Int);
  return __builtin_convertvector(second ? both >> 8 : both & 255, Vec);
}

// The scales of a group of a block, in float32: before the block's own scale where they are whole numbers.
template <typename F> inline Vec group_scales(const uint8_t* block, int64_t group, bool are_bfloat16) {
  return F::HAS_WHOLE_SCALES ? whole_scales_at(block + F::WHOLE_SCALES + group * LANES)
                             : scales_at(block + group * LANES * 2, are_bfloat16);
}

}  // namespace medusa
