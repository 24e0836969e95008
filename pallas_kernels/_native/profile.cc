#include "profile.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "team.h"

namespace jaxserve {
namespace {

struct Calls {
  int64_t count = 0, nanoseconds = 0;
};

std::mutex mutex;
std::map<std::string, Calls> calls;

}  // namespace

std::atomic<bool> profiling{false};

void add_call(const std::string& name, int64_t nanoseconds) {
  std::lock_guard<std::mutex> lock(mutex);
  Calls& found = calls[name];
  ++found.count;
  found.nanoseconds += nanoseconds;
}

}  // namespace jaxserve

// For Python: forgets what was counted, and counts from now on or no longer.
extern "C" void jaxserve_profile(int on) {
  std::lock_guard<std::mutex> lock(jaxserve::mutex);
  jaxserve::calls.clear();
  jaxserve::profiling.store(on != 0, std::memory_order_relaxed);
}

// For Python: what was counted, a line "COUNT NANOSECONDS NAME" a name, as long as it fits. Returns the bytes written.
extern "C" int64_t jaxserve_profile_read(char* to, int64_t bytes) {
  std::lock_guard<std::mutex> lock(jaxserve::mutex);
  std::string text;
  for (const auto& [name, found] : jaxserve::calls) {
    text += std::to_string(found.count) + " " + std::to_string(found.nanoseconds) + " " + name + "\n";
  }
  const int64_t size = std::min<int64_t>(text.size(), bytes);
  std::memcpy(to, text.data(), size);
  return size;
}

// For Python: reads some memory with all threads and does nothing else. Returns the sum of its words.
extern "C" uint64_t jaxserve_read_memory(const uint64_t* data, int64_t words) {
  std::atomic<uint64_t> total{0};
  jaxserve::Team::get().ranges(words / 8, 2048, [&](int64_t first, int64_t last, int) {
    uint64_t sums[8] = {};
    for (int64_t line = first; line < last; ++line) {
      __builtin_prefetch(data + 8 * std::min(line + 64, words / 8 - 1));
      for (int i = 0; i < 8; ++i) sums[i] += data[8 * line + i];
    }
    for (const uint64_t sum : sums) total.fetch_add(sum, std::memory_order_relaxed);
  });
  return total.load();
}
