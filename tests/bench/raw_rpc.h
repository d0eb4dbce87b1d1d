// Calls of the echo server with bytes as they are: what a call costs before any message is parsed.
//
// Threads: one per object. Ownership: each keeps its channel.

#ifndef TESTS_BENCH_RAW_RPC_H_
#define TESTS_BENCH_RAW_RPC_H_

#include <memory>
#include <string>

namespace sluice {

class RawEcho {
 public:
  explicit RawEcho(const std::string& address);
  ~RawEcho();

  // Sends `bytes` and waits until they are back; a blocking unary call. Aborts where it fails.
  void Unary(const std::string& bytes);
  // The same on one stream, which the first call opens.
  void Stream(const std::string& bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice

#endif  // TESTS_BENCH_RAW_RPC_H_
