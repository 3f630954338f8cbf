// Threads of our own beside those of torch: pieces of work, who claims them, and when they take over.

#include "threads.h"

#include <torch/csrc/stable/ops.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__linux__)
extern "C" int omp_pause_resource_all(int kind) __attribute__((weak));
extern "C" void GOMP_offload_register_ver() __attribute__((weak));
#endif

namespace medusa {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread waits awake for the next work. Within a pass that comes sooner, and waking takes up to
// some hundred microseconds in a virtual machine. But a caller that has lost its core to another process goes
// on as soon as a core is idle.
constexpr auto AWAKE = std::chrono::microseconds(1000);
// How long a piece is waited for before it is computed once more.
constexpr auto PATIENCE = std::chrono::microseconds(20);
// A thread that is ready so much later than another has lost its core, or it is later by LATE_SHARE of all
// the time.
constexpr Clock::duration LATE = std::chrono::microseconds(500);
constexpr int64_t LATE_SHARE = 4;
// Three times within so long: others compute. Once may be the system itself.
constexpr Clock::duration OFTEN = std::chrono::milliseconds(100);
// How long others are then expected to want the cores; after that torch's threads try again.
constexpr Clock::duration OTHERS_STAY = std::chrono::seconds(1);

// Times since the clock's epoch: the last two at which a thread was late, and the end of what others are
// expected to stay.
std::atomic<Clock::duration> last_late = -OFTEN, late_before = -OFTEN, others_end = Clock::duration::zero();

void note_late() {
  auto now = Clock::now().time_since_epoch();
  if (now - late_before.exchange(last_late.exchange(now)) < OFTEN) others_end = now + OTHERS_STAY;
}
bool are_others() { return Clock::now().time_since_epoch() < others_end.load(); }

thread_local bool is_pass_compiled = false;
std::atomic<bool> is_forced = false;

bool take_over() { return is_forced || (is_pass_compiled && are_others()); }

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `is_so` came true in time; the thread stays awake meanwhile.
template <typename Condition> bool comes_true(Clock::duration time, const Condition& is_so) {
  for (auto end = Clock::now() + time; Clock::now() < end;)
    for (int i = 0; i < 16; i++) {
      if (is_so()) return true;
      pause();
    }
  return is_so();
}

// For some instructions at a time: who waits for a mutex is put to sleep.
class SpinLock {
 public:
  void lock() {
    while (is_held.exchange(true, std::memory_order_acquire))
      if (!comes_true(PATIENCE, [&] { return !is_held.load(std::memory_order_relaxed); }))
        std::this_thread::yield();
  }
  bool try_lock() { return !is_held.exchange(true, std::memory_order_acquire); }
  void unlock() { is_held.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> is_held = false;
};

// Pieces that follow each other. Its own thread claims them from the front, so that it reads on; another one,
// which has none left of its own, from the back.
class Share {
 public:
  int64_t end() const { return last; }
  void set(int32_t first, int32_t end) {
    left = packed(first, end);
    last = end;
  }

  // A piece, or -1.
  int64_t claim(bool is_own) {
    for (uint64_t now = left.load(std::memory_order_relaxed);;) {
      int32_t first = now >> 32, end = static_cast<uint32_t>(now);
      if (first >= end) return -1;
      uint64_t without = is_own ? packed(first + 1, end) : packed(first, end - 1);
      if (left.compare_exchange_weak(now, without)) return is_own ? first : end - 1;
    }
  }

 private:
  std::atomic<uint64_t> left = 0;
  int64_t last = 0;

  static uint64_t packed(uint32_t first, uint32_t end) { return uint64_t(first) << 32 | end; }
};

// Work under way, by threads of our own. Each has a share, the caller the first. A caller waits for results,
// never for threads.
class Job {
 public:
  const int64_t num_shares;  // as many as threads may take part; the caller's is the first

  Job(std::shared_ptr<const Work> work, int64_t num_shares) : Job(num_shares, work->num_pieces) {
    this->work = std::move(work);
    is_published.reset(new std::atomic<bool>[num_pieces]());
  }
  Job(const Loop& loop, int64_t num_pieces, int64_t num_shares) : Job(num_shares, num_pieces) {
    this->loop = loop;
  }

  // Computes pieces as long as there are any to claim.
  void take_part(int64_t mine) noexcept {
    for (int64_t other = 0; other < num_shares; other++) {
      Share& share = shares[(mine + other) % num_shares];
      for (int64_t piece; (piece = share.claim(!other)) >= 0;) {
        if (work)
          complete(piece, share.end());
        else
          call(piece);
      }
    }
  }

  // Returns when all is done. Nothing may leave it before: threads write to what the caller owns.
  void finish() noexcept {
    take_part(0);
    auto is_done = [&] {
      return num_done.load(std::memory_order_acquire) == num_pieces;
    };
    while (!comes_true(PATIENCE, is_done)) {
      for (int64_t piece = 0; work && piece < num_pieces; piece++)
        if (!is_published[piece].load()) complete(piece, piece + 1);
      if (!is_done())
        std::this_thread::yield();  // to the thread that has the piece, if it waits for this core
    }
  }

 private:
  const int64_t num_pieces;
  std::shared_ptr<const Work> work;  // or null: `loop`
  Loop loop{};
  std::unique_ptr<Share[]> shares;
  std::unique_ptr<std::atomic<bool>[]> is_published;
  std::atomic<int64_t> num_done = 0;

  Job(int64_t num_shares, int64_t num_pieces)
      : num_shares(num_shares), num_pieces(num_pieces), shares(new Share[num_shares]) {
    for (int64_t i = 0; i < num_shares; i++)
      shares[i].set(num_pieces * i / num_shares, num_pieces * (i + 1) / num_shares);
  }

  void complete(int64_t piece, int64_t end) {
    thread_local std::unique_ptr<float[]> result;
    thread_local int64_t room = 0;
    if (int64_t wanted = work->result_size(piece); wanted > room) result.reset(new float[room = wanted]);
    work->compute(piece, end, result.get());
    if (is_published[piece].exchange(true)) return;
    work->publish(piece, result.get());
    num_done.fetch_add(1, std::memory_order_release);
  }

  void call(int64_t piece) {
    loop.call(loop.body, loop.count * piece / num_pieces, loop.count * (piece + 1) / num_pieces);
    num_done.fetch_add(1, std::memory_order_release);
  }
};

// Torch's threads wait awake for some milliseconds after a loop of torch, on cores that ours then lack. These
// are those of GNU's OpenMP, as medusa.hardware.release_threads lets go of them; it costs nothing where there
// are none.
void release_threads_of_torch() {
#if defined(__linux__)
  constexpr int SOFTLY = 1;
  if (GOMP_offload_register_ver && omp_pause_resource_all) omp_pause_resource_all(SOFTLY);
#endif
}

// Threads that wait for jobs, one job at a time. They are never ended: a library is not unloaded.
class Pool {
 public:
  SpinLock calling;  // held by the thread whose job is under way

  void run(const std::shared_ptr<Job>& job) {
    release_threads_of_torch();
    try {
      for (; num_threads < job->num_shares - 1; num_threads++)
        std::thread(&Pool::work, this, num_threads + 1).detach();
    } catch (const std::system_error&) {
      // The system gives no more threads; those that there are take over the shares of the others.
    }
    post(job);
    job->finish();
    post(nullptr);  // what it keeps is let go of
  }

 private:
  int64_t num_threads = 0;
  SpinLock lock;  // of `job`
  std::shared_ptr<Job> job;
  std::atomic<int32_t> round = 0, num_asleep = 0;

  void post(std::shared_ptr<Job> next) {
    bool is_new = next != nullptr;
    {
      std::lock_guard held(lock);
      job.swap(next);
    }
    if (!is_new) return;
    round++;
    if (num_asleep) round.notify_all();
  }

  void work(int64_t share) {
    for (int32_t seen = 0;;) {
      if (!comes_true(AWAKE, [&] { return round.load(std::memory_order_relaxed) != seen; })) {
        num_asleep++;
        round.wait(seen);
        num_asleep--;
      }
      seen = round;
      std::shared_ptr<Job> mine;
      {
        std::lock_guard held(lock);
        mine = job;
      }
      if (mine && share < mine->num_shares) mine->take_part(share);
    }
  }
};

// A process that is forked off has none of the threads, and gets others.
Pool* pool = new Pool;

// torch's loop, which also looks whether threads are ready together.
void by_torch(int64_t count, int64_t grain, auto body) {
  auto began = Clock::now();
  std::atomic<Clock::duration> earliest = Clock::duration::max(), latest = Clock::duration::zero();
  auto keep = [](std::atomic<Clock::duration>& kept, Clock::duration time, auto is_kept) {
    for (auto now = kept.load(); is_kept(time, now) && !kept.compare_exchange_weak(now, time);) {}
  };
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    body(begin, end);
    auto time = Clock::now() - began;
    keep(earliest, time, std::less());
    keep(latest, time, std::greater());
  });
  auto late = latest.load() - earliest.load();
  if (late > LATE && late > latest.load() / LATE_SHARE) note_late();
}

void run_shared(int64_t num_pieces, auto make_job) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  (void)registered;
  int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), num_pieces);
  // Another thread's job is under way: this one then computes alone.
  std::unique_lock lock(pool->calling, std::defer_lock);
  if (threads > 1 && lock.try_lock())
    pool->run(make_job(threads));
  else
    make_job(1)->finish();
}

}  // namespace

void in_compiled_pass(bool is) { is_pass_compiled = is; }
void force_own_threads(bool is) { is_forced = is; }

void share(std::shared_ptr<const Work> work) {
  int64_t num_pieces = work->num_pieces;
  int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), num_pieces);
  if (!take_over())
    return by_torch(threads, 1, [&](int64_t begin, int64_t end) {
      work->run(num_pieces * begin / threads, num_pieces * end / threads);
    });
  run_shared(num_pieces, [&](int64_t shares) { return std::make_shared<Job>(std::move(work), shares); });
}

void run(const Loop& loop) {
  if (!take_over())
    return by_torch(loop.count, loop.grain,
                    [&](int64_t begin, int64_t end) { loop.call(loop.body, begin, end); });
  // Some pieces more than there are threads, so that a thread which waits for its core holds up few.
  int64_t most = 4 * torch::stable::get_num_threads();
  int64_t pieces = std::min(loop.count / std::max<int64_t>(loop.grain, 1), most);
  if (pieces < 2) {
    if (loop.count > 0) loop.call(loop.body, 0, loop.count);
    return;
  }
  run_shared(pieces, [&](int64_t shares) { return std::make_shared<Job>(loop, pieces, shares); });
}

int64_t pieces_of(int64_t units, int64_t unit) {
  constexpr int64_t LEAST_BYTES = 1 << 16, MOST_BYTES = 1 << 20;  // of a piece, about
  int64_t threads = torch::stable::get_num_threads();
  int64_t size = std::clamp(units * unit / (16 * threads), LEAST_BYTES, MOST_BYTES);
  if (threads == 1) return std::min<int64_t>(units, 1);
  int64_t of_each = (units * unit / size + threads - 1) / threads;
  return std::clamp<int64_t>(of_each * threads, std::min(units, threads), units);
}

}  // namespace medusa
