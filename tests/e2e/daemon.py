"""Starts and stops sluiced. The binaries come from the environment, or from where ./dev builds them."""

import os
import pathlib
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def binary(variable, default):
    return pathlib.Path(os.environ.get(variable) or ROOT / default).absolute()


SLUICED = binary("SLUICED", "bazel-bin/server/sluiced")
SLUICECTL = binary("SLUICECTL", "bazel-bin/client/sluicectl")
GRPCURL = binary("GRPCURL", ".tools/bin/grpcurl")

START_S = 30
STOP_S = 30


class Daemon:
    """A running sluiced on a port of its own. `folder` takes its socket, port file and log.

    It stops at the end of a `with` block; the fixtures in conftest.py do that.
    """

    def __init__(self, folder, *flags):
        self.folder = pathlib.Path(folder)
        self.socket = self.folder / "sluiced.sock"
        self.log = self.folder / "sluiced.log"
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    SLUICED,
                    "--listen_address=127.0.0.1:0",
                    f"--port_file={port_file}",
                    f"--unix_socket={self.socket}",
                    "--hbm_budget_bytes=268435456",
                    "--host_budget_bytes=268435456",
                    *flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + START_S
        while not (port_file.exists() and port_file.read_text().strip()):
            assert self.process.poll() is None, f"sluiced ended with {self.process.returncode}:\n{self.log.read_text()}"
            assert time.monotonic() < deadline_s, f"sluiced did not start:\n{self.log.read_text()}"
            time.sleep(0.01)
        self.port = int(port_file.read_text())
        self.address = f"127.0.0.1:{self.port}"

    def stop(self):
        """SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"sluiced did not stop:\n{self.log.read_text()}") from None

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        status = self.stop()
        if kind is None:
            assert status == 0, f"sluiced ended with {status}:\n{self.log.read_text()}"


def run_sluiced(*flags, timeout_s=START_S):
    """Runs sluiced to its end, for flags with which it does not serve."""
    return subprocess.run(
        [SLUICED, *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
