"""What a connection uses of its worker: settings, clock, scheduling; and its states."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.media.model import MediaConfig, Shape
    from headrace.media.worker.access_log import AccessLog
    from headrace.media.worker.connection import Connection
    from headrace.media.worker.request_context import RequestContext
    from headrace.media.worker.timing import Exchange


class State(enum.Enum):
    """A connection's state; see `connection` for the transitions."""

    READING = "reading"
    OPENING = "opening"
    SENDING = "sending"
    LINGERING = "lingering"
    CLOSED = "closed"


# Module constants: access to members of an enumeration is slow, and each request needs ten.
READING, OPENING, SENDING, LINGERING, CLOSED = State


class WorkerApi(Protocol):
    """What a connection uses of its worker."""

    @property
    def config(self) -> MediaConfig: ...

    @property
    def context(self) -> RequestContext: ...

    @property
    def access_log(self) -> AccessLog | None: ...

    @property
    def is_stopping(self) -> bool: ...

    def now_s(self) -> float: ...

    def begin_exchange(self, began_s: float) -> Exchange: ...

    def watch(self, connection: Connection, delay_s: float) -> None: ...

    def resume_later(self, connection: Connection) -> None: ...

    def resume_after(self, connection: Connection, delay_s: float) -> None: ...

    def resume(self, connection: Connection) -> None: ...

    def forget(self, connection: Connection) -> None: ...

    def note_answer(self, key: str, shape: Shape, *, is_hop: bool) -> None: ...

    def give_back(self, connection: Connection) -> bool: ...
