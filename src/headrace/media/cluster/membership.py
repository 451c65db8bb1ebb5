"""The members of the cluster: one document for all nodes, changed by compare-and-set.

A node registers at its start. The operator can drain it (others serve its keys, it still answers
requests), set its weight, and remove it. A dead node stays listed: health checks route around it,
and it needs only a restart.

A new node ramps up: its weight rises in tenths over five minutes, so that an empty cache does not
get its full share at once. Nodes that join a cluster of less than five minutes ramp up in step with
its first node, so their shares are equal: no cache has much. Each node computes the step from the
start time by its own clock; nodes that disagree send one more request.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headrace.engines.blobs import Blobs
from headrace.kernel.config import parse_listen
from headrace.kernel.errors import InvalidInput, NotFound
from headrace.media.cluster.cluster_config import Document, DocumentType
from headrace.media.model import REPLICAS_MAX, WEIGHT_MAX, WEIGHT_MIN, MediaConfig
from headrace.media.partitions import CANDIDATES_MAX, Candidate

RAMP_S: Final = 300.0
RAMP_STEPS: Final = 10
State = Literal["up", "draining"]


class NodeUnknown(NotFound):
    """No node of this name is a member."""

    code = "media.node_unknown"


class InvalidNode(InvalidInput):
    """A node's name, address or weight is invalid."""

    code = "media.invalid_node"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node as the others see it. `started_at_s` is the start of its ramp-up in Unix time."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    address: str
    dc: str = ""
    weight: Annotated[float, Meta(ge=WEIGHT_MIN, le=WEIGHT_MAX)] = 1.0
    state: State = "up"
    started_at_s: float = 0.0

    def __post_init__(self) -> None:
        parse_listen(self.address)

    def ramped_weight(self, now_s: float) -> float:
        """The effective weight at `now_s`."""
        step = int((now_s - self.started_at_s) / RAMP_S * RAMP_STEPS) + 1
        return self.weight * min(RAMP_STEPS, max(1, step)) / RAMP_STEPS


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes by name, and the number of replicas (0: two in each data center)."""

    version: Annotated[int, Meta(ge=0)] = 0
    replicas: Annotated[int, Meta(ge=0, le=REPLICAS_MAX)] = 0
    members: Annotated[tuple[Member, ...], Meta(max_length=CANDIDATES_MAX)] = ()

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if len(set(names)) != len(names):
            raise ValueError("a node is listed twice")

    def member(self, name: str) -> Member | None:
        """The node of that name, or None."""
        return next((member for member in self.members if member.name == name), None)

    def candidates(self, now_s: float) -> tuple[Candidate, ...]:
        """The nodes that keep keys, with their effective weights."""
        return tuple(
            Candidate(member.name, member.dc, member.ramped_weight(now_s))
            for member in self.members
            if member.state == "up"
        )


MEMBERSHIP: Final[DocumentType[Membership]] = DocumentType("membership", Membership, Membership())


class MembershipStore(Document[Membership]):
    """The membership document. Needs the object store only, so any machine can change it."""

    def __init__(self, blobs: Blobs) -> None:
        super().__init__(blobs, MEMBERSHIP)

    async def register(self, member: Member, *, replicas: int) -> Membership:
        """Add `member`, or update its address and data center; keep its state and weight.

        Only a new node ramps up, in step with the oldest one if that ramps up too.
        Raises: InvalidNode.
        """
        require_member(member)
        if not 0 <= replicas <= REPLICAS_MAX:
            raise InvalidNode(
                f"node {member.name}: invalid number of replicas {replicas}: set media.replicas"
                f" from 0 to {REPLICAS_MAX}"
            )

        def register(old: Membership) -> Membership:
            known = old.member(member.name)
            others = [one for one in old.members if one.name != member.name]
            if known is None:
                oldest_s = min((one.started_at_s for one in others), default=0.0)
                is_young = member.started_at_s - oldest_s < RAMP_S
                started_at_s = oldest_s if others and is_young else member.started_at_s
                entered = msgspec.structs.replace(member, started_at_s=started_at_s)
            else:
                entered = msgspec.structs.replace(
                    member, state=known.state, weight=known.weight, started_at_s=known.started_at_s
                )
            changed = msgspec.structs.replace(old, replicas=replicas)
            return _with_members(changed, [*others, entered])

        return await self.change(register)

    async def drain(self, name: str) -> Membership:
        """Let other nodes serve the keys of `name`; it still answers. Raises: NodeUnknown."""
        return await self._set(name, state="draining")

    async def undrain(self, name: str) -> Membership:
        """Let `name` serve its keys again. Raises: NodeUnknown."""
        return await self._set(name, state="up")

    async def set_weight(self, name: str, weight: float) -> Membership:
        """Set the weight of `name` relative to the others. Raises: NodeUnknown, InvalidNode."""
        if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            raise InvalidNode(
                f"node {name}: weight {weight:g} is not from {WEIGHT_MIN:g} to {WEIGHT_MAX}: use 1"
                " for a normal share, 0.5 for half of it; to take the node out, drain it"
            )
        return await self._set(name, weight=float(weight))

    async def remove(self, name: str) -> Membership:
        """Remove `name`. If it still runs, its next start adds it again. Raises: NodeUnknown."""

        def remove(old: Membership) -> Membership:
            _require_known(old, name)
            return _with_members(old, [one for one in old.members if one.name != name])

        return await self.change(remove)

    async def _set(self, name: str, **values: Any) -> Membership:
        def change(old: Membership) -> Membership:
            member = msgspec.structs.replace(_require_known(old, name), **values)
            return _with_members(old, [member, *(one for one in old.members if one.name != name)])

        return await self.change(change)


def member_of(config: MediaConfig, listen: tuple[str, int]) -> Member:
    """The entry of this node, which serves on `listen`. Raises: InvalidNode."""
    host, port = config.advertise or listen
    return require_member(
        Member(
            name=config.node or "",
            address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            dc=config.dc,
            weight=config.weight,
            started_at_s=time.time(),
        )
    )


def require_member(member: Member) -> Member:
    """Return `member` if it is valid and reachable. Raises: InvalidNode."""
    try:
        msgspec.convert(msgspec.to_builtins(member), Member)
        host, port = parse_listen(member.address)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidNode(
            f"node {member.name[:80]!r} at {member.address[:80]!r}: {error}; use a name of A-Z a-z"
            " 0-9 . _ - and an address such as 10.0.0.7:8081"
        ) from error
    if not port or host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        raise InvalidNode(
            f"node {member.name}: peers cannot reach {member.address}: set media.advertise to an"
            " address and port that they can reach"
        )
    return member


def _require_known(membership: Membership, name: str) -> Member:
    member = membership.member(name)
    if member is None:
        known = ", ".join(one.name for one in membership.members)
        has = f"its members are {known}" if known else "it has no members"
        raise NodeUnknown(f"node {name[:80]!r} is not a member of the cluster: {has}")
    return member


def _with_members(old: Membership, members: list[Member]) -> Membership:
    ordered = tuple(sorted(members, key=lambda member: member.name))
    return msgspec.structs.replace(old, members=ordered)
