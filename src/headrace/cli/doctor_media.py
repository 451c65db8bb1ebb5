"""Checks of `headrace doctor` on a media node: data plane, disks, cluster and upstream."""

from __future__ import annotations

import asyncio
import os
import pwd
from typing import Final

from headrace.cli.app_context import App
from headrace.cli.doctor_engines import Finding
from headrace.engines.embedded.data_folder import MARKER
from headrace.kernel.config import parse_listen
from headrace.kernel.terminal import pluralize
from headrace.media.errors import NodeNotHere
from headrace.media.model import SIZE_SETTING
from headrace.media.native import (
    NativePlaneMissing,
    built_library,
    kernel_tls_missing,
    native_tls_missing,
)
from headrace.media.service.nodes import is_denied

ANSWER_S: Final = 2.0


def serves_media_alone(app: App) -> bool:
    """Whether this machine has a media node and neither embedded nor configured engines."""
    urls = app.configured_urls()
    if urls.postgres_url or urls.valkey_url or (app.data_folder / MARKER).exists():
        return False
    config = app.config.sections["media"]
    has_run = (app.data_folder / "run" / "media").is_dir()
    return bool(config.node or config.disks or has_run)


async def check_data_plane(app: App) -> list[Finding]:
    """Check that native code serves the media of this machine; Python needs more CPU."""
    config = app.config.sections["media"]
    if config.data_plane == "python":
        return [
            Finding("media data plane", "ok", "Python serves media, as media.data_plane requires")
        ]
    try:
        path = await asyncio.to_thread(built_library)
    except NativePlaneMissing as error:
        fix = "install gcc, or run `pip install ziglang`; media is served by Python meanwhile"
        return [Finding("media data plane", "warn", error.text, fix)]
    if path is None:
        # Compiling takes longer than a check, and a unit may have another cache folder.
        text = "not compiled for this user yet: `headrace media serve` compiles it at its start"
        return [Finding("media data plane", "ok", text)]
    text = f"compiled code serves what is cached: {path}"
    if config.listen_tls is None:
        return [Finding("media data plane", "ok", text)]
    if why := native_tls_missing():
        fix = "install OpenSSL 3 (Debian: apt-get install libssl3); Python encrypts meanwhile"
        return [Finding("media data plane", "warn", f"{text}; HTTPS by Python: {why}", fix)]
    kernel = kernel_tls_missing()
    by = f"OpenSSL 3, not by the kernel: {kernel}" if kernel else "OpenSSL 3 and the kernel"
    return [Finding("media data plane", "ok", f"{text}; HTTPS by {by}")]


async def check_media_disks(app: App) -> list[Finding]:
    """Check that every disk of this node is in use."""
    if not app.config.sections["media"].disks:
        return []
    try:
        disks = await app.media.disks.list()
    except NodeNotHere:
        if serves_media_alone(app):
            raise
        return []  # shared configuration: this machine has the engines, another one the node
    found = [
        Finding(
            "media disks",
            "warn",
            f"{disk.path} is out of use: {disk.fault}",
            disk_fix(disk.path, disk.fault),
        )
        for disk in disks
        if disk.state == "out" and disk.fault != "retired"
    ]
    return found or [Finding("media disks", "ok", f"{pluralize(len(disks), 'disk')}, none failed")]


def disk_fix(path: str, fault: str) -> str:
    """What to do about a disk that is out."""
    if SIZE_SETTING in fault:
        return "restart the node with that size"
    if is_denied(fault):
        # The node runs as the owner of its data folder, and so does this command.
        uid = os.geteuid()
        names = [entry.pw_name for entry in pwd.getpwall() if entry.pw_uid == uid]
        return f"`chown -R {names[0] if names else uid} {path}` as root, then restart the node"
    return "replace it and run `headrace media disks add`, or run `headrace media disks retire`"


async def check_media_cluster(app: App) -> list[Finding]:
    """Check that this node is a cluster member and that all members respond."""
    name = app.config.sections["media"].node
    if name is None:
        return []
    nodes = (await app.media.nodes.membership()).members
    if all(node.name != name for node in nodes):
        text = f"{name} is not among the {len(nodes)} nodes of the cluster"
        return [
            Finding("media cluster", "fail", text, "start `headrace media serve`, check its log")
        ]
    answers = await asyncio.gather(*(_answers(node.address) for node in nodes))
    found = [
        Finding(
            "media cluster",
            "fail" if node.name == name else "warn",
            f"{node.name} does not respond at {node.address}",
            "start it, correct media.advertise, or remove it with `headrace media nodes rm`",
        )
        for node, is_up in zip(nodes, answers, strict=True)
        if not is_up
    ]
    return found or [
        Finding("media cluster", "ok", f"{pluralize(len(nodes), 'node')}, all respond")
    ]


async def check_media_upstream(app: App) -> list[Finding]:
    """Check that each URL of the upstream cluster answers and accepts this site's signature."""
    upstream = app.media.upstream
    if upstream is None:
        return []
    try:
        answers = await upstream.check()
    finally:
        await upstream.close()
    secrets_fix = (
        "compare media.upstream_secret with HEADRACE_SECRET and media.accepted_secrets of the"
        " upstream cluster, and the clocks"
    )
    found = []
    for url, answer in answers.items():
        if answer in (200, 404):
            continue
        if answer in (401, 403):
            text, fix = f"refuses the signature ({answer})", secrets_fix
        elif isinstance(answer, int):
            text, fix = f"answers {answer}", "see the log of that node, or of the proxy before it"
        else:
            text, fix = f"does not answer ({answer})", "start it, or correct media.upstream"
        state = "warn" if any(one in (200, 404) for one in answers.values()) else "fail"
        found.append(Finding("media upstream", state, f"{url} {text}", fix))
    return found or [
        Finding("media upstream", "ok", f"{pluralize(len(answers), 'URL')}, all accept this site")
    ]


async def _answers(address: str) -> bool:
    host, port = parse_listen(address)
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True
