// Getting blocks back, one at a time, as they come.
//
//   v1::BlockSet blocks;
//   blocks.add_block_ids(7);
//   client::FetchReader reader = session.FetchBlocks(blocks);
//   while (const client::FetchedBlock* block = reader.Next()) {
//     Use(block->info.layer(), block->info.block_id(), block->k, block->v);
//   }
//   if (absl::Status status = reader.Finish(); !status.ok()) return status;
//
// Threads: a reader is one thread's at a time. Ownership: a block that Next gives is good until the
// next Next.

#ifndef CLIENT_FETCH_H_
#define CLIENT_FETCH_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/options.h"
#include "client/session.h"
#include "sluice/v1/swap.pb.h"

namespace sluice::client {

struct FetchedBlock {
  const v1::BlockInfo& info;
  absl::Span<const uint16_t>
      k;  // [block_tokens, num_kv_heads, head_dim], bits of the session's kv_dtype
  absl::Span<const uint16_t> v;
};

class FetchReader {
 public:
  // Sessions open readers.
  FetchReader(std::shared_ptr<Core> core, const v1::FetchBlocksRequest& request,
              int64_t block_elements, const CallOptions& options);
  FetchReader(FetchReader&&) noexcept;
  FetchReader& operator=(FetchReader&&) noexcept;
  // Cancels what has not been finished.
  ~FetchReader();

  // Waits for the next block: layer by layer, ids as they were listed. nullptr: there are no more,
  // or an error; Finish says which.
  const FetchedBlock* Next();
  // OK when every block came. Before the last one: cancels the rest, and is CANCELLED. Again: the
  // same.
  [[nodiscard]] absl::Status Finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::client

#endif  // CLIENT_FETCH_H_
