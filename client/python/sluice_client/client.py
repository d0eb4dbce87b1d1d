"""The synchronous client.

    with Client("127.0.0.1:7464") as client:
        session = client.open_session(
            name="llama", num_layers=32, num_query_heads=32, num_kv_heads=8, head_dim=128, block_tokens=16,
            max_blocks=4096)
        session.offload_blocks(layer, [0, 1], k, v)
        session.put_sequence(0, generation=1, block_ids=[0, 1])
        out = session.decode_step(layer, [DecodeSequence(0, context_tokens=32)], q).out

Threads: a client, its sessions and their streams may be used from any number of threads; one decode stream by one
thread that sends and one that receives.
"""

from __future__ import annotations

import queue
import time
from typing import Any, Callable, Concatenate, Iterable, Iterator, ParamSpec, TypeVar

import grpc
import numpy.typing as npt

from ._calls import admin, attention, blocks, sequences, sessions
from ._calls.call import BoundSession, Call, PagedCall, documents
from ._retry import CHANNEL_OPTIONS, DEFAULT_TIMEOUT_S, MAX_STEPS_IN_FLIGHT, Attempts, RetryPolicy
from .errors import SluiceError, error_from_rpc
from .types import (
    Array,
    AttentionOptions,
    CloseMode,
    DecodeResult,
    DecodeSequence,
    FetchedBlocks,
    OffloadAck,
    OffloadBatch,
    ServingStatus,
    SessionInfo,
    StreamReply,
)

P = ParamSpec("P")
T = TypeVar("T")


class _Transport:
    """Carries calls out on a channel, and waits for them."""

    def __init__(self, channel: grpc.Channel, timeout_s: float, retry: RetryPolicy) -> None:
        self.channel = channel
        self._timeout_s = timeout_s
        self._retry = retry
        self._stubs: dict[str, Any] = {}

    def run(self, call: Call[T]) -> T:
        stub = self._stub("unary_unary", call)
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        attempts = Attempts(self._retry, call.method, timeout_s)
        while True:
            try:
                reply = stub(call.request, timeout=attempts.timeout_s())
            except grpc.RpcError as error:
                failure = error_from_rpc(error)
            else:
                return call.parse(reply)
            time.sleep(attempts.delay_s(failure))

    def run_pages(self, call: PagedCall[T]) -> list[T]:
        """The items of all pages; the timeout is each page's."""
        items: list[T] = []

        def parse(reply: Any) -> str:
            items.extend(call.parse(reply))
            return str(reply.next_page_token)

        page: Call[str] = Call(call.method, call.request, parse, call.timeout_s)
        while token := self.run(page):
            call.request.page_token = token
        return items

    def stream(self, call: Call[T]) -> Iterator[T]:
        """The replies of a server stream. Cancels it when the consumer stops early."""
        replies = self._stub("unary_stream", call)(call.request, timeout=_finite(call.timeout_s))
        try:
            for reply in replies:
                yield call.parse(reply)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        finally:
            replies.cancel()

    def open_stream(self, call: Call[Any], requests: Iterator[Any]) -> Any:
        """A bidirectional stream; call.request is not used."""
        return self._stub("stream_stream", call)(requests, timeout=_finite(call.timeout_s))

    def _stub(self, kind: str, call: Call[Any]) -> Any:
        method = call.method
        stub = self._stubs.get(method.path)
        if stub is None:
            stub = self._stubs[method.path] = getattr(self.channel, kind)(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        return stub


def _finite(timeout_s: float | None) -> float | None:
    return None if timeout_s == float("inf") else timeout_s


def _client_method(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    @documents(build)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._transport.run(build(*args, **kwargs))

    return method


def _session_method(build: Callable[Concatenate[BoundSession, P], Call[T]]) -> Callable[Concatenate[Session, P], T]:
    @documents(build)
    def method(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._transport.run(build(self, *args, **kwargs))

    return method


def _session_pages(
    build: Callable[Concatenate[BoundSession, P], PagedCall[T]],
) -> Callable[Concatenate[Session, P], list[T]]:
    @documents(build)
    def method(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        return self._transport.run_pages(build(self, *args, **kwargs))

    return method


def _session_stream(
    build: Callable[Concatenate[BoundSession, P], Call[T]],
) -> Callable[Concatenate[Session, P], Iterator[T]]:
    @documents(build, returns="Iterator[FetchedBlocks]")
    def method(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._transport.stream(build(self, *args, **kwargs))

    return method


def _open(build: Callable[P, Call[tuple[SessionInfo, bool]]]) -> Callable[Concatenate[Client, P], Session]:
    @documents(build, returns="Session")
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Session:
        return Session(self._transport, *self._transport.run(build(*args, **kwargs)))

    return method


def _fetch(
    build: Callable[Concatenate[BoundSession, P], Call[FetchedBlocks]],
) -> Callable[Concatenate[Session, P], FetchedBlocks]:
    @documents(build)
    def method(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> FetchedBlocks:
        return blocks.join_fetched(self, self._transport.stream(build(self, *args, **kwargs)))

    return method


class Session(BoundSession):
    """A session, as Client.open_session returns it. As a context manager it is closed with KEEP_DATA at the end: what
    becomes of the data is up to the session's retention.

    Every method takes timeout_s, the call's deadline in seconds: None is the client's (for streams and fetches none),
    math.inf is none. Any call may raise NotFoundError SESSION_NOT_FOUND, AbortedError FENCED and
    FailedPreconditionError SESSION_DETACHED or SESSION_CLOSING.
    """

    def __init__(self, transport: _Transport, info: SessionInfo, attached: bool) -> None:
        super().__init__(info, attached)
        self._transport = transport

    get = _session_method(sessions.get)
    renew = _session_method(sessions.renew)
    close = _session_method(sessions.close)

    put_sequence = _session_method(sequences.put_sequence)
    fork_sequence = _session_method(sequences.fork_sequence)
    truncate_sequence = _session_method(sequences.truncate_sequence)
    release_sequences = _session_method(sequences.release_sequences)
    list_sequences = _session_pages(sequences.list_sequences)

    offload_blocks = _session_method(blocks.offload_blocks)
    fetch_blocks = _fetch(blocks.fetch_blocks)
    fetch_stream = _session_stream(blocks.fetch_stream)
    describe_blocks = _session_method(blocks.describe_blocks)
    list_blocks = _session_pages(blocks.list_blocks)
    find_blocks = _session_method(blocks.find_blocks)
    drop_blocks = _session_method(blocks.drop_blocks)

    score_blocks = _session_method(attention.score_blocks)
    read_projected_keys = _session_method(attention.read_projected_keys)
    decode_step = _session_method(attention.decode_step)
    begin_tiles = _session_method(attention.begin_tiles)
    step_tile = _session_method(attention.step_tile)
    finalize_tiles = _session_method(attention.finalize_tiles)
    abort_tiles = _session_method(attention.abort_tiles)

    def offload_stream(
        self, batches: Iterable[OffloadBatch], *, timeout_s: float | None = None
    ) -> Iterator[OffloadAck]:
        """Stores batches in bulk: one ack per batch, in order. A batch that fails says so in its ack and disturbs no
        other. `batches` is consumed on another thread, as fast as the daemon takes them."""
        failures: list[BaseException] = []

        def requests() -> Iterator[Any]:
            try:
                for batch_id, batch in enumerate(batches):
                    yield blocks.offload_stream_request(self, batch_id, batch)
            except BaseException as error:
                failures.append(error)
                raise

        call: Call[OffloadAck] = Call(blocks.METHODS["OffloadStream"], None, blocks.offload_ack, timeout_s)
        replies = self._transport.open_stream(call, requests())
        try:
            for reply in replies:
                yield call.parse(reply)
        except grpc.RpcError as error:
            if failures:
                raise failures[0] from None
            raise error_from_rpc(error) from None
        finally:
            replies.cancel()

    def decode_stream(self, *, timeout_s: float | None = None) -> DecodeStream:
        """A stream of decode steps, for use as a context manager; replies come in the order of the steps."""
        return DecodeStream(self, timeout_s)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close(CloseMode.KEEP_DATA)
        except SluiceError as error:
            # Closed within the block, or lost while it failed: nothing is left to do.
            if kind is None and error.reason not in ("SESSION_NOT_FOUND", "SESSION_DETACHED"):
                raise


class DecodeStream:
    """Decode steps on one stream, without a call's cost for each.

        with session.decode_stream() as stream:
            result = stream.step(layer, sequences, q, k, v)      # one at a time, or
            stream.send(0, sequences, q0, k0, v0)                # several ahead
            stream.send(1, sequences, q1, k1, v1)
            reply = stream.receive()

    An open stream keeps the session's lease alive. Leaving the context drops steps that have not started.
    """

    def __init__(self, session: Session, timeout_s: float | None) -> None:
        self._session = session
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sent = 0
        self._received = 0
        call: Call[StreamReply] = Call(attention.METHODS["DecodeStream"], None, attention.stream_reply, timeout_s)
        self._replies = session._transport.open_stream(call, iter(self._requests.get, None))

    def send(
        self,
        layer: int,
        sequences: Iterable[DecodeSequence],
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        options: AttentionOptions | None = None,
        out_dtype: npt.DTypeLike | None = None,
        return_lse: bool = False,
        step_timeout_s: float | None = None,
        request_id: int | None = None,
    ) -> int:
        """Sends a step, whose arguments are those of Session.decode_step, and returns its request_id.

        Args:
          step_timeout_s: a step that has not started after so long is dropped with DEADLINE_EXCEEDED.
          request_id: comes back in the reply. None: the steps are counted from 0.

        Raises:
          RuntimeError: 256 replies are waiting to be received.
        """
        if self._sent - self._received >= MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_STEPS_IN_FLIGHT} steps are in flight: receive their replies first")
        step = attention.decode_request(
            self._session, layer, list(sequences), q, k, v, options, out_dtype, return_lse
        )
        if request_id is None:
            request_id = self._sent
        self._requests.put(attention.stream_request(request_id, step, step_timeout_s))
        self._sent += 1
        return request_id

    def receive(self) -> StreamReply:
        """The next reply; blocks. Its error, and its result's errors per sequence, are the caller's to look at.

        Raises:
          SluiceError: the stream itself ended.
          EOFError: it was closed, or nothing is in flight.
        """
        if self._received >= self._sent:
            raise EOFError("no step is in flight")
        try:
            reply = next(self._replies)
        except StopIteration:
            raise EOFError("the stream has ended") from None
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        self._received += 1
        return attention.stream_reply(reply)

    def step(
        self,
        layer: int,
        sequences: Iterable[DecodeSequence],
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        options: AttentionOptions | None = None,
        out_dtype: npt.DTypeLike | None = None,
        return_lse: bool = False,
        step_timeout_s: float | None = None,
    ) -> DecodeResult:
        """Sends a step and waits for its result; raises as Session.decode_step does. Nothing else may be in flight."""
        if self._sent != self._received:
            raise RuntimeError("receive the replies of the steps in flight first")
        self.send(
            layer,
            sequences,
            q,
            k,
            v,
            options=options,
            out_dtype=out_dtype,
            return_lse=return_lse,
            step_timeout_s=step_timeout_s,
        )
        reply = self.receive()
        if reply.error is not None:
            raise reply.error
        assert reply.result is not None
        return attention.checked(reply.result)

    def close(self) -> None:
        """Ends the stream. With replies outstanding it is cancelled, and steps that have not started are dropped."""
        self._requests.put(None)
        if self._sent == self._received:
            try:
                for _ in self._replies:
                    pass
            except grpc.RpcError:
                pass  # It had ended before, and whoever was waiting for a reply was told.
        else:
            self._replies.cancel()

    def __enter__(self) -> DecodeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """A connection to a daemon.

    Args:
      address: "127.0.0.1:7464", or "unix:/run/sluice/sluiced.sock".
      timeout_s: deadline of each call that does not name its own; math.inf: none.
      retry: when a failed call is made again.
      credentials: for TLS. None: plain text.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy = RetryPolicy(),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        if credentials is None:
            channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._transport = _Transport(channel, timeout_s, retry)

    open_session = _open(sessions.open_session)
    get_server = _client_method(admin.get_server)
    get_usage = _client_method(admin.get_usage)
    set_log_level = _client_method(admin.set_log_level)
    health = _client_method(admin.health)

    @documents(sessions.list_sessions)
    def list_sessions(self, *, timeout_s: float | None = None) -> list[SessionInfo]:
        return self._transport.run_pages(sessions.list_sessions(timeout_s=timeout_s))

    @documents(admin.watch_health, returns="Iterator[ServingStatus]")
    def watch_health(self, service: str = "", *, timeout_s: float | None = None) -> Iterator[ServingStatus]:
        return self._transport.stream(admin.watch_health(service, timeout_s=timeout_s))

    def close(self) -> None:
        """Closes the connection. Sessions stay with the daemon until their lease runs out."""
        self._transport.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
