"""Where a connection stands; its moves are drawn in `connection`.

[worker/host.py] What a connection may ask of the worker that holds it: its settings, its clock, and turns.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.media.model import MediaConfig
    from headrace.media.worker.connection import Connection
    from headrace.media.worker.fast_path import FastPath
    from headrace.media.worker.request_context import RequestContext
    from headrace.media.worker.timing import Exchange


class State(enum.Enum):
    """One of five."""

    READING = "reading"
    OPENING = "opening"
    SENDING = "sending"
    LINGERING = "lingering"
    CLOSED = "closed"


# To get at a member of an enumeration costs 73 ns, at a name of the module 7 (Python 3.11, timeit), and a request gets at ten.
READING, OPENING, SENDING, LINGERING, CLOSED = State


class WorkerApi(Protocol):
    """What a connection needs of the worker that holds it."""

    @property
    def config(self) -> MediaConfig: ...

    @property
    def context(self) -> RequestContext: ...

    @property
    def is_stopping(self) -> bool: ...

    def now_s(self) -> float: ...

    @property
    def fast_path(self) -> FastPath | None: ...

    def begin_exchange(self, began_s: float) -> Exchange: ...

    def watch(self, connection: Connection, delay_s: float) -> None: ...

    def resume_later(self, connection: Connection) -> None: ...

    def resume_after(self, connection: Connection, delay_s: float) -> None: ...

    def resume(self, connection: Connection) -> None: ...

    def forget(self, connection: Connection) -> None: ...
