// Where a layer's pages lie in the arrays that kv_write and paged_attention are given.
#pragma once

#include "../_native/handler.h"

namespace jaxserve {

// A cache [pages, B, K, H], or one layer of [L, pages, B, K, H].
struct Pool {
  bool fits;
  int64_t layer, pages = 0, page = 0, heads = 0, head_dim = 0;

  Pool(const ffi::AnyBuffer& cache, int64_t layer) : layer(layer) {
    const auto shape = cache.dimensions();
    const std::size_t stacked = shape.size() == 5;
    fits = shape.size() == 4 + stacked && layer >= 0 && layer < (stacked ? shape[0] : 1);
    if (!fits) return;
    pages = shape[stacked], page = shape[stacked + 1], heads = shape[stacked + 2], head_dim = shape[stacked + 3];
  }
  // Elements of one layer.
  int64_t size() const { return pages * page * heads * head_dim; }
};

}  // namespace jaxserve
