// Weights in panels: which format holds them exactly, and packing into it, or rounded to int8.

#include "packing.h"

#include <atomic>

#include "number_formats.h"
#include "operators.h"

namespace medusa {
namespace {

// Whether float16 holds this float32 exactly: a normal number with 10 bits of fraction, or a multiple of
// 2^-24.
bool is_half(uint32_t bits) {
  uint32_t size = bits & 0x7fffffff;
  int exponent = int(size >> 23) - 127;
  if (size == 0) return true;
  if (exponent > 15 || exponent < -24) return size == 0x7f800000;
  if (exponent >= -14) return !(bits & 0x1fff);
  return !((0x800000 | (bits & 0x7fffff)) & ((1u << (-1 - exponent)) - 1));
}

// Numbers that the narrower format holds.
void narrow(float value, float* to) { *to = value; }
void narrow(float value, BFloat16* to) { to->bits = std::bit_cast<uint32_t>(value) >> 16; }
void narrow(float value, Half* to) {
  uint32_t bits = std::bit_cast<uint32_t>(value), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  uint32_t half = size >= 0x7f800000 ? 0x7c00 | (size >> 13 & 0x3ff)  // infinite, or no number
                                     : std::bit_cast<uint32_t>(std::bit_cast<float>(size) * 0x1p-112f) >> 13;
  to->bits = sign | half;
}

template <typename Source> int64_t narrowest_of(const Source* from, int64_t count) {
  constexpr int64_t PART = 1 << 16;
  std::atomic<bool> fits_bfloat16 = true, fits_half = true;
  torch::stable::parallel_for(0, (count + PART - 1) / PART, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end && (fits_bfloat16 || fits_half); part++) {
      int64_t last = std::min(count, (part + 1) * PART);
      auto bits = [&](int64_t i) {
        return std::bit_cast<uint32_t>(widened(from[i]));
      };
      if (fits_bfloat16) {
        uint32_t any = 0;
        for (int64_t i = part * PART; i < last; i++) any |= bits(i);
        if (any & 0xffff) fits_bfloat16 = false;
      }
      if (fits_half) {
        bool fits = true;
        for (int64_t i = part * PART; i < last && fits; i++) fits = is_half(bits(i));
        if (!fits) fits_half = false;
      }
    }
  });
  return fits_bfloat16 ? 0 : fits_half ? 1 : 2;
}

// A row as whole numbers up to 127 times a scale, which this returns; above 0 where all are 0. `wide` is
// room.
template <typename Source>
float round_to_int8(const Source* from, int64_t K, std::vector<float>& wide, int8_t* to) {
  wide.assign((K + LANES - 1) / LANES * LANES, 0.f);
  for (int64_t k = 0; k < K; k++) wide[k] = widened(from[k]);
  Vec highest = {};
  for (size_t k = 0; k < wide.size(); k += LANES) highest = larger(absolute(load(wide.data() + k)), highest);
  float most = std::numeric_limits<float>::min();
  for (int lane = 0; lane < LANES; lane++) most = std::max(most, highest[lane]);
  float scale = most / 127.f;
  for (size_t k = 0; k < wide.size(); k += LANES)
    store(wide.data() + k, (Vec)nearest_whole(load(wide.data() + k) / scale));
  for (int64_t k = 0; k < K; k++) to[k] = static_cast<int8_t>(std::bit_cast<int32_t>(wide[k]));
  return scale;
}

// Rows of a weight (N, K) at the outputs from `row` on of panels (P, K / PER, LANES, PER).
template <typename Source, typename Weight, int PER>
void pack_rows(const Tensor& weight, const Tensor& panels, const std::optional<Tensor>& scales, int64_t row) {
  int64_t N = weight.size(0), K = weight.size(1), panel_size = panels.size(1) * LANES * PER;
  const Source* from = numbers<Source>(weight);
  Weight* to = numbers<Weight>(panels);
  int64_t first_panel = row / LANES, num_panels = (row + N + LANES - 1) / LANES - first_panel;
  torch::stable::parallel_for(0, num_panels, 1, [&](int64_t begin, int64_t end) {
    std::vector<Weight> held;
    std::vector<float> wide;
    for (int64_t panel = first_panel + begin; panel < first_panel + end; panel++) {
      int64_t first = std::max(row, panel * LANES), last = std::min(row + N, (panel + 1) * LANES);
      int64_t num_lanes = last - first;
      const Source* rows = from + (first - row) * K;
      Weight* lanes = to + panel * panel_size + (first - panel * LANES) * PER;
      if constexpr (std::is_same_v<Source, Weight>) {
        interleave_rows<PER>(rows, num_lanes, K, lanes);
        continue;
      }
      held.resize(LANES * K);
      for (int64_t lane = 0; lane < num_lanes; lane++) {
        const Source* given = rows + lane * K;
        Weight* narrowed = held.data() + lane * K;
        if constexpr (std::is_same_v<Weight, int8_t>) {
          numbers<float>(scales)[first + lane] = round_to_int8(given, K, wide, narrowed);
        } else {
          for (int64_t k = 0; k < K; k++) narrow(widened(given[k]), narrowed + k);
        }
      }
      interleave_rows<PER>(held.data(), num_lanes, K, lanes);
    }
  });
}

template <typename Source>
void pack_from(const Tensor& weight, const Tensor& panels, const std::optional<Tensor>& scales, int64_t row) {
  switch (panels.scalar_type()) {
    case ScalarType::Float: return pack_rows<Source, float, 1>(weight, panels, scales, row);
    case ScalarType::BFloat16: return pack_rows<Source, BFloat16, 2>(weight, panels, scales, row);
    case ScalarType::Half: return pack_rows<Source, Half, 1>(weight, panels, scales, row);
    case ScalarType::Char:
      if (panels.size(3) == 4) return pack_rows<Source, int8_t, 4>(weight, panels, scales, row);
      return pack_rows<Source, int8_t, 2>(weight, panels, scales, row);
    default: STD_TORCH_CHECK(false, "panels must be float32, bfloat16, float16 or int8");
  }
}

}  // namespace

// 0, 1 or 2: the narrowest of bfloat16, float16 and float32 that holds every number of `weight` exactly.
int64_t narrowest(const Tensor& weight) {
  STD_TORCH_CHECK(weight.is_contiguous(), "a weight must be contiguous");
  switch (weight.scalar_type()) {
    case ScalarType::BFloat16: return 0;
    case ScalarType::Half: return narrowest_of(numbers<Half>(weight), weight.numel());
    case ScalarType::Float: return narrowest_of(numbers<float>(weight), weight.numel());
    default: STD_TORCH_CHECK(false, "a weight must be float32, bfloat16 or float16");
  }
}

// Packs a weight (N, K) at the outputs from `row` on of panels, exactly, or in int8 with the scales
// (outputs,) of its rows.
void pack(const Tensor& weight, const Tensor& panels, const std::optional<Tensor>& scales, int64_t row) {
  bool are_contiguous = weight.is_contiguous() && panels.is_contiguous();
  STD_TORCH_CHECK(are_contiguous && weight.dim() == 2 && panels.dim() == 4,
                  "a weight must be contiguous, and panels as well");
  int64_t per_lane = panels.size(3), row_end = row + weight.size(0);
  STD_TORCH_CHECK(panels.size(2) == LANES && panels.size(1) == (weight.size(1) + per_lane - 1) / per_lane,
                  "panels must be those of such a weight");
  STD_TORCH_CHECK(row >= 0 && row_end <= panels.size(0) * LANES, "the rows must have a place in the panels");
  bool is_int8 = panels.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(is_int8 == scales.has_value() && (!scales || scales->numel() >= row_end),
                  "int8 must have a scale for each row");
  switch (weight.scalar_type()) {
    case ScalarType::Float: return pack_from<float>(weight, panels, scales, row);
    case ScalarType::BFloat16: return pack_from<BFloat16>(weight, panels, scales, row);
    case ScalarType::Half: return pack_from<Half>(weight, panels, scales, row);
    default: STD_TORCH_CHECK(false, "a weight must be float32, bfloat16 or float16");
  }
}

}  // namespace medusa
