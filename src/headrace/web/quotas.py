"""How much of one API process a single token may use: requests a second, and requests at once.

The rate is a token bucket that holds one second's requests (GCRA: one number per token). Every answer to a known caller
carries RateLimit and RateLimit-Policy (draft-ietf-httpapi-ratelimit-headers); over the limit it is 429 with Retry-After.
A publishable key has a limit of its own, since all visitors of a site share it and anybody can copy it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import msgspec

from headrace.web.model import RateLimited, TooManyRequestsOpen, WebConfig
from headrace.web.tokens import Caller

CHARGE: Final = "headrace.web.charge"
"""The key in an ASGI scope of what the request was charged."""
CALLERS_MAX: Final = 10_000
_WINDOW_S: Final = 1.0
_Pairs = tuple[tuple[bytes, bytes], ...]


class _Use(msgspec.Struct, gc=False):
    """What a token uses: when its bucket is full again, and how many of its requests are open."""

    full_at_s: float = 0.0
    open: int = 0


class Charge(msgspec.Struct, frozen=True, gc=False):
    """One request's share of its caller's quota."""

    headers: _Pairs
    use: _Use | None = None
    """The use in which the request counts as open; None: it was refused."""

    def end(self) -> None:
        """The request is answered."""
        if self.use is not None:
            self.use.open -= 1


class Quotas:
    """The use of every token by this process."""

    def __init__(self, config: WebConfig, now_s: Callable[[], float] = monotonic) -> None:
        self._open_max = config.requests_open_per_token
        self._rates = {False: config.requests_per_token, True: config.requests_per_key}
        self._policies = {
            kind: (b"ratelimit-policy", b'"second";q=%d;w=%d' % (rate, _WINDOW_S))
            for kind, rate in self._rates.items()
        }
        self._now_s = now_s
        self._uses: OrderedDict[int, _Use] = OrderedDict()

    def charge(self, caller: Caller, scope: Any) -> None:
        """Count one request of `caller`, unless `scope` shows that it was. Raises: RateLimited, TooManyRequestsOpen."""
        if CHARGE in scope:
            return
        kind, now_s = caller.is_publishable, self._now_s()
        rate, policy, use = self._rates[kind], self._policies[kind], self._use_of(caller.token_id)
        wait_s = max(use.full_at_s, now_s) + 1 / rate - now_s
        if wait_s > _WINDOW_S + 1e-9:
            retry_s = wait_s - _WINDOW_S
            scope[CHARGE] = Charge((policy, _left(0, retry_s)))
            raise RateLimited(
                f"token {caller.name!r} may send {rate} requests a second to each API process: wait, and"
                " spread or bundle them",
                retry_after_s=retry_s,
            )
        if use.open >= self._open_max:
            scope[CHARGE] = Charge((policy, _left(0, _WINDOW_S)))
            raise TooManyRequestsOpen(
                f"token {caller.name!r} has {use.open} requests open at this API process, as many as it"
                " may: wait for some to end",
                retry_after_s=_WINDOW_S,
            )
        use.full_at_s = now_s + wait_s
        use.open += 1
        left = int((_WINDOW_S - wait_s) * rate + 1e-6)
        scope[CHARGE] = Charge((policy, _left(left, wait_s)), use)

    def _use_of(self, token_id: int) -> _Use:
        use = self._uses.get(token_id)
        if use is None:
            use = self._uses[token_id] = _Use()
            if len(self._uses) > CALLERS_MAX:
                self._uses.popitem(last=False)
        return use


def _left(requests: int, full_in_s: float) -> tuple[bytes, bytes]:
    return b"ratelimit", b'"second";r=%d;t=%d' % (requests, math.ceil(full_in_s))


def headers_of_charge(scope: Any) -> _Pairs:
    """The RateLimit headers of a request's answer; none where no caller was known."""
    charge: Charge | None = scope.get(CHARGE)
    return () if charge is None else charge.headers


def end_charge(scope: Any) -> None:
    """The request of `scope` is answered."""
    charge: Charge | None = scope.get(CHARGE)
    if charge is not None:
        charge.end()
