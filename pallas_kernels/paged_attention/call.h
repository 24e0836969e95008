// What a call of paged_attention is about.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

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

// The operands, checked: q and o are [T, K, heads, H], float32 if `wide` and else bfloat16. In pairs, keys and values are
// bfloat16 and taken two by two; with narrow_dots, queries too.
struct Call {
  const void* q;
  void* o;
  bool wide, pairs, narrow_dots;
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

// The items that a call consists of: each tile, and of it each group of `together` neighbouring key heads.
struct Plan {
  const Call& call;
  const std::vector<Tile>& tiles;
  int64_t together = 1, most_tokens = 0, most_blocks = 0;

  int64_t items() const { return static_cast<int64_t>(tiles.size()) * call.keys.heads / together; }
  Work work(int64_t item) const {
    const int64_t groups = call.keys.heads / together;
    const Tile& tile = tiles[item / groups];
    return {tile, item % groups * together, together, call.first_block(tile), call.last_block(tile)};
  }
};

}  // namespace
}  // namespace jaxserve
