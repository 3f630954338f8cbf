// Dynamic trees: a level of candidates after another, and the tree of the best of them. The same computation
// as medusa.drafters.dynamic, which says what it is for, as one operator a level.
//
// Shapes: B rows, M nodes of the beam, V' columns of the heads' logits, F candidates after each node, of
// which W are expected by a suffix match, whose continuations have T nodes.

#include <cmath>

#include "constants.h"
#include "operators.h"
#include "scratch.h"
#include "threads.h"
#include "vectors.h"

namespace medusa {
namespace {

// The `count` largest of what is offered, largest first; of equals those that were offered first.
struct Largest {
  struct Entry {
    float value;
    int64_t index;
  };
  size_t count;
  std::vector<Entry> kept = {};

  void offer(float value, int64_t index) {
    if (kept.size() == count && !(value > kept.back().value)) return;
    if (kept.size() == count) kept.pop_back();
    auto is_less = [](float offered, const Entry& each) {
      return offered > each.value;
    };
    kept.insert(std::upper_bound(kept.begin(), kept.end(), value, is_less), {value, index});
  }
};

// log(sum(e^x)) of `size` numbers, which are followed by room for a vector.
float log_sum_exp(float* x, int64_t size) {
  for (int64_t i = size; i % LANES; i++) x[i] = MINUS_INFINITY;
  Vec highest = splat(MINUS_INFINITY), total = {};
  for (int64_t i = 0; i < size; i += LANES) highest = larger(load(x + i), highest);
  float top = MINUS_INFINITY;
  for (int lane = 0; lane < LANES; lane++) top = std::max(top, highest[lane]);
  for (int64_t i = 0; i < size; i += LANES) total += exponential(load(x + i) - top);
  return top + std::log(sum_of(total));
}

float log_add_exp(float a, float b) {
  return a == b ? a + std::log(2.f) : std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
}

// The continuations of suffix matches, as medusa.drafters.suffix has them: tokens and shares (B, T), children
// (B, T, W).
struct Continuations {
  const Tensor &tokens, &children, &shares;

  int64_t T() const { return tokens.size(1); }
  int64_t W() const { return children.size(2); }

  // For outputs of `vocab_size` tokens.
  void check(int64_t B, int64_t vocab_size) const {
    int64_t T = tokens.dim() == 2 ? tokens.size(1) : 0;
    STD_TORCH_CHECK(T && are_indices(tokens, {B, T}, 0, vocab_size),
                    "what is expected must be tokens (B, T) long that are outputs");
    STD_TORCH_CHECK(are_indices(children, {B, T, ANY}, 0, T) && has_shape(shares, ScalarType::Float, {B, T}),
                    "children (B, T, W) long and shares (B, T) must be of the nodes of what is expected");
  }
};

// ---- the tokens after a node

// What a node of the beam is followed by.
struct NodeInputs {
  const float* logits;
  float sharpness;
  const float* noise;           // (V',), or null
  const int64_t* children;      // (W,): nodes of the continuations, 0 for none
  const int64_t* expected;      // (T,): their tokens
  const float* shares;          // (T,)
  const float* expected_noise;  // (T,), or null
};

// How the tokens after any node of a level are found.
struct Mixture {
  int64_t num_columns, fanout, W;
  const int64_t* token_map;  // (V',), or null
  const int64_t* columns;    // (V,), or null: the column of a token, -1 for none

  int64_t token_of(int64_t column) const { return token_map ? token_map[column] : column; }
  int64_t column_of(int64_t token) const {
    int64_t column = columns ? columns[token] : token;
    return column < num_columns ? column : -1;
  }

  // The heads' `fanout` best tokens, then the W that are expected, and their log-probabilities in the mixture
  // of both.
  void candidates_after(const NodeInputs& node, int64_t* tokens, float* logprobs) const {
    thread_local Scratch scratch;
    float* scores = scratch.of(num_columns + LANES);
    for (int64_t i = 0; i < num_columns; i++) scores[i] = node.logits[i] * node.sharpness;
    float sum = log_sum_exp(scores, num_columns);
    for (int64_t i = 0; i < num_columns; i++) scores[i] -= sum;
    float left = 1;
    for (int64_t w = 0; w < W; w++) left -= node.children[w] ? node.shares[node.children[w]] : 0.f;
    float heads_share = std::log(left);

    float* expected = logprobs + fanout;
    float total = MINUS_INFINITY;
    for (int64_t w = 0; w < W; w++) {
      int64_t child = node.children[w], token = node.expected[child], column = column_of(token);
      tokens[fanout + w] = token;
      expected[w] = MINUS_INFINITY;
      if (!child) continue;
      if (column >= 0) {  // the heads score it too: it is one candidate
        expected[w] = std::isnan(scores[column]) ? WORST : scores[column] + heads_share;
        scores[column] = MINUS_INFINITY;
      }
      expected[w] = log_add_exp(expected[w], std::log(node.shares[child]));
      expected[w] += node.expected_noise ? node.expected_noise[child] : 0.f;
      total = log_add_exp(total, expected[w]);
    }
    if (node.noise) {
      for (int64_t i = 0; i < num_columns; i++) scores[i] += node.noise[i];
      total = log_add_exp(log_sum_exp(scores, num_columns) + heads_share, total);
      heads_share -= total;
      for (int64_t w = 0; w < W; w++) expected[w] -= total;
    }
    Largest best{static_cast<size_t>(fanout)};
    for (int64_t i = 0; i < num_columns; i++) best.offer(std::isnan(scores[i]) ? WORST : scores[i], i);
    for (int64_t i = 0; i < fanout; i++) {
      tokens[i] = token_of(best.kept[i].index);
      logprobs[i] = best.kept[i].value + heads_share;
    }
    for (int64_t i = 0; i < fanout + W; i++)
      logprobs[i] = logprobs[i] >= WORST ? std::min(logprobs[i], 0.f) : WORST;
  }
};

// ---- a level

// The nodes that are expanded: the root, or the best candidates of the level above.
struct Beam {
  Tensor paths;                        // (B, M, depth) long: the tokens from the root to each
  std::optional<Tensor> match_nodes;   // (B, M) long: the node of the continuations with the same path, or -1
  std::optional<Tensor> path_logprob;  // (B, M)
  std::optional<Tensor> candidate_numbers;  // (B, M) long
};

struct Candidates {
  Tensor tokens, values, parents;  // (B, M F) each; parents: numbers of candidates, -1 for the root
};

struct Level {
  Tensor logits;  // (B, M, V')
  std::optional<Tensor> sharpness, noise, expected_noise;  // (B,), (B, V'), (B, T), in sampled rows
  std::optional<Tensor> token_map, columns;
  Continuations continuations;
  Beam beam;
  int64_t num_candidates;  // of the levels above
  int64_t fanout, beam_width;
  bool has_match;  // whether continuations take part

  int64_t B = 0, M = 0, V = 0, depth = 0, T = 0, W = 0, F = 0;

  // Checks all tensors, and takes the sizes from them.
  void prepare() {
    logits = as_contiguous(logits);
    STD_TORCH_CHECK(
        logits.scalar_type() == ScalarType::Float && logits.dim() == 3 && fanout <= logits.size(2),
        "logits must be (B, M, C) float32 of as many columns as are wanted");
    int64_t num_columns = logits.size(2);
    B = logits.size(0);
    M = logits.size(1);
    V = columns ? columns->numel() : num_columns;
    continuations.check(B, V);
    T = continuations.T();
    W = has_match ? continuations.W() : 0;
    F = fanout + W;
    depth = beam.paths.dim() == 3 ? beam.paths.size(2) : 0;
    STD_TORCH_CHECK(M > 0 && depth > 0 && has_shape(beam.paths, ScalarType::Long, {B, M, depth}),
                    "paths must be (B, M, depth) long");
    STD_TORCH_CHECK(fanout > 0 && beam_width > 0, "the widths of a level must be at least 1");
    STD_TORCH_CHECK(!beam.match_nodes || are_indices(*beam.match_nodes, {B, M}, -1, T),
                    "the beam must lie among the nodes of what is expected");
    STD_TORCH_CHECK(has_shape_if_given(beam.path_logprob, ScalarType::Float, {B, M}) &&
                        has_shape_if_given(beam.candidate_numbers, ScalarType::Long, {B, M}),
                    "values and numbers of the beam must be (B, M)");
    STD_TORCH_CHECK(has_shape_if_given(sharpness, ScalarType::Float, {B}), "sharpness must be (B,) float32");
    bool fits = has_shape_if_given(columns, ScalarType::Long, {V});
    fits = fits && (!token_map || (columns && has_shape(*token_map, ScalarType::Long, {num_columns})));
    STD_TORCH_CHECK(fits, "a token map must be (C,) long, and the columns of all tokens (V,) long");
    STD_TORCH_CHECK(!token_map || are_indices(*token_map, {num_columns}, 0, V),
                    "a token map must be of tokens that there are");
    if (noise) noise = as_contiguous(*noise);
    if (expected_noise) expected_noise = as_contiguous(*expected_noise);
    fits = has_shape_if_given(noise, ScalarType::Float, {B, num_columns});
    fits = fits && has_shape_if_given(expected_noise, ScalarType::Float, {B, T});
    STD_TORCH_CHECK(fits && bool(noise) == bool(expected_noise),
                    "noise must be (B, C) float32, and that of what is expected (B, T)");
  }

  // The continuations (W,) after a node of the beam, 0 for none; `nothing` where it is not among them.
  const int64_t* children_of(int64_t node, const std::vector<int64_t>& nothing) const {
    int64_t match = beam.match_nodes ? numbers<int64_t>(beam.match_nodes)[node] : 0;
    if (match < 0 || !has_match) return nothing.data();
    return numbers<int64_t>(continuations.children) + (node / M * T + match) * W;
  }

  // The candidates after all nodes of the beam.
  Candidates expand(const std::vector<int64_t>& nothing) const {
    int64_t num_columns = logits.size(2);
    Candidates found{new_tensor({B, M * F}, ScalarType::Long), new_tensor({B, M * F}, ScalarType::Float),
                     new_tensor({B, M * F}, ScalarType::Long)};
    Mixture mixture{num_columns, fanout, W, numbers<int64_t>(token_map), numbers<int64_t>(columns)};
    parallel_for(B * M, 1, [&](int64_t begin, int64_t end) {
      for (int64_t node = begin; node < end; node++) {
        int64_t row = node / M;
        NodeInputs inputs{
            .logits = numbers<float>(logits) + node * num_columns,
            .sharpness = sharpness ? numbers<float>(sharpness)[row] : 1.f,
            .noise = noise ? numbers<float>(noise) + row * num_columns : nullptr,
            .children = children_of(node, nothing),
            .expected = numbers<int64_t>(continuations.tokens) + row * T,
            .shares = numbers<float>(continuations.shares) + row * T,
            .expected_noise = expected_noise ? numbers<float>(expected_noise) + row * T : nullptr};
        float* values = numbers<float>(found.values) + node * F;
        int64_t* parents = numbers<int64_t>(found.parents) + node * F;
        mixture.candidates_after(inputs, numbers<int64_t>(found.tokens) + node * F, values);
        float path_logprob = beam.path_logprob ? numbers<float>(beam.path_logprob)[node] : 0.f;
        int64_t number = beam.candidate_numbers ? numbers<int64_t>(beam.candidate_numbers)[node] : -1;
        for (int64_t i = 0; i < F; i++) {
          values[i] += path_logprob;
          parents[i] = number;
        }
      }
    });
    return found;
  }

  // The next beam, `width` of the `best` candidates of each row: as Beam has it, and (B, width) long which
  // nodes of this beam they come after.
  std::pair<Beam, Tensor> next_beam(const Candidates& found, const std::vector<Largest>& best, int64_t width,
                                    const std::vector<int64_t>& nothing) const {
    Tensor beam_parents = new_tensor({B, width}, ScalarType::Long);
    Beam next{new_tensor({B, width, depth + 1}, ScalarType::Long), new_tensor({B, width}, ScalarType::Long),
              new_tensor({B, width}, ScalarType::Float), new_tensor({B, width}, ScalarType::Long)};
    for (int64_t row = 0; row < B; row++)
      for (int64_t w = 0; w < width; w++) {
        auto [value, i] = best[row].kept[w];
        int64_t to = row * width + w, node = row * M + i / F, place = i % F;
        int64_t* path = numbers<int64_t>(next.paths) + to * (depth + 1);
        std::copy_n(numbers<int64_t>(beam.paths) + node * depth, depth, path);
        path[depth] = numbers<int64_t>(found.tokens)[row * M * F + i];
        int64_t match = place < fanout ? 0 : children_of(node, nothing)[place - fanout];
        numbers<int64_t>(next.match_nodes)[to] = match ? match : -1;
        numbers<float>(next.path_logprob)[to] = value;
        numbers<int64_t>(next.candidate_numbers)[to] = num_candidates + i;
        numbers<int64_t>(beam_parents)[to] = i / F;
      }
    return {next, beam_parents};
  }
};

}  // namespace

// A level of a tree of `num_wanted` candidates: those after each node of the beam, whose optional tensors are
// left out where it is the root. Returns
// - tokens, values and parents of the candidates, (B, M F) each;
// - the next beam, `beam_width` nodes or fewer where no row has so many that are as probable as
// `min_accept_prob`: its
//   paths, match nodes, log-probabilities, candidate numbers, and places in the beam above;
// - the `num_wanted` largest values of all levels (B, num_wanted), from `largest_values`, those of the levels
// above; and whether a node below can have a higher value than the last of these, and the most probable ones
// are, in the mean of the rows, as probable as `min_accept_prob`.
std::tuple<std::vector<Tensor>, bool> grow(
    Tensor logits, std::optional<Tensor> sharpness, std::optional<Tensor> noise,
    std::optional<Tensor> expected_noise, std::optional<Tensor> token_map, std::optional<Tensor> columns,
    const Tensor& expected_tokens, const Tensor& children, const Tensor& shares, const Tensor& paths,
    std::optional<Tensor> match_nodes, std::optional<Tensor> path_logprob,
    std::optional<Tensor> candidate_numbers,
    std::optional<Tensor> largest_values, int64_t num_wanted, int64_t num_candidates, int64_t fanout,
    int64_t beam_width, bool has_match, double min_accept_prob) {
  Level level{.logits = logits,
              .sharpness = sharpness,
              .noise = noise,
              .expected_noise = expected_noise,
              .token_map = token_map,
              .columns = columns,
              .continuations = {expected_tokens, children, shares},
              .beam = {paths, match_nodes, path_logprob, candidate_numbers},
              .num_candidates = num_candidates,
              .fanout = fanout,
              .beam_width = beam_width,
              .has_match = has_match};
  level.prepare();
  int64_t B = level.B, num_found = level.M * level.F;
  STD_TORCH_CHECK(num_wanted > 0 && has_shape_if_given(largest_values, ScalarType::Float, {B, num_wanted}),
                  "the largest values must be (B, num_wanted) float32");
  std::vector<int64_t> nothing(level.W, 0);
  Candidates found = level.expand(nothing);

  Tensor largest = new_tensor({B, num_wanted}, ScalarType::Float);
  std::vector<Largest> best(B, Largest{static_cast<size_t>(std::min(beam_width, num_found))});
  int64_t width = 1;
  bool can_improve = false;
  double sum_of_best = 0;
  for (int64_t row = 0; row < B; row++) {
    const float* values = numbers<float>(found.values) + row * num_found;
    Largest of_all{static_cast<size_t>(num_wanted)};
    for (int64_t i = 0; i < num_wanted; i++)
      of_all.offer(largest_values ? numbers<float>(largest_values)[row * num_wanted + i] : MINUS_INFINITY, i);
    for (int64_t i = 0; i < num_found; i++) {
      best[row].offer(values[i], i);
      of_all.offer(values[i], i);
    }
    for (int64_t i = 0; i < num_wanted; i++)
      numbers<float>(largest)[row * num_wanted + i] = of_all.kept[i].value;
    auto& kept = best[row].kept;
    auto is_likely = [&](const Largest::Entry& each) {
      return std::exp(each.value) >= min_accept_prob;
    };
    width = std::max<int64_t>(width, std::count_if(kept.begin(), kept.end(), is_likely));
    can_improve |= kept[0].value > of_all.kept.back().value;
    sum_of_best += std::exp(kept[0].value);
  }
  auto [beam, beam_parents] = level.next_beam(found, best, width, nothing);
  bool goes_on = can_improve && sum_of_best >= min_accept_prob * B;
  return {{found.tokens, found.values, found.parents, beam.paths, *beam.match_nodes, *beam.path_logprob,
           *beam.candidate_numbers, beam_parents, largest},
          goes_on};
}

// ---- the tree

namespace {

struct Candidate {
  int64_t token, parent, depth;  // parent: a candidate's number, -1 for the root
  float value;
};

// The candidates of a row, level by level.
std::vector<Candidate> candidates_of(int64_t row, const std::vector<Tensor>& levels) {
  std::vector<Candidate> found;
  for (size_t level = 0; level < levels.size() / 3; level++) {
    const Tensor &tokens = levels[3 * level], &values = levels[3 * level + 1],
                 &parents = levels[3 * level + 2];
    int64_t size = tokens.size(1), depth = level + 1;
    for (int64_t i = row * size; i < (row + 1) * size; i++)
      found.push_back(
          {numbers<int64_t>(tokens)[i], numbers<int64_t>(parents)[i], depth, numbers<float>(values)[i]});
  }
  return found;
}

// Adds the continuations below a row's last beam, M nodes, to its candidates: there they go on alone.
void add_continuations(int64_t row, const Continuations& given, const int64_t* match_nodes,
                       const int64_t* candidate_numbers, int64_t M, std::vector<Candidate>& found) {
  int64_t T = given.T(), W = given.W();
  const int64_t* tokens = numbers<int64_t>(given.tokens) + row * T;
  const int64_t* children = numbers<int64_t>(given.children) + row * T * W;
  const float* shares = numbers<float>(given.shares) + row * T;
  std::vector<int64_t> number_of(T, -1);  // of the candidate that each node is
  for (int64_t m = 0; m < M; m++)
    if (match_nodes[m] >= 0) number_of[match_nodes[m]] = candidate_numbers[m];
  for (int64_t node = 0; node < T; node++)
    for (int64_t w = 0; w < W && number_of[node] >= 0; w++) {
      int64_t child = children[node * W + w];
      if (!child) continue;
      Candidate parent = found[number_of[node]];
      float value = parent.value + std::log(shares[child]);
      number_of[child] = found.size();
      found.push_back({tokens[child], number_of[node], parent.depth + 1, value});
    }
}

// Trees of N nodes, as medusa.trees.TreeTopology has them, and the values of their nodes.
struct Trees {
  int64_t N, L;  // L: max_depth + 1
  Tensor tokens, parents, depths, ancestors, lineage, path_logprob;

  Trees(int64_t B, int64_t N, int64_t L)
      : N(N),
        L(L),
        tokens(new_tensor({B, N}, ScalarType::Long)),
        parents(new_tensor({B, N}, ScalarType::Long)),
        depths(new_tensor({B, N}, ScalarType::Long)),
        ancestors(new_tensor({B, N, N}, ScalarType::Bool)),
        lineage(new_tensor({B, N, L}, ScalarType::Long)),
        path_logprob(new_tensor({B, N}, ScalarType::Float)) {}

  // Node `node` of a row, whose parent was put before it; the root is its own parent.
  void put(int64_t row, int64_t node, int64_t parent, const Candidate& candidate) {
    int64_t index = row * N + node, above = row * N + parent;
    numbers<int64_t>(tokens)[index] = candidate.token;
    numbers<int64_t>(parents)[index] = parent;
    numbers<int64_t>(depths)[index] = candidate.depth;
    numbers<float>(path_logprob)[index] = candidate.value;
    bool* is_ancestor = numbers<bool>(ancestors);
    for (int64_t other = 0; other < N; other++)
      is_ancestor[index * N + other] = other == node || (node && is_ancestor[above * N + other]);
    int64_t* line = numbers<int64_t>(lineage);
    for (int64_t level = 0; level < L; level++)
      line[index * L + level] = level < candidate.depth ? line[above * L + level] : node;
  }
};

}  // namespace

// The trees of root (B,) and the `num_nodes` - 1 candidates of highest value, of `levels`: tokens, values and
// parents of each. Below the last beam (B, M), of these values and candidate numbers, the continuations go on
// alone. Returns tokens, parents, depths (B, N), ancestors (B, N, N), lineage (B, N, L) and path_logprob (B,
// N). No candidate has a higher value than its parent, which comes before it.
std::vector<Tensor> tree_of(const Tensor& root, std::vector<Tensor> levels, const Tensor& expected_tokens,
                            const Tensor& children, const Tensor& shares, const Tensor& match_nodes,
                            const Tensor& path_logprob, const Tensor& candidate_numbers, int64_t num_nodes,
                            int64_t max_depth) {
  bool fits = root.scalar_type() == ScalarType::Long && root.is_contiguous();
  STD_TORCH_CHECK(fits && num_nodes > 0 && max_depth >= 0 && levels.size() % 3 == 0,
                  "a tree must have a root (B,) long");
  int64_t B = root.numel(), N = num_nodes;
  Continuations continuations{expected_tokens, children, shares};
  continuations.check(B, std::numeric_limits<int64_t>::max());
  int64_t M = candidate_numbers.dim() == 2 ? candidate_numbers.size(1) : 0, num_candidates = 0;
  STD_TORCH_CHECK(are_indices(match_nodes, {B, M}, -1, continuations.T()),
                  "the beam must lie among the nodes of what is expected");
  for (size_t level = 0; level < levels.size(); level += 3) {
    int64_t size = levels[level].dim() == 2 ? levels[level].size(1) : -1;
    num_candidates += size;
    fits = size >= 0 && has_shape(levels[level], ScalarType::Long, {B, size});
    fits = fits && has_shape(levels[level + 1], ScalarType::Float, {B, size});
    fits = fits && are_indices(levels[level + 2], {B, size}, -1, num_candidates);
    STD_TORCH_CHECK(fits, "a level must be tokens, values and parents among the candidates, (B, C) each");
  }
  STD_TORCH_CHECK(are_indices(candidate_numbers, {B, M}, -1, num_candidates) &&
                      has_shape(path_logprob, ScalarType::Float, {B, M}),
                  "numbers of the beam must be those of candidates");
  Trees trees(B, N, max_depth + 1);
  std::vector<int64_t> order, node_of;  // candidates by their value, and the node that each becomes
  for (int64_t row = 0; row < B; row++) {
    int64_t root_token = numbers<int64_t>(root)[row];
    std::vector<Candidate> found = candidates_of(row, levels);
    add_continuations(row, continuations, numbers<int64_t>(match_nodes) + row * M,
                      numbers<int64_t>(candidate_numbers) + row * M, M, found);
    while (static_cast<int64_t>(found.size()) < N - 1) found.push_back({root_token, -1, 1, MINUS_INFINITY});
    order.resize(found.size());
    node_of.resize(found.size());
    for (size_t i = 0; i < found.size(); i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return found[a].value > found[b].value; });
    trees.put(row, 0, 0, {root_token, -1, 0, 0.f});
    for (int64_t node = 1; node < N; node++) {
      const Candidate& candidate = found[order[node - 1]];
      node_of[order[node - 1]] = node;
      trees.put(row, node, candidate.parent < 0 ? 0 : node_of[candidate.parent], candidate);
    }
  }
  return {trees.tokens, trees.parents, trees.depths, trees.ancestors, trees.lineage, trees.path_logprob};
}

}  // namespace medusa
