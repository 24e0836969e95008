// A team of threads that splits the work of one kernel call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace jaxserve {

// One team a process. Between two calls of a step its threads spin, because waking a thread takes longer than most calls;
// when no call comes for a while they sleep. JAXSERVE_CPU_THREADS sets its size, at most the cores the process may use.
//
// A team of all cores keeps each of its threads on one of them, and who calls it moves to the one that is left: the system,
// to which a thread that spins looks busy, often has both on one core while another idles. JAXSERVE_CPU_PIN=0 leaves it to
// the system all the same.
class Team {
 public:
  static Team& get();

  int size() const { return size_; }

  // Where its threads stay on cores, the core of whoever calls it; -1 where they do not.
  int callers_core() const { return cores_.empty() ? -1 : cores_[0]; }

  // Calls body(item, thread) for every item in [0, items), spread over the team, and returns when all are done. Which
  // thread takes an item is left to chance, so a result may not depend on it.
  template <typename Body>
  void each(int64_t items, Body&& body) {
    ranges(items, 1, [&](int64_t first, int64_t last, int thread) {
      for (int64_t item = first; item < last; ++item) body(item, thread);
    });
  }

  // The same for ranges of about `grain` items: body(first, last, thread). A thread is given neighbouring items as long
  // as it keeps up with the others, so that it may ask for the memory of the next ones early.
  template <typename Body>
  void ranges(int64_t items, int64_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(items, grain, [](void* self, int64_t first, int64_t last, int thread) {
      (*static_cast<Plain*>(self))(first, last, thread);
    }, &body);
  }

  // Memory of the calling thread that lasts until it asks for the same use again; grows and is never given back.
  // Use 0 is a handler's, 1 that of a body that the team runs.
  static void* scratch(std::size_t bytes, int use);

 private:
  using Function = void (*)(void*, int64_t, int64_t, int);

  // What is left of a thread's own items, in one word: the first in its low half, the end in its high half.
  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};
  };

  Team(const std::vector<int>& usable, int wanted);
  void run(int64_t items, int64_t grain, Function function, void* self);
  void work(int thread);
  void take_items(int thread);

  const int size_;
  const std::vector<int> cores_;  // of each thread, or none
  std::unique_ptr<Share[]> shares_;
  std::mutex busy_;  // held by the call that has the team
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int64_t> pending_{0};  // items of the call that are not done
  std::atomic<int> asleep_{0};
  std::atomic<int64_t> grain_{1};
  Function function_ = nullptr;
  void* self_ = nullptr;
};

}  // namespace jaxserve
