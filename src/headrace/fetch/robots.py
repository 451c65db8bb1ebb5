"""Crawl-delay of robots.txt, applied by the whole fleet, if the operator enables it.

Only the delay is used: sellers refer us to their own photos, so rules for uninvited visitors do
not apply. The file is downloaded with the same guard and lane as a photo and kept for a day. The
next free time of a host with a delay is one row for all customers. A job that gets no reservation
retries after a random delay, so that the jobs spread.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final
from urllib.robotparser import RobotFileParser

from headrace.engines.postgres import Postgres, Runner
from headrace.fetch.curl import Bounds
from headrace.fetch.download import Downloader
from headrace.fetch.limits import RateTokens
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sql import SQL

KEPT_S: Final = 86_400.0
LOOK_S: Final = 60.0
BYTES_MAX: Final = 500 * 1024
"""Size limit of a robots.txt by RFC 9309."""
READ_WITHIN_S: Final = 5.0
DELAY_S_MAX: Final = 60.0
SPREAD: Final = 8
"""A job without a reservation retries within this many delays."""
HOSTS_MAX: Final = 10_000

READING_S: Final = 0.5
"""Delay of a request while another process reads the host's robots.txt."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Result of a reservation: success, the wait until it or the next try, the host's delay."""

    is_reserved: bool
    wait_s: float
    delay_s: float


class Robots:
    """Crawl delays of hosts; always 0 if they are disabled."""

    def __init__(self, postgres: Postgres, downloader: Downloader, config: FetchConfig) -> None:
        self._postgres = postgres
        self._downloader = downloader
        self._agent = config.user_agent.split("/")[0]
        self._is_on = config.crawl_delay == "honor"
        self._looked: OrderedDict[str, float] = OrderedDict()

    async def wait_s(self, url: str, host: str, tokens: RateTokens) -> float:
        """Reserve the next request to the host: 0, or the delay after which to retry.

        Raises: TokenExpired, LaneExhausted, while reading robots.txt.
        """
        if not self._is_on:
            return 0.0
        if time.monotonic() - self._looked.get(host, -LOOK_S) >= LOOK_S:
            await self._read(url, host, tokens)
        left_s = 0.0 if tokens.valid_until_s is None else tokens.valid_until_s - time.monotonic()
        reservation = await reserve(self._postgres, host, wait_max_s=max(0.0, left_s / 2))
        if not reservation.is_reserved:
            return reservation.wait_s + random.random() * SPREAD * reservation.delay_s
        await asyncio.sleep(reservation.wait_s)
        return 0.0

    async def _read(self, url: str, host: str, tokens: RateTokens) -> None:
        """Download the host's robots.txt unless it was read within a day."""
        if await self._postgres.one(SQL.begin_robots, host=host, kept_s=KEPT_S) is not None:
            scheme = url.partition("://")[0]
            bounds = Bounds(READ_WITHIN_S, BYTES_MAX, accept="text/plain")
            try:
                found = await self._downloader.download(
                    f"{scheme}://{host}/robots.txt", bounds=bounds, tokens=tokens
                )
            except BaseException:
                await self._postgres.run(SQL.leave_robots, host=host)
                raise
            text = ""
            if found.body is not None:
                with found.body:
                    text = found.body.read().decode("utf-8", errors="replace")
            delay_s = crawl_delay_s(text, self._agent)
            await self._postgres.run(SQL.note_robots, host=host, crawl_delay_s=delay_s)
        self._looked[host] = time.monotonic()
        if len(self._looked) > HOSTS_MAX:
            self._looked.popitem(last=False)


def crawl_delay_s(text: str, agent: str) -> float | None:
    """The Crawl-delay of a robots.txt for `agent`, up to DELAY_S_MAX; None if it has none."""
    parser = RobotFileParser()
    parser.parse(text.splitlines())
    delay = parser.crawl_delay(agent)
    return min(float(delay), DELAY_S_MAX) if delay else None


async def reserve(runner: Runner, host: str, *, wait_max_s: float) -> Reservation:
    """Reserve the next request to a host with a Crawl-delay within `wait_max_s`."""
    row = await runner.one(SQL.take_turn_of_host, host=host, wait_max_s=wait_max_s)
    if row is not None:
        return Reservation(True, row["wait_s"], 0.0)
    known = await runner.one(SQL.find_robots, host=host)
    if known is not None and not known["is_read"]:
        return Reservation(False, READING_S, READING_S)
    if known is None or not known["crawl_delay_s"]:
        return Reservation(True, 0.0, 0.0)
    return Reservation(False, max(0.0, known["wait_s"]), known["crawl_delay_s"])
