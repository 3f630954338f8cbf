// What all kernels are made of: vectors as wide as the processor's, numbers of 16 bits, and tensors of torch.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDEST
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Int __attribute__((vector_size(LANES * 4)));
typedef float LooseVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline Vec load(const float* from) { return *reinterpret_cast<const LooseVec*>(from); }
static inline void store(float* to, Vec value) { *reinterpret_cast<LooseVec*>(to) = value; }
static inline Vec all(float value) { return value - Vec{}; }
static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// a * b + c, rounded once where the processor can: a compiler left to choose does so in one loop and not in the next.
static inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(WIDEST)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
static inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

template <typename T> static T* numbers(const Tensor& of) { return static_cast<T*>(of.data_ptr()); }
template <typename T> static T* numbers(const std::optional<Tensor>& of) { return of ? static_cast<T*>(of->data_ptr()) : nullptr; }

// A new tensor, and one that lies whole: a layer asks for many, and torch's dispatcher takes longer than its allocator.
static Tensor made(const std::vector<int64_t>& shape, ScalarType type) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  AtenTensorHandle tensor;
  int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(shape.size(), shape.data(), strides.data(), code, aoti_torch_device_type_cpu(), 0, &tensor));
  return Tensor(tensor);
}
static Tensor whole(const Tensor& given) { return given.is_contiguous() ? given : torch::stable::contiguous(given); }

// Shapes, -1 for any size, and indices are checked where they come in: what is read below is then inside.
static bool has_shape(const Tensor& given, ScalarType type, const std::vector<int64_t>& shape) {
  bool fits = given.scalar_type() == type && given.is_contiguous() && given.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); i++) fits = shape[i] < 0 || given.size(i) == shape[i];
  return fits;
}
template <typename T> static bool lies_within(const T* numbers, int64_t count, int64_t least, int64_t end) {
  return std::all_of(numbers, numbers + count, [&](T each) { return each >= least && each < end; });
}
static bool are_indices(const Tensor& given, const std::vector<int64_t>& shape, int64_t least, int64_t end) {
  return has_shape(given, ScalarType::Long, shape) && lies_within(numbers<int64_t>(given), given.numel(), least, end);
}

// What a thread computes in between.
struct Scratch {
  std::unique_ptr<float[]> memory;
  int64_t size = 0;
  float* of(int64_t wanted) {
    if (wanted > size) memory.reset(new float[size = wanted]);
    return memory.get();
  }
};

// ----------------------------------------------------------------------------------------- numbers of 16 bits

struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

template <typename Narrow>
using Several [[gnu::vector_size(LANES * sizeof(Narrow)), gnu::aligned(1), gnu::may_alias]] = Narrow;

static inline Vec widened(const Half* from, int i) {
#if defined(WIDEST)
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

// -------------------------------------------------------------------------------------------- whole numbers

constexpr float ROUNDER = 12582912.f;  // 1.5 * 2^23: a float32 that is added to it is rounded to a whole number

typedef uint8_t Bytes __attribute__((vector_size(LANES * 4), may_alias));
static inline Bytes load(const uint8_t* from) {
  typedef Bytes Loose __attribute__((aligned(1)));
  return *reinterpret_cast<const Loose*>(from);
}

// The bytes of codes, which are the lower halves of `codes`; `table` has the 16 of them again and again.
static inline Bytes looked_up(Bytes table, Bytes codes) {
#if defined(WIDEST) && defined(__AVX512VBMI__)
  return (Bytes)_mm512_permutexvar_epi8((__m512i)codes, (__m512i)table);
#elif defined(WIDEST)
  return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)(codes & 15));
#elif defined(__AVX2__)
  return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)(codes & 15));
#elif defined(__aarch64__)
  return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)(codes & 15));
#else
  Bytes found;
  for (int i = 0; i < LANES * 4; i++) found[i] = table[codes[i] & 15];
  return found;
#endif
}
// ------------------------------------------------------------------------------------------- numbers one by one

static inline float widened(float value) { return value; }
static inline float widened(BFloat16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }
static inline float widened(Half value) {
  uint32_t bits = value.bits & 0x7fff, sign = uint32_t(value.bits & 0x8000) << 16;
  float wide = std::bit_cast<float>(bits << 13) * 0x1p112f;
  if (bits >= 0x7c00) wide = std::bit_cast<float>(0x7f800000 | (bits & 0x3ff) << 13);  // infinite, or no number
  return std::bit_cast<float>(std::bit_cast<uint32_t>(wide) | sign);
}
