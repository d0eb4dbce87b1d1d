#include "client/sluicectl/npy.h"

#include <fstream>
#include <iterator>

#include "client/sluicectl/args.h"
#include "client/tensor.h"
#include "gtest/gtest.h"

namespace sluice::ctl {
namespace {

std::string TempPath(const std::string& name) { return ::testing::TempDir() + "/" + name; }

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// As NumPy 1.24 writes np.save(path, np.array(...)).
std::string NumpyFile(const std::string& dictionary, const std::string& elements) {
  std::string padded = dictionary;
  padded.append(64 - (10 + dictionary.size() + 1) % 64, ' ').append("\n");
  std::string file("\x93NUMPY\x01\x00", 8);
  file.push_back(static_cast<char>(padded.size() & 0xff));
  file.push_back(static_cast<char>(padded.size() >> 8));
  return file + padded + elements;
}

absl::Status DictionaryError(const std::string& text) { return ParseNpyDictionary(text).status(); }

TEST(NpyDictionary, AsNumpyWritesIt) {
  auto header =
      ParseNpyDictionary("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }  \n");
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->dtype, v1::DTYPE_F32);
  EXPECT_EQ(header->shape, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(header->num_elements(), 12);
}

TEST(NpyDictionary, OtherOrderAndShapes) {
  auto header = ParseNpyDictionary("{\"shape\":(5,),\"fortran_order\":False,\"descr\":\"<f2\"}");
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->dtype, v1::DTYPE_FP16);
  EXPECT_EQ(header->shape, (std::vector<int64_t>{5}));
  header = ParseNpyDictionary("{'descr': '<f2', 'fortran_order': False, 'shape': (), }");
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->num_elements(), 1);
}

TEST(NpyDictionary, FourWaysToSayBf16) {
  for (const char* descr : {"<V2", "|V2", "bfloat16", "<u2"}) {
    auto header = ParseNpyDictionary(std::string("{'descr': '") + descr +
                                     "', 'fortran_order': False, 'shape': (1,), }");
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->dtype, v1::DTYPE_BF16);
  }
}

TEST(NpyDictionary, RefusesWhatItCannotUse) {
  const auto message = [](const std::string& text) {
    const absl::Status status = DictionaryError(text);
    EXPECT_TRUE(IsUsageError(status));
    return std::string(status.message());
  };
  EXPECT_NE(message("{'descr': '>f4', 'fortran_order': False, 'shape': (1,), }").find("'>f4'"),
            std::string::npos);
  EXPECT_NE(message("{'descr': '<f4', 'fortran_order': True, 'shape': (1,), }").find("Fortran"),
            std::string::npos);
  EXPECT_NE(
      message("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }").find("fields"),
      std::string::npos);
  for (const char* bad : {"", "{", "{}", "{'descr': '<f4'}", "{'descr': '<f4", "nonsense",
                          "{'descr': '<f4', 'fortran_order': False, 'shape': (1, }",
                          "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
                          "{'descr': '<f4', 'fortran_order': 3, 'shape': (1,), }",
                          "{'other': '<f4', 'fortran_order': False, 'shape': (1,), }",
                          "{'descr': '<f4', 'fortran_order': False, "
                          "'shape': (4294967296, 4294967296), }"}) {
    EXPECT_NE(message(bad).find("malformed"), std::string::npos) << bad;
  }
}

TEST(NpyHeader, PaddedTo64Bytes) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{}, {7}, {1, 2, 3}, {1000000, 1000000, 1000, 1000}}) {
    const std::string text = MakeNpyHeader({v1::DTYPE_BF16, shape}, false);
    EXPECT_EQ(text.size() % 64, 0u);
    EXPECT_EQ(text.back(), '\n');
    auto header = ParseNpyDictionary(text.substr(10));
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->shape, shape);
    EXPECT_EQ(header->dtype, v1::DTYPE_BF16);
  }
}

TEST(NpyReader, ReadsInParts) {
  const std::string path = TempPath("parts.npy");
  WriteFile(path, NumpyFile("{'descr': '<V2', 'fortran_order': False, 'shape': (3,), }",
                            std::string("\x80\x3f\x00\x40\x00\xbf", 6)));
  auto reader = NpyReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::vector<uint16_t> bits(2);
  ASSERT_TRUE(reader->Read(v1::DTYPE_BF16, absl::MakeSpan(bits)).ok());
  EXPECT_EQ(bits, (std::vector<uint16_t>{0x3f80, 0x4000}));
  const absl::Status status = reader->Read(v1::DTYPE_BF16, absl::MakeSpan(bits));
  EXPECT_NE(status.message().find("cut short"), absl::string_view::npos) << status;
}

TEST(NpyReader, RoundsFloats) {
  const std::string path = TempPath("floats.npy");
  const std::vector<float> values = {1.0f, -2.5f};
  WriteFile(path, NumpyFile("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }",
                            std::string(reinterpret_cast<const char*>(values.data()), 8)));
  for (v1::Dtype dtype : {v1::DTYPE_BF16, v1::DTYPE_FP16}) {
    auto reader = NpyReader::Open(path);
    ASSERT_TRUE(reader.ok()) << reader.status();
    std::vector<uint16_t> bits(2);
    ASSERT_TRUE(reader->Read(dtype, absl::MakeSpan(bits)).ok());
    EXPECT_EQ(client::ToFloats(dtype, bits), values);
  }
}

TEST(NpyReader, RefusesTheOther16BitType) {
  const std::string path = TempPath("fp16.npy");
  WriteFile(path, NumpyFile("{'descr': '<f2', 'fortran_order': False, 'shape': (1,), }", "ab"));
  auto reader = NpyReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::vector<uint16_t> bits(1);
  const absl::Status status = reader->Read(v1::DTYPE_BF16, absl::MakeSpan(bits));
  EXPECT_TRUE(IsUsageError(status));
  EXPECT_NE(status.message().find("float16"), absl::string_view::npos) << status;
}

TEST(NpyReader, RefusesOtherFiles) {
  EXPECT_TRUE(IsUsageError(NpyReader::Open(TempPath("absent.npy")).status()));
  const std::string path = TempPath("other.npy");
  for (const std::string& bytes :
       {std::string(), std::string("PK\x03\x04 and so on"),
        std::string("\x93NUMPY\x09\x00\x10\x00", 10), std::string("\x93NUMPY\x01\x00\xff\x00{", 11),
        std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff", 12)}) {
    WriteFile(path, bytes);
    EXPECT_TRUE(IsUsageError(NpyReader::Open(path).status()));
  }
}

TEST(NpyWriter, ComesBack) {
  const std::string path = TempPath("written.npy");
  auto writer = NpyWriter::Create(path, {v1::DTYPE_BF16, {2, 2}}, /*raw_bits=*/true);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const std::vector<uint16_t> bits = {1, 2, 3, 4};
  ASSERT_TRUE(writer->Append(v1::DTYPE_BF16, absl::MakeConstSpan(bits).subspan(0, 1)).ok());
  ASSERT_TRUE(writer->Append(v1::DTYPE_BF16, absl::MakeConstSpan(bits).subspan(1)).ok());
  ASSERT_TRUE(writer->Close().ok());
  EXPECT_NE(ReadFile(path).find("'<u2'"), std::string::npos);
  auto reader = NpyReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->header().shape, (std::vector<int64_t>{2, 2}));
  std::vector<uint16_t> read(4);
  ASSERT_TRUE(reader->Read(v1::DTYPE_BF16, absl::MakeSpan(read)).ok());
  EXPECT_EQ(read, bits);
}

TEST(NpyWriter, LeavesNothingBehindWhenCutShort) {
  const std::string path = TempPath("cut.npy");
  {
    auto writer = NpyWriter::Create(path, {v1::DTYPE_F32, {2}}, false);
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE(writer->Append(v1::DTYPE_BF16, {0x3f80}).ok());
    EXPECT_EQ(writer->Close().code(), absl::StatusCode::kFailedPrecondition);
  }
  EXPECT_FALSE(std::ifstream(path).good());
  EXPECT_FALSE(std::ifstream(path + ".part").good());
}

TEST(NpyWriter, FolderThatIsNotThere) {
  EXPECT_TRUE(IsUsageError(
      NpyWriter::Create(TempPath("no/such/folder.npy"), {v1::DTYPE_F32, {2}}, false).status()));
}

}  // namespace
}  // namespace sluice::ctl
