// Objects that are used again instead of being made anew; the path of a step allocates nothing that
// way.
//
// Threads: safe.

#ifndef SERVER_RPC_FREE_LIST_H_
#define SERVER_RPC_FREE_LIST_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace sluice {

template <typename T>
class FreeList {
 public:
  // Keeps at most this many; more are made as they are needed and freed afterwards.
  explicit FreeList(size_t max_kept) : max_kept_(max_kept) { kept_.reserve(max_kept); }

  // Null: there is none.
  std::unique_ptr<T> Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.empty()) return nullptr;
    std::unique_ptr<T> object = std::move(kept_.back());
    kept_.pop_back();
    return object;
  }
  void Give(std::unique_ptr<T> object) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (kept_.size() < max_kept_) {
        kept_.push_back(std::move(object));
        return;
      }
    }
    object.reset();  // outside the lock
  }

 private:
  const size_t max_kept_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> kept_;
};

}  // namespace sluice

#endif  // SERVER_RPC_FREE_LIST_H_
