"""One client connection: requests in, answers out, in order, at the client's pace.

A connection is a state machine driven by edge-triggered readiness, without a thread or a coroutine:

    READING   -> a head is complete -> SENDING, or OPENING if something must be awaited
    OPENING   -> the object and its first block are available -> SENDING
    SENDING   -> the answer is sent -> READING, or LINGERING if the connection ends with it
    LINGERING: this side is shut down and input is discarded for a moment. Closing at once would
               send a reset, which may destroy an answer that the client has not read yet.

Nothing is read while an answer is sent, so pipelined requests wait in the kernel and are answered
in order. At most QUANTUM_BYTES are sent before the next client is served. A body that cannot be
completed correctly is cut by a reset.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import select
import struct
import termios
from typing import TYPE_CHECKING, Final

from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.metrics import bound
from headrace.media import answers
from headrace.media.errors import HeadTimeout, SourceCut
from headrace.media.model import CUTS, DEMAND_STALLS, TTFB
from headrace.media.requests import HeadReader, Request, require_read
from headrace.media.worker.bodies import Body
from headrace.media.worker.native_library import PlaneEvent
from headrace.media.worker.open_request import Answer, OpenRequest, render_head, render_plain
from headrace.media.worker.socket_io import Channel, RateLimit
from headrace.media.worker.timing import ANSWERED, SENT, Exchange

if TYPE_CHECKING:
    from headrace.media.worker.node import Node

log, often = logger(__name__), SparseLogger(logger(__name__))
RECEIVE_BYTES: Final = 16 * 1024
QUANTUM_BYTES: Final = 1024 * 1024
REQUEST_COST_BYTES: Final = 16 * 1024
"""The cost of a request in a quantum besides its bytes."""
LINGER_S: Final = 2.0
LINGER_BYTES: Final = 256 * 1024
HEALTH_TARGET: Final = "/healthz"
_GONE: Final = select.EPOLLERR | select.EPOLLHUP
_NOTHING: Final = memoryview(b"")


class State(enum.Enum):
    """A connection's state; the transitions are at the top of this module."""

    READING = "reading"
    OPENING = "opening"
    SENDING = "sending"
    LINGERING = "lingering"
    CLOSED = "closed"


# Module constants: access to members of an enumeration is slow, and each request needs ten.
READING, OPENING, SENDING, LINGERING, CLOSED = State


class Connection:
    """One client's socket and the state of its answer."""

    __slots__ = (
        "_acked_mark",
        "_begun_natively",
        "_bodies",
        "_channel",
        "_exchange",
        "_heads",
        "_is_head_due",
        "_is_pausing",
        "_keeps_alive",
        "_lingered_bytes",
        "_opening",
        "_out",
        "_rate_limit",
        "_sent_bytes",
        "_worker",
        "deadline_s",
        "fd",
        "is_leaving",
        "is_queued",
        "state",
        "timer",
    )

    def __init__(self, channel: Channel, worker: Node) -> None:
        self.fd = channel.fd
        self.state = READING
        self.is_queued = self.is_leaving = False
        self.deadline_s = 0.0
        self.timer: asyncio.TimerHandle | None = None
        """Both belong to `Node.watch`."""
        self._channel = channel
        self._worker = worker
        self._heads = HeadReader()
        self._exchange: Exchange | None = None
        self._out = _NOTHING
        self._bodies: list[Body] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._rate_limit: RateLimit | None = None
        self._is_pausing = False
        self._is_head_due = True
        self._keeps_alive = True
        self._sent_bytes = self._acked_mark = self._lingered_bytes = 0
        self._begun_natively: tuple[int, int] | None = None
        """The log entry of an answer of the native plane, and the bytes that it had sent."""
        worker.watch(self, worker.config.header_timeout_s)

    def take_over(self, event: PlaneEvent, body: Body | None) -> None:
        """Continue a connection of the native data plane, or with `body` an answer's rest."""
        self._sent_bytes = self._acked_mark = event.sent_bytes
        self._heads.feed(event.received)
        if event.entry:
            self._begun_natively = event.entry, event.sent_bytes
        if body is not None:
            self._rate_limit = RateLimit(event.rate, self._worker.now_s()) if event.rate else None
            self.state, self._bodies = SENDING, [body]
            self._worker.watch(self, self._worker.config.send_timeout_s)

    def leave(self) -> tuple[int, int, int]:
        """End this object but not the connection.

        Return its descriptor, its TLS state in the native plane, and the bytes sent.
        """
        self.is_leaving = True
        self._forget()
        return *self._channel.detach(), self._sent_bytes

    def on_event(self, mask: int) -> None:
        """Handle a readiness event of the socket."""
        self._channel.is_drained = False
        if mask & _GONE and self.state is LINGERING:
            # Both sides are shut down, but the kernel may still send the answer's end: do not
            # reset.
            self.close()
        elif mask & _GONE:
            self.cut("client")
        else:
            self.advance()

    def advance(self) -> None:
        """Proceed as far as the socket, the source and the quantum allow."""
        share_bytes = QUANTUM_BYTES
        while (state := self.state) is not CLOSED and state is not OPENING:
            if share_bytes <= 0:
                self._worker.resume_later(self)
                return
            if state is SENDING:
                moved = self._send(share_bytes)
            else:
                moved = self._read() if state is READING else self._linger()
            if moved is None:
                return
            share_bytes -= moved

    def refuse(self, error: HeadraceError) -> None:
        """Answer with `error` and end the connection: the following bytes cannot be interpreted."""
        if self._exchange is None:
            self._exchange = self._worker.begin_exchange(self._worker.now_s())
        self._answer_problem(error, None, keeps_alive=False)

    def expire(self) -> None:
        """Handle the deadline of the current state."""
        if self.state is SENDING:
            self._require_progress()
        elif self.state is READING and self._heads.begun:
            self.refuse(HeadTimeout("the request's head was not complete in time"))
            self.advance()
        elif self.state is OPENING:
            self.cut("source")
        else:
            self.close()

    def stop(self) -> None:
        """Accept no further requests; an answer in progress continues."""
        if self.state is READING:
            # Closing over a received request would reset the connection instead of answering.
            self._channel.is_drained = False
            self.advance()
        if self.state is READING and not self._heads.begun:
            self.close()

    def cut(self, reason: str) -> None:
        """Reset the connection. Counted if an answer was in progress."""
        if self.state is CLOSED:
            return
        if self.state in (SENDING, OPENING):
            bound(CUTS, "media_cuts_total", reason=reason).inc()
            self._end_exchange(reason)
        self._forget()
        self._channel.reset()

    def close(self) -> None:
        """Close the connection and release its resources. Safe to call again."""
        if self.state is not CLOSED:
            self._forget()
            self._channel.close()

    def _forget(self) -> None:
        self.state = CLOSED
        if self._opening is not None:
            self._opening.cancel()
        for body in self._bodies or ():
            body.close()
        self._bodies = None
        self._worker.forget(self)

    def _read(self) -> int | None:
        """Start the next answer, or receive more; None: wait for the socket."""
        if self._heads.begun:
            if self._take():
                return REQUEST_COST_BYTES
            # The first head's deadline starts at the accept; received bytes do not extend it.
            if not self._is_head_due:
                self._is_head_due = True
                self._worker.watch(self, self._worker.config.header_timeout_s)
        data = self._receive()
        if data is None:
            return None
        self._heads.feed(data)
        return len(data)

    def _take(self) -> bool:
        """Start the answer to a complete head. Return whether there was one."""
        began_s = self._worker.now_s()
        try:
            request = self._heads.take()
        except HeadraceError as error:
            self.refuse(error)
            return True
        if request is None:
            return False
        self._exchange = self._worker.begin_exchange(began_s)
        self._answer(request, self._exchange)
        return True

    def _receive(self) -> bytes | None:
        """The received bytes; None: there are none, or the connection is closed."""
        if self._channel.is_drained:
            return None
        try:
            data = self._channel.receive(RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self.close()
            return None
        return data

    def _answer(self, request: Request, exchange: Exchange) -> None:
        exchange.mark("parse")
        exchange.request = request
        try:
            require_read(request)
            if request.method == "OPTIONS" or request.target == HEALTH_TARGET:
                self._answer_plain(request)
                return
            context = self._worker.context
            admitted = exchange.admit(context.admit(request, self._channel), request.method)
            exchange.mark("verify")
            opening = OpenRequest(context, request, admitted, wake=self._wake)
            answer = opening.now()
            exchange.mark("find")
        except HeadraceError as error:
            keeps_alive = request.keeps_alive and not request.has_body
            self._answer_problem(error, request, keeps_alive=keeps_alive)
        else:
            if answer is not None:
                self._answer_object(request, exchange, answer)
            else:
                self._open_later(request, exchange, opening)

    def _open_later(self, request: Request, exchange: Exchange, opening: OpenRequest) -> None:
        self.state = OPENING
        self._worker.watch(self, 3 * self._worker.config.origin_timeout_s)
        coming = self._open(request, exchange, opening)
        self._opening = asyncio.get_running_loop().create_task(coming)

    async def _open(self, request: Request, exchange: Exchange, opening: OpenRequest) -> None:
        try:
            answer = await opening.later()
        except HeadraceError as error:
            self._opening = None
            self._answer_problem(error, request, keeps_alive=request.keeps_alive)
        except Exception:
            self._opening = None
            log.exception("request_failed")
            self.cut("source")
        else:
            self._opening = None
            exchange.mark("wait")
            self._answer_object(request, exchange, answer)
        self._wake()

    def _answer_object(self, request: Request, exchange: Exchange, answer: Answer) -> None:
        keeps_alive = request.keeps_alive and not self._worker.is_stopping
        decision, shape = answer.decision, answer.shape
        admitted = exchange.admitted
        assert admitted is not None, "a request is admitted before it is opened"
        exchange.cache_status = answer.cache_status
        self._bodies = answer.bodies or None
        problem = answers.decision_problem(decision, shape)
        if problem is not None:
            error, extra = problem
            self._answer_problem(error, request, keeps_alive=keeps_alive, extra=extra)
            return
        if admitted.rights.rate is not None:
            self._rate_limit = RateLimit(admitted.rights.rate, self._worker.now_s())
        head = render_head(self._worker.context, request, admitted, answer, keeps_alive=keeps_alive)
        self._begin(decision.status, head, keeps_alive=keeps_alive)
        if admitted.rights.tag is None and admitted.variant is None:
            self._worker.note_answer(admitted.key, shape, is_hop=admitted.hop is not None)

    def _answer_plain(self, request: Request) -> None:
        stops = self._worker.is_stopping
        status, data = render_plain(self._worker.context, request, is_stopping=stops)
        self._begin(status, data, keeps_alive=request.keeps_alive and not stops)

    def _answer_problem(
        self,
        error: HeadraceError,
        request: Request | None,
        *,
        keeps_alive: bool,
        extra: answers.Fields = (),
    ) -> None:
        admitted = self._exchange.admitted if self._exchange is not None else None
        if admitted is not None:
            extra = (*extra, *self._worker.context.proof(admitted.hop, "", 0, 0))
        keeps_alive = keeps_alive and not self._worker.is_stopping
        if error.status in (500, 503):
            often.warning("request_refused", code=error.code, cause=repr(error.__cause__))
        cors = self._worker.context.cors.lines(request.fields if request is not None else {})
        data = answers.problem(error, request, keeps_alive=keeps_alive, cors=cors, extra=extra)
        self._begin(error.status, data, keeps_alive=keeps_alive)

    def _begin(self, status: int, data: bytes, *, keeps_alive: bool) -> None:
        ANSWERED[status].inc()
        assert self._exchange is not None, "an answer belongs to a request"
        self._exchange.begin_sending(status, self._sent_bytes)
        request = self._exchange.request
        # Probes of balancers and nodes come every second and are no requests of clients.
        is_probe = request is not None and request.target == HEALTH_TARGET and status == 200
        if self._worker.access_log is not None and not is_probe:
            self._exchange.begin_entry(self._channel.peer(), data)
        self.state = SENDING
        self._out = memoryview(data)
        self._keeps_alive = keeps_alive
        self._worker.watch(self, self._worker.config.send_timeout_s)

    def _send(self, share_bytes: int) -> int | None:
        """Send what the socket takes; None: wait for the socket, the source or the rate limit."""
        try:
            if self._out:
                return self._send_head()
            if self._bodies is None:
                self._finish_answer()
                return 0
            return self._send_body(self._bodies, share_bytes)
        except BlockingIOError:
            return None
        except SourceCut as error:
            often.warning("body_cut", reason=error.text, cause=repr(error.__cause__))
            self.cut("source")
        except OSError:
            self.cut("client")
        return None

    def _send_head(self) -> int | None:
        sent = self._channel.send(self._out, is_more=self._bodies is not None)
        # Not an empty slice, which would keep the head in memory until the body is sent.
        self._out = self._out[sent:] if sent < len(self._out) else _NOTHING
        self._sent_bytes += sent
        exchange = self._exchange
        if exchange is not None and not exchange.is_first_byte_out:
            TTFB.observe(exchange.note_first_byte(self._worker.now_s()))
        return None if self._channel.is_full else sent

    def _send_body(self, bodies: list[Body], share_bytes: int) -> int | None:
        if self._is_pausing:
            return None
        if self._rate_limit is not None:
            share_bytes = min(share_bytes, self._rate_limit.allowed_bytes(self._worker.now_s()))
            if not share_bytes:
                self._is_pausing = True
                self._worker.resume_after(self, self._rate_limit.wait_s())
                return None
        body = bodies[0]
        moved = body.send(self._channel, share_bytes)
        if not moved:
            DEMAND_STALLS.inc()
            return None
        self._sent_bytes += moved
        SENT[body.source].inc(moved)
        if self._rate_limit is not None:
            self._rate_limit.spend(moved)
        if not body.left_bytes:
            bodies.pop(0).close()
            if not bodies:
                self._bodies = None
        return None if self._channel.is_full else moved

    def end_pause(self) -> None:
        """Continue after a pause for the rate limit."""
        self._is_pausing = False
        self.advance()

    def _finish_answer(self) -> None:
        self._end_exchange("done")
        self._rate_limit = None
        if self._keeps_alive and not self._worker.is_stopping:
            self.state = READING
            self._is_head_due = False
            self._worker.watch(self, self._worker.config.idle_timeout_s)
            if not self._heads.begun:
                self._worker.give_back(self)
            return
        self.state = LINGERING
        self._worker.watch(self, LINGER_S)
        try:
            self._channel.end()
        except OSError:
            self.close()

    def _end_exchange(self, outcome: str) -> None:
        exchange, self._exchange = self._exchange, None
        log = self._worker.access_log
        if log is not None and exchange is not None and exchange.entry is not None:
            log.end(exchange.entry, self._sent_bytes, self._worker.now_s())
        if log is not None and self._begun_natively is not None:
            entry, sent_bytes = self._begun_natively
            log.end_native(entry, self._sent_bytes - sent_bytes)
            self._begun_natively = None
        if exchange is not None:
            exchange.write_trace(outcome, self._sent_bytes)

    def _linger(self) -> int | None:
        data = self._receive()
        if data is None:
            return None
        self._lingered_bytes += len(data)
        if self._lingered_bytes > LINGER_BYTES:
            self.close()
        return len(data)

    def _require_progress(self) -> None:
        """Cut a client that reads too slowly, judged by the bytes it acknowledged.

        Bytes in the kernel's buffer do not count: it may grow to megabytes, and a client that plays
        a track at 32 KiB/s needs over a minute for those.
        """
        config = self._worker.config
        queued = struct.unpack("i", fcntl.ioctl(self.fd, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        acked = self._sent_bytes - queued
        wanted = config.send_progress_bytes
        if self._rate_limit is not None:
            wanted = min(wanted, self._rate_limit.expected_bytes(config.send_timeout_s))
        is_ours = self._is_pausing or (self._bodies is not None and self._bodies[0].is_waiting)
        if not is_ours and not queued:
            # The client has all sent bytes. A write may be short although the socket was not full,
            # for example after a signal. No edge will follow, so continue here.
            self._worker.watch(self, config.send_timeout_s)
            self.advance()
        elif is_ours or acked - self._acked_mark >= wanted:
            self._acked_mark = acked
            self._worker.watch(self, config.send_timeout_s)
        else:
            self.cut("stalled")

    def _wake(self) -> None:
        """Continue when the source has more bytes. Called by the loop, outside an epoch."""
        self._worker.resume(self)
