"""The demo as a whole: over in-process attention, and as a program with a daemon of its own."""

import os
import pathlib
import subprocess
import sys

import demo
import pytest
from in_process import InProcessAttention

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SLUICED = pathlib.Path(os.environ.get("SLUICED") or ROOT / "bazel-bin/server/sluiced")
ANSWER = ("Matthew Crane", "thirty-one years")
TIME_LIMIT_S = 120


def test_in_process(model, prompt, prefill, capsys):
    assert demo.run_demo(model, prompt, prefill, InProcessAttention(), 32, corrupt=False) == 0
    printed = capsys.readouterr().out
    assert "tokens identical: 32/32\n" in printed
    assert "0 of 552,960 beyond the tolerance" in printed
    assert all(fact in printed.split("answer")[1] for fact in ANSWER)
    assert "30/30 layers" in printed
    assert printed.split("best-scored blocks")[1].count("block ") == 5


def test_in_process_corrupted(model, prompt, prefill, capsys):
    assert demo.run_demo(model, prompt, prefill, InProcessAttention(), 32, corrupt=True) == 1
    identical = capsys.readouterr().out.split("tokens identical: ")[1].split("/")[0]
    assert int(identical) < 32


def test_logits_of_the_answer_are_well_apart(model, prompt, prefill):
    """So that the tokens do not hang on the last bits of a float."""
    attention = demo.ReferenceAttention(prefill.keys, prefill.values)
    run = demo.decode_greedily(model, prompt.tokens, attention, 32)
    assert run.smallest_gap > 0.2


def run_program(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "client/demo/demo.py", *arguments],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )


needs_daemon = pytest.mark.skipif(not SLUICED.exists(), reason=f"{SLUICED} is not built")


@needs_daemon
def test_program():
    done = run_program()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens identical: 32/32\n" in done.stdout
    assert all(fact in done.stdout.split("answer")[1] for fact in ANSWER)
    # Where the answer stands is among the passages that are shown.
    assert "Matthew Crane" in done.stdout.split("best-scored blocks")[1]


@needs_daemon
def test_program_corrupted():
    done = run_program("--corrupt")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "tokens identical: 32/32" not in done.stdout


def test_program_without_a_daemon_says_so(monkeypatch):
    monkeypatch.setenv("SLUICED", "/nonexistent/sluiced")
    done = run_program()
    assert done.returncode == 2
    assert "/nonexistent/sluiced is missing" in done.stderr


def test_program_refuses_bad_arguments():
    done = run_program("--tokens", "0")
    assert done.returncode == 2
    assert "--tokens is 0" in done.stderr
