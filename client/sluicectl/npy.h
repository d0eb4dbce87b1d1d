// Arrays in NumPy's .npy files, read and written a part at a time, so that a file may be larger
// than memory.
//
// Element types and how NumPy writes them down ("descr"):
//   BF16  '<V2' or '|V2' (ml_dtypes.bfloat16, as np.save stores it), 'bfloat16', or '<u2' (uint16:
//   the raw bits) FP16  '<f2' F32   '<f4'
// Arrays must be little-endian and in C order. np.load gives a '<V2' array back as void of two
// bytes: np.load(path).view(ml_dtypes.bfloat16) makes numbers of it.
//
// Threads: one at a time per object. Ownership: each object owns its open file.

#ifndef CLIENT_SLUICECTL_NPY_H_
#define CLIENT_SLUICECTL_NPY_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "sluice/v1/tensor.pb.h"

namespace sluice::ctl {

struct NpyHeader {
  v1::Dtype dtype = v1::DTYPE_UNSPECIFIED;
  std::vector<int64_t> shape;

  int64_t num_elements() const;
};

// The dictionary of a header: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }. Any
// order of keys.
[[nodiscard]] absl::StatusOr<NpyHeader> ParseNpyDictionary(absl::string_view text);
// What stands before the elements: magic, version, length, dictionary, padded to a multiple of 64
// bytes. `raw_bits`: BF16 as '<u2'.
std::string MakeNpyHeader(const NpyHeader& header, bool raw_bits);

using NpyStream = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

class NpyReader {
 public:
  // Errors name the path, what was found and what is allowed.
  [[nodiscard]] static absl::StatusOr<NpyReader> Open(const std::string& path);

  const NpyHeader& header() const { return header_; }
  // The next bits.size() elements as `dtype`, BF16 or FP16: as they are, or rounded from F32. A
  // file of the other 16-bit type is refused, since rounding between the two is rarely meant.
  [[nodiscard]] absl::Status Read(v1::Dtype dtype, absl::Span<uint16_t> bits);

 private:
  NpyReader(std::string path, NpyStream stream, NpyHeader header);

  std::string path_;
  NpyStream stream_;
  NpyHeader header_;
  std::vector<float> floats_;
};

class NpyWriter {
 public:
  // Writes PATH.part until Close, so that no half of an array is ever found at PATH.
  [[nodiscard]] static absl::StatusOr<NpyWriter> Create(const std::string& path,
                                                        const NpyHeader& header, bool raw_bits);
  NpyWriter(NpyWriter&&) = default;
  NpyWriter& operator=(NpyWriter&&) = default;
  // Removes PATH.part if Close was not called.
  ~NpyWriter();

  // `bits` are of the header's dtype, or converted where that is F32.
  [[nodiscard]] absl::Status Append(v1::Dtype dtype, absl::Span<const uint16_t> bits);
  // FAILED_PRECONDITION where elements are missing.
  [[nodiscard]] absl::Status Close();

 private:
  NpyWriter(std::string path, NpyStream stream, NpyHeader header);

  std::string path_;
  NpyStream stream_;
  NpyHeader header_;
  int64_t num_written_ = 0;
};

}  // namespace sluice::ctl

#endif  // CLIENT_SLUICECTL_NPY_H_
