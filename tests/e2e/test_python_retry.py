"""Deadlines, retries and error details of the Python clients, against a server that fails as it is told to."""

import concurrent.futures
import time

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from sluice.v1 import attention_pb2, session_pb2
from sluice_client import (
    CloseMode,
    DeadlineExceededError,
    Resource,
    ResourceExhaustedError,
    RetryPolicy,
    UnavailableError,
)


def details(code, message, *parts):
    status = status_pb2.Status(code=code.value[0], message=message)
    for part in parts:
        packed = any_pb2.Any()
        packed.Pack(part)
        status.details.append(packed)
    return status.SerializeToString()


def retry_info(seconds):
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


QUEUE_FULL = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="sluice", metadata={"limit": "256"})


class FakeServer(grpc.GenericRpcHandler):
    """Fails each method's first `failures` calls with `error`, a tuple (code, details); counts the calls."""

    def __init__(self):
        self.failures = 0
        self.error = None
        self.calls = 0
        self.timeouts_s = []

    def service(self, handler_call_details):
        name = handler_call_details.method.rsplit("/", 1)[1]
        module = session_pb2 if "Session" in name else attention_pb2
        reply = getattr(module, f"{name}Response")()
        if name == "OpenSession":
            reply.session.handle.name = "fake"
            reply.session.state = session_pb2.SESSION_STATE_ATTACHED
            reply.session.spec.kv_dtype = 1

        def handle(request, context):
            self.calls += 1
            self.timeouts_s.append(context.time_remaining())
            if self.failures > 0:
                self.failures -= 1
                code, message, binary = self.error
                context.set_trailing_metadata((("grpc-status-details-bin", binary),) if binary else ())
                context.abort(code, message)
            return reply

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=getattr(module, f"{name}Request").FromString,
            response_serializer=type(reply).SerializeToString,
        )


@pytest.fixture
def fake():
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    fake = FakeServer()
    server.add_generic_rpc_handlers((fake,))
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    server.stop(None)


@pytest.fixture
def session(fake, connect):
    session = connect(fake.address, timeout_s=10, retry=RetryPolicy(max_attempts=3)).open_session(
        num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=16, block_tokens=1, max_blocks=1)
    fake.calls = 0
    fake.timeouts_s.clear()
    return session


def fail(fake, failures, *parts, code=grpc.StatusCode.RESOURCE_EXHAUSTED):
    fake.failures = failures
    fake.error = code, "busy", details(code, "busy", *parts) if parts else None


def test_a_repeatable_call_is_retried_after_the_delay(fake, session):
    fail(fake, 2, QUEUE_FULL, retry_info(0.2))
    start_s = time.monotonic()
    session.renew(timeout_s=5)
    assert fake.calls == 3
    assert 0.6 <= time.monotonic() - start_s < 5  # 0.2 s, then twice as long.
    # The tries share one deadline; the wire rounds it to a tenth of a second or so.
    assert 4 < fake.timeouts_s[0] < 5.2 and fake.timeouts_s[2] < 4.6


def test_tries_are_bounded(fake, session):
    fail(fake, 9, QUEUE_FULL, retry_info(0.01))
    with pytest.raises(ResourceExhaustedError) as caught:
        session.renew()
    assert fake.calls == 3
    assert caught.value.retry_delay_s == pytest.approx(0.01)


def test_a_wait_beyond_the_deadline_is_not_begun(fake, session):
    fail(fake, 9, QUEUE_FULL, retry_info(1.5))
    start_s = time.monotonic()
    with pytest.raises(ResourceExhaustedError):
        session.renew(timeout_s=1)
    assert fake.calls == 1 and time.monotonic() - start_s < 1


def test_no_retry_unless_the_daemon_says_that_it_helps(fake, session):
    fail(fake, 1, QUEUE_FULL)
    with pytest.raises(ResourceExhaustedError):
        session.renew()
    fail(fake, 1, code=grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(UnavailableError):
        session.renew()
    assert fake.calls == 2


def test_no_retry_of_a_call_that_is_not_safe_to_repeat(fake, session):
    fail(fake, 1, QUEUE_FULL, retry_info(0.01))
    with pytest.raises(ResourceExhaustedError):
        session.close(CloseMode.KEEP_DATA)
    assert fake.calls == 1


def test_details_become_attributes(fake, session):
    fail(fake, 1, error_details_pb2.ResourceInfo(resource_type="block", resource_name="0/7"), QUEUE_FULL)
    with pytest.raises(ResourceExhaustedError) as caught:
        session.abort_tiles(1)
    error = caught.value
    assert (error.code, error.reason, error.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "busy")
    assert error.metadata == {"limit": "256"} and error.resource == Resource("block", "0/7")
    assert error.retry_delay_s is None and str(error) == "RESOURCE_EXHAUSTED QUEUE_FULL: busy"


def test_an_error_without_details(fake, session):
    fail(fake, 1, code=grpc.StatusCode.DEADLINE_EXCEEDED)
    with pytest.raises(DeadlineExceededError) as caught:
        session.abort_tiles(1)
    assert (caught.value.reason, caught.value.metadata, caught.value.message) == ("", {}, "busy")


@pytest.mark.parametrize("name, tries", [("named", 2), ("", 1)])
def test_opening_is_retried_where_a_repeat_would_attach(fake, connect, name, tries):
    fail(fake, 1, QUEUE_FULL, retry_info(0.01))
    client = connect(fake.address)
    geometry = dict(num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=16, block_tokens=1, max_blocks=1)
    try:
        client.open_session(name=name, **geometry)
    except ResourceExhaustedError:
        assert name == ""
    assert fake.calls == tries
