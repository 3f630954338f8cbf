// How rows of a weight become lanes of a panel.

#pragma once

#include "vectors.h"

namespace medusa {

// Some lanes of a panel from their rows, `PER` numbers of a lane at a time; what is missing of the last of
// these is 0.
template <int PER, typename Weight>
void interleave_rows(const Weight* rows, int64_t num_lanes, int64_t K, Weight* panel) {
  int64_t k = 0;
  for (; k + PER <= K; k += PER, panel += LANES * PER)
    for (int64_t lane = 0; lane < num_lanes; lane++)
      std::memcpy(panel + lane * PER, rows + lane * K + k, PER * sizeof(Weight));
  for (int64_t lane = 0; lane < num_lanes && k < K; lane++)
    for (int i = 0; i < PER; i++) panel[lane * PER + i] = k + i < K ? rows[lane * K + k + i] : Weight{};
}

}  // namespace medusa
