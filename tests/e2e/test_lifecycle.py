"""How the daemon starts, ends, and outlives its clients."""

import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import SMALL
from daemon import run_sluiced
from sluice_client import (
    BlockState,
    Client,
    CloseMode,
    DecodeSequence,
    FailedPreconditionError,
    NotFoundError,
    PredictMode,
    ServingStatus,
    SessionState,
    SluiceError,
)
from test_python_client import SLOT_BYTES, blocks_of, normal, random_bits


def wait_until(condition, timeout_s=20):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.05)


# Starting.


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_it_tells_about_itself_and_exits(flag):
    done = run_sluiced(flag)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("flag, says", [
    ("--hbm_budget_bytes=-5", "hbm_budget_bytes"),
    ("--max_sessions=0", "max_sessions"),
    ("--max_message_bytes=0", "max_message_bytes"),
    ("--listen_address=nonsense", "listen_address"),
    ("--listen_address=127.0.0.1:70000", "listen_address"),
    ("--log_level=loud", "log_level"),
    ("--no_such_flag=1", "no_such_flag"),
    ("--max_sessions=many", "max_sessions"),
])
def test_refused_flags_are_named_and_exit_2(tmp_path, flag, says):
    done = run_sluiced(
        "--listen_address=127.0.0.1:0", f"--port_file={tmp_path}/port", f"--unix_socket={tmp_path}/socket", flag)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_other_addresses_than_loopback_need_to_be_asked_for(tmp_path, start_daemon, address):
    flags = [f"--listen_address={address}", f"--port_file={tmp_path}/port", f"--unix_socket={tmp_path}/socket"]
    done = run_sluiced(*flags)
    assert done.returncode == 2, done.stderr
    assert "--insecure" in done.stderr
    if address.startswith("0.0.0.0"):
        with Client(start_daemon(f"--listen_address={address}", "--insecure").address) as client:
            assert client.health() is ServingStatus.SERVING


def test_a_second_daemon_on_the_same_socket_is_refused(tmp_path, start_daemon):
    running = start_daemon()
    done = run_sluiced(
        "--listen_address=127.0.0.1:0", f"--port_file={tmp_path}/port", f"--unix_socket={running.socket}")
    assert done.returncode not in (0, 2) and str(running.socket) in done.stderr
    # The first one still has it.
    with Client(f"unix:{running.socket}") as client:
        assert client.health() is ServingStatus.SERVING


def test_a_socket_that_nobody_listens_on_is_taken_over(tmp_path, start_daemon):
    running = start_daemon(folder=tmp_path)
    running.kill()
    assert running.socket.exists()
    start_daemon(folder=tmp_path)
    with Client(f"unix:{running.socket}") as client:
        assert client.health() is ServingStatus.SERVING


def test_a_taken_port_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_sluiced(f"--listen_address=127.0.0.1:{port}", f"--unix_socket={tmp_path}/socket")
    assert done.returncode not in (0, 2) and str(port) in done.stderr


# Ending.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(start_daemon, number):
    running = start_daemon()
    with Client(running.address) as client:
        session = client.open_session(**SMALL)
        session.offload_blocks(0, [0], *blocks_of(0, 1))
        changes = client.watch_health(timeout_s=30)
        assert next(changes) is ServingStatus.SERVING
        running.process.send_signal(number)
        assert next(changes) is ServingStatus.NOT_SERVING
        assert running.stop() == 0
    assert not running.socket.exists()


def test_work_is_refused_while_it_ends_and_what_runs_is_finished(start_daemon):
    running = start_daemon()
    with Client(running.address) as client:
        session = client.open_session(**SMALL)
        session.offload_blocks(0, range(64), *blocks_of(1, 64))
        session.put_sequence(0, 1, range(64))
        q = normal(1, 1, 4, 32)
        with session.decode_stream() as stream:
            for _ in range(200):
                stream.send(0, [DecodeSequence(0, 512)], q)
            stream.receive()
            running.process.send_signal(signal.SIGTERM)
            # Every step gets an answer, or the stream ends with one; none hangs.
            try:
                for _ in range(199):
                    reply = stream.receive()
                    assert reply.error is None or reply.error.reason == "SHUTTING_DOWN"
            except SluiceError as error:
                assert error.code.name in ("UNAVAILABLE", "CANCELLED")
        assert running.stop() == 0
        with pytest.raises(SluiceError) as caught:
            session.get()
        assert caught.value.code.name == "UNAVAILABLE"


# Clients that go away.

HERE = str(pathlib.Path(__file__).parent)

CLIENT = """
import sys, time
sys.path.insert(0, {here!r})
from conftest import SMALL
from test_python_client import blocks_of, normal
from sluice_client import Client, DecodeSequence, OffloadBatch
client = Client({address!r})
session = client.open_session(**{{**SMALL, "name": "killed", "lease_s": 1.0}})
session.offload_blocks(0, range(8), *blocks_of(1, 8))
session.put_sequence(0, 1, range(8))
{work}
"""

OFFLOADS = """
k, v = blocks_of(2, 64)
def batches():
    while True:
        yield OffloadBatch(1, range(64), k, v)
for index, ack in enumerate(session.offload_stream(batches())):
    if index == 5:
        print("running", flush=True)
"""

STEPS = """
q = normal(1, 1, 4, 32)
stream = session.decode_stream()
for _ in range(100):
    stream.send(0, [DecodeSequence(0, 64)], q)
print("running", flush=True)
while True:
    stream.receive()
    stream.send(0, [DecodeSequence(0, 64)], q)
"""

FETCHES = """
session.offload_blocks(1, range(64), *blocks_of(2, 64))
while True:
    for index, piece in enumerate(session.fetch_stream(range(64), [1])):
        print("running", flush=True)
"""


@pytest.mark.parametrize("work", [OFFLOADS, STEPS, FETCHES], ids=["offload", "decode", "fetch"])
def test_killing_a_client_in_a_stream_leaves_usage_as_before(start_daemon, work):
    running = start_daemon()
    with Client(running.address) as client:
        before = client.get_usage()
        script = CLIENT.format(here=HERE, address=running.address, work=work)
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "running\n"
        time.sleep(0.2)
        process.kill()
        process.wait()
        # The lease is a second, the retention 0.
        wait_until(lambda: not client.get_usage().sessions)
        after = client.get_usage()
        assert after == before and after.inflight_bytes == 0
        assert client.health() is ServingStatus.SERVING


def test_a_lease_runs_out_and_the_data_goes_after_the_retention(daemon):
    with Client(daemon.address) as client:
        session = client.open_session(**{**SMALL, "name": "leased", "lease_s": 1.0, "retention_s": 2.0})
        session.offload_blocks(0, [0], *blocks_of(3, 1))
        # Calls keep it up.
        for _ in range(4):
            time.sleep(0.5)
            session.list_blocks()

        def state():
            return {info.handle.name: info.state for info in client.list_sessions()}.get("leased")

        assert state() is SessionState.ATTACHED
        wait_until(lambda: state() is SessionState.DETACHED, 5)
        with pytest.raises(FailedPreconditionError) as caught:
            session.list_blocks()
        assert caught.value.reason == "SESSION_DETACHED"
        assert client.get_usage("leased").sessions[0].num_blocks == 1
        wait_until(lambda: state() is None, 6)
        with pytest.raises(NotFoundError):
            session.list_blocks()


def test_an_open_stream_keeps_the_lease(daemon):
    with Client(daemon.address) as client:
        session = client.open_session(**{**SMALL, "name": "streaming", "lease_s": 1.0})
        session.offload_blocks(0, [0], *blocks_of(4, 1))
        session.put_sequence(0, 1, [0])
        with session.decode_stream() as stream:
            stream.step(0, [DecodeSequence(0, 8)], normal(1, 1, 4, 32))
            time.sleep(2.5)
            assert stream.step(0, [DecodeSequence(0, 8)], normal(1, 1, 4, 32)).errors == (None,)
        session.close(CloseMode.DELETE_DATA)


def test_a_crashed_schedulers_session_is_attached_to_again(start_daemon):
    running = start_daemon()
    work = """
session.put_sequence(1, 4, [0, 3])
print("running", flush=True)
time.sleep(60)
"""
    script = CLIENT.format(here=HERE, address=running.address, work=work)
    script = script.replace('"lease_s": 1.0', '"lease_s": 1.0, "retention_s": 60.0')
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "running\n"
    process.kill()
    process.wait()
    with Client(running.address) as client:
        wait_until(lambda: client.list_sessions()[0].state is SessionState.DETACHED)
        session = client.open_session(**{**SMALL, "name": "killed", "lease_s": 60.0})
        assert session.attached
        assert [(s.sequence_id, s.generation, s.block_ids) for s in session.list_sequences()] == [
            (0, 1, tuple(range(8))), (1, 4, (0, 3))]
        k, _ = blocks_of(1, 8)
        np.testing.assert_array_equal(session.fetch_blocks(range(8), [0]).k.view(np.uint16), k.view(np.uint16))
        assert session.describe_blocks([0], [0])[0].predicted
        step = session.decode_step(0, [DecodeSequence(1, 16, generation=4)], normal(1, 1, 4, 32))
        assert step.errors == (None,)


def test_a_client_finds_its_daemon_again(start_daemon, tmp_path):
    running = start_daemon(folder=tmp_path)
    with Client(running.address) as client:
        session = client.open_session(**SMALL)
        running.kill()
        with pytest.raises(SluiceError) as caught:
            session.list_blocks()
        assert caught.value.code.name == "UNAVAILABLE"
        again = start_daemon(f"--listen_address={running.address}", folder=tmp_path)
        assert again.port == running.port

        def reconnected():
            try:
                return client.health() is ServingStatus.SERVING
            except SluiceError:
                return False

        wait_until(reconnected)
        # Sessions are volatile: they ended with the daemon.
        with pytest.raises(NotFoundError) as caught:
            session.list_blocks()
        assert caught.value.reason == "SESSION_NOT_FOUND"


def test_host_memory_is_bounded_and_comes_back(start_daemon):
    slots = 32
    running = start_daemon(f"--host_budget_bytes={slots * SLOT_BYTES}")
    with Client(running.address) as client:
        session = client.open_session(**SMALL)
        session.offload_blocks(0, range(slots), *random_bits(1, slots), predict=PredictMode.OFF)
        with pytest.raises(SluiceError) as caught:
            session.offload_blocks(1, [0], *blocks_of(5, 1))
        assert caught.value.reason == "HOST_MEMORY"
        with pytest.raises(SluiceError) as caught:
            session.put_sequence(0, 1, [0, slots])
        assert caught.value.reason == "HOST_MEMORY"
        assert session.list_sequences() == [] and len(session.list_blocks()) == slots
        session.drop_blocks([0, 1], [0])
        session.offload_blocks(1, [0], *blocks_of(5, 1))
        assert session.describe_blocks([0], [1])[0].state is BlockState.STORED
