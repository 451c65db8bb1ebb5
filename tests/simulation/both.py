"""The same calls on a real engine and on its model, compared."""

from __future__ import annotations

import asyncio

from headrace.engines.postgres_errors import PostgresBusy, PostgresDown


class Both:
    """Runs calls on the model in virtual time, which passes between two of them."""

    def __init__(self, world):
        self._world = world

    async def compare(self, real, model, calls):
        """Fail at the first call with different results."""
        expected = [await self._result(real, call) for call in calls]
        own = asyncio.get_running_loop()
        try:
            found = self._run(model, calls)
        finally:
            asyncio.events._set_running_loop(own)
        for call, one, other in zip(calls, expected, found, strict=True):
            assert one == other, (call, one, other)

    def _run(self, model, calls):
        found = []

        async def scenario():
            for call in calls:
                await asyncio.sleep(0.01)
                found.append(await self._result(model, call))

        self._world.run(scenario, hours_max=1)
        return found

    async def _result(self, apply, call):
        try:
            return await apply(*call)
        except (PostgresDown, PostgresBusy):
            raise  # The real engine is too slow: nothing to compare.
        except Exception as error:  # noqa: BLE001 - compared
            return type(error).__name__
