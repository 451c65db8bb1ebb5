"""Detect another live node with the same name. Both would replace each other's entry repeatedly.

The address in the entry gets an authenticated request. Only a node with this cluster's secret and
that name can sign the reply; another server at the address or another node of the cluster cannot.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from headrace.kernel.config import parse_listen
from headrace.kernel.errors import Conflict
from headrace.kernel.logs import logger
from headrace.media.cluster.cluster_config import PREFIX
from headrace.media.cluster.hop import NOTHING, REPLY_FIELD, HopSigner
from headrace.media.cluster.membership import Member
from headrace.media.cluster.peer_messages import PeerLost, PeerRequest, target_of
from headrace.media.cluster.peers import Peer

log = logger(__name__)
ANSWER_TIMEOUT_S: Final = 3.0
_NOWHERE: Final = f"{PREFIX}no-such-document"
_WILD: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


class NodeNameTaken(Conflict):
    """Another running node has this node's name."""

    code = "media.node_name_taken"


async def require_unique_name(
    entered: Member, own: Member, signer: HopSigner, listen: tuple[str, int]
) -> None:
    """Raise NodeNameTaken if `entered`, the entry of this name, belongs to another live node."""
    if entered.address == own.address or await asyncio.to_thread(is_local, entered.address, listen):
        return
    if await _answers(entered, signer):
        raise NodeNameTaken(
            f"node {own.name} runs at {entered.address}, so {own.address} is not registered:"
            " give each node its own media.node, or stop the other one and run"
            f" `headrace media nodes rm {own.name}`"
        )


def is_local(address: str, listen: tuple[str, int]) -> bool:
    """Whether `address` leads to this node, which listens at `listen`."""
    host, port = parse_listen(address)
    if port != listen[1]:
        return False
    if listen[0] not in _WILD:
        return host == listen[0]
    try:
        family, _, _, _, at = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(at)
    except OSError:
        return False
    return True


async def _answers(entered: Member, signer: HopSigner) -> bool:
    peer = Peer(entered, signer, timeout_s=ANSWER_TIMEOUT_S)
    try:
        answer = await peer.request(PeerRequest("HEAD", target_of(_NOWHERE)))
    except PeerLost:
        return False
    finally:
        peer.close()
    # A reply of 503 is not signed; the request is repeated before the name is taken over.
    proof = answer.fields.get(REPLY_FIELD, "")
    return answer.status == 503 or signer.is_authentic(answer.mac, proof, NOTHING)
