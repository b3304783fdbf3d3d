#include "machine.h"

#include <algorithm>
#include <atomic>

#if QUIRE_X86
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace quire {
namespace {

#if QUIRE_X86

// Whether this process may use the tile registers: the kernel saves them only for those who asked.
bool tiles_allowed() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  return (d & kBf16) && (d & kTile) && (d & kInt8) && tiles_allowed();
}

Isa detect() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (bf16 && has_tiles()) return Isa::kAmx;
  if (vnni) return bf16 ? Isa::kAvx512Bf16 : Isa::kAvx512Vnni;
  return avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kPlain;
}

#else

Isa detect() { return Isa::kPlain; }

#endif

}  // namespace

const char* isa_name(Isa isa) {
  constexpr const char* names[kNumIsas] = {"plain", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"};
  return names[static_cast<int>(isa)];
}

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

bool isa_supported(Isa isa) { return isa <= best_isa(); }

void run_ahead(const Threads& threads, int64_t n, const std::function<void(int64_t now, int64_t next)>& task) {
  const int64_t num_threads = std::min(threads.count, n);
  std::atomic<int64_t> unclaimed{num_threads};  // the first of each thread is its own
  threads.run(num_threads, [&](int64_t first) {
    for (int64_t now = first; now < n;) {
      const int64_t next = std::min(n, unclaimed.fetch_add(1));
      task(now, next);
      now = next;
    }
  });
}

}  // namespace quire
