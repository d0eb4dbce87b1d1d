"""What goes into calls and comes out of them: dataclasses, enums and numpy arrays.

Arrays that come out are read-only views of the reply's bytes: copy one before you change it. BF16 arrays have the
dtype `ml_dtypes.bfloat16`. Times are datetimes in UTC; spans are seconds, sizes are bytes.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from typing import Any, Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .errors import SluiceError

Array = npt.NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)


class ScoreKind(enum.IntEnum):
    """How a block's score is made."""

    MAX_DOT = 1
    """The greatest projected dot product over query heads and tokens; not scaled."""
    MASS = 2
    """The block's share of the softmax over all predicted blocks of the call, averaged over query heads: 0..1."""


class PredictMode(enum.IntEnum):
    """Whether an offload makes projected keys (A_g)."""

    REQUIRED = 1
    """Every block is predicted, or the batch is refused."""
    BEST_EFFORT = 2
    """Blocks for which there is no memory are stored unpredicted."""
    OFF = 3
    """No block of the batch is predicted."""


class Tier(enum.IntEnum):
    """Where a block's K and V are."""

    UNSPECIFIED = 0
    HBM = 1
    HOST = 2
    DISK = 3


class BlockState(enum.IntEnum):
    """Whether a block is there."""

    ABSENT = 1
    RESERVED = 2
    STORED = 3


class SessionState(enum.IntEnum):
    """Whether somebody holds the session."""

    ATTACHED = 1
    DETACHED = 2


class CloseMode(enum.IntEnum):
    """What closing leaves."""

    KEEP_DATA = 1
    """Detach; the data stays for the session's retention."""
    DELETE_DATA = 2
    """Remove everything; all of it is free when the reply comes."""


class ServingStatus(enum.IntEnum):
    """The daemon's health."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclasses.dataclass(frozen=True)
class SessionHandle:
    """Names a session in every call; the epoch changes with every open_session of the name."""

    name: str
    epoch: int


@dataclasses.dataclass(frozen=True)
class SessionSpec:
    """What a session is, with every default filled in by the daemon. See Client.open_session for the fields."""

    name: str
    model_fingerprint: bytes
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    kv_dtype: np.dtype[Any]
    rank: int
    projection_seed: int
    max_blocks: int
    max_sequences: int
    tile_blocks: int
    host_budget_bytes: int
    hbm_budget_bytes: int
    lease_s: float
    retention_s: float


@dataclasses.dataclass(frozen=True)
class MemoryItem:
    """One line of what a session has reserved; `formula` says how reserved_bytes comes about."""

    name: str
    reserved_bytes: int
    used_bytes: int
    formula: str


@dataclasses.dataclass(frozen=True)
class SessionInfo:
    """A session as the daemon sees it. expire_time: the lease's end (attached) or the data's (detached)."""

    handle: SessionHandle
    spec: SessionSpec
    state: SessionState
    create_time: datetime.datetime
    expire_time: datetime.datetime
    num_blocks: int
    num_predicted_blocks: int
    num_sequences: int
    memory: tuple[MemoryItem, ...]


@dataclasses.dataclass(frozen=True)
class SequenceUpdate:
    """A change of one table: it becomes its first base_blocks ids plus block_ids. Repeating it changes nothing."""

    generation: int
    block_ids: Sequence[int] = ()
    base_blocks: int = 0


@dataclasses.dataclass(frozen=True)
class SequenceInfo:
    """A sequence as the daemon sees it. tokens: present without a gap from position 0, the least over all layers."""

    sequence_id: int
    generation: int
    block_ids: tuple[int, ...]
    tokens: int


@dataclasses.dataclass(frozen=True)
class PutSequenceResult:
    """num_blocks: the table's length now. reserved_blocks: slots newly reserved, counted in every layer."""

    num_blocks: int
    reserved_blocks: int


@dataclasses.dataclass(frozen=True)
class BlockInfo:
    """One block of one layer. version grows with every change of its content within the session."""

    layer: int
    block_id: int
    state: BlockState
    tier: Tier
    valid_tokens: int
    predicted: bool
    version: int
    tag: bytes
    num_tables: int


@dataclasses.dataclass(frozen=True)
class OffloadBatch:
    """A batch for offload_stream; its fields are the arguments of offload_blocks."""

    layer: int | Sequence[int]
    block_ids: Sequence[int]
    k: Array
    v: Array
    valid_tokens: int | Sequence[int] = 0
    tags: Sequence[bytes] = ()
    predict: PredictMode = PredictMode.REQUIRED


@dataclasses.dataclass(frozen=True)
class OffloadResult:
    """Blocks stored; of these the predicted ones and those that were there before; bytes of their slots."""

    stored_blocks: int
    predicted_blocks: int
    stored_bytes: int
    replaced_blocks: int


@dataclasses.dataclass(frozen=True)
class OffloadAck:
    """The ack of the batch_id-th batch, counted from 0: a result, or the error for which it was not stored."""

    batch_id: int
    result: OffloadResult | None
    error: SluiceError | None


@dataclasses.dataclass(frozen=True)
class FetchedBlocks:
    """n blocks: k and v are [n, block_tokens, num_kv_heads, head_dim] of the session's kv_dtype, bit for bit."""

    blocks: tuple[BlockInfo, ...]
    k: Array
    v: Array


@dataclasses.dataclass(frozen=True)
class DropResult:
    """Blocks dropped, and the bytes of their slots."""

    dropped_blocks: int
    freed_bytes: int


@dataclasses.dataclass(frozen=True)
class TopBlock:
    """One of the best blocks. index: its position among the scored ones. score: -inf where not predicted."""

    index: int
    block_id: int
    score: float
    predicted: bool


@dataclasses.dataclass(frozen=True)
class ScoreResult:
    """scores f32 [n] (-inf where not predicted) and predicted bool [n] in the target's order; top, best first."""

    scores: Array
    predicted: Array
    top: tuple[TopBlock, ...]


@dataclasses.dataclass(frozen=True)
class ProjectedKeys:
    """keys: BF16 [n, num_kv_heads, block_tokens, rank]; predicted: bool [n]; valid_tokens: int64 [n]."""

    keys: Array
    predicted: Array
    valid_tokens: Array


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed.

    scale: logits are scale q.k; None: 1 / sqrt(head_dim).
    logit_softcap: logits become softcap tanh(logit / softcap); 0: no cap.
    window_tokens: a query at position p sees only positions above p - window_tokens; 0: no window.
    sink_tokens: with a window, positions 0..sink_tokens-1 are seen too.
    sink_logits: one more logit per query head in the denominator and in lse; num_query_heads values or none.
    """

    scale: float | None = None
    logit_softcap: float = 0.0
    window_tokens: int = 0
    sink_tokens: int = 0
    sink_logits: Sequence[float] | Array = ()


@dataclasses.dataclass(frozen=True)
class DecodeSequence:
    """One sequence of a step.

    sequence_id: 0..max_sequences-1; no sequence twice in a step.
    context_tokens: tokens that the last query token sees, itself included; masks the last block.
    query_tokens: the sequence's last positions, 1..64.
    generation: compared with the sequence's own (after the update) when not 0.
    update: applied first.
    """

    sequence_id: int
    context_tokens: int
    query_tokens: int = 1
    generation: int = 0
    update: SequenceUpdate | None = None


@dataclasses.dataclass(frozen=True)
class StepStats:
    """What a step read (bytes of K and V by tier) and where its time went (microseconds)."""

    hbm_blocks: int
    host_blocks: int
    hbm_bytes: int
    host_bytes: int
    queued_us: int
    device_us: int
    total_us: int


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """A step's result.

    out: [sum of query_tokens, num_query_heads, head_dim] of the session's kv_dtype, or F32 on request.
    lse: f32 [sum of query_tokens, num_query_heads], natural logarithm, -inf where nothing is seen; None unless asked.
    errors: one per sequence, None where it went well; rows of a failed sequence are zero, nothing of it was written.
    """

    out: Array
    lse: Array | None
    errors: tuple[SluiceError | None, ...]
    stats: StepStats


@dataclasses.dataclass(frozen=True)
class StreamReply:
    """The reply to a step of a decode stream: a result, or why the step failed whole."""

    request_id: int
    result: DecodeResult | None
    error: SluiceError | None


@dataclasses.dataclass(frozen=True)
class TileRow:
    """What one row reads in a tile: blocks (none: nothing), and how many tokens of the last count (0: all valid)."""

    block_ids: Sequence[int] = ()
    last_block_valid_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class RunningState:
    """(m, l, o): max logit f32 [n, num_query_heads], sum of exponentials, likewise, unnormalised output
    f32 [n, num_query_heads, head_dim]."""

    m: Array
    l: Array  # noqa: E741
    o: Array


@dataclasses.dataclass(frozen=True)
class TilesResult:
    """out: [n, num_query_heads, head_dim], 0 where l is 0; lse: f32 [n, num_query_heads] or None; state or None."""

    out: Array
    lse: Array | None
    state: RunningState | None


@dataclasses.dataclass(frozen=True)
class DeviceDescription:
    """What the daemon computes on. kind: "cpu" or "cuda"; failure: empty while it works, else what failed, and where."""

    kind: str
    name: str
    instruction_set: str
    num_workers: int
    total_memory_bytes: int
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Bounds on what clients can ask for."""

    max_message_bytes: int
    max_inflight_bytes: int
    max_sessions: int
    max_queued_calls_per_session: int
    max_tile_runs_per_session: int


@dataclasses.dataclass(frozen=True)
class MemoryPool:
    """Memory of one kind: "hbm" or "host"."""

    name: str
    budget_bytes: int
    used_bytes: int


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """The daemon."""

    version: str
    start_time: datetime.datetime
    device: DeviceDescription
    limits: ServerLimits
    memory: tuple[MemoryPool, ...]
    rss_bytes: int


@dataclasses.dataclass(frozen=True)
class SessionUsage:
    """What one session uses, item by item. num_blocks: counted in every layer."""

    name: str
    state: SessionState
    items: tuple[MemoryItem, ...]
    num_blocks: int


@dataclasses.dataclass(frozen=True)
class Usage:
    """Memory by kind and by session. inflight_bytes: request bytes that the daemon holds now."""

    memory: tuple[MemoryPool, ...]
    sessions: tuple[SessionUsage, ...]
    inflight_bytes: int
