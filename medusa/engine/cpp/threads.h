// How threads share the work of an operator, on a machine that may have other work too.
//
// Torch's threads compute a fixed share each, and then wait for each other. That is fastest where nobody else
// computes; but when the system gives a thread's core to another process, all wait, for milliseconds each
// time. Once that was seen, threads of our own take over for a while: work is cut into pieces, every thread
// has a share of them, and one that is ready goes on with pieces of the others' shares. Who computes a result
// never changes its bits.
//
// In compiled passes only: torch's threads wait awake after each of torch's own loops, on the cores that ours
// would need.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace medusa {

// Work whose pieces can be computed by more than one thread: a thread that finds nothing left to claim also
// computes a piece that another has claimed and not finished, and whoever is first publishes its result. The
// results of both are the same.
//
// So a thread may still compute when the work is finished and its caller has gone on. All that `compute`
// reads must therefore belong to the work, or be kept by it; what `publish` writes to need not.
struct Work {
  int64_t num_pieces = 0;

  virtual ~Work() = default;
  // Numbers of a piece's result.
  virtual int64_t result_size(int64_t piece) const = 0;
  // `end`: the pieces up to this one are likely to be computed by this thread, one after the other.
  virtual void compute(int64_t piece, int64_t end, float* result) const = 0;
  virtual void publish(int64_t piece, const float* result) const = 0;
  // Computes pieces from `first` to `last`, where no other thread does; results go where they belong.
  virtual void run(int64_t first, int64_t last) const = 0;
};

// Returns when all pieces are published.
void share(std::shared_ptr<const Work> work);
// Does or keeps a work that was made.
using Post = std::function<void(std::shared_ptr<const Work>)>;

// Work that one thread computes at a time, and whose results are written where they belong.
struct Loop {
  void (*call)(const void* body, int64_t begin, int64_t end);
  const void* body;
  int64_t count, grain;
};
void run(const Loop& loop);

// Calls body(begin, end) for ranges that make up 0 to `count`, each of `grain` or more if there are so many.
template <typename Body> void parallel_for(int64_t count, int64_t grain, const Body& body) {
  auto call = [](const void* body, int64_t begin, int64_t end) {
    (*static_cast<const Body*>(body))(begin, end);
  };
  run({call, &body, count, grain});
}

// Whether the calling thread runs a compiled pass. Work between passes goes by the last one.
void in_compiled_pass(bool is);
// Whether threads of our own compute everything, for tests.
void force_own_threads(bool is);

// In how many pieces to cut a product with `units` times `unit` bytes of weights.
int64_t pieces_of(int64_t units, int64_t unit);

}  // namespace medusa
