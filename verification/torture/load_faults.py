"""Faults of load and limits: too much of it, slow clients, full connections and memory, clocks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import asyncpg
from tests.kit.processes import descendants
from tests.kit.storm.storm import ROLES, send_signal
from tests.kit.waiting import wait_true

from verification.torture.site import Site

OVERLOAD: Final = 5
SLOW_CLIENTS: Final = 100
ZONE: Final = "Pacific/Apia"
HOUR_S: Final = 3600.0


async def overload(site: Site) -> None:
    """Five times the clients for a while."""
    for _ in range(OVERLOAD - 1):
        site.add_clients()
    await site.pass_time(site.chance.uniform(1.0, 2.0))
    site.phase.stop.set()
    await site.supervised(*site.phase.clients)
    site.begin_phase()


async def slow_clients(site: Site) -> None:
    """Connections that send one byte of a request at a time, and never a whole one."""
    addresses = [site.address] if "api" in site.roles else []
    addresses += [node.address for node in site.media.cluster.nodes] if site.media else []
    async with AsyncExitStack() as stack:
        writers = []
        for number in range(SLOW_CLIENTS):
            host, _, port = addresses[number % len(addresses)].partition(":")
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                stack.callback(writer.close)
                writers.append(writer)
        for byte in b"GET /healthz HTTP/1.1":
            for writer in writers:
                writer.write(bytes([byte]))
            await site.pass_time(0.08)


async def rolling_restart(site: Site, before: Callable[[str], None] = lambda _: None) -> None:
    """Restart one role of each kind in order, and a media node; each is ready before the next."""
    for kind in sorted({ROLES[name] for name in site.roles}):
        name = site.pick(kind)
        process = site.roles.pop(name)
        site.note_lost(process)
        process.signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait_exit)
        site.note_exit(name, process, code)
        site.forget(process)
        before(name)
        started = site.start_role(name)
        if kind in ("agent", "work"):
            await wait_true(lambda p=started: site.supervised_once(p), what=f"{name} is registered")
    if site.media is not None:
        node = site.media.pick()
        before(node.name)
        node.code = site.code_of(node.name)
        ended, node.process = node.process, None
        ended.signal(signal.SIGTERM)
        node_exit = await asyncio.to_thread(ended.wait_exit)
        site.note_exit(node.name, ended, node_exit)
        if node.process is None:
            node.start()


async def swap_code(site: Site) -> None:
    """Restart one role of each kind and a media node with the other of two versions."""
    await rolling_restart(site, site.swap_code)


async def exhaust_postgres(site: Site) -> None:
    """Take every connection of PostgreSQL after ending those of the roles."""
    url = site.direct.postgres_url
    held: list[Any] = [await asyncpg.connect(url)]
    try:
        await held[0].execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        with suppress(asyncpg.TooManyConnectionsError):
            while True:
                held.append(await asyncpg.connect(url, timeout=10))
        await site.pass_time(site.chance.uniform(0.3, 1.5))
    finally:
        await asyncio.gather(*(one.close(timeout=10) for one in held), return_exceptions=True)


async def exhaust_valkey(site: Site) -> None:
    """Allow no further client of Valkey after ending those of the roles."""
    async with site.valkey() as run:
        await run("CONFIG", "SET", "maxclients", "1")
        try:
            await run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await site.pass_time(site.chance.uniform(0.3, 1.5))
        finally:
            await run("CONFIG", "SET", "maxclients", "10000")


async def exhaust(site: Site) -> None:
    """Exhaust the connections of both engines."""
    await exhaust_postgres(site)
    if site.names & {"views", "feed"}:
        await exhaust_valkey(site)


async def kill_backend(site: Site) -> None:
    """SIGKILL of a PostgreSQL backend, as the OOM killer does: all sessions end."""
    backends = descendants(site.engines.postgres_pid)
    send_signal(site.chance.choice(backends))


async def kill_media_worker(site: Site) -> None:
    """SIGKILL of one process below a media node, as the OOM killer does."""
    process = site.media.pick().process
    below = descendants(process.pid)
    if below:
        send_signal(site.chance.choice(below))


async def out_of_memory(site: Site) -> None:
    """What the OOM killer and Valkey's limit do: a backend, a worker, refused writes."""
    if site.names - {"media"}:
        await kill_backend(site)
    if site.media is not None:
        await kill_media_worker(site)
    if site.names & {"views", "feed"}:
        async with site.valkey() as run:
            memory = await run("CONFIG GET", "maxmemory")
            await run("CONFIG", "SET", "maxmemory", "1")
            try:
                await site.pass_time(site.chance.uniform(0.3, 1.5))
            finally:
                await run("CONFIG", "SET", "maxmemory", memory["maxmemory"])


async def empty_valkey(site: Site) -> None:
    """Delete all data of Valkey. Hits that are not flushed may be lost (docs/promises.md)."""
    views = site.views
    if views is None:
        async with site.valkey() as run:
            await run("FLUSHALL", "SYNC")
        return
    async with views.quiet() as acknowledged, site.valkey() as run:
        stored = await views.counted.stored()
        await run("FLUSHALL", "SYNC")
        site.promised_losses["views"] = views.permit_loss(acknowledged, stored)


async def change_time_zone(site: Site) -> None:
    """Another time zone of the database's sessions, and of a worker that restarts."""
    name = "SELECT current_database()"
    connection = await asyncpg.connect(site.direct.postgres_url)
    end_sessions = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    database = await connection.fetchval(name)
    before = os.environ.get("TZ")
    try:
        await connection.execute(f"ALTER DATABASE {database} SET timezone = '{ZONE}'")
        await connection.execute(end_sessions)
        os.environ["TZ"] = ZONE
        send_signal(site.doom(site.pick(*(ROLES[name] for name in site.roles))).pid)
        await site.pass_time(site.chance.uniform(0.5, 1.5))
    finally:
        os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
        await connection.execute(f"ALTER DATABASE {database} RESET timezone")
        await connection.execute(end_sessions)
        await connection.close(timeout=10)


async def step_clock(site: Site) -> None:
    """The wall clocks of all roles step by up to a day, and back."""
    site.set_clock(site.chance.choice((-24, -1, -0.01, 0.01, 1, 24)) * HOUR_S)
    try:
        await site.pass_time(site.chance.uniform(0.5, 2.0))
    finally:
        site.set_clock(0)


async def repeat_requests(site: Site) -> None:
    """Each writing request over HTTP arrives twice for a while."""
    site.is_repeating = True
    try:
        await site.pass_time(site.chance.uniform(0.5, 2.0))
    finally:
        site.is_repeating = False


async def lose_names(site: Site) -> None:
    """No name server answers for a while."""
    site.fetch.names.is_lost = True
    try:
        await site.pass_time(site.chance.uniform(0.5, 2.5))
    finally:
        site.fetch.names.is_lost = False


async def fail_bucket(site: Site) -> None:
    """The bucket of media answers 503 or 500 to every request."""
    bucket = site.media.cluster.bucket
    bucket.error_status = site.chance.choice((500, 503, 429))
    try:
        await site.pass_time(site.chance.uniform(0.3, 2.0))
    finally:
        bucket.error_status = None
