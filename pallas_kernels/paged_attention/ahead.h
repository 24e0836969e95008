// Asks for the memory of keys and values before they are wanted.
#pragma once

#include "call.h"

namespace jaxserve {
namespace {

// Positions that are asked for in advance.
constexpr int64_t kAhead = 64;

// One thread's way through the positions of its items. It asks for one position as another is done with, for many questions
// at once wait for each other.
class alignas(64) Ahead {
 public:
  explicit Ahead(const Plan& plan) : plan_(&plan) {}

  // Work on an item begins; those up to `last` follow.
  void begin(int64_t item, int64_t last) {
    if (item_ < item || item_ >= last) enter(plan_->work(item)), item_ = item;
    last_ = last;
    catch_up();
  }
  // The same for some work that nothing follows.
  void begin(const Work& work) {
    enter(work);
    catch_up();
  }

  // One key head is done with a position.
  __attribute__((always_inline)) void step() {
    if (++steps_ < work_.key_heads) return;
    steps_ = 0, --asked_;
    catch_up();
  }

 private:
  void enter(const Work& work) {
    work_ = work, steps_ = asked_ = 0;
    position_ = std::max(work.first_block * kBlock, plan_->call.first_seen(work.tile.position));
    end_ = std::min(work.last_block * kBlock, work.tile.position + work.tile.tokens);
  }
  void catch_up() {
    while (asked_ < kAhead && (position_ < end_ || item_ + 1 < last_)) ask();
  }
  __attribute__((noinline)) void ask() {
    if (position_ == end_) {
      const int64_t asked = asked_;
      enter(plan_->work(++item_));
      asked_ = asked;
    }
    const Cache& cache = plan_->call.keys;
    const int64_t page = work_.tile.table[position_ / cache.page];
    const int64_t row = (page * cache.page + position_ % cache.page) * cache.heads + work_.key_head;
    ask_for(plan_->call.keys, row), ask_for(plan_->call.values, row);
    ++position_, ++asked_;
  }
  // Inlined, for GCC takes a function that only prefetches for one that does nothing.
  __attribute__((always_inline)) void ask_for(const Cache& cache, int64_t row) const {
    const int64_t bytes = cache.row_bytes();
    const auto* const from = static_cast<const char*>(cache.data) + row * bytes;
    for (int64_t at = 0; at < work_.key_heads * bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
    if (cache.scale) __builtin_prefetch(cache.scale + row, 0, 2);
    if (cache.minimum) __builtin_prefetch(cache.minimum + row, 0, 2);
  }

  const Plan* plan_;
  Work work_{};
  int64_t item_ = -1, last_ = 0;     // the item that it is at, and where those of its thread end
  int64_t position_ = 0, end_ = 0;   // what it asks for next, and the end of the item
  int64_t asked_ = 0, steps_ = 0;    // positions that were asked for and are not done with; key heads that are done with the next
};

}  // namespace
}  // namespace jaxserve
