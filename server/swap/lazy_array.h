// An array of zeros whose pages cost memory only once they are written.
//
// For tables that are sized for the worst case and mostly stay empty. T must be valid as all zero
// bytes. Threads: as an array.

#ifndef SERVER_SWAP_LAZY_ARRAY_H_
#define SERVER_SWAP_LAZY_ARRAY_H_

#include <sys/mman.h>

#include <cstdint>
#include <type_traits>
#include <utility>

namespace sluice {

template <typename T>
class LazyArray {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  LazyArray() = default;
  // `valid()` is false afterwards where the address space was not to be had.
  explicit LazyArray(int64_t count) : count_(count) {
    if (count == 0) return;
    void* data = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = data == MAP_FAILED ? nullptr : static_cast<T*>(data);
    // One element must not cost a huge page where the machine hands those out unasked.
    if (data_ != nullptr) (void)madvise(data_, count * sizeof(T), MADV_NOHUGEPAGE);
  }
  LazyArray(LazyArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  LazyArray& operator=(LazyArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~LazyArray() {
    if (data_ != nullptr) munmap(data_, count_ * sizeof(T));
  }

  bool valid() const { return data_ != nullptr || count_ == 0; }
  int64_t count() const { return count_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace sluice

#endif  // SERVER_SWAP_LAZY_ARRAY_H_
