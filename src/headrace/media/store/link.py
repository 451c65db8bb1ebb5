"""A worker's end of the filler's socket: questions that outlive a filler.

A filler that dies takes no question with it: all that wait are asked again when the next one listens, which is tried every
RETRY_S. Whoever waits longer than the time limit gets FillerAway, which is a StoreUnavailable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.media.model import ObjectUnknown, SourceCut, StoreUnavailable
from headrace.media.store.errors import (
    CommandUnknown,
    DiskRefused,
    DiskTooSmall,
    DiskUnknown,
    FillerAway,
)
from headrace.media.store.wire import (
    SOCKET_NAME,
    STREAM_BYTES,
    Answered,
    Command,
    Failed,
    Reply,
    ToFiller,
    encode,
    read_reply,
    socket_address,
)

log = logger(__name__)
RETRY_S: Final = 0.1
UNTOLD_MAX: Final = 100
_CONNECT_S: Final = 2.0
_KINDS: Final[dict[str, type[HeadraceError]]] = {
    kind.code: kind
    for kind in (
        ObjectUnknown,
        SourceCut,
        StoreUnavailable,
        DiskRefused,
        DiskTooSmall,
        DiskUnknown,
        CommandUnknown,
    )
}


class Link:
    """Questions under way; connects when there are some."""

    def __init__(self, run: Path, *, timeout_s: float) -> None:
        self._path = run / SOCKET_NAME
        self._timeout_s = timeout_s
        self._calls = 0
        self._waiting: dict[int, tuple[ToFiller, asyncio.Future[Reply]]] = {}
        self._untold: list[ToFiller] = []
        self._writer: asyncio.StreamWriter | None = None
        self._talk: asyncio.Task[None] | None = None

    async def ask(self, make: Callable[[int], ToFiller]) -> Reply:
        """The answer to `make(call)`. Raises: FillerAway, and the error that the filler met."""
        self._calls += 1
        call = self._calls
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        message = make(call)
        self._waiting[call] = message, answer
        try:
            if self._writer is not None:
                self._writer.write(encode(message))
            else:
                self._begin()
            async with asyncio.timeout(self._timeout_s):
                reply = await answer
        except TimeoutError as error:
            raise FillerAway(
                f"the filler of this node did not answer within {self._timeout_s:g} s: try again later",
                retry_after_s=1,
            ) from error
        finally:
            self._waiting.pop(call, None)
        if isinstance(reply, Failed):
            raise _error_of(reply)
        return reply

    def tell(self, message: ToFiller) -> None:
        """Say something that needs no answer, as soon as somebody listens."""
        if self._writer is not None:
            self._writer.write(encode(message))
        elif len(self._untold) < UNTOLD_MAX:
            self._untold.append(message)
            self._begin()

    async def close(self) -> None:
        """End; who waits gets FillerAway."""
        if self._talk is not None:
            self._talk.cancel()
            await asyncio.gather(self._talk, return_exceptions=True)
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(FillerAway("this process is being stopped", retry_after_s=1))

    def _begin(self) -> None:
        if self._talk is None:
            self._talk = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Talk as long as somebody waits, or the filler stays."""
        try:
            while self._waiting or self._untold:
                try:
                    await self._talk_once()
                except (EOFError, OSError, TimeoutError):
                    await asyncio.sleep(RETRY_S)
                except ValueError as error:
                    log.warning("filler_not_understood", error=str(error))
                    await asyncio.sleep(RETRY_S)
        finally:
            self._talk = None

    async def _talk_once(self) -> None:
        with socket_address(self._path) as address:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(address, limit=STREAM_BYTES)
        self._writer = writer
        try:
            untold, self._untold = self._untold, []
            for message in [*untold, *(message for message, _ in self._waiting.values())]:
                writer.write(encode(message))
            while True:
                reply = await read_reply(reader)
                _, answer = self._waiting.get(reply.call, (None, None))
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        finally:
            self._writer = None
            writer.close()


async def control(path: Path, command: str, /, *, timeout_s: float = 60.0, **arguments: Any) -> Any:
    """Have the filler that listens on `path` do `command`; see `commands`. Returns its JSON value.

    Raises: FillerAway, and whatever error the command met.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reply = await _ask_once(path, Command(1, command, arguments))
    except (EOFError, OSError) as error:
        raise FillerAway(
            f"no filler answers on {path}: start the node (`headrace media serve`, with media.disks set)"
        ) from error
    if isinstance(reply, Failed):
        raise _error_of(reply)
    assert isinstance(reply, Answered), f"a command is answered, not {reply}"
    return reply.value


async def _ask_once(path: Path, message: Command) -> Reply:
    with socket_address(path) as address:
        reader, writer = await asyncio.open_unix_connection(address, limit=STREAM_BYTES)
    try:
        writer.write(encode(message))
        return await read_reply(reader)
    finally:
        writer.close()


def _error_of(failed: Failed) -> HeadraceError:
    kind = _KINDS.get(failed.code, FillerAway)
    return kind(failed.text, retry_after_s=failed.retry_after_s)
