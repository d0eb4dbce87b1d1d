"""Fixtures: running daemons, and both clients behind one face."""

import asyncio
import inspect
import itertools
import signal
import threading

import pytest
import sluice_client
from daemon import Daemon
from sluice_client import AsyncClient, AsyncDecodeStream, AsyncSession, Client


# No test may hang, whatever the daemon does.
TEST_LIMIT_S = 120


@pytest.fixture(autouse=True)
def limited():
    def give_up(*_):
        raise TimeoutError(f"the test took more than {TEST_LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TEST_LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="session")
def daemon(tmp_path_factory):
    """A daemon that tests share; they open sessions of their own."""
    with Daemon(tmp_path_factory.mktemp("sluiced")) as running:
        yield running


@pytest.fixture
def start_daemon(tmp_path):
    """Starts daemons with flags of the test's choice; those still running at its end are stopped."""
    started = []

    def start(*flags, folder=None):
        if folder is None:
            folder = tmp_path / f"sluiced{len(started)}"
            folder.mkdir()
        started.append(Daemon(folder, *flags))
        return started[-1]

    yield start
    for running in started:
        running.stop()


class Blocking:
    """The asyncio client with the face of the synchronous one, so that one test serves both: runs every call on an
    event loop in a thread and waits for it."""

    def __init__(self, target, loop):
        self._target = target
        self._loop = loop

    def _run(self, awaitable):
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(60)

    def __getattr__(self, name):
        value = getattr(self._target, name)
        if not inspect.ismethod(value):
            return value

        async def invoke(*args, **kwargs):
            result = value(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        def call(*args, **kwargs):
            result = self._run(invoke(*args, **kwargs))
            if isinstance(result, (AsyncSession, AsyncDecodeStream)):
                return Blocking(result, self._loop)
            return self._iterate(result) if inspect.isasyncgen(result) else result

        return call

    def _iterate(self, items):
        async def following():
            return await anext(items, None)

        try:
            while (item := self._run(following())) is not None:
                yield item
        finally:
            self._run(items.aclose())

    def __enter__(self):
        self._run(self._target.__aenter__())
        return self

    def __exit__(self, *error):
        self._run(self._target.__aexit__(*error))


@pytest.fixture(scope="session")
def event_loop_thread():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=["sync", "asyncio"])
def connect(request, event_loop_thread):
    """Makes clients of either kind; they are closed at the test's end."""
    clients = []

    def make(address, **options):
        if request.param == "sync":
            clients.append(Client(address, **options))
        else:
            clients.append(Blocking(AsyncClient(address, **options), event_loop_thread))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(daemon, connect):
    """A client of the shared daemon."""
    return connect(daemon.address)


_names = itertools.count()

SMALL = dict(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=32, block_tokens=8, max_blocks=64, rank=16)


@pytest.fixture
def open_session():
    """Opens sessions of a small geometry, with any part of it changed, and deletes them at the test's end."""
    opened = []

    def open_one(client, **changes):
        spec = {"name": f"test-{next(_names)}", **SMALL, **changes}
        session = client.open_session(**spec)
        opened.append(session)
        return session

    yield open_one
    for session in opened:
        try:
            session.close(sluice_client.CloseMode.DELETE_DATA)
        except sluice_client.SluiceError:
            pass  # The test has closed it, given it to another client, or stopped its daemon.
