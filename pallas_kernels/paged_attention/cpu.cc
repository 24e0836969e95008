// paged_attention on CPUs: softmax attention over the paged cache. Neighbouring tokens of a sequence are a tile, for which keys and
// values are read once; kernel.inc says why the tile of a token changes none of its numbers.
#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/profile.h"
#include "../_native/team.h"
#include "../kv_write/pool.h"
#include "ahead.h"
#include "call.h"

#define JAXSERVE_KERNEL "../paged_attention/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

// Of how many tokens a tile has at most, if there are few and if there are many: keys and values are read once for a tile.
constexpr int64_t kFewTokens = 8, kManyTokens = 32;

// How finely few tiles are shared out, for each thread, and the most memory for that.
constexpr int64_t kShares = 4, kMostFloats = 1 << 20;

// The keys or the values of a layer among the operands, of which there are `each`; `at` is the first. Data is null if they
// do not fit.
Cache cache_of(const ffi::RemainingArgs& arrays, std::size_t at, std::size_t each, Store store, int64_t head_dim, int64_t layer) {
  const auto codes = arrays.get<ffi::AnyBuffer>(at);
  if (!codes) return {};
  const Pool pool(*codes, layer);
  if (!pool.fits || pool.width != (store == Store::kInt4 ? head_dim / 2 : head_dim)) return {};
  if (each == 1 && codes->element_type() == ffi::BF16) store = Store::kBF16;
  const int64_t row = pool.first_slot * pool.heads, bytes = store == Store::kF32 ? 4 : store == Store::kBF16 ? 2 : 1;
  const auto* const data = static_cast<const uint8_t*>(codes->untyped_data()) + row * pool.width * bytes;
  Cache cache{store, data, nullptr, nullptr, pool.page, pool.heads, head_dim};
  for (std::size_t i = 1; i < each; ++i) {
    const auto numbers = arrays.get<ffi::Buffer<ffi::F16>>(at + i);
    if (!numbers || static_cast<int64_t>(numbers->element_count()) != pool.rows()) return {};
    (i == 1 ? cache.scale : cache.minimum) = static_cast<const uint16_t*>(numbers->untyped_data()) + row;
  }
  return cache;
}

// All items of a plan, by the team: each thread its own from the first on, so that it knows what comes next.
void attend_items(const Plan& plan) {
  Team& team = Team::get();
  const int64_t items = plan.items(), floats = JAXSERVE_DISPATCH(attend_floats, plan.call, plan.most_tokens, plan.together);
  const int64_t grain = std::max<int64_t>(plan.most_tokens > 1 ? 1 : items / (4 * team.size()), 1);
  thread_local std::vector<Ahead> kept;  // so that a call allocates nothing
  std::vector<Ahead>& ahead = kept;
  ahead.assign(team.size(), Ahead(plan));
  team.ranges(items, grain, [&](int64_t first, int64_t last, int thread) {
    float* const memory = static_cast<float*>(Team::scratch(floats * sizeof(float), 1));
    const int64_t own = items * (thread + 1) / team.size();
    for (int64_t item = first; item < last; ++item) {
      ahead[thread].begin(item, std::max(last, first < own ? own : last));
      JAXSERVE_DISPATCH(attend, plan.call, plan.work(item), ahead[thread], nullptr, memory);
    }
  });
}

// The same where there are few items: the blocks of each are cut into `runs`, whose parts are joined at the end.
void attend_runs(const Plan& plan, int64_t runs) {
  Team& team = Team::get();
  const int64_t items = plan.items(), blocks = plan.most_blocks, part = JAXSERVE_DISPATCH(part_floats, plan.call, plan.most_tokens);
  const int64_t floats = JAXSERVE_DISPATCH(attend_floats, plan.call, plan.most_tokens, plan.together);
  float* const parts = static_cast<float*>(Team::scratch(items * blocks * part * sizeof(float), 0));
  const auto memory = [&] { return static_cast<float*>(Team::scratch(floats * sizeof(float), 1)); };
  team.each(items * runs, [&](int64_t share, int) {
    const int64_t item = share / runs, run = share % runs;
    Work work = plan.work(item);
    const int64_t first = work.first_block, count = work.last_block - first;
    work.first_block = first + count * run / runs, work.last_block = first + count * (run + 1) / runs;
    if (work.first_block == work.last_block) return;
    Ahead ahead(plan);
    ahead.begin(work);
    JAXSERVE_DISPATCH(attend, plan.call, work, ahead, parts + (item * blocks + work.first_block - first) * part, memory());
  });
  team.each(items, [&](int64_t item, int) {
    JAXSERVE_DISPATCH(finish, plan.call, plan.work(item), parts + item * blocks * part, memory());
  });
}

void attend_tiles(const Call& call, const std::vector<Tile>& tiles) {
  const int64_t threads = Team::get().size();
  Plan plan{call, tiles};
  for (const Tile& tile : tiles) {
    plan.most_tokens = std::max(plan.most_tokens, tile.tokens);
    plan.most_blocks = std::max(plan.most_blocks, call.last_block(tile) - call.first_block(tile));
  }
  // Keys of all heads of a position lie side by side. Many tokens take long enough to be shared out head by head.
  if (int64_t(tiles.size()) >= kShares * threads && plan.most_tokens <= kFewTokens) plan.together = call.keys.heads;
  const int64_t items = plan.items();
  const int64_t runs = items && threads > 1 ? std::min(plan.most_blocks, kShares * threads / items) : 1;
  const int64_t floats = items * plan.most_blocks * JAXSERVE_DISPATCH(part_floats, call, plan.most_tokens);
  if (runs > 1 && floats <= kMostFloats) attend_runs(plan, runs);
  else attend_items(plan);
}

ffi::Error paged_attention(ffi::BufferR0<ffi::S32> layer_index, ffi::AnyBuffer q, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> o, float scale,
                           int64_t window, float softcap, std::string_view format) {
  const Timed timed([] { return std::string("paged_attention"); });
  const Store store = format == "int8" ? Store::kInt8 : format == "int4" ? Store::kInt4 : format == "fp8" ? Store::kFp8 : Store::kF32;
  const std::size_t each = store == Store::kF32 ? 1 : store == Store::kFp8 ? 2 : 3;
  if (rest.size() != 2 * each + 3 || q.dimensions().size() != 3) return invalid("paged_attention: an operand is missing");
  const auto shape = q.dimensions();
  const int64_t layer = *layer_index.typed_data();
  const Cache keys = cache_of(rest, 0, each, store, shape[2], layer), values = cache_of(rest, each, each, store, shape[2], layer);
  const auto found_tables = rest.get<ffi::Buffer<ffi::S32>>(2 * each), found_starts = rest.get<ffi::Buffer<ffi::S32>>(2 * each + 1);
  const auto found_lengths = rest.get<ffi::Buffer<ffi::S32>>(2 * each + 2);
  if (!keys.data || !values.data || !found_tables || !found_starts || !found_lengths) {
    return invalid("paged_attention: an operand has a type or a shape of its own");
  }
  const auto &tables = *found_tables, &starts = *found_starts, &lengths = *found_lengths;
  const Pool pool(*rest.get<ffi::AnyBuffer>(0), layer);
  const int64_t seqs = lengths.element_count(), pages_per_seq = seqs ? tables.element_count() / seqs : 0;
  const bool fits = rest.get<ffi::AnyBuffer>(each)->dimensions() == rest.get<ffi::AnyBuffer>(0)->dimensions() && pool.heads > 0 &&
                    shape[1] % pool.heads == 0 &&
                    static_cast<int64_t>(starts.element_count()) == seqs + 1 && o->element_count() == q.element_count();
  if (!fits) return invalid("paged_attention: the operands do not fit each other");

  const int32_t* const start = starts.typed_data();
  // Nothing outside the operands is read, whatever tables and starts say.
  if (start[0] != 0 || start[seqs] > shape[0]) return invalid("paged_attention: query_starts names a token outside the step");
  for (int64_t s = 0; s < seqs; ++s) {
    if (start[s + 1] < start[s]) return invalid("paged_attention: query_starts descends");
    if (start[s + 1] == start[s]) continue;
    if (lengths.typed_data()[s] < start[s + 1] - start[s]) return invalid("paged_attention: a context is shorter than its tokens");
    const int64_t used = (lengths.typed_data()[s] + pool.page - 1) / pool.page;
    const int64_t earliest = lengths.typed_data()[s] - (start[s + 1] - start[s]);
    const int64_t unread = window > 0 ? std::max<int64_t>(earliest - window + 1, 0) / pool.page : 0;
    const int32_t* const table = tables.typed_data() + s * pages_per_seq;
    if (used > pages_per_seq) return invalid("paged_attention: a context is longer than its block table");
    for (int64_t p = unread; p < used; ++p) {
      if (table[p] < 0 || table[p] >= pool.pages) return invalid("paged_attention: a block table names a page outside the pool");
    }
  }

  const bool wide = q.element_type() == ffi::F32;
  const bool pairs = keys.store == Store::kBF16 && shape[2] % 32 == 0, narrow_dots = pairs && !wide && isa() == Isa::kAvx512;
  const Call call{q.untyped_data(), o->untyped_data(), wide, pairs, narrow_dots, shape[1] / pool.heads, keys, values, scale, softcap, window};
  thread_local std::vector<Tile> tiles;  // kept, so that a call allocates nothing
  tiles.clear();
  const int64_t tokens = shape[0], most = tokens >= 8 * kManyTokens ? kManyTokens : kFewTokens;
  for (int64_t s = 0; s < seqs; ++s) {
    for (int64_t t = start[s]; t < start[s + 1]; t += most) {
      const int64_t position = lengths.typed_data()[s] - start[s + 1] + t;
      tiles.push_back({tables.typed_data() + s * pages_per_seq, t, std::min<int64_t>(most, start[s + 1] - t), position});
    }
  }
  const int64_t row = shape[1] * shape[2] * (call.wide ? 4 : 2), used = seqs ? start[seqs] : 0;
  std::memset(static_cast<char*>(call.o) + used * row, 0, (tokens - used) * row);  // padding
  attend_tiles(call, tiles);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention, jaxserve::paged_attention,
                              jaxserve::ffi::Ffi::Bind()
                                  .Arg<jaxserve::ffi::BufferR0<jaxserve::ffi::S32>>()
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap")
                                  .Attr<std::string_view>("format"));
