"""What the verbs of media refuse. The answers of the data plane are in `model`, beside its statuses."""

from __future__ import annotations

from headrace.kernel.errors import Conflict, InvalidInput


class ReservedKey(InvalidInput):
    """The key lies in the folder of the object store that the product keeps for itself."""

    code = "media.reserved_key"


class InvalidPurge(InvalidInput):
    """A purge names neither keys nor a prefix, or both."""

    code = "media.invalid_purge"


class NoNodes(Conflict):
    """The cluster has no node that could do it."""

    code = "media.no_nodes"


class InvalidSimulation(InvalidInput):
    """A simulated cluster that cannot be, or a node in it that is not there."""

    code = "media.invalid_simulation"


class NodeNotHere(Conflict):
    """The verb is about the node of this data folder, and none with disks runs on it."""

    code = "media.node_not_here"


class InvalidDiskSize(InvalidInput):
    """The size of a disk is not written as sizes are."""

    code = "media.invalid_disk_size"
