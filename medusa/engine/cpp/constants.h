// Numbers that Python needs as well: medusa.engine.kernels.shared_constant reads them here, one a line.

#pragma once

#include <cstdint>

namespace medusa {

// The lowest log-probability of a token, also where the heads give NaN. So values can always be compared, and
// no child is worth more than its parent.
constexpr float WORST = -1e30f;

// Tokens that a match counts at most.
constexpr int64_t MAX_MATCH = 16;
// Largest number of children of a node of the continuations.
constexpr int64_t MAX_CHILDREN = 3;
// Nodes of the continuations beyond one per depth.
constexpr int64_t SPARE_CONTINUATIONS = 32;
// Tokens that agree at places of a corpus, and beside the best of the others: shorter ones say less than the
// heads.
constexpr int64_t LEAST_OF_SEVERAL = 4;
// Lengths of match by which a corpus is indexed.
constexpr int64_t NUM_ORDERS = 2;

}  // namespace medusa
