"""Declaring the queues: done by a fork of the zygote, since only there the code is, and it needs a loop to do it in."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

import msgspec

from headrace.jobs.agent.keeper import ZygoteKeeper
from headrace.jobs.errors import ApplicationBroken, NotDeclared
from headrace.jobs.slots.messages import LENGTH_BYTES
from headrace.jobs.slots.process import DECLARING, Declared, Refused

ANSWER_S: Final = 60.0
_decode: Final = msgspec.msgpack.Decoder(Declared | Refused).decode


async def declared_ids(keeper: ZygoteKeeper) -> dict[str, int]:
    """Declare what the code says; the ids of its queues by name.

    Raises: NotDeclared, worth another try; ApplicationBroken, where what it says cannot be stored.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        is_ordered = keeper.fork(DECLARING, theirs)
    if not is_ordered:
        ours.close()
        raise NotDeclared("there is no zygote at the moment")
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=2**22)
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await _answer(reader)
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
        raise NotDeclared(f"the process that declares them said nothing: {error!r}") from error
    finally:
        writer.close()
    if isinstance(answer, Declared):
        return answer.queues
    if answer.retryable:
        raise NotDeclared(answer.text)
    raise ApplicationBroken(f"{answer.text} [{answer.code}]", answer.exit_code)


async def _answer(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    return _decode(await reader.readexactly(length))
