"""Reads of analysts and lists of the console on a standby, `postgres.replica_url`.

    reads.all(query) --> replica, if it answered a probe within 2 s and its lag is allowed
                    `--> otherwise the primary, counted in `postgres_replica_fallbacks_total`

The lag is the age of the last transaction that the standby replayed. On an idle primary it grows
although nothing is missing; reads then use the primary. Only single statements may be read here,
and none whose result decides a write.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any, Final

import asyncpg

from headrace.engines.postgres import SQL, Postgres, PostgresConfig, Runner
from headrace.engines.postgres_errors import PostgresBusy, PostgresDown, SchemaBehind
from headrace.engines.sql import Query
from headrace.kernel.errors import Conflict, Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.metrics import counter, gauge

PROBE_EVERY_S: Final = 2.0
PROBE_S: Final = 1.0
"""Wait limit of a probe: a read waits that long for a replica that does not answer."""
replica_lag_s: Final = gauge(
    "postgres_replica_lag_seconds", "Age of the last transaction replayed by postgres.replica_url."
)
fallbacks: Final = counter(
    "postgres_replica_fallbacks_total",
    "Reads for postgres.replica_url that the primary answered, by cause.",
    reason=("down", "late", "conflict"),
)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Whether reads use the replica, its lag, and the reason if they do not."""

    is_used: bool
    lag_s: float | None
    problem: str = ""

    @property
    def text(self) -> str:
        """The state as one phrase."""
        if self.is_used:
            return f"replica, at most {self.lag_s:.1f} s behind"
        return f"primary, because the replica {self.problem}"


class Replica(Runner):
    """Runs queries on a standby, and on the primary while the standby is down or late.

    A query that is run for its effect uses the primary.
    """

    def __init__(self, primary: Postgres, url: str, config: PostgresConfig) -> None:
        self._primary = primary
        own = replace(config, direct_url=None, replica_url=None)
        self._standby = Postgres(url, own, role="standby")
        self._lag_max_s = config.replica_lag_max_s
        self._state = ReplicaState(is_used=False, lag_s=None, problem="was not probed yet")
        self._probed_s = float("-inf")
        self._sparse_log = SparseLogger(logger(__name__))

    async def close(self) -> None:
        """Close the connections to the standby."""
        await self._standby.close()

    async def state(self) -> ReplicaState:
        """The state, probed every two seconds; reads meanwhile use the last one."""
        if time.monotonic() - self._probed_s >= PROBE_EVERY_S:
            self._probed_s = time.monotonic()
            self._state = await self._probe()
        return self._state

    async def _probe(self) -> ReplicaState:
        try:
            async with asyncio.timeout(PROBE_S):
                lag_s = await self._standby.value(SQL.replica_lag)
        except (TimeoutError, Unavailable, Conflict) as error:
            self._sparse_log.warning("replica_down", error=str(error) or "no response in time")
            return ReplicaState(is_used=False, lag_s=None, problem="does not respond")
        if lag_s is None:
            return ReplicaState(is_used=False, lag_s=None, problem="is not a standby")
        replica_lag_s.set(lag_s)
        if lag_s > self._lag_max_s:
            text = f"is {lag_s:.0f} s behind, over postgres.replica_lag_max"
            return ReplicaState(is_used=False, lag_s=lag_s, problem=text)
        return ReplicaState(is_used=True, lag_s=lag_s)

    async def call(self, method: str, query: Query, parameters: dict[str, Any]) -> Any:
        """As `Runner.call`, on the standby if it is usable."""
        if method == "execute":
            return await self._primary.call(method, query, parameters)
        state = await self.state()
        reason = "late" if state.lag_s is not None else "down"
        if state.is_used:
            try:
                return await self._standby.call(method, query, parameters)
            except PostgresBusy as error:
                # A statement that is too slow here is too slow on the primary.
                if not isinstance(error.__cause__, asyncpg.SerializationError):
                    raise
                reason = "conflict"
            except (PostgresDown, SchemaBehind):
                reason, self._probed_s = "down", float("-inf")
            except asyncio.CancelledError:
                # The caller's wait limit: the next read probes first.
                self._probed_s = float("-inf")
                raise
        fallbacks.labels(reason=reason).inc()
        return await self._primary.call(method, query, parameters)
