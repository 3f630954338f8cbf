// Suffix matches: where the last tokens of a text stood before, in itself, in a prediction and in a corpus of
// earlier texts, and what followed there. medusa.drafters.suffix says what it is for,
// medusa.drafters.references what a corpus is.

#include <bit>
#include <cmath>
#include <cstring>

#include "constants.h"
#include "operators.h"

namespace medusa {
namespace {

enum Source : int64_t { OF_TEXT, OF_PREDICTION, OF_CORPUS, NUM_SOURCES };

constexpr int64_t MAX_PLACES = 16, MAX_WALK = 64;
constexpr int64_t NUM_ODDS = MAX_MATCH + 1;  // one for each length of a match
constexpr float LEARNING_RATE = 0.05f, MOST_TRUST = 1.5f;
// By so many tokens places of a corpus are found, by more at first.
constexpr int64_t ORDERS[NUM_ORDERS] = {8, LEAST_OF_SEVERAL};

// ---- texts and places

// A text to look for the last tokens in: one in memory, or the newest `capacity` tokens of a corpus.
// Positions count from its beginning.
struct Text {
  const int64_t* tokens;
  const int32_t* ring;  // of a corpus, whose `tokens` are null
  int64_t first, end, capacity;

  static Text in_memory(const int64_t* tokens, int64_t size) { return {tokens, nullptr, 0, size, 0}; }

  int64_t token(int64_t position) const { return tokens ? tokens[position] : ring[position % capacity]; }
};

// Where the last tokens stood before.
struct Place {
  const Text* text;
  int64_t position;  // of the last one
  Source source;
  uint64_t agrees;  // which tokens, the last one's bit first: of equally long matches the one that agrees
                    // further back too

  int64_t length() const { return std::countl_one(agrees << (64 - MAX_MATCH)); }
};

// The places that agree furthest with the end of a text, whose last token is at `last`; of equals those that
// were offered first.
struct Places {
  const int64_t* text;
  int64_t last;
  std::vector<Place> kept = {};

  bool agrees(const Text& in, int64_t position, int64_t back) const {
    return back <= last && position - back >= in.first && in.token(position - back) == text[last - back];
  }

  void offer(const Text& in, int64_t position, Source source) {
    Place place{&in, position, source, 0};
    bool is_inside = true;  // what stands before the beginning of a text is another one
    for (int64_t i = 0; i < MAX_MATCH; i++) {
      is_inside = is_inside && position - i >= in.first && in.token(position - i) >= 0;
      place.agrees = place.agrees << 1 | (is_inside && agrees(in, position, i));
    }
    if (kept.size() == MAX_PLACES && kept.back().agrees >= place.agrees) return;
    if (kept.size() == MAX_PLACES) kept.pop_back();
    auto is_better = [](const Place& a, const Place& b) {
      return a.agrees > b.agrees;
    };
    kept.insert(std::upper_bound(kept.begin(), kept.end(), place, is_better), place);
  }

  void look_in(const Text& in, Source source) {
    for (int64_t position = in.end - 2; position >= in.first; position--)
      if (in.token(position) == text[last]) offer(in, position, source);
  }
};

// ---- a corpus

// A corpus: its newest `capacity` tokens, and for each order which place had the same tokens before (`links`,
// positions + 1) and which has them now (`latest`, by their hash). Hash chains, as zlib finds matches (RFC
// 1951, section 4).
struct Corpus {
  int32_t *ring, *links, *latest;
  int64_t capacity, table_size;

  Corpus(const Tensor& tokens_and_links, const Tensor& tables)
      : ring(numbers<int32_t>(tokens_and_links)),
        links(ring + tokens_and_links.size(1)),
        latest(numbers<int32_t>(tables)),
        capacity(tokens_and_links.size(1)),
        table_size(tables.size(1)) {}

  static void check(const Tensor& ring, const Tensor& latest, int64_t total) {
    bool fits = has_shape(ring, ScalarType::Int, {1 + NUM_ORDERS, ANY}) && ring.size(1);
    fits = fits && has_shape(latest, ScalarType::Int, {NUM_ORDERS, ANY}) && latest.size(1);
    STD_TORCH_CHECK(fits && total >= 0, "a corpus must be (3, C) and (2, C') int32");
  }

  Text text(int64_t total) const {
    return {nullptr, ring, std::max<int64_t>(total - capacity, 0), total, capacity};
  }

  int32_t& link(int64_t order, int64_t position) const {
    return links[order * capacity + position % capacity];
  }

  // The entry for the last tokens of a text, of an order.
  int32_t& entry(int64_t order, const int64_t* last) const {
    uint64_t hash = 0;
    for (int64_t i = 0; i < ORDERS[order]; i++) {
      hash = (hash ^ static_cast<uint64_t>(last[-i])) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return latest[order * table_size + hash % table_size];
  }

  // Offers the places of each order, the newest first, while those of the orders before have left room.
  void look(Places& places, const Text& all) const {
    for (int64_t order = 0; order < NUM_ORDERS; order++) {
      if (places.last + 1 < ORDERS[order]) continue;
      int64_t next = entry(order, places.text + places.last), found = 0;
      for (int64_t step = 0; step < MAX_WALK && next > all.first && found < MAX_PLACES; step++) {
        bool is_match = true, is_known = order > 0;  // known: by the tokens of the first order
        for (int64_t i = 0; i < ORDERS[order]; i++) is_match &= places.agrees(all, next - 1, i);
        for (int64_t i = 0; i < ORDERS[0]; i++) is_known &= places.agrees(all, next - 1, i);
        bool goes_on = next < all.end && all.token(next) >= 0;
        if (is_match && !is_known && goes_on) {
          places.offer(all, next - 1, OF_CORPUS);
          found++;
        }
        next = link(order, next - 1);
      }
    }
  }
};

// ---- trust in a source

// What each source guessed the last time: the text's length then, and of the best place the tokens that
// agreed, 0 for none, and the token that followed.
struct SourceGuesses {
  struct Guess {
    int64_t num_matched, token;
  };
  int64_t length;
  Guess of[NUM_SOURCES];
};
constexpr int64_t GUESS_NUMBERS = sizeof(SourceGuesses) / sizeof(int64_t);

SourceGuesses* guesses_of(const Tensor& all, int64_t row) {
  return reinterpret_cast<SourceGuesses*>(numbers<int64_t>(all)) + row;
}

// Believes a source a little more (`trust`: the logarithm of what its odds are multiplied by) where it was
// right more often than usual, and less where it was not; `usual` (sources, NUM_ODDS) are the logarithms of
// the odds that it is right. Online logistic regression with one weight a source.
void learn(float* trust, const SourceGuesses& guesses, const int64_t* text, int64_t length,
           const float* usual) {
  for (int64_t source = 0; source < NUM_SOURCES && guesses.length < length; source++) {
    auto [num_matched, token] = guesses.of[source];
    STD_TORCH_CHECK(guesses.length >= 0 && num_matched >= 0 && num_matched <= MAX_MATCH,
                    "guesses must come from the search before");
    if (!num_matched) continue;
    float expected = 1 / (1 + std::exp(-usual[source * NUM_ODDS + num_matched] - trust[source]));
    float was_right = text[guesses.length] == token;
    trust[source] =
        std::clamp(trust[source] + LEARNING_RATE * (was_right - expected), -MOST_TRUST, MOST_TRUST);
  }
}

// ---- the search

// What is known of the rows, as the operator is given it.
struct Search {
  Tensor tokens;          // (B, S) long
  const Tensor& lengths;  // (B,) long
  const std::vector<Tensor>&predictions, &corpora;
  const Tensor &totals, &odds, &usual;
  const Tensor& trust;
  const std::optional<Tensor>& source_guesses;
  int64_t depth, vocab_size;

  int64_t B() const { return tokens.size(0); }

  void check() const {
    STD_TORCH_CHECK(has_shape(tokens, ScalarType::Long, {ANY, ANY}) && depth >= 0,
                    "tokens must be (B, S) long");
    int64_t num_rows = B();
    STD_TORCH_CHECK(are_indices(lengths, {num_rows}, 1, tokens.size(1) + 1),
                    "lengths must be (B,) long, of 1 to S tokens");
    for (const Tensor& each : {odds, usual})
      STD_TORCH_CHECK(has_shape(each, ScalarType::Float, {NUM_SOURCES, NUM_ODDS}),
                      "odds must be (sources, 17) float32");
    STD_TORCH_CHECK(has_shape(trust, ScalarType::Float, {NUM_SOURCES}), "trust must be (sources,) float32");
    STD_TORCH_CHECK(has_shape_if_given(source_guesses, ScalarType::Long, {ANY, GUESS_NUMBERS}),
                    "guesses must be (B, 7) long");
    STD_TORCH_CHECK(predictions.empty() || static_cast<int64_t>(predictions.size()) == num_rows,
                    "there must be a prediction for each row, or none");
    for (const Tensor& each : predictions)
      STD_TORCH_CHECK(!each.numel() || has_shape(each, ScalarType::Long, {ANY}),
                      "predictions must be (P,) long");
    if (corpora.empty()) return;
    bool fits = static_cast<int64_t>(corpora.size()) == 2 * num_rows;
    STD_TORCH_CHECK(fits && are_indices(totals, {num_rows}, 0, std::numeric_limits<int32_t>::max()),
                    "there must be a corpus for each row, or none");
    for (int64_t row = 0; row < num_rows; row++)
      if (has_corpus(row))
        Corpus::check(corpora[2 * row], corpora[2 * row + 1], numbers<int64_t>(totals)[row]);
  }

  bool has_corpus(int64_t row) const { return corpora.size() && corpora[2 * row].numel(); }

  float odds_of(Source source, int64_t length) const {
    return numbers<float>(odds)[source * NUM_ODDS + std::min(length, MAX_MATCH)];
  }
};

// The tree of a row's continuations, below its last token: T nodes with W children each, as
// medusa.drafters.suffix.Continuations has them.
struct Tree {
  int64_t T;
  int64_t *tokens, *parents, *children;
  float* shares;  // the odds of each node at first
  int64_t num_nodes = 1;

  static constexpr int64_t W = MAX_CHILDREN;

  void begin(int64_t root_token) {
    std::fill_n(tokens, T, root_token);
    std::fill_n(parents, T, 0);
    std::fill_n(children, T * W, 0);
    std::fill_n(shares, T, 0.f);
  }

  // The child of a node with this token, a new one where there is none; 0 where it has no place.
  int64_t child(int64_t node, int64_t token) {
    int64_t *place = children + node * W, *end = place + W;
    while (place < end && *place && tokens[*place] != token) place++;
    if (place == end || (!*place && num_nodes == T)) return 0;
    if (!*place) {
      tokens[num_nodes] = token;
      parents[num_nodes] = node;
      *place = num_nodes++;
    }
    return *place;
  }

  // Odds against the heads' 1 become shares, of all children at once.
  void odds_to_shares() {
    for (int64_t node = 0; node < num_nodes; node++) {
      const int64_t* of_node = children + node * W;
      float sum = 1;
      for (int64_t w = 0; w < W; w++) sum += of_node[w] ? shares[of_node[w]] : 0.f;
      for (int64_t w = 0; w < W; w++)
        if (of_node[w]) shares[of_node[w]] /= sum;
    }
  }
};

// Adds what followed at a place to the tree: the odds of the place, one token more after each, times
// `weight`.
void add_continuation(const Search& search, const Place& place, bool is_own_text, float weight, Tree& tree) {
  const Text& text = *place.text;
  int64_t node = 0, next = place.position + 1;
  for (int64_t ahead = 0; ahead < search.depth; ahead++) {
    // in the text itself what stands between place and end is taken to repeat
    int64_t position = next + (is_own_text ? ahead % (text.end - next) : ahead);
    if (position >= text.end) return;
    int64_t token = text.token(position);
    if (token < 0 || token >= search.vocab_size) return;  // another text begins, or the base cannot write it
    node = tree.child(node, token);
    if (!node) return;
    tree.shares[node] += weight * search.odds_of(place.source, place.length() + ahead);
  }
}

// Fills the tree and the guesses of a row from its places, the best first.
void add_places(const Search& search, const Places& places, const Text& own, Tree& tree,
                SourceGuesses& guesses) {
  bool has_best = false;
  for (const Place& place : places.kept) {
    auto& guess = guesses.of[place.source];
    if (!guess.num_matched) guess = {place.length(), place.text->token(place.position + 1)};
    if (has_best && place.length() < LEAST_OF_SEVERAL) continue;
    has_best |= place.source != OF_CORPUS;
    // Equally long places of a corpus count as one does together, each by how often its continuation
    // followed; a row has few, and those add up.
    auto is_equal = [&](const Place& other) {
      return other.source == OF_CORPUS && other.length() == place.length();
    };
    int64_t num_equal = 1;
    if (place.source == OF_CORPUS)
      num_equal = std::count_if(places.kept.begin(), places.kept.end(), is_equal);
    float weight = std::exp(numbers<float>(search.trust)[place.source]) / num_equal;
    add_continuation(search, place, place.text == &own, weight, tree);
  }
  tree.odds_to_shares();
}

}  // namespace

// Adds `text` behind the `total` tokens that a corpus was given so far, and returns their new number.
int64_t remember(Tensor ring, Tensor latest, int64_t total, Tensor text) {
  text = as_contiguous(text);
  Corpus::check(ring, latest, total);
  STD_TORCH_CHECK(are_indices(text, {ANY}, 0, std::numeric_limits<int32_t>::max()),
                  "a text must be (T,) long token ids, of 31 bits");
  Corpus corpus(ring, latest);
  const int64_t* tokens = numbers<int64_t>(text);
  for (int64_t i = -1; i < text.numel(); i++, total++) {
    corpus.ring[total % corpus.capacity] = i < 0 ? -1 : tokens[i];  // -1 stands between texts
    for (int64_t order = 0; order < NUM_ORDERS; order++) {
      int32_t& link = corpus.link(order, total);
      link = 0;
      if (i + 1 < ORDERS[order]) continue;
      int32_t& entry = corpus.entry(order, tokens + i);
      link = entry;
      entry = total + 1;
    }
  }
  return total;
}

// What may follow each row's tokens (B, S), `lengths` of them: where the last ones stood before in the row
// itself, in its prediction and in its corpus (`corpora` holds two tensors a row, empty ones for none, of
// `totals` tokens). Each place counts `odds` (sources, NUM_ODDS) against the heads' 1 by the tokens that
// agree, one more after each, times what `trust` (sources,) says, which learns from the `source_guesses` (B,
// 7) for the same rows before. A token that is none of `vocab_size`, which the base can read and not write,
// ends what is expected. Returns trees below the last token, as medusa.drafters.suffix.Continuations has
// them.
std::vector<Tensor> continuations(Tensor tokens, const Tensor& lengths, std::vector<Tensor> predictions,
                                  std::vector<Tensor> corpora, const Tensor& totals, const Tensor& odds,
                                  const Tensor& usual, Tensor trust, std::optional<Tensor> source_guesses,
                                  int64_t depth, int64_t vocab_size) {
  Search search{as_contiguous(tokens), lengths, predictions, corpora, totals, odds, usual, trust,
                source_guesses,        depth,   vocab_size};
  search.check();
  int64_t B = search.B(), S = search.tokens.size(1), T = depth ? depth + SPARE_CONTINUATIONS : 1;
  int64_t W = MAX_CHILDREN;
  Tensor found = new_tensor({B, T}, ScalarType::Long), parents = new_tensor({B, T}, ScalarType::Long);
  Tensor children = new_tensor({B, T, W}, ScalarType::Long), shares = new_tensor({B, T}, ScalarType::Float);
  Tensor num_matched = new_tensor({B}, ScalarType::Long);
  Tensor guesses = new_tensor({B, GUESS_NUMBERS}, ScalarType::Long);
  for (int64_t row = 0; row < B; row++) {
    const int64_t* text = numbers<int64_t>(search.tokens) + row * S;
    int64_t length = numbers<int64_t>(lengths)[row];
    if (source_guesses && source_guesses->size(0) == B)
      learn(numbers<float>(trust), *guesses_of(*source_guesses, row), text, length, numbers<float>(usual));

    Places places{text, length - 1};
    Text own = Text::in_memory(text, length), predicted, remembered;
    if (depth && predictions.size()) {
      predicted = Text::in_memory(numbers<int64_t>(predictions[row]), predictions[row].numel());
      places.look_in(predicted, OF_PREDICTION);
    }
    if (depth) places.look_in(own, OF_TEXT);
    if (depth && search.has_corpus(row)) {
      Corpus corpus(corpora[2 * row], corpora[2 * row + 1]);
      remembered = corpus.text(numbers<int64_t>(totals)[row]);
      corpus.look(places, remembered);
    }
    numbers<int64_t>(num_matched)[row] = places.kept.empty() ? 0 : places.kept[0].length();

    Tree tree{T, numbers<int64_t>(found) + row * T, numbers<int64_t>(parents) + row * T,
              numbers<int64_t>(children) + row * T * W, numbers<float>(shares) + row * T};
    tree.begin(text[length - 1]);
    SourceGuesses& next = *guesses_of(guesses, row);
    next = {length, {}};
    add_places(search, places, own, tree, next);
  }
  return {found, parents, children, shares, num_matched, guesses};
}

}  // namespace medusa
