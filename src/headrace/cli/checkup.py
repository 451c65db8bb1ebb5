"""What `headrace doctor` looks at: each check is one function that returns findings, worst news plainly.

A check never raises: an engine that is down is a finding, with the way to mend it. Sources of the
thresholds: the minimum Valkey versions close CVE-2025-49844 and CVE-2026-21863; a clock more than a second off confuses people who read logs, never
the queue, whose time is the database's own.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from headrace.cli.checkup_media import (
    check_media_cluster,
    check_media_disks,
    serves_media_alone,
)
from headrace.cli.checkup_postgres import check_postgres
from headrace.cli.findings import CHECK_S, Finding
from headrace.cli.house import App
from headrace.engines import Engines
from headrace.engines.blobs import Blobs, StoreMismatch
from headrace.engines.embedded import FolderUnusable, NotRunning
from headrace.engines.embedded.data_folder import require_owner
from headrace.engines.migrate import plan_migrations
from headrace.engines.mount_guard import RECORD_FILE
from headrace.engines.valkey import Node
from headrace.kernel.errors import HeadraceError
from headrace.views.fence import means_of
from headrace.web.tokens import RootToken, Tokens, dead_token, remedy_for

VALKEY_OLDEST: Final = {7: (7, 2, 11), 8: (8, 1, 6), 9: (9, 0, 3)}
REDIS_OLDEST: Final = {7: (7, 0, 0)}
"""Functions came with 7.0. Distributions close holes without another number, so none is judged by it."""
VALKEY_SETTINGS: Final = {
    "maxmemory-policy": (
        ("noeviction",),
        "fail",
        "a full server drops hits and parts of feeds silently",
    ),
    "appendonly": (("yes",), "fail", "a restart loses hits that were not flushed"),
    "appendfsync": (
        ("everysec", "always"),
        "warn",
        "a power cut loses hits of up to half a minute",
    ),
}
"""The values that do, and what any other costs."""
FEED_SETTINGS: Final = {
    "set-max-intset-entries": (131_072, "sets of authors take up to ten times the memory"),
    "zset-max-listpack-entries": (2_048, "posts of popular authors take twice the memory"),
}
"""What the feed's index asks of Valkey at least, and what less of it costs."""
DISK_FREE_BYTES_MIN: Final = 2 * 1024**3
FILES_MIN: Final = 4096
EVERYWHERE: Final = ("0.0.0.0", "::", "*")  # noqa: S104 - looked for, never listened on
WEBHOOK_FAILURES_SEEN: Final = 5
"""So many sends in a row that failed are told: about a minute and a half."""


Check = tuple[str, Callable[[], Awaitable[list[Finding]]]]
SCHEMA_FITS: Final = Finding("schema", "ok", "up to date")


async def check_up(app: App, packages: tuple[str, ...]) -> list[Finding]:
    """Every check, in the order in which a person would mend them."""
    findings = [*check_owner(app.data_folder), *check_machine(app)]
    if findings[0].subject == "data folder":
        return findings  # an object stored for the check would be root's, in a folder that is not
    try:
        engines = app.engines
    except NotRunning as error:
        if serves_media_alone(app):
            findings.append(Finding("engines", "ok", "none: this machine serves media alone"))
            return [*findings, *await _run_checks([*_media_checks(app)])]
        findings.append(Finding("engines", "fail", error.text, "run `headrace up`"))
        # A store that is not there may be why they do not run.
        has_store = (app.data_folder / RECORD_FILE).exists()
        return [*findings, *await _run_checks(_media_checks(app)[:1] if has_store else [])]
    except HeadraceError as error:
        return [*findings, Finding("engines", "fail", error.text)]
    checks: list[Check] = [
        ("postgres", lambda: check_postgres(app, engines)),
        ("schema", lambda: check_schema_state(engines, packages)),
        ("token", lambda: check_token(app, engines)),
        ("webhooks", lambda: check_webhooks(app)),
        ("valkey", lambda: check_valkey(engines)),
        ("views", lambda: check_views(app, engines)),
        ("flusher", lambda: check_flusher(app)),
        *_media_checks(app),
    ]
    return [*findings, *await _run_checks(checks)]


def _media_checks(app: App) -> list[Check]:
    """What is looked at also where media is served alone."""
    return [
        ("blobs", lambda: check_blobs(app.blobs)),
        ("media disks", lambda: check_media_disks(app)),
        ("media cluster", lambda: check_media_cluster(app)),
    ]


async def _run_checks(checks: list[Check]) -> list[Finding]:
    findings: list[Finding] = []
    for subject, check in checks:
        if subject in ("token", "webhooks", "flusher") and SCHEMA_FITS not in findings:
            continue  # without its table PostgreSQL cannot tell
        try:
            findings += await asyncio.wait_for(check(), CHECK_S)
        except TimeoutError:
            findings.append(Finding(subject, "fail", f"no answer within {CHECK_S:.0f} s"))
        except HeadraceError as error:
            findings.append(Finding(subject, "fail", error.text, "start it, or correct its URL"))
        except OSError as error:
            findings.append(refused(subject, error))
    return findings


def check_owner(folder: Path) -> list[Finding]:
    """Whether root looks at the folder of another user."""
    try:
        require_owner(folder)
    except FolderUnusable as error:
        if os.geteuid() == 0:
            return [Finding("data folder", "fail", error.text)]
    return []


def check_machine(app: App) -> list[Finding]:
    """What can be looked at without an engine."""
    findings: list[Finding] = []
    checks: dict[str, Callable[[], list[Finding]]] = {
        "disk": lambda: check_disk(app.data_folder),
        "open files": check_limits,
        "secret": lambda: check_secret(app),
        "media": lambda: check_media_urls(app),
    }
    for subject, check in checks.items():
        try:
            findings += check()
        except OSError as error:
            findings.append(refused(subject, error))
    return findings


def refused(subject: str, error: OSError) -> Finding:
    """A file that this user may not read, or that cannot be read at all."""
    reason = (error.strerror or str(error)).lower()
    mend = f"run as the user whom it belongs to, this is uid {os.geteuid()}"
    return Finding(subject, "fail", f"{error.filename}: {reason}", mend)


def check_disk(folder: Path) -> list[Finding]:
    """Room on the disk of the data folder."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(present).free
    text = f"{free_bytes / 1024**3:.1f} GiB free at {present}"
    if free_bytes < DISK_FREE_BYTES_MIN:
        return [Finding("disk", "fail", text, "free some space: PostgreSQL stops on a full disk")]
    return [Finding("disk", "ok", text)]


def check_limits() -> list[Finding]:
    """Open files this user may have."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < FILES_MIN:
        mend = f"raise it with `ulimit -n {FILES_MIN}` or LimitNOFILE= in the unit"
        return [Finding("open files", "warn", f"at most {files} a process", mend)]
    return [Finding("open files", "ok", f"at most {files} a process")]


def check_secret(app: App) -> list[Finding]:
    """Where signatures' root secret comes from, and who may read it."""
    if os.environ.get("HEADRACE_SECRET"):
        return [Finding("secret", "ok", "from HEADRACE_SECRET")]
    path = app.data_folder / "secret"
    if not path.exists():
        return [Finding("secret", "ok", f"will be made in {path} on the first start")]
    if path.stat().st_mode & 0o077:
        return [Finding("secret", "fail", f"{path} is readable by others", f"chmod 600 {path}")]
    return [Finding("secret", "ok", f"in {path}")]


def check_media_urls(app: App) -> list[Finding]:
    """Whether URLs of media lead anywhere, where they are made of an address to listen on."""
    config = app.config.sections["media"]
    host, port = config.listen
    if config.public_url is None and host in EVERYWHERE:
        text = f"URLs begin with http://{host}:{port}, which is no address for clients"
        return [Finding("media", "warn", text, "set media.public_url (HEADRACE_MEDIA_PUBLIC_URL)")]
    return []


async def check_schema_state(engines: Engines, packages: tuple[str, ...]) -> list[Finding]:
    """Migrations that are missing."""
    missing = await plan_migrations(engines.postgres, packages)
    if missing:
        text = f"{len(missing)} migration(s) missing, first {missing[0].label}"
        return [Finding("schema", "fail", text, "run `headrace migrate`")]
    return [SCHEMA_FITS]


async def check_token(app: App, engines: Engines) -> list[Finding]:
    """Whether the root token in the data folder opens anything."""
    path = app.data_folder / "token"
    if not path.exists():
        return [Finding("token", "ok", f"no {path} on this machine; `headrace up` makes it")]
    found = RootToken(path, await Tokens(engines.postgres).state_of(path.read_text().strip()))
    if found.state == "valid":
        return [Finding("token", "ok", f"in {path}")]
    if found.state == "unknown":
        text = f"the token in {path} is unknown to this database, perhaps a restored one"
        mend = "start `headrace up`, which makes it known, or put the token of the backup there"
        return [Finding("token", "warn", text, mend)]
    return [Finding("token", "fail", dead_token(found), remedy_for(found))]


async def check_webhooks(app: App) -> list[Finding]:
    """Customers' addresses that take no results any more."""
    if "fetch" not in (services := app.services()):
        return []
    hooks = await services["fetch"].webhooks.list(webhooks_max=1000)
    gone = [hook.customer for hook in hooks if hook.disabled_at is not None]
    failing = [hook.customer for hook in hooks if hook.failures >= WEBHOOK_FAILURES_SEEN]
    found = []
    if gone:
        text = f"disabled, their receivers answered 410: {', '.join(gone[:5])} ({len(gone)})"
        mend = "set them again with `headrace fetch customer set CUSTOMER --webhook URL`"
        found.append(Finding("webhooks", "warn", text, mend))
    if failing:
        text = f"their receivers take nothing: {', '.join(failing[:5])} ({len(failing)})"
        mend = "see `headrace fetch webhook show CUSTOMER`; nothing is lost meanwhile"
        found.append(Finding("webhooks", "warn", text, mend))
    if hooks and not found:
        found.append(Finding("webhooks", "ok", f"{len(hooks)} take their results"))
    return found


async def check_valkey(engines: Engines) -> list[Finding]:
    """Version, eviction policy, persistence: of every primary where it is a cluster."""
    if not await engines.valkey.is_cluster():
        [node] = await engines.valkey.primaries()
        return await check_valkey_node(node, "valkey")
    nodes = await engines.valkey.primaries()
    found = [Finding("valkey", "ok", f"a cluster of {len(nodes)} primaries")]
    for node in nodes:
        subject = f"valkey {node.server}"
        try:
            found += await check_valkey_node(node, subject)
            found += await check_cluster_state(node, subject)
        except HeadraceError as error:
            found.append(Finding(subject, "fail", error.text, "start it, or fail over"))
    return found


async def check_valkey_node(node: Node, subject: str) -> list[Finding]:
    """Version, eviction policy, persistence of one server."""
    info = await node.command("INFO", "server")
    product = "valkey" if "valkey_version" in info else "redis"
    version = str(info[f"{product}_version"])
    parts = tuple(int(part) for part in version.split(".")[:3])
    known = VALKEY_OLDEST if product == "valkey" else REDIS_OLDEST
    oldest = known.get(parts[0], known[max(known)])
    found = [Finding(subject, "ok", f"{product.title()} {version} answers")]
    if parts < oldest:
        text = f"{product.title()} {version} is too old: it has known holes or lacks functions"
        needed = ".".join(str(part) for part in oldest)
        found = [Finding(subject, "fail", text, f"use {needed} or newer")]
    for name, (wanted, state, harm) in VALKEY_SETTINGS.items():
        present = await _valkey_setting(node, name)
        if present not in wanted:
            mend = f"CONFIG SET {name} {wanted[0]}, and the same in the server's file"
            found.append(Finding(subject, state, f"{name} is {present}: {harm}", mend))
    for name, (least, cost) in FEED_SETTINGS.items():
        present = await _valkey_setting(node, name)
        if int(present) < least:
            text = f"{name} is {present}: the feed's {cost}"
            mend = f"set {name} {least}, then `headrace feed rebuild`"
            found.append(Finding(subject, "warn", text, mend))
    return found


async def check_cluster_state(node: Node, subject: str) -> list[Finding]:
    """Whether a primary serves its keys, and would while another one is away."""
    info = _text(await node.command("CLUSTER", "INFO"))
    if "cluster_state:ok" not in info:
        mend = "look at `CLUSTER NODES` there: a hash slot without a primary, or it is cut off"
        return [Finding(subject, "fail", "cluster_state is fail: it serves no key", mend)]
    if await _valkey_setting(node, "cluster-require-full-coverage") == "yes":
        text = "cluster-require-full-coverage is yes: one primary that is away stops all of them"
        return [Finding(subject, "warn", text, "set cluster-require-full-coverage no")]
    return []


async def _valkey_setting(node: Node, name: str) -> str:
    reply = await node.command("CONFIG", "GET", name)
    return str(reply.get(name)) if isinstance(reply, dict) else _text(reply[1])


async def check_views(app: App, engines: Engines) -> list[Finding]:
    """Whether Valkey can keep what the level of durability promises."""
    config = app.config.sections["views"]
    policy, replicas = await means_of(engines.valkey)
    if config.durability == "fast":
        return [Finding("views", "ok", f"level fast, appendfsync {policy}")]
    if config.durable_replicas:
        text = f"{replicas} of {config.durable_replicas} replicas that a durable hit needs"
        if replicas < config.durable_replicas:
            mend = "attach replicas, or lower views.durable_replicas"
            return [Finding("views", "fail", text, mend)]
        return [Finding("views", "ok", text)]
    if policy != "always":
        text = f"durable hits wait for the append-only file, and appendfsync is {policy}"
        mend = "set appendfsync always, or views.durable_replicas, or views.durability = fast"
        return [Finding("views", "fail", text, mend)]
    return [Finding("views", "ok", "level durable, appendfsync always")]


async def check_flusher(app: App) -> list[Finding]:
    """Whether somebody brings hits that were answered into PostgreSQL."""
    lags = await app.services()["views"].lag()
    idle = [lag for lag in lags if lag.pending and lag.flusher is None]
    if idle:
        calls, oldest_s = sum(lag.pending for lag in idle), max(lag.oldest_s for lag in idle)
        text = f"nobody flushes {calls} calls with hits, the oldest of {oldest_s:.0f} s ago"
        return [Finding("flusher", "warn", text, "start `headrace flusher` on one machine or two")]
    return [Finding("flusher", "ok", "no hits wait for a flusher that is not there")]


async def check_blobs(blobs: Blobs) -> list[Finding]:
    """Whether the store is the one in use, and an object can be stored, read and removed."""
    try:
        await blobs.verify_store()
    except StoreMismatch as error:
        mend = "mount its disk or put it back; `headrace blobs adopt` begins with it as it is now"
        return [Finding("blobs", "fail", f"folder {blobs.folder}: {error.fault}", mend)]
    key, data = f"headrace-probe/{secrets.token_hex(8)}", b"headrace"
    await blobs.put(key, data)
    same = await blobs.get(key) == data
    await blobs.delete(key)
    if not same:
        return [Finding("blobs", "fail", "an object came back with other bytes", "check the store")]
    return [Finding("blobs", "ok", "an object was stored, read and removed")]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
