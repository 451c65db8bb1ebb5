"""Checks of `headrace doctor`: machine, schema, tokens, rooms, object store and media node.

Each check is a function that returns findings and never raises: an engine that is down is a
finding with a fix. A machine that only serves media has neither PostgreSQL nor Valkey; there, only
the checks of object store and media run.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from headrace.cli.app_context import App
from headrace.cli.doctor_backup import (
    NOT_PROMOTED_FIX,
    check_archive,
    check_backup,
    check_standby,
    special_folder,
)
from headrace.cli.doctor_engines import (
    CHECK_S,
    Finding,
    check_postgres,
    check_secrets,
    check_valkey,
    store_fault,
    store_finding,
)
from headrace.cli.doctor_media import (
    check_data_plane,
    check_media_cluster,
    check_media_disks,
    check_media_upstream,
    serves_media_alone,
)
from headrace.engines import Engines
from headrace.engines.blobs import Blobs, BlobsDown, StoreMismatch
from headrace.engines.embedded import FolderUnusable, NotRunning
from headrace.engines.embedded.data_folder import require_owner
from headrace.engines.endpoints import masked_url
from headrace.engines.migrate import plan_migrations
from headrace.engines.mount_guard import RECORD_FILE
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.valkey import ValkeyDown
from headrace.kernel import spans
from headrace.kernel.config import ENV_PREFIX, Loaded
from headrace.kernel.errors import TO_DOCTOR, HeadraceError
from headrace.kernel.resilience import RoleDeaths
from headrace.kernel.terminal import pluralize
from headrace.views.durability_wait import durability_of
from headrace.web.tokens import RootToken, Tokens, dead_token, remedy_for

STORE_S: Final = 6.0
"""Longest probe of the store, so that its address and cause are reported within CHECK_S."""
DISK_FREE_BYTES_MIN: Final = 2 * 1024**3
FILES_MIN: Final = 4096
EVERYWHERE: Final = ("0.0.0.0", "::", "*")  # noqa: S104 - looked for, never listened on
DIED_LATELY_S: Final = 300.0
WEBHOOK_FAILURES_SEEN: Final = 5
"""Consecutive failures that are reported: about a minute and a half."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of `subject`; it is skipped while one of its `needs` is down."""

    subject: str
    run: Callable[[], Awaitable[list[Finding]]]
    needs: frozenset[str] = frozenset()


ENGINES: Final = {
    "postgres": ("PostgreSQL", ("postgres.url", "postgres.direct_url")),
    "valkey": ("Valkey", ("valkey.url",)),
}
"""Names of engines, and the settings with their addresses."""
DOWN: Final = {PostgresDown: "postgres", ValkeyDown: "valkey", BlobsDown: "blobs"}
SCHEMA_FITS: Final = Finding("schema", "ok", "up to date")
TABLES: Final = frozenset({"postgres", "schema"})
ALL: Final = TABLES | {"valkey"}


async def check_up(app: App, packages: tuple[str, ...]) -> list[Finding]:
    """Run every check, in the order in which findings should be fixed."""
    findings = [*check_owner(app.data_folder), *check_machine(app)]
    if findings[0].subject == "data folder":
        return findings  # the check would store an object as root in another user's folder
    special = special_folder(app)
    if special is not None:
        checks = [] if special else [Check("standby", lambda: check_standby(app))]
        return [*findings, *special, *await _run_checks(app, checks)]
    try:
        engines = app.engines
    except NotRunning as error:
        if serves_media_alone(app):
            findings.append(Finding("engines", "ok", "none needed: this machine only serves media"))
            return [*findings, *await _run_checks(app, _media_checks(app))]
        # A missing object store may be the cause.
        checks = _media_checks(app)[:1] if (app.data_folder / RECORD_FILE).exists() else []
        checks.append(Check("backup archive", lambda: check_archive(app)))
        found = await _run_checks(app, checks)
        is_restored = NOT_PROMOTED_FIX in [one.fix for one in found]
        text, _, fix = error.text.rpartition(": ")
        if is_restored:  # Without a promotion `headrace up` refuses this folder.
            text, fix = "no engines run", NOT_PROMOTED_FIX
        return [*findings, Finding("engines", "fail", text, fix), *found]
    except HeadraceError as error:
        return [*findings, Finding("engines", "fail", error.text)]
    checks = [
        Check("postgres", lambda: check_postgres(app, engines)),
        Check("schema", lambda: check_schema_state(engines, packages), frozenset({"postgres"})),
        Check("backup", lambda: check_backup(app, engines)),
        Check("secret", lambda: check_secrets(app, engines), TABLES),
        Check("token", lambda: check_token(app, engines), TABLES),
        Check("webhooks", lambda: check_webhooks(app), TABLES),
        Check("valkey", lambda: check_valkey(engines)),
        Check("views", lambda: check_views(app, engines), frozenset({"valkey"})),
        Check("flusher", lambda: check_flusher(app), ALL),
        Check("feed", lambda: check_feed(app), ALL),
        *_media_checks(app),
    ]
    return [*findings, *await _run_checks(app, checks)]


def _media_checks(app: App) -> list[Check]:
    """Checks that also run on machines that only serve media."""
    return [
        Check("blobs", lambda: check_blobs(app.blobs)),
        Check("media data plane", lambda: check_data_plane(app)),
        Check("media disks", lambda: check_media_disks(app)),
        Check("media cluster", lambda: check_media_cluster(app)),
        Check("media upstream", lambda: check_media_upstream(app)),
        Check("traces", check_traces),
    ]


async def _run_checks(app: App, checks: list[Check]) -> list[Finding]:
    """Run `checks`; an engine that is down is one finding, not one per check that needs it."""
    findings: list[Finding] = []
    down: set[str] = set()
    for check in checks:
        if down & check.needs:
            continue
        try:
            found = await asyncio.wait_for(check.run(), CHECK_S)
        except TimeoutError:
            found = [unanswered(app.config, check.subject)]
            down.add(check.subject)
        except HeadraceError as error:
            engine = engine_of(error)
            found = [] if engine in down else [failed(app.config, engine or check.subject, error)]
            down.add(engine)
        except OSError as error:
            found = [refused(check.subject, error)]
        if check.subject == "schema" and SCHEMA_FITS not in found:
            down.add("schema")
        if check.subject == "blobs" and found and found[-1].state == "fail":
            down.add("blobs")
        known = {one.text for one in findings if one.state == "fail"}
        findings += [one for one in found if one.text not in known]
    return findings


async def check_traces() -> list[Finding]:
    """Whether the receiver of spans accepts connections, if tracing is on."""
    url = spans.endpoint()
    if url is None:
        return []
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        _, writer = await asyncio.open_connection(parts.hostname, port)
    except OSError as error:
        text = f"{parts.hostname}:{port} accepts no connection, so spans are dropped ({error})"
        return [Finding("traces", "warn", text, f"start it, or correct {spans.ENDPOINTS[1]}")]
    writer.close()
    return [Finding("traces", "ok", f"spans go to {parts.hostname}:{port}")]


def check_owner(folder: Path) -> list[Finding]:
    """Report a data folder of another user when run as root."""
    try:
        require_owner(folder)
    except FolderUnusable as error:
        if os.geteuid() == 0:
            return [Finding("data folder", "fail", error.text)]
    return []


def check_machine(app: App) -> list[Finding]:
    """Run the checks that need no engine."""
    findings: list[Finding] = []
    checks: dict[str, Callable[[], list[Finding]]] = {
        "disk": lambda: check_disk(app.data_folder),
        "open files": check_limits,
        "secret": lambda: check_secret(app),
        "media": lambda: check_media_urls(app),
        "roles": lambda: check_roles(app.data_folder),
    }
    for subject, check in checks.items():
        try:
            findings += check()
        except OSError as error:
            findings.append(refused(subject, error))
    return findings


def engine_of(error: HeadraceError) -> str:
    """The engine that is down with `error`; empty for another fault."""
    return next((name for kind, name in DOWN.items() if isinstance(error, kind)), "")


def engine_fix(config: Loaded, subject: str) -> str:
    """How to reach an engine that is down, with the settings that have its address."""
    settings = [setting_of(config, key) for key in ENGINES[subject][1]]
    found = " or ".join(filter(None, settings))
    return f"start it, or correct {found}" if found else "run `headrace up`, which starts it"


def setting_of(config: Loaded, key: str) -> str:
    """Where setting `key` was set: a variable, a flag or a line of a file; empty if nowhere."""
    source = config.written[key][1]
    section, _, name = key.partition(".")
    if source == "default":
        return ""
    is_word = source.startswith(("--", ENV_PREFIX))
    return source if is_word else f"`{name}` of [{section}] in {source}"


def failed(config: Loaded, subject: str, error: HeadraceError) -> Finding:
    """The finding for an error, whose text names the fix unless that is this command."""
    text = TO_DOCTOR.sub("", error.text)
    has_fix = text == error.text or subject not in ENGINES
    return Finding(subject, "fail", text, "" if has_fix else engine_fix(config, subject))


def unanswered(config: Loaded, subject: str) -> Finding:
    """The finding for a check that took too long."""
    text = f"no answer within {CHECK_S:.0f} s"
    if subject not in ENGINES:
        return Finding(subject, "fail", text)
    name, keys = ENGINES[subject]
    url = config.written[keys[0]][0]
    text = f"{name} at {masked_url(url)}: {text}" if url else text
    return Finding(subject, "fail", text, engine_fix(config, subject))


def refused(subject: str, error: OSError) -> Finding:
    """The finding for a file that cannot be read."""
    reason = (error.strerror or str(error)).lower()
    fix = f"run as the user who owns it; current uid is {os.geteuid()}"
    return Finding(subject, "fail", f"{error.filename}: {reason}", fix)


def check_disk(folder: Path) -> list[Finding]:
    """Check free space on the disk of the data folder."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(present).free
    text = f"{free_bytes / 1024**3:.1f} GiB free at {present}"
    if free_bytes < DISK_FREE_BYTES_MIN:
        return [Finding("disk", "fail", text, "free space: PostgreSQL stops on a full disk")]
    return [Finding("disk", "ok", text)]


def check_limits() -> list[Finding]:
    """Check the limit of open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < FILES_MIN:
        fix = f"raise it with `ulimit -n {FILES_MIN}` or LimitNOFILE= in the unit"
        return [Finding("open files", "warn", f"at most {files} per process", fix)]
    return [Finding("open files", "ok", f"at most {files} per process")]


def check_secret(app: App) -> list[Finding]:
    """Check source and permissions of the root secret."""
    if os.environ.get("HEADRACE_SECRET"):
        return [Finding("secret", "ok", "from HEADRACE_SECRET")]
    path = app.data_folder / "secret"
    if not path.exists():
        return [Finding("secret", "ok", f"will be created in {path} on first start")]
    if path.stat().st_mode & 0o077:
        return [Finding("secret", "fail", f"{path} is readable by others", f"chmod 600 {path}")]
    return [Finding("secret", "ok", f"in {path}")]


def check_media_urls(app: App) -> list[Finding]:
    """Check that clients can reach media URLs, and by HTTPS if it is served."""
    config = app.config.sections["media"]
    host, port = config.listen
    text = ""
    if config.public_url is None and host in EVERYWHERE:
        text = f"URLs begin with http://{host}:{port}, which clients cannot reach"
    elif config.public_url is None and config.listen_tls is not None:
        text = f"URLs begin with http://{host}:{port}, though media.listen_tls serves HTTPS"
    if text:
        return [Finding("media", "warn", text, "set media.public_url (HEADRACE_MEDIA_PUBLIC_URL)")]
    return []


def check_roles(folder: Path) -> list[Finding]:
    """Report roles of `headrace up` that died lately. One that dies repeatedly may seem ready."""
    now_s = time.time()
    return [
        Finding(
            "roles",
            "warn",
            f"{name} died {now_s - death['died_at_s']:.0f} s ago with exit code"
            f" {death['exit_code']}, {pluralize(death['deaths'], 'death')} in a row",
            "read its last lines in the output of `headrace up`",
        )
        for name, death in RoleDeaths.read(folder, within_s=DIED_LATELY_S).items()
    ]


async def check_schema_state(engines: Engines, packages: tuple[str, ...]) -> list[Finding]:
    """Check for missing migrations."""
    missing = await plan_migrations(engines.postgres, packages)
    if missing:
        text = f"{len(missing)} migration(s) missing, first {missing[0].label}"
        return [Finding("schema", "fail", text, "run `headrace migrate`")]
    return [SCHEMA_FITS]


async def check_token(app: App, engines: Engines) -> list[Finding]:
    """Check that the root token in the data folder is valid."""
    path = app.data_folder / "token"
    if not path.exists():
        return [Finding("token", "ok", f"no {path} on this machine; `headrace up` creates it")]
    found = RootToken(path, await Tokens(engines.postgres).state_of(path.read_text().strip()))
    if found.state == "valid":
        return [Finding("token", "ok", f"in {path}")]
    if found.state == "unknown":
        text = f"the token in {path} is unknown to this database, which may be a restored backup"
        fix = "start `headrace up`, which registers it, or restore the token file of the backup"
        return [Finding("token", "warn", text, fix)]
    return [Finding("token", "fail", dead_token(found), remedy_for(found))]


async def check_webhooks(app: App) -> list[Finding]:
    """Check for webhooks that are disabled or failing."""
    fetch = app.installed_fetch()
    if fetch is None:
        return []
    hooks = await fetch.webhooks.list(webhooks_max=1000)
    gone = [hook.customer for hook in hooks if hook.disabled_at is not None]
    failing = [hook.customer for hook in hooks if hook.failures >= WEBHOOK_FAILURES_SEEN]
    found = []
    if gone:
        text = f"disabled, as their receivers returned 410: {', '.join(gone[:5])} ({len(gone)})"
        fix = "set them again with `headrace fetch customer set CUSTOMER --webhook URL`"
        found.append(Finding("webhooks", "warn", text, fix))
    if failing:
        text = f"deliveries fail: {', '.join(failing[:5])} ({len(failing)})"
        fix = "see `headrace fetch webhook show CUSTOMER`; results are kept meanwhile"
        found.append(Finding("webhooks", "warn", text, fix))
    if hooks and not found:
        found.append(
            Finding(
                "webhooks",
                "ok",
                f"{pluralize(len(hooks), 'webhook accepts', 'webhooks accept')} results",
            )
        )
    return found


async def check_views(app: App, engines: Engines) -> list[Finding]:
    """Check that Valkey can keep the promise of `views.durability`."""
    config = app.config.sections["views"]
    policy, replicas = await durability_of(engines.valkey)
    if config.durability == "fast":
        return [
            Finding("views", "ok", f"views.durability is fast; Valkey's appendfsync is {policy}")
        ]
    if config.durable_replicas:
        text = f"{replicas} of {config.durable_replicas} replicas required for durable hits"
        if replicas < config.durable_replicas:
            fix = "attach replicas, or lower views.durable_replicas"
            return [Finding("views", "fail", text, fix)]
        return [Finding("views", "ok", text)]
    if policy != "always":
        text = f"durable hits wait for the append-only file, and appendfsync is {policy}"
        fix = "set appendfsync always, or views.durable_replicas, or views.durability = fast"
        return [Finding("views", "fail", text, fix)]
    return [Finding("views", "ok", "views.durability is durable; Valkey's appendfsync is always")]


async def check_feed(app: App) -> list[Finding]:
    """Check that the index of the feed has no posts that PostgreSQL lost."""
    shards = await app.feed.index.stats()
    if any(shard.state == "ahead" for shard in shards):
        text = (
            "index in Valkey: PostgreSQL crashed or failed over, and pages may show posts that it"
            " lost"
        )
        return [Finding("feed", "warn", text, "run a flusher, or `headrace feed rebuild`")]
    return [
        Finding("feed", "ok", f"index in Valkey: {', '.join(sorted({s.state for s in shards}))}")
    ]


async def check_flusher(app: App) -> list[Finding]:
    """Check that a flusher writes acknowledged hits to PostgreSQL."""
    lags = await app.views.analytics.lag()
    idle = [lag for lag in lags if lag.pending and lag.flusher is None]
    if idle:
        calls, oldest_s = sum(lag.pending for lag in idle), max(lag.oldest_s for lag in idle)
        found = pluralize(calls, "call")
        text = f"the views of {found} wait without a flusher, the oldest for {oldest_s:.0f} s"
        return [Finding("flusher", "warn", text, "start `headrace flusher` on one or two machines")]
    return [Finding("flusher", "ok", "no views wait without a flusher")]


async def check_blobs(blobs: Blobs) -> list[Finding]:
    """Check that the store is the known one and can store, read and delete an object."""
    try:
        await blobs.verify_store()
    except StoreMismatch as error:
        fix = error.advice
        return [Finding("blobs", "fail", f"folder {blobs.folder}: {error.fault}", fix)]
    try:
        async with asyncio.timeout(STORE_S):
            fault = await store_fault(blobs)
    except (BlobsDown, TimeoutError) as error:
        if isinstance(error, BlobsDown) and blobs.endpoint is None:
            raise
        return [await store_finding(blobs, getattr(error, "reason", ""))]
    if not fault:
        return [Finding("blobs", "ok", "an object was stored, read and deleted")]
    text = (
        f"the store {fault}: two writers of one upload may mix their bytes, or the settings of"
        " media nodes cannot be kept"
    )
    fix = "use a store with conditional writes, such as those of docs/s3.md"
    return [Finding("blobs", "fail", text, fix)]
