// The rules of layers that keep a matrix for each head, medusa.base.recurrent_rules in one operator: a token
// changes it by an outer product, S <- decay S + key written', and reads it, output = S' query. What is written
// is the token's value, or for a delta rule beta (value - S' key), with S after its decay. In a selective scan
// each entry decays by itself, by e^(rate step) with a time step for each column.
//
// Columns of S do not know of each other, so a slice of some columns goes through all tokens in the first
// cache. Multiplications and additions come in the same order for every token, however it is called.

#include <cstring>

#include "operators.h"
#include "scratch.h"
#include "threads.h"
#include "vectors.h"

namespace medusa {
namespace {

constexpr int64_t COLUMNS = 32;  // of a slice
constexpr int VECTORS = COLUMNS / LANES;
constexpr int64_t PARTS = 4;  // of a sum

struct Slice {
  Vec of[VECTORS];
};

Slice slice_of(const float* from, int64_t width) {
  float padded[COLUMNS] = {};
  if (width < COLUMNS) std::memcpy(padded, from, width * sizeof(float));
  const float* source = width < COLUMNS ? padded : from;
  Slice slice;
  for (int i = 0; i < VECTORS; i++) slice.of[i] = load(source + i * LANES);
  return slice;
}

void store_slice(float* to, const Slice& slice, int64_t width) {
  float padded[COLUMNS];
  float* target = width < COLUMNS ? padded : to;
  for (int i = 0; i < VECTORS; i++) store(target + i * LANES, slice.of[i]);
  if (width < COLUMNS) std::memcpy(to, padded, width * sizeof(float));
}

// What nodes did, or do: V numbers of `written` for each head of each node, and K of `key` for each group of heads.
struct Tokens {
  const float *decay, *key, *written;
  int64_t count;   // of a row
  int64_t decays;  // of a head: 1 or K, or with rates V
};

struct Rule {
  int64_t H, G, K, V;
  Tokens pending, nodes;
  const float *query, *beta, *rates;  // rates: of the entries of a head
  const int64_t *path, *num_pending;  // path: the pending nodes of each row, `path_length` places for them
  int64_t path_length;
  const int64_t* parents;  // of each row's nodes; none for a chain
  int64_t parent_rows;
  float *state, *last, *outputs, *written;

  // The key of a head of a node, by its number among those of all nodes.
  int64_t key_of(int64_t token) const { return token / H * G + token % H / (H / G); }

  // S <- decay S + key written', for the K rows of a slice.
  void apply(float* S, const Tokens& tokens, int64_t token, const Slice& written, int64_t column,
             int64_t width) const {
    if (rates) return apply_by_entry(S, tokens, token, written, column, width);
    const float *key = tokens.key + key_of(token) * K, *decay = tokens.decay + token * tokens.decays;
    for (int64_t k = 0; k < K; k++) {
      Vec factor = splat(decay[tokens.decays > 1 ? k : 0]), weight = splat(key[k]);
      float* row = S + k * COLUMNS;
      for (int i = 0; i < VECTORS; i++)
        store(row + i * LANES, multiply_add(weight, written.of[i], load(row + i * LANES) * factor));
    }
  }

  void apply_by_entry(float* S, const Tokens& tokens, int64_t token, const Slice& written, int64_t column,
                      int64_t width) const {
    const float *key = tokens.key + key_of(token) * K, *of_head = rates + token % H * K * V + column;
    Slice step = slice_of(tokens.decay + token * V + column, width);
    for (int64_t k = 0; k < K; k++) {
      Vec weight = splat(key[k]);
      Slice rate = slice_of(of_head + k * V, width);
      float* row = S + k * COLUMNS;
      for (int i = 0; i < VECTORS; i++) {
        Vec factor = exponential(rate.of[i] * step.of[i]);
        store(row + i * LANES, multiply_add(weight, written.of[i], load(row + i * LANES) * factor));
      }
    }
  }

  // S' weights. Sums are in parts, since an addition waits for the one before it.
  Slice read(const float* S, const float* weights) const {
    Slice sums[PARTS] = {};
    auto add = [&](int64_t k, Slice& sum) {
      Vec weight = splat(weights[k]);
      for (int i = 0; i < VECTORS; i++)
        sum.of[i] = multiply_add(weight, load(S + k * COLUMNS + i * LANES), sum.of[i]);
    };
    int64_t whole = K - K % PARTS;
    for (int64_t k = 0; k < whole; k += PARTS)
      for (int64_t part = 0; part < PARTS; part++) add(k + part, sums[part]);
    for (int64_t k = whole; k < K; k++) add(k, sums[0]);
    for (int i = 0; i < VECTORS; i++)
      sums[0].of[i] = (sums[0].of[i] + sums[1].of[i]) + (sums[2].of[i] + sums[3].of[i]);
    return sums[0];
  }

  // What a delta rule writes: beta (value - (decay S)' key).
  Slice correction(const float* S, int64_t token, const Slice& value, float* decayed_key) const {
    const float *key = nodes.key + key_of(token) * K, *decay = nodes.decay + token * nodes.decays;
    for (int64_t k = 0; k < K; k++) decayed_key[k] = key[k] * decay[nodes.decays > 1 ? k : 0];
    Slice seen = read(S, decayed_key);
    for (int i = 0; i < VECTORS; i++) seen.of[i] = (value.of[i] - seen.of[i]) * beta[token];
    return seen;
  }

  // All tokens of a row, for `width` columns of a head from `column` on.
  void run(int64_t row, int64_t head, int64_t column, int64_t width) const {
    static thread_local Scratch scratch;
    int64_t size = K * COLUMNS, N = nodes.count;
    float* decayed_key = at_line(scratch.of(K + 16 + (parents ? N + 1 : 1) * size + 16));
    float* states = at_line(decayed_key + K);
    float* own = state + (row * H + head) * K * V + column;
    for (int64_t k = 0; k < K; k++) {
      __builtin_prefetch(own + k * V + COLUMNS, 1);  // the next slice of this thread, a line of it
      __builtin_prefetch(own + k * V + COLUMNS + 16, 1);
      Slice columns = slice_of(own + k * V, width);
      for (int i = 0; i < VECTORS; i++) store(states + k * COLUMNS + i * LANES, columns.of[i]);
    }
    int64_t count = num_pending ? num_pending[row] : 0;
    for (int64_t p = 0; p < count; p++) {
      int64_t token = (row * pending.count + path[row * path_length + p]) * H + head;
      apply(states, pending, token, slice_of(pending.written + token * V + column, width), column, width);
    }
    if (count) copy_out(own, states, width);
    for (int64_t n = 0; n < N; n++) {
      float* S = states;
      if (parents) {  // the states of nodes come after the one before them
        int64_t parent = parents[(row % parent_rows) * N + n];
        S = states + (n + 1) * size;
        std::memcpy(S, n ? states + (parent + 1) * size : states, size * sizeof(float));
      }
      int64_t token = (row * N + n) * H + head;
      Slice value = slice_of(nodes.written + token * V + column, width);
      if (beta) {
        value = correction(S, token, value, decayed_key);
        store_slice(written + token * V + column, value, width);
      }
      apply(S, nodes, token, value, column, width);
      store_slice(outputs + token * V + column, read(S, query + key_of(token) * K), width);
    }
    if (last) copy_out(last + (row * H + head) * K * V + column, states, width);
  }

  void copy_out(float* to, const float* S, int64_t width) const {
    for (int64_t k = 0; k < K; k++) std::memcpy(to + k * V, S + k * COLUMNS, width * sizeof(float));
  }
};

// Whether `decay` has the shape of decays, or where there are rates that of time steps of V columns.
bool are_decays(const Tensor& decay, int64_t B, int64_t N, int64_t H, int64_t K, int64_t V, bool has_rates) {
  if (has_rates) return has_shape(decay, ScalarType::Float, {B, N, H, V});
  return has_shape(decay, ScalarType::Float, {B, N, H}) ||
         has_shape(decay, ScalarType::Float, {B, N, H, K});
}

bool are_parents_of_chains(const Tensor& parents) {
  int64_t N = parents.size(1);
  for (int64_t i = 0; i < parents.numel(); i++)
    if (numbers<int64_t>(parents)[i] != std::max<int64_t>(i % N - 1, 0)) return false;
  return true;
}

}  // namespace

// state: (B, H, K, V) float32. First the committed nodes of the last pass change it: decay (B, P, H) or (B, P, H, K),
// key (B, P, G, K) and written (B, P, H, V) of all, of which each row has `num_kept` (B,), `path` (B, L). Then the
// nodes of a tree, `parents` (1 or B, N), read query (B, N, G, K) from copies of it. The state after a chain is
// written to `last`, unless that is `state` itself. Returns outputs (B, N, H, V), and what a delta rule with `beta`
// (B, N, H) has written. Of a selective scan `rates` (H, K, V) are at most 0, and decays are time steps (B, N, H, V).
std::tuple<Tensor, Tensor> matrix_rule(Tensor state, Tensor last, std::optional<Tensor> old_decay,
                                       std::optional<Tensor> old_key, std::optional<Tensor> old_written,
                                       std::optional<Tensor> path, std::optional<Tensor> num_kept, Tensor query,
                                       Tensor key, Tensor value, Tensor decay, std::optional<Tensor> beta,
                                       const Tensor& parents, std::optional<Tensor> rates) {
  STD_TORCH_CHECK(state.dim() == 4 && value.dim() == 4, "state must be (B, H, K, V), value (B, N, H, V)");
  int64_t B = state.size(0), H = state.size(1), K = state.size(2), V = state.size(3), N = value.size(1);
  int64_t G = key.dim() == 4 ? key.size(2) : 0;  // H / G heads in turn share a key
  query = as_contiguous(query), key = as_contiguous(key), value = as_contiguous(value);
  decay = as_contiguous(decay);
  if (beta) beta = as_contiguous(*beta);
  auto FLOAT = ScalarType::Float;
  STD_TORCH_CHECK(has_shape(state, FLOAT, {B, H, K, V}) && has_shape(last, FLOAT, {B, H, K, V}),
                  "state and last must be contiguous float32, of one shape");
  bool fits = G && H % G == 0 && has_shape(query, FLOAT, {B, N, G, K}) && has_shape(key, FLOAT, {B, N, G, K}) &&
              has_shape(value, FLOAT, {B, N, H, V}) && are_decays(decay, B, N, H, K, V, !!rates) &&
              has_shape_if_given(beta, FLOAT, {B, N, H}) && has_shape_if_given(rates, FLOAT, {H, K, V}) &&
              !(beta && rates);
  STD_TORCH_CHECK(fits, "query and key must be (B, N, G, K) where G divides H, value (B, N, H, V), decay (B, N, H) or "
                        "(B, N, H, K) and beta (B, N, H), all float32; with rates (H, K, V) decay is (B, N, H, V), "
                        "without beta");
  int64_t P = old_key ? old_key->size(1) : 0, L = path ? path->size(1) : 0;
  if (P) {
    old_decay = as_contiguous(*old_decay), old_key = as_contiguous(*old_key);
    old_written = as_contiguous(*old_written), path = as_contiguous(*path);
    bool old_fits = are_decays(*old_decay, B, P, H, K, V, !!rates) && has_shape(*old_key, FLOAT, {B, P, G, K}) &&
                    has_shape(*old_written, FLOAT, {B, P, H, V}) && are_indices(*path, {B, L}, 0, P) &&
                    are_indices(*num_kept, {B}, 0, L + 1);
    STD_TORCH_CHECK(old_fits, "the last pass must have the shapes of this one, and its path must name its nodes");
  }
  int64_t parent_rows = parents.size(0);
  STD_TORCH_CHECK(are_indices(parents, {ANY, N}, 0, N) && (parent_rows == 1 || parent_rows == B),
                  "parents must be nodes, (1 or B, N) long");
  bool is_chain = are_parents_of_chains(parents);
  for (int64_t i = 0; !is_chain && i < parents.numel(); i++)
    STD_TORCH_CHECK(i % N == 0 || numbers<int64_t>(parents)[i] < i % N, "parents come before their children");
  bool keeps_last = numbers<float>(last) != numbers<float>(state);
  STD_TORCH_CHECK(is_chain || !keeps_last, "only a chain has a last node");
  Tensor outputs = new_tensor({B, N, H, V}, FLOAT);
  Tensor written = new_tensor({beta ? B : 0, N, H, V}, FLOAT);
  Rule rule = {H, G, K, V,
               {numbers<float>(old_decay), numbers<float>(old_key), numbers<float>(old_written), P,
                P && old_decay->dim() == 4 ? K : 1},
               {numbers<float>(decay), numbers<float>(key), numbers<float>(value), N, decay.dim() == 4 ? K : 1},
               numbers<float>(query), numbers<float>(beta), numbers<float>(rates),
               numbers<int64_t>(path), P ? numbers<int64_t>(num_kept) : nullptr, L,
               is_chain ? nullptr : numbers<int64_t>(parents), parent_rows,
               numbers<float>(state), keeps_last ? numbers<float>(last) : nullptr,
               numbers<float>(outputs), numbers<float>(written)};
  int64_t slices = (V + COLUMNS - 1) / COLUMNS;
  parallel_for(B * H * slices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t column = i % slices * COLUMNS;
      rule.run(i / slices / H, i / slices % H, column, std::min(COLUMNS, V - column));
    }
  });
  return {outputs, written};
}

// The rows at `places` (B, L) among `before` (B, M, C) float32, followed by `nodes` (B, N, C): (B, L, C).
Tensor rows_at(const Tensor& before, const Tensor& nodes, const Tensor& places) {
  auto FLOAT = ScalarType::Float;
  STD_TORCH_CHECK(before.dim() == 3 && nodes.dim() == 3 && places.dim() == 2,
                  "rows_at takes (B, M, C), (B, N, C), (B, L)");
  int64_t B = before.size(0), M = before.size(1), C = before.size(2), N = nodes.size(1), L = places.size(1);
  Tensor first = as_contiguous(before), rest = as_contiguous(nodes), at = as_contiguous(places);
  STD_TORCH_CHECK(has_shape(first, FLOAT, {B, M, C}) && has_shape(rest, FLOAT, {B, N, C}),
                  "inputs must be float32, of as many rows and channels before the pass and in it");
  STD_TORCH_CHECK(are_indices(at, {B, L}, 0, M + N), "places must be below M + N, (B, L) long");
  Tensor rows = new_tensor({B, L, C}, FLOAT);
  parallel_for(B * L, std::max<int64_t>(1, 65536 / C), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t row = i / L, place = numbers<int64_t>(at)[i];
      const float* from = place < M ? numbers<float>(first) + (row * M + place) * C
                                    : numbers<float>(rest) + (row * N + place - M) * C;
      std::memcpy(numbers<float>(rows) + i * C, from, C * sizeof(float));
    }
  });
  return rows;
}

}  // namespace medusa
