// Blocks in the device's own memory, which the host cannot read, beside those in host memory. On
// the CPU device both are the same kind of memory, and the tests run all the same.

#ifndef TESTS_CONFORMANCE_PLACEMENT_H_
#define TESTS_CONFORMANCE_PLACEMENT_H_

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/ops/ops.h"
#include "tests/conformance/attend_fixture.h"
#include "tests/conformance/device_factory.h"

namespace sluice {

inline void CopyAndWait(Device& device, Stream& stream, std::byte* to, const std::byte* from,
                        int64_t bytes) {
  const ByteCopy copy = {to, from, bytes};
  device.ops().CopyBytes({&copy, 1}, stream);
  stream.Synchronize();
}

// A copy of some host memory in device memory.
class DeviceCopy {
 public:
  DeviceCopy(Device& device, Stream& stream, const std::byte* from, int64_t bytes) {
    absl::StatusOr<Buffer> buffer = device.Reserve(MemoryKind::kDevice, bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    buffer_ = *std::move(buffer);
    EXPECT_TRUE(device.Commit(buffer_, 0, bytes).ok());
    CopyAndWait(device, stream, buffer_.data(), from, bytes);
  }
  std::byte* data() const { return buffer_.data(); }

 private:
  Buffer buffer_;
};

// Where each block of a problem lies: in its own pool or in a copy of it in device memory.
// Whichever is not read holds NaN.
class PlacedBlocks {
 public:
  PlacedBlocks(AttendProblem& problem, Stream& stream)
      : problem_(problem),
        stream_(stream),
        values_(problem.pool.ToVector()),
        copy_(problem.device, stream, problem.pool.bytes(), problem.pool.count()) {
    for (const auto& table : problem.tables) tables_.push_back(table.ToVector());
  }
  ~PlacedBlocks() {
    Place([] { return false; });
  }

  // `in_device` is asked for each block.
  void Place(const std::function<bool()>& in_device) {
    std::byte* const pool = problem_.pool.bytes();
    // Values in what is read, NaN in the rest, laid out in host memory first.
    SharedArray<std::byte> device_values(problem_.device, problem_.pool.count());
    std::memset(pool, 0xff, values_.size());
    const int64_t block_bytes = BlockBytes();
    for (size_t i = 0; i < tables_.size(); ++i) {
      for (size_t j = 0; j < tables_[i].size(); ++j) {
        const bool place = in_device();
        const int64_t offset = tables_[i][j] - pool;
        problem_.tables[i][j] = place ? copy_.data() + offset : pool + offset;
        std::byte* const to = place ? device_values.bytes() : pool;
        for (const int64_t at : PartsOfABlock()) {
          std::memcpy(to + offset + at, values_.data() + offset + at, block_bytes);
        }
      }
    }
    CopyAndWait(problem_.device, stream_, copy_.data(), device_values.bytes(),
                device_values.count());
  }

 private:
  // K's and V's place from the block's address, and the bytes of each.
  std::vector<int64_t> PartsOfABlock() const { return {0, problem_.layout.v_offset_bytes}; }
  int64_t BlockBytes() const {
    return SlotBytes(problem_.shape.dtype, problem_.shape.num_kv_heads, problem_.shape.head_dim,
                     problem_.shape.block_tokens) /
           2;
  }

  AttendProblem& problem_;
  Stream& stream_;
  const std::vector<std::byte> values_;
  DeviceCopy copy_;
  std::vector<std::vector<const std::byte*>> tables_;
};

}  // namespace sluice

#endif  // TESTS_CONFORMANCE_PLACEMENT_H_
