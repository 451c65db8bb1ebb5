"""A block that one client asks of another node, without a task.

The question goes out in the turn that the client's was read in, and its answer goes on in the turn that it comes in:
two turns of the loop, where a task that waits for a question that waits for a connection takes four. Others
who ask for the same block meanwhile wait for it as for any other. A task is made only where the first node does not give it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from headrace.media.cluster.peers import Answer, Peer, PeerLost
from headrace.media.model import Shape
from headrace.media.sources import Coming, Span

if TYPE_CHECKING:
    from headrace.media.cluster.routing import PeerSource


class Flight(NamedTuple):
    """Which bytes are asked for."""

    key: str
    etag: str
    number: int
    span: Span


class Flying(NamedTuple):
    """A flight that has begun: of which shape, from whom, since when."""

    flight: Flight
    shape: Shape
    peer: Peer
    began_s: float


class Heard(NamedTuple):
    """What a peer answered, or how it was lost, before anybody could wait for it."""

    peer: Peer
    answer: Answer | PeerLost


class SoloFlight:
    """A block that is asked for without a task, as long as its first peer gives it; `is_begun`: a connection was free."""

    __slots__ = ("_asked", "_asking", "_flying", "_source", "_task", "_tell", "is_begun")

    def __init__(
        self, source: PeerSource, flying: Flying, tell: Callable[[Coming | None], None]
    ) -> None:
        self._source = source
        self._flying = flying
        self._tell = tell
        self._task: asyncio.Task[Coming] | None = None
        self._asked = source.asked_for(flying.flight)
        self._asking = flying.peer.ask_now(self._asked, self._take)
        self.is_begun = self._asking is not None
        if self.is_begun:
            source.flights.open(flying.flight)

    def cancel(self) -> None:
        """Nobody waits for it any more; nothing once it was told."""
        self._tell = _nobody
        if self._task is not None:
            self._task.cancel()
        elif self._asking is not None:
            self._asking.cancel()
            self._source.flights.fail(self._flying.flight, asyncio.CancelledError())

    def _take(self, answer: Answer | PeerLost) -> None:
        self._asking = None
        flying = self._flying
        if isinstance(answer, PeerLost) or not self._source.is_good(answer, self._asked):
            heard = Heard(flying.peer, answer)
            going_on = self._source.begin_flight(flying.flight, flying.shape, heard)
            self._task = self._source.begin_task(going_on)
            self._task.add_done_callback(self._end)
            return
        try:
            self._tell(answer.body)
        finally:
            # Last, since the client waits for its first byte.
            self._source.follow(answer.body, flying)
            self._source.flights.land(flying.flight, answer.body)

    def _end(self, task: asyncio.Task[Coming]) -> None:
        """What came of the other nodes; a task may be cancelled before its first step, so this is no part of it."""
        flight, flights = self._flying.flight, self._source.flights
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            flights.land(flight, task.result())
            self._tell(task.result())
        else:
            flights.fail(flight, error)
            self._tell(None)


def _nobody(_: Coming | None) -> None:
    """Who asked is gone."""
