"""The fast path of a route that is asked thousands of times a second, as a room writes it.

A room's `http` puts such a function into the `opt` of the Litestar handler whose fast path it is, under HOT. The floor
that serves requests calls it for plain requests alone, before any routing of Litestar's; the function says None to
whatever it does not know, and the handler is asked. So there is one route, described and guarded once, and the two
must answer alike. The function of a GET changes nothing: where it fails the request may be answered a second time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

HOT: Final = "hot"
"""The key in a handler's `opt`."""


class HotRequest(msgspec.Struct, frozen=True, gc=False):
    """A request without a body, an escaped character or a parameter given twice."""

    name: str
    """What stands in the path in the place of the template's one parameter; empty where it has none."""
    query: Mapping[str, str]
    user_agent: str | None
    if_none_match: str | None
    is_from_page: bool
    """Whether its key may be anybody's."""


class HotAnswer(msgspec.Struct, frozen=True, gc=False):
    """What is sent back as JSON."""

    body: bytes
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()


HotPath: TypeAlias = Callable[[Any, HotRequest], Awaitable[HotAnswer | None]]
"""(the room's service, the request) -> the answer, or None: let the handler decide; nothing was done."""
