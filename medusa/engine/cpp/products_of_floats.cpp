// Products in vectors with weights of float32, bfloat16 and float16.

#include "products_in_vectors.h"

namespace medusa {
namespace {

template <typename Weight> struct Floats {
  static constexpr int MOST_ROWS = medusa::MOST_ROWS;
  static constexpr int OTHER_REGISTERS = 2;  // a number of a row, and a mask

  template <int J> struct Panels : ColumnPanels<J> {
    using ColumnPanels<J>::ColumnPanels;

    template <int M> void multiply(int64_t row, int64_t block, float* results) const {
      Prefetch prefetch = this->prefetch(block, PER_LANE<Weight> * LANES * sizeof(Weight));
      auto* weights = reinterpret_cast<const Weight*>(this->weights);
      multiply_block<Weight, M, J>(this->product, weights, row, prefetch, results);
    }
  };
};

}  // namespace

template <typename Weight> Plan plan_in_vectors(Product& product, Scratch&) {
  return plan_of_blocks<Floats<Weight>>(product);
}
template Plan plan_in_vectors<float>(Product&, Scratch&);
template Plan plan_in_vectors<BFloat16>(Product&, Scratch&);
template Plan plan_in_vectors<Half>(Product&, Scratch&);

}  // namespace medusa
