"""Errors: every failed call raises a SluiceError, of a subclass that its status code picks.

    try:
        session.put_sequence(7, generation=3, block_ids=[1, 2])
    except AbortedError as error:
        if error.reason == "STALE_GENERATION":
            ...

Reasons are stable and listed in docs/api.md; messages are for people.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import grpc
from google.rpc import error_details_pb2, status_pb2

ERROR_DOMAIN = "sluice"
_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclasses.dataclass(frozen=True)
class Resource:
    """What was not found, from google.rpc.ResourceInfo."""

    type: str
    name: str


class SluiceError(Exception):
    """A call that failed.

    Attributes:
      code: the gRPC status code.
      message: what happened, for people.
      reason: stable, as "FENCED"; "" where the error did not come from the daemon (a lost connection, say).
      metadata: the values that matter, as {"field": "spec.rank", "value": "200", "allowed": "1..128"}.
      retry_delay_s: a retry after so many seconds can help; None: the daemon does not say so.
      resource: what was not found, or None.
      step: with a DecodeStep whose other sequences went well, its DecodeResult; otherwise None.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_delay_s: float | None = None,
        resource: Resource | None = None,
    ) -> None:
        super().__init__(f"{code.name} {reason}: {message}" if reason else f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_delay_s = retry_delay_s
        self.resource = resource
        self.step: Any = None


class CancelledError(SluiceError):
    """CANCELLED."""


class UnknownError(SluiceError):
    """UNKNOWN."""


class InvalidArgumentError(SluiceError):
    """INVALID_ARGUMENT: metadata names the field, its value and what is allowed."""


class DeadlineExceededError(SluiceError):
    """DEADLINE_EXCEEDED."""


class NotFoundError(SluiceError):
    """NOT_FOUND: `resource` says what."""


class AlreadyExistsError(SluiceError):
    """ALREADY_EXISTS."""


class PermissionDeniedError(SluiceError):
    """PERMISSION_DENIED."""


class ResourceExhaustedError(SluiceError):
    """RESOURCE_EXHAUSTED: memory, a queue or a limit; `retry_delay_s` is set where waiting helps."""


class FailedPreconditionError(SluiceError):
    """FAILED_PRECONDITION."""


class AbortedError(SluiceError):
    """ABORTED: FENCED (another client attached) or STALE_GENERATION."""


class OutOfRangeError(SluiceError):
    """OUT_OF_RANGE."""


class UnimplementedError(SluiceError):
    """UNIMPLEMENTED."""


class InternalError(SluiceError):
    """INTERNAL: a fault of the daemon."""


class UnavailableError(SluiceError):
    """UNAVAILABLE: no connection, or the daemon is going down."""


class DataLossError(SluiceError):
    """DATA_LOSS."""


class UnauthenticatedError(SluiceError):
    """UNAUTHENTICATED."""


_CLASSES: dict[grpc.StatusCode, type[SluiceError]] = {
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNKNOWN: UnknownError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRangeError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}


def error_from_status(status: status_pb2.Status) -> SluiceError | None:
    """The error that a google.rpc.Status tells of; None where it is OK."""
    if status.code == 0:
        return None
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    reason, metadata, retry_delay_s, resource = "", {}, None, None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        about = error_details_pb2.ResourceInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_delay_s = retry.retry_delay.seconds + retry.retry_delay.nanos * 1e-9
        elif detail.Unpack(about):
            resource = Resource(about.resource_type, about.resource_name)
    return _CLASSES.get(code, SluiceError)(code, status.message, reason, metadata, retry_delay_s, resource)


def error_from_rpc(error: grpc.RpcError) -> SluiceError:
    """The error of a call that gRPC ended with anything but OK."""
    # Both transports' errors answer code(), details() and trailing_metadata(); grpc.RpcError does not declare them.
    call: Any = error
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            status = status_pb2.Status()
            status.ParseFromString(value)
            parsed = error_from_status(status)
            if parsed is not None:
                return parsed
    code = call.code()
    return _CLASSES.get(code, SluiceError)(code, call.details() or "")
