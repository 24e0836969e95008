#include "team.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

namespace jaxserve {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(200);
// Looks, some microseconds, after which a thread that waits lets others have its core: those that it waits for may be on it.
constexpr int kPatience = 64;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

std::vector<int> usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores.empty() ? std::vector<int>{0} : cores;
}

int wanted_threads() {
  const char* text = std::getenv("JAXSERVE_CPU_THREADS");
  return text ? std::atoi(text) : 0;
}

// Cores for a team of them all, in order; none where its threads are left to the system.
std::vector<int> own_cores(const std::vector<int>& usable, int threads) {
  const char* text = std::getenv("JAXSERVE_CPU_PIN");
  const bool wanted = !text || std::atoi(text) != 0;
  return wanted && threads > 1 && threads == static_cast<int>(usable.size()) ? usable : std::vector<int>{};
}

cpu_set_t only(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  return set;
}

// Moves the calling thread to a core, if it may be there; it is free to leave it again.
void move_to(int core) {
  cpu_set_t before;
  if (sched_getaffinity(0, sizeof(before), &before) != 0 || !CPU_ISSET(core, &before)) return;
  const cpu_set_t one = only(core);
  sched_setaffinity(0, sizeof(one), &one);
  sched_setaffinity(0, sizeof(before), &before);
}

}  // namespace

Team& Team::get() {
  static Team* team = new Team(usable_cores(), wanted_threads());  // never destroyed: its threads sleep in it when main() returns
  return *team;
}

void* Team::scratch(std::size_t bytes, int use) {
  thread_local struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
  } buffers[2];
  Buffer& buffer = buffers[use];
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, buffer.size);
  }
  return buffer.data;
}

Team::Team(const std::vector<int>& usable, int wanted)
    : size_(wanted > 0 ? std::min<int>(wanted, usable.size()) : usable.size()),
      cores_(own_cores(usable, size_)),
      shares_(new Share[size_]) {
  for (int thread = 1; thread < size_; ++thread) std::thread(&Team::work, this, thread).detach();
}

void Team::run(int64_t items, int64_t grain, Function function, void* self) {
  if (items <= 0) return;
  if (items == 1 || size_ == 1) return function(self, 0, items, 0);
  if (!cores_.empty() && sched_getcpu() != cores_[0]) move_to(cores_[0]);  // the others are taken
  std::lock_guard<std::mutex> lock(busy_);
  function_ = function;
  self_ = self;
  grain_.store(grain, std::memory_order_relaxed);
  pending_.store(items, std::memory_order_relaxed);
  for (int64_t thread = 0; thread < size_; ++thread) {
    const uint64_t first = items * thread / size_, end = items * (thread + 1) / size_;
    shares_[thread].left.store(end << 32 | first, std::memory_order_release);  // from here on a late thread may take some
  }
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> sleeping(sleep_mutex_);
    wake_.notify_all();
  }
  take_items(0);
  for (int spins = 0; pending_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins > kPatience) sched_yield();
    pause();
  }
}

// A thread's own items from the first on, then those of others from the last on.
//
// Nobody waits for a thread that took nothing: one that the system did not run in time leaves its items to others. It may
// arrive when the next call is under way and then simply takes items of that one. So what a call is must be read after an
// item is taken: from then until the item is subtracted from pending_ the call cannot end.
void Team::take_items(int thread) {
  int64_t done = 0;
  for (int step = 0; step < size_; ++step) {
    std::atomic<uint64_t>& share = shares_[(thread + step) % size_].left;
    uint64_t left = share.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t first = left & 0xffffffff, end = left >> 32;
      const int64_t count = std::min(grain_.load(std::memory_order_relaxed), end - first);
      if (count <= 0) break;
      const bool own = step == 0;
      const uint64_t rest = own ? left + count : left - (uint64_t(count) << 32);
      if (!share.compare_exchange_weak(left, rest, std::memory_order_acquire, std::memory_order_relaxed)) continue;
      own ? function_(self_, first, first + count, thread) : function_(self_, end - count, end, thread);
      done += count;
      left = share.load(std::memory_order_relaxed);
    }
  }
  if (done > 0) pending_.fetch_sub(done, std::memory_order_release);
}

void Team::work(int thread) {
  if (!cores_.empty()) {
    const cpu_set_t one = only(cores_[thread]);
    sched_setaffinity(0, sizeof(one), &one);
  }
  for (uint32_t seen = 0, now;; seen = now) {
    auto deadline = Clock::now() + kSpin;
    for (int spins = 0; (now = epoch_.load(std::memory_order_acquire)) == seen; ++spins) {
      if (spins % kPatience == kPatience - 1) {
        if (Clock::now() > deadline) {
          std::unique_lock<std::mutex> lock(sleep_mutex_);
          asleep_.fetch_add(1, std::memory_order_seq_cst);
          wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
          asleep_.fetch_sub(1, std::memory_order_relaxed);
        }
        sched_yield();
      }
      pause();
    }
    take_items(thread);
  }
}

}  // namespace jaxserve

// For Python: the core of those who call the team while each of its threads has a core of its own, or -1.
extern "C" int jaxserve_callers_core() { return jaxserve::Team::get().callers_core(); }
