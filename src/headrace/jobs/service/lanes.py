"""The verbs of limiters and their lanes: set, look, spend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from headrace.engines.caller_transaction import Transaction, runner_for
from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.errors import InvalidJob, LaneUnknown, LimiterUnknown
from headrace.jobs.intake import is_number, is_storable, require_lane, require_page
from headrace.jobs.model import Lane, Limiter
from headrace.kernel.errors import FieldProblem

SLACK_S: Final = 0.25
SLACK_S_MAX: Final = 60.0
LANES_PER_STEP: Final = 500
SPEND_WAIT_S_MAX: Final = 3_600.0
SPEND_STARTS_MAX: Final = 1_000_000


class Lanes:
    """Limiters and lanes as their users see them; `Jobs.lanes`."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def set(
        self,
        limiter: str,
        lane: str,
        *,
        starts_max: int | None,
        window_s: float | None,
        concurrency: int | None,
        paused: bool | None = False,
        weight: int | None = 1,
        create: bool = True,
        tx: Transaction | None = None,
    ) -> None:
        """Set a lane's own limits, live: at most `starts_max` starts in any `window_s`, `concurrency` at once.

        None means no limit, whatever its limiter says; as `paused` or `weight`: as it is. With `tx` the lane stands still until that ends:
        commit soon. Without `create` its limiter has to be known: set, declared or named by a queue.
        Raises: InvalidJob, LimiterUnknown.
        """
        require_lane(
            limiter,
            lane,
            starts_max=starts_max,
            window_s=window_s,
            concurrency=concurrency,
            weight=1 if weight is None else weight,
        )
        if not create:
            with suppress(LaneUnknown):
                await self._require(limiter, lane)
        await store.lanes.set_lane(
            self._postgres if tx is None else runner_for(tx),
            limiter,
            lane,
            starts_max=starts_max,
            window_s=window_s,
            concurrency=concurrency,
            is_paused=paused,
            weight=weight,
        )

    async def reset(self, limiter: str, lane: str) -> None:
        """Let a lane follow its limiter again, with weight 1 and no pause. Raises: LaneUnknown."""
        await self.get(limiter, lane)
        await store.lanes.set_lane(
            self._postgres,
            limiter,
            lane,
            starts_max=None,
            window_s=None,
            concurrency=None,
            is_paused=False,
            weight=1,
            is_own=False,
        )

    async def pause(self, limiter: str, lane: str) -> None:
        """Hand out no more jobs of a lane, whose limits and weight stay; those in hand go on.

        Raises: LimiterUnknown, LaneUnknown.
        """
        await self._require(limiter, lane)
        await store.lanes.pause_lane(self._postgres, limiter, lane, is_paused=True)

    async def resume(self, limiter: str, lane: str) -> None:
        """Hand out the lane's jobs again, within the limits that it has.

        Raises: LimiterUnknown, LaneUnknown.
        """
        await self._require(limiter, lane)
        await store.lanes.pause_lane(self._postgres, limiter, lane, is_paused=False)

    async def get(self, limiter: str, lane: str) -> Lane:
        """A lane's limits and what it is doing. Raises: LaneUnknown."""
        found = None
        if is_storable(limiter) and is_storable(lane):
            found = await store.lanes.find_lane(self._postgres, limiter, lane)
        if found is None:
            raise LaneUnknown(limiter, lane)
        return found

    async def list(self, limiter: str, *, after: str = "", lanes_max: int = 100) -> list[Lane]:
        """Up to `lanes_max` lanes of a limiter by name, those after `after`, such as the last of a page before.

        Raises: InvalidFilter.
        """
        require_page("lanes_max", lanes_max)
        if not is_storable(limiter) or not is_storable(after):
            return []
        return await store.lanes.list_lanes(
            self._postgres, limiter, after=after, lanes_max=lanes_max
        )

    async def spend(
        self, limiter: str, lane: str, starts: int = 1, *, wait_max_s: float = 0.0
    ) -> float | None:
        """Take `starts` out of a lane for what is no job; seconds to wait before they may begin.

        Count them from the call, and begin within the limiter's slack of that. None: refused, since the
        lane is paused or the wait would be longer than `wait_max_s`; nothing was taken.
        Raises: InvalidJob.
        """
        require_lane(limiter, lane, starts_max=None, window_s=None, concurrency=None, weight=1)
        problems = []
        if type(starts) is not int or not 1 <= starts <= SPEND_STARTS_MAX:
            problems.append(FieldProblem("/starts", "invalid", f"expected 1 to {SPEND_STARTS_MAX}"))
        if not is_number(wait_max_s, 0, SPEND_WAIT_S_MAX):
            text = f"expected seconds from 0 to {SPEND_WAIT_S_MAX:.0f}"
            problems.append(FieldProblem("/wait_max_s", "invalid", text))
        _refuse(f"lane {lane!r}", problems)
        return await store.lanes.spend(
            self._postgres, limiter, lane, starts=starts, wait_max_s=wait_max_s
        )

    async def set_limiter(
        self,
        limiter: str,
        *,
        starts_max: int | None = None,
        window_s: float | None = None,
        concurrency: int | None = None,
        slack_s: float = SLACK_S,
    ) -> None:
        """Set the limits of all lanes of a limiter that have none of their own, live.

        From then on what code declares of it changes nothing. Lanes follow in steps of 500; where this is
        cut short, the next sweep goes on. Raises: InvalidJob.
        """
        await self._write_limiter(
            limiter, (starts_max, window_s, concurrency, slack_s), is_set=True
        )

    async def declare_limiter(
        self,
        limiter: str,
        *,
        starts_max: int | None = None,
        window_s: float | None = None,
        concurrency: int | None = None,
        slack_s: float = SLACK_S,
    ) -> None:
        """The same as code says it: nothing changes where it did not, or where a person set them.

        Raises: InvalidJob.
        """
        await self._write_limiter(
            limiter, (starts_max, window_s, concurrency, slack_s), is_set=False
        )

    async def reset_limiter(self, limiter: str) -> None:
        """Take a person's limits back: those that code declares hold again, or none. Raises: LimiterUnknown."""
        await self.get_limiter(limiter)
        if await store.lanes.reset_limiter(self._postgres, limiter):
            await self.spread(limiter)

    async def get_limiter(self, limiter: str) -> Limiter:
        """A limiter's limits and the queues that it spans. Raises: LimiterUnknown."""
        found = (
            await store.lanes.find_limiters(self._postgres, limiter) if is_storable(limiter) else []
        )
        if not found:
            raise LimiterUnknown(limiter)
        return found[0]

    async def limiters(self) -> Sequence[Limiter]:
        """Every limiter by name."""
        return await store.lanes.find_limiters(self._postgres)

    async def spread(self, limiter: str) -> None:
        """Let every lane of the limiter that has no limits of its own follow it. Safe to repeat."""
        after: str | None = ""
        while after is not None:
            after = await store.lanes.spread_limiter(
                self._postgres, limiter, after=after, lanes_max=LANES_PER_STEP
            )

    async def _require(self, limiter: str, lane: str) -> None:
        """Raises: LaneUnknown, or LimiterUnknown where nothing knows that either."""
        try:
            await self.get(limiter, lane)
        except LaneUnknown:
            await self.get_limiter(limiter)
            raise

    async def _write_limiter(
        self,
        limiter: str,
        limits: tuple[int | None, float | None, int | None, float],
        *,
        is_set: bool,
    ) -> None:
        starts_max, window_s, concurrency, slack_s = limits
        require_lane(
            limiter,
            "every lane",
            starts_max=starts_max,
            window_s=window_s,
            concurrency=concurrency,
            weight=1,
        )
        if not is_number(slack_s, 0.001, SLACK_S_MAX):
            text = f"expected seconds over 0, up to {SLACK_S_MAX:.0f}"
            _refuse(f"limiter {limiter!r}", [FieldProblem("/slack_s", "invalid", text)])
        is_to_spread = await store.lanes.set_limiter(
            self._postgres,
            limiter,
            starts_max=starts_max,
            window_s=window_s,
            slack_s=slack_s,
            concurrency=concurrency,
            is_set=is_set,
        )
        if is_to_spread:
            await self.spread(limiter)


def _refuse(subject: str, problems: Sequence[FieldProblem]) -> None:
    if problems:
        lines = "; ".join(f"{p.pointer}: {p.text}" for p in problems)
        raise InvalidJob(f"{subject[:160]}: {lines}", problems=tuple(problems))
