// What the conformance suites run against. A test program links the suites (device_conformance,
// attend_conformance, ...) with one file that defines DeviceFactories().

#ifndef TESTS_CONFORMANCE_DEVICE_FACTORY_H_
#define TESTS_CONFORMANCE_DEVICE_FACTORY_H_

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/device.h"

namespace sluice {

struct DeviceFactory {
  std::string name;  // letters, digits and underscores
  // `num_workers` is a wish; 0: the device's own choice. At most one device of a factory is alive
  // at a time.
  std::function<std::unique_ptr<Device>(int num_workers)> create;
  // False: a smaller matrix, for a variant of a device that has been through the whole one.
  bool thorough = true;
  // How near to float64 F32 outputs must be, where the promise (1e-3 or 2 BF16 ulp) is weaker.
  double f32_tolerance = std::numeric_limits<double>::infinity();
};
inline std::ostream& operator<<(std::ostream& out, const DeviceFactory& factory) {
  return out << factory.name;
}

std::vector<DeviceFactory> DeviceFactories();

inline std::string FactoryName(const testing::TestParamInfo<DeviceFactory>& info) {
  return info.param.name;
}

// An array that both the test and the device can address. Filled with 0xff bytes, which is NaN in
// every floating-point format and an absurd number elsewhere: what the device should have written
// and has not, shows.
template <class T>
class SharedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  SharedArray() = default;
  SharedArray(Device& device, int64_t count) : count_(count) {
    const int64_t bytes = std::max<int64_t>(count, 1) * static_cast<int64_t>(sizeof(T));
    absl::StatusOr<Buffer> buffer = device.Reserve(MemoryKind::kHost, bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    buffer_ = *std::move(buffer);
    EXPECT_TRUE(device.Commit(buffer_, 0, bytes).ok());
    std::memset(static_cast<void*>(buffer_.data()), 0xff, bytes);
  }
  SharedArray(Device& device, const std::vector<T>& values)
      : SharedArray(device, static_cast<int64_t>(values.size())) {
    std::copy(values.begin(), values.end(), data());
  }

  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  std::byte* bytes() const { return buffer_.data(); }
  int64_t count() const { return count_; }
  T& operator[](int64_t i) const { return data()[i]; }
  std::vector<T> ToVector() const { return std::vector<T>(data(), data() + count_); }

 private:
  Buffer buffer_;
  int64_t count_ = 0;
};

}  // namespace sluice

#endif  // TESTS_CONFORMANCE_DEVICE_FACTORY_H_
