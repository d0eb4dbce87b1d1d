"""What a call is before a transport carries it out."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import re
from typing import Any, Callable, Generic, Mapping, Sequence, TypeVar

from google.protobuf import message_factory
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.v1 import session_pb2

from ..types import SessionHandle, SessionInfo, SessionSpec

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Method:
    """An RPC: its path, its messages, and whether a repeat of it does no harm whatever became of the first try."""

    path: str
    request: type[Message]
    response: type[Message]
    repeatable: bool


def methods(file: Any, service: str, once: Sequence[str] = ()) -> Mapping[str, Method]:
    """The methods of a service of a file's descriptor, by name; those named in `once` are not repeatable."""
    descriptor = file.services_by_name[service]
    return {
        method.name: Method(
            path=f"/{descriptor.full_name}/{method.name}",
            request=message_factory.GetMessageClass(method.input_type),
            response=message_factory.GetMessageClass(method.output_type),
            repeatable=method.name not in once,
        )
        for method in descriptor.methods
    }


@dataclasses.dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and what each of its replies becomes. timeout_s None: the client's default; inf: none."""

    method: Method
    request: Any
    parse: Callable[[Any], T]
    timeout_s: float | None = None


@dataclasses.dataclass(frozen=True)
class PagedCall(Call[list[T]]):
    """A call whose reply is a page: the request has a page_token, the reply a next_page_token."""


class BoundSession:
    """What builders need to know of the session that they are a method of.

    Attributes:
      handle: name and epoch.
      spec: as opened, every default filled in.
      info: the session as it was when it was opened.
      attached: whether it had been there before and was attached to.
    """

    def __init__(self, info: SessionInfo, attached: bool) -> None:
        self.info = info
        self.attached = attached
        self._wire_handle = session_pb2.SessionHandle(name=info.handle.name, epoch=info.handle.epoch)

    @property
    def handle(self) -> SessionHandle:
        return self.info.handle

    @property
    def spec(self) -> SessionSpec:
        return self.info.spec

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.handle.name!r} epoch {self.handle.epoch}>"


def documents(build: Callable[..., Any], returns: str = "") -> Callable[[Function], Function]:
    """Gives a method its builder's name, documentation and signature, for help(); type checkers see the real ones.

    returns: what the method returns, where that is not what the builder's Call becomes.
    """

    def decorate(method: Function) -> Function:
        signature = inspect.signature(build)
        parameters = list(signature.parameters.values())
        if parameters and parameters[0].name == "session":
            del parameters[0]
        parameters.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        becomes = re.sub(r"^Call\[(.*)\]$", r"\1", signature.return_annotation)
        becomes = re.sub(r"^PagedCall\[(.*)\]$", r"list[\1]", becomes)
        method.__name__ = build.__name__
        method.__doc__ = build.__doc__
        method.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters, return_annotation=returns or becomes
        )
        return method

    return decorate


def duration(seconds: float) -> Duration:
    """Seconds as a Duration, to the nanosecond."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def seconds(message: Duration) -> float:
    """A Duration in seconds."""
    return message.seconds + message.nanos * 1e-9


def time(message: Timestamp) -> datetime.datetime:
    """A Timestamp in UTC."""
    return message.ToDatetime(tzinfo=datetime.timezone.utc)
