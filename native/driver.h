// What the driver's checks share: random numbers, arrays of exactly their size, threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "machine.h"

namespace driver {

// One seed, so that a failure repeats; an exception here may end the driver.
// NOLINTNEXTLINE(bugprone-random-generator-seed, bugprone-throwing-static-initialization)
inline std::mt19937 random_bits(7);

inline int64_t pick(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}
template <class T>
T pick_of(std::initializer_list<T> choices) {
  return choices.begin()[pick(0, static_cast<int64_t>(choices.size()) - 1)];
}

// An array of the element type, exactly as long as it is.
struct Array {
  bool narrow;
  int64_t size;
  std::unique_ptr<char[]> bytes;

  Array(bool narrow, int64_t size) : narrow(narrow), size(size), bytes(new char[size * (narrow ? 2 : 4)]) {}

  void set(int64_t i, float x) {
    if (!narrow) {
      std::memcpy(bytes.get() + i * 4, &x, 4);
      return;
    }
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t half = static_cast<uint16_t>(bits >> 16);  // cut, not rounded: any bfloat16 will do
    std::memcpy(bytes.get() + i * 2, &half, 2);
  }

  double get(int64_t i) const {
    uint32_t bits = 0;
    if (narrow) {
      uint16_t half;
      std::memcpy(&half, bytes.get() + i * 2, 2);
      bits = static_cast<uint32_t>(half) << 16;
    } else {
      std::memcpy(&bits, bytes.get() + i * 4, 4);
    }
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }

  void fill_normal() {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < size; ++i) set(i, normal(random_bits));
  }
  void fill(float x) {
    for (int64_t i = 0; i < size; ++i) set(i, x);
  }
};

// The larger error; NaN is the largest.
inline double worse(double worst, double error) {
  return error <= worst ? worst : std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
}

struct Ints {
  std::unique_ptr<int32_t[]> data;
  explicit Ints(const std::vector<int32_t>& from) : data(new int32_t[from.size()]) {
    std::copy(from.begin(), from.end(), data.get());
  }
};

// New threads each time: a pool that is slow to start is what the kernel must live with.
inline void run_on_threads(int64_t n, const std::function<void(int64_t)>& task) {
  std::atomic<int64_t> next{0};
  auto help = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < n;) task(i);
  };
  std::thread one(help), two(help);
  help();
  one.join();
  two.join();
}

// In driver_blocked.cc: one matmul with blocked weights.
double run_blocked(quire::Isa isa, bool narrow);

// In driver_sample.cc.
double run_draw(quire::Isa isa);
double run_sample(quire::Isa isa);
bool run_uniform();

}  // namespace driver
