"""Whether a peer is asked: what its probes and the requests sent to it have shown.

A peer that refuses or resets connections is out at once; one that is slow, full or answers wrongly is out
after three such answers in a row, so that one bad moment costs one retry and not the peer. Only a probe
brings it back: requests of users are never the experiment. Probes go to `/healthz` every two seconds,
and at once when a request has waited for half a second, so a peer that hangs is found out in about one.

Pure: what happened goes in, `is_usable` comes out.
"""

from __future__ import annotations

from typing import Final

PROBE_EVERY_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 0.5
FAILURES_MAX: Final = 3


class Health:
    """What is known of one peer; it is trusted until it fails."""

    __slots__ = ("failures", "is_usable")

    def __init__(self) -> None:
        self.is_usable = True
        self.failures = 0

    def succeed(self) -> None:
        """A request was answered rightly; it proves nothing for a peer that is out."""
        if self.is_usable:
            self.failures = 0

    def fail(self, *, is_gone: bool) -> bool:
        """A request or a probe failed, by a refused or reset connection if `is_gone`; whether that took it out."""
        self.failures += 1
        was_usable = self.is_usable
        if is_gone or self.failures >= FAILURES_MAX:
            self.is_usable = False
        return was_usable and not self.is_usable

    def probe_failed(self) -> bool:
        """A probe was not answered in time, or with no; whether that took the peer out."""
        was_usable = self.is_usable
        self.is_usable = False
        return was_usable

    def probe_succeeded(self) -> bool:
        """A probe was answered; whether that brought the peer back."""
        was_usable = self.is_usable
        self.is_usable = True
        if not was_usable:
            self.failures = 0
        return not was_usable
