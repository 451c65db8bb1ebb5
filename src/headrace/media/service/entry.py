"""The entry to the cluster: which nodes take clients, as configuration of what directs them there.

The member list names the nodes, and a probe of each (`GET /healthz`) shows which of them answer.
From both come a weight for each node, 0 for one that is draining or does not answer, and
configuration of HAProxy, keepalived, a DNS zone, or JSON. If no node answers, all keep their
weights: then the network of this machine is the likelier fault.

HAProxy probes the nodes itself, so its file follows the member list alone. A reload when a node
dies would end the health checks of the process that has the requests in progress: those that
wait for a host without network would be cut by `timeout server` only.

`watch` looks every few seconds, replaces the file atomically after a change, and runs a command
that reloads it. A command that fails is repeated at the next look.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from headrace.engines.blobs import require_key
from headrace.kernel.config import parse_listen
from headrace.kernel.errors import HeadraceError, InvalidInput
from headrace.kernel.logs import logger
from headrace.media.cluster.membership import Membership
from headrace.media.errors import NoNodes
from headrace.media.service.nodes import Nodes, answers

log = logger(__name__)
WEIGHT: Final = 100
"""The weight of the heaviest node. All balancers accept it."""
LOOK_EVERY_S: Final = 2.0
COMMAND_TIMEOUT_S: Final = 60.0
MEMBERS_KEPT_S: Final = 10.0
TTL_S: Final = 30
_LABEL: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9_])?")
_NAME: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,200}[A-Za-z0-9_])?")
METHODS: Final = ("nat", "dr", "tun")


class InvalidEntry(InvalidInput):
    """The configuration of the entry lacks an option, or a node's name or address does not fit."""

    code = "media.invalid_entry"


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryNode:
    """A node as an entry uses it. `weight` is 0 to 100; 0: no new clients."""

    name: str
    address: str
    dc: str
    state: str
    is_alive: bool
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOptions:
    """What to print. `listen`: the address of clients; `dc`: the data center of this entry.

    `zone` and `name_server` are names of the DNS, `method` is one of METHODS, of IPVS.
    """

    listen: str | None = None
    dc: str | None = None
    zone: str | None = None
    name_server: str | None = None
    ttl_s: int = TTL_S
    method: str = "nat"


class Entry:
    """The nodes that take clients."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._members: Membership | None = None
        self._read_s = float("-inf")

    async def list(self) -> Sequence[EntryNode]:
        """All nodes by name, each probed now.

        While the object store is unavailable the last member list is used. Raises: BlobsDown.
        """
        return await self._list()

    async def _list(self, form: str = "") -> Sequence[EntryNode]:
        """The nodes for a form; for one whose balancer probes, each counts as alive."""
        members = (await self._membership(kept_s=0)).members
        if form in _PROBING:
            alive = [True] * len(members)
        else:
            alive = await asyncio.gather(*map(answers, members))
        weights = [
            member.weight if member.state == "up" and (is_alive or not any(alive)) else 0.0
            for member, is_alive in zip(members, alive, strict=True)
        ]
        heaviest = max(weights, default=0.0) or 1.0
        return [
            EntryNode(
                name=member.name,
                address=member.address,
                dc=member.dc,
                state=member.state,
                is_alive=is_alive,
                weight=max(1, round(WEIGHT * weight / heaviest)) if weight else 0,
            )
            for member, is_alive, weight in zip(members, alive, weights, strict=True)
        ]

    async def render(self, form: str, options: EntryOptions | None = None) -> str:
        """The configuration in one of FORMS. Raises: InvalidEntry, NoNodes, BlobsDown."""
        nodes, chosen = await self._list(form), options or EntryOptions()
        _require_dc(nodes, chosen)
        return render(form, nodes, chosen)

    async def node_of(self, key: str, *, dc: str = "") -> str:
        """The node that keeps `key`, in data center `dc` if one there does; for `url(prefer=...)`.

        The member list is at most 10 s old. Raises: InvalidBlobKey, NoNodes, BlobsDown.
        """
        membership = await self._membership(kept_s=MEMBERS_KEPT_S)
        owners = await self._nodes.owners(membership, require_key(key))
        return next((owner for owner in owners if owner.dc == dc), owners[0]).name

    async def watch(
        self,
        form: str,
        options: EntryOptions,
        file: Path,
        *,
        command: Sequence[str] = (),
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        """Keep `file` up to date until cancelled, and run `command` after each change.

        While the object store is unavailable the last member list is used.
        Raises: InvalidEntry, NoNodes, OSError (the file), BlobsDown (before the first list).
        """
        applied: Sequence[EntryNode] | None = None
        # Only once: the last node of a data center may be removed later.
        _require_dc(await self._list(form), options)
        while True:
            nodes = await self._list(form)
            if nodes != applied:
                text = render(form, nodes, options)
                await asyncio.to_thread(_replace, file, text)
                applied = nodes if await asyncio.to_thread(_run, command) else None
                out = [node.name for node in nodes if not node.weight]
                log.info("entry_changed", file=str(file), nodes=len(nodes), weight_0=out)
            await asyncio.sleep(every_s)

    async def _membership(self, *, kept_s: float) -> Membership:
        if self._members is None or time.monotonic() - self._read_s >= kept_s:
            try:
                self._members = await self._nodes.membership()
            except HeadraceError:
                if self._members is None:
                    raise
            self._read_s = time.monotonic()
        return self._members


def _replace(file: Path, text: str) -> None:
    """Replace `file` atomically. Its permissions are those of the process."""
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(text)
    draft.replace(file)


def _run(command: Sequence[str]) -> bool:
    """Run `command`; return whether it succeeded."""
    try:
        if command:
            subprocess.run(command, check=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("entry_command_failed", command=command[0], reason=str(error))
        return False
    return True


def _require_dc(nodes: Sequence[EntryNode], options: EntryOptions) -> None:
    """Check that a node is in the entry's data center. Raises: InvalidEntry."""
    known = sorted({node.dc for node in nodes})
    if nodes and options.dc is not None and options.dc not in known:
        listed = ", ".join(filter(None, known)) or "none: set media.dc"
        raise InvalidEntry(f"--dc {options.dc[:80]!r}: no node is there; known are {listed}")


def render(form: str, nodes: Sequence[EntryNode], options: EntryOptions) -> str:
    """The text for `nodes`. Raises: InvalidEntry, NoNodes."""
    if form not in _RENDERERS or options.method not in METHODS:
        raise InvalidEntry(
            f"form {form[:40]!r}, method {options.method[:40]!r}: expected one of"
            f" {', '.join(FORMS)} and nat, dr or tun"
        )
    if not nodes:
        raise NoNodes("the cluster has no nodes: set media.node to register one")
    return _RENDERERS[form](nodes, options)


_HAPROXY: Final = """\
# Generated by `headrace media entry haproxy`: changes are lost.
backend headrace_media
    mode http
    # Not by a hash of the path: one node would get all clients of a hot object.
    balance leastconn
    option httpchk GET /healthz
    http-check expect status 200
    # GET and HEAD are repeated on another node if a node dies before it answers.
    option redispatch 1
    option allbackups
    retries 3
    retry-on conn-failure empty-response response-timeout
    timeout connect 1s
    # A node has its first byte within media.origin_timeout.
    timeout server 15s
    default-server check inter 1s fastinter 200ms fall 2 rise 2 tcp-ut 3s
    default-server observe layer4 error-limit 1 on-error mark-down
    default-server on-marked-down shutdown-sessions
"""
_FRONTEND: Final = """
frontend headrace_media
    mode http
    bind {listen}
    timeout client 60s
    timeout http-request 10s
    # Otherwise a reload resets clients that send a request at that moment.
    option idle-close-on-response
    default_backend headrace_media
"""


def _haproxy(nodes: Sequence[EntryNode], options: EntryOptions) -> str:
    text = _HAPROXY
    for node in nodes:
        if node.weight:
            # A URL may name the node that keeps the object. A down one's rule is ignored.
            name = node.name
            text += f"    use-server {name} if {{ hdr_beg(host) -i {name}. }}\n"
    for node in nodes:
        is_far = options.dc is not None and node.dc != options.dc
        backup = " backup" if is_far else ""
        text += f"    server {node.name} {node.address} weight {node.weight}{backup}\n"
    if options.listen is not None:
        _listen_of(options)
        text += _FRONTEND.format(listen=options.listen)
    return text


def _keepalived(nodes: Sequence[EntryNode], options: EntryOptions) -> str:
    host, port = _listen_of(options)
    text = f"""\
# Generated by `headrace media entry keepalived`: changes are lost.
virtual_server {host} {port} {{
    delay_loop 1
    lvs_sched wlc
    lvs_method {options.method.upper()}
    protocol TCP
"""
    for node in _near(nodes, options):
        text += f"""\
    real_server {_address(node)} {parse_listen(node.address)[1]} {{
        weight {node.weight}
        inhibit_on_failure
        HTTP_GET {{
            url {{
                path /healthz
                status_code 200
            }}
            connect_timeout 1
            retry 1
            delay_before_retry 1
        }}
    }}
"""
    return text + "}\n"


def _dns(nodes: Sequence[EntryNode], options: EntryOptions) -> str:
    zone, server = (text and text.rstrip(".") for text in (options.zone, options.name_server))
    if not zone or not server or not _NAME.fullmatch(zone) or not _NAME.fullmatch(server):
        raise InvalidEntry(
            "a zone needs its name and its name server: --zone media.example.com"
            " --name-server ns1.example.com"
        )
    ttl_s = options.ttl_s
    lines = [
        "; Generated by `headrace media entry dns`: changes are lost.",
        f"$ORIGIN {zone}.",
        f"$TTL {ttl_s}",
        # A secondary that missed a NOTIFY polls within the TTL.
        f"@ IN SOA {server}. hostmaster.{zone}. {int(time.time())} {ttl_s} {ttl_s} 86400 {ttl_s}",
        f"@ IN NS {server}.",
    ]
    serving = [node for node in nodes if node.weight]
    names = {"@": _near(serving, options)}
    for dc in sorted({node.dc for node in nodes} - {""}):
        names[_label(dc)] = [node for node in serving if node.dc == dc] or serving
    for node in nodes:
        if _label(node.name) in names:
            raise InvalidEntry(f"{node.name!r} is a node and a data center: rename one of them")
        same = [other for other in serving if other.dc == node.dc]
        names[node.name] = [node] if node.weight else same or serving
    for name, found in names.items():
        for node in found:
            address = _address(node)
            lines.append(f"{name} IN {'AAAA' if ':' in address else 'A'} {address}")
    return "\n".join([*lines, ""])


def _json(nodes: Sequence[EntryNode], _: EntryOptions) -> str:
    return msgspec.json.format(msgspec.json.encode({"nodes": nodes}), indent=2).decode() + "\n"


_RENDERERS: Final[dict[str, Callable[[Sequence[EntryNode], EntryOptions], str]]] = {
    "haproxy": _haproxy,
    "keepalived": _keepalived,
    "dns": _dns,
    "json": _json,
}
FORMS: Final = tuple(_RENDERERS)
_PROBING: Final = ("haproxy",)
"""Forms of balancers whose reload ends their own probes."""


def _near(nodes: Sequence[EntryNode], options: EntryOptions) -> Sequence[EntryNode]:
    """The nodes of the entry's data center; all if none of them takes clients."""
    near = [node for node in nodes if options.dc is None or node.dc == options.dc]
    return near if any(node.weight for node in near) else nodes


def _listen_of(options: EntryOptions) -> tuple[str, int]:
    """Raises: InvalidEntry."""
    try:
        host, port = parse_listen(options.listen or "")
        ipaddress.ip_address(host)
    except ValueError as error:
        raise InvalidEntry(
            f"--listen {options.listen!r}: expected the address and port that clients connect to,"
            " such as 203.0.113.10:80"
        ) from error
    return host, port


def _address(node: EntryNode) -> str:
    """The IP address of a node. Raises: InvalidEntry."""
    host = parse_listen(node.address)[0]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError as error:
        raise InvalidEntry(
            f"node {node.name}: {host!r} is no IP address, which this format needs: set"
            " media.advertise to one"
        ) from error


def _label(name: str) -> str:
    """A name below the zone. Raises: InvalidEntry."""
    if not _LABEL.fullmatch(name):
        raise InvalidEntry(f"{name[:80]!r} is no name of the DNS: use A-Z a-z 0-9 - . _")
    return name
