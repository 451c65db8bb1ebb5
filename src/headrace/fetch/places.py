"""Who may hold how many connections of one host in this process, and for how long a start is waited for.

A place is waited for only as long as the start that was counted for it is good (the limiter's slack, a
quarter of a second): whoever waited longer would send its request in a window that does not count it,
and a host that was silent for half a minute would then get all of them at once. So behind a host whose
places are full a job goes back unstarted, its start is given back, and it is claimed anew. As many may wait as
have places, or as will have one in time at the host's pace, LINE_MAX at most; those behind them stay away for a
moment, so that no host fills this process. (Several slots leave each a place or two; with no longer line than that,
photos of quick hosts stayed away for a second.) A host that answered nothing for JAMMED_S is jammed: its jobs stay
away longer and longer, up to BACK_S_MAX.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

JAMMED_S: Final = 1.0
BACK_S_MAX: Final = 10.0
HOSTS_MAX: Final = 10_000
LINE_MAX: Final = 32
_SMOOTHING: Final = 0.2


@dataclass(slots=True)
class _Host:
    busy: int = 0
    alive_s: float = field(default_factory=time.monotonic)
    """When it answered the last time, or was asked after it had been idle."""
    is_silent: bool = False
    """The last request ended without an answer."""
    changed_s: float = field(default_factory=time.monotonic)
    held_s: float = 0.0
    """Time of all places together since one was given back the last time."""
    took_s: float = JAMMED_S
    """For how long a place is held, smoothed (Little's law)."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Places:
    """The connections of every host, `each` at most."""

    def __init__(self, each: int) -> None:
        self.each = each
        """May be changed at any time; places that are held stay held."""
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    async def take(self, host: str, *, until_s: float | None, is_patient: bool = False) -> bool:
        """Take a place of `host`, waiting for one until `until_s` (`time.monotonic`); False: there was none.

        However many wait already, where it is patient.
        """
        found = self._of(host)
        if found.busy < self.each and not found.waiting:
            self._begin(found)
            return True
        left_s = None if until_s is None else until_s - time.monotonic()
        is_line_full = not is_patient and len(found.waiting) >= self._line(found, left_s)
        if is_line_full or (left_s is not None and left_s <= 0):
            return False
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found.waiting.append(mine)
        try:
            async with asyncio.timeout(left_s):
                await mine
        except BaseException as error:
            if mine.done() and not mine.cancelled():
                # It was given in the same moment: whoever is next has it.
                self._end(found)
            else:
                with suppress(ValueError):
                    found.waiting.remove(mine)
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def leave(self, host: str, *, is_answered: bool = True) -> None:
        """Give a place back, and say whether the host answered."""
        found = self._of(host)
        found.is_silent = not is_answered
        if is_answered:
            found.alive_s = time.monotonic()
        self._end(found)

    def away_s(self, host: str) -> float:
        """For how long a job should stay away from a host without a free place; 0: it moves on."""
        found = self._of(host)
        silent_s = time.monotonic() - found.alive_s
        away_s = 0.0
        if found.busy and silent_s > JAMMED_S:
            away_s = min(2 * silent_s, BACK_S_MAX)
        elif len(found.waiting) >= self.each:
            away_s = min(JAMMED_S, found.took_s * (1 + len(found.waiting) / self.each))
        return away_s * (0.5 + random.random() / 2)

    def _line(self, found: _Host, left_s: float | None) -> int:
        """How many may wait where a start is good for `left_s`."""
        if left_s is None or (found.busy and time.monotonic() - found.alive_s > JAMMED_S):
            return self.each
        in_time = int(left_s / max(found.took_s, 0.001) * self.each)
        return max(self.each, min(in_time, LINE_MAX))

    def _of(self, host: str) -> _Host:
        found = self._hosts.get(host)
        if found is None:
            found = self._hosts[host] = _Host()
            if len(self._hosts) > HOSTS_MAX:
                self._forget_idle()
        return found

    def _forget_idle(self) -> None:
        """Drop hosts without connections; the newest stays."""
        *old, _newest = self._hosts
        for host in old:
            if not self._hosts[host].busy and not self._hosts[host].waiting:
                del self._hosts[host]

    def _begin(self, found: _Host) -> None:
        if found.busy == 0 and not found.is_silent:
            found.alive_s = time.monotonic()
        self._count(found, 1)

    def _end(self, found: _Host) -> None:
        self._count(found, -1)
        found.took_s += _SMOOTHING * (found.held_s - found.took_s)
        found.held_s = 0.0
        while found.waiting and found.busy < self.each:
            mine = found.waiting.popleft()
            if not mine.done():
                self._count(found, 1)
                mine.set_result(None)

    def _count(self, found: _Host, change: int) -> None:
        now_s = time.monotonic()
        found.held_s += found.busy * (now_s - found.changed_s)
        found.changed_s = now_s
        found.busy += change
