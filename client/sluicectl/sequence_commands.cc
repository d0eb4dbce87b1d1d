// sequences list, put, truncate, fork, release.

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/sluicectl/command.h"
#include "client/sluicectl/format.h"

namespace sluice::ctl {
namespace {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxUint32 = std::numeric_limits<uint32_t>::max();

std::string SequenceTable(const v1::ListSequencesResponse& response) {
  if (response.sequences().empty()) return "no sequences\n";
  Table table({"SEQUENCE", "GENERATION", "TOKENS", "BLOCKS", "TABLE"});
  for (const v1::Sequence& sequence : response.sequences()) {
    const std::vector<uint32_t> ids(sequence.block_ids().begin(), sequence.block_ids().end());
    table.Add({absl::StrCat(sequence.sequence_id()), absl::StrCat(sequence.generation()),
               absl::StrCat(sequence.tokens()), absl::StrCat(ids.size()), HumanIds(ids)});
  }
  return table.Render();
}

absl::Status RunList(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0); !status.ok()) return status;
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto sequences = session->ListAllSequences(invocation.call_options());
  if (!sequences.ok()) return sequences.status();
  v1::ListSequencesResponse response;
  response.mutable_sequences()->Assign(sequences->begin(), sequences->end());
  return invocation.Print(response, [&] { return SequenceTable(response); });
}

absl::Status RunPut(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(1); !status.ok()) return status;
  const Args& args = invocation.args();
  auto id = ParseId("the sequence", args.positional()[0]);
  if (!id.ok()) return id.status();
  auto generation = args.GetInt("generation", 1, 1, kMaxInt64);
  if (!generation.ok()) return generation.status();
  auto base_blocks = args.GetInt("base", 0, 0, kMaxUint32);
  if (!base_blocks.ok()) return base_blocks.status();
  auto block_ids = args.GetIds("blocks");
  if (!block_ids.ok()) return block_ids.status();
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto response = session->PutSequence(*id, static_cast<uint64_t>(*generation),
                                       static_cast<uint32_t>(*base_blocks), *block_ids,
                                       invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] {
    return absl::StrCat("sequence ", *id, " has ", response->num_blocks(), " blocks; ",
                        response->reserved_blocks(), " slots newly reserved\n");
  });
}

absl::Status RunTruncate(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(1); !status.ok()) return status;
  const Args& args = invocation.args();
  v1::TruncateSequenceRequest request;
  auto id = ParseId("the sequence", args.positional()[0]);
  if (!id.ok()) return id.status();
  request.set_sequence_id(*id);
  auto generation = args.GetInt("generation", 1, 1, kMaxInt64);
  if (!generation.ok()) return generation.status();
  request.set_generation(static_cast<uint64_t>(*generation));
  auto tokens = args.GetInt("tokens", 0, 0, kMaxInt64);
  if (!tokens.ok()) return tokens.status();
  request.set_context_tokens(*tokens);
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto response = session->TruncateSequence(request, invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] {
    return absl::StrCat("sequence ", *id, " has ", response->num_blocks(), " blocks\n");
  });
}

absl::Status RunFork(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(2); !status.ok()) return status;
  const Args& args = invocation.args();
  v1::ForkSequenceRequest request;
  auto source = ParseId("the source", args.positional()[0]);
  if (!source.ok()) return source.status();
  auto target = ParseId("the target", args.positional()[1]);
  if (!target.ok()) return target.status();
  request.set_source_sequence_id(*source);
  request.set_target_sequence_id(*target);
  auto source_generation = args.GetInt("source-generation", 1, 1, kMaxInt64);
  if (!source_generation.ok()) return source_generation.status();
  request.set_source_generation(static_cast<uint64_t>(*source_generation));
  auto generation = args.GetInt("generation", 1, 1, kMaxInt64);
  if (!generation.ok()) return generation.status();
  request.set_target_generation(static_cast<uint64_t>(*generation));
  auto tokens = args.GetInt("tokens", 0, 0, kMaxInt64);
  if (!tokens.ok()) return tokens.status();
  request.set_context_tokens(*tokens);
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto response = session->ForkSequence(request, invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] {
    return absl::StrCat("sequence ", *target, " has ", response->num_blocks(), " blocks\n");
  });
}

absl::Status RunRelease(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(1); !status.ok()) return status;
  auto ids = ParseIds("the sequences", invocation.args().positional()[0]);
  if (!ids.ok()) return ids.status();
  v1::ReleaseSequenceRequest request;
  request.mutable_sequence_ids()->Assign(ids->begin(), ids->end());
  request.set_drop_blocks(invocation.args().Has("drop-blocks"));
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto response = session->ReleaseSequence(request, invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] {
    return absl::StrCat("released; ", response->dropped_blocks(), " blocks dropped\n");
  });
}

}  // namespace

std::vector<Command> SequenceCommands() {
  return {
      {.path = "sequences list",
       .operands = "",
       .summary = "List a session's sequences with their tables",
       .details = "",
       .options = {SessionOption()},
       .examples = {"sluicectl sequences list --session demo"},
       .run = &RunList},
      {.path = "sequences put",
       .operands = "ID",
       .summary = "Make or change a sequence's table of blocks",
       .details = "The table becomes its first --base blocks, then --blocks.",
       .options = {SessionOption(),
                   {"blocks", "IDS", "ids that follow, such as 0-3,8"},
                   {"base", "N", "blocks kept from the front of the table (default 0)"},
                   {"generation", "N", "the sequence's own or a higher one (default 1)"}},
       .examples = {"sluicectl sequences put 0 --session demo --blocks 0-7",
                    "sluicectl sequences put 0 --session demo --base 8 --blocks 12"},
       .run = &RunPut},
      {.path = "sequences truncate",
       .operands = "ID",
       .summary = "Cut a sequence to its first tokens",
       .details = "",
       .options = {SessionOption(),
                   {"tokens", "N", "tokens that stay", true},
                   {"generation", "N", "its generation afterwards, higher than now", true}},
       .examples = {"sluicectl sequences truncate 0 --session demo --tokens 100 --generation 2"},
       .run = &RunTruncate},
      {.path = "sequences fork",
       .operands = "SOURCE TARGET",
       .summary = "Make a sequence that shares the first tokens of another",
       .details = "",
       .options = {SessionOption(),
                   {"source-generation", "N", "the source's generation (default 1)"},
                   {"generation", "N", "the target's generation (default 1)"},
                   {"tokens", "N", "tokens that are shared (default: the whole table)"}},
       .examples = {"sluicectl sequences fork 0 1 --session demo --tokens 64"},
       .run = &RunFork},
      {.path = "sequences release",
       .operands = "IDS",
       .summary = "Remove sequences, all of those named or none",
       .details = "",
       .options = {SessionOption(),
                   {"drop-blocks", "", "also drop the blocks that no other table holds"}},
       .examples = {"sluicectl sequences release 0-3 --session demo --drop-blocks"},
       .run = &RunRelease},
  };
}

}  // namespace sluice::ctl
