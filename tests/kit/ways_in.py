"""What the surfaces of every room's scenario share: Python, HTTP and the commands give the same answers and refusals."""

from __future__ import annotations

import json

import msgspec

from headrace.kernel.errors import HeadraceError


class Refused(Exception):
    """The surface said no."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.told = f"{status} {code}"


def plain(value):
    """What JSON makes of it."""
    return json.loads(msgspec.json.encode(value))


class PythonVerbs:
    """Calls a verb of the service by its name."""

    async def do(self, verb, given):
        try:
            return plain(await getattr(self, verb)(**given))
        except HeadraceError as error:
            raise Refused(error.status, error.code) from error
