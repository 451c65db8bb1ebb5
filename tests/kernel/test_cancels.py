"""A swallowed cancellation is found and raised again."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from headrace.kernel.resilience import preserve_cancellation, require_not_cancelled


async def _ended(work):
    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    [told] = await asyncio.gather(task, return_exceptions=True)
    return told


@pytest.mark.parametrize("error", [None, ValueError])
async def test_a_cancellation_that_was_swallowed_or_replaced_ends_the_block(error):
    async def work():
        with preserve_cancellation():
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            if error:
                raise error

    assert isinstance(await _ended(work), asyncio.CancelledError)


async def test_what_was_cancelled_before_the_block_does_not_end_it():
    async def work():
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        with preserve_cancellation():
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            require_not_cancelled()
        return "cleaned up"

    assert await _ended(work) == "cleaned up"


async def test_a_timeout_inside_the_block_is_no_cancellation():
    with pytest.raises(TimeoutError), preserve_cancellation():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    require_not_cancelled()
