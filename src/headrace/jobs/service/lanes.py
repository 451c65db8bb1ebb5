"""Limiters and lanes: set limits, look up, pause, consume starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from headrace.engines.caller_transaction import Transaction, runner_for
from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.errors import InvalidJob, LaneUnknown, LimiterInUse, LimiterUnknown
from headrace.jobs.model import Lane, Limiter
from headrace.jobs.sql import SQL
from headrace.jobs.validation import is_number, is_storable, is_whole, require_lane, require_page
from headrace.kernel.errors import FieldProblem, mismatch

SLACK_S: Final = 0.25
SLACK_S_MAX: Final = 60.0
LANES_PER_STEP: Final = 500
SPEND_WAIT_S_MAX: Final = 3_600.0
SPEND_STARTS_MAX: Final = 1_000_000


class Lanes:
    """The limiters and lanes of an app; `Jobs.lanes`."""

    def __init__(self, postgres: Postgres, declare: Callable[[], Awaitable[object]]) -> None:
        self._postgres = postgres
        self._declare = declare

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
        """Set a lane's limits: `starts_max` starts in any `window_s`, `concurrency` at once.

        None means no limit, whatever its limiter has; for `paused` and `weight`: unchanged. With
        `tx` the lane is locked until that ends: commit soon. Without `create` the limiter must
        exist: set, declared or named by a queue.
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
                await self.get(limiter, lane)
        await (self._postgres if tx is None else runner_for(tx)).run(
            SQL.set_lane,
            limiter=limiter,
            lane=lane,
            is_own=True,
            starts_max=starts_max,
            window_s=window_s,
            concurrency=concurrency,
            is_paused=paused,
            weight=weight,
        )

    async def reset(self, limiter: str, lane: str) -> None:
        """Make a lane follow its limiter again, with weight 1 and no pause.

        Raises: LimiterUnknown, LaneUnknown.
        """
        await self.get(limiter, lane)
        await self._set(limiter, lane, is_own=False, is_paused=False, weight=1)

    async def pause(self, limiter: str, lane: str) -> None:
        """Start no more jobs of a lane; running jobs continue, limits and weight stay.

        Raises: LimiterUnknown, LaneUnknown.
        """
        await self.get(limiter, lane)
        await self._set(limiter, lane, is_own=None, is_paused=True, weight=None)

    async def resume(self, limiter: str, lane: str) -> None:
        """Start jobs of a lane again, within its limits.

        Raises: LimiterUnknown, LaneUnknown.
        """
        await self.get(limiter, lane)
        await self._set(limiter, lane, is_own=None, is_paused=False, weight=None)

    async def get(self, limiter: str, lane: str) -> Lane:
        """A lane's limits and current counts. Raises: LimiterUnknown, LaneUnknown."""
        found = None
        if is_storable(limiter) and is_storable(lane):
            found = await store.queues.find_lanes(self._postgres, limiter, lane=lane)
        if not found:
            await self.get_limiter(limiter)
            raise LaneUnknown(limiter, lane)
        return found[0]

    async def list(self, limiter: str, *, after: str = "", lanes_max: int = 100) -> list[Lane]:
        """Up to `lanes_max` lanes of a limiter by name, those after `after`.

        Raises: InvalidFilter, LimiterUnknown.
        """
        require_page("lanes_max", lanes_max)
        found: list[Lane] = []
        if is_storable(limiter) and is_storable(after):
            found = await store.queues.find_lanes(
                self._postgres, limiter, after=after, lanes_max=lanes_max
            )
        if not found:
            await self.get_limiter(limiter)
        return found

    async def spend(
        self, limiter: str, lane: str, starts: int = 1, *, wait_max_s: float = 0.0
    ) -> float | None:
        """Consume `starts` of a lane for other work than jobs. Return the seconds to wait.

        Count the seconds from the call, and begin within the limiter's slack after them. None:
        refused, since the lane is paused or the wait would exceed `wait_max_s`.
        Raises: InvalidJob, LimiterUnknown.
        """
        require_lane(limiter, lane, starts_max=None, window_s=None, concurrency=None, weight=1)
        problems = []
        if not is_whole(starts, 1, SPEND_STARTS_MAX):
            text = mismatch(f"1 to {SPEND_STARTS_MAX}", starts)
            problems.append(FieldProblem("/starts", "invalid", text))
        if not is_number(wait_max_s, 0, SPEND_WAIT_S_MAX):
            text = mismatch(f"seconds from 0 to {SPEND_WAIT_S_MAX:.0f}", wait_max_s)
            problems.append(FieldProblem("/wait_max_s", "invalid", text))
        _refuse(f"lane {lane!r}", problems)
        given = {"limiter": limiter, "lane": lane, "starts": starts, "wait_max_s": wait_max_s}
        row = await self._postgres.one(SQL.spend, **given)
        if row is None:
            # The code of this process may declare it, and have declared nothing so far.
            await self._declare()
            row = await self._postgres.one(SQL.spend, **given)
        if row is None:
            raise await self._unknown(limiter)
        after_s: float | None = row["wait_s"]
        return after_s

    async def set_limiter(
        self,
        limiter: str,
        *,
        starts_max: int | None = None,
        window_s: float | None = None,
        concurrency: int | None = None,
        slack_s: float = SLACK_S,
        is_declared: bool = False,
    ) -> None:
        """Override the limits of a limiter, and so of its lanes without limits of their own.

        Declarations by code (`is_declared`) no longer change them. Lanes follow in steps of 500;
        the next sweep completes an interrupted call. Raises: InvalidJob.
        """
        require_lane(
            limiter,
            "every lane",
            starts_max=starts_max,
            window_s=window_s,
            concurrency=concurrency,
            weight=1,
        )
        if not is_number(slack_s, 0.001, SLACK_S_MAX):
            text = mismatch(f"seconds over 0, up to {SLACK_S_MAX:.0f}", slack_s)
            _refuse(f"limiter {limiter!r}", [FieldProblem("/slack_s", "invalid", text)])
        is_to_spread = await self._postgres.value(
            SQL.set_limiter,
            limiter=limiter,
            starts_max=starts_max,
            window_s=window_s,
            slack_s=slack_s,
            concurrency=concurrency,
            is_set=not is_declared,
        )
        if is_to_spread:
            await self.spread(limiter)

    async def reset_limiter(self, limiter: str) -> None:
        """Remove the override of a limiter; declared limits hold again. Raises: LimiterUnknown."""
        await self.get_limiter(limiter)
        if await self._postgres.run(SQL.reset_limiter, limiter=limiter):
            await self.spread(limiter)

    async def get_limiter(self, limiter: str) -> Limiter:
        """A limiter's limits and its queues. Raises: LimiterUnknown."""
        found = await self._find(limiter)
        if found is None:
            raise await self._unknown(limiter)
        return found

    async def remove_limiter(self, limiter: str) -> None:
        """Remove a limiter and its lanes. Raises: LimiterUnknown, LimiterInUse.

        It must have no queue and no jobs, and no code may have declared its limits.
        """
        if await self._find(limiter) is None:
            raise await self._unknown(limiter, may_create=False)
        rows = await self._postgres.all(SQL.limiter_uses, limiter=limiter)
        if rows:
            raise LimiterInUse(limiter, [row["use"] for row in rows])
        await self._postgres.run(SQL.remove_limiter, limiter=limiter)

    async def limiters(self) -> Sequence[Limiter]:
        """Every limiter by name."""
        return await store.queues.find_limiters(self._postgres)

    async def spread(self, limiter: str) -> None:
        """Apply the limiter's limits to every lane that follows it. Safe to repeat."""
        after: str | None = ""
        while after is not None:
            after = await self._postgres.value(
                SQL.spread_limiter, limiter=limiter, after=after, lanes_max=LANES_PER_STEP
            )

    async def _set(
        self, limiter: str, lane: str, *, is_own: bool | None, is_paused: bool, weight: int | None
    ) -> None:
        """Set pause and weight; limits follow the limiter, or stay if `is_own` is None."""
        limits = dict.fromkeys(("starts_max", "window_s", "concurrency"))
        await self._postgres.run(
            SQL.set_lane,
            limiter=limiter,
            lane=lane,
            is_own=is_own,
            **limits,
            is_paused=is_paused,
            weight=weight,
        )

    async def _find(self, limiter: str) -> Limiter | None:
        if not is_storable(limiter):
            return None
        found = await store.queues.find_limiters(self._postgres, limiter)
        return found[0] if found else None

    async def _unknown(self, limiter: str, *, may_create: bool = True) -> LimiterUnknown:
        """The error that names the limiters that exist."""
        known = [one.limiter for one in await self.limiters()]
        return LimiterUnknown(limiter, known, may_create=may_create)


def _refuse(subject: str, problems: Sequence[FieldProblem]) -> None:
    InvalidJob.require_none(problems, subject[:160])
