"""The demo's modules, its model and its prompt, made once."""

import os
import pathlib
import sys

import pytest

# As in demo.py, and again before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "client/demo"))

from prompt import Prompt  # noqa: E402
from smollm2 import SmolLM2  # noqa: E402


@pytest.fixture(scope="session")
def model():
    return SmolLM2.load()


@pytest.fixture(scope="session")
def prompt(model):
    return Prompt.build(model.tokenizer)


@pytest.fixture(scope="session")
def prefill(model, prompt):
    """Of all tokens but the last, as the demo makes it."""
    held = prompt.tokens[:-1]
    return model.prefill(held, kept_queries=len(held) - prompt.question.start)
