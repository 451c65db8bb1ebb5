"""What a connection may ask of the worker that holds it: its settings, its clock, and turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.media.model import MediaConfig
    from headrace.media.worker.connection import Connection
    from headrace.media.worker.exchange import Exchange
    from headrace.media.worker.plane import Plane
    from headrace.media.worker.shortcut import Shortcuts


class Host(Protocol):
    """What a connection needs of the worker that holds it."""

    @property
    def config(self) -> MediaConfig: ...

    @property
    def plane(self) -> Plane: ...

    @property
    def is_stopping(self) -> bool: ...

    def now_s(self) -> float: ...

    @property
    def shortcuts(self) -> Shortcuts | None: ...

    def begin_exchange(self, began_s: float) -> Exchange: ...

    def watch(self, connection: Connection, delay_s: float) -> None: ...

    def take_turn_later(self, connection: Connection) -> None: ...

    def take_turn_after(self, connection: Connection, delay_s: float) -> None: ...

    def take_turn(self, connection: Connection) -> None: ...

    def forget(self, connection: Connection) -> None: ...
