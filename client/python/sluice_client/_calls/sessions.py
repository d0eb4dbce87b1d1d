"""SessionService."""

from __future__ import annotations

import dataclasses
import datetime

import numpy.typing as npt

from sluice.v1 import session_pb2

from .._tensors import numpy_dtype, wire_dtype
from ..types import BFLOAT16, CloseMode, MemoryItem, SessionHandle, SessionInfo, SessionSpec, SessionState
from .call import BoundSession, Call, PagedCall, duration, methods, seconds, time

# A closed session is not found any more. An OpenSession is repeatable where it has a name: without one, a lost reply
# leaves a session behind.
METHODS = methods(session_pb2.DESCRIPTOR, "SessionService", once=("OpenSession", "CloseSession"))


def memory_item(wire: session_pb2.MemoryItem) -> MemoryItem:
    return MemoryItem(wire.name, wire.reserved_bytes, wire.used_bytes, wire.formula)


def _session_info(wire: session_pb2.Session) -> SessionInfo:
    spec = wire.spec
    return SessionInfo(
        handle=SessionHandle(wire.handle.name, wire.handle.epoch),
        spec=SessionSpec(
            name=spec.name,
            model_fingerprint=spec.model_fingerprint,
            num_layers=spec.num_layers,
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_tokens=spec.block_tokens,
            kv_dtype=numpy_dtype(spec.kv_dtype),
            rank=spec.rank,
            projection_seed=spec.projection_seed,
            max_blocks=spec.max_blocks,
            max_sequences=spec.max_sequences,
            tile_blocks=spec.tile_blocks,
            host_budget_bytes=spec.host_budget_bytes,
            hbm_budget_bytes=spec.hbm_budget_bytes,
            lease_s=seconds(spec.lease),
            retention_s=seconds(spec.retention),
        ),
        state=SessionState(wire.state),
        create_time=time(wire.create_time),
        expire_time=time(wire.expire_time),
        num_blocks=wire.num_blocks,
        num_predicted_blocks=wire.num_predicted_blocks,
        num_sequences=wire.num_sequences,
        memory=tuple(memory_item(item) for item in wire.memory),
    )


def open_session(
    *,
    num_layers: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    max_blocks: int,
    name: str = "",
    model_fingerprint: bytes = b"",
    kv_dtype: npt.DTypeLike = BFLOAT16,
    rank: int = 0,
    projection_seed: int = 0,
    max_sequences: int = 0,
    tile_blocks: int = 0,
    host_budget_bytes: int = 0,
    hbm_budget_bytes: int = 0,
    lease_s: float | None = None,
    retention_s: float | None = None,
    timeout_s: float | None = None,
) -> Call[tuple[SessionInfo, bool]]:
    """Opens a session, or attaches again to the one of that name; the older handle is fenced then.

    Everything but budgets, lease and retention is fixed at the first time.

    Args:
      num_layers: layers that keep K and V, 1..1024.
      num_query_heads: of this rank, 1..1024, a multiple of num_kv_heads.
      num_kv_heads: of this rank, 1..256.
      head_dim: elements of a head, the same for K and V: 16..256, a multiple of 8.
      block_tokens: tokens of a block, a power of two, 1..256.
      max_blocks: block ids are 0..max_blocks-1 in every layer.
      name: for attaching again. "": the daemon makes one.
      model_fingerprint: at most 256 bytes that tell one set of weights from another; compared when attaching.
      kv_dtype: of K, V and q: bfloat16 or float16.
      rank: of the projection that predicts, 1..128 and at most head_dim. 0: the lesser of 32 and head_dim.
      projection_seed: the same seed gives the same projection everywhere.
      max_sequences: sequence ids are 0..max_sequences-1. 0: 64.
      tile_blocks: most blocks per row of one step_tile. 0: 256.
      host_budget_bytes: most bytes of its blocks in pinned host memory. 0: no limit but the daemon's.
      hbm_budget_bytes: likewise in HBM.
      lease_s: it is detached when nothing was heard for so long, 1 s .. 24 h. None: 60 s.
      retention_s: a detached session keeps its data for so long, 0 .. 30 days. None: 0.
      timeout_s: of this call; None: the client's, math.inf: none.

    Raises:
      InvalidArgumentError: INVALID_FIELD, naming the field, its value and what is allowed.
      FailedPreconditionError: SESSION_MISMATCH: there with another geometry or fingerprint; nothing changed.
      ResourceExhaustedError: DEVICE_MEMORY, with the need and values that would fit; TOO_MANY_SESSIONS.
    """
    spec = session_pb2.SessionSpec(
        name=name,
        model_fingerprint=model_fingerprint,
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        kv_dtype=wire_dtype(kv_dtype),
        rank=rank,
        projection_seed=projection_seed,
        max_blocks=max_blocks,
        max_sequences=max_sequences,
        tile_blocks=tile_blocks,
        host_budget_bytes=host_budget_bytes,
        hbm_budget_bytes=hbm_budget_bytes,
        lease=None if lease_s is None else duration(lease_s),
        retention=None if retention_s is None else duration(retention_s),
    )
    return Call(
        dataclasses.replace(METHODS["OpenSession"], repeatable=name != ""),
        session_pb2.OpenSessionRequest(spec=spec),
        lambda reply: (_session_info(reply.session), reply.attached),
        timeout_s,
    )


def list_sessions(*, timeout_s: float | None = None) -> PagedCall[SessionInfo]:
    """Every session of the daemon, attached or detached, in order of name."""
    return PagedCall(
        METHODS["ListSessions"],
        session_pb2.ListSessionsRequest(),
        lambda reply: [_session_info(session) for session in reply.sessions],
        timeout_s,
    )


def get(session: BoundSession, *, timeout_s: float | None = None) -> Call[SessionInfo]:
    """The session as it is now: lease, blocks, sequences, memory.

    Raises:
      AbortedError: FENCED: another client has attached.
      NotFoundError: SESSION_NOT_FOUND.
      FailedPreconditionError: SESSION_DETACHED: the lease ran out; open it again. So does every other call.
    """
    return Call(
        METHODS["GetSession"],
        session_pb2.GetSessionRequest(session=session._wire_handle),
        lambda reply: _session_info(reply.session),
        timeout_s,
    )


def renew(session: BoundSession, *, timeout_s: float | None = None) -> Call[datetime.datetime]:
    """Renews the lease, as every other call and open stream does too; returns when it runs out now."""
    return Call(
        METHODS["RenewSession"],
        session_pb2.RenewSessionRequest(session=session._wire_handle),
        lambda reply: time(reply.expire_time),
        timeout_s,
    )


def close(session: BoundSession, mode: CloseMode, *, timeout_s: float | None = None) -> Call[int]:
    """Ends the use of the session once work in flight is done; returns the bytes of blocks given back."""
    return Call(
        METHODS["CloseSession"],
        session_pb2.CloseSessionRequest(session=session._wire_handle, mode=int(mode)),  # type: ignore[arg-type]
        lambda reply: reply.freed_bytes,
        timeout_s,
    )
