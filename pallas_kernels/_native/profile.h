// What the handlers' calls take, by name, while somebody asks (Python does, in profile.py).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace jaxserve {

// Adds the time until its end to what calls of this name took. It costs nothing to speak of while nobody asks; `name` is a
// function, so that names are only made when they are wanted.
template <typename Name>
class Timed {
 public:
  explicit Timed(Name name);
  ~Timed();

 private:
  using Clock = std::chrono::steady_clock;
  Name name_;
  Clock::time_point start_;
};

extern std::atomic<bool> profiling;
void add_call(const std::string& name, int64_t nanoseconds);

template <typename Name>
Timed<Name>::Timed(Name name) : name_(name) {
  if (profiling.load(std::memory_order_relaxed)) start_ = Clock::now();
}

template <typename Name>
Timed<Name>::~Timed() {
  if (start_ == Clock::time_point()) return;
  add_call(name_(), std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count());
}

}  // namespace jaxserve
