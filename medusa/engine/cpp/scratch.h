// Memory that a thread computes in: it grows to the most that was asked for, and stays.

#pragma once

#include <cstdint>
#include <memory>

namespace medusa {

// The first place from `memory` on at which a line of the cache begins.
template <typename T> T* at_line(T* memory) {
  constexpr uintptr_t LINE = 64;
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory) + LINE - 1) & ~(LINE - 1));
}

struct Scratch {
  std::unique_ptr<float[]> memory;
  int64_t size = 0;

  // Room for `wanted` numbers, uninitialised; what this returned before is no longer valid.
  float* of(int64_t wanted) {
    if (wanted > size) memory.reset(new float[size = wanted]);
    return memory.get();
  }
};

}  // namespace medusa
