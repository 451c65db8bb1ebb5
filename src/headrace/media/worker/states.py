"""Where a connection stands; its moves are drawn in `connection`."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """One of five."""

    READING = "reading"
    OPENING = "opening"
    SENDING = "sending"
    LINGERING = "lingering"
    CLOSED = "closed"


# To get at a member of an enumeration costs 73 ns, at a name of the module 7 (Python 3.11, timeit), and a request gets at ten.
READING, OPENING, SENDING, LINGERING, CLOSED = State
