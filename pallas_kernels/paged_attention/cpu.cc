// paged_attention on CPUs: softmax attention over the paged cache with an online softmax, one token's heads at a time.
#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "../_native/handler.h"
#include "../_native/isa.h"
#include "../_native/profile.h"
#include "../_native/team.h"
#include "../kv_write/pool.h"

namespace jaxserve {
namespace {

enum class Store { kF32, kBF16, kInt8, kInt4, kFp8 };

// Keys or values [pages, B, K, H] as `store` says; codes have a scale, and integers a minimum, a row (see KvFormat).
struct Cache {
  Store store;
  const void* data;
  const uint16_t* scale;
  const uint16_t* minimum;
  int64_t page, heads, head_dim;

  int64_t row_bytes() const {
    const int64_t bits = store == Store::kF32 ? 32 : store == Store::kBF16 ? 16 : store == Store::kInt4 ? 4 : 8;
    return head_dim * bits / 8;
  }
};

// What a code of float8_e4m3fn stands for.
struct Fp8Table {
  float numbers[256];
  Fp8Table() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
      numbers[code] = (code & 127) == 127 ? NAN : code < 128 ? size : -size;
    }
  }
};
const Fp8Table fp8;

// Positions that are met together; see kernel.inc.
constexpr int kBlock = 64;

// Neighbouring tokens of one sequence; `position` is that of the first.
struct Tile {
  const int32_t* table;
  int64_t token, tokens, position;
};

// A tile's blocks of neighbouring key heads.
struct Work {
  Tile tile;
  int64_t key_head, key_heads, first_block, last_block;
};

// The operands, checked: q and o are [T, K, heads, H], float32 if `wide` and else bfloat16; in pairs, everything is bfloat16 and
// its numbers are taken two by two.
struct Call {
  const void* q;
  void* o;
  bool wide, pairs;
  int64_t heads;
  Cache keys, values;
  float scale, softcap;
  int64_t window;

  int64_t width() const { return (keys.head_dim + 15) / 16 * 16; }
  int64_t row(int64_t token, int64_t key_head, int64_t head) const { return (token * keys.heads + key_head) * heads + head; }
  int64_t first_seen(int64_t position) const { return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0; }
  // Of a block from `position` on, the part that token t of a tile sees: from begin to end.
  int begin(const Tile& tile, int64_t t, int64_t position) const {
    return static_cast<int>(std::max<int64_t>(first_seen(tile.position + t) - position, 0));
  }
  int end(const Tile& tile, int64_t t, int64_t position) const {
    return static_cast<int>(std::min<int64_t>(tile.position + t + 1 - position, kBlock));
  }
  int64_t first_block(const Tile& tile) const { return first_seen(tile.position) / kBlock; }
  int64_t last_block(const Tile& tile) const { return (tile.position + tile.tokens + kBlock - 1) / kBlock; }
};

}  // namespace
}  // namespace jaxserve

#define JAXSERVE_KERNEL "../paged_attention/kernel.inc"
#include "../_native/clones.h"

namespace jaxserve {
namespace {

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

// All tiles, by the team. Where there are few, the blocks of one are shared out too.
void attend_tiles(const Call& call, const std::vector<Tile>& tiles) {
  Team& team = Team::get();
  int64_t tokens = 0, blocks = 0;
  for (const Tile& tile : tiles) {
    tokens = std::max(tokens, tile.tokens);
    blocks = std::max(blocks, call.last_block(tile) - call.first_block(tile));
  }
  const int64_t together = int64_t(tiles.size()) >= 4 * team.size() && tokens <= 8 ? call.keys.heads : 1;
  const int64_t groups = call.keys.heads / together, items = tiles.size() * groups;
  const auto work_of = [&](int64_t item) {
    const Tile& tile = tiles[item / groups];
    return Work{tile, item % groups * together, together, call.first_block(tile), call.last_block(tile)};
  };
  const int64_t floats = JAXSERVE_DISPATCH(attend_floats, call, tokens, together), part = JAXSERVE_DISPATCH(part_floats, call, tokens);
  const auto memory = [&] { return static_cast<float*>(Team::scratch(floats * sizeof(float), 1)); };
  const int64_t runs = std::min(blocks, kShares * team.size() / std::max<int64_t>(items, 1));
  if (team.size() == 1 || runs < 2 || items * blocks * part > kMostFloats) {
    const int64_t grain = tokens > 1 ? 1 : std::max<int64_t>(items / (4 * team.size()), 1);
    team.ranges(items, grain, [&](int64_t first, int64_t last, int) {
      for (int64_t item = first; item < last; ++item) {
        const Work next = work_of(std::min(item + 1, items - 1));
        JAXSERVE_DISPATCH(attend, call, work_of(item), item + 1 < items ? &next : nullptr, nullptr, memory());
      }
    });
    return;
  }
  float* const parts = static_cast<float*>(Team::scratch(items * blocks * part * sizeof(float), 0));
  team.each(items * runs, [&](int64_t share, int) {
    const int64_t item = share / runs, run = share % runs;
    Work work = work_of(item);
    const int64_t first = work.first_block, count = work.last_block - first;
    work.first_block = first + count * run / runs, work.last_block = first + count * (run + 1) / runs;
    if (work.first_block == work.last_block) return;
    JAXSERVE_DISPATCH(attend, call, work, nullptr, parts + (item * blocks + work.first_block - first) * part, memory());
  });
  team.each(items, [&](int64_t item, int) { JAXSERVE_DISPATCH(finish, call, work_of(item), parts + item * blocks * part, memory()); });
}

ffi::Error paged_attention(ffi::AnyBuffer q, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> o, float scale,
                           int64_t window, float softcap, std::string_view format, int64_t layer) {
  const Timed timed([] { return std::string("paged_attention"); });
  const Store store = format == "int8" ? Store::kInt8 : format == "int4" ? Store::kInt4 : format == "fp8" ? Store::kFp8 : Store::kF32;
  const std::size_t each = store == Store::kF32 ? 1 : store == Store::kFp8 ? 2 : 3;
  if (rest.size() != 2 * each + 3 || q.dimensions().size() != 3) return invalid("paged_attention: an operand is missing");
  const auto shape = q.dimensions();
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
  if (start[0] < 0 || start[seqs] > shape[0]) return invalid("paged_attention: query_starts names a token outside the step");
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
  const bool pairs = isa() == Isa::kAvx512 && !wide && keys.store == Store::kBF16 && shape[2] % 32 == 0;
  const Call call{q.untyped_data(), o->untyped_data(), wide, pairs, shape[1] / pool.heads, keys, values, scale, softcap, window};
  std::vector<Tile> tiles;
  // Keys and values are read once for a tile; many tokens can afford large ones.
  const int64_t tokens = shape[0], most = tokens >= 256 ? 32 : 8;
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
                                  .Arg<jaxserve::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<jaxserve::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap")
                                  .Attr<std::string_view>("format")
                                  .Attr<int64_t>("layer"));
