// Vectors of float32, whole numbers and bytes, as wide as the processor's, and what all kernels do with them.
//
// They are the compiler's own (vector_size), so that +, * and < work; intrinsics stand only where it has no
// operator.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace medusa {

// LANES: float32 in a vector. REGISTERS: vectors that the processor holds.
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define MEDUSA_AVX512
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

constexpr int VECTOR_BYTES = LANES * 4;
constexpr int64_t CACHE_LINE = 64;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Int __attribute__((vector_size(VECTOR_BYTES)));
typedef int16_t Pairs __attribute__((vector_size(VECTOR_BYTES)));  // two numbers in each lane
typedef uint16_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES), may_alias));

// One number for each lane, anywhere in memory.
template <typename Number>
using PerLane [[gnu::vector_size(LANES * sizeof(Number)), gnu::aligned(1), gnu::may_alias]] = Number;

inline Vec load(const float* from) {
  typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  return *reinterpret_cast<const Unaligned*>(from);
}
inline Bytes load(const uint8_t* from) {
  typedef Bytes Unaligned __attribute__((aligned(1)));
  return *reinterpret_cast<const Unaligned*>(from);
}
inline void store(float* to, Vec value) {
  typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  *reinterpret_cast<Unaligned*>(to) = value;
}
inline Vec splat(float value) { return value - Vec{}; }
// `b` where either is no number.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline Vec absolute(Vec value) { return value < 0.f ? -value : value; }

// a * b + c, rounded once where the processor can: a compiler left to choose does so in one loop and not in
// the next.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(MEDUSA_AVX512)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The sum of all lanes, in one order: halves are added until one lane is left.
inline float sum_of(Vec lanes) {
  float halves[LANES];
  store(halves, lanes);
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) halves[lane] += halves[lane + half];
  return halves[0];
}

// e^x for x <= 0 to 2 units in the last place, 0 below -87, and NaN for NaN (Cephes' expf: Cody-Waite
// reduction, a polynomial).
inline Vec exponential(Vec x) {
  Vec rounder = splat(12582912.f), n = (x * 1.44269504f + rounder) - rounder;
  Vec r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), x));
  Vec p = splat(1.9875691500e-4f);
  for (float factor :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = multiply_add(p, r, splat(factor));
  p = multiply_add(p, r * r, r + 1.f);
  Int power = (__builtin_convertvector(larger(n, splat(-127.f)), Int) + 127) << 23;
  return x < -87.f ? splat(0.f) : p * (Vec)power;
}

// ---- whole numbers

constexpr float ROUNDER =
    12582912.f;  // 1.5 * 2^23: a float32 that is added to it is rounded to a whole number

inline Int nearest_whole(Vec value) { return (Int)(value + ROUNDER) - (Int)splat(ROUNDER); }

// COUNT numbers as whole ones up to the largest of their type times a step, which this returns; it is not
// finite where one of the numbers is not.
template <int64_t COUNT, typename Whole> inline float round_to_steps(const float* x, Whole* to) {
  constexpr float MOST_STEPS = std::numeric_limits<Whole>::max();
  Vec highest = {}, not_finite = {};
  for (int64_t k = 0; k < COUNT; k += LANES) {
    Vec value = load(x + k);
    highest = larger(absolute(value), highest);
    not_finite += value - value;
  }
  float most = 0, broken = 0;
  for (int lane = 0; lane < LANES; lane++) {
    most = std::max(most, highest[lane]);
    broken += not_finite[lane];
  }
  Vec per_step = splat(most > 0 ? MOST_STEPS / most : 0.f);
  for (int64_t k = 0; k < COUNT; k += LANES) {
    Int whole = nearest_whole(load(x + k) * per_step);
    *reinterpret_cast<PerLane<Whole>*>(to + k) = __builtin_convertvector(whole, PerLane<Whole>);
  }
  return most / MOST_STEPS + broken;
}

// sums + a lane's two numbers times the two of `pair`
inline Int pairs_added(Int sums, Pairs numbers, int32_t pair) {
#if defined(MEDUSA_AVX512) && defined(__AVX512VNNI__)
  return (Int)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)numbers, _mm512_set1_epi32(pair));
#elif defined(MEDUSA_AVX512)
  return sums + (Int)_mm512_madd_epi16((__m512i)numbers, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
  return sums + (Int)_mm256_madd_epi16((__m256i)numbers, _mm256_set1_epi32(pair));
#elif defined(__x86_64__)
  return sums + (Int)_mm_madd_epi16((__m128i)numbers, _mm_set1_epi32(pair));
#else
  Int both = (Int)numbers;
  return sums + (both << 16 >> 16) * static_cast<int16_t>(pair) + (both >> 16) * (pair >> 16);
#endif
}

// ---- bytes

// A number of 8 bits for each lane, with a sign or without. (GCC widens eight of them one after the other.)
inline Int widened_signed(const uint8_t* from) {
#if defined(__AVX2__) && !defined(MEDUSA_AVX512)
  return (Int)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(*reinterpret_cast<const PerLane<int8_t>*>(from), Int);
#endif
}
inline Int widened_unsigned(const uint8_t* from) {
#if defined(__AVX2__) && !defined(MEDUSA_AVX512)
  return (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(*reinterpret_cast<const PerLane<uint8_t>*>(from), Int);
#endif
}

// The bytes of `table` at the places that the lower halves of `codes` name; it has its 16 bytes again and
// again.
inline Bytes looked_up(Bytes table, Bytes codes) {
#if defined(MEDUSA_AVX512) && defined(__AVX512VBMI__)
  return (Bytes)_mm512_permutexvar_epi8((__m512i)codes, (__m512i)table);
#elif defined(MEDUSA_AVX512)
  return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)(codes & 15));
#elif defined(__AVX2__)
  return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)(codes & 15));
#elif defined(__aarch64__)
  return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)(codes & 15));
#else
  Bytes found;
  for (int i = 0; i < VECTOR_BYTES; i++) found[i] = table[codes[i] & 15];
  return found;
#endif
}

// In each 16 bytes, the first 8 of `a` and of `b` in turn; or the second.
inline Bytes interleaved(Bytes a, Bytes b, bool second) {
#if defined(MEDUSA_AVX512)
  return second ? (Bytes)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b)
                : (Bytes)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return second ? (Bytes)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b)
                : (Bytes)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
  return second ? (Bytes)vzip2q_u8((uint8x16_t)a, (uint8x16_t)b)
                : (Bytes)vzip1q_u8((uint8x16_t)a, (uint8x16_t)b);
#else
  Bytes both;
  for (int i = 0; i < VECTOR_BYTES; i++) both[i] = (i % 2 ? b : a)[i / 16 * 16 + 8 * second + i % 16 / 2];
  return both;
#endif
}

}  // namespace medusa
