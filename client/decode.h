// Decode steps: the messages of one, kept from step to step, and a stream of them.
//
//   client::DecodeBatch step(session);
//   step.AddSequence(/*sequence_id=*/0, context_tokens);
//   for (uint32_t layer = 0; layer < num_layers; ++layer) {
//     step.set_layer(layer);
//     step.SetQ(q);                                  // [1, num_query_heads, head_dim]
//     step.SetKv(k, v);                              // [1, num_kv_heads, head_dim], to be written
//     if (absl::Status status = session.DecodeStep(&step); !status.ok()) return status;
//     if (absl::Status status = step.SequenceStatus(0); !status.ok()) return status;
//     Project(step.out());                           // [1, num_query_heads, head_dim]
//   }
//
//   client::DecodeStream stream = session.OpenDecodeStream();
//   stream.Send(/*request_id=*/1, &step);
//   absl::StatusOr<client::DecodeReply> reply = stream.Receive(&step);
//
// 16-bit elements are uint16_t, the bits of the session's kv_dtype (client/tensor.h converts).
//
// Threads: a DecodeBatch is one thread's at a time. Of a DecodeStream, one thread may send while
// another receives. Ownership: what a batch is given it copies; spans that it returns are good
// until its next step or change. A stream keeps its connection, not its batches.

#ifndef CLIENT_DECODE_H_
#define CLIENT_DECODE_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/options.h"
#include "client/session.h"
#include "sluice/v1/attention.pb.h"

namespace sluice::client {

// A step of one layer for a batch of sequences: the request, and the reply to it. Both keep their
// memory, so that a loop over steps of one shape allocates nothing for them.
class DecodeBatch {
 public:
  explicit DecodeBatch(const Session& session);

  // Starts anew: layer 0, no sequences, no arrays, default options.
  void Clear();

  void set_layer(uint32_t layer) { request_.set_layer(layer); }
  // Adds a sequence, whose last query_tokens positions end at context_tokens. The result is for
  // what is rarer: its update, its generation. It is good until Clear.
  v1::DecodeSequence* AddSequence(uint32_t sequence_id, int64_t context_tokens,
                                  uint32_t query_tokens = 1);
  // One that was added, for the next step to change.
  v1::DecodeSequence* mutable_sequence(int index) { return request_.mutable_sequences(index); }

  // [sum of query_tokens, num_query_heads, head_dim].
  void SetQ(absl::Span<const uint16_t> q);
  // [sum of query_tokens, num_kv_heads, head_dim] each, written before attention. Without: they are
  // there already.
  void SetKv(absl::Span<const uint16_t> k, absl::Span<const uint16_t> v);
  void ClearKv();
  v1::AttentionOptions* mutable_options() { return request_.mutable_options(); }
  v1::OutputOptions* mutable_output() { return request_.mutable_output(); }
  // All of it, for what has no method here. The session's handle is in it.
  v1::DecodeStepRequest* mutable_request() { return &request_; }

  // After a step: [sum of query_tokens, num_query_heads, head_dim] in the session's kv_dtype, or in
  // F32 where mutable_output() asked for it; the other one is empty.
  absl::Span<const uint16_t> out() const;
  absl::Span<const float> out_f32() const;
  // [sum of query_tokens, num_query_heads]; empty unless asked for.
  absl::Span<const float> lse() const;
  // Of the index-th sequence; its rows of out are zero where this is an error.
  absl::Status SequenceStatus(int index) const;
  // The first error of a sequence, or OK.
  absl::Status FirstSequenceError() const;
  const v1::DecodeStepResponse& response() const { return response_; }

 private:
  friend class DecodeStream;
  friend class Session;

  v1::SessionHandle handle_;
  v1::Dtype kv_dtype_;
  v1::DecodeStepRequest request_;
  v1::DecodeStepResponse response_;
};

// The reply to a step of a stream, beside its outputs.
struct DecodeReply {
  uint64_t request_id = 0;
  absl::Status status;  // why the step failed as a whole; the stream goes on
};

// Steps one after another on one stream; replies come in order.
class DecodeStream {
 public:
  // Sessions open streams.
  DecodeStream(std::shared_ptr<Core> core, const CallOptions& options);
  DecodeStream(DecodeStream&&) noexcept;
  DecodeStream& operator=(DecodeStream&&) noexcept;
  // Cancels what has not been finished.
  ~DecodeStream();

  // Sends a step; waits only where the connection takes no more. The batch may be changed or used
  // again at once. request_id is any number; it comes back. A step that has not started after
  // `timeout` is answered with DEADLINE_EXCEEDED. An error means that the stream has ended: Finish
  // says why.
  [[nodiscard]] absl::Status Send(uint64_t request_id, DecodeBatch* batch,
                                  absl::Duration timeout = absl::InfiniteDuration());
  // Waits for the next reply and puts it into `batch`, which need not be the one that was sent.
  // OUT_OF_RANGE after SendsDone, when all replies were received. Any other error: the stream has
  // failed.
  [[nodiscard]] absl::StatusOr<DecodeReply> Receive(DecodeBatch* batch);
  // No more steps will be sent.
  void SendsDone();
  // Ends the stream: SendsDone, what replies are left are thrown away, and the status of the
  // stream. No Send or Receive may run, nor follow.
  [[nodiscard]] absl::Status Finish();
  // Ends it at once. Any thread, also while Send or Receive waits: they fail then.
  void Cancel();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::client

#endif  // CLIENT_DECODE_H_
