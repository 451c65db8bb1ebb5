"""Download one body from an untrusted host within limits; every fault becomes an outcome.

    check the URL -> acquire a connection of the host -> resolve -> check every address
    -> acquire a token -> connect to that address -> hooks check the peer again (`curl`)
    -> headers -> body through SHA-256 -> a redirect repeats this with the next URL

Waits for our own limits (connections, tokens) are not counted as the host's time. When a further
token is refused, the redirects so far are stored, so the next attempt resumes there and repeats no
request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar
from urllib.parse import urljoin

import pycurl

from headrace.fetch.curl import (
    REDIRECTS,
    AsyncCurl,
    Body,
    Bounds,
    Exchange,
    TransferFailed,
    Validators,
    new_handle,
    request_headers,
)
from headrace.fetch.dns import DnsCache, DnsFailed
from headrace.fetch.errors import UrlRefused
from headrace.fetch.guard import (
    OPEN_NETWORK,
    Address,
    Policy,
    Target,
    forbidden_reason,
    judge_url,
)
from headrace.fetch.host_stats import host_of
from headrace.fetch.limits import HUNG_S, HostPaused, HostPool, RateTokens, TokenExpired
from headrace.fetch.model import PhotoStep
from headrace.fetch.outcomes import BYTES_RECEIVED
from headrace.fetch.settings import FetchConfig
from headrace.jobs.errors import LaneExhausted
from headrace.kernel.errors import Unavailable

REDIRECTS_MAX: Final = 5
CONNECT_TIMEOUT_S: Final = 10.0
AGAIN_S: Final = 1.0
"""Delay before a download resumes that got no connection to the host of a redirect."""
VALIDATOR_CHARACTERS_MAX: Final = 1024
RESUME_POINTS_MAX: Final = 10_000
STALL_MAX: Final = 3.0
"""A download of a busy process takes at most this many times its time limit."""
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
"""Outcome codes of OpenSSL's X509_V_ERR_* results."""
_CODES: Final = {
    pycurl.E_COULDNT_RESOLVE_HOST: "dns",
    pycurl.E_COULDNT_CONNECT: "connect",
    pycurl.E_PARTIAL_FILE: "truncated",
    pycurl.E_GOT_NOTHING: "reset",
    pycurl.E_SEND_ERROR: "reset",
    pycurl.E_RECV_ERROR: "reset",
}
Found = TypeVar("Found")
PauseOf: TypeAlias = Callable[[str], Awaitable[float]]


@dataclass(slots=True)
class Download:
    """Result: `outcome` is `received`, `unchanged`, `refused:<code>` or `failed:<code>`."""

    outcome: str
    text: str
    hops: list[str] = field(default_factory=list)
    steps: list[PhotoStep] = field(default_factory=list)
    requests: int = 0
    """Requests sent; each consumed a token of the lane."""
    took_s: float = 0.0
    """Time of the hosts, without waits for connections and tokens."""
    body: Body | None = None
    size_bytes: int = 0
    sha256: str | None = None
    etag: str | None = None
    last_modified: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class PostResponse:
    """Status and Retry-After of the response to a POST."""

    status: int
    retry_after_s: float | None


class PostFailed(Exception):
    """The POST got no response; `text` is the reason."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _Failed(Exception):
    def __init__(self, outcome: str, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.text = text
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Attempt:
    """State of a running download."""

    known: Validators
    bounds: Bounds
    tokens: RateTokens
    hops: list[str] = field(default_factory=list)
    steps: list[PhotoStep] = field(default_factory=list)
    used_s: float = 0.0
    posted: tuple[list[str], bytes] | None = None
    """Header lines and body of a POST."""
    pause_s: PauseOf | None = None

    @property
    def left_s(self) -> float:
        """Remaining time of the hosts."""
        return max(0.0, self.bounds.time_s - self.used_s)

    async def timed(self, curl: AsyncCurl, doing: Awaitable[Found]) -> Found:
        """Await an operation on the host's time, without stalls of this process.

        Raises: TimeoutError.
        """
        clock = _Clock(curl)
        try:
            async with asyncio.timeout(None) as limit:
                clock.bound(limit, self.left_s)
                return await doing
        finally:
            self.used_s += clock.stop()


class _Clock:
    """Clock of the host's time; it stops while this process is too busy to read its sockets."""

    def __init__(self, curl: AsyncCurl) -> None:
        self._curl = curl
        self._began_s = time.monotonic()
        self._stalled_s = curl.stalled_s
        self._timer: asyncio.TimerHandle | None = None

    def bound(self, limit: asyncio.Timeout, left_s: float) -> None:
        """Expire `limit` after `left_s`."""
        loop = asyncio.get_running_loop()
        more_s = left_s - self._used_s
        if more_s > 0:
            self._timer = loop.call_later(more_s, self.bound, limit, left_s)
        else:
            limit.reschedule(loop.time())

    def stop(self) -> float:
        """Stop the timer and return the time used."""
        if self._timer is not None:
            self._timer.cancel()
        return self._used_s

    @property
    def _used_s(self) -> float:
        passed_s = time.monotonic() - self._began_s
        stalled_s = self._curl.stalled_s - self._stalled_s
        return max(passed_s / STALL_MAX, passed_s - stalled_s)


class Downloader:
    """Downloads of one process: one resolver, one curl handle, a connection limit per host."""

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self.policy = Policy.of(config.allow_networks, config.allow_ports)
        self.pool = HostPool(max(1, config.host_connections))
        self._bounds = Bounds(max(config.classes, default=30.0), config.photo_max_bytes)
        self._dns = DnsCache(config.name_servers)
        self._curl: AsyncCurl | None = None
        self._resume_points: OrderedDict[str, list[str]] = OrderedDict()

    async def close(self) -> None:
        """Close connections and the resolver."""
        await self._dns.close()
        if self._curl is not None:
            self._curl.close()
            self._curl = None

    async def download(
        self,
        url: str,
        known: Validators | None = None,
        *,
        bounds: Bounds | None = None,
        tokens: RateTokens | None = None,
        pause_s: PauseOf | None = None,
    ) -> Download:
        """Download `url`; faults of the host or the URL are outcomes, not exceptions.

        Default `bounds`: those of a photo in the longest class. Without `tokens` no lane is used.
        `pause_s` returns the pause that a host requested; no redirect to it is followed meanwhile.
        Raises: TokenExpired, LaneExhausted, HostPaused, Unavailable: no outcome yet, call again
        later.
        """
        attempt = _Attempt(known or Validators(), bounds or self._bounds, tokens or RateTokens())
        attempt.pause_s = pause_s
        urls = self._resume_points.pop(url, [])
        try:
            target = judge_url(urls[-1] if urls else url, self.policy)
            attempt.hops = urls[:-1]
            found = await self._follow(target, attempt)
        except UrlRefused as error:
            found = Download(f"refused:{error.reason}", error.text)
        except _Failed as failed:
            wait_s = failed.retry_after_s
            if wait_s is not None:
                wait_s = min(wait_s, self._config.retry_after_max_s)
            found = Download(failed.outcome, failed.text, retry_after_s=wait_s)
        except TimeoutError:
            found = Download("failed:timeout", f"not completed within {attempt.bounds.time_s:g} s")
        except (TokenExpired, LaneExhausted, HostPaused, Unavailable):
            self._remember(url, attempt)
            raise
        found.hops, found.steps = attempt.hops, attempt.steps
        found.requests, found.took_s = attempt.tokens.sent, attempt.used_s
        return found

    async def post(
        self, url: str, headers: list[str], body: bytes, *, time_s: float
    ) -> PostResponse:
        """POST `body`; follow no redirect and read no body. Raises: PostFailed."""
        attempt = _Attempt(
            Validators(), Bounds(time_s, bytes_max=0), RateTokens(), posted=(headers, body)
        )
        try:
            exchange = await self._request(judge_url(url, self.policy), attempt)
        except (UrlRefused, _Failed) as error:
            raise PostFailed(error.text) from None
        except TimeoutError:
            raise PostFailed(f"no response within {time_s:g} s") from None
        return PostResponse(exchange.status, exchange.retry_after_s)

    def _remember(self, url: str, attempt: _Attempt) -> None:
        """Store the redirects of a download that stopped at our own limits."""
        if len(attempt.hops) > 1:
            self._resume_points[url] = attempt.hops
            if len(self._resume_points) > RESUME_POINTS_MAX:
                self._resume_points.popitem(last=False)

    async def _follow(self, target: Target, attempt: _Attempt) -> Download:
        seen = {*attempt.hops, target.url}
        while True:
            attempt.hops.append(target.url)
            if len(attempt.hops) > 1 and attempt.pause_s is not None:
                wait_s = await attempt.pause_s(host_of(target.url))
                if wait_s > 0:
                    raise HostPaused(wait_s)
            exchange = await self._with_connection(target, attempt)
            if exchange.status not in REDIRECTS:
                return _finish(exchange, attempt.known)
            if len(attempt.hops) > REDIRECTS_MAX:
                raise _Failed("refused:redirect_limit", f"more than {REDIRECTS_MAX} redirects")
            target = self._next_target(target, exchange)
            if target.url in seen:
                raise _Failed(
                    "refused:redirect_loop", f"the redirects return to {target.url[:200]}"
                )
            seen.add(target.url)

    async def _with_connection(self, target: Target, attempt: _Attempt) -> Exchange:
        """Send with a token and a connection of the host. Raises: TokenExpired, LaneExhausted."""
        host = f"{target.host}:{target.port}"
        tokens = attempt.tokens
        await tokens.acquire()
        is_counted = tokens.valid_until_s is not None
        until_s = tokens.valid_until_s if is_counted else time.monotonic() + attempt.left_s
        if not await self.pool.acquire(
            host,
            until_s=until_s,
            limit=attempt.bounds.connections,
            ignores_queue_limit=not is_counted,
        ):
            if not is_counted:
                raise _Failed("failed:timeout", f"no free connection to {target.host}")
            raise TokenExpired(self.pool.backoff_s(host) or (AGAIN_S if tokens.sent else 0.0))
        steps = len(attempt.steps)
        try:
            return await self._request(target, attempt)
        finally:
            is_answered = any(step.status for step in attempt.steps[steps:])
            self.pool.release(host, is_answered=is_answered)

    def _next_target(self, target: Target, exchange: Exchange) -> Target:
        location = exchange.headers.get("location", "")
        if not location:
            raise _Failed(
                "refused:redirect_without_location", f"status {exchange.status} without a Location"
            )
        try:
            # Header bytes were decoded as Latin-1; servers send UTF-8.
            text = location.encode("latin-1").decode("utf-8", errors="replace")
            following = judge_url(urljoin(target.url, text), self.policy)
        except UrlRefused as error:
            code = (
                error.reason if error.reason == "forbidden_address" else f"redirect_{error.reason}"
            )
            raise _Failed(f"refused:{code}", f"redirected to a refused URL: {error.text}") from None
        except ValueError:
            raise _Failed("refused:redirect_syntax", "the Location is not a valid URL") from None
        if target.scheme == "https" and following.scheme == "http":
            raise _Failed("refused:redirect_downgrade", "redirected from https to http")
        return following

    async def _request(self, target: Target, attempt: _Attempt) -> Exchange:
        """Send to the first address; use the second if the first does not connect."""
        if self._curl is None:
            self._curl = AsyncCurl()
        addresses: tuple[Address, ...] = ()
        if target.literal is not None:
            addresses = (target.literal,)
        else:
            addresses = await attempt.timed(self._curl, self._addresses(target))
        for address in addresses[:2]:
            is_last = address == addresses[:2][-1]
            exchange = await self._send(target, address, attempt, is_last=is_last)
            if exchange.needs_token:
                # The kept connection was dead: a new one sends only once.
                exchange = await self._send(
                    target, address, attempt, is_last=is_last, is_fresh=True
                )
            if exchange.error is None or exchange.is_dropped:
                return exchange
            if is_last or exchange.is_sent or exchange.stopped is not None:
                raise _failure_of(exchange, exchange.error)
        raise _Failed("failed:connect", f"no connection to {target.host}")

    async def _send(
        self,
        target: Target,
        address: Address,
        attempt: _Attempt,
        *,
        is_last: bool,
        is_fresh: bool = False,
    ) -> Exchange:
        """Send one request with a token of its own; `error` of the result is its failure."""
        assert self._curl is not None, "created before the first request"
        await attempt.tokens.acquire()
        exchange = Exchange(self.policy, attempt.bounds, attempt.tokens)
        handle = new_handle(self._config, target, address, exchange)
        connect_s = CONNECT_TIMEOUT_S if is_last else min(CONNECT_TIMEOUT_S, attempt.left_s / 2)
        if attempt.posted is None:
            handle.setopt(pycurl.HTTPHEADER, request_headers(attempt.bounds, attempt.known))
        else:
            headers, body = attempt.posted
            handle.setopt(pycurl.HTTPHEADER, [*headers, "Accept: */*", "Expect:"])
            handle.setopt(pycurl.POSTFIELDS, body)
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, max(1, int(connect_s * 1000)))
        # Our own clock is the limit; this one ignores stalls and is a last resort.
        handle.setopt(pycurl.TIMEOUT_MS, max(1, int(attempt.left_s * STALL_MAX * 1000)))
        if is_fresh:
            handle.setopt(pycurl.FRESH_CONNECT, 1)
        began_s = time.monotonic()
        try:
            await attempt.timed(self._curl, self._curl.perform(handle))
        except TransferFailed as error:
            exchange.error = error
            exchange.is_dropped |= exchange.is_refusal
        except TimeoutError:
            # The status and Retry-After of an error count without its body.
            exchange.is_dropped = exchange.is_refusal
            if not exchange.is_dropped:
                raise
        finally:
            step = exchange.step(target, address, handle)
            attempt.steps.append(step)
            silent_s = (step.first_byte_s or time.monotonic() - began_s) - step.connect_s
            if exchange.is_sent and silent_s > HUNG_S:
                attempt.tokens.charge()
            handle.close()
        return exchange

    async def _addresses(self, target: Target) -> tuple[Address, ...]:
        """Allowed addresses of the host; one forbidden answer refuses the name."""
        try:
            addresses = await self._dns.resolve(target.host)
        except DnsFailed as error:
            raise _Failed("failed:dns", f"{target.host}: {error}") from None
        for address in addresses:
            reason = forbidden_reason(address, self.policy)
            if reason is not None:
                raise _Failed(
                    "refused:forbidden_address",
                    f"{target.host}: {reason}; {OPEN_NETWORK}",
                )
        return addresses


def _finish(exchange: Exchange, known: Validators) -> Download:
    if exchange.status == 304 and (known.etag or known.last_modified):
        return Download("unchanged", "the host responded 304: not modified")
    if exchange.status == 200:
        BYTES_RECEIVED.inc(exchange.body_bytes)
        return Download(
            "received",
            f"{exchange.body_bytes:,} bytes",
            body=exchange.body,
            size_bytes=exchange.body_bytes,
            sha256=exchange.body.sha256(),
            etag=_validator(exchange.headers.get("etag")),
            last_modified=_validator(exchange.headers.get("last-modified")),
        )
    if exchange.status == 429:
        raise _Failed(
            "failed:rate_limited",
            "the host responded 429: too many requests",
            exchange.retry_after_s,
        )
    raise _Failed(
        f"failed:http_{exchange.status}",
        f"the host responded {exchange.status}",
        exchange.retry_after_s,
    )


def _failure_of(exchange: Exchange, error: TransferFailed) -> _Failed:
    """Outcome of a transfer that libcurl ended or a callback stopped."""
    if exchange.stopped is not None:
        return _Failed(*exchange.stopped)
    code = _CODES.get(error.number, "protocol")
    text = error.text
    if error.number == pycurl.E_OPERATION_TIMEDOUT:
        code = "timeout" if exchange.is_sent else "connect"
    elif error.number == pycurl.E_FILESIZE_EXCEEDED:
        return _Failed("refused:too_large", f"the body is over {exchange.bounds.bytes_max:,} bytes")
    elif error.number in _TLS:
        code = _tls_code(error)
    elif error.number == pycurl.E_RECV_ERROR and exchange.body_bytes:
        code, text = "truncated", f"the connection broke after {exchange.body_bytes:,} bytes"
    return _Failed(f"failed:{code}", text)


def _tls_code(error: TransferFailed) -> str:
    """Code of the certificate's fault; `tls` for other faults."""
    if error.number != pycurl.E_PEER_FAILED_VERIFICATION:
        return "tls"
    # libcurl checks the name after OpenSSL accepted the chain.
    if "subject name" in error.text:
        return "tls_wrong_name"
    return _VERIFY_FAULTS.get(error.verify_result, "tls")


def _validator(value: str | None) -> str | None:
    """A validator that can be sent back: printable ASCII of bounded length; else None."""
    if (
        not value
        or len(value) > VALIDATOR_CHARACTERS_MAX
        or not value.isascii()
        or not value.isprintable()
    ):
        return None
    return value
