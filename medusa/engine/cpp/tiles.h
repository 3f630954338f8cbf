// Tile registers (AMX: Intel's servers since 2023), where there are any.
//
// Such a register holds up to 16 rows of 64 bytes, and two are multiplied in 16 cycles.

#pragma once

#include <optional>
#include <type_traits>

#include "number_formats.h"

namespace medusa {

// Whether products of bfloat16 and of whole numbers are computed in tiles, where there are any.
extern bool has_tiles;
// The operator: `wanted` sets it.
bool tiles(std::optional<bool> wanted);

#if defined(__AMXBF16__) && defined(__AMXINT8__)  // as clang called them up to version 14
#define __AMX_BF16__
#define __AMX_INT8__
#endif

constexpr int64_t TILE_ROWS = 16, TILE_WIDTH = 64, TILE_BYTES = TILE_ROWS * TILE_WIDTH;
struct TileShape {
  int64_t rows, bytes;  // bytes: of each row
};

}  // namespace medusa

#if defined(TILES_HEADER)  // registers that are only arrays: tests run this without them
#include TILES_HEADER
#define HAS_TILES
#elif defined(MEDUSA_AVX512) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && \
    defined(__linux__)
#define HAS_TILES

namespace medusa {

// The shapes of this thread's registers while it multiplies. The compiler's own _tile_loadconfig says that it
// reads 8 bytes, and what is written to the others may be left out.
struct TileRegisters {
  struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t widths[16] = {};
    uint8_t rows[16] = {};
  } before;

  explicit TileRegisters(const TileShape (&shapes)[8]) {
    asm volatile("sttilecfg %0" : "=m"(before));
    Shapes now;
    for (int i = 0; i < 8; i++) {
      now.widths[i] = shapes[i].bytes;
      now.rows[i] = shapes[i].rows;
    }
    asm volatile("ldtilecfg %0" ::"m"(now));
  }
  ~TileRegisters() { asm volatile("ldtilecfg %0" ::"m"(before)); }
};

// Registers are numbered by constants, as instructions name them; `stride` is the number of bytes from row to
// row.
template <int TILE> inline void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int TILE> inline void load_tile(const void* from, int64_t stride = TILE_WIDTH) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// sums += part `PART` of rows * weights; of int8 the second part of a row has no sign
template <typename Weight, int PART, int SUMS, int ROWS, int WEIGHTS> inline void multiply_tiles() {
  if constexpr (std::is_same_v<Weight, BFloat16>)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
  else if constexpr (PART == 0)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
  else
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}

}  // namespace medusa
#endif
