#include "client/sluicectl/npy.h"

#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/sluicectl/args.h"
#include "client/tensor.h"

namespace sluice::ctl {
namespace {

constexpr absl::string_view kMagic = "\x93NUMPY";
constexpr size_t kAlignmentBytes = 64;
// NumPy itself takes no more from a file that is not trusted.
constexpr uint32_t kMaxHeaderBytes = 10000;
constexpr absl::string_view kAllowedDescr =
    "'<V2', 'bfloat16' or '<u2' (bfloat16), '<f2' (float16), '<f4' (float32)";

v1::Dtype DtypeOfDescr(absl::string_view descr) {
  for (absl::string_view bf16 : {"<V2", "|V2", "V2", "bfloat16", "<bfloat16", "<u2"}) {
    if (descr == bf16) return v1::DTYPE_BF16;
  }
  if (descr == "<f2") return v1::DTYPE_FP16;
  if (descr == "<f4") return v1::DTYPE_F32;
  return v1::DTYPE_UNSPECIFIED;
}

absl::string_view DescrOf(v1::Dtype dtype, bool raw_bits) {
  if (dtype == v1::DTYPE_F32) return "<f4";
  if (dtype == v1::DTYPE_FP16) return "<f2";
  return raw_bits ? "<u2" : "<V2";
}

absl::string_view NameOf(v1::Dtype dtype) {
  if (dtype == v1::DTYPE_F32) return "float32";
  return dtype == v1::DTYPE_FP16 ? "float16" : "bfloat16";
}

// Reads a Python literal from the front of a text.
class Cursor {
 public:
  explicit Cursor(absl::string_view text) : text_(text) {}

  bool Take(absl::string_view token) {
    text_ = absl::StripLeadingAsciiWhitespace(text_);
    return absl::ConsumePrefix(&text_, token);
  }
  bool TakeString(std::string* value) {
    const absl::string_view quote = Take("'") ? "'" : Take("\"") ? "\"" : "";
    if (quote.empty()) return false;
    const size_t end = text_.find(quote);
    if (end == absl::string_view::npos) return false;
    *value = std::string(text_.substr(0, end));
    text_.remove_prefix(end + 1);
    return true;
  }
  bool TakeBool(bool* value) {
    *value = Take("True");
    return *value || Take("False");
  }
  // (3, 4), (3,) or ().
  bool TakeTuple(std::vector<int64_t>* values) {
    values->clear();
    if (!Take("(")) return false;
    while (!Take(")")) {
      int64_t value = 0;
      if (!TakeInt(&value)) return false;
      values->push_back(value);
      if (Take(",")) continue;
      return Take(")");
    }
    return true;
  }

 private:
  bool TakeInt(int64_t* value) {
    text_ = absl::StripLeadingAsciiWhitespace(text_);
    size_t length = 0;
    while (length < text_.size() && absl::ascii_isdigit(text_[length])) ++length;
    if (!absl::SimpleAtoi(text_.substr(0, length), value)) return false;
    text_.remove_prefix(length);
    return true;
  }

  absl::string_view text_;
};

absl::Status FileError(absl::string_view path, absl::string_view what) {
  return UsageError(absl::StrCat(path, ": ", what));
}

absl::Status SystemError(absl::string_view path, absl::string_view doing) {
  return UsageError(absl::StrCat(path, ": ", doing, ": ", std::strerror(errno)));
}

std::string PartPath(const std::string& path) { return path + ".part"; }

}  // namespace

int64_t NpyHeader::num_elements() const {
  int64_t product = 1;
  for (int64_t extent : shape) product *= extent;
  return product;
}

absl::StatusOr<NpyHeader> ParseNpyDictionary(absl::string_view text) {
  const absl::Status malformed = UsageError("the .npy header is malformed");
  NpyHeader header;
  Cursor cursor(text);
  bool has_descr = false;
  bool has_order = false;
  bool has_shape = false;
  if (!cursor.Take("{")) return malformed;
  while (!cursor.Take("}")) {
    std::string key;
    if (!cursor.TakeString(&key) || !cursor.Take(":")) return malformed;
    if (key == "descr") {
      std::string descr;
      if (cursor.Take("[")) {
        return UsageError(
            absl::StrCat("the array has fields in its elements; allowed: ", kAllowedDescr));
      }
      if (!cursor.TakeString(&descr)) return malformed;
      header.dtype = DtypeOfDescr(descr);
      if (header.dtype == v1::DTYPE_UNSPECIFIED) {
        return UsageError(absl::StrCat("elements are '", descr, "'; allowed: ", kAllowedDescr));
      }
      has_descr = true;
    } else if (key == "fortran_order") {
      bool fortran_order = false;
      if (!cursor.TakeBool(&fortran_order)) return malformed;
      if (fortran_order) {
        return UsageError("the array is in Fortran order; save np.ascontiguousarray of it");
      }
      has_order = true;
    } else if (key == "shape") {
      if (!cursor.TakeTuple(&header.shape)) return malformed;
      has_shape = true;
    } else {
      return malformed;
    }
    if (!cursor.Take(",") && !cursor.Take("}")) return malformed;
    if (has_descr && has_order && has_shape) break;
  }
  if (!has_descr || !has_order || !has_shape) return malformed;
  int64_t product = 1;
  for (int64_t extent : header.shape) {
    if (extent > 0 && product > std::numeric_limits<int64_t>::max() / 8 / extent) return malformed;
    product *= extent;
  }
  return header;
}

std::string MakeNpyHeader(const NpyHeader& header, bool raw_bits) {
  const std::string comma = header.shape.size() == 1 ? "," : "";
  std::string dictionary = absl::StrCat("{'descr': '", DescrOf(header.dtype, raw_bits),
                                        "', 'fortran_order': False, 'shape': (",
                                        absl::StrJoin(header.shape, ", "), comma, "), }");
  // Magic, two bytes of version, two of length; the dictionary ends with a line end.
  const size_t unpadded = kMagic.size() + 4 + dictionary.size() + 1;
  const size_t padding = (kAlignmentBytes - unpadded % kAlignmentBytes) % kAlignmentBytes;
  dictionary.append(padding, ' ').append("\n");
  std::string text(kMagic);
  text.append({'\x01', '\x00', static_cast<char>(dictionary.size() & 0xff),
               static_cast<char>(dictionary.size() >> 8)});
  return text + dictionary;
}

absl::StatusOr<NpyReader> NpyReader::Open(const std::string& path) {
  NpyStream stream(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (stream == nullptr) return SystemError(path, "cannot be opened");
  const absl::Status not_npy = FileError(path, "is not a .npy file");
  unsigned char start[12];
  if (std::fread(start, 1, 10, stream.get()) != 10) return not_npy;
  if (std::memcmp(start, kMagic.data(), kMagic.size()) != 0) return not_npy;
  const int major_version = start[6];
  uint32_t header_bytes = start[8] | start[9] << 8;
  if (major_version == 2 || major_version == 3) {
    if (std::fread(start + 10, 1, 2, stream.get()) != 2) return not_npy;
    header_bytes |= static_cast<uint32_t>(start[10]) << 16 | static_cast<uint32_t>(start[11]) << 24;
  } else if (major_version != 1) {
    return FileError(path, absl::StrCat(".npy version ", major_version, "; allowed: 1 to 3"));
  }
  if (header_bytes > kMaxHeaderBytes) return not_npy;
  std::string dictionary(header_bytes, '\0');
  if (std::fread(dictionary.data(), 1, header_bytes, stream.get()) != header_bytes) return not_npy;
  absl::StatusOr<NpyHeader> header = ParseNpyDictionary(dictionary);
  if (!header.ok()) return FileError(path, header.status().message());
  return NpyReader(path, std::move(stream), *std::move(header));
}

NpyReader::NpyReader(std::string path, NpyStream stream, NpyHeader header)
    : path_(std::move(path)), stream_(std::move(stream)), header_(std::move(header)) {}

absl::Status NpyReader::Read(v1::Dtype dtype, absl::Span<uint16_t> bits) {
  size_t num_read = 0;
  if (header_.dtype == v1::DTYPE_F32) {
    floats_.resize(bits.size());
    num_read = std::fread(floats_.data(), sizeof(float), floats_.size(), stream_.get());
    for (size_t i = 0; i < num_read; ++i) {
      bits[i] = dtype == v1::DTYPE_FP16 ? client::FloatToFp16(floats_[i])
                                        : client::FloatToBf16(floats_[i]);
    }
  } else if (header_.dtype == dtype) {
    num_read = std::fread(bits.data(), sizeof(uint16_t), bits.size(), stream_.get());
  } else {
    return FileError(path_, absl::StrCat("holds ", NameOf(header_.dtype), ", the session ",
                                         NameOf(dtype), "; save it as that, or as float32"));
  }
  if (num_read == bits.size()) return absl::OkStatus();
  return FileError(path_, std::ferror(stream_.get()) ? "cannot be read" : "is cut short");
}

absl::StatusOr<NpyWriter> NpyWriter::Create(const std::string& path, const NpyHeader& header,
                                            bool raw_bits) {
  NpyStream stream(std::fopen(PartPath(path).c_str(), "wb"), &std::fclose);
  if (stream == nullptr) return SystemError(PartPath(path), "cannot be created");
  NpyWriter writer(path, std::move(stream), header);
  const std::string text = MakeNpyHeader(header, raw_bits);
  if (std::fwrite(text.data(), 1, text.size(), writer.stream_.get()) != text.size()) {
    return SystemError(PartPath(path), "cannot be written");
  }
  return writer;
}

NpyWriter::NpyWriter(std::string path, NpyStream stream, NpyHeader header)
    : path_(std::move(path)), stream_(std::move(stream)), header_(std::move(header)) {}

NpyWriter::~NpyWriter() {
  if (stream_ != nullptr) std::remove(PartPath(path_).c_str());
}

absl::Status NpyWriter::Append(v1::Dtype dtype, absl::Span<const uint16_t> bits) {
  size_t num_written = 0;
  if (header_.dtype == v1::DTYPE_F32) {
    const std::vector<float> floats = client::ToFloats(dtype, bits);
    num_written = std::fwrite(floats.data(), sizeof(float), floats.size(), stream_.get());
  } else {
    num_written = std::fwrite(bits.data(), sizeof(uint16_t), bits.size(), stream_.get());
  }
  if (num_written != bits.size()) return SystemError(PartPath(path_), "cannot be written");
  num_written_ += static_cast<int64_t>(bits.size());
  return absl::OkStatus();
}

absl::Status NpyWriter::Close() {
  if (num_written_ != header_.num_elements()) {
    return absl::FailedPreconditionError(absl::StrCat(
        path_, ": ", num_written_, " elements came; expected: ", header_.num_elements()));
  }
  absl::Status status;
  if (std::fclose(stream_.release()) != 0) {
    status = SystemError(PartPath(path_), "cannot be written");
  } else if (std::rename(PartPath(path_).c_str(), path_.c_str()) != 0) {
    status = SystemError(path_, "cannot be created");
  }
  if (!status.ok()) std::remove(PartPath(path_).c_str());
  return status;
}

}  // namespace sluice::ctl
