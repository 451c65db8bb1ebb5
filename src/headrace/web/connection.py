"""One connection: its requests are answered in order, within deadlines and limits.

A head must be complete within `web.head_timeout`, and a body must send 4 KiB in each
`web.body_stall`. Otherwise a few hundred slow senders could hold every connection. Requests that
arrive before their turn wait, and reading pauses meanwhile. Fast calls are answered directly, all
other requests through ASGI.

A refused request is answered with a problem document and ends the connection. The rest of its body
is read and dropped for a moment: closing at once resets the connection, and the sender would never
see the response (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
from collections import deque
from email.utils import formatdate
from math import inf
from time import time
from typing import Any, Final

from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.routes import ENDLESS
from headrace.web.exchange import (
    STATUS_LINES,
    Exchange,
    error_bytes,
    scope_of_request,
)
from headrace.web.fast_path import FastCall, FastReply, FastRoutes
from headrace.web.limits import CHARGE, Admission
from headrace.web.model import RequestTooSlow, WebConfig
from headrace.web.parsing import RequestHead, RequestParser

STALL_BYTES_MIN: Final = 4 * 1024
LINGER_S: Final = 2.0
LINGER_BYTES_MAX: Final = 32 * 1024 * 1024
TIMER_S: Final = 0.001
"""Resolution of timers."""
NOTHING, HEAD, BODY, IDLE, LINGER = range(5)
"""What the deadline of a connection is for."""
_log: Final = logger(__name__)


class Shared:
    """What the connections of one process share."""

    def __init__(self, app: Any, fast: FastRoutes, config: WebConfig) -> None:
        self.app = app
        self.fast = fast
        self.config = config
        self.admission = Admission(config)
        self.open: set[Connection] = set()
        """Connections that are open, or whose request is still being handled."""
        self.limits_s = (
            inf,
            config.head_timeout_s,
            config.body_stall_s,
            config.keep_alive_s,
            LINGER_S,
        )
        """Seconds by what a connection waits for."""
        self.is_draining = False
        """Whether each connection ends after its current requests."""
        self._date_s = 0
        self._date = b""

    def date_line(self) -> bytes:
        """The Date field of a response now."""
        now_s = int(time())
        if now_s != self._date_s:
            self._date_s = now_s
            self._date = f"date: {formatdate(now_s, usegmt=True)}\r\n".encode()
        return self._date


class Connection(asyncio.Protocol):
    """One client connection; see the module."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._limits = shared, shared.config
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(self)
        self._transport: Any = None
        self._client: Any = None
        self._server: Any = None
        self.last_read_s = 0.0
        """Time of the last bytes from the peer."""
        self._task: asyncio.Task[None] | None = None
        """Answers the current request."""
        self._exchange: Exchange | None = None
        """The current request, unless it is a fast call."""
        self._receiving: Exchange | None = None
        """The request whose body arrives."""
        self._queue: deque[FastCall | Exchange | bytes] = deque()
        """Requests that wait for their turn, and the refusal after them."""
        self._is_refused = False
        """Whether no further bytes are parsed."""
        self._is_read_paused = False
        self.is_write_paused = False
        self._writable: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = inf
        self._deadline_s = inf
        self._waits_for = NOTHING
        self._bytes = 0
        """Bytes of the body since the deadline was set, or bytes dropped before the close."""

    # Called by the transport

    def connection_made(self, transport: Any) -> None:
        """Start the deadline of the first head, or refuse a connection over the limit."""
        self._transport = transport
        self._client = tuple((transport.get_extra_info("peername") or ("", 0))[:2])
        self._server = tuple((transport.get_extra_info("sockname") or ("", 0))[:2])
        self.last_read_s = self._loop.time()
        self._shared.open.add(self)
        refusal = self._shared.admission.admit(self, self._client[0])
        if refusal is not None:
            self._refuse(refusal)
        elif self._shared.is_draining:
            transport.close()
        else:
            self._wait_for(HEAD)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Release everything, and report the end to the current request."""
        self._stop_timer()
        self._shared.admission.forget(self)
        self._parser.close()
        self._queue.clear()
        self._receiving = None
        self.resume_writing()
        if self._exchange is not None:
            self._exchange.disconnect()
        if self._task is None:
            self._shared.open.discard(self)

    def data_received(self, data: bytes) -> None:
        """Parse requests, and start the first."""
        self.last_read_s = self._loop.time()
        if self._is_refused:
            self._drop(data)
            return
        if self._waits_for == BODY:
            self._bytes += len(data)
        try:
            self._parser.feed(data)
        except HeadraceError as error:
            self._refuse(error)
            return
        if self._parser.is_in_body:
            if self._waits_for != BODY:
                self._bytes = 0
                self._wait_for(BODY)
        elif self._task is not None:
            # The deadline of a head begins with its turn.
            self._waits_for, self._deadline_s = NOTHING, inf
        elif self._parser.is_in_head:
            if self._waits_for != HEAD:
                self._wait_for(HEAD)
        elif self._waits_for == BODY:
            # The rest of a body whose request was answered before its end.
            self._wait_for(IDLE)

    def pause_writing(self) -> None:
        """Start no further response until the peer has read."""
        self.is_write_paused = True

    def resume_writing(self) -> None:
        """Continue to answer."""
        self.is_write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        if self._task is None and self._queue:
            self._start_next()

    # Called by the parser

    def take_head(self, head: RequestHead) -> None:
        """Start a request, or let it wait for its turn."""
        request: FastCall | Exchange | None = self._shared.fast.find(head)
        if request is None:
            request = self._receiving = self._exchange_of(head)
        if self._task is None and not self._queue and not self.is_write_paused:
            self._start(request)
        else:
            self._queue.append(request)
            self.pause_reading()

    def take_body(self, data: bytes) -> None:
        """Pass on a part of the body."""
        if self._receiving is not None:
            self._receiving.add_body(data)

    def take_end(self) -> None:
        """Note the end of a request."""
        if self._receiving is not None:
            self._receiving.end_body()
            self._receiving = None

    # Called by an exchange

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is closed."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def date_line(self) -> bytes:
        """The Date field."""
        return self._shared.date_line()

    async def wait_writable(self) -> None:
        """Wait until the peer has read enough, or the connection ended."""
        if self._writable is None:
            self._writable = asyncio.Event()
        await self._writable.wait()

    def pause_reading(self) -> None:
        """Stop reading."""
        if not self._is_read_paused and not self._transport.is_closing():
            self._is_read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again, unless another request waits."""
        if self._is_read_paused and not self._queue and not self._transport.is_closing():
            self._is_read_paused = False
            self._transport.resume_reading()

    def is_last_response(self) -> bool:
        """Whether the server closes this connection after the current response."""
        return self._shared.is_draining and not self._queue and not self._parser.is_in_head

    # Called by the server

    @property
    def eviction_rank(self) -> int | None:
        """0: idle; 1: incomplete head, or a response that is not read; None: in use."""
        if self._task is not None or (self._parser.is_in_body and not self._is_refused):
            return None
        if self._is_refused:
            return 0
        return 1 if self._parser.is_in_head or self.is_write_paused else 0

    def evict(self) -> None:
        """Close at once to make room for a new connection."""
        self._stop_timer()
        self._transport.abort()

    def drain(self, *, closes_idle: bool) -> None:
        """End after the current requests; close an endless response, or an idle one, at once."""
        exchange = self._exchange
        is_idle = self._task is None and not (self._parser.is_in_head or self._parser.is_in_body)
        if (exchange is not None and ENDLESS in exchange.scope) or (closes_idle and is_idle):
            self._transport.close()

    def cancel(self) -> None:
        """Cancel the current request, which is answered with an error if possible."""
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()
        else:
            self._transport.close()

    def abort(self) -> None:
        """Close without waiting for anything."""
        self._transport.abort()

    # Requests

    def _exchange_of(self, head: RequestHead) -> Exchange:
        return Exchange(self, head, scope_of_request(head, self._client, self._server))

    def _start(self, request: FastCall | Exchange) -> None:
        if type(request) is FastCall:
            work = self._answer_fast(request)
        else:
            assert type(request) is Exchange
            self._exchange = request
            work = self._answer(request)
        self._task = self._loop.create_task(work)

    def _start_next(self) -> None:
        """Start the next request, or send the refusal after the last."""
        if self.is_write_paused:
            return
        request = self._queue.popleft()
        if isinstance(request, bytes):
            self._end_with(request)
            return
        self._start(request)

    async def _answer_fast(self, call: FastCall) -> None:
        try:
            reply = await self._shared.fast.answer(call)
        except Exception as error:  # noqa: BLE001 - a fault must not leave the connection waiting
            _log.error("response_broken", path=call.route.template, exc_info=error)
            self._transport.abort()
            self._finish(is_last=True)
            return
        if reply is None:
            exchange = self._exchange = self._exchange_of(call.head)
            if CHARGE in call.scope:
                exchange.scope[CHARGE] = call.scope[CHARGE]
            exchange.end_body()
            await self._answer(exchange)
            return
        is_last = not call.head.keep_alive or reply.is_last
        if not is_last and self.is_last_response():
            is_last = True
        self._write_reply(reply, is_last=is_last)
        self._finish(is_last=is_last)

    def _write_reply(self, reply: FastReply, *, is_last: bool) -> None:
        if self._transport.is_closing():
            return
        end = b"connection: close\r\n\r\n" if is_last and not reply.is_last else b"\r\n"
        date = self._shared.date_line()
        self._transport.write(
            b"".join([STATUS_LINES[reply.status], date, *reply.lines, end, reply.body])
        )

    async def _answer(self, exchange: Exchange) -> None:
        await exchange.run(self._shared.app)
        self._exchange = None
        if not exchange.is_answered and not self._is_refused:
            # The peer must not take a part of a response for the whole.
            self._transport.close()
        self._finish(is_last=exchange.is_last)

    def _finish(self, *, is_last: bool) -> None:
        """Continue after a response: with the next request, with a deadline, or with the close."""
        self._task = None
        if self._transport.is_closing():
            self._shared.open.discard(self)
        elif self._is_refused and not self._queue:
            return
        elif is_last:
            self._close()
        elif self._queue:
            self._start_next()
        else:
            self.resume_reading()
            if self._parser.is_in_body:
                return
            self._wait_for(HEAD if self._parser.is_in_head else IDLE)

    # Refusals and the end

    def _refuse(self, error: HeadraceError) -> None:
        """Answer `error` in its turn, parse nothing more, and close."""
        self._is_refused = True
        refusal = error_bytes(error)
        broken, self._receiving = self._receiving, None
        if broken is not None and (broken is self._exchange or broken.is_answered):
            broken.disconnect()
            self._end_with(b"" if broken.is_started else refusal)
            return
        if broken is not None:
            self._queue.pop()
        if self._task is None and not self._queue:
            self._end_with(refusal)
        else:
            self._queue.append(refusal)

    def _end_with(self, last_bytes: bytes) -> None:
        self.write(last_bytes)
        self._linger()

    def _close(self) -> None:
        """Close, unless the peer still sends."""
        self._queue.clear()
        if self._parser.is_in_body or self._is_read_paused:
            self._linger()
        else:
            self._transport.close()

    def _linger(self) -> None:
        """Close after LINGER_S, dropping what arrives until then."""
        if self._transport.is_closing():
            return
        self._is_refused, self._bytes = True, 0
        self.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._wait_for(LINGER)

    def _drop(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes > LINGER_BYTES_MAX:
            self._transport.abort()

    # Deadlines

    def _wait_for(self, what: int) -> None:
        self._waits_for = what
        self._deadline_s = at_s = self._loop.time() + self._shared.limits_s[what]
        # A timer that is due earlier finds the new deadline, so most requests need no timer.
        if at_s < self._timer_at_s:
            self._set_timer(at_s)

    def _set_timer(self, at_s: float) -> None:
        self._stop_timer()
        self._timer_at_s = at_s
        self._timer = self._loop.call_at(at_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at_s = None, inf

    def _on_timer(self) -> None:
        self._timer, self._timer_at_s = None, inf
        if self._transport.is_closing() or self._deadline_s == inf:
            return
        if self._loop.time() + TIMER_S < self._deadline_s:
            self._set_timer(self._deadline_s)
            return
        if self._waits_for == HEAD:
            limit_s = self._limits.head_timeout_s
            self._refuse(RequestTooSlow(f"the head of the request took longer than {limit_s:g} s"))
        elif self._waits_for == BODY:
            self._check_sender()
        else:
            self._transport.close()

    def _check_sender(self) -> None:
        # Reading pauses while the handler is slow, which is no stall of the sender.
        if self._bytes < STALL_BYTES_MIN and not self._is_read_paused:
            limit_s = self._limits.body_stall_s
            self._refuse(RequestTooSlow(f"the body sent less than 4 KiB in {limit_s:g} s"))
            return
        self._bytes = 0
        self._wait_for(BODY)
