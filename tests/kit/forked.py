"""Functions in processes that are forked from a prepared one: 10 ms instead of an interpreter.

    process = start_forked(flush, url, crash_at="views.read:3")
    assert await ended(process) == -signal.SIGKILL

The function is a coroutine function of an importable module, its arguments can be pickled.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Callable, Coroutine
from multiprocessing.process import BaseProcess
from typing import Any, Final

from headrace.kernel import resilience

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "tests.kit.forked",
        "headrace.app",
        "headrace.fetch",
        "headrace.views.worker",
        "headrace.jobs.fleet.scheduler",
    ]
)


def start_forked(
    function: Callable[..., Coroutine[Any, Any, None]], *args: Any, crash_at: str = ""
) -> BaseProcess:
    """Run `function(*args)` in a new process that dies at the crash point `crash_at`."""
    # A folder of the run, which its cleanup removes.
    config = multiprocessing.current_process()._config
    config["tempdir"] = config.get("tempdir") or tempfile.mkdtemp(prefix="mp-")
    process = _CONTEXT.Process(target=_run, args=(function, args, crash_at), daemon=True)
    process.start()
    return process


async def ended(process: BaseProcess) -> int | None:
    """Wait for the end of a process; return its exit code, or minus the signal."""
    await asyncio.to_thread(process.join, 60)
    return process.exitcode


def _run(function: Callable[..., Any], args: tuple[Any, ...], crash_at: str) -> None:
    name, _, passes = crash_at.partition(":")
    resilience._passes_left.clear()
    if name:
        resilience._passes_left[name] = int(passes or 1)
    asyncio.run(function(*args))
