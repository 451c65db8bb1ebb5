"""One client: heads in, answers out, in order, at the pace the client sets.

A connection is a small state machine driven by edges of readiness, without a thread or a coroutine:

    READING  -> a head is complete -> SENDING, or OPENING where the store is no folder
    OPENING  -> the object is known and its first block here -> SENDING
    SENDING  -> the answer is out -> READING, or LINGERING when the connection ends with it
    LINGERING: our side is shut; what still comes in is thrown away for a moment. Closing at once would
               send a reset, and a reset may destroy an answer that the client has not read yet.

While an answer goes out nothing is read, so pipelined requests wait in the kernel and are answered in
order; what is held of them here is bounded by one receive. A turn moves at most TURN_BYTES, then the
next client has its turn. A body that cannot be completed rightly is cut by a reset, never ended.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, Protocol

from penstock.engines.blobs import Blobs
from penstock.kernel.errors import PenstockError
from penstock.kernel.logs import logger
from penstock.kernel.metrics import bound
from penstock.media import answers, sources
from penstock.media.model import (
    CUTS,
    REQUESTS,
    SENT_BYTES,
    STATUSES,
    TTFB,
    BadRequest,
    HeadTimeout,
    MediaConfig,
    MethodNotAllowed,
    PreconditionFailed,
    RangeUnsatisfiable,
    Shape,
    SourceCut,
)
from penstock.media.ranges import Decision, decide
from penstock.media.requests import HeadReader, Request, key_of

log = logger(__name__)
RECEIVE_BYTES: Final = 16 * 1024
TURN_BYTES: Final = 1024 * 1024
REQUEST_COST_BYTES: Final = 16 * 1024
"""What a request weighs in a turn beside its bytes: about the time 16 KiB take."""
LINGER_S: Final = 2.0
LINGER_BYTES: Final = 256 * 1024
_GONE: Final = select.EPOLLERR | select.EPOLLHUP
_RESET: Final = struct.pack("ii", 1, 0)
_ANSWERED: Final = {s: bound(REQUESTS, "media_requests_total", status=str(s)) for s in STATUSES}
_SENT: Final = {s: bound(SENT_BYTES, "media_bytes_total", source=s) for s in ("disk", "origin")}


class State(enum.Enum):
    """Where a connection stands; its moves are drawn above."""

    READING = "reading"
    OPENING = "opening"
    SENDING = "sending"
    LINGERING = "lingering"
    CLOSED = "closed"


class Host(Protocol):
    """What a connection needs of the node that holds it."""

    @property
    def config(self) -> MediaConfig: ...

    @property
    def blobs(self) -> Blobs: ...

    @property
    def readers(self) -> Executor: ...

    @property
    def is_stopping(self) -> bool: ...

    def now_s(self) -> float: ...

    def watch(self, connection: Connection, delay_s: float) -> None: ...

    def take_turn_later(self, connection: Connection) -> None: ...

    def guard(self, connection: Connection, step: Callable[[], None]) -> None: ...

    def forget(self, connection: Connection) -> None: ...


class Connection:
    """One client's socket and where its answer stands."""

    __slots__ = (
        "_acked_mark",
        "_began_s",
        "_body",
        "_heads",
        "_host",
        "_is_first_byte_out",
        "_keeps_alive",
        "_lingered_bytes",
        "_opening",
        "_out",
        "_sent_bytes",
        "_socket",
        "bucket",
        "deadline_s",
        "fd",
        "is_queued",
        "state",
    )

    def __init__(self, client: socket.socket, host: Host) -> None:
        self.fd = client.fileno()
        self.state = State.READING
        self.is_queued = False
        self.deadline_s, self.bucket = 0.0, 0
        self._socket = client
        self._host = host
        self._heads = HeadReader()
        self._out = memoryview(b"")
        self._body: sources.Body | None = None
        self._opening: asyncio.Task[None] | None = None
        self._keeps_alive = True
        self._is_first_byte_out = True
        self._began_s = 0.0
        self._sent_bytes = self._acked_mark = self._lingered_bytes = 0
        host.watch(self, host.config.header_timeout_s)

    def on_event(self, mask: int) -> None:
        """The socket became ready for more, or is gone."""
        if mask & _GONE and self.state is State.LINGERING:
            # Both sides are shut, while the answer's end may still be in the kernel: no reset here.
            self.close()
        elif mask & _GONE:
            self.cut("client")
        else:
            self.advance()

    def advance(self) -> None:
        """Go as far as the socket, the source and this turn's share allow."""
        share_bytes = TURN_BYTES
        while self.state is not State.CLOSED and self.state is not State.OPENING:
            if share_bytes <= 0:
                self._host.take_turn_later(self)
                return
            if self.state is State.SENDING:
                moved = self._send(share_bytes)
            else:
                moved = self._read() if self.state is State.READING else self._linger()
            if moved is None:
                return
            share_bytes -= moved

    def refuse(self, error: PenstockError) -> None:
        """Answer `error` and end: the bytes after it have no known meaning."""
        self._answer_problem(error, None, keeps_alive=False)

    def expire(self) -> None:
        """The deadline of this state has come."""
        if self.state is State.SENDING:
            self._require_progress()
        elif self.state is State.READING and self._heads.begun:
            self.refuse(HeadTimeout("the request's head was not complete in time"))
            self.advance()
        elif self.state is State.OPENING:
            self.cut("source")
        else:
            self.close()

    def stop(self) -> None:
        """Take no further request; an answer under way goes on."""
        if self.state is State.READING and not self._heads.begun:
            self.close()

    def cut(self, reason: str) -> None:
        """Reset the connection; counted when an answer was under way."""
        if self.state is State.CLOSED:
            return
        if self.state in (State.SENDING, State.OPENING):
            bound(CUTS, "media_cuts_total", reason=reason).inc()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()

    def close(self) -> None:
        """Give everything back; safe to call again."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        if self._opening is not None:
            self._opening.cancel()
        self._drop_body()
        self._host.forget(self)
        self._socket.close()

    def _read(self) -> int | None:
        """Take the next request and begin its answer, or receive more; None: wait for the socket."""
        try:
            request = self._heads.take()
        except PenstockError as error:
            self._began_s = self._host.now_s()
            self.refuse(error)
            return REQUEST_COST_BYTES
        if request is not None:
            self._began_s = self._host.now_s()
            self._answer(request)
            return REQUEST_COST_BYTES
        was_begun = self._heads.begun
        data = self._receive()
        if data is None:
            return None
        self._heads.feed(data)
        # The first head's deadline runs from the accept, and no byte of any head moves it.
        if not was_begun and self._sent_bytes:
            self._host.watch(self, self._host.config.header_timeout_s)
        return len(data)

    def _receive(self) -> bytes | None:
        """What has come in, or None: nothing now, or the client is gone and so is this connection."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self.close()
            return None
        return data

    def _answer(self, request: Request) -> None:
        try:
            if request.method not in ("GET", "HEAD"):
                raise MethodNotAllowed("objects are only read here: use GET or HEAD")
            if request.has_body:
                raise BadRequest("the request has a body: a GET or HEAD goes without one")
            key = key_of(request.target)
            if self._host.blobs.folder is None:
                self._open_origin(request, key)
            else:
                self._open_file(request, key)
        except PenstockError as error:
            keeps_alive = request.keeps_alive and not request.has_body
            self._answer_problem(error, request, keeps_alive=keeps_alive)

    def _open_file(self, request: Request, key: str) -> None:
        folder = self._host.blobs.folder
        assert folder is not None
        descriptor, shape = sources.open_object(folder, key)
        decision = decide(request.method, request.fields, shape)
        body = sources.FileBody(descriptor, decision, readers=self._host.readers, wake=self._wake)
        self._answer_object(
            request, key, shape, decision=decision, body=body, cache_status=answers.FROM_DISK
        )

    def _open_origin(self, request: Request, key: str) -> None:
        self.state = State.OPENING
        self._host.watch(self, 3 * self._host.config.origin_timeout_s)
        coming = self._find_origin(request, key)
        self._opening = asyncio.get_running_loop().create_task(coming)

    async def _find_origin(self, request: Request, key: str) -> None:
        blobs, timeout_s = self._host.blobs, self._host.config.origin_timeout_s
        body: sources.OriginBody | None = None
        try:
            shape = await sources.find_object(blobs, key, timeout_s=timeout_s)
            decision = decide(request.method, request.fields, shape)
            body = sources.OriginBody(
                blobs, key, shape, decision, timeout_s=timeout_s, wake=self._wake
            )
            if decision.length_bytes and request.method == "GET":
                await body.start()
        except PenstockError as error:
            self._opening = None
            self._answer_problem(error, request, keeps_alive=request.keeps_alive)
        else:
            self._opening = None
            self._answer_object(
                request, key, shape, decision=decision, body=body, cache_status=answers.FROM_ORIGIN
            )
        self._host.guard(self, self.advance)

    def _answer_object(
        self,
        request: Request,
        key: str,
        shape: Shape,
        *,
        decision: Decision,
        body: sources.Body,
        cache_status: str,
    ) -> None:
        keeps_alive = request.keeps_alive and not self._host.is_stopping
        if request.method == "HEAD" or not decision.length_bytes:
            body.close()
        else:
            self._body = body
        if decision.status == 412:
            error: PenstockError = PreconditionFailed(
                "the object is another version than the request names: read it again"
            )
            self._answer_problem(error, request, keeps_alive=keeps_alive)
        elif decision.status == 416:
            error = RangeUnsatisfiable(f"the range has none of the {shape.size_bytes} bytes")
            extra = (("Content-Range", f"bytes */{shape.size_bytes}"),)
            self._answer_problem(error, request, keeps_alive=keeps_alive, extra=extra)
        else:
            head = answers.object_head(
                request, decision, shape,
                key=key, cache_status=cache_status, keeps_alive=keeps_alive,
            )  # fmt: skip
            self._begin(decision.status, head, keeps_alive=keeps_alive)

    def _answer_problem(
        self,
        error: PenstockError,
        request: Request | None,
        *,
        keeps_alive: bool,
        extra: tuple[tuple[str, str], ...] = (),
    ) -> None:
        if isinstance(error, MethodNotAllowed):
            extra = (("Allow", "GET, HEAD"),)
        keeps_alive = keeps_alive and not self._host.is_stopping
        if error.status >= 500:
            log.warning("request_refused", code=error.code, cause=repr(error.__cause__))
        data = answers.problem(error, request, keeps_alive=keeps_alive, extra=extra)
        self._begin(error.status, data, keeps_alive=keeps_alive)

    def _begin(self, status: int, data: bytes, *, keeps_alive: bool) -> None:
        _ANSWERED[status].inc()
        self.state = State.SENDING
        self._out = memoryview(data)
        self._keeps_alive = keeps_alive
        self._is_first_byte_out = False
        self._acked_mark = self._sent_bytes
        self._host.watch(self, self._host.config.send_timeout_s)

    def _send(self, share_bytes: int) -> int | None:
        """Move what the socket takes; None: wait for it or for the source."""
        try:
            if self._out:
                return self._send_head()
            if self._body is None:
                self._finish_answer()
                return 0
            moved = self._body.send(self.fd, share_bytes)
        except BlockingIOError:
            return None
        except SourceCut as error:
            log.warning("body_cut", reason=error.text, cause=repr(error.__cause__))
            self.cut("source")
            return None
        except OSError:
            self.cut("client")
            return None
        self._sent_bytes += moved
        _SENT[self._body.source].inc(moved)
        if not self._body.left_bytes:
            self._drop_body()
        return moved or None

    def _send_head(self) -> int:
        # MSG_MORE joins the head and the first bytes of the body in one segment.
        sent = self._socket.send(self._out, socket.MSG_MORE if self._body is not None else 0)
        self._out = self._out[sent:]
        self._sent_bytes += sent
        if not self._is_first_byte_out:
            self._is_first_byte_out = True
            TTFB.observe(self._host.now_s() - self._began_s)
        return sent

    def _finish_answer(self) -> None:
        if self._keeps_alive and not self._host.is_stopping:
            self.state = State.READING
            config = self._host.config
            begun = self._heads.begun
            self._host.watch(self, config.header_timeout_s if begun else config.idle_timeout_s)
            return
        self.state = State.LINGERING
        self._host.watch(self, LINGER_S)
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()

    def _linger(self) -> int | None:
        data = self._receive()
        if data is None:
            return None
        self._lingered_bytes += len(data)
        if self._lingered_bytes > LINGER_BYTES:
            self.close()
        return len(data)

    def _require_progress(self) -> None:
        """Cut a client that takes too little, judged by what it acknowledged.

        What the kernel has taken says nothing: its buffer may grow to megabytes, and a client that
        plays a track at 32 KiB/s needs over a minute for those.
        """
        config = self._host.config
        queued = struct.unpack("i", fcntl.ioctl(self.fd, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        acked = self._sent_bytes - queued
        is_waiting = self._body is not None and self._body.is_waiting
        if is_waiting or acked - self._acked_mark >= config.send_progress_bytes:
            self._acked_mark = acked
            self._host.watch(self, config.send_timeout_s)
        else:
            self.cut("stalled")

    def _wake(self) -> None:
        """The source has more; called from the loop, outside a turn."""
        self._host.guard(self, self.advance)

    def _drop_body(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None
