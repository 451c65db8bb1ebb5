"""What the verbs of media refuse. The answers of the data plane are in `model`, beside its statuses.

[store/errors.py] What the store refuses: a disk, a command, a second filler.
"""

from __future__ import annotations

from headrace.kernel.errors import (
    Conflict,
    InvalidInput,
    Malformed,
    NotFound,
    TooLarge,
    Unavailable,
)


class ObjectUnknown(NotFound):
    """No object of that key is stored, or the path can name none."""

    code = "media.object_unknown"


class BadRequest(Malformed):
    """The bytes are no request that can be framed without doubt; the connection is closed."""

    code = "media.bad_request"


class MethodNotAllowed(Malformed):
    """The method is none of GET, HEAD and OPTIONS."""

    code, status = "media.method_not_allowed", 405


class HeadTimeout(Malformed):
    """The head of a request did not arrive in time."""

    code, status = "media.head_timeout", 408


class PreconditionFailed(Conflict):
    """If-Match or If-Unmodified-Since names another version than the stored one."""

    code, status = "media.precondition_failed", 412


class TargetTooLong(TooLarge):
    """The path is over its bound."""

    code, status = "media.target_too_long", 414


class RangeUnsatisfiable(InvalidInput):
    """The range begins after the object's end."""

    code, status = "media.range_unsatisfiable", 416


class HeadTooLarge(TooLarge):
    """The header fields are over their bounds."""

    code, status = "media.head_too_large", 431


class TransferCodingUnknown(Malformed):
    """The request has a Transfer-Encoding that is not known here."""

    code, status = "media.transfer_coding_unknown", 501


class VersionUnknown(Malformed):
    """The request is of another HTTP version than 1.0 or 1.1."""

    code, status = "media.version_unknown", 505


class StoreUnavailable(Unavailable):
    """The object store does not answer."""

    code = "media.store_unavailable"


class SourceCut(Unavailable):
    """An object ended, changed or failed while it was being sent; its connection is cut."""

    code = "media.source_cut"


class ListenFailed(Conflict):
    """The address to serve on cannot be taken."""

    code = "media.listen_failed"


class WrongContentAddress(InvalidInput):
    """The bytes are not those whose hash the key names."""

    code = "media.wrong_content_address"


class TooManyConnections(Unavailable):
    """This node holds as many clients as it may."""

    code = "media.too_many_connections"


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


class DiskRefused(Conflict):
    """The disk cannot be used as it is: it holds something else, or another node has it."""

    code = "media.disk_refused"


class DiskTooSmall(InvalidInput):
    """The disk has no room for one set of frames."""

    code = "media.disk_too_small"


class DiskUnknown(NotFound):
    """No disk of that id or path belongs to this node."""

    code = "media.disk_unknown"


class CommandUnknown(InvalidInput):
    """The filler has no such command, or not with these arguments."""

    code = "media.command_unknown"


class FillerRunning(Conflict):
    """Another filler keeps this node's store."""

    code = "media.filler_running"


class FillerAway(StoreUnavailable):
    """The process that fills this node's store does not answer."""

    code = "media.filler_away"


class SharedMemoryLost(Conflict):
    """The memory that this node's processes share was removed under them."""

    code = "media.shared_memory_lost"
