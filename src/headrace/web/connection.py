"""One connection: deadlines and limits that uvicorn lacks, all answered as problem documents.

uvicorn limits neither the time nor the size of a request's head, so a few hundred slow senders
could hold every connection. Here a head must be complete within `web.head_timeout`, a body must
send 4 KiB in each `web.body_stall`, and header fields and targets have maximum sizes. A request
with ambiguous framing is refused and the connection closed. After a refusal the rest of the body
is read and dropped for a moment: closing at once resets the connection, and the sender would never
see the response (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from headrace.kernel.errors import HeadraceError
from headrace.kernel.routes import ENDLESS
from headrace.web.fast_path import HeadCache, KnownRequest, response_bytes
from headrace.web.limits import Admission
from headrace.web.model import (
    HEAD_BYTES_MAX,
    HEAD_FIELD_BYTES_MAX,
    HEAD_FIELDS_MAX,
    TARGET_BYTES_MAX,
    WHOLE_RESPONSE,
    BadRequest,
    HeadTooLarge,
    RequestTooSlow,
    Stopping,
    TargetTooLong,
    WebConfig,
)
from headrace.web.problems import MEDIA_TYPE, headers_of, problem_of

WHOLE_RESPONSES: Final[Any] = {WHOLE_RESPONSE: {}}
STALL_BYTES_MIN: Final = 4 * 1024
LINGER_S: Final = 2.0
LINGER_BYTES_MAX: Final = 32 * 1024 * 1024


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with deadlines and limits."""

    def __init__(
        self,
        *,
        limits: WebConfig,
        heads: HeadCache,
        admission: Admission,
        **uvicorn_arguments: Any,
    ) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._heads = heads
        self._admission = admission
        self.last_read_s = 0.0
        """Time of the last bytes from the peer."""
        self._fast: bytes | None = None
        """The bytes of the request on the fast path."""
        self._behind = b""
        """Bytes that arrived after that request."""
        self._is_last = False
        """Whether the server stops after the response on the fast path."""
        self._new_head = b""
        self._answered_s = float("-inf")
        """Time of the last response on the fast path."""
        self._refusal: HeadraceError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._is_head_cut = False
        """Whether an earlier read holds the start of this head."""
        self._read_bytes = 0
        self._head_bytes = 0
        self._body_bytes = 0
        self._lingering = False
        self._linger_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head, or refuse a connection over the limit."""
        super().connection_made(transport)
        self._lingering_transport = _Lingering(transport, self)
        self.last_read_s = self.loop.time()
        refusal = self._admission.admit(self, self.client[0] if self.client else "")
        if refusal is not None:
            self.refuse(refusal)
            return
        self._start_timer(self._limits.head_timeout_s, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer and release the connection's place."""
        self._stop_timer()
        self._admission.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Answer a cached head on the fast path, or feed the parser within the limits."""
        self.last_read_s = self.loop.time()
        if self._fast is not None:
            self._behind += data
            self.flow.pause_reading()
            return
        if self._lingering:
            self._linger_bytes += len(data)
            if self._linger_bytes > LINGER_BYTES_MAX:
                self.transport.abort()
            return
        if self.transport.is_closing():
            return
        self._new_head = b""
        if self._is_between():
            request = self._heads.find(data)
            if request is not None:
                self._start_fast(data, request)
                return
            self._new_head = self._heads.head_of(data)
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._read_bytes = len(data)
        self._body_bytes += self._read_bytes
        was_in_head = self._in_head
        super().data_received(data)
        if self.transport.is_closing() or self._lingering:
            return
        self._is_head_cut = self._in_head
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX + TARGET_BYTES_MAX:
                self.refuse(_head_too_large())
                return
        # Most requests arrive in one read and need no timer.
        if self._timer is None and self.is_body_open():
            self._watch_sender()

    def on_message_begin(self) -> None:
        """Start the count of head bytes at the first byte of a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        """Add a piece of the request target, within the limit."""
        super().on_url(url)
        if len(self.url) > TARGET_BYTES_MAX:
            self._refuse_parsing(
                TargetTooLong(f"the request target is longer than {TARGET_BYTES_MAX} bytes")
            )

    def on_headers_complete(self) -> None:
        """Check the complete head, then let uvicorn start the request."""
        self._stop_timer()
        self._in_head = False
        self._check_sizes()
        self._check_target()
        self._check_framing()
        self.scope["extensions"] = WHOLE_RESPONSES
        super().on_headers_complete()
        self.cycle.transport = self._lingering_transport  # type: ignore[assignment]
        self.cycle.send = _Sending(self.cycle, self._learn).send  # type: ignore[method-assign]
        self._body_bytes = 0

    def on_message_complete(self) -> None:
        """Stop the timer of the body."""
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request, unless the connection is closing."""
        if not self._lingering:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is refused or cannot be parsed."""
        self.refuse(self._refusal or BadRequest(f"the request cannot be parsed: {msg}"))

    def refuse(self, error: HeadraceError) -> None:
        """Send `error` unless a response has started, and close."""
        self._stop_timer()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(error_bytes(error))
        self.linger()

    def linger(self) -> None:
        """Close after LINGER_S, discarding the rest of the request."""
        if self._lingering or self.transport.is_closing():
            return
        self._lingering = True
        self._unset_keepalive_if_required()
        self._stop_timer()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for the keep-alive time."""
        left_s = self._answered_s + self.timeout_keep_alive - self.loop.time()
        if self._fast is not None:
            left_s = self.timeout_keep_alive
        # Timers have a resolution of one millisecond.
        if left_s > 0.001:
            self._plan_idle(left_s)
        else:
            self.timeout_keep_alive_task = None
            super().timeout_keep_alive_handler()

    def is_body_open(self) -> bool:
        """Whether part of a request is still missing."""
        return self._in_head or bool(self.cycle and self.cycle.more_body)

    @property
    def eviction_rank(self) -> int | None:
        """0: idle; 1: incomplete head, or a response that is not read; None: in use."""
        cycle: RequestResponseCycle | None = self.cycle
        if self._lingering:
            return 0
        if self._fast is not None or (
            cycle is not None and (cycle.more_body or not cycle.response_complete)
        ):
            return None
        return 0 if self._is_between() else 1

    def evict(self) -> None:
        """Close at once to make room for a new connection."""
        self._stop_timer()
        self.transport.abort()

    def shutdown(self) -> None:
        """Close idle connections and endless responses at once when the server stops."""
        if self._fast is not None:
            self._is_last = True
        elif self._lingering or (self.cycle is not None and ENDLESS in self.scope):
            self.transport.close()
        else:
            super().shutdown()

    def _is_between(self) -> bool:
        """Whether the next byte starts a request, and no other request is open or buffered."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None:
            is_between = not self._head_bytes and not self._is_head_cut
        else:
            is_between = cycle.response_complete and not self._in_head and not cycle.more_body
        return is_between and not self.pipeline and not self.flow.write_paused

    def _start_fast(self, data: bytes, request: KnownRequest) -> None:
        self._fast = data
        self._stop_timer()
        task = self.loop.create_task(self._answer_fast(request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer_fast(self, request: KnownRequest) -> None:
        try:
            is_answered = await self._heads.answer(request, self._write_response)
        except asyncio.CancelledError:
            self._fast = None
            if not self.transport.is_closing():
                self.refuse(stopped())
            return
        data, self._fast = self._fast or b"", None
        if self.transport.is_closing():
            return
        if not is_answered:
            self._feed_again(data)
            return
        self._note_answered()
        if self._behind:
            self.flow.resume_reading()
            data, self._behind = self._behind, b""
            self.data_received(data)

    def _note_answered(self) -> None:
        """Update what uvicorn updates after a response; a running idle timer checks this time."""
        self.server_state.total_requests += 1
        self._answered_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._plan_idle(self.timeout_keep_alive)

    def _plan_idle(self, delay_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            delay_s, self.timeout_keep_alive_handler
        )

    def _feed_again(self, data: bytes) -> None:
        """Pass a request without a fast response, and the bytes after it, to the parser."""
        behind, self._behind = self._behind, b""
        self.flow.resume_reading()
        self._feed(data)
        if behind:
            self.data_received(behind)
        if self._is_last:
            self.shutdown()

    def _write_response(self, status: int, parts: list[bytes]) -> bool:
        if self.transport.is_closing():
            return False
        defaults = self.server_state.default_headers
        self.transport.write(response_bytes(status, defaults, parts, last=self._is_last))
        if self._is_last:
            self.transport.close()
        return True

    def _learn(self, cycle: RequestResponseCycle) -> None:
        """Cache the head of a request that a fast path answered with 200."""
        if self._new_head:
            self._heads.learn(self._new_head, list(cycle.scope["headers"]))

    def _check_sizes(self) -> None:
        """Refuse a head over the limits; `_feed` bounds a head that arrives in several reads."""
        is_short = self._read_bytes <= HEAD_FIELD_BYTES_MAX and not self._is_head_cut
        if is_short and len(self.headers) <= HEAD_FIELDS_MAX:
            return
        sizes = [len(name) + len(value) for name, value in self.headers]
        if (
            len(sizes) > HEAD_FIELDS_MAX
            or sum(sizes) > HEAD_BYTES_MAX
            or (sizes and max(sizes) > HEAD_FIELD_BYTES_MAX)
        ):
            self._refuse_parsing(_head_too_large())

    def _check_target(self) -> None:
        """Accept the origin form, `*`, and the absolute form of the same host (RFC 9112, 3.2)."""
        if self.url.startswith(b"/") or self.url == b"*":
            return
        hosts = [value for name, value in self.headers if name == b"host"]
        parts = urlsplit(self.url)
        if parts.scheme not in (b"http", b"https") or [parts.netloc] != hosts:
            self._refuse_parsing(BadRequest("the request target is not a path of this host"))

    def _check_framing(self) -> None:
        """Refuse framing that the parser accepts and other servers read differently."""
        names = [name for name, _ in self.headers]
        if b"transfer-encoding" in names and [
            value.lower() for name, value in self.headers if name == b"transfer-encoding"
        ] != [b"chunked"]:
            self._refuse_parsing(
                BadRequest("the only supported transfer coding is chunked, given once")
            )
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._refuse_parsing(BadRequest("only HTTP/1.0 and HTTP/1.1 are supported"))

    def _refuse_parsing(self, error: HeadraceError) -> None:
        self._refusal = error
        # The parser stops on any exception and calls send_400_response.
        raise ValueError(error.code)

    def _on_head_timeout(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer(self._limits.head_timeout_s, self._on_head_timeout)
            return
        if not self.transport.is_closing():
            limit_s = self._limits.head_timeout_s
            self.refuse(RequestTooSlow(f"the head of the request took longer than {limit_s:g} s"))

    def _on_body_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing() or not self.is_body_open():
            return
        # Reading pauses while the handler is slow, which is no stall of the sender.
        if self._body_bytes < STALL_BYTES_MIN and not self.flow.read_paused:
            limit_s = self._limits.body_stall_s
            self.refuse(RequestTooSlow(f"the body sent less than 4 KiB in {limit_s:g} s"))
            return
        self._body_bytes = 0
        self._start_timer(self._limits.body_stall_s, self._on_body_timeout)

    def _watch_sender(self) -> None:
        if self._in_head:
            self._start_timer(self._limits.head_timeout_s, self._on_head_timeout)
        else:
            self._start_timer(self._limits.body_stall_s, self._on_body_timeout)

    def _start_timer(self, delay_s: float, then: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Sending:
    """uvicorn's `send` for one request, with one write for a complete response of a fast path.

    uvicorn matches each header against expressions and writes head and body separately. The
    headers of a complete response are ours, and its length is known.
    """

    __slots__ = ("_cycle", "_learn", "_send")

    def __init__(
        self, cycle: RequestResponseCycle, learn: Callable[[RequestResponseCycle], None]
    ) -> None:
        self._cycle = cycle
        self._learn = learn
        self._send = cycle.send

    async def send(self, message: Any) -> None:
        """Send one ASGI message."""
        cycle = self._cycle
        if message["type"] != WHOLE_RESPONSE:
            await self._send(message)
            if cycle.response_complete:
                self._break_cycle()
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        head = [STATUS_LINE[message["status"]]]
        for name, value in (*cycle.default_headers, *message["headers"]):
            head += (name, b": ", value, b"\r\n")
        head.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        if cycle.scope["method"] != "HEAD":
            head.append(message["body"])
        cycle.transport.write(b"".join(head))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        elif message["status"] == http.HTTPStatus.OK:
            self._learn(cycle)
        cycle.on_response()
        self._break_cycle()

    def _break_cycle(self) -> None:
        """Break the reference cycle: the garbage collector would pause the loop for many."""
        vars(self._cycle).pop("send", None)


class _Lingering:
    """The transport of one request: `close` lingers while the peer still sends."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection
        self.write = transport.write
        self.is_closing = transport.is_closing

    def close(self) -> None:
        if self._connection.is_body_open():
            self._connection.linger()
        else:
            self._transport.close()


def error_bytes(error: HeadraceError) -> bytes:
    """A complete HTTP response with `error`, for a request that was not parsed."""
    body = msgspec.json.encode(problem_of(error))
    headers = {
        "content-type": MEDIA_TYPE,
        "content-length": str(len(body)),
        "x-content-type-options": "nosniff",
        **headers_of(error),
        "connection": "close",
    }
    head = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return head.encode() + b"\r\n" + body


def stopped() -> Stopping:
    """The error for a request that a stop cancels."""
    return Stopping("the server stops and the request took too long", retry_after_s=1)


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"the head is too large: expected at most {HEAD_FIELDS_MAX} fields,"
        f" {HEAD_FIELD_BYTES_MAX} bytes each and {HEAD_BYTES_MAX} bytes together"
    )
