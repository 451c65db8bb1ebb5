"""Faults of processes and networks: killed, stopped, restarted, cut off."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from tests.kit.chaos import PASS, Mode
from tests.kit.storm.storm import FAULTS as STORM_FAULTS
from tests.kit.storm.storm import send_signal

from verification.torture.site import Apply, Site


def storm(name: str) -> Apply:
    """A fault of the storm's table; a silent worker is awake again at its end."""

    async def apply(site: Site) -> float:
        began_s = time.monotonic()
        await STORM_FAULTS[name](site)
        if name.startswith("kill"):
            return began_s
        while site._silent:
            await site.pass_time(0.05)
        return time.monotonic()

    return apply


def stopped(*kinds: str) -> Apply:
    """Stop a role for a while, with SIGSTOP."""

    async def apply(site: Site) -> None:
        process = site.roles[site.pick(*kinds)]
        site.signal(process, signal.SIGSTOP)
        try:
            await site.pass_time(site.chance.uniform(0.5, 2.5))
        finally:
            site.signal(process, signal.SIGCONT)

    return apply


async def stop_valkey(site: Site) -> None:
    """Stop Valkey for a while, with SIGSTOP."""
    pid = site.engines.valkey_pid
    send_signal(pid, signal.SIGSTOP)
    try:
        await site.pass_time(site.chance.uniform(0.5, 2.5))
    finally:
        send_signal(pid, signal.SIGCONT)


async def kill_node(site: Site) -> float:
    """Kill the processes of a media node; the supervisor restarts it."""
    began_s = time.monotonic()
    site.media.pick().kill()
    return began_s


async def stop_node(site: Site) -> None:
    """Stop the processes of a media node for a while."""
    process = site.media.pick().process
    site.signal(process, signal.SIGSTOP)
    try:
        await site.pass_time(site.chance.uniform(0.5, 2.5))
    finally:
        site.signal(process, signal.SIGCONT)


def restarted(name: str) -> Apply:
    """Restart an engine in order."""

    async def apply(site: Site) -> float:
        began_s = time.monotonic()
        await site.engines.restart(name)
        site.doubt(began_s)
        return began_s

    return apply


def network(mode_of: Callable[[Site], Mode]) -> Apply:
    """Change all connections to engines and bucket for a while."""

    async def apply(site: Site) -> None:
        began_s = time.monotonic()
        site.set_network(mode_of(site))
        try:
            await site.pass_time(site.chance.uniform(0.3, 2.0))
        finally:
            site.set_network(PASS)
            site.doubt(began_s)

    return apply
