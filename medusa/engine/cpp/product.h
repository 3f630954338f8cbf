// A product of rows with packed weights, in the form in which its parts pass it on: products.cpp cuts it into
// pieces, and the files of products in vectors and in tiles compute ranges of its panels.
//
// Weights lie in panels (N / LANES, K / P, LANES, P), where a lane holds P = 2 numbers of bfloat16 or int8 (4
// of int8 for tiles), or one of another format; twelve_bits.h says how those in twelve bits lie.
//
// Every sum has one order that depends on nothing but the row itself: not on how many rows take part, on
// which thread computes it, or on what other rows hold. So the logits of a node are the same to the last bit
// alone, in a tree and in a batch.

#pragma once

#include "group_quantised.h"
#include "number_formats.h"
#include "scratch.h"

namespace medusa {

// The format of weights in twelve bits, beside float, BFloat16, Half and int8_t.
struct TwelveBits {};

// Rows in blocks that a tile holds, the last one over rows of the one before it.
struct TiledRows {
  int64_t num_blocks, rows;    // rows: of a block
  int64_t steps, block_bytes;  // of a block (steps, parts, rows, TILE_WIDTH)
  char* parts;
  float* run_steps;  // of int8 weights (num_blocks * rows, runs): the step of the numbers

  int64_t first_row(int64_t block, int64_t M) const {
    return block * rows < M - rows ? block * rows : M - rows;
  }
};

// Numbers of a row that share a step where weights are int8: 32,767 * 128 * 256 < 2^31, so that sums fit.
constexpr int64_t RUN = 256;
inline int64_t runs_of(int64_t K) { return (K + RUN - 1) / RUN; }

// The numbers of a run as whole ones of 16 bits times a step, which this returns; those from `count` on are
// zeros.
inline float round_run(const float* x, int64_t count, int16_t* whole) {
  float padded[RUN] = {};
  if (count < RUN) x = static_cast<const float*>(std::memcpy(padded, x, count * sizeof(float)));
  return round_to_steps<RUN>(x, whole);
}

struct Product {
  int64_t M, K, N;  // rows, inputs, outputs
  const float* x;   // (M, K)
  const char* panels;
  int64_t panel_bytes;
  const float* scales;  // (N,) of int8 weights, or null
  const float* bias;    // (N,), or null
  float* y;             // the result of a row and an output lies at row * stride + output
  int64_t stride;

  // What was prepared of the rows, where weights are int8 or tiles multiply.
  const int16_t* whole_x = nullptr;  // (M, runs, RUN): x in steps
  const float* run_steps = nullptr;  // (M, runs)
  TiledRows tiled = {};
};

// Multiplies all rows by the panels of a range; the thread is likely to go on up to panel `thread_end`.
using Multiply = void (*)(const Product& product, int64_t panel, int64_t end, int64_t thread_end);

// How a product is computed.
struct Plan {
  Multiply multiply;
  int64_t panels_together;  // panels that a thread reads side by side, at most
};

// Prepare the rows of a product in `scratch`, which must outlive it, and say how to go on. In vectors for all
// formats:
template <typename Weight> Plan plan_in_vectors(Product& product, Scratch& scratch);
// In tile registers for BFloat16, TwelveBits and int8_t, where there are any:
template <typename Weight> Plan plan_in_tiles(Product& product, Scratch& scratch);

// Posts the product of `count` rows of x, from `row` on, with a slice of N outputs of weights that no file has
// quantised; results to y.
void post_product(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& scales,
                  const std::optional<Tensor>& bias, int64_t N, Slice slice, int64_t row, int64_t count,
                  float* y, const Post& post);

// Sums of a row become its outputs from `column` on: times their scales, plus their bias.
void write_outputs(const Product& product, const float* sums, int64_t row, int64_t column, int64_t count);

}  // namespace medusa
