// A bound on bytes, shared by many takers.
//
// Threads: every method may be called from any thread.

#ifndef SERVER_STORE_BUDGET_H_
#define SERVER_STORE_BUDGET_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace sluice {

class Budget {
 public:
  explicit Budget(int64_t total_bytes) : total_bytes_(total_bytes) {}

  // Takes `bytes`, or nothing where they do not fit.
  [[nodiscard]] bool TryTake(int64_t bytes) {
    int64_t used = used_bytes_.load(std::memory_order_relaxed);
    do {
      if (bytes > total_bytes_ - used) return false;
    } while (!used_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    return true;
  }
  // Takes as many units of `unit_bytes` as fit, at most `count`; returns how many.
  [[nodiscard]] int64_t TakeUpTo(int64_t count, int64_t unit_bytes) {
    int64_t used = used_bytes_.load(std::memory_order_relaxed);
    int64_t fits = 0;
    do {
      fits = std::min(count, (total_bytes_ - used) / unit_bytes);
      if (fits <= 0) return 0;
    } while (!used_bytes_.compare_exchange_weak(used, used + fits * unit_bytes,
                                                std::memory_order_relaxed));
    return fits;
  }
  void Give(int64_t bytes) { used_bytes_.fetch_sub(bytes, std::memory_order_relaxed); }

  int64_t total_bytes() const { return total_bytes_; }
  int64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }

 private:
  const int64_t total_bytes_;
  std::atomic<int64_t> used_bytes_{0};
};

}  // namespace sluice

#endif  // SERVER_STORE_BUDGET_H_
