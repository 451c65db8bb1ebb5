"""The table of faults: which rooms each meets, why not the others, what it needs.

Applying a fault is a function of the site: it injects, waits, heals, and returns when its effect
ended. A row that cannot be injected by this machine, or that has no meaning, gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.kit.chaos import BLACK_HOLE, ONE_WAY, RESET, delay
from tests.kit.old_code import missing_old_code

from verification.torture import disk_faults as disk
from verification.torture import engine_faults as engine
from verification.torture import load_faults as load
from verification.torture import process_faults as process
from verification.torture.site import ROOMS, Apply, Needs


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table."""

    text: str
    """What happens, for the page."""
    apply: Apply
    without: Mapping[str, str] = field(default_factory=dict)
    """Rooms that it does not meet, each with the reason."""
    missing: Callable[[], str | None] = lambda: None
    """Why it cannot run on this machine, or None."""
    needs: Needs = field(default_factory=Needs)
    has_mounts: bool = False

    @property
    def rooms(self) -> list[str]:
        """Rooms that it meets."""
        return [room for room in ROOMS if room not in self.without]


def only(rooms: str, reason: str) -> dict[str, str]:
    """The reason for all rooms except these."""
    return {room: reason for room in ROOMS if room not in rooms.split()}


NO_VALKEY: Final = {
    "jobs": "jobs sends no command to Valkey",
    "fetch": "fetch sends no command to Valkey",
    "media": "media nodes use no Valkey",
}
NO_POSTGRES: Final = {"media": "media nodes use no PostgreSQL"}
NO_SLOT: Final = only("jobs fetch", "the room has no slots")
NO_AGENT: Final = only("jobs fetch", "the room has no agent")
NO_WORK: Final = only("jobs", "`headrace work` runs only jobs here")
NO_SCHEDULER: Final = only("jobs fetch", "the room has no scheduler")
NO_FLUSHER: Final = only("views feed", "the room has no flusher")
NO_API: Final = only("jobs views feed", "the room's clients here do not use the API")
NO_NODE: Final = only("media", "the room has no media node")
LACKS_COMMITS: Final = "the commits of these seconds are lost; only views writes them again"
NO_CACHE: Final = only("media", "only media keeps files that it can replace")
FAULTS: Final[dict[str, Fault]] = {
    "kill-slot": Fault("SIGKILL of a slot", process.storm("kill_slot"), NO_SLOT),
    "kill-agent": Fault("SIGKILL of an agent", process.storm("kill_agent"), NO_AGENT),
    "kill-worker": Fault("SIGKILL of `headrace work`", process.storm("kill_worker"), NO_WORK),
    "kill-scheduler": Fault(
        "SIGKILL of a scheduler", process.storm("kill_scheduler"), NO_SCHEDULER
    ),
    "kill-flusher": Fault("SIGKILL of a flusher", process.storm("kill_flusher"), NO_FLUSHER),
    "kill-api": Fault("SIGKILL of the API", process.storm("kill_api"), NO_API),
    "kill-node": Fault("SIGKILL of a media node", process.kill_node, NO_NODE),
    "kill-postgres": Fault("SIGKILL of PostgreSQL", process.storm("kill_postgres"), NO_POSTGRES),
    "kill-valkey": Fault("SIGKILL of Valkey", process.storm("kill_valkey"), NO_VALKEY),
    "stop-host": Fault(
        "SIGSTOP of a worker past its lease",
        process.storm("stop_host"),
        only("jobs", "jobs covers it: the room's work is jobs, or it has no leases"),
    ),
    "stop-scheduler": Fault("SIGSTOP of a scheduler", process.stopped("scheduler"), NO_SCHEDULER),
    "stop-flusher": Fault("SIGSTOP of a flusher", process.stopped("flusher"), NO_FLUSHER),
    "stop-api": Fault("SIGSTOP of the API", process.stopped("api"), NO_API),
    "stop-node": Fault("SIGSTOP of a media node", process.stop_node, NO_NODE),
    "stop-postgres": Fault("SIGSTOP of PostgreSQL", process.storm("freeze_postgres"), NO_POSTGRES),
    "stop-valkey": Fault("SIGSTOP of Valkey", process.stop_valkey, NO_VALKEY),
    "clock-step": Fault(
        "wall clocks of all roles step by up to a day, and back",
        load.step_clock,
        {"media": "signed links and clocks: tests/media; nodes here serve unsigned"},
        needs=Needs(has_stepped_clock=True),
    ),
    "disk-full": Fault(
        "the disk of engines, objects and nodes is full",
        disk.fill_disk,
        missing=disk.missing_mounts,
        needs=Needs(mounted=disk.small_disk),
        has_mounts=True,
    ),
    "slow-disk": Fault(
        "each sync of the engines takes 0.2 s longer",
        disk.slow_disk,
        {"media": "media nodes wait for no sync"},
        missing=disk.missing_strace,
    ),
    "torn-write": Fault(
        "half-written pages in the cache of a killed node", disk.tear_writes, NO_CACHE
    ),
    "read-only-disk": Fault(
        "the folder of objects becomes read-only",
        disk.refuse_writes,
        only("fetch", "only fetch writes objects; engines and nodes have open files on their disk"),
        missing=disk.missing_mounts,
        has_mounts=True,
    ),
    "bit-rot": Fault("flipped bits in the cache of a running node", disk.rot_bits, NO_CACHE),
    "lost-fsync": Fault(
        "SIGKILL of PostgreSQL, and its disk lost the last seconds that it had confirmed",
        disk.forget_writes,
        only("views", LACKS_COMMITS) | NO_POSTGRES,
    ),
    "network-cut": Fault(
        "all packets to engines and bucket are lost", process.network(lambda _: BLACK_HOLE)
    ),
    "network-delay": Fault(
        "each request is delayed by 0.02 to 0.2 s",
        process.network(lambda site: delay(site.chance.uniform(0.02, 0.2))),
    ),
    "network-one-way": Fault(
        "requests arrive, replies are lost", process.network(lambda _: ONE_WAY)
    ),
    "network-reset": Fault("connections are reset", process.network(lambda _: RESET)),
    "duplication": Fault(
        "each writing request over HTTP arrives twice",
        load.repeat_requests,
        {
            "fetch": "its requests here do not use HTTP",
            "views": "a hit without an event id counts as often as it arrives",
            "media": "its requests only read",
        },
    ),
    "dns-loss": Fault(
        "name servers do not answer",
        load.lose_names,
        only("fetch", "the room resolves no names of others"),
    ),
    "restart-postgres": Fault(
        "orderly restart of PostgreSQL", process.restarted("postgres"), NO_POSTGRES
    ),
    "restart-valkey": Fault("orderly restart of Valkey", process.restarted("valkey"), NO_VALKEY),
    "failover-sync": Fault(
        "a synchronous standby is promoted after SIGKILL of its primary",
        engine.fail_over,
        NO_POSTGRES,
        needs=Needs(servers=engine.pair),
    ),
    "failover-async": Fault(
        "a standby that lacks the last commits is promoted after SIGKILL of its primary",
        engine.fail_over_behind,
        only("views", LACKS_COMMITS) | NO_POSTGRES,
        needs=Needs(servers=engine.lagging_pair),
    ),
    "resharding": Fault(
        "hash slots of a Valkey cluster move",
        engine.reshard,
        NO_VALKEY,
        needs=Needs(servers=engine.cluster),
    ),
    "emptied-valkey": Fault("FLUSHALL of Valkey", load.empty_valkey, NO_VALKEY),
    "exhausted-connections": Fault(
        "no free connection in either engine", load.exhaust, NO_POSTGRES
    ),
    "out-of-memory": Fault(
        "SIGKILL of a backend or of a node's worker; Valkey refuses writes", load.out_of_memory
    ),
    "pooler-restart": Fault(
        "SIGKILL and start of PgBouncer in session mode",
        engine.restart_pooler,
        NO_POSTGRES,
        missing=engine.missing_pgbouncer,
        needs=Needs(servers=engine.pooled),
    ),
    "expired-certificate": Fault(
        "the certificate of PostgreSQL has expired, and is replaced",
        engine.expire,
        {"media": "nodes use no PostgreSQL; theirs: tests/media/test_media_tls.py"},
        missing=engine.missing_encrypted,
        needs=Needs(servers=engine.encrypted),
    ),
    "s3-errors": Fault(
        "the bucket answers 429, 500 or 503",
        load.fail_bucket,
        only("media", "objects of this site are files; with S3: tests/engines"),
    ),
    "old-and-new": Fault(
        "roles of older code, which has the same schema, beside the present ones; some swap",
        load.swap_code,
        missing=missing_old_code,
        needs=Needs(has_old_code=True),
    ),
    "time-zone": Fault(
        "another time zone of sessions and of a worker", load.change_time_zone, NO_POSTGRES
    ),
    "overload": Fault("five times the clients", load.overload),
    "slow-clients": Fault(
        "100 connections that send a byte at a time",
        load.slow_clients,
        {"fetch": "fetch serves no requests"},
    ),
    "rolling-restart": Fault("SIGTERM and start of one role of each kind", load.rolling_restart),
}
