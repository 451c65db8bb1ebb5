"""Valkey function libraries: one per room, with a version in the name, loaded on every start.

A room's `lua/<room>_v<N>.lua` begins with `#!lua name=headrace_<room>_v<N>`. Releases overlap, so a
library never changes in place: a new version gets a new name, and the next release drops the old
one. Loading is idempotent: only a library that differs from the server's is sent.
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


_UNSUPPORTED: Final = ("unknown command", "Error registering functions", "NOPERM")
"""Replies to FUNCTION that a retry does not change."""


class ValkeyUnsupported(Conflict):
    """The server is too old for function libraries, or its user may not load them."""

    code = "valkey.unsupported"


@dataclass(frozen=True, slots=True)
class Library:
    """A function library: one Lua file."""

    name: str
    code: str


def find_libraries(packages: tuple[str, ...]) -> list[Library]:
    """The libraries of `packages`, from their `lua` folders."""
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
    """Load missing or changed libraries on every primary; return the names that were sent.

    A primary that is down gets its functions on the first call there. Raises: ValkeyDown,
    ValkeyUnsupported.
    """
    libraries, nodes = find_libraries(packages), await valkey.primaries()
    results = await asyncio.gather(
        *[_load(node.command, libraries) for node in nodes], return_exceptions=True
    )
    sent, failures = list[str](), list[ValkeyDown]()
    for names in results:
        if isinstance(names, ValkeyDown):
            _require_supported(names)
            failures.append(names)
        elif isinstance(names, BaseException):
            raise names
        else:
            sent += names
    if failures and len(failures) == len(nodes):
        raise failures[0]
    return list(dict.fromkeys(sent))


def _require_supported(error: ValkeyDown) -> None:
    """Raise ValkeyUnsupported unless a retry may succeed."""
    reply = str(error.__cause__) if isinstance(error.__cause__, ResponseError) else ""
    if any(sign in reply for sign in _UNSUPPORTED):
        raise ValkeyUnsupported(
            f"Valkey refuses the function libraries ({reply[:120]}): use Valkey 7.2, Redis 7.0 or"
            " newer, and a user with permission for FUNCTION"
        ) from error


async def _load(command: Callable[..., Awaitable[Any]], libraries: Sequence[Library]) -> list[str]:
    """Load missing or changed libraries on one server, through `command`."""
    sent = []
    for library in libraries:
        reply = await command("FUNCTION", "LIST", "LIBRARYNAME", library.name, "WITHCODE")
        if not any(library.code.encode() in entry for entry in reply):
            await command("FUNCTION", "LOAD", "REPLACE", library.code)
            sent.append(library.name)
    return sent


class Functions:
    """The functions of one room over the shared connection.

    A call loads the library again if the server lacks it, such as a primary that just joined the
    cluster.
    """

    def __init__(self, multiplexer: Multiplexer, package: str) -> None:
        self._multiplexer = multiplexer
        self._package = package

    async def call(
        self, function: str, keys: list[str], arguments: Sequence[Any], *, reads: bool = False
    ) -> Any:
        """Call a function, loading its library first if the server lacks it.

        Raises: as `Multiplexer.call`.
        """
        words = list(arguments)
        try:
            return await self._multiplexer.call(function, keys, words, read_only=reads)
        except ValkeyRefused as error:
            if "Function not found" not in error.reply:
                raise
        await _load(
            partial(self._multiplexer.command, near=keys[0]), find_libraries((self._package,))
        )
        return await self._multiplexer.call(function, keys, words, read_only=reads)
