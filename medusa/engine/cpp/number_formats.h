// Numbers of 16 bits, bfloat16 and float16, widened to float32: a vector of them, or one by one.

#pragma once

#include <bit>

#include "vectors.h"

namespace medusa {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// Weight `i` of each lane, where a lane holds two of bfloat16, and one of the others.
inline Vec widened(const float* from, int) { return load(from); }
inline Vec widened(const BFloat16* from, int i) {
  // both lie in one number of 32 bits, so nothing is moved from lane to lane
  Int both = *reinterpret_cast<const PerLane<int32_t>*>(from);
  return (Vec)(i ? both & ~0xffff : both << 16);
}
inline Vec widened(const Half* from, int) {
#if defined(MEDUSA_AVX512)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
  return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
#else
  // exact: exponent and fraction are moved to their place, and 2^112 makes up for the other bias
  Vec wide;
  for (int lane = 0; lane < LANES; lane++) {
    uint32_t bits = from[lane].bits, moved = (bits & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &moved, 4);
    value *= 0x1p112f;
    wide[lane] = bits & 0x8000 ? -value : value;
  }
  return wide;
#endif
}

inline float widened(float value) { return value; }
inline float widened(BFloat16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }
inline float widened(Half value) {
  uint32_t bits = value.bits & 0x7fff, sign = uint32_t(value.bits & 0x8000) << 16;
  float wide = std::bit_cast<float>(bits << 13) * 0x1p112f;
  if (bits >= 0x7c00)
    wide = std::bit_cast<float>(0x7f800000 | (bits & 0x3ff) << 13);  // infinite, or no number
  return std::bit_cast<float>(std::bit_cast<uint32_t>(wide) | sign);
}

}  // namespace medusa
