#include "threads.h"

#include <torch/csrc/stable/ops.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread waits awake, for the next work or for the end of this one. Within a pass the next work comes sooner;
// a process that has lost its core gets it back some milliseconds later.
constexpr auto AWAKE = std::chrono::microseconds(50);
// How long a piece is waited for before it is computed once more.
constexpr auto PATIENCE = std::chrono::microseconds(20);

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `is_so` came true in time.
template <typename Condition>
bool comes_true(Clock::duration time, const Condition& is_so) {
  for (auto end = Clock::now() + time; Clock::now() < end;)
    for (int i = 0; i < 16; i++) {
      if (is_so()) return true;
      pause();
    }
  return is_so();
}

// Work under way.
class Job {
 public:
  const int64_t num_helpers;  // threads that may take part, beside the caller's

  Job(std::shared_ptr<const Work> work, int64_t num_helpers)
      : num_helpers(num_helpers), work(std::move(work)), is_published(new std::atomic<bool>[this->work->num_pieces]()) {}
  Job(const Loop& loop, int64_t num_pieces, int64_t num_helpers) : num_helpers(num_helpers), loop(loop), num_ranges(num_pieces) {}

  // Computes pieces as long as there are any to claim.
  void take_part() {
    for (int64_t piece; (piece = next.fetch_add(1)) < size();) {
      if (work) complete(piece);
      else call(piece);
    }
  }

  // Returns when all is done.
  void finish() {
    take_part();
    auto is_done = [&] { return num_done.load(std::memory_order_acquire) == size(); };
    while (!comes_true(PATIENCE, is_done)) {
      for (int64_t piece = 0; work && piece < size(); piece++)
        if (!is_published[piece].load()) complete(piece);
      if (!is_done()) std::this_thread::yield();  // to the thread that has the piece, if it waits for this core
    }
  }

 private:
  const std::shared_ptr<const Work> work;  // or null: `loop`
  const Loop loop{};
  const int64_t num_ranges = 0;
  const std::unique_ptr<std::atomic<bool>[]> is_published;
  std::atomic<int64_t> next = 0, num_done = 0;

  int64_t size() const { return work ? work->num_pieces : num_ranges; }

  void complete(int64_t piece) {
    thread_local std::unique_ptr<float[]> result;
    thread_local int64_t room = 0;
    if (int64_t wanted = work->result_size(piece); wanted > room) result.reset(new float[room = wanted]);
    work->compute(piece, result.get());
    if (is_published[piece].exchange(true)) return;
    work->publish(piece, result.get());
    num_done.fetch_add(1, std::memory_order_release);
  }

  void call(int64_t piece) {
    loop.call(loop.body, loop.count * piece / num_ranges, loop.count * (piece + 1) / num_ranges);
    num_done.fetch_add(1, std::memory_order_release);
  }
};

// Threads that wait for jobs, one job at a time. They are never ended: a library is not unloaded.
class Pool {
 public:
  std::mutex calling;  // held by the thread whose job is under way

  void run(const std::shared_ptr<Job>& job) {
    for (; num_threads < job->num_helpers; num_threads++) std::thread(&Pool::work, this, num_threads).detach();
    post(job);
    job->finish();
    post(nullptr);  // what it keeps is let go of
  }

 private:
  int64_t num_threads = 0;
  std::mutex posting;
  std::condition_variable posted;
  std::shared_ptr<Job> job;
  std::atomic<int64_t> round = 0;
  int64_t num_asleep = 0;

  void post(std::shared_ptr<Job> next) {
    bool wakes;
    {
      std::lock_guard lock(posting);
      job.swap(next);
      if (!job) return;
      round++;
      wakes = num_asleep > 0;
    }
    if (wakes) posted.notify_all();
  }

  void work(int64_t index) {
    for (int64_t seen = 0;;) {
      bool is_awake = comes_true(AWAKE, [&] { return round.load(std::memory_order_relaxed) != seen; });
      std::shared_ptr<Job> mine;
      {
        std::unique_lock lock(posting);
        if (!is_awake) {
          num_asleep++;
          posted.wait(lock, [&] { return round != seen; });
          num_asleep--;
        }
        seen = round;
        mine = job;
      }
      if (mine && index < mine->num_helpers) mine->take_part();
    }
  }
};

// A process that is forked off has none of the threads, and gets others.
Pool* pool = new Pool;

void run_shared(int64_t num_pieces, auto make_job) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  (void)registered;
  int64_t helpers = std::min<int64_t>(torch::stable::get_num_threads(), num_pieces) - 1;
  // Another thread's job is under way: this one then computes alone.
  std::unique_lock lock(pool->calling, std::defer_lock);
  if (helpers > 0 && lock.try_lock()) pool->run(make_job(helpers));
  else make_job(0)->finish();
}

}  // namespace

void share(std::shared_ptr<const Work> work) {
  int64_t num_pieces = work->num_pieces;
  run_shared(num_pieces, [&](int64_t helpers) { return std::make_shared<Job>(std::move(work), helpers); });
}

void run(const Loop& loop) {
  // Some pieces more than there are threads, so that a thread which waits for its core holds up few.
  int64_t most = 4 * torch::stable::get_num_threads(), pieces = std::min(loop.count / std::max<int64_t>(loop.grain, 1), most);
  if (pieces < 2) {
    if (loop.count > 0) loop.call(loop.body, 0, loop.count);
    return;
  }
  run_shared(pieces, [&](int64_t helpers) { return std::make_shared<Job>(loop, pieces, helpers); });
}

std::vector<int64_t> pieces_of(int64_t total, int64_t least, int64_t most) {
  int64_t threads = torch::stable::get_num_threads();
  std::vector<int64_t> ends;
  for (int64_t begin = 0; begin < total;) {
    int64_t left = total - begin, size = threads == 1 ? left : std::clamp(left / (2 * threads), std::min(least, left), most);
    ends.push_back(begin += size);
  }
  return ends;
}
