// Stores the K and V of a prompt of 16 tokens and decodes over it. Usage: decode [ADDRESS]
#include "client/decode.h"

#include <iostream>

#include "client/client.h"
#include "client/offload.h"
#include "client/tensor.h"

namespace v1 = sluice::v1;
namespace client = sluice::client;

absl::Status Run(const std::string& address) {
  auto daemon = client::Client::Create({.address = address});
  if (!daemon.ok()) return daemon.status();
  v1::SessionSpec spec;  // one layer, 2 query heads and 1 kv head of 64, blocks of 16 tokens
  spec.set_name("example"), spec.set_num_layers(1), spec.set_max_blocks(64), spec.set_head_dim(64);
  spec.set_num_query_heads(2), spec.set_num_kv_heads(1), spec.set_block_tokens(16);
  auto session = daemon->OpenSession(spec);
  if (!session.ok()) return session.status();

  std::vector<uint16_t> ones = client::ToBits(v1::DTYPE_BF16, std::vector<float>(16 * 64, 1.0f));
  client::OffloadBatch prompt(*session);
  prompt.AddBlock(/*layer=*/0, /*block_id=*/7);
  prompt.SetKv(/*k=*/ones, /*v=*/ones);
  if (auto stored = session->OffloadBlocks(prompt); !stored.ok()) return stored.status();

  client::DecodeBatch step(*session);  // its messages are used again by every step
  v1::DecodeSequence* sequence = step.AddSequence(/*sequence_id=*/0, /*context_tokens=*/16);
  sequence->mutable_update()->set_generation(1), sequence->mutable_update()->add_block_ids(7);
  step.SetQ(client::ToBits(v1::DTYPE_BF16, std::vector<float>(2 * 64, 0.5f)));
  if (absl::Status status = session->DecodeStep(&step); !status.ok()) return status;
  if (absl::Status status = step.SequenceStatus(0); !status.ok()) return status;
  std::cout << "out[0] = " << client::Bf16ToFloat(step.out()[0]) << "\n";
  return session->CloseSession(v1::CLOSE_MODE_DELETE_DATA).status();
}
int main(int argc, char** argv) {
  const absl::Status status = Run(argc > 1 ? argv[1] : "127.0.0.1:7464");
  std::cerr << (status.ok() ? "" : status.ToString() + "\n");
  return status.ok() ? 0 : 1;
}
