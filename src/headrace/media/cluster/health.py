"""Whether a peer is usable, from its probes and requests.

A peer that refuses or resets connections is out at once. One that is slow, full or answers wrongly
is out after three failures in a row, so that one failure costs one retry and not the peer. Only a
probe brings a peer back, never a request of a user. Probes request `/healthz` every two seconds,
and at once when a request has waited half a second. So a hanging peer is detected in about a
second.

Pure: events are passed in, `is_usable` is the result.
"""

from __future__ import annotations

from typing import Final

PROBE_EVERY_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 0.5
FAILURES_MAX: Final = 3


class Health:
    """The health of one peer, which is usable until it fails."""

    __slots__ = ("failures", "is_usable")

    def __init__(self) -> None:
        self.is_usable = True
        self.failures = 0

    def succeed(self) -> None:
        """Record a correct answer. It does not bring back a peer that is out."""
        if self.is_usable:
            self.failures = 0

    def fail(self, *, is_refused: bool) -> bool:
        """Record a failure;

        `is_gone`: the connection was refused or reset. Return whether it is out now.
        """
        self.failures += 1
        was_usable = self.is_usable
        if is_refused or self.failures >= FAILURES_MAX:
            self.is_usable = False
        return was_usable and not self.is_usable

    def probe_failed(self) -> bool:
        """Record a failed probe. Return whether the peer is out now."""
        was_usable = self.is_usable
        self.is_usable = False
        return was_usable

    def probe_succeeded(self) -> bool:
        """Record a successful probe. Return whether the peer is back now."""
        was_usable = self.is_usable
        self.is_usable = True
        if not was_usable:
            self.failures = 0
        return not was_usable
