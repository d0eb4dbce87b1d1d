"""The asyncio client: the calls of client.py, awaited.

    async with AsyncClient("127.0.0.1:7464") as client:
        session = await client.open_session(...)
        result = await session.decode_step(layer, [DecodeSequence(0, context_tokens=32)], q)

Threads: a client belongs to the event loop that first used it. Any number of tasks may use it; one decode stream, one
task that sends and one that receives.
"""

from __future__ import annotations

import asyncio
from typing import Any, AsyncIterable, AsyncIterator, Callable, Concatenate, Coroutine, Iterable, ParamSpec, TypeVar

import grpc
import grpc.aio
import numpy.typing as npt

from ._calls import admin, attention, blocks, sequences, sessions
from ._calls.call import BoundSession, Call, PagedCall, documents
from ._retry import CHANNEL_OPTIONS, DEFAULT_TIMEOUT_S, MAX_STEPS_IN_FLIGHT, Attempts, RetryPolicy
from .client import _finite
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
Awaited = Coroutine[Any, Any, T]


class _Transport:
    """Carries calls out on a channel, and awaits them."""

    def __init__(self, make_channel: Callable[[], grpc.aio.Channel], timeout_s: float, retry: RetryPolicy) -> None:
        self._make_channel = make_channel
        self._channel: grpc.aio.Channel | None = None
        self._timeout_s = timeout_s
        self._retry = retry
        self._stubs: dict[str, Any] = {}

    async def run(self, call: Call[T]) -> T:
        stub = self._stub("unary_unary", call)
        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        attempts = Attempts(self._retry, call.method, timeout_s)
        while True:
            try:
                reply = await stub(call.request, timeout=attempts.timeout_s())
            except grpc.aio.AioRpcError as error:
                failure = error_from_rpc(error)
            else:
                return call.parse(reply)
            await asyncio.sleep(attempts.delay_s(failure))

    async def run_pages(self, call: PagedCall[T]) -> list[T]:
        """The items of all pages; the timeout is each page's."""
        items: list[T] = []

        def parse(reply: Any) -> str:
            items.extend(call.parse(reply))
            return str(reply.next_page_token)

        page: Call[str] = Call(call.method, call.request, parse, call.timeout_s)
        while token := await self.run(page):
            call.request.page_token = token
        return items

    async def stream(self, call: Call[T]) -> AsyncIterator[T]:
        """The replies of a server stream. Cancels it when the consumer stops early."""
        replies = self._stub("unary_stream", call)(call.request, timeout=_finite(call.timeout_s))
        try:
            async for reply in replies:
                yield call.parse(reply)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            replies.cancel()

    def open_stream(self, call: Call[Any]) -> Any:
        """A bidirectional stream to write to and read from; call.request is not used."""
        return self._stub("stream_stream", call)(timeout=_finite(call.timeout_s))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _stub(self, kind: str, call: Call[Any]) -> Any:
        method = call.method
        stub = self._stubs.get(method.path)
        if stub is None:
            # Not earlier: a channel takes the event loop that runs when it is made.
            if self._channel is None:
                self._channel = self._make_channel()
            stub = self._stubs[method.path] = getattr(self._channel, kind)(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        return stub


def _client_method(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Awaited[T]]:
    @documents(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._transport.run(build(*args, **kwargs))

    return method


def _session_method(
    build: Callable[Concatenate[BoundSession, P], Call[T]],
) -> Callable[Concatenate[AsyncSession, P], Awaited[T]]:
    @documents(build)
    async def method(self: AsyncSession, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._transport.run(build(self, *args, **kwargs))

    return method


def _session_pages(
    build: Callable[Concatenate[BoundSession, P], PagedCall[T]],
) -> Callable[Concatenate[AsyncSession, P], Awaited[list[T]]]:
    @documents(build)
    async def method(self: AsyncSession, /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        return await self._transport.run_pages(build(self, *args, **kwargs))

    return method


def _session_stream(
    build: Callable[Concatenate[BoundSession, P], Call[T]],
) -> Callable[Concatenate[AsyncSession, P], AsyncIterator[T]]:
    @documents(build, returns="AsyncIterator[FetchedBlocks]")
    def method(self: AsyncSession, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._transport.stream(build(self, *args, **kwargs))

    return method


def _open(
    build: Callable[P, Call[tuple[SessionInfo, bool]]],
) -> Callable[Concatenate[AsyncClient, P], Awaited[AsyncSession]]:
    @documents(build, returns="AsyncSession")
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncSession:
        return AsyncSession(self._transport, *await self._transport.run(build(*args, **kwargs)))

    return method


def _fetch(
    build: Callable[Concatenate[BoundSession, P], Call[FetchedBlocks]],
) -> Callable[Concatenate[AsyncSession, P], Awaited[FetchedBlocks]]:
    @documents(build)
    async def method(self: AsyncSession, /, *args: P.args, **kwargs: P.kwargs) -> FetchedBlocks:
        pieces = [piece async for piece in self._transport.stream(build(self, *args, **kwargs))]
        return blocks.join_fetched(self, pieces)

    return method


class AsyncSession(BoundSession):
    """A session, as AsyncClient.open_session returns it; see client.Session."""

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

    async def offload_stream(
        self,
        batches: Iterable[OffloadBatch] | AsyncIterable[OffloadBatch],
        *,
        timeout_s: float | None = None,
    ) -> AsyncIterator[OffloadAck]:
        """Stores batches in bulk: one ack per batch, in order. A batch that fails says so in its ack and disturbs no
        other. `batches` is consumed by another task, as fast as the daemon takes them."""
        call: Call[OffloadAck] = Call(blocks.METHODS["OffloadStream"], None, blocks.offload_ack, timeout_s)
        stream = self._transport.open_stream(call)

        async def send() -> None:
            try:
                batch_id = 0
                async for batch in _aiter(batches):
                    await stream.write(blocks.offload_stream_request(self, batch_id, batch))
                    batch_id += 1
                await stream.done_writing()
            except grpc.aio.AioRpcError:
                pass  # The reader below is told the same.
            except BaseException:
                stream.cancel()
                raise

        sender = asyncio.create_task(send())
        try:
            while (reply := await stream.read()) is not grpc.aio.EOF:
                yield call.parse(reply)
            await sender
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        except asyncio.CancelledError:
            if sender.done() and not sender.cancelled() and sender.exception() is not None:
                await sender  # Raises what went wrong with a batch, for which the stream was cancelled.
            raise
        finally:
            sender.cancel()
            stream.cancel()

    def decode_stream(self, *, timeout_s: float | None = None) -> AsyncDecodeStream:
        """A stream of decode steps, for use as a context manager; replies come in the order of the steps."""
        return AsyncDecodeStream(self, timeout_s)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.close(CloseMode.KEEP_DATA)
        except SluiceError as error:
            # Closed within the block, or lost while it failed: nothing is left to do.
            if kind is None and error.reason not in ("SESSION_NOT_FOUND", "SESSION_DETACHED"):
                raise


async def _aiter(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class AsyncDecodeStream:
    """Decode steps on one stream; see client.DecodeStream."""

    def __init__(self, session: AsyncSession, timeout_s: float | None) -> None:
        self._session = session
        self._sent = 0
        self._received = 0
        call: Call[StreamReply] = Call(attention.METHODS["DecodeStream"], None, attention.stream_reply, timeout_s)
        self._stream = session._transport.open_stream(call)

    async def send(
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
        """Sends a step; see client.DecodeStream.send."""
        if self._sent - self._received >= MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_STEPS_IN_FLIGHT} steps are in flight: receive their replies first")
        step = attention.decode_request(
            self._session, layer, list(sequences), q, k, v, options, out_dtype, return_lse
        )
        if request_id is None:
            request_id = self._sent
        self._sent += 1
        try:
            await self._stream.write(attention.stream_request(request_id, step, step_timeout_s))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return request_id

    async def receive(self) -> StreamReply:
        """The next reply; see client.DecodeStream.receive."""
        if self._received >= self._sent:
            raise EOFError("no step is in flight")
        try:
            reply = await self._stream.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        if reply is grpc.aio.EOF:
            raise EOFError("the stream has ended")
        self._received += 1
        return attention.stream_reply(reply)

    async def step(
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
        await self.send(
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
        reply = await self.receive()
        if reply.error is not None:
            raise reply.error
        assert reply.result is not None
        return attention.checked(reply.result)

    async def close(self) -> None:
        """Ends the stream. With replies outstanding it is cancelled, and steps that have not started are dropped."""
        if self._sent != self._received:
            self._stream.cancel()
            return
        try:
            await self._stream.done_writing()
            while await self._stream.read() is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # It had ended before, and whoever was waiting for a reply was told.

    async def __aenter__(self) -> AsyncDecodeStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient:
    """A connection to a daemon; the arguments are those of client.Client."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy = RetryPolicy(),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address

        def make_channel() -> grpc.aio.Channel:
            if credentials is None:
                return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)

        self._transport = _Transport(make_channel, timeout_s, retry)

    open_session = _open(sessions.open_session)
    get_server = _client_method(admin.get_server)
    get_usage = _client_method(admin.get_usage)
    set_log_level = _client_method(admin.set_log_level)
    health = _client_method(admin.health)

    @documents(sessions.list_sessions)
    async def list_sessions(self, *, timeout_s: float | None = None) -> list[SessionInfo]:
        return await self._transport.run_pages(sessions.list_sessions(timeout_s=timeout_s))

    @documents(admin.watch_health, returns="AsyncIterator[ServingStatus]")
    def watch_health(self, service: str = "", *, timeout_s: float | None = None) -> AsyncIterator[ServingStatus]:
        return self._transport.stream(admin.watch_health(service, timeout_s=timeout_s))

    async def close(self) -> None:
        """Closes the connection. Sessions stay with the daemon until their lease runs out."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
