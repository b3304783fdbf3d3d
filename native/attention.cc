// The walk: which tasks there are, what each reads, how parts of one context are put together. The arithmetic is that of
// attention_tile.h.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "attention_parts.h"
#include "attention_tile.h"
#include "bf16.h"

namespace quire {
namespace {

constexpr int64_t kTileRows = 64;  // rows of a tile, unless one query has more heads
constexpr int64_t kFirstPart =
    2;  // chunks of the first parts of a context; a shorter one is not worth a task of its own
constexpr int64_t kPartsBefore =
    8;  // later parts are longer: as many as this come before the first of twice the length
constexpr float kLog2E = 1.44269504088896340736f;

// ---- columns --------------------------------------------------------------------------------------------------------

// Positions of a context and the columns they are computed in. A page is one piece, or several when it is larger than a
// chunk; a piece starts at an even column so that its positions pair up as they do in the page:
//
//   Z = 5   positions  0 1 2 3 4   5 6 7 8 9   10
//           columns    0 1 2 3 4 . 6 7 8 9 10 . 12      a dot is a column without a position
struct Columns {
  int64_t page_size, width, padded, per_page;

  explicit Columns(int64_t page_size)
      : page_size(page_size),
        width(std::min(page_size, kChunk)),
        padded(round_up(width, 2)),
        per_page(ceil_div(page_size, width)) {}

  int64_t piece(int64_t position) const { return position / page_size * per_page + position % page_size / width; }
  int64_t column(int64_t position) const { return piece(position) * padded + position % page_size % width; }
  int64_t pieces_per_chunk() const { return kChunk / padded; }

  // The piece with which the next part of a context begins. Pieces count from the beginning of the sequence.
  int64_t next_part(int64_t piece, bool has_window) const {
    int64_t length = kFirstPart * pieces_per_chunk();
    while (!has_window && length * kPartsBefore <= piece) length *= 2;
    return (piece / length + 1) * length;
  }
};

// ---- tasks ----------------------------------------------------------------------------------------------------------

// A tile and those parts of its context that it visits here. Pieces and positions count from the first page of the row's
// table; pieces before it, where a chunk begins, have no positions.
struct Task {
  int64_t row, kv_head;
  int64_t first_token, num_queries;
  int64_t first_position;  // of the first query
  int64_t pieces_before;   // of the sequence, before the table
  int64_t begin_piece, end_piece;
  int64_t part = 0;     // the first of them
  int64_t split = -1;   // which split context this is of
  bool writes = false;  // the tile is the whole row: it writes the row's K and V itself
};

// A context visited by several tasks: what each part of it comes to, and how many tasks are still under way.
struct Split {
  int64_t num_parts;
  std::vector<float> left;  // of each part [X, H], [X] and [X]: out, top, total
  std::atomic<int64_t> waiting;

  Split(int64_t num_parts, int64_t num_tasks, int64_t num_rows, int64_t head_dim)
      : num_parts(num_parts), left(num_parts * num_rows * (head_dim + 2)), waiting(num_tasks) {}
};

template <class T>
class Step {
 public:
  Step(const Attention& a, Isa isa, const Threads& threads)
      : a_(a),
        columns_(a.page_size),
        functions_(tile_functions(isa, a.element)),
        parts_(part_functions(isa, a.element)),
        threads_(threads) {
    group_ = a.num_heads / a.num_kv_heads;
    max_rows_ = std::max(kTileRows / group_, int64_t{1}) * group_;
  }

  void run() {
    plan();
    const bool alone = threads_.count < 2 || is_small();
    if (!to_write_.empty()) {
      for_each(alone, static_cast<int64_t>(to_write_.size()), [&](int64_t i) {
        for (int64_t t = to_write_[i].first; t < to_write_[i].second; ++t)
          for (int64_t head = 0; head < a_.num_kv_heads; ++head) write(t, head);
      });
    }
    const Threads self{1, [](int64_t n, const std::function<void(int64_t)>& task) {
                         for (int64_t i = 0; i < n; ++i) task(i);
                       }};
    // The KV heads of a page are neighbours in memory: one thread visits them one after the other if it has enough to do.
    const auto num_tasks = static_cast<int64_t>(tasks_.size());
    const int64_t at_once = std::clamp<int64_t>(num_tasks / (4 * threads_.count), 1, a_.num_kv_heads);
    run_ahead(alone ? self : threads_, ceil_div(num_tasks, at_once), [&](int64_t now, int64_t next) {
      const int64_t end = std::min((now + 1) * at_once, num_tasks);
      for (int64_t i = now * at_once; i < end; ++i) {
        const int64_t following = i + 1 < end ? i + 1 : next * at_once;
        attend(tasks_[i], following < num_tasks ? &tasks_[following] : nullptr);
      }
    });
  }

 private:
  static constexpr int64_t pair = kPair<T>;

  template <class F>
  void for_each(bool alone, int64_t n, const F& task) {
    if (alone || n < 2) {
      for (int64_t i = 0; i < n; ++i) task(i);
    } else {
      threads_.run(n, task);
    }
  }

  // Rows become tiles; whoever is in no row is zeroed. Rows never overlap, whatever cu_q_lens says.
  void plan() {
    int64_t covered = 0;
    for (int64_t row = 0; row < a_.num_rows; ++row) {
      const int64_t begin = std::clamp<int64_t>(a_.cu_q_lens_B1[row], covered, a_.num_tokens);
      const int64_t end = std::clamp<int64_t>(a_.cu_q_lens_B1[row + 1], begin, a_.num_tokens);
      leave_out(covered, begin);
      if (begin < end) plan_row(row, begin, end);
      covered = end;
    }
    leave_out(covered, a_.num_tokens);
    split_long_contexts();
  }

  void plan_row(int64_t row, int64_t begin, int64_t end) {
    const int64_t kv_len = std::clamp<int64_t>(a_.kv_lens_B[row], 0, a_.pages_per_row * a_.page_size);
    const int64_t per_tile = max_rows_ / group_;
    const bool whole = end - begin <= per_tile;
    if (!whole) add_writes(begin, end);
    const int64_t pages_before = std::max<int64_t>(a_.positions_T[begin] - (kv_len - (end - begin)), 0) / a_.page_size;
    for (int64_t token = begin; token < end; token += per_tile) {
      Task task{};
      task.row = row;
      task.first_token = token;
      task.num_queries = std::min(per_tile, end - token);
      task.first_position = kv_len - (end - token);
      task.pieces_before = pages_before * columns_.per_page;
      task.writes = whole;
      const int64_t last = task.first_position + task.num_queries - 1;
      if (last >= 0) {
        const int64_t first = columns_.piece(first_seen(std::max<int64_t>(task.first_position, 0)));
        task.begin_piece = first - (first + task.pieces_before) % columns_.pieces_per_chunk();
        task.end_piece = columns_.piece(last) + 1;
      }
      for (task.kv_head = 0; task.kv_head < a_.num_kv_heads; ++task.kv_head) tasks_.push_back(task);
    }
  }

  void leave_out(int64_t begin, int64_t end) {
    if (begin == end) return;
    const int64_t width = a_.num_heads * a_.head_dim;
    std::memset(static_cast<T*>(a_.out_TNH) + begin * width, 0, (end - begin) * width * sizeof(T));
    add_writes(begin, end);
  }

  void add_writes(int64_t begin, int64_t end) {
    constexpr int64_t few = 32;
    for (; begin < end; begin += few) to_write_.emplace_back(begin, std::min(begin + few, end));
  }

  int64_t first_seen(int64_t position) const { return a_.window ? std::max<int64_t>(position - a_.window + 1, 0) : 0; }

  // In columns times rows; the constant stands for reading K and V, which all rows share.
  int64_t cost(const Task& task) const {
    return (task.end_piece - task.begin_piece) * columns_.padded * (16 + task.num_queries * group_);
  }

  bool is_small() const {
    constexpr int64_t bytes_worth_a_thread = 128 << 10;
    int64_t num_pieces = 0;
    for (const Task& task : tasks_) num_pieces += task.end_piece - task.begin_piece;
    return num_pieces * columns_.padded * a_.head_dim * 2 * static_cast<int64_t>(sizeof(T)) < bytes_worth_a_thread;
  }

  // The end of the part that a piece of a task's context is in.
  int64_t end_of_part(const Task& task, int64_t piece) const {
    const int64_t next = columns_.next_part(piece + task.pieces_before, a_.window > 0) - task.pieces_before;
    return std::min(next, task.end_piece);
  }

  // So that no task is more than a fraction of what a thread has to do, as far as there are parts. What comes out does
  // not depend on it.
  void split_long_contexts() {
    if (threads_.count < 2 || is_small()) return;
    int64_t total = 0;
    for (const Task& task : tasks_) total += cost(task);
    const int64_t share = ceil_div(total, 4 * threads_.count);
    std::vector<Task> tasks;
    tasks.reserve(tasks_.size());
    std::vector<int64_t> begins;                                   // of the parts of a context, and its end
    for (size_t i = 0; i < tasks_.size(); i += a_.num_kv_heads) {  // the KV heads of one tile
      const Task& whole = tasks_[i];
      const int64_t wanted = ceil_div(cost(whole), share);
      begins.assign(1, whole.begin_piece);
      while (wanted > 1 && begins.back() < whole.end_piece) begins.push_back(end_of_part(whole, begins.back()));
      const int64_t num_parts = static_cast<int64_t>(begins.size()) - 1, num_tasks = std::min(wanted, num_parts);
      if (num_tasks < 2) {
        tasks.insert(tasks.end(), &tasks_[i], &tasks_[i] + a_.num_kv_heads);
        continue;
      }
      if (whole.writes) add_writes(whole.first_token, whole.first_token + whole.num_queries);
      const auto first_split = static_cast<int64_t>(splits_.size());
      for (int64_t head = 0; head < a_.num_kv_heads; ++head)
        splits_.push_back(std::make_unique<Split>(num_parts, num_tasks, whole.num_queries * group_, a_.head_dim));
      for (int64_t n = 0; n < num_tasks; ++n) {
        for (int64_t head = 0; head < a_.num_kv_heads; ++head) {
          Task task = tasks_[i + head];
          task.split = first_split + head;
          task.part = num_parts * n / num_tasks;
          task.writes = false;
          task.begin_piece = begins[task.part];
          task.end_piece = begins[num_parts * (n + 1) / num_tasks];
          tasks.push_back(task);
        }
      }
    }
    tasks_ = std::move(tasks);
  }

  void write(int64_t token, int64_t kv_head) const {
    const int64_t destination = a_.destinations_T[token];
    if (destination < 0 || destination >= a_.num_pages * a_.page_size) return;
    const int64_t offset = destination % a_.page_size, head_dim = a_.head_dim;
    const int64_t page = destination / a_.page_size;
    const int64_t from = (token * a_.num_kv_heads + kv_head) * head_dim;
    const T* k = static_cast<const T*>(a_.k_TKH) + from;
    const T* v = static_cast<const T*>(a_.v_TKH) + from;
    T* k_page = static_cast<T*>(a_.k_pages) + k_start(page, kv_head) + offset * pair;
    T* v_page = static_cast<T*>(a_.v_pages) + v_start(page, kv_head) + offset / pair * head_dim * pair + offset % pair;
    for (int64_t h = 0; h < head_dim; h += pair) std::memcpy(k_page + h * a_.page_size, k + h, pair * sizeof(T));
    for (int64_t h = 0; h < head_dim; ++h) v_page[h * pair] = v[h];
  }

  int64_t k_start(int64_t page, int64_t kv_head) const {
    return (page * a_.num_kv_heads + kv_head) * a_.head_dim * a_.page_size;
  }
  int64_t v_start(int64_t page, int64_t kv_head) const {
    return (page * a_.num_kv_heads + kv_head) * a_.head_dim * round_up(a_.page_size, pair);
  }

  // `following` is what this thread does next.
  void attend(const Task& task, const Task* following) {
    if (task.writes)
      for (int64_t i = 0; i < task.num_queries; ++i) write(task.first_token + i, task.kv_head);
    Scratch s = scratch(task);
    load_queries(task, s);
    functions_.start(s);
    const int64_t seen_begin = *std::min_element(s.begin, s.begin + s.num_rows);
    const int64_t seen_end = *std::max_element(s.end, s.end + s.num_rows);
    const int64_t per_chunk = columns_.pieces_per_chunk();
    Piece both[2][kChunk];
    Piece *pieces = both[0], *next = both[1];
    const auto look_up = [&](const Task& from, int64_t first, Piece* to) {
      const int64_t count = std::clamp<int64_t>(from.end_piece - first, 0, per_chunk);
      for (int64_t i = 0; i < count; ++i) to[i] = piece(from, first + i, seen_begin, seen_end);
      return count;
    };
    int64_t num_pieces = look_up(task, task.begin_piece, pieces), part = task.part;
    forget(s);
    for (int64_t begin = task.begin_piece, end; begin < task.end_piece; begin = end, ++part) {
      end = end_of_part(task, begin);
      for (int64_t first = begin; first < end; first += per_chunk) {
        functions_.score(s, pieces, num_pieces);
        if (a_.soft_cap > 0) cap(s, first * columns_.padded, num_pieces * columns_.padded);
        functions_.soften(s, first * columns_.padded, num_pieces * columns_.padded);
        int64_t num_next = look_up(task, first + per_chunk, next);
        if (num_next == 0 && following) num_next = look_up(*following, following->begin_piece, next);
        functions_.accumulate(s, pieces, num_pieces, next, num_next);
        std::swap(pieces, next);
        num_pieces = num_next;
      }
      if (task.split >= 0) {
        leave(task, part, s);
      } else if (begin == task.begin_piece) {
        if (end == task.end_piece) break;  // the only one
        std::swap(s.out, s.sum_out);
        std::swap(s.top, s.sum_top);
        std::swap(s.total, s.sum_total);
      } else {
        parts_.add(sum(s), found(s), s.num_rows, a_.head_dim);
      }
      forget(s);
    }
    functions_.finish(s);
    if (task.split >= 0) {
      end_task(task, s);
    } else {
      const bool is_one_part = end_of_part(task, task.begin_piece) == task.end_piece;
      store(task, s.num_rows, is_one_part ? found(s) : sum(s));
    }
  }

  Found found(const Scratch& s) const { return {s.out, s.top, s.total}; }
  Found sum(const Scratch& s) const { return {s.sum_out, s.sum_top, s.sum_total}; }

  void forget(const Scratch& s) const {
    std::fill_n(s.out, s.num_rows * a_.head_dim, 0.0f);
    std::fill_n(s.top, s.num_rows, kNothing);
    std::fill_n(s.total, s.num_rows, 0.0f);
  }

  // Bounds the scores that are seen, which are not yet scaled. A column without a position stays kNothing.
  void cap(Scratch& s, int64_t column, int64_t num_columns) const {
    const float to_unit = a_.scale / a_.soft_cap, from_unit = a_.soft_cap / a_.scale;
    for (int64_t x = 0; x < s.num_rows; ++x) {
      float* scores = s.scores + x * kScoreStride;
      const int64_t begin = std::clamp<int64_t>(s.begin[x] - column, 0, num_columns);
      const int64_t end = std::clamp<int64_t>(s.end[x] - column, begin, num_columns);
      for (int64_t c = begin; c < end; ++c)
        if (scores[c] != kNothing) scores[c] = std::tanh(scores[c] * to_unit) * from_unit;
    }
  }

  Piece piece(const Task& task, int64_t index, int64_t seen_begin, int64_t seen_end) const {
    if (index < 0) return {nullptr, nullptr, 0, 0, 0};
    const int64_t in_row = index / columns_.per_page;
    const int64_t offset = index % columns_.per_page * columns_.width;
    const int64_t page = a_.page_table_BP[task.row * a_.pages_per_row + in_row];
    if (page < 0 || page >= a_.num_pages) return {nullptr, nullptr, 0, 0, 0};
    Piece piece;
    piece.k = static_cast<const T*>(a_.k_pages) + k_start(page, task.kv_head) + offset * pair;
    piece.v = static_cast<const T*>(a_.v_pages) + v_start(page, task.kv_head) + offset * a_.head_dim;
    piece.count = std::min(columns_.width, a_.page_size - offset);
    const int64_t column = index * columns_.padded;
    piece.seen_begin = std::clamp<int64_t>(seen_begin - column, 0, piece.count);
    piece.seen_end = std::clamp<int64_t>(seen_end - column, piece.seen_begin, piece.count);
    if (piece.seen_begin == piece.seen_end) piece.seen_begin = piece.seen_end = 0;
    return piece;
  }

  // Carved out of one allocation that the thread keeps.
  Scratch scratch(const Task& task) {
    const int64_t rows = round_up(max_rows_, 16), head_dim = round_up(a_.head_dim, 16);
    const int64_t floats = rows * (3 * head_dim + kScoreStride + 5) + kChunk * head_dim;
    const int64_t bytes = floats * 4 + rows * (kScoreStride * 2 + 16) + 16 * kLine;
    static thread_local std::vector<char> memory;
    if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(bytes);
    char* at = memory.data();
    auto take = [&](int64_t size) {
      at += -reinterpret_cast<intptr_t>(at) & (kLine - 1);
      return std::exchange(at, at + size);
    };
    Scratch s;
    s.num_rows = task.num_queries * group_;
    s.head_dim = a_.head_dim;
    s.page_size = a_.page_size;
    s.padded = columns_.padded;
    s.scale_log2e = a_.scale * kLog2E;
    s.q = take(rows * head_dim * 4);
    s.out = reinterpret_cast<float*>(take(rows * head_dim * 4));
    s.scores = reinterpret_cast<float*>(take(rows * kScoreStride * 4));
    s.weights = reinterpret_cast<Bf16*>(take(rows * kScoreStride * 2));
    s.values = take(kChunk * head_dim * 2);
    s.top = reinterpret_cast<float*>(take(rows * 4));
    s.total = reinterpret_cast<float*>(take(rows * 4));
    s.shrink = reinterpret_cast<float*>(take(rows * 4));
    s.sum_out = reinterpret_cast<float*>(take(rows * head_dim * 4));
    s.sum_top = reinterpret_cast<float*>(take(rows * 4));
    s.sum_total = reinterpret_cast<float*>(take(rows * 4));
    s.begin = reinterpret_cast<int64_t*>(take(rows * 8));
    s.end = reinterpret_cast<int64_t*>(take(rows * 8));
    return s;
  }

  void load_queries(const Task& task, Scratch& s) const {
    const int64_t head_dim = a_.head_dim;
    auto* q = static_cast<char*>(const_cast<void*>(s.q));
    for (int64_t x = 0; x < s.num_rows; ++x) {
      const int64_t token = task.first_token + x / group_, head = task.kv_head * group_ + x % group_;
      const T* from = static_cast<const T*>(a_.q_TNH) + (token * a_.num_heads + head) * head_dim;
      if (functions_.float_queries) {
        float* to = reinterpret_cast<float*>(q) + x * head_dim;
        for (int64_t h = 0; h < head_dim; ++h) to[h] = to_float(from[h]);
      } else {
        std::memcpy(q + x * head_dim * sizeof(T), from, head_dim * sizeof(T));
      }
    }
    for (int64_t i = 0; i < task.num_queries; ++i) {
      const int64_t position = task.first_position + i;
      const int64_t begin = position < 0 ? 0 : columns_.column(first_seen(position));
      const int64_t end = position < 0 ? 0 : columns_.column(position) + 1;
      std::fill_n(s.begin + i * group_, group_, begin);
      std::fill_n(s.end + i * group_, group_, end);
    }
  }

  void store(const Task& task, int64_t num_rows, const Found& rows) const {
    for (int64_t x = 0; x < num_rows; ++x) {
      const int64_t token = task.first_token + x / group_, head = task.kv_head * group_ + x % group_;
      float total = rows.total[x];
      if (a_.sinks_N && total > 0) total += std::exp2(a_.sinks_N[head] * kLog2E - rows.top[x]);
      const float factor = total == 0 ? 0 : 1 / total;  // a query that sees nothing
      T* to = static_cast<T*>(a_.out_TNH) + (token * a_.num_heads + head) * a_.head_dim;
      parts_.store(to, rows.out + x * a_.head_dim, factor, a_.head_dim);
    }
  }

  Found left(Split& split, int64_t part, int64_t num_rows) const {
    float* out = split.left.data() + part * num_rows * (a_.head_dim + 2);
    float* top = out + num_rows * a_.head_dim;
    return {out, top, top + num_rows};
  }

  void leave(const Task& task, int64_t part, const Scratch& s) {
    const Found from = found(s), to = left(*splits_[task.split], part, s.num_rows);
    std::copy_n(from.out, s.num_rows * a_.head_dim, to.out);
    std::copy_n(from.top, s.num_rows, to.top);
    std::copy_n(from.total, s.num_rows, to.total);
  }

  // The last task of a context to come puts its parts together.
  void end_task(const Task& task, const Scratch& s) {
    Split& split = *splits_[task.split];
    if (split.waiting.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const Found all = left(split, 0, s.num_rows);
    for (int64_t part = 1; part < split.num_parts; ++part)
      parts_.add(all, left(split, part, s.num_rows), s.num_rows, a_.head_dim);
    store(task, s.num_rows, all);
  }

  const Attention& a_;
  const Columns columns_;
  const TileFunctions functions_;
  const PartFunctions parts_;
  const Threads& threads_;
  int64_t group_, max_rows_;
  std::vector<Task> tasks_;
  std::vector<std::unique_ptr<Split>> splits_;
  std::vector<std::pair<int64_t, int64_t>> to_write_;  // tokens, before anybody attends
};

}  // namespace

void write_and_attend(const Attention& a, Isa isa, const Threads& threads) {
  if (a.element == Element::kFloat32) {
    Step<float>(a, isa, threads).run();
  } else {
    Step<Bf16>(a, isa, threads).run();
  }
}

}  // namespace quire
