"""Deadlines and retries, the same for both clients."""

from __future__ import annotations

import dataclasses
import math
import random
import time

from ._calls.call import Method
from .errors import SluiceError


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """When a failed call is made again: when the daemon says that a retry can help (RetryInfo), the call is safe to
    repeat, and the deadline leaves room for the wait. Streams are never retried.

    Attributes:
      max_attempts: tries in all; 1: no retries.
      max_delay_s: longest wait before a try. Waits start at what the daemon says, double, and are spread by up to half.
    """

    max_attempts: int = 5
    max_delay_s: float = 2.0


class Attempts:
    """The tries of one call: how long each may take, and whether there is another."""

    def __init__(self, policy: RetryPolicy, method: Method, timeout_s: float) -> None:
        self._policy = policy
        self._method = method
        self._deadline_s = time.monotonic() + timeout_s
        self._made = 0

    def timeout_s(self) -> float | None:
        """For the next try; None: no limit."""
        self._made += 1
        return None if math.isinf(self._deadline_s) else max(0.0, self._deadline_s - time.monotonic())

    def delay_s(self, error: SluiceError) -> float:
        """How long to wait before the next try; raises the error where there is none."""
        if error.retry_delay_s is None or not self._method.repeatable or self._made >= self._policy.max_attempts:
            raise error
        delay_s = min(error.retry_delay_s * 2.0 ** (self._made - 1), self._policy.max_delay_s)
        delay_s *= random.uniform(1.0, 1.5)
        if time.monotonic() + delay_s >= self._deadline_s:
            raise error
        return delay_s


# Blocks make large messages; the daemon's own limit (ServerLimits.max_message_bytes) is the one that counts.
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

DEFAULT_TIMEOUT_S = 30.0

# Steps of one decode stream whose reply has not been received, at most.
MAX_STEPS_IN_FLIGHT = 256
