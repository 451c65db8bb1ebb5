"""What a host's robots.txt asks of the pace: its Crawl-delay, kept by the whole fleet, if the operator says so.

Only the delay is read: sellers send us to their own photos, so what robots.txt forbids to visitors without
an invitation is not asked. The file comes through the same guard and the same lane as a photo and
is kept for a day. A host with a delay has its turns in one row, for all customers: a job that gets none
goes back for a while, spread so that not all of them come again at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from typing import Final
from urllib.robotparser import RobotFileParser

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.download import Downloader
from headrace.fetch.hop import Bounds
from headrace.fetch.settings import FetchConfig
from headrace.fetch.starts import Starts

KEPT_S: Final = 86_400.0
LOOK_S: Final = 60.0
BYTES_MAX: Final = 500 * 1024
"""As much of a robots.txt as RFC 9309 asks to be read."""
READ_WITHIN_S: Final = 5.0
DELAY_S_MAX: Final = 60.0
SPREAD: Final = 8
"""A job that got no turn comes back within so many turns."""
HOSTS_MAX: Final = 10_000


class Robots:
    """Crawl delays of hosts; answers 0 at once where they are not to be kept."""

    def __init__(self, postgres: Postgres, downloader: Downloader, config: FetchConfig) -> None:
        self._postgres = postgres
        self._downloader = downloader
        self._agent = config.user_agent.split("/")[0]
        self._is_on = config.crawl_delay == "honour"
        self._looked: OrderedDict[str, float] = OrderedDict()

    async def stay_away_s(self, url: str, host: str, starts: Starts) -> float:
        """Take a turn at the host of `url`: 0, or how long to leave it alone.

        Raises: NotStarted, LaneExhausted, of reading robots.txt.
        """
        if not self._is_on:
            return 0.0
        if time.monotonic() - self._looked.get(host, -LOOK_S) >= LOOK_S:
            await self._read(url, host, starts)
        left_s = 0.0 if starts.before_s is None else starts.before_s - time.monotonic()
        turn = await store.speeds.take_turn(self._postgres, host, wait_max_s=max(0.0, left_s / 2))
        if not turn.is_taken:
            return turn.wait_s + random.random() * SPREAD * turn.delay_s
        await asyncio.sleep(turn.wait_s)
        return 0.0

    async def _read(self, url: str, host: str, starts: Starts) -> None:
        """Read the host's robots.txt, unless somebody did within a day."""
        if await store.speeds.begin_robots(self._postgres, host, kept_s=KEPT_S):
            scheme = url.partition("://")[0]
            bounds = Bounds(READ_WITHIN_S, BYTES_MAX, accept="text/plain")
            try:
                found = await self._downloader.download(
                    f"{scheme}://{host}/robots.txt", bounds=bounds, starts=starts
                )
            except BaseException:
                await store.speeds.leave_robots(self._postgres, host)
                raise
            text = ""
            if found.body is not None:
                with found.body:
                    text = found.body.read().decode("utf-8", errors="replace")
            delay_s = crawl_delay_s(text, self._agent)
            await store.speeds.note_robots(self._postgres, host, delay_s)
        self._looked[host] = time.monotonic()
        if len(self._looked) > HOSTS_MAX:
            self._looked.popitem(last=False)


def crawl_delay_s(text: str, agent: str) -> float | None:
    """The Crawl-delay that a robots.txt asks of `agent`, whole seconds up to DELAY_S_MAX; None: none."""
    parser = RobotFileParser()
    parser.parse(text.splitlines())
    delay = parser.crawl_delay(agent)
    return min(float(delay), DELAY_S_MAX) if delay else None
