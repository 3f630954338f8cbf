// Packing a file's rows into the form that products read, and back: matrices, or some rows of one, in
// float32.

#include <array>

#include "group_quantised.h"
#include "group_weights.h"
#include "operators.h"
#include "threads.h"

namespace medusa {

// ---- the whole of weights

constexpr char MAGIC[8] = {'g', 'r', 'o', 'u', 'p', 'e', 'd', '1'};

GroupWeights::GroupWeights(const Tensor& bytes) {
  STD_TORCH_CHECK(are_group_quantised(bytes), "weights must be bytes that were packed for this processor");
  header = numbers<GroupHeader>(bytes);
  parts = reinterpret_cast<const Part*>(header + 1);
  int64_t size = bytes.numel(), num_parts = header->num_parts;
  bool is_whole = num_parts > 0 && num_parts <= MOST_PARTS;
  is_whole = is_whole && size >= int64_t(sizeof(GroupHeader) + num_parts * sizeof(Part));
  STD_TORCH_CHECK(is_whole, "weights must be whole");
  for (const Part& part : *this)
    STD_TORCH_CHECK(part.num_inputs == num_inputs() && part.offset + part.bytes() <= size,
                    "weights must be whole");
}

int64_t GroupWeights::num_outputs() const {
  int64_t sum = 0;
  for (const Part& part : *this) sum += part.num_outputs;
  return sum;
}

bool are_group_quantised(const Tensor& weights) {
  bool has_header =
      has_shape(weights, ScalarType::Byte, {ANY}) && weights.numel() >= int64_t(sizeof(GroupHeader));
  if (!has_header) return false;
  const GroupHeader* header = numbers<GroupHeader>(weights);
  return !std::memcmp(header->magic, MAGIC, sizeof(MAGIC)) && header->lanes == LANES;
}

void check_width(const Tensor& weights, int64_t num_outputs) {
  STD_TORCH_CHECK(GroupWeights(weights).num_outputs() == num_outputs,
                  "rows and results must have the widths of the weights");
}

// ---- a block

namespace {

// Quads 2 i and 2 i + 1 of a section, which is zeros before.
template <int BITS> void put_quads(uint8_t* section, int i, Bytes first, Bytes second) {
  auto put = [&](int64_t place, Bytes more) {
    Bytes both = load(section + place * VECTOR_BYTES) | more;
    std::memcpy(section + place * VECTOR_BYTES, &both, VECTOR_BYTES);
  };
  if constexpr (BITS == 8) {
    std::memcpy(section + 2 * i * VECTOR_BYTES, &first, VECTOR_BYTES);
    std::memcpy(section + (2 * i + 1) * VECTOR_BYTES, &second, VECTOR_BYTES);
  } else {
    put(i, (first & 15) | second << 4);
    if constexpr (BITS == 5) put(4, (first >> 4) << 2 * i | (second >> 4) << (2 * i + 1));
    if constexpr (BITS == 6) put(4 + i / 2, (first >> 4) << (i % 2 * 4) | (second >> 4) << (i % 2 * 4 + 2));
  }
}

// What a file's block has beside its codes, into its place of a lane.
template <typename F> void put_scales(const FileBlock& block, int64_t group, int64_t lane, uint8_t* to) {
  reinterpret_cast<uint16_t*>(to)[group * LANES + lane] = block.scale;
  if constexpr (F::HAS_MINIMA)
    reinterpret_cast<uint16_t*>(to + F::MINIMA)[group * LANES + lane] = block.minimum;
  if constexpr (F::HAS_OWN_ZEROS) to[F::ZEROS + group * LANES + lane] = block.zero;
  if constexpr (F::HAS_WHOLE_SCALES)
    for (int64_t g = 0; g < F::GROUPS; g++) {
      to[F::WHOLE_SCALES + g * LANES + lane] = block.whole_scales[g];
      if constexpr (F::HAS_MINIMA)
        to[F::WHOLE_MINIMA + g / 2 * 2 * LANES + lane * 2 + g % 2] = block.whole_minima[g];
    }
}

template <typename F>
void pack_block(const FileType& type, const uint8_t* const (&rows)[LANES], int64_t count, int64_t columns,
                uint8_t* to) {
  FileBlock blocks[LANES];
  for (int64_t k = 0; k < columns; k += type.block) {
    int64_t group = F::HAS_WHOLE_SCALES ? 0 : k / F::GROUP;  // files have a block for each
    for (int64_t lane = 0; lane < count; lane++) {
      type.take_apart(rows[lane] + k / type.block * type.bytes, blocks[lane]);
      put_scales<F>(blocks[lane], group, lane, to);
    }
    for (int64_t i = 0; i < type.block; i += 8) {
      Bytes quads[2] = {};
      for (int64_t lane = 0; lane < count; lane++)
        for (int quad = 0; quad < 2; quad++) {
          uint8_t* of_lane = reinterpret_cast<uint8_t*>(&quads[quad]) + lane * 4;
          std::memcpy(of_lane, blocks[lane].codes + i + 4 * quad, 4);
        }
      int64_t column = k + i;
      uint8_t* section = to + F::CODES + column / SECTION * F::SECTION_BYTES;
      put_quads<F::BITS>(section, column % SECTION / 8, quads[0], quads[1]);
    }
  }
}

// The numbers of a block, (BLOCK, LANES) float32: exactly those of the file.
template <typename F> void widen_block(const FileType& type, const uint8_t* block, float* to) {
  Bytes table = table_of(type.table);
  for (int64_t s = 0; s < F::SECTIONS; s++) {
    Section<F::BITS> section{block + F::CODES + s * F::SECTION_BYTES};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      Bytes quads[2];
      section.quads(i, quads[0], quads[1]);
      int64_t group = (s * SECTION + 8 * i) / F::GROUP;
      Int zero = F::HAS_OWN_ZEROS ? zeros_at(block + F::ZEROS + group * LANES) : Int{} + type.zero;
      Vec scale = group_scales<F>(block, group, type.has_bfloat16_scales), minimum = {};
      if constexpr (F::HAS_WHOLE_SCALES) {
        scale = scales_at(block, type.has_bfloat16_scales) * scale;
        if constexpr (F::HAS_MINIMA) {
          Vec whole = whole_minima_at(block + F::WHOLE_MINIMA + group / 2 * 2 * LANES, group % 2);
          minimum = scales_at(block + F::MINIMA, false) * whole;
        }
      } else if constexpr (F::HAS_MINIMA) {
        minimum = scales_at(block + F::MINIMA + group * LANES * 2, false);
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

}  // namespace

const BlockForm& block_form(FormId id) {
  static const auto forms = [] {
    std::array<BlockForm, NUM_FORMS> all;
    for (int32_t each = 0; each < NUM_FORMS; each++)
      all[each] = with_form(each, []<typename F>() {
        static_assert(F::BLOCK <= MOST_COLUMNS);
        return BlockForm{F::BLOCK, F::BLOCK_BYTES, pack_block<F>, widen_block<F>};
      });
    return all;
  }();
  return forms[id];
}

// ---- operators

// Bytes that matrices of `num_rows` rows take together.
int64_t quantised_size(std::vector<int64_t> types, std::vector<int64_t> num_rows, int64_t num_inputs) {
  STD_TORCH_CHECK(types.size() == num_rows.size(), "each matrix must have a type");
  int64_t size = sizeof(GroupHeader) + types.size() * sizeof(Part);
  for (size_t i = 0; i < types.size(); i++) size += Part{types[i], num_rows[i], num_inputs, 0}.bytes();
  return size;
}

// Writes what stands before the panels of these matrices.
void begin_quantised(Tensor weights, std::vector<int64_t> types, std::vector<int64_t> num_rows,
                     int64_t num_inputs, bool in_whole_numbers) {
  STD_TORCH_CHECK(types.size() == num_rows.size() && !types.empty() && types.size() <= MOST_PARTS,
                  "there must be 1 to 64 matrices, each with a type");
  STD_TORCH_CHECK(has_shape(weights, ScalarType::Byte, {quantised_size(types, num_rows, num_inputs)}),
                  "weights must have the size of their matrices");
  GroupHeader* header = numbers<GroupHeader>(weights);
  *header = {};
  std::memcpy(header->magic, MAGIC, sizeof(MAGIC));
  header->num_parts = types.size();
  header->in_whole_numbers = in_whole_numbers;
  header->lanes = LANES;
  int64_t offset = sizeof(GroupHeader) + types.size() * sizeof(Part);
  Part* parts = reinterpret_cast<Part*>(header + 1);
  for (size_t i = 0; i < types.size(); i++) {
    STD_TORCH_CHECK(num_inputs % file_type(types[i]).block == 0, "a row must be whole blocks of its type");
    parts[i] = {types[i], num_rows[i], num_inputs, offset};
    offset += parts[i].bytes();
  }
}

// Whether rows are rounded for products with these weights.
bool is_in_whole_numbers(const Tensor& weights) { return GroupWeights(weights).header->in_whole_numbers; }

// Rows as a file has them (N, bytes) become matrix `index`; `order` (N,) long: the row that becomes each
// output.
void pack_quantised(Tensor bytes, int64_t index, Tensor file_rows, std::optional<Tensor> order) {
  GroupWeights weights(bytes);
  STD_TORCH_CHECK(index >= 0 && index < weights.header->num_parts,
                  "the matrix must be one of those that were begun");
  const Part& part = weights.parts[index];
  const FileType& type = part.type();
  int64_t row_bytes = part.num_inputs / type.block * type.bytes, N = part.num_outputs;
  STD_TORCH_CHECK(has_shape(file_rows, ScalarType::Byte, {N, row_bytes}),
                  "rows must be bytes of the matrix's type and width");
  STD_TORCH_CHECK(!order || are_indices(*order, {N}, 0, N), "an order must name each row");
  const uint8_t* from = numbers<uint8_t>(file_rows);
  const int64_t* row_of = numbers<int64_t>(order);
  const BlockForm& form = part.block();
  int64_t panel_bytes = part.panel_bytes(), num_blocks = part.num_blocks();
  torch::stable::parallel_for(0, 2 * part.num_pairs(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
      uint8_t* to = weights.panels(part) + panel * panel_bytes;
      std::memset(to, 0, panel_bytes);
      int64_t num_lanes = std::clamp<int64_t>(N - panel * LANES, 0, LANES);
      for (int64_t block = 0; block < num_blocks; block++) {
        int64_t k = block * form.columns;
        const uint8_t* rows[LANES] = {};
        for (int64_t lane = 0; lane < num_lanes; lane++) {
          int64_t output = panel * LANES + lane, row = row_of ? row_of[output] : output;
          rows[lane] = from + row * row_bytes + k / type.block * type.bytes;
        }
        form.pack(type, rows, num_lanes, std::min(form.columns, part.num_inputs - k),
                  to + block * form.bytes);
      }
    }
  });
}

// The matrices below each other, (N, K) float32.
Tensor unpack_quantised(Tensor bytes) {
  GroupWeights weights(bytes);
  int64_t K = weights.num_inputs();
  Tensor result = new_tensor({weights.num_outputs(), K}, ScalarType::Float);
  float* to = numbers<float>(result);
  for (const Part& part : weights) {
    const BlockForm& form = part.block();
    int64_t num_panels = (part.num_outputs + LANES - 1) / LANES, panel_bytes = part.panel_bytes();
    torch::stable::parallel_for(0, num_panels, 1, [&](int64_t begin, int64_t end) {
      float wide[MOST_COLUMNS * LANES];
      for (int64_t panel = begin; panel < end; panel++)
        for (int64_t k = 0; k < K; k += form.columns) {
          form.widen(part.type(), weights.panels(part) + panel * panel_bytes + k / form.columns * form.bytes,
                     wide);
          int64_t first = panel * LANES, num_lanes = std::min<int64_t>(LANES, part.num_outputs - first);
          int64_t columns = std::min(form.columns, K - k);
          for (int64_t lane = 0; lane < num_lanes; lane++)
            for (int64_t i = 0; i < columns; i++) to[(first + lane) * K + k + i] = wide[i * LANES + lane];
        }
    });
    to += part.num_outputs * K;
  }
  return result;
}

// Rows `ids` (...) long of a matrix as a file has it, (V, bytes): (..., width) float32, each number as the
// file means it.
Tensor quantised_rows(const Tensor& file_rows, const Tensor& ids, int64_t type_id, int64_t width) {
  constexpr int64_t FEW_NUMBERS = 1 << 16, ROWS_OF_A_THREAD = 16;
  const FileType& type = file_type(type_id);
  int64_t row_bytes = width / type.block * type.bytes;
  STD_TORCH_CHECK(width % type.block == 0 && has_shape(file_rows, ScalarType::Byte, {ANY, row_bytes}),
                  "rows must be bytes of their type and width");
  Tensor which = as_contiguous(ids);
  int64_t count = which.numel();
  STD_TORCH_CHECK(which.scalar_type() == ScalarType::Long &&
                      lies_within(numbers<int64_t>(which), count, 0, file_rows.size(0)),
                  "ids must be those of rows");
  std::vector<int64_t> shape = shape_of(ids);
  shape.push_back(width);
  Tensor result = new_tensor(shape, ScalarType::Float);
  const BlockForm& form = block_form(type.form);
  auto widen_rows = [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> block(form.bytes);  // of which only the first lane is used
    float wide[MOST_COLUMNS * LANES];
    for (int64_t i = begin; i < end; i++) {
      const uint8_t* row = numbers<uint8_t>(file_rows) + numbers<int64_t>(which)[i] * row_bytes;
      float* to = numbers<float>(result) + i * width;
      for (int64_t k = 0; k < width; k += form.columns) {
        int64_t columns = std::min(form.columns, width - k);
        std::fill(block.begin(), block.end(), 0);
        const uint8_t* rows[LANES] = {row + k / type.block * type.bytes};
        form.pack(type, rows, 1, columns, block.data());
        form.widen(type, block.data(), wide);
        for (int64_t j = 0; j < columns; j++) to[k + j] = wide[j * LANES];
      }
    }
  };
  if (count * width < FEW_NUMBERS)
    widen_rows(0, count);
  else
    parallel_for(count, ROWS_OF_A_THREAD, widen_rows);
  return result;
}

}  // namespace medusa
