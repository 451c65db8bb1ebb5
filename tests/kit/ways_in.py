"""Shared by the scenarios of every room: Python, HTTP and CLI give the same results and errors."""

from __future__ import annotations

import json

import msgspec

from headrace.kernel.errors import HeadraceError


class Refused(Exception):
    """The surface refused the call."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.told = f"{status} {code}"


def plain(value):
    """What JSON makes of it."""
    return json.loads(msgspec.json.encode(value))


def bare(value):
    """What JSON makes of the document of a command; of a list without pages only its items."""
    found = plain(value)
    is_list = isinstance(found, dict) and "items" in found
    return found["items"] if is_list and set(found) <= {"items", "next_cursor"} else found


class PythonVerbs:
    """Calls a verb of the service by its name."""

    async def do(self, verb, given):
        try:
            return plain(await getattr(self, verb)(**given))
        except HeadraceError as error:
            raise Refused(error.status, error.code) from error
