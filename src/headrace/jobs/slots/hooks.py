"""The user's start and stop hooks of a slot. Sync ones run in the slot's handler thread, which they may prepare."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Final

from headrace.jobs.errors import SlotHookFailed
from headrace.jobs.handling import outcome_of
from headrace.jobs.slots.threads import Threads
from headrace.jobs.tasks.registry import Hook
from headrace.kernel.logs import logger

HOOK_S_MAX: Final = 60.0
_log: Final = logger(__name__)


async def run_start_hooks(hooks: Sequence[Hook], threads: Threads) -> None:
    """Run the hooks in their order. Raises: SlotHookFailed, at the first that raises or takes too long."""
    for hook in hooks:
        if told := await _fault_of(hook, threads):
            raise SlotHookFailed(
                f"start hook {_name_of(hook)!r} raised, so this slot takes no work: {told}"
            )


async def run_stop_hooks(hooks: Sequence[Hook], threads: Threads) -> None:
    """Run every hook in its order, whatever the others do."""
    for hook in hooks:
        await _fault_of(hook, threads)


async def _fault_of(hook: Hook, threads: Threads) -> str:
    """What went wrong, which is logged with its traceback; empty where nothing did."""
    try:
        async with asyncio.timeout(HOOK_S_MAX):
            answer = hook() if inspect.iscoroutinefunction(hook) else await threads.run(hook)
            if inspect.isawaitable(answer):
                await answer
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - also SystemExit, which is no word of a hook
        outcome = outcome_of(error)
        _log.error(
            "slot_hook_raised",
            hook=_name_of(hook),
            error=outcome.error,
            traceback=outcome.traceback,
        )
        return outcome.error
    return ""


def _name_of(hook: Hook) -> str:
    return getattr(hook, "__qualname__", repr(hook))
