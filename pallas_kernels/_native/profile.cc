#include "profile.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

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
