"""What `headrace doctor` looks at where a media node runs: its disks, its place in the cluster, its peers.

A machine that serves media alone has no PostgreSQL and no Valkey: there these checks and the object store's are all.
"""

from __future__ import annotations

import asyncio

from headrace.cli.findings import Finding
from headrace.cli.house import App
from headrace.engines.embedded.data_folder import MARKER
from headrace.kernel.config import parse_listen
from headrace.media.errors import NodeNotHere

ANSWER_S = 2.0


def serves_media_alone(app: App) -> bool:
    """Whether this machine has a media node, no engines of its own, and names none elsewhere."""
    urls = app.configured_urls()
    if urls.postgres_url or urls.valkey_url or (app.data_folder / MARKER).exists():
        return False
    config = app.config.sections["media"]
    has_run = (app.data_folder / "run" / "media").is_dir()
    return bool(config.node or config.disks or has_run)


async def check_media_disks(app: App) -> list[Finding]:
    """Whether every disk of the node here is in use."""
    if not app.config.sections["media"].disks:
        return []
    try:
        disks = await app.media.disks.list()
    except NodeNotHere:
        if serves_media_alone(app):
            raise
        return []  # machines of one site share one configuration, and this one has the engines
    found = [
        Finding(
            "media disks", "warn", f"{disk.path} is out: {disk.fault}",
            "replace it and `headrace media disks add` it, or `headrace media disks retire` it",
        )
        for disk in disks
        if disk.state == "out" and disk.fault != "retired"
    ]  # fmt: skip
    return found or [Finding("media disks", "ok", f"{len(disks)}, none has failed")]


async def check_media_cluster(app: App) -> list[Finding]:
    """Whether this node is a member, and who of the members answers here."""
    name = app.config.sections["media"].node
    if name is None:
        return []
    nodes = (await app.media.nodes.membership()).members
    if all(node.name != name for node in nodes):
        text = f"{name} is not entered among {len(nodes)} nodes"
        return [
            Finding("media cluster", "fail", text, "start `headrace media serve`, read its log")
        ]
    answers = await asyncio.gather(*(_answers(node.address) for node in nodes))
    found = [
        Finding(
            "media cluster", "fail" if node.name == name else "warn",
            f"{node.name} does not answer at {node.address}",
            "start it, correct media.advertise, or `headrace media nodes rm` it",
        )
        for node, does_answer in zip(nodes, answers, strict=True)
        if not does_answer
    ]  # fmt: skip
    return found or [Finding("media cluster", "ok", f"{len(nodes)} nodes, all answer from here")]


async def _answers(address: str) -> bool:
    host, port = parse_listen(address)
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True
