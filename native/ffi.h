// What every handler needs: XLA's threads for the kernels, the instruction set by its name, shapes of buffers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "linear.h"
#include "machine.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace quire_ffi {

namespace ffi = xla::ffi;

// A closure may start long after its work is done (the pool was busy): all it touches then is this.
struct Work {
  std::atomic<int64_t> next{0}, done{0};
  int64_t num_tasks = 0;
  const std::function<void(int64_t)>* task = nullptr;  // lives as long as done < num_tasks

  void help() {
    for (int64_t i; (i = next.fetch_add(1)) < num_tasks;) {
      (*task)(i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Tasks are taken from a counter by whoever is free. The caller takes them too, so it waits for nobody to start.
inline void run_on_pool(ffi::ThreadPool& pool, int64_t num_threads, int64_t num_tasks,
                        const std::function<void(int64_t)>& task) {
  auto work = std::make_shared<Work>();
  work->num_tasks = num_tasks;
  work->task = &task;
  const int64_t helpers = std::min(num_threads, num_tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->help(); });
  work->help();
  for (int spins = 0; work->done.load(std::memory_order_acquire) < num_tasks; ++spins)
    if (spins > 2000) std::this_thread::yield();
}

inline quire::Threads threads_of(ffi::ThreadPool& pool) {
  const int64_t count = std::max<int64_t>(pool.num_threads(), 1);
  return {count,
          [&pool, count](int64_t n, const std::function<void(int64_t)>& task) { run_on_pool(pool, count, n, task); }};
}

inline ffi::Error choose_isa(std::string_view name, quire::Isa& isa) {
  isa = quire::best_isa();
  if (name.empty()) return ffi::Error::Success();
  for (int i = 0; i < quire::kNumIsas; ++i) {
    isa = static_cast<quire::Isa>(i);
    if (name == quire::isa_name(isa) && quire::isa_supported(isa)) return ffi::Error::Success();
  }
  return ffi::Error::InvalidArgument("quire: this machine has no instruction set " + std::string(name));
}

template <class Buffer>
bool has_shape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  return dims.size() == shape.size() && std::equal(shape.begin(), shape.end(), dims.begin());
}

using Bytes = ffi::Buffer<ffi::U8>;
using Ints = ffi::Buffer<ffi::S32>;
using Words = ffi::Buffer<ffi::U32>;
using Bools = ffi::Buffer<ffi::PRED>;
using Floats = ffi::Buffer<ffi::F32>;

// The groups of so many rows. They are computed by the program, and checked here before anybody trusts them.
inline ffi::Error groups_of(const Ints& sizes, int64_t rows, quire::Groups& groups) {
  groups = {static_cast<int64_t>(sizes.element_count()), sizes.typed_data()};
  int64_t sum = 0;
  for (int64_t i = 0; i < groups.count; ++i) {
    if (groups.sizes[i] < 0) return ffi::Error::InvalidArgument("quire_grouped: a group's size is negative");
    sum += groups.sizes[i];
  }
  if (sum > rows) return ffi::Error::InvalidArgument("quire_grouped: the groups have more rows than there are");
  return ffi::Error::Success();
}

}  // namespace quire_ffi
