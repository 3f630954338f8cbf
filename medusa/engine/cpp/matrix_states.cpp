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

// What tokens did, or do: K numbers of `key` and V of `written` for each head of each token.
struct Tokens {
  const float *decay, *key, *written;
  int64_t count;   // of a row
  int64_t decays;  // of a head: 1 or K, or with rates V
};

struct Rule {
  int64_t H, K, V;
  Tokens pending, nodes;
  const float *query, *beta, *rates;  // rates: of the entries of a head
  const int64_t *num_pending, *parents;  // parents: of each row's nodes; none for a chain
  int64_t parent_rows;
  float *state, *last, *outputs, *written;

  // S <- decay S + key written', for the K rows of a slice.
  void apply(float* S, const Tokens& tokens, int64_t token, const Slice& written, int64_t column,
             int64_t width) const {
    if (rates) return apply_by_entry(S, tokens, token, written, column, width);
    const float *key = tokens.key + token * K, *decay = tokens.decay + token * tokens.decays;
    for (int64_t k = 0; k < K; k++) {
      Vec factor = splat(decay[tokens.decays > 1 ? k : 0]), weight = splat(key[k]);
      float* row = S + k * COLUMNS;
      for (int i = 0; i < VECTORS; i++)
        store(row + i * LANES, multiply_add(weight, written.of[i], load(row + i * LANES) * factor));
    }
  }

  void apply_by_entry(float* S, const Tokens& tokens, int64_t token, const Slice& written, int64_t column,
                      int64_t width) const {
    const float *key = tokens.key + token * K, *of_head = rates + token % H * K * V + column;
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

  // What a delta rule writes: beta (value - (decay S)' key).
  Slice correction(const float* S, int64_t token, const Slice& value) const {
    const float *key = nodes.key + token * K, *decay = nodes.decay + token * nodes.decays;
    Slice seen = {};
    for (int64_t k = 0; k < K; k++) {
      Vec factor = splat(decay[nodes.decays > 1 ? k : 0]), weight = splat(key[k]);
      const float* row = S + k * COLUMNS;
      for (int i = 0; i < VECTORS; i++)
        seen.of[i] = multiply_add(weight, load(row + i * LANES) * factor, seen.of[i]);
    }
    for (int i = 0; i < VECTORS; i++) seen.of[i] = (value.of[i] - seen.of[i]) * beta[token];
    return seen;
  }

  Slice read(const float* S, int64_t token) const {
    Slice output = {};
    for (int64_t k = 0; k < K; k++) {
      Vec weight = splat(query[token * K + k]);
      for (int i = 0; i < VECTORS; i++)
        output.of[i] = multiply_add(weight, load(S + k * COLUMNS + i * LANES), output.of[i]);
    }
    return output;
  }

  // All tokens of a row, for `width` columns of a head from `column` on.
  void run(int64_t row, int64_t head, int64_t column, int64_t width) const {
    static thread_local Scratch scratch;
    int64_t size = K * COLUMNS, N = nodes.count;
    float* states = at_line(scratch.of((parents ? N + 1 : 1) * size + 16));
    float* own = state + (row * H + head) * K * V + column;
    for (int64_t k = 0; k < K; k++) {
      Slice columns = slice_of(own + k * V, width);
      for (int i = 0; i < VECTORS; i++) store(states + k * COLUMNS + i * LANES, columns.of[i]);
    }
    int64_t count = num_pending ? num_pending[row] : 0;
    for (int64_t p = 0; p < count; p++) {
      int64_t token = (row * pending.count + p) * H + head;
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
        value = correction(S, token, value);
        store_slice(written + token * V + column, value, width);
      }
      apply(S, nodes, token, value, column, width);
      store_slice(outputs + token * V + column, read(S, token), width);
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

}  // namespace

// state: (B, H, K, V) float32; the first `num_pending` (B,) updates of each row are applied to it, decay (B, P, H)
// or (B, P, H, K), key (B, P, H, K), written (B, P, H, V). Then the nodes of a tree, `parents` (1 or B, N), or of a
// chain without, read query (B, N, H, K) from copies of it. Returns outputs (B, N, H, V), what a delta rule with
// `beta` (B, N, H) has written, and the state after a chain, where it is to be kept. Of a selective scan `rates`
// (H, K, V) are at most 0, and decays are time steps (B, N, H, V).
std::vector<Tensor> matrix_rule(Tensor state, std::optional<Tensor> pending_decay,
                                std::optional<Tensor> pending_key, std::optional<Tensor> pending_written,
                                std::optional<Tensor> num_pending, Tensor query, Tensor key, Tensor value,
                                Tensor decay, std::optional<Tensor> beta, std::optional<Tensor> parents,
                                bool keeps_last, std::optional<Tensor> rates) {
  STD_TORCH_CHECK(state.dim() == 4 && value.dim() == 4, "state must be (B, H, K, V), value (B, N, H, V)");
  int64_t B = state.size(0), H = state.size(1), K = state.size(2), V = state.size(3), N = value.size(1);
  query = as_contiguous(query), key = as_contiguous(key), value = as_contiguous(value);
  decay = as_contiguous(decay);
  if (beta) beta = as_contiguous(*beta);
  auto FLOAT = ScalarType::Float;
  STD_TORCH_CHECK(has_shape(state, FLOAT, {B, H, K, V}), "state must be contiguous float32");
  bool fits = has_shape(query, FLOAT, {B, N, H, K}) && has_shape(key, FLOAT, {B, N, H, K}) &&
              has_shape(value, FLOAT, {B, N, H, V}) && are_decays(decay, B, N, H, K, V, !!rates) &&
              has_shape_if_given(beta, FLOAT, {B, N, H}) && has_shape_if_given(rates, FLOAT, {H, K, V}) &&
              !(beta && rates);
  STD_TORCH_CHECK(fits, "query and key must be (B, N, H, K), value (B, N, H, V), decay (B, N, H) or (B, N, H, K) "
                        "and beta (B, N, H), all float32; with rates (H, K, V) decay is (B, N, H, V), without beta");
  int64_t P = pending_key ? pending_key->size(1) : 0;
  if (P) {
    bool pending_fits = pending_decay && pending_written && num_pending &&
                        are_decays(*pending_decay, B, P, H, K, V, !!rates) &&
                        has_shape(*pending_key, FLOAT, {B, P, H, K}) &&
                        has_shape(*pending_written, FLOAT, {B, P, H, V}) &&
                        are_indices(*num_pending, {B}, 0, P + 1);
    STD_TORCH_CHECK(pending_fits, "pending updates must have the shapes of nodes, and at most P in a row");
  }
  int64_t parent_rows = parents ? parents->size(0) : 1;
  if (parents) {
    STD_TORCH_CHECK(are_indices(*parents, {ANY, N}, 0, N) && (parent_rows == 1 || parent_rows == B),
                    "parents must be nodes, (1 or B, N) long");
    for (int64_t i = 0; i < parents->numel(); i++)
      STD_TORCH_CHECK(i % N == 0 || numbers<int64_t>(*parents)[i] < i % N, "parents come before their children");
  }
  Tensor outputs = new_tensor({B, N, H, V}, FLOAT);
  Tensor written = beta ? new_tensor({B, N, H, V}, FLOAT) : value;
  Tensor last = keeps_last && !parents ? new_tensor({B, H, K, V}, FLOAT) : new_tensor({0}, FLOAT);
  Rule rule = {H, K, V,
               {numbers<float>(pending_decay), numbers<float>(pending_key), numbers<float>(pending_written), P,
                P && pending_decay->dim() == 4 ? K : 1},
               {numbers<float>(decay), numbers<float>(key), numbers<float>(value), N, decay.dim() == 4 ? K : 1},
               numbers<float>(query), numbers<float>(beta), numbers<float>(rates),
               P ? numbers<int64_t>(num_pending) : nullptr, numbers<int64_t>(parents), parent_rows,
               numbers<float>(state), last.numel() ? numbers<float>(last) : nullptr,
               numbers<float>(outputs), numbers<float>(written)};
  int64_t slices = (V + COLUMNS - 1) / COLUMNS;
  parallel_for(B * H * slices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t column = i % slices * COLUMNS;
      rule.run(i / slices / H, i / slices % H, column, std::min(COLUMNS, V - column));
    }
  });
  return {outputs, written, last};
}

}  // namespace medusa
