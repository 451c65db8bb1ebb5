"""The short way of a read: a head that was seen before is not parsed, routed and wrapped again.

Clients send the same header fields with each request, and only the target differs. So the bytes after the request line
of a hot GET that was answered 200 are remembered with what they mean; the next request with the same bytes, a plain
target and nothing after it goes from the socket to the room's fast path and back without the parser, uvicorn's cycle
and the ASGI messages. Token, scope, metrics, trace and headers are those of every other request. Whatever is
different, or fails, goes the long way from the start: a hot GET changes nothing, so it may be asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from headrace.kernel.hot import HotAnswer
from headrace.kernel.ids import new_request_id
from headrace.kernel.trace import current_traceparent, new_traceparent
from headrace.web.guard import SECURITY_HEADERS, Guard
from headrace.web.hot import HotRoute, HotRoutes
from headrace.web.model import TARGET_BYTES_MAX, current_request_id
from headrace.web.quotas import end_charge, headers_of_charge

HEAD_BYTES_MAX: Final = 2 * 1024
HEADS_MAX: Final = 1_000
"""Heads remembered; then it begins anew."""
END: Final = b"\r\n\r\n"
VERSION: Final = b" HTTP/1.1"
NAMES: Final = frozenset({
    b"accept", b"accept-encoding", b"accept-language", b"authorization", b"connection", b"host", b"user-agent",
})  # fmt: skip
"""Header fields that may stand in such a head: none of them changes how a read is answered but the token's."""
PLAIN: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/?&=._:~,@-"
"""What a target may hold: nothing of it is escaped or ends a part of the URL."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """What a head means."""

    authorization: str | None
    user_agent: str | None


class Asked(msgspec.Struct, frozen=True):
    """A request that can be answered the short way."""

    head: Head
    route: HotRoute
    name: str
    query_string: bytes


class Shortcut:
    """Shared by all connections of a server."""

    def __init__(self, guard: Guard, hot: HotRoutes) -> None:
        self._guard, self._hot = guard, hot
        self._heads: dict[bytes, Head] = {}
        self._fixed: dict[tuple[bytes, ...], bytes] = {}

    def find(self, data: bytes) -> Asked | None:
        """What `data` asks, if it is one whole request with a known head."""
        if not data.startswith(b"GET "):
            return None
        line_end = data.find(b"\r\n")
        head = self._heads.get(data[line_end:])
        if head is None or data[line_end - 9 : line_end] != VERSION:
            return None
        target = data[4 : line_end - 9]
        if target.translate(None, PLAIN) or len(target) > TARGET_BYTES_MAX:
            return None
        path, _, query_string = target.partition(b"?")
        found = self._hot.find("GET", path.decode())
        return None if found is None else Asked(head, *found, query_string)

    def head_of(self, data: bytes) -> bytes:
        """The bytes to remember if `data` is one whole GET that a hot route answers; else nothing."""
        if not data.startswith(b"GET ") or data.find(END) != len(data) - len(END):
            return b""
        head = data[data.find(b"\r\n") :]
        return head if len(head) <= HEAD_BYTES_MAX else b""

    def learn(self, head: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Remember the head of a request that was answered well."""
        fields = dict(headers)
        if len(fields) != len(headers) or not fields.keys() <= NAMES:
            return
        if fields.get(b"connection", b"keep-alive").lower() != b"keep-alive":
            return
        if len(self._heads) >= HEADS_MAX:
            self._heads.clear()
        self._heads[head] = Head(
            *(
                None if name not in fields else fields[name].decode("latin-1")
                for name in (b"authorization", b"user-agent")
            )
        )

    async def answer(self, asked: Asked, give: Callable[[int, list[bytes]], bool]) -> bool:
        """Answer by `give(status, head fields and body)`, which says whether it was taken; False: go the long way."""
        started_s = time.perf_counter()
        request_id, traceparent = new_request_id(), new_traceparent()
        current_request_id.set(request_id)
        current_traceparent.set(traceparent)
        scope: dict[str, Any] = {}
        try:
            answer = await self._hot.answer(
                asked.route,
                asked.name,
                asked.query_string,
                scope,
                authorization=asked.head.authorization,
                user_agent=asked.head.user_agent,
            )
        except Exception:  # noqa: BLE001 - the long way tells it
            return False
        finally:
            end_charge(scope)
        if answer is None:
            return False
        told = f"x-request-id: {request_id}\r\ntraceparent: {traceparent}\r\n"
        charged = [b"%b: %b\r\n" % pair for pair in headers_of_charge(scope)]
        parts = [b"content-length: %d\r\n" % len(answer.body), *self._fields(answer), *charged]
        if give(answer.status, [*parts, told.encode(), answer.body]):
            seconds = time.perf_counter() - started_s
            self._guard.record("GET", asked.route.template, answer.status, seconds)
        return True

    def _fields(self, answer: HotAnswer) -> list[bytes]:
        """The lines of its headers, and those that every answer has."""
        own = [b"%b: %b\r\n" % pair for pair in answer.headers]
        names = tuple([pair[0] for pair in answer.headers])
        fixed = self._fixed.get(names)
        if fixed is None:
            rest = [pair for pair in SECURITY_HEADERS if pair[0] not in names]
            fixed = b"".join(b"%b: %b\r\n" % pair for pair in rest)
            self._fixed[names] = fixed = b"content-type: application/json\r\n" + fixed
        own.append(fixed)
        return own


def whole(
    status: int, defaults: list[tuple[bytes, bytes]], parts: list[bytes], *, last: bool
) -> bytes:
    """The bytes of an answer; `last`: the connection ends with it."""
    head = [STATUS_LINE[status], *[b"%b: %b\r\n" % pair for pair in defaults]]
    body = parts.pop()
    end = b"connection: close\r\n\r\n" if last else b"\r\n"
    return b"".join([*head, *parts, end, body])
