// blocks list, describe, find, drop.

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/sluicectl/command.h"
#include "client/sluicectl/format.h"

namespace sluice::ctl {
namespace {

template <typename Blocks>
std::string BlockTable(const Blocks& blocks) {
  if (blocks.empty()) return "no blocks\n";
  Table table(
      {"LAYER", "BLOCK", "STATE", "TIER", "TOKENS", "PREDICTED", "VERSION", "TABLES", "TAG"});
  for (const v1::BlockInfo& block : blocks) {
    table.Add({absl::StrCat(block.layer()), absl::StrCat(block.block_id()),
               ShortName(block.state()), ShortName(block.tier()),
               absl::StrCat(block.valid_tokens()), block.predicted() ? "yes" : "no",
               absl::StrCat(block.version()), absl::StrCat(block.num_tables()),
               HumanTag(block.tag())});
  }
  return table.Render();
}

absl::Status ReadBlockSet(const Args& args, v1::BlockSet* blocks) {
  auto ids = ParseIds("the blocks", args.positional()[0]);
  if (!ids.ok()) return ids.status();
  auto layers = args.GetIds("layers");
  if (!layers.ok()) return layers.status();
  blocks->mutable_block_ids()->Assign(ids->begin(), ids->end());
  blocks->mutable_layers()->Assign(layers->begin(), layers->end());
  return absl::OkStatus();
}

absl::StatusOr<v1::Tier> ReadTier(const Args& args) {
  const std::string tier = args.Get("tier");
  for (v1::Tier candidate : {v1::TIER_HBM, v1::TIER_HOST, v1::TIER_DISK}) {
    if (tier == ShortName(candidate)) return candidate;
  }
  if (tier.empty()) return v1::TIER_UNSPECIFIED;
  return UsageError(absl::StrCat("--tier is '", tier, "'; allowed: hbm, host, disk"));
}

absl::Status RunList(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0); !status.ok()) return status;
  v1::ListBlocksRequest request;
  auto layers = invocation.args().GetIds("layers");
  if (!layers.ok()) return layers.status();
  request.mutable_layers()->Assign(layers->begin(), layers->end());
  auto tier = ReadTier(invocation.args());
  if (!tier.ok()) return tier.status();
  request.set_tier(*tier);
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto blocks = session->ListAllBlocks(request, invocation.call_options());
  if (!blocks.ok()) return blocks.status();
  v1::ListBlocksResponse response;
  response.mutable_blocks()->Assign(blocks->begin(), blocks->end());
  return invocation.Print(response, [&] { return BlockTable(response.blocks()); });
}

absl::Status RunDescribe(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(1); !status.ok()) return status;
  v1::DescribeBlocksRequest request;
  absl::Status status = ReadBlockSet(invocation.args(), request.mutable_blocks());
  if (!status.ok()) return status;
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto response = session->DescribeBlocks(request, invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] { return BlockTable(response->blocks()); });
}

absl::Status RunFind(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(1, /*more=*/true); !status.ok()) return status;
  v1::FindBlocksRequest request;
  for (const std::string& text : invocation.args().positional()) {
    auto tag = ParseTag(text);
    if (!tag.ok()) return tag.status();
    request.add_tags(*tag);
  }
  auto layers = invocation.args().GetIds("layers");
  if (!layers.ok()) return layers.status();
  request.mutable_layers()->Assign(layers->begin(), layers->end());
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto response = session->FindBlocks(request, invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] { return BlockTable(response->blocks()); });
}

absl::Status RunDrop(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(1); !status.ok()) return status;
  v1::DropBlocksRequest request;
  absl::Status status = ReadBlockSet(invocation.args(), request.mutable_blocks());
  if (!status.ok()) return status;
  request.set_allow_missing(invocation.args().Has("allow-missing"));
  auto session = invocation.UseSession();
  if (!session.ok()) return session.status();
  auto response = session->DropBlocks(request, invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] {
    return absl::StrCat("dropped ", response->dropped_blocks(), " blocks; ",
                        HumanBytes(response->freed_bytes()), " given back\n");
  });
}

}  // namespace

std::vector<Command> BlockCommands() {
  return {
      {.path = "blocks list",
       .operands = "",
       .summary = "List the blocks that are stored or reserved",
       .details = "",
       .options = {SessionOption(), LayersOption(), {"tier", "hbm|host|disk", "only this tier"}},
       .examples = {"sluicectl blocks list --session demo --layers 0",
                    "sluicectl blocks list --session demo --tier host --output json"},
       .run = &RunList},
      {.path = "blocks describe",
       .operands = "IDS",
       .summary = "Show what is known of the named blocks",
       .details = "A block that is absent is shown as such and is no error.",
       .options = {SessionOption(), LayersOption()},
       .examples = {"sluicectl blocks describe 0-7,12 --session demo --layers 0"},
       .run = &RunDescribe},
      {.path = "blocks find",
       .operands = "TAG...",
       .summary = "Find the blocks that carry one of the tags",
       .details = "A TAG is text, or 0x and hexadecimal digits.",
       .options = {SessionOption(), LayersOption()},
       .examples = {"sluicectl blocks find system-prompt 0x1f2e3d --session demo"},
       .run = &RunFind},
      {.path = "blocks drop",
       .operands = "IDS",
       .summary = "Forget blocks, all of those named or none",
       .details = "",
       .options = {SessionOption(),
                   LayersOption(),
                   {"allow-missing", "", "pass over blocks that are not there"}},
       .examples = {"sluicectl blocks drop 0-7 --session demo"},
       .run = &RunDrop},
  };
}

}  // namespace sluice::ctl
