// Where a layer's pages lie in the arrays that kv_write and paged_attention are given.
#pragma once

#include "../_native/handler.h"

namespace jaxserve {

// A cache [pages, B, K, width], or one layer of [L, pages, B, K, width]; the width is H, or H/2 of 4-bit codes.
struct Pool {
  bool fits;
  int64_t layers = 1, pages = 0, page = 0, heads = 0, width = 0;
  int64_t slots = 0;       // of one layer
  int64_t first_slot = 0;  // of this layer among those of all

  Pool(const ffi::AnyBuffer& cache, int64_t layer) {
    const auto shape = cache.dimensions();
    const std::size_t stacked = shape.size() == 5;
    fits = shape.size() == 4 + stacked && layer >= 0 && layer < (stacked ? shape[0] : 1);
    if (!fits) return;
    if (stacked) layers = shape[0];
    pages = shape[stacked], page = shape[stacked + 1], heads = shape[stacked + 2], width = shape[stacked + 3];
    slots = pages * page, first_slot = layer * slots;
  }
  // Heads of all slots of all layers.
  int64_t rows() const { return layers * slots * heads; }
};

}  // namespace jaxserve
