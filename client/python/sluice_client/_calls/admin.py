"""AdminService and grpc.health.v1."""

from __future__ import annotations

from grpc_health.v1 import health_pb2
from sluice.v1 import admin_pb2

from ..types import (
    DeviceDescription,
    MemoryPool,
    ServerInfo,
    ServerLimits,
    ServingStatus,
    SessionState,
    SessionUsage,
    Usage,
)
from .call import Call, methods, time
from .sessions import memory_item

METHODS = methods(admin_pb2.DESCRIPTOR, "AdminService")
HEALTH_METHODS = methods(health_pb2.DESCRIPTOR, "Health")


def _memory_pool(wire: admin_pb2.MemoryPool) -> MemoryPool:
    return MemoryPool(wire.name, wire.budget_bytes, wire.used_bytes)


def get_server(*, timeout_s: float | None = None) -> Call[ServerInfo]:
    """Version, device, limits and memory of the daemon."""

    def parse(reply: admin_pb2.GetServerResponse) -> ServerInfo:
        device, limits = reply.device, reply.limits
        return ServerInfo(
            version=reply.version,
            start_time=time(reply.start_time),
            device=DeviceDescription(
                kind=device.kind,
                name=device.name,
                instruction_set=device.instruction_set,
                num_workers=device.num_workers,
                total_memory_bytes=device.total_memory_bytes,
                failure=device.failure,
            ),
            limits=ServerLimits(
                max_message_bytes=limits.max_message_bytes,
                max_inflight_bytes=limits.max_inflight_bytes,
                max_sessions=limits.max_sessions,
                max_queued_calls_per_session=limits.max_queued_calls_per_session,
                max_tile_runs_per_session=limits.max_tile_runs_per_session,
            ),
            memory=tuple(_memory_pool(pool) for pool in reply.memory),
            rss_bytes=reply.rss_bytes,
        )

    return Call(METHODS["GetServer"], admin_pb2.GetServerRequest(), parse, timeout_s)


def get_usage(session_name: str = "", *, timeout_s: float | None = None) -> Call[Usage]:
    """Bytes by kind of memory and by session, item by item; only of one session when it is named.

    Raises:
      NotFoundError: SESSION_NOT_FOUND.
    """

    def parse(reply: admin_pb2.GetUsageResponse) -> Usage:
        return Usage(
            memory=tuple(_memory_pool(pool) for pool in reply.memory),
            sessions=tuple(
                SessionUsage(
                    name=session.name,
                    state=SessionState(session.state),
                    items=tuple(memory_item(item) for item in session.items),
                    num_blocks=session.num_blocks,
                )
                for session in reply.sessions
            ),
            inflight_bytes=reply.inflight_bytes,
        )

    return Call(METHODS["GetUsage"], admin_pb2.GetUsageRequest(session_name=session_name), parse, timeout_s)


def set_log_level(level: str, *, timeout_s: float | None = None) -> Call[str]:
    """Changes the daemon's log level ("trace", "debug", "info", "warning", "error", "off"); returns the one before.

    Raises:
      InvalidArgumentError: INVALID_FIELD.
    """
    return Call(
        METHODS["SetLogLevel"],
        admin_pb2.SetLogLevelRequest(level=level),
        lambda reply: reply.previous_level,
        timeout_s,
    )


def health(service: str = "", *, timeout_s: float | None = None) -> Call[ServingStatus]:
    """The health of the daemon, or of one service, as "sluice.v1.SwapService".

    Raises:
      NotFoundError: no such service.
    """
    return Call(
        HEALTH_METHODS["Check"],
        health_pb2.HealthCheckRequest(service=service),
        lambda reply: ServingStatus(reply.status),
        timeout_s,
    )


def watch_health(service: str = "", *, timeout_s: float | None = None) -> Call[ServingStatus]:
    """The health as it is, then each change of it, until the caller stops or the daemon ends; without a deadline
    unless one is given."""
    return Call(
        HEALTH_METHODS["Watch"],
        health_pb2.HealthCheckRequest(service=service),
        lambda reply: ServingStatus(reply.status),
        timeout_s,
    )
