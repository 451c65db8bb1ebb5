"""Valkey's function libraries: one a room, versioned in the name, loaded on every start.

A room's `lua/<room>_v<N>.lua` begins with `#!lua name=headrace_<room>_v<N>`. Releases overlap, so a
library is never changed in place: a new version gets a new name, and the old one is dropped one release
later. Loading is idempotent: the server is asked first, and only a library that differs is sent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, Final

from valkey.exceptions import ResponseError

from headrace.engines.multiplex import Multiplexer, ValkeyRefused
from headrace.engines.valkey import Valkey, ValkeyDown
from headrace.kernel.errors import Conflict

_HEADER: Final = re.compile(r"#!lua name=(headrace_\w+_v\d+)\n")


_UNFIT: Final = ("unknown command", "Error registering functions", "NOPERM")
"""Replies to FUNCTION that the same server gives again."""


class ValkeyUnfit(Conflict):
    """The server cannot run function libraries: it is too old, or its user may not load them."""

    code = "valkey.unfit"


@dataclass(frozen=True, slots=True)
class Library:
    """One Lua file."""

    name: str
    code: str


def find_libraries(packages: tuple[str, ...]) -> list[Library]:
    """Every library of `packages`; a room without a `lua` folder has none."""
    found = []
    for package in packages:
        folder = files(package).joinpath("lua")
        if not folder.is_dir():
            continue
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".lua"):
                code = file.read_text(encoding="utf-8")
                header = _HEADER.match(code)
                assert header, (
                    f"{package}/lua/{file.name} must begin with #!lua name=headrace_..._vN"
                )
                found.append(Library(header[1], code))
    return found


async def load_libraries(valkey: Valkey, packages: tuple[str, ...]) -> list[str]:
    """Load what is missing or differs, on every primary; return the names that were sent.

    Raises: ValkeyDown, ValkeyUnfit. A primary of a cluster that is away gets its functions when one of them is called there.
    """
    libraries, nodes = find_libraries(packages), await valkey.primaries()
    told = await asyncio.gather(
        *[_load(node.command, libraries) for node in nodes], return_exceptions=True
    )
    sent, failures = list[str](), list[ValkeyDown]()
    for names in told:
        if isinstance(names, ValkeyDown):
            _require_fit(names)
            failures.append(names)
        elif isinstance(names, BaseException):
            raise names
        else:
            sent += names
    if failures and len(failures) == len(nodes):
        raise failures[0]
    return list(dict.fromkeys(sent))


def _require_fit(error: ValkeyDown) -> None:
    """Tell a server that cannot run libraries from one that is away. Raises: ValkeyUnfit."""
    reply = str(error.__cause__) if isinstance(error.__cause__, ResponseError) else ""
    if any(sign in reply for sign in _UNFIT):
        raise ValkeyUnfit(
            f"Valkey refuses our function libraries ({reply[:120]}): use Valkey 7.2, Redis 7.0 or newer, and a"
            " user who may call FUNCTION"
        ) from error


async def _load(command: Callable[..., Awaitable[Any]], libraries: Sequence[Library]) -> list[str]:
    """The same on one server, which `command` asks."""
    sent = []
    for library in libraries:
        reply = await command("FUNCTION", "LIST", "LIBRARYNAME", library.name, "WITHCODE")
        if not any(library.code.encode() in entry for entry in reply):
            await command("FUNCTION", "LOAD", "REPLACE", library.code)
            sent.append(library.name)
    return sent


class Functions:
    """The functions of one room over the shared connection, loaded again where the server has lost them.

    So does a primary that joined a cluster, or was never seen before: the call itself finds that out.
    """

    def __init__(self, line: Multiplexer, package: str) -> None:
        self._line = line
        self._package = package

    async def call(
        self, function: str, keys: list[str], arguments: Sequence[Any], *, reads: bool = False
    ) -> Any:
        """Call a function. One that is unknown did nothing: it is loaded and called once more. Raises: as the line."""
        words = list(arguments)
        try:
            return await self._line.call(function, keys, words, read_only=reads)
        except ValkeyRefused as error:
            if "Function not found" not in error.reply:
                raise
        await _load(partial(self._line.command, near=keys[0]), find_libraries((self._package,)))
        return await self._line.call(function, keys, words, read_only=reads)
