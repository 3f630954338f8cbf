// Packing weights of bfloat16 into twelve bits, and back.

#include "twelve_bits.h"

#include <atomic>

#include "operators.h"
#include "packing.h"

namespace medusa {

int64_t twelve_bit_panel_bytes(int64_t K) {
  int64_t size =
      sizeof(TwelveBitHeader) + padded_columns(K) * LANES * 3 / 2 + outlier_room(K) * sizeof(Outlier);
  return (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

namespace {

constexpr int NUM_CODES = 7;  // of upper bytes that are not 0, for each sign

// The least of seven upper bytes without their sign that follow each other and are had by most of these
// weights.
int least_upper_byte(const std::vector<uint16_t>& weights) {
  int64_t counts[4][128] = {}, held = 0, most = 0;  // four, as a number that was just written is slow to read
  for (size_t i = 0; i < weights.size(); i += 4)
    for (int part = 0; part < 4; part++) counts[part][weights[i + part] >> 8 & 127]++;
  auto count = [&](int upper) {
    return counts[0][upper] + counts[1][upper] + counts[2][upper] + counts[3][upper];
  };
  int least = 1;
  for (int highest = 1; highest < 128; highest++) {
    held += count(highest) - (highest > NUM_CODES ? count(highest - NUM_CODES) : 0);
    if (held > most) {
      most = held;
      least = std::max(highest - (NUM_CODES - 1), 1);
    }
  }
  return least;
}

// The upper byte of each code, where the least but 0 is `least`.
void fill_header(int least, TwelveBitHeader& header) {
  header = {};
  for (int code = 0; code < NUM_CODES; code++) {
    header.upper[code] = std::min(least + code, 127);
    header.upper[code + 8] = header.upper[code] | 128;
  }
  header.upper[15] = 128;
}

// A panel of weights, which lie in pairs of a lane. Returns how many are outliers, or would be if there were
// room.
int64_t encode_panel(const std::vector<uint16_t>& weights, int64_t K, const TwelveBitPanel& panel) {
  constexpr int FOUR_COLUMNS = 4 * LANES;
  int least = least_upper_byte(weights);
  int64_t num_outliers = 0, room = outlier_room(K);
  fill_header(least, *panel.header);
  auto is_outlier = [&](uint16_t weight) {
    uint8_t size = weight >> 8 & 127;
    return size > 0 && uint8_t(size - least) >= NUM_CODES;
  };
  for (size_t first = 0; first < weights.size(); first += FOUR_COLUMNS) {
    const uint16_t* from = weights.data() + first;
    uint8_t lower[FOUR_COLUMNS], codes[FOUR_COLUMNS], has_outliers = 0;
    for (int i = 0; i < FOUR_COLUMNS; i++) {
      uint8_t upper = from[i] >> 8, size = upper & 127, code = size - least;
      has_outliers |= (size > 0) & (code >= NUM_CODES);
      lower[i] = from[i];
      codes[i] = (size ? code : NUM_CODES) | (upper >> 4 & 8);
    }
    for (int i = 0; has_outliers && i < FOUR_COLUMNS; i++) {
      if (!is_outlier(from[i])) continue;
      uint32_t column = first / LANES + i / (2 * LANES) * 2 + i % 2;
      if (num_outliers < room)
        panel.outliers[num_outliers] = {column, uint16_t(i % (2 * LANES) / 2), from[i]};
      num_outliers++;
      lower[i] = 0;
      codes[i] = NUM_CODES;
    }
    bool in_upper_half = first / FOUR_COLUMNS % 2;
    for (int part = 0; part < FOUR_COLUMNS; part += 8) {
      int place = part % (2 * LANES) * 2 + part / (2 * LANES) * 8;  // as `interleaved` reads them
      std::memcpy(panel.lower + first + place, lower + part, 8);
      uint8_t* to = panel.codes + first / (2 * FOUR_COLUMNS) * FOUR_COLUMNS + place;
      for (int i = 0; i < 8; i++) to[i] = in_upper_half ? to[i] | codes[part + i] << 4 : codes[part + i];
    }
  }
  panel.header->num_outliers = std::min(num_outliers, room);
  return num_outliers;
}

template <typename Source> int64_t encode_from(const Tensor& weight, const Tensor& panels, int64_t row) {
  int64_t N = weight.size(0), K = weight.size(1);
  std::atomic<int64_t> num_outliers = 0;
  std::atomic<bool> fits = true;
  torch::stable::parallel_for(0, (N + LANES - 1) / LANES, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint16_t> pairs(padded_columns(K) * LANES), narrow;
    for (int64_t panel = begin; panel < end && fits; panel++) {
      const Source* rows = numbers<Source>(weight) + panel * LANES * K;
      int64_t num_lanes = std::min<int64_t>(LANES, N - panel * LANES);
      if (num_lanes < LANES) std::fill(pairs.begin(), pairs.end(), 0);
      if constexpr (std::is_same_v<Source, BFloat16>) {
        interleave_rows<2>(reinterpret_cast<const uint16_t*>(rows), num_lanes, K, pairs.data());
      } else {
        narrow.resize(num_lanes * K);
        for (int64_t i = 0; i < num_lanes * K; i++) narrow[i] = std::bit_cast<uint32_t>(rows[i]) >> 16;
        interleave_rows<2>(narrow.data(), num_lanes, K, pairs.data());
      }
      const char* to = numbers<char>(panels) + (row / LANES + panel) * panels.size(1);
      int64_t found = encode_panel(pairs, K, TwelveBitPanel(to, K));
      num_outliers += found;
      if (found > outlier_room(K)) fits = false;
    }
  });
  return fits ? num_outliers.load() : -1;
}

}  // namespace

// Packs a weight (N, K) of numbers that bfloat16 holds at the outputs from `row` on, a multiple of LANES, of
// panels in twelve bits. Returns how many weights are outliers; -1 where a panel has no room for its own.
int64_t encode_twelve(const Tensor& weight, const Tensor& panels, int64_t row) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && row >= 0 && row % LANES == 0,
                  "a weight must be contiguous, and begin with a panel");
  STD_TORCH_CHECK(has_shape(panels, ScalarType::Byte, {ANY, twelve_bit_panel_bytes(weight.size(1))}) &&
                      row + weight.size(0) <= panels.size(0) * LANES,
                  "panels must be those of such a weight");
  switch (weight.scalar_type()) {
    case ScalarType::BFloat16: return encode_from<BFloat16>(weight, panels, row);
    case ScalarType::Float: return encode_from<float>(weight, panels, row);
    default: STD_TORCH_CHECK(false, "a weight must be bfloat16, or float32 that bfloat16 holds");
  }
}

// The weight (N, K) bfloat16 of panels in twelve bits.
Tensor decode_twelve(const Tensor& panels, int64_t N, int64_t K) {
  STD_TORCH_CHECK(has_shape(panels, ScalarType::Byte, {(N + LANES - 1) / LANES, twelve_bit_panel_bytes(K)}),
                  "panels must be those of such a weight");
  Tensor weight = new_tensor({N, K}, ScalarType::BFloat16);
  torch::stable::parallel_for(0, panels.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * LANES; first < end * LANES; first += LANES) {
      const TwelveBitPanel panel(numbers<char>(panels) + first / LANES * panels.size(1), K);
      BFloat16* to = numbers<BFloat16>(weight) + first * K;
      for (int64_t lane = 0; lane < std::min<int64_t>(LANES, N - first); lane++)
        for (int64_t k = 0; k < K; k++) {
          int64_t place = TwelveBitPanel::place(lane, k);
          uint8_t lower = panel.lower[k / 4 * 4 * LANES + place];
          uint8_t codes = panel.codes[k / 8 * 4 * LANES + place];
          to[lane * K + k].bits = panel.header->upper[k % 8 < 4 ? codes & 15 : codes >> 4] << 8 | lower;
        }
      for (const Outlier* each = panel.outliers; each < panel.outliers_end(); each++)
        to[each->lane * K + each->column].bits = each->bits;
    }
  });
  return weight;
}

// How many weights panels in twelve bits store separately.
int64_t num_outliers(const Tensor& panels) {
  STD_TORCH_CHECK(
      has_shape(panels, ScalarType::Byte, {ANY, ANY}) && panels.size(1) >= int64_t(sizeof(TwelveBitHeader)),
      "panels must be those of weights in twelve bits");
  int64_t sum = 0;
  for (int64_t panel = 0; panel < panels.size(0); panel++) {
    const char* at = numbers<char>(panels) + panel * panels.size(1);
    sum += reinterpret_cast<const TwelveBitHeader*>(at)->num_outliers;
  }
  return sum;
}

}  // namespace medusa
