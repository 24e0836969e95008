// What one row of sample_logits asks for, and the random numbers of its tokens.
#pragma once

#include <cmath>
#include <cstdint>

namespace jaxserve {
namespace {

// The operands of a row, as they come.
struct Row {
  const float* logits;
  int64_t vocab;
  const uint32_t* key;
  int32_t position;
  float temperature;
  int32_t top_k;
  float top_p, min_p;

  bool greedy() const { return temperature == 0 || top_k == 1; }
};

// The token of a row, and whether the row is finite.
struct Choice {
  int32_t token;
  bool finite;
};

struct Words {
  uint32_t first, second;
};

// Threefry-2x32 with 20 rounds (Salmon et al., 2011): the words 0 and `count` under the key.
inline Words threefry(const uint32_t* key, uint32_t count) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  Words x{keys[0], count + keys[1]};
  for (uint32_t group = 0; group < 5; ++group) {
    for (const int rotation : kRotations[group % 2]) {
      x.first += x.second;
      x.second = (x.second << rotation | x.second >> (32 - rotation)) ^ x.first;
    }
    x.first += keys[(group + 1) % 3];
    x.second += keys[(group + 2) % 3] + group + 1;
  }
  return x;
}

// h of the definition, for a number or a vector of them.
template <typename U>
inline __attribute__((always_inline)) U mix(U x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}

// The exponential noise of one token of a row.
inline float exponential(Words words, uint32_t id) {
  const uint32_t bits = mix(mix(words.first + id) ^ words.second) >> 9;
  return static_cast<float>(-std::log((bits + 0.5) * 0x1p-23));
}

}  // namespace
}  // namespace jaxserve
