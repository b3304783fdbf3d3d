// What the machine offers the kernels: instruction sets, lines of its cache, and threads.
#pragma once

#include <cstdint>
#include <functional>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define QUIRE_X86 1
#endif

namespace quire {

constexpr int64_t kLine = 64;  // bytes

inline int64_t ceil_div(int64_t value, int64_t step) { return (value + step - 1) / step; }
inline int64_t round_up(int64_t value, int64_t step) { return ceil_div(value, step) * step; }

// In rising order of preference. A machine that has one has those before it. VNNI are dot products of int8, BF16 those of
// bfloat16, and kAmx has tiles of both kinds.
enum class Isa { kPlain, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };
constexpr int kNumIsas = 6;

const char* isa_name(Isa isa);
bool isa_supported(Isa isa);
Isa best_isa();

// Runs task(0) .. task(n - 1), in any order and on any thread, and returns when all are done.
using RunTasks = std::function<void(int64_t n, const std::function<void(int64_t)>& task)>;

struct Threads {
  int64_t count;
  RunTasks run;
};

// The same, but a task also learns which one its thread has next, n if none: a thread claims that before it runs the
// present one, so that it can fetch meanwhile what the next will read.
void run_ahead(const Threads& threads, int64_t n, const std::function<void(int64_t now, int64_t next)>& task);

}  // namespace quire
