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
    "jobs": "the jobs room does not use Valkey",
    "fetch": "the fetch room does not use Valkey",
    "media": "media nodes use no Valkey",
}
NO_POSTGRES: Final = {"media": "media nodes use no PostgreSQL"}
NO_SLOT: Final = only("jobs fetch", "the room has no slots")
NO_AGENT: Final = only("jobs fetch", "the room has no agent")
NO_WORK: Final = only("jobs", "`headrace work` runs only the jobs room on this site")
NO_SCHEDULER: Final = only("jobs fetch", "the room has no scheduler")
NO_FLUSHER: Final = only("views feed", "the room has no flusher")
NO_API: Final = only("jobs views feed", "the room's test clients do not use the API")
NO_NODE: Final = only("media", "the room has no media node")
LACKS_COMMITS: Final = "lost commits stay lost, except in views, which writes them again"
NO_CACHE: Final = only("media", "only media has a cache on disk")
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
        only("jobs", "covered by jobs: the room's work is jobs, or it has no leases"),
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
        {"media": "these nodes serve unsigned URLs; tests/media tests clocks with signed ones"},
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
        {"media": "media nodes do not wait for syncs"},
        missing=disk.missing_strace,
    ),
    "torn-write": Fault(
        "a media node is killed, and pages of its cache are half written",
        disk.tear_writes,
        NO_CACHE,
    ),
    "read-only-disk": Fault(
        "the folder of objects becomes read-only",
        disk.refuse_writes,
        only("fetch", "of the rooms on this site only fetch writes objects"),
        missing=disk.missing_mounts,
        has_mounts=True,
    ),
    "bit-rot": Fault(
        "bits are flipped in the cache of a running media node", disk.rot_bits, NO_CACHE
    ),
    "lost-fsync": Fault(
        "SIGKILL of PostgreSQL; its disk lost writes of the last seconds that it had confirmed",
        disk.forget_writes,
        only("views", LACKS_COMMITS) | NO_POSTGRES,
    ),
    "network-cut": Fault(
        "all packets to the engines are lost", process.network(lambda _: BLACK_HOLE)
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
        "each HTTP request that writes arrives twice",
        load.repeat_requests,
        {
            "fetch": "the room's test clients do not use HTTP",
            "views": "a hit without an event id counts as often as it arrives",
            "media": "the room's test clients only read",
        },
    ),
    "dns-loss": Fault(
        "name servers do not answer",
        load.lose_names,
        only("fetch", "the room resolves no names of foreign hosts"),
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
        "PostgreSQL and Valkey have no free connection", load.exhaust, NO_POSTGRES
    ),
    "out-of-memory": Fault(
        "SIGKILL of a PostgreSQL backend or of a media worker; Valkey refuses writes",
        load.out_of_memory,
    ),
    "pooler-restart": Fault(
        "SIGKILL and start of PgBouncer in session mode",
        engine.restart_pooler,
        NO_POSTGRES,
        missing=engine.missing_pgbouncer,
        needs=Needs(servers=engine.pooled),
    ),
    "expired-certificate": Fault(
        "the certificate of PostgreSQL has expired; later it is replaced",
        engine.expire,
        {"media": "media nodes use no PostgreSQL; tests/media/test_media_tls.py tests their own"},
        missing=engine.missing_encrypted,
        needs=Needs(servers=engine.encrypted),
    ),
    "s3-errors": Fault(
        "the bucket answers 429, 500 or 503",
        load.fail_bucket,
        only("media", "the room stores objects in a folder on this site; tests/engines tests S3"),
    ),
    "old-and-new": Fault(
        "some roles run older code with the same schema, and some change to the other code",
        load.swap_code,
        missing=missing_old_code,
        needs=Needs(has_old_code=True),
    ),
    "time-zone": Fault(
        "database sessions and a worker have another time zone", load.change_time_zone, NO_POSTGRES
    ),
    "overload": Fault("five times as many clients send requests", load.overload),
    "slow-clients": Fault(
        "100 more connections send one byte at a time",
        load.slow_clients,
        {"fetch": "the fetch room serves no requests on this site"},
    ),
    "rolling-restart": Fault("SIGTERM and start of one role of each kind", load.rolling_restart),
}
