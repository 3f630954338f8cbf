// Attention over a tree: what its nodes see of the keys and values before them and among each other.
//
// Positions are summed in chunks of CHUNK, which are then added in order, so that the bits of a node's result
// depend on nothing but what it sees. A position before a node's `end` lies in the slot of its number. A node
// of the tree stands at `end` and its depth, whatever its slot is: where it will lie once it is committed.

#include <atomic>
#include <cmath>
#include <utility>

#include "operators.h"
#include "scratch.h"
#include "threads.h"
#include "vectors.h"

namespace medusa {
namespace {

// ---- queries times keys

// Rows of `width` numbers each, which begin `stride` apart.
struct Rows {
  const float* data;
  int64_t stride, width;

  const float* row(int64_t index) const { return data + index * stride; }
  Rows from(int64_t index) const { return {row(index), stride, width}; }
};

template <bool HIGH, int... LANE> inline Vec interleaved(Vec a, Vec b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (LANE / 2 + (HIGH ? LANES / 2 : 0) + (LANE % 2 ? LANES : 0))...);
#else
  return __builtin_shuffle(a, b, Int{(LANE / 2 + (HIGH ? LANES / 2 : 0) + (LANE % 2 ? LANES : 0))...});
#endif
}

// Adds each half of a vector to the other, of two vectors at a time.
inline Vec halves_added(Vec a, Vec b) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
  return interleaved<false>(a, b, lanes) + interleaved<true>(a, b, lanes);
}
inline Vec halves_added(Vec a, Vec b, Vec c, Vec d) {
  return halves_added(halves_added(a, c), halves_added(b, d));
}

// Scores (M, LANES) of M queries with LANES slots, four slots at a time: the sums over their lanes come out
// in the order of the slots, when those four lie LANES / 4 apart.
template <int M>
inline void score_block(const float* queries, const float* const (&keys)[LANES], int64_t width, float* scores,
                        int64_t stride) {
  constexpr int GROUPS = LANES / 4;
  int64_t whole = width / LANES * LANES;
  Vec of_group[M][GROUPS];
#pragma GCC unroll 4
  for (int group = 0; group < GROUPS; group++) {
    Vec parts[M][4] = {};
    for (int64_t d = 0; d < whole; d += LANES) {
      Vec key[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) key[i] = load(keys[group + i * GROUPS] + d);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        Vec query = load(queries + m * width + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) parts[m][i] = multiply_add(query, key[i], parts[m][i]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
      of_group[m][group] = halves_added(parts[m][0], parts[m][1], parts[m][2], parts[m][3]);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++) {
    Vec* sums = of_group[m];
    if constexpr (GROUPS == 4)
      store(scores + m * stride, halves_added(sums[0], sums[1], sums[2], sums[3]));
    else if constexpr (GROUPS == 2)
      store(scores + m * stride, halves_added(sums[0], sums[1]));
    else
      store(scores + m * stride, sums[0]);
    // numbers beyond the last whole vector
    for (int lane = 0; whole < width && lane < LANES; lane++) {
      float& score = scores[m * stride + lane];
      for (int64_t d = whole; d < width; d++)
        score = multiply_add(queries[m * width + d], keys[lane][d], score);
    }
  }
}

template <int M>
inline void score_queries(int64_t count, const float* queries, const float* const (&keys)[LANES],
                          int64_t width, float* scores, int64_t stride) {
  for (; count >= M; count -= M, queries += M * width, scores += M * stride)
    score_block<M>(queries, keys, width, scores, stride);
  if constexpr (M > 1)
    if (count) score_queries<M - 1>(count, queries, keys, width, scores, stride);
}

// Queries (count, width) times `num_slots` keys -> scores (count, slots rounded up to LANES), whose rows
// begin `stride` apart. Between queries the next keys are fetched, and the values of these slots, which are
// read next.
void score(const float* queries, int64_t count, Rows keys, Rows values, int64_t num_slots, float* scores,
           int64_t stride) {
  constexpr int64_t M = REGISTERS == 32 ? 4 : 2, LINE = CACHE_LINE / sizeof(float);
  int64_t num_groups = (count + M - 1) / M;
  for (int64_t slot = 0; slot < num_slots; slot += LANES) {
    const float* block[LANES];
    for (int lane = 0; lane < LANES; lane++) block[lane] = keys.row(std::min(slot + lane, num_slots - 1));
    for (int64_t group = 0; group < num_groups; group++) {
      for (int64_t lane = LANES * group / num_groups; lane < LANES * (group + 1) / num_groups; lane++) {
        for (int64_t d = 0; d < keys.width; d += LINE) __builtin_prefetch(keys.row(slot + LANES + lane) + d);
        for (int64_t d = 0; d < values.width; d += LINE)
          __builtin_prefetch(values.row(slot + lane) + d, 0, 2);
      }
      int64_t first = group * M;
      score_queries<M>(std::min(M, count - first), queries + first * keys.width, block, keys.width,
                       scores + first * stride + slot, stride);
    }
  }
}

// ---- weights times values

// weights (rows, count) times values (count, width), slot after slot -> sums (rows, width).
struct WeightedSums {
  const float* weights;
  int64_t weight_stride;
  const float* values;
  int64_t value_stride, count, width;
  float* sums;
};

// M rows by J vectors of a value, from column `d` on.
template <int M, int J> void sum_columns(WeightedSums of, int64_t d) {
  Vec parts[M][J] = {};
  for (int64_t s = 0; s < of.count; s++) {
    Vec value[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) value[j] = load(of.values + s * of.value_stride + d + j * LANES);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      Vec weight = splat(of.weights[m * of.weight_stride + s]);
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) parts[m][j] = multiply_add(weight, value[j], parts[m][j]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) store(of.sums + m * of.width + d + j * LANES, parts[m][j]);
}

template <int M> void sum_rows(WeightedSums of) {
  constexpr int J = REGISTERS == 32 ? 4 : 2;
  int64_t d = 0;
  for (; d + J * LANES <= of.width; d += J * LANES) sum_columns<M, J>(of, d);
  for (; d + LANES <= of.width; d += LANES) sum_columns<M, 1>(of, d);
  for (; d < of.width; d++)
    for (int m = 0; m < M; m++) {
      float sum = 0;
      for (int64_t s = 0; s < of.count; s++)
        sum = multiply_add(of.weights[m * of.weight_stride + s], of.values[s * of.value_stride + d], sum);
      of.sums[m * of.width + d] = sum;
    }
}

template <int M = 6> void sum_values(int64_t rows, WeightedSums of) {
  for (; rows >= M; rows -= M) {
    sum_rows<M>(of);
    of.weights += M * of.weight_stride;
    of.sums += M * of.width;
  }
  if constexpr (M > 1)
    if (rows) sum_values<M - 1>(rows, of);
}

// ---- attention

constexpr int64_t CHUNK = 128;        // positions that are summed apart from others
constexpr int64_t MOST_QUERIES = 48;  // of one key head that are taken together
constexpr int64_t JOINED =
    1 << 16;  // numbers of chunks that one thread adds in the time it takes to wake another

// Where the numbers of a row and a head begin, and how far it is from slot to slot.
struct Strides {
  int64_t row, head, slot;

  explicit Strides(const Tensor& of) : row(of.stride(0)), head(of.stride(1)), slot(of.stride(2)) {}
};

struct Attention {
  int64_t B, num_heads, num_key_heads, N, D, E, T;
  const float *query, *key, *value;  // (B, H, N, D), (B, H', S, D), (B, H', S, E)
  Strides query_strides, key_strides, value_strides;
  // (B, N, 2 + T): first and end of the slots that a node sees; then for each node of the tree, which lie in
  // the slots from the end on, 1 + its depth where it is seen, else 0
  const int32_t* seen;
  const float* sinks;  // (H,), or null
  float* output;       // (B, N, H, E)
  float scale, cap;    // cap 0: none

  int64_t heads_together() const { return num_heads / num_key_heads; }
  const int32_t* seen_by(int64_t row, int64_t node) const { return seen + (row * N + node) * (2 + T); }
};

// What the queries of some nodes of one row and key head make of a chunk: the highest score, the sum of the
// weights e^(score - highest), and values times these weights.
struct Partial {
  float *highest, *total, *sums;  // (Q,), (Q,), (Q, E)

  Partial(float* memory, int64_t Q) : highest(memory), total(memory + Q), sums(memory + 2 * Q) {}
  static int64_t size(int64_t Q, int64_t E) { return Q * (2 + E); }
};

// One chunk of positions, for nodes `first_node` to `first_node + num_nodes` of a row and key head. Query q
// is that of head q / num_nodes and node q % num_nodes.
class ChunkOfOneHead {
 public:
  ChunkOfOneHead(const Attention& attention, int64_t row, int64_t key_head, int64_t first_node,
                 int64_t num_nodes, int64_t chunk)
      : of(attention),
        row(row),
        key_head(key_head),
        first_node(first_node),
        num_nodes(num_nodes),
        Q(of.heads_together() * num_nodes),
        first_position(chunk * CHUNK),
        tree_stride((of.T + LANES - 1) / LANES * LANES),
        keys{of.key + row * of.key_strides.row + key_head * of.key_strides.head, of.key_strides.slot, of.D},
        values{of.value + row * of.value_strides.row + key_head * of.value_strides.head,
               of.value_strides.slot, of.E} {
    thread_local Scratch scratch;
    queries = scratch.of(Q * (of.D + CHUNK + tree_stride));
    scores = queries + Q * of.D;
    tree_scores = scores + Q * CHUNK;
    int64_t begin = std::numeric_limits<int64_t>::max();
    for (int64_t node = 0; node < num_nodes; node++) {
      begin = std::min<int64_t>(begin, seen(node)[0]);
      end = std::max<int64_t>(end, seen(node)[1]);
    }
    low = std::max(first_position, begin / LANES * LANES);
    high = std::min(first_position + CHUNK, end);
    has_tree = of.T && end + of.T > first_position && end < first_position + CHUNK;
  }

  void attend(const Partial& partial) {
    gather_queries();
    if (low < high)
      score(queries, Q, keys.from(low), values.from(low), high - low, scores + low - first_position, CHUNK);
    if (has_tree) score(queries, Q, keys.from(end), values.from(end), of.T, tree_scores, tree_stride);
    for (int64_t q = 0; q < Q; q++) {
      int64_t count = place_scores(q);
      scores_to_weights(scores + q * CHUNK, count, partial.highest[q], partial.total[q]);
    }
    int64_t offset = std::max<int64_t>(low - first_position, 0), count = std::max<int64_t>(high - low, 0);
    sum_values(Q, {scores + offset, CHUNK, values.row(low), values.stride, count, of.E, partial.sums});
    for (int64_t q = 0; has_tree && q < Q; q++) add_tree_values(q, partial.sums + q * of.E);
  }

 private:
  const Attention& of;
  int64_t row, key_head, first_node, num_nodes, Q;
  int64_t first_position, tree_stride;
  Rows keys, values;
  int64_t low, high;                      // slots of this chunk that some node sees
  int64_t end = 0;                        // the slot of the tree's first node
  bool has_tree;                          // whether nodes of the tree may stand in this chunk
  float *queries, *scores, *tree_scores;  // (Q, D), (Q, CHUNK), (Q, tree_stride)

  const int32_t* seen(int64_t node) const { return of.seen_by(row, first_node + node); }

  // Calls body(node, place) for the nodes of the tree that stand in this chunk and are seen.
  template <typename Body> void for_seen_nodes(const int32_t* sees, Body body) const {
    for (int64_t node = 0; node < of.T; node++) {
      int64_t place = sees[1] + sees[2 + node] - 1 - first_position;
      if (sees[2 + node] && place >= 0 && place < CHUNK) body(node, place);
    }
  }

  void gather_queries() {
    for (int64_t q = 0; q < Q; q++) {
      int64_t head = key_head * of.heads_together() + q / num_nodes, node = first_node + q % num_nodes;
      const Strides& strides = of.query_strides;
      const float* query = of.query + row * strides.row + head * strides.head + node * strides.slot;
      std::memcpy(queries + q * of.D, query, of.D * sizeof(float));
    }
  }

  // Puts the tree's scores of a query at their positions, and -inf where it sees nothing. Returns how many
  // positions are to be weighed; those of the text that follow get weight 0.
  int64_t place_scores(int64_t q) {
    const int32_t* sees = seen(q % num_nodes);
    float* mine = scores + q * CHUNK;
    int64_t visible = std::clamp<int64_t>(sees[0] - first_position, 0, CHUNK);
    int64_t next = std::clamp<int64_t>(sees[1] - first_position, 0, CHUNK);
    std::fill(mine, mine + std::min(visible, next), MINUS_INFINITY);
    std::fill(mine + next, mine + CHUNK, MINUS_INFINITY);
    if (has_tree)
      for_seen_nodes(sees, [&](int64_t node, int64_t place) {
        mine[place] = tree_scores[q * tree_stride + node];
        next = std::max(next, place + 1);
      });
    int64_t count = (next + LANES - 1) / LANES * LANES;
    std::fill(mine + count, mine + std::max(count, high - first_position), 0.f);
    return count;
  }

  // tanh, of any sign, bends scores to less than `cap`; those that are not seen stay so.
  static Vec capped(Vec score, float cap) {
    Vec size = absolute(score), small = exponential(size * (-2.f / cap));
    Vec bent = (1.f - small) / (1.f + small) * cap;
    return size == -MINUS_INFINITY ? score : score < 0.f ? -bent : bent;
  }

  // Scores become weights e^(score - highest), in place; `count` is a multiple of LANES.
  void scores_to_weights(float* mine, int64_t count, float& highest, float& total) const {
    float scale = of.scale, cap = of.cap;
    Vec most = splat(MINUS_INFINITY), sum = splat(0.f);
    for (int64_t s = 0; s < count; s += LANES) {
      Vec score = load(mine + s) * scale;
      if (cap > 0) score = capped(score, cap);
      store(mine + s, score);
      most = larger(score, most);
    }
    float top = MINUS_INFINITY;
    for (int lane = 0; lane < LANES; lane++)
      top = most[lane] > top || std::isnan(most[lane]) ? most[lane] : top;
    for (int64_t s = 0; s < count; s += LANES) {
      Vec score = load(mine + s);
      Vec weight = score == MINUS_INFINITY ? splat(0.f) : exponential(score - top);  // NaN stays NaN
      sum += weight;
      store(mine + s, weight);
    }
    highest = top;
    total = sum_of(sum);
  }

  void add_tree_values(int64_t q, float* sums) const {
    for_seen_nodes(seen(q % num_nodes), [&](int64_t node, int64_t place) {
      float weight = scores[q * CHUNK + place];
      const float* value = values.row(end + node);
      for (int64_t d = 0; d < of.E; d++) sums[d] = multiply_add(weight, value[d], sums[d]);
    });
  }
};

// Attention of some nodes, a chunk of a row's key head in each piece; the last chunks, which are not whole,
// come last.
struct SharedAttention : Work {
  std::vector<Tensor> kept;  // what the pointers of `attention` lead to
  Attention attention;
  int64_t first_node, num_nodes, first_chunk, num_pairs, num_chunks;  // pairs: of a row and a key head
  int64_t Q;
  float* partials;                        // (pairs, chunks, Partial::size)
  mutable std::atomic<int64_t> next = 0;  // `run` gives pieces to whoever is free

  explicit SharedAttention(const Attention& attention) : attention(attention) {}

  int64_t result_size(int64_t = 0) const override { return Partial::size(Q, attention.E); }
  float* memory_of(int64_t pair, int64_t chunk) const {
    return partials + (pair * num_chunks + chunk) * result_size();
  }
  float* memory_of(int64_t piece) const { return memory_of(piece % num_pairs, piece / num_pairs); }

  void compute(int64_t piece, int64_t, float* result) const override {
    int64_t pair = piece % num_pairs, chunk = first_chunk + piece / num_pairs;
    int64_t row = pair / attention.num_key_heads, key_head = pair % attention.num_key_heads;
    ChunkOfOneHead(attention, row, key_head, first_node, num_nodes, chunk).attend({result, Q});
  }
  void publish(int64_t piece, const float* result) const override {
    std::memcpy(memory_of(piece), result, result_size() * sizeof(float));
  }
  void run(int64_t, int64_t) const override {
    for (int64_t piece = next++; piece < num_pieces; piece = next++) compute(piece, 0, memory_of(piece));
  }

  // Adds the chunks of a query in order, and writes its output.
  void join(int64_t pair, int64_t q) const {
    const Attention& of = attention;
    int64_t row = pair / of.num_key_heads;
    int64_t head = pair % of.num_key_heads * of.heads_together() + q / num_nodes;
    int64_t node = first_node + q % num_nodes, E = of.E;
    float* output = of.output + ((row * of.N + node) * of.num_heads + head) * E;
    float top = of.sinks ? of.sinks[head] : MINUS_INFINITY;
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
      float highest = Partial(memory_of(pair, chunk), Q).highest[q];
      top = highest > top || std::isnan(highest) ? highest : top;
    }
    float total = of.sinks ? std::exp(of.sinks[head] - top) : 0.f;
    std::fill(output, output + E, 0.f);
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
      Partial part(memory_of(pair, chunk), Q);
      if (part.total[q] == 0) continue;
      float weight = std::exp(part.highest[q] - top);
      const float* sums = part.sums + q * E;
      total = multiply_add(weight, part.total[q], total);
      for (int64_t d = 0; d < E; d++) output[d] = multiply_add(weight, sums[d], output[d]);
    }
    for (int64_t d = 0; d < E; d++) output[d] /= total;
  }
};

// The first chunk that some of the nodes sees, and the one after the last.
std::pair<int64_t, int64_t> seen_chunks(const Attention& of, int64_t first_node, int64_t num_nodes) {
  int64_t first = std::numeric_limits<int64_t>::max(), end = 0;
  for (int64_t row = 0; row < of.B; row++)
    for (int64_t node = first_node; node < first_node + num_nodes; node++) {
      const int32_t* sees = of.seen_by(row, node);
      int64_t position_end = sees[1];
      for (int64_t other = 0; other < of.T; other++)
        position_end = std::max<int64_t>(position_end, sees[1] + sees[2 + other]);
      first = std::min<int64_t>(first, sees[0] / CHUNK);
      end = std::max(end, (position_end + CHUNK - 1) / CHUNK);
    }
  return {first, std::max(first, end)};
}

void attend_nodes(const Attention& of, int64_t first_node, int64_t num_nodes,
                  const std::vector<Tensor>& kept) {
  thread_local Scratch scratch;
  auto [first_chunk, end_chunk] = seen_chunks(of, first_node, num_nodes);
  auto work = std::make_shared<SharedAttention>(of);
  work->kept = kept;
  work->first_node = first_node;
  work->num_nodes = num_nodes;
  work->first_chunk = first_chunk;
  work->num_chunks = end_chunk - first_chunk;
  work->num_pairs = of.B * of.num_key_heads;
  work->Q = of.heads_together() * num_nodes;
  work->num_pieces = work->num_pairs * work->num_chunks;
  work->partials = scratch.of(work->num_pieces * work->result_size());
  share(work);
  int64_t grain = std::max<int64_t>(1, JOINED / (work->num_chunks * of.E + 1));
  parallel_for(work->num_pairs * work->Q, grain, [&](int64_t begin, int64_t end) {
    for (int64_t each = begin; each < end; each++) work->join(each / work->Q, each % work->Q);
  });
}

}  // namespace

// What nodes `first` to `end` of trees see, as medusa.base.attention.seen_slots says: lengths (B,), depths
// (R, N) and ancestors (R, N, N) with R 1 or B -> (B, 1, M, 2 + T) int32. A chain `by_range` has T = 0.
Tensor seen_slots(const Tensor& lengths, Tensor depths, Tensor ancestors, int64_t first, int64_t end,
                  bool by_range, std::optional<int64_t> window) {
  depths = as_contiguous(depths);
  if (!by_range) ancestors = as_contiguous(ancestors);
  int64_t B = lengths.numel(), N = depths.size(1), T = by_range ? 0 : end, M = end - first;
  int64_t trees = depths.size(0);
  bool fits = lengths.scalar_type() == ScalarType::Long && lengths.dim() == 1;
  fits = fits && has_shape(depths, ScalarType::Long, {ANY, N}) && (trees == 1 || trees == B);
  fits = fits && (by_range || has_shape(ancestors, ScalarType::Bool, {trees, N, N}));
  STD_TORCH_CHECK(
      fits && 0 <= first && first <= end && end <= N,
      "lengths must be (B,) long, depths (R, N) long, ancestors (R, N, N) bool, and the nodes among these");
  Tensor seen = new_tensor({B, 1, M, 2 + T}, ScalarType::Int);
  for (int64_t row = 0; row < B; row++) {
    int64_t tree = trees > 1 ? row : 0, length = numbers<int64_t>(lengths)[row * lengths.stride(0)];
    const int64_t* depth_of = numbers<int64_t>(depths) + tree * N;
    for (int64_t node = first; node < end; node++) {
      int32_t* sees = numbers<int32_t>(seen) + (row * M + node - first) * (2 + T);
      int64_t position = length + depth_of[node], past = by_range ? position + 1 : length;
      sees[0] = window ? std::min(std::max<int64_t>(position - *window + 1, 0), past) : 0;
      sees[1] = past;
      const bool* is_ancestor = numbers<bool>(ancestors) + (tree * N + node) * N;
      for (int64_t other = 0; other < T; other++) {
        bool is_seen = is_ancestor[other] && (!window || depth_of[node] - depth_of[other] < *window);
        sees[2 + other] = is_seen ? depth_of[other] + 1 : 0;
      }
    }
  }
  return seen;
}

// query (B, H, N, D), key (B, H', S, D), value (B, H', S, E), seen (B, 1, N, 2 + T) int32 -> (B, N, H, E)
Tensor tree_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& seen,
                      double scale, double cap, std::optional<Tensor> sinks) {
  for (const Tensor* each : {&query, &key, &value})
    STD_TORCH_CHECK(each->scalar_type() == ScalarType::Float && each->dim() == 4 && each->stride(3) == 1,
                    "queries, keys and values must be float32 with contiguous rows");
  int64_t B = query.size(0), num_heads = query.size(1), N = query.size(2), S = key.size(2), E = value.size(3);
  int64_t num_key_heads = std::max<int64_t>(key.size(1), 1), T = seen.dim() == 4 ? seen.size(3) - 2 : -1;
  bool fits = key.size(0) == B && key.size(1) == num_key_heads && key.size(3) == query.size(3);
  fits = fits && num_heads % num_key_heads == 0;
  fits = fits && value.size(0) == B && value.size(1) == num_key_heads && value.size(2) == S;
  STD_TORCH_CHECK(
      fits,
      "queries must be (B, H, N, D), keys (B, H', S, D) and values (B, H', S, E), with H' a divisor of H");
  STD_TORCH_CHECK(has_shape_if_given(sinks, ScalarType::Float, {num_heads}), "sinks must be (H,) float32");
  STD_TORCH_CHECK(T >= 0 && has_shape(seen, ScalarType::Int, {B, 1, N, 2 + T}),
                  "seen must be (B, 1, N, 2 + T) int32");
  for (int64_t node = 0; node < B * N; node++) {
    const int32_t* sees = numbers<int32_t>(seen) + node * (2 + T);
    bool is_inside = sees[0] >= 0 && sees[1] >= 0 && sees[1] + T <= S && lies_within(sees + 2, T, 0, T + 1);
    STD_TORCH_CHECK(is_inside, "what a node sees must lie in the slots of keys and values");
  }
  Tensor output = new_tensor({B, N, num_heads, E}, ScalarType::Float);
  Attention attention{.B = B,
                      .num_heads = num_heads,
                      .num_key_heads = key.size(1),
                      .N = N,
                      .D = query.size(3),
                      .E = E,
                      .T = T,
                      .query = numbers<float>(query),
                      .key = numbers<float>(key),
                      .value = numbers<float>(value),
                      .query_strides = Strides(query),
                      .key_strides = Strides(key),
                      .value_strides = Strides(value),
                      .seen = numbers<int32_t>(seen),
                      .sinks = numbers<float>(sinks),
                      .output = numbers<float>(output),
                      .scale = static_cast<float>(scale),
                      .cap = static_cast<float>(cap)};
  std::vector<Tensor> kept{query, key, value, seen};
  if (sinks) kept.push_back(*sinks);
  int64_t together = std::max<int64_t>(1, MOST_QUERIES / attention.heads_together());
  for (int64_t first = 0; first < N; first += together)
    attend_nodes(attention, first, std::min(together, N - first), kept);
  return output;
}

}  // namespace medusa
