"""Whether a member's entry is another node's that lives: two nodes of one name would take it from each other for ever.

The address in the entry is asked by a hop, as peers ask. Only a node of this cluster's secret and of that very name proves
an answer to it; a stranger who has the address by now does not, nor does another node of the cluster.
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
from headrace.media.cluster.peers import Peer, PeerLost, PeerRequest, target_of

log = logger(__name__)
ANSWER_TIMEOUT_S: Final = 3.0
_NOWHERE: Final = f"{PREFIX}no-such-document"
_WILD: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


class NodeNameTaken(Conflict):
    """Another node that runs has this node's name."""

    code = "media.node_name_taken"


async def require_unique_name(
    entered: Member, own: Member, signer: HopSigner, listen: tuple[str, int]
) -> None:
    """Raises: NodeNameTaken, where `entered`, the entry of our name, is another node's that answers."""
    if entered.address == own.address or await asyncio.to_thread(is_local, entered.address, listen):
        return
    if await _answers(entered, signer):
        raise NodeNameTaken(
            f"node {own.name} runs at {entered.address} already, so {own.address} is not entered: give each node its"
            f" own media.node; where that one is to go, stop it or `headrace media nodes rm {own.name}`"
        )


def is_local(address: str, listen: tuple[str, int]) -> bool:
    """Whether what is sent to `address` comes to us, who listen at `listen`."""
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
    # A full one, and one that misses its store, prove nothing: it is asked again before its name is taken.
    proof = answer.fields.get(REPLY_FIELD, "")
    return answer.status == 503 or signer.is_authentic(answer.mac, proof, NOTHING)
