"""One body from a stranger's host, within bounds: every hop judged and counted, every fault an outcome.

    judge the URL -> a place at the host -> resolve -> judge every address -> a start of the lane -> connect
    to that address -> the hooks judge the peer again (`hop`) -> headers -> body through SHA-256 -> a
    redirect starts over with the next URL

Waits for our own limits (a place, a start) are no time of the host's. Where a further start is refused the
way so far is remembered, so that the next try goes on at that hop and asks no host twice for the same.
Bodies are kept in memory up to 1 MiB, then on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar
from urllib.parse import urljoin

import pycurl

from headrace.fetch.body import Body
from headrace.fetch.errors import UrlRefused
from headrace.fetch.guard import (
    OPEN_NETWORK,
    Address,
    Policy,
    Target,
    forbidden_reason,
    judge_url,
)
from headrace.fetch.hop import REDIRECTS, Bounds, Hop, Known, new_handle, request_headers
from headrace.fetch.model import BYTES_RECEIVED, PhotoStep
from headrace.fetch.names import NameFailed, Names
from headrace.fetch.places import Places
from headrace.fetch.settings import FetchConfig
from headrace.fetch.starts import HUNG_S, NotStarted, Starts
from headrace.fetch.transfers import TransferFailed, Transfers
from headrace.jobs.errors import LaneExhausted

REDIRECTS_MAX: Final = 5
CONNECT_TIMEOUT_S: Final = 10.0
AGAIN_S: Final = 1.0
"""When a download is gone on with that found no place at the host it was redirected to."""
VALIDATOR_CHARACTERS_MAX: Final = 1024
WAYS_MAX: Final = 10_000
STALL_MAX: Final = 3.0
"""However busy this process is, a download takes no longer than so many times its bound."""
_TLS: Final = frozenset(
    {
        pycurl.E_SSL_CONNECT_ERROR,
        pycurl.E_PEER_FAILED_VERIFICATION,
        pycurl.E_SSL_CACERT_BADFILE,
        pycurl.E_SSL_CERTPROBLEM,
        pycurl.E_SSL_CIPHER,
        pycurl.E_SSL_ISSUER_ERROR,
    }
)
_VERIFY_FAULTS: Final = {
    9: "tls_not_yet_valid",
    10: "tls_expired",
    18: "tls_self_signed",
    19: "tls_untrusted",
    20: "tls_incomplete",
    21: "tls_incomplete",
}
"""OpenSSL's results of verifying a certificate, X509_V_ERR_*."""
_CODES: Final = {
    pycurl.E_COULDNT_RESOLVE_HOST: "dns",
    pycurl.E_COULDNT_CONNECT: "connect",
    pycurl.E_PARTIAL_FILE: "truncated",
    pycurl.E_GOT_NOTHING: "reset",
    pycurl.E_SEND_ERROR: "reset",
    pycurl.E_RECV_ERROR: "reset",
}
Found = TypeVar("Found")


@dataclass(slots=True)
class Download:
    """How it ended: `outcome` is `received`, `unchanged`, `refused:<code>` or `failed:<code>`."""

    outcome: str
    text: str
    hops: list[str] = field(default_factory=list)
    steps: list[PhotoStep] = field(default_factory=list)
    requests: int = 0
    """That were sent; each was counted in the lane."""
    took_s: float = 0.0
    """Of the hosts' time: without waits for places and starts."""
    body: Body | None = None
    size_bytes: int = 0
    sha256: str | None = None
    etag: str | None = None
    last_modified: str | None = None
    retry_after_s: float | None = None


class _Ended(Exception):
    def __init__(self, outcome: str, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.text = text
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Trip:
    """A download under way."""

    known: Known
    bounds: Bounds
    starts: Starts
    hops: list[str] = field(default_factory=list)
    steps: list[PhotoStep] = field(default_factory=list)
    used_s: float = 0.0

    @property
    def left_s(self) -> float:
        """Time of the hosts that is left."""
        return max(0.0, self.bounds.time_s - self.used_s)

    async def timed(self, transfers: Transfers, doing: Awaitable[Found]) -> Found:
        """The answer of something that takes the host's time; stalls of ours do not count. Raises: TimeoutError."""
        clock = _Clock(transfers)
        try:
            async with asyncio.timeout(None) as limit:
                clock.bound(limit, self.left_s)
                return await doing
        finally:
            self.used_s += clock.stop()


class _Clock:
    """The host's time of one wait: it stands still while this process is too busy to look."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._began_s = time.monotonic()
        self._stalled_s = transfers.stalled_s
        self._timer: asyncio.TimerHandle | None = None

    def bound(self, limit: asyncio.Timeout, left_s: float) -> None:
        """Let `limit` be over once `left_s` have passed."""
        loop = asyncio.get_running_loop()
        more_s = left_s - self._used_s
        if more_s > 0:
            self._timer = loop.call_later(more_s, self.bound, limit, left_s)
        else:
            limit.reschedule(loop.time())

    def stop(self) -> float:
        """Bound nothing more; how long it was."""
        if self._timer is not None:
            self._timer.cancel()
        return self._used_s

    @property
    def _used_s(self) -> float:
        passed_s = time.monotonic() - self._began_s
        stalled_s = self._transfers.stalled_s - self._stalled_s
        return max(passed_s / STALL_MAX, passed_s - stalled_s)


class Downloader:
    """Downloads of one process: one resolver, one multi handle, a bound of connections a host."""

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self.policy = Policy.of(config.allow_networks, config.allow_ports)
        self.places = Places(max(1, config.host_connections))
        self._bounds = Bounds(max(config.classes, default=30.0), config.photo_max_bytes)
        self._names = Names(config.name_servers)
        self._transfers: Transfers | None = None
        self._ways: OrderedDict[str, list[str]] = OrderedDict()

    async def close(self) -> None:
        """Close connections and the resolver."""
        await self._names.close()
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None

    async def download(
        self,
        url: str,
        known: Known | None = None,
        *,
        bounds: Bounds | None = None,
        starts: Starts | None = None,
    ) -> Download:
        """Bring the body of `url`; never raises for what a host or its URL does.

        `bounds` are those of a photo in the longest class unless given; without `starts` no lane is
        used. Raises: NotStarted, LaneExhausted: nothing was decided, ask again.
        """
        trip = _Trip(known or Known(), bounds or self._bounds, starts or Starts())
        way = self._ways.pop(url, [])
        try:
            target = judge_url(way[-1] if way else url, self.policy)
            trip.hops = way[:-1]
            found = await self._follow(target, trip)
        except UrlRefused as error:
            found = Download(f"refused:{error.reason}", error.text)
        except _Ended as ended:
            wait_s = ended.retry_after_s
            if wait_s is not None:
                wait_s = min(wait_s, self._config.retry_after_max_s)
            found = Download(ended.outcome, ended.text, retry_after_s=wait_s)
        except TimeoutError:
            found = Download("failed:timeout", f"not done within {trip.bounds.time_s:g} s")
        except (NotStarted, LaneExhausted):
            self._remember(url, trip)
            raise
        found.hops, found.steps = trip.hops, trip.steps
        found.requests, found.took_s = trip.starts.sent, trip.used_s
        return found

    def _remember(self, url: str, trip: _Trip) -> None:
        """Keep how far a download came that had to stop for our own limits."""
        if len(trip.hops) > 1:
            self._ways[url] = trip.hops
            if len(self._ways) > WAYS_MAX:
                self._ways.popitem(last=False)

    async def _follow(self, target: Target, trip: _Trip) -> Download:
        seen = {*trip.hops, target.url}
        while True:
            trip.hops.append(target.url)
            hop = await self._at_place(target, trip)
            if hop.status not in REDIRECTS:
                return _finish(hop, trip.known)
            if len(trip.hops) > REDIRECTS_MAX:
                raise _Ended("refused:redirect_limit", f"more than {REDIRECTS_MAX} redirects")
            target = self._next_target(target, hop)
            if target.url in seen:
                raise _Ended(
                    "refused:redirect_loop", f"the redirects come back to {target.url[:200]}"
                )
            seen.add(target.url)

    async def _at_place(self, target: Target, trip: _Trip) -> Hop:
        """Ask with a start and one of the host's places in hand. Raises: NotStarted, LaneExhausted."""
        host = f"{target.host}:{target.port}"
        starts = trip.starts
        await starts.take()
        is_counted = starts.before_s is not None
        until_s = starts.before_s if is_counted else time.monotonic() + trip.left_s
        if not await self.places.take(host, until_s=until_s, is_patient=not is_counted):
            if not is_counted:
                raise _Ended("failed:timeout", f"no free connection to {target.host}")
            raise NotStarted(self.places.away_s(host) or (AGAIN_S if starts.sent else 0.0))
        steps = len(trip.steps)
        try:
            return await self._ask(target, trip)
        finally:
            is_answered = any(step.status for step in trip.steps[steps:])
            self.places.leave(host, is_answered=is_answered)

    def _next_target(self, target: Target, hop: Hop) -> Target:
        location = hop.headers.get("location", "")
        if not location:
            raise _Ended(
                "refused:redirect_without_location", f"status {hop.status} without a Location"
            )
        try:
            # Header bytes were read as Latin-1; what a server means by them is UTF-8.
            text = location.encode("latin-1").decode("utf-8", errors="replace")
            following = judge_url(urljoin(target.url, text), self.policy)
        except UrlRefused as error:
            code = (
                error.reason if error.reason == "forbidden_address" else f"redirect_{error.reason}"
            )
            raise _Ended(f"refused:{code}", f"redirected to a refused URL: {error.text}") from None
        except ValueError:
            raise _Ended("refused:redirect_syntax", "the Location is no URL") from None
        if target.scheme == "https" and following.scheme == "http":
            raise _Ended("refused:redirect_downgrade", "redirected from https to http")
        return following

    async def _ask(self, target: Target, trip: _Trip) -> Hop:
        """One answer; tries the second address when the first does not connect."""
        if self._transfers is None:
            self._transfers = Transfers()
        addresses: tuple[Address, ...] = ()
        if target.literal is not None:
            addresses = (target.literal,)
        else:
            addresses = await trip.timed(self._transfers, self._addresses(target))
        for address in addresses[:2]:
            is_last = address == addresses[:2][-1]
            hop = await self._send(target, address, trip, is_last=is_last)
            if hop.wants_start:
                # The kept connection was dead: over a new one libcurl sends nothing twice.
                hop = await self._send(target, address, trip, is_last=is_last, is_fresh=True)
            if hop.error is None or hop.is_dropped:
                return hop
            if is_last or hop.is_sent or hop.stopped is not None:
                raise _ended_by(hop, hop.error)
        raise _Ended("failed:connect", f"no connection to {target.host}")

    async def _send(
        self,
        target: Target,
        address: Address,
        trip: _Trip,
        *,
        is_last: bool,
        is_fresh: bool = False,
    ) -> Hop:
        """One request, for which a start is taken first; `error` says where it failed."""
        assert self._transfers is not None, "made before the first question"
        await trip.starts.take()
        hop = Hop(self.policy, trip.bounds, trip.starts)
        handle = new_handle(self._config, target, address, hop)
        connect_s = CONNECT_TIMEOUT_S if is_last else min(CONNECT_TIMEOUT_S, trip.left_s / 2)
        handle.setopt(pycurl.HTTPHEADER, request_headers(trip.bounds, trip.known))
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, max(1, int(connect_s * 1000)))
        # Our own clock is the bound; this one knows nothing of stalls and only must end some time.
        handle.setopt(pycurl.TIMEOUT_MS, max(1, int(trip.left_s * STALL_MAX * 1000)))
        if is_fresh:
            handle.setopt(pycurl.FRESH_CONNECT, 1)
        began_s = time.monotonic()
        try:
            await trip.timed(self._transfers, self._transfers.perform(handle))
        except TransferFailed as error:
            hop.error = error
        finally:
            step = hop.step(target, address, handle)
            trip.steps.append(step)
            silent_s = (step.first_byte_s or time.monotonic() - began_s) - step.connect_s
            if hop.is_sent and silent_s > HUNG_S:
                trip.starts.charge()
            handle.close()
        return hop

    async def _addresses(self, target: Target) -> tuple[Address, ...]:
        """Where to connect; one bad answer among several refuses the name."""
        try:
            addresses = await self._names.resolve(target.host)
        except NameFailed as error:
            raise _Ended("failed:dns", f"{target.host}: {error}") from None
        for address in addresses:
            reason = forbidden_reason(address, self.policy)
            if reason is not None:
                raise _Ended(
                    "refused:forbidden_address",
                    f"{target.host}: {reason}; {OPEN_NETWORK}",
                )
        return addresses


def _finish(hop: Hop, known: Known) -> Download:
    if hop.status == 304 and (known.etag or known.last_modified):
        return Download("unchanged", "the host says that it did not change")
    if hop.status == 200:
        BYTES_RECEIVED.inc(hop.body_bytes)
        return Download(
            "received",
            f"{hop.body_bytes:,} bytes",
            body=hop.body,
            size_bytes=hop.body_bytes,
            sha256=hop.body.sha256(),
            etag=_validator(hop.headers.get("etag")),
            last_modified=_validator(hop.headers.get("last-modified")),
        )
    retry_after_s = _retry_after_s(hop.headers.get("retry-after"))
    if hop.status == 429:
        raise _Ended(
            "failed:rate_limited", "the host answers 429: too many requests", retry_after_s
        )
    raise _Ended(f"failed:http_{hop.status}", f"the host answers {hop.status}", retry_after_s)


def _ended_by(hop: Hop, error: TransferFailed) -> _Ended:
    """The outcome of a transfer that libcurl gave up, or that a callback stopped."""
    if hop.stopped is not None:
        return _Ended(*hop.stopped)
    code = _CODES.get(error.number, "protocol")
    text = error.text
    if error.number == pycurl.E_OPERATION_TIMEDOUT:
        code = "timeout" if hop.is_sent else "connect"
    elif error.number == pycurl.E_FILESIZE_EXCEEDED:
        return _Ended("refused:too_large", f"the body is over {hop.bounds.bytes_max:,} bytes")
    elif error.number in _TLS:
        code = _tls_code(error)
    elif error.number == pycurl.E_RECV_ERROR and hop.body_bytes:
        code, text = "truncated", f"the connection broke after {hop.body_bytes:,} bytes"
    return _Ended(f"failed:{code}", text)


def _tls_code(error: TransferFailed) -> str:
    """What is wrong with the host's certificate; `tls` where it is not the certificate."""
    if error.number != pycurl.E_PEER_FAILED_VERIFICATION:
        return "tls"
    # libcurl checks the name itself, after OpenSSL accepted the chain.
    if "subject name" in error.text:
        return "tls_wrong_name"
    return _VERIFY_FAULTS.get(error.verify_result, "tls")


def _validator(value: str | None) -> str | None:
    """An ETag or a date that can be sent back: printable ASCII of a bounded length."""
    if (
        not value
        or len(value) > VALIDATOR_CHARACTERS_MAX
        or not value.isascii()
        or not value.isprintable()
    ):
        return None
    return value


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After; None for what means nothing or lies in the past."""
    if value is None:
        return None
    if value.isdigit():
        seconds = float(value[:9])
    else:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return seconds if seconds > 0 else None
