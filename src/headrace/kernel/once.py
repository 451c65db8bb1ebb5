"""Doing a thing once for a caller who asks again, as a value that surfaces pass down to a verb.

The floor that serves requests knows the key of a request and keeps answers; the verb knows how to take part in a
transaction. `Once` joins the two without either importing the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Make = Callable[[Any], Awaitable[Answer]]
"""Does the thing in the transaction it is given (None: in its own) and gives the answer's body."""


@dataclass(frozen=True, slots=True)
class Once:
    """Call it with what is to be done; asked again with the same key, nothing is done again."""

    run: Callable[[Make[Any], bytes], Awaitable[Any]]

    async def __call__(self, make: Make[Answer], *, body_digest: bytes = b"") -> Answer:
        """The answer of `make`; what it did and its answer are committed together.

        `body_digest`: of the body, from a caller that read it as a stream and is marked as such.
        """
        answer: Answer = await self.run(make, body_digest)
        return answer
