// Tile registers in software, for tests of the kernels on processors without them (AMX): registers are
// arrays, and instructions do what the manual says (Intel's Software Developer's Manual, volume 2: TDPBF16PS,
// TDPBSSD, TDPBUSD). A register that is read or written beyond its configured shape, or before it is
// configured, ends the process.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace medusa {

struct TileRegisters {
  struct Tile {
    TileShape shape;
    alignas(64) char data[TILE_ROWS][TILE_WIDTH];
  };
  static Tile* tiles() {
    thread_local Tile held[8] = {};
    return held;
  }

  explicit TileRegisters(const TileShape (&shapes)[8]) {
    require(!tiles()[0].shape.rows);
    for (int i = 0; i < 8; i++) {
      require(shapes[i].rows > 0 && shapes[i].rows <= TILE_ROWS && shapes[i].bytes > 0 &&
              shapes[i].bytes <= TILE_WIDTH);
      tiles()[i] = {shapes[i], {}};
    }
  }
  ~TileRegisters() {
    for (int i = 0; i < 8; i++) tiles()[i] = {};
  }
  static Tile& at(int i) {
    require(tiles()[i].shape.rows);
    return tiles()[i];
  }
  static void require(bool holds) {
    if (!holds)
      std::fputs("tile registers are used otherwise than they are configured\n", stderr), std::abort();
  }
};

template <int T> inline void clear_tile() { std::memset(TileRegisters::at(T).data, 0, TILE_BYTES); }
template <int T> inline void load_tile(const void* from, int64_t apart = TILE_WIDTH) {
  auto& tile = TileRegisters::at(T);
  for (int row = 0; row < tile.shape.rows; row++)
    std::memcpy(tile.data[row], static_cast<const char*>(from) + row * apart, tile.shape.bytes);
}
template <int T> inline void store_tile(void* to, int64_t apart) {
  auto& tile = TileRegisters::at(T);
  for (int row = 0; row < tile.shape.rows; row++)
    std::memcpy(static_cast<char*>(to) + row * apart, tile.data[row], tile.shape.bytes);
}

// A number of bfloat16; those below the normal ones count as zero, as in the products of them.
inline float in_a_tile(uint16_t bits) {
  return bits & 0x7f80 ? std::bit_cast<float>(uint32_t(bits) << 16) : 0.f;
}
inline float flushed(float value) {
  return std::abs(value) < std::numeric_limits<float>::min() ? 0.f : value;
}

template <typename W, int PART, int SUMS, int ROWS, int WEIGHTS> inline void multiply_tiles() {
  auto &sums = TileRegisters::at(SUMS), &rows = TileRegisters::at(ROWS),
       &weights = TileRegisters::at(WEIGHTS);
  TileRegisters::require(sums.shape.rows == rows.shape.rows && weights.shape.rows == rows.shape.bytes / 4);
  TileRegisters::require(sums.shape.bytes == TILE_WIDTH && weights.shape.bytes == TILE_WIDTH);
  for (int m = 0; m < sums.shape.rows; m++)
    for (int n = 0; n < TILE_ROWS; n++) {
      if constexpr (std::is_same_v<W, BFloat16>) {
        uint16_t x[32], w[2];
        std::memcpy(x, rows.data[m], sizeof(x));
        float sum, parts[2] = {};
        for (int k = 0; k < TILE_ROWS; k++) {
          std::memcpy(w, weights.data[k] + 4 * n, sizeof(w));
          for (int i = 0; i < 2; i++)
            parts[i] = flushed(std::fma(in_a_tile(x[2 * k + i]), in_a_tile(w[i]), parts[i]));
        }
        std::memcpy(&sum, sums.data[m] + 4 * n, sizeof(sum));
        sum = flushed(sum + flushed(parts[0] + parts[1]));
        std::memcpy(sums.data[m] + 4 * n, &sum, sizeof(sum));
      } else {
        int32_t sum;
        std::memcpy(&sum, sums.data[m] + 4 * n, sizeof(sum));
        for (int k = 0; k < weights.shape.rows; k++)
          for (int i = 0; i < 4; i++) {
            int x = rows.data[m][4 * k + i];
            sum += (PART ? x & 255 : x) * int(static_cast<int8_t>(weights.data[k][4 * n + i]));
          }
        std::memcpy(sums.data[m] + 4 * n, &sum, sizeof(sum));
      }
    }
}

}  // namespace medusa
