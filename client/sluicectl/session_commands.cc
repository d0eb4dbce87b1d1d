// sessions list, get, open, close.

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/sluicectl/command.h"
#include "client/sluicectl/format.h"

namespace sluice::ctl {
namespace {

constexpr int64_t kMaxUint32 = std::numeric_limits<uint32_t>::max();

std::string Geometry(const v1::SessionSpec& spec) {
  return absl::StrCat(spec.num_layers(), " layers, ", spec.num_query_heads(), "/",
                      spec.num_kv_heads(), " heads of ", spec.head_dim());
}

std::string SessionTable(const v1::ListSessionsResponse& response) {
  if (response.sessions().empty()) return "no sessions\n";
  Table table({"NAME", "STATE", "GEOMETRY", "BLOCK", "DTYPE", "RANK", "BLOCKS", "SEQUENCES",
               "EPOCH", "EXPIRES"});
  for (const v1::Session& session : response.sessions()) {
    const v1::SessionSpec& spec = session.spec();
    table.Add({session.handle().name(), ShortName(session.state()), Geometry(spec),
               absl::StrCat(spec.block_tokens()), ShortName(spec.kv_dtype()),
               absl::StrCat(spec.rank()), absl::StrCat(session.num_blocks()),
               absl::StrCat(session.num_sequences()), absl::StrCat(session.handle().epoch()),
               HumanTime(session.expire_time(), absl::Now())});
  }
  return table.Render();
}

std::string Budget(int64_t bytes) { return bytes == 0 ? "the daemon's" : HumanBytes(bytes); }

std::string HumanProtoDuration(const google::protobuf::Duration& duration) {
  return HumanDuration(absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos()));
}

std::string SessionText(const v1::Session& session) {
  const v1::SessionSpec& spec = session.spec();
  Fields fields;
  fields.Add("name", session.handle().name());
  fields.Add("epoch", absl::StrCat(session.handle().epoch()));
  fields.Add("state", ShortName(session.state()));
  fields.Add("opened", HumanTime(session.create_time(), absl::Now()));
  fields.Add("expires", HumanTime(session.expire_time(), absl::Now()));
  fields.Add("geometry", Geometry(spec));
  fields.Add("block tokens", absl::StrCat(spec.block_tokens()));
  fields.Add("kv dtype", ShortName(spec.kv_dtype()));
  fields.Add("projection", absl::StrCat("rank ", spec.rank(), ", seed ", spec.projection_seed()));
  fields.Add("fingerprint", HumanTag(spec.model_fingerprint()));
  fields.Add("max blocks", absl::StrCat(spec.max_blocks()));
  fields.Add("max sequences", absl::StrCat(spec.max_sequences()));
  fields.Add("host budget", Budget(spec.host_budget_bytes()));
  fields.Add("hbm budget", Budget(spec.hbm_budget_bytes()));
  fields.Add("lease", HumanProtoDuration(spec.lease()));
  fields.Add("retention", HumanProtoDuration(spec.retention()));
  fields.Add("blocks", absl::StrCat(session.num_blocks(), ", ", session.num_predicted_blocks(),
                                    " predicted"));
  fields.Add("sequences", absl::StrCat(session.num_sequences()));
  Table table({"ITEM", "RESERVED", "USED", "FORMULA"});
  for (const v1::MemoryItem& item : session.memory()) {
    table.Add({item.name(), HumanBytes(item.reserved_bytes()), HumanBytes(item.used_bytes()),
               item.formula()});
  }
  return table.empty() ? fields.Render() : absl::StrCat(fields.Render(), "\n", table.Render());
}

absl::Status RunList(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0); !status.ok()) return status;
  auto sessions = invocation.client().ListAllSessions(invocation.call_options());
  if (!sessions.ok()) return sessions.status();
  v1::ListSessionsResponse response;
  response.mutable_sessions()->Assign(sessions->begin(), sessions->end());
  return invocation.Print(response, [&] { return SessionTable(response); });
}

absl::Status RunGet(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(1); !status.ok()) return status;
  // From the list: GetSession would renew the lease, and refuse a session that is detached.
  auto session = invocation.FindSession(invocation.args().positional()[0]);
  if (!session.ok()) return session.status();
  v1::GetSessionResponse response;
  *response.mutable_session() = *std::move(session);
  return invocation.Print(response, [&] { return SessionText(response.session()); });
}

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration proto;
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
  return proto;
}

// The numbers of a spec; each option has the name of its field, with dashes.
absl::Status ReadNumbers(const Args& args, v1::SessionSpec* spec) {
  struct Number {
    const char* option;
    void (v1::SessionSpec::*set)(uint32_t);
  };
  constexpr Number kNumbers[] = {
      {"num-layers", &v1::SessionSpec::set_num_layers},
      {"num-query-heads", &v1::SessionSpec::set_num_query_heads},
      {"num-kv-heads", &v1::SessionSpec::set_num_kv_heads},
      {"head-dim", &v1::SessionSpec::set_head_dim},
      {"block-tokens", &v1::SessionSpec::set_block_tokens},
      {"max-blocks", &v1::SessionSpec::set_max_blocks},
      {"rank", &v1::SessionSpec::set_rank},
      {"max-sequences", &v1::SessionSpec::set_max_sequences},
      {"tile-blocks", &v1::SessionSpec::set_tile_blocks},
  };
  for (const Number& number : kNumbers) {
    // What is allowed beyond that the daemon says, since it knows.
    auto value = args.GetInt(number.option, 0, 0, kMaxUint32);
    if (!value.ok()) return value.status();
    (spec->*number.set)(static_cast<uint32_t>(*value));
  }
  return absl::OkStatus();
}

absl::Status ReadDtype(const Args& args, v1::SessionSpec* spec) {
  const std::string dtype = args.Has("kv-dtype") ? args.Get("kv-dtype") : "bf16";
  if (dtype == "bf16") {
    spec->set_kv_dtype(v1::DTYPE_BF16);
  } else if (dtype == "fp16") {
    spec->set_kv_dtype(v1::DTYPE_FP16);
  } else {
    return UsageError(absl::StrCat("--kv-dtype is '", dtype, "'; allowed: bf16, fp16"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::SessionSpec> ReadSpec(const Args& args) {
  v1::SessionSpec spec;
  spec.set_name(args.positional().empty() ? "" : args.positional()[0]);
  spec.set_model_fingerprint(args.Get("model-fingerprint"));
  if (absl::Status status = ReadNumbers(args, &spec); !status.ok()) return status;
  if (absl::Status status = ReadDtype(args, &spec); !status.ok()) return status;
  auto seed = args.GetInt("projection-seed", 0, 0, std::numeric_limits<int64_t>::max());
  if (!seed.ok()) return seed.status();
  spec.set_projection_seed(static_cast<uint64_t>(*seed));
  auto host_bytes = args.GetBytes("host-budget", 0);
  if (!host_bytes.ok()) return host_bytes.status();
  spec.set_host_budget_bytes(*host_bytes);
  auto hbm_bytes = args.GetBytes("hbm-budget", 0);
  if (!hbm_bytes.ok()) return hbm_bytes.status();
  spec.set_hbm_budget_bytes(*hbm_bytes);
  for (const char* option : {"lease", "retention"}) {
    auto duration = args.GetDuration(option, absl::ZeroDuration());
    if (!duration.ok()) return duration.status();
    if (!args.Has(option)) continue;
    const bool is_lease = std::string(option) == "lease";
    *(is_lease ? spec.mutable_lease() : spec.mutable_retention()) = ToProto(*duration);
  }
  return spec;
}

absl::Status RunOpen(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(0, /*more=*/true); !status.ok()) return status;
  if (invocation.args().positional().size() > 1) return UsageError("takes one name, or none");
  auto spec = ReadSpec(invocation.args());
  if (!spec.ok()) return spec.status();
  auto session = invocation.client().OpenSession(*spec, invocation.call_options());
  if (!session.ok()) return session.status();
  v1::OpenSessionResponse response;
  *response.mutable_session() = session->info();
  response.set_attached(session->attached());
  return invocation.Print(response, [&] {
    return absl::StrCat(response.attached() ? "attached to" : "opened", " the session\n\n",
                        SessionText(response.session()));
  });
}

absl::Status RunClose(const Invocation& invocation) {
  if (absl::Status status = invocation.CheckOperands(1); !status.ok()) return status;
  const Args& args = invocation.args();
  if (args.Has("keep-data") == args.Has("delete-data")) {
    return UsageError("say what becomes of the blocks: --keep-data or --delete-data");
  }
  auto found = invocation.FindSession(args.positional()[0]);
  if (!found.ok()) return found.status();
  const auto mode = args.Has("keep-data") ? v1::CLOSE_MODE_KEEP_DATA : v1::CLOSE_MODE_DELETE_DATA;
  auto session = absl::StatusOr<client::Session>(invocation.client().UseSession(*found));
  if (found->state() == v1::SESSION_STATE_DETACHED && mode == v1::CLOSE_MODE_DELETE_DATA) {
    // The daemon closes only what is attached; nobody is, so attaching takes it from nobody.
    session = invocation.client().OpenSession(found->spec(), invocation.call_options());
    if (!session.ok()) return session.status();
  }
  auto response = session->CloseSession(mode, invocation.call_options());
  if (!response.ok()) return response.status();
  return invocation.Print(*response, [&] {
    return absl::StrCat("closed; ", HumanBytes(response->freed_bytes()), " of blocks given back\n");
  });
}

std::vector<Option> OpenOptions() {
  return {
      {"num-layers", "N", "layers that keep K and V", true},
      {"num-query-heads", "N", "query heads, a multiple of the kv heads", true},
      {"num-kv-heads", "N", "K and V heads", true},
      {"head-dim", "N", "elements of a head: 16..256, a multiple of 8", true},
      {"block-tokens", "N", "tokens of a block: a power of two, 1..256", true},
      {"max-blocks", "N", "block ids are 0..N-1", true},
      {"kv-dtype", "bf16|fp16", "elements of K, V and q (default bf16)"},
      {"rank", "N", "columns of the projection (default: the lesser of 32 and head-dim)"},
      {"projection-seed", "N", "seed of the projection (default 0)"},
      {"max-sequences", "N", "sequence ids are 0..N-1 (default 64)"},
      {"tile-blocks", "N", "most blocks per sequence of a tile (default 256)"},
      {"host-budget", "BYTES",
       "most bytes of blocks in host memory, such as 4GiB (default: the daemon's)"},
      {"hbm-budget", "BYTES", "most bytes of blocks in HBM (default: the daemon's)"},
      {"lease", "DURATION", "detached when nothing was heard for this long (default 60s)"},
      {"retention", "DURATION", "a detached session keeps its data this long (default 0s)"},
      {"model-fingerprint", "TEXT", "tells one set of weights from another"},
  };
}

}  // namespace

std::vector<Command> SessionCommands() {
  return {
      {.path = "sessions list",
       .operands = "",
       .summary = "List the sessions",
       .details = "",
       .options = {},
       .examples = {"sluicectl sessions list", "sluicectl sessions list --output json"},
       .run = &RunList},
      {.path = "sessions get",
       .operands = "NAME",
       .summary = "Show a session: its geometry, its blocks, its memory item by item",
       .details = "Looking renews no lease and fences no handle.",
       .options = {},
       .examples = {"sluicectl sessions get scheduler-0/rank-0"},
       .run = &RunGet},
      {.path = "sessions open",
       .operands = "[NAME]",
       .summary = "Open a session, or attach to the one of that name",
       .details =
           "Attaching fences the older handles: a scheduler that runs on this session loses it.\n"
           "Without a NAME the daemon makes one.",
       .options = OpenOptions(),
       .examples =
           {"sluicectl sessions open demo --num-layers 30 --num-query-heads 9 --num-kv-heads 3 \\",
            "    --head-dim 64 --block-tokens 16 --max-blocks 4096 --retention 1h"},
       .run = &RunOpen},
      {.path = "sessions close",
       .operands = "NAME",
       .summary = "Close a session",
       .details = "With --delete-data a session that is detached already is removed too.",
       .options = {{"keep-data", "", "detach; the data stays for the session's retention"},
                   {"delete-data", "", "remove the session with all its blocks"}},
       .examples = {"sluicectl sessions close demo --delete-data"},
       .run = &RunClose},
  };
}

}  // namespace sluice::ctl
