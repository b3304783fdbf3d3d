// How fast a loop over AMX tiles is, by how many of the eight tiles it uses.
//
//     g++ -O2 -std=c++17 -pthread bench/tiles.cc -o /tmp/tiles && /tmp/tiles
//
// Every way computes the same product, 512 rows of SmolLM2's activations by its weights, packed in panels of 16 columns, on
// two threads; they take turns. A step of one way: (rows of tiles) x (panels), and the tiles it keeps. With fewer tiles
// than operands one is loaded again. What is loaded "past" the first cache (TILELOADDT1) leaves it to the other operand. A
// core that is disturbed shows in the lower quantiles: there tiles are what counts.
#include <immintrin.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define AMX __attribute__((target("avx512f,amx-tile,amx-bf16")))

constexpr long kRows = 512, kRepeats = 60, kThreads = 2, kTile = 1024, kLine = 64;

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const Config config;

struct Product {
  long inner, columns;
  const char *x, *weights;

  long steps() const { return inner / 32; }
  long stride() const { return inner * 2; }
};

enum Way { k2x2Eight, k2x2Seven, k2x2Six, k2x2SixPast, k1x2Four, k1x2FourPast, kNumWays };
constexpr const char* kNames[] = {"2 x 2, eight tiles",       "2 x 2, seven", "2 x 2, six",
                                  "2 x 2, six, weights past", "1 x 2, four",  "1 x 2, four, x past"};
constexpr long kWayRows[] = {32, 32, 32, 32, 16, 16};

template <Way way>
constexpr bool kIsFour = way == k1x2Four || way == k1x2FourPast;

#define LOAD_WEIGHTS(tile, from) \
  if constexpr (way == k2x2SixPast) { \
    _tile_stream_loadd(tile, from, kLine); \
  } else { \
    _tile_loadd(tile, from, kLine); \
  }

template <Way way>
AMX void multiply(const Product& p, const char* x, const char* w, float* out) {
  const long stride = p.stride(), panel = p.steps() * kTile;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (!kIsFour<way>) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long k = 0; k < p.steps(); ++k, x += kLine, w += kTile) {
    const char* lower = x + 16 * stride;
    if constexpr (way == k2x2Eight) {
      _tile_loadd(4, x, stride);
      _tile_loadd(6, w, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, lower, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, w + panel, kLine);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    } else if constexpr (way == k2x2Seven) {
      _tile_loadd(4, x, stride);
      _tile_loadd(6, w, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, lower, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(6, w + panel, kLine);
      _tile_dpbf16ps(1, 4, 6);
      _tile_dpbf16ps(3, 5, 6);
    } else if constexpr (!kIsFour<way>) {
      LOAD_WEIGHTS(4, w);
      _tile_loadd(5, x, stride);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(5, lower, stride);
      _tile_dpbf16ps(2, 5, 4);
      LOAD_WEIGHTS(4, w + panel);
      _tile_dpbf16ps(3, 5, 4);
      _tile_loadd(5, x, stride);
      _tile_dpbf16ps(1, 5, 4);
    } else {
      if constexpr (way == k1x2FourPast) {
        _tile_stream_loadd(2, x, stride);
      } else {
        _tile_loadd(2, x, stride);
      }
      _tile_loadd(3, w, kLine);
      _tile_dpbf16ps(0, 2, 3);
      _tile_loadd(3, w + panel, kLine);
      _tile_dpbf16ps(1, 2, 3);
    }
  }
  _tile_stored(0, out, 2 * kLine);
  _tile_stored(1, out + 16, 2 * kLine);
  if constexpr (!kIsFour<way>) {
    _tile_stored(2, out + 512, 2 * kLine);
    _tile_stored(3, out + 528, 2 * kLine);
  }
}

// GFLOP/s of one thread on its share of the panels.
template <Way way>
AMX double run(const Product& p, long thread) {
  alignas(64) static thread_local float out[1024];
  _tile_loadconfig(&config);
  const long pairs = p.columns / 32, first = thread * pairs / kThreads, last = (thread + 1) * pairs / kThreads;
  const auto start = std::chrono::steady_clock::now();
  for (long pair = first; pair < last; ++pair)
    for (long row = 0; row < kRows; row += kWayRows[way])
      multiply<way>(p, p.x + row * p.stride(), p.weights + pair * 2 * p.steps() * kTile, out);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  _tile_release();
  return 2.0 * kRows * p.inner * (last - first) * 32 / seconds * 1e-9;
}

void wait_for_all() {
  static std::atomic<long> arrived{0}, turn{0};
  const long now = turn;
  if (++arrived == kThreads) {
    arrived = 0;
    ++turn;
  } else {
    while (turn == now) _mm_pause();
  }
}

void measure(long inner, long columns) {
  const long x_bytes = kRows * inner * 2, weight_bytes = inner * columns * 2;
  char *x = static_cast<char*>(aligned_alloc(4096, x_bytes)), *weights = static_cast<char*>(aligned_alloc(4096, weight_bytes));
  memset(x, 0, x_bytes);
  memset(weights, 0, weight_bytes);
  const Product p{inner, columns, x, weights};
  std::vector<double> rates[kNumWays];
  const auto work = [&](long thread) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(thread, &cpus);
    pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
    constexpr double (*kRuns[])(const Product&, long) = {run<k2x2Eight>, run<k2x2Seven>, run<k2x2Six>, run<k2x2SixPast>,
                                                          run<k1x2Four>, run<k1x2FourPast>};
    for (long repeat = 0; repeat < kRepeats; ++repeat)
      for (int way = 0; way < kNumWays; ++way) {
        wait_for_all();
        const double rate = kRuns[way](p, thread);
        if (thread == 0) rates[way].push_back(rate);
      }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  printf("inner %ld, columns %ld: GFLOP/s of a thread at the 10th, 50th and 90th percentile\n", inner, columns);
  for (int way = 0; way < kNumWays; ++way) {
    auto& r = rates[way];
    std::sort(r.begin(), r.end());
    printf("  %-26s %5.0f %5.0f %5.0f\n", kNames[way], r[kRepeats / 10], r[kRepeats / 2], r[kRepeats * 9 / 10]);
  }
  free(x);
  free(weights);
}

int main() {
  if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tiles */) != 0) {
    puts("this machine has no AMX");
    return 1;
  }
  measure(576, 3072);
  measure(1536, 576);
  measure(576, 960);
}
