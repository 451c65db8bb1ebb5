"""The errors of media.

HTTP statuses that are finer than the eleven kinds of errors (405, 408, 412, 414, 416, 431, 501,
505) are set on the error itself, so that the table of errors lists every answer.
"""

from __future__ import annotations

from headrace.kernel.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    Malformed,
    NotFound,
    TooLarge,
    Unavailable,
)


class ObjectUnknown(NotFound):
    """No object of this key is stored, or the path is no valid key."""

    code = "media.object_unknown"


class BadRequest(Malformed):
    """The bytes are no valid request; the connection is closed."""

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
    """The path is too long."""

    code, status = "media.target_too_long", 414


class RangeUnsatisfiable(InvalidInput):
    """The range begins after the object's end."""

    code, status = "media.range_unsatisfiable", 416


class InvalidVariant(Malformed):
    """The query names no variant of an image."""

    code = "media.invalid_variant"

    @classmethod
    def of(cls, fault: str) -> InvalidVariant:
        """The error for `fault`, with the allowed values."""
        return cls(
            f"no variant of an image: {fault}; allowed are w and h (1 to 4096 pixels), fit (inside,"
            " cover, contain; the last two need w and h) and fm (auto, avif, webp, jpeg, png)"
        )


class VariantNotAllowed(Forbidden):
    """The size of a variant is not in the list of the node, and the URL is not signed."""

    code = "media.variant_not_allowed"


class VariantRefused(InvalidInput):
    """The original cannot be made into a variant: it is damaged, no image, or over a limit."""

    code = "media.variant_refused"


class VariantsBusy(Unavailable):
    """The node cannot make variants now."""

    code = "media.variants_busy"


class HeadTooLarge(TooLarge):
    """The header fields are too large."""

    code, status = "media.head_too_large", 431


class TransferCodingUnknown(Malformed):
    """The request has an unsupported Transfer-Encoding."""

    code, status = "media.transfer_coding_unknown", 501


class VersionUnknown(Malformed):
    """The HTTP version of the request is not 1.0 or 1.1."""

    code, status = "media.version_unknown", 505


class StoreUnavailable(Unavailable):
    """The object store does not answer."""

    code = "media.store_unavailable"


class SourceCut(Unavailable):
    """An object ended, changed or failed while it was being sent; its connection is cut."""

    code = "media.source_cut"


class ListenFailed(Conflict):
    """The listen address cannot be used."""

    code = "media.listen_failed"


class WrongContentAddress(InvalidInput):
    """The bytes do not have the hash in the key."""

    code = "media.wrong_content_address"


class TooManyConnections(Unavailable):
    """This node has reached its limit of clients."""

    code = "media.too_many_connections"


class ReservedKey(InvalidInput):
    """The key is in the reserved folder of the object store."""

    code = "media.reserved_key"


class StoredAtHome(Conflict):
    """This cluster has `media.upstream`: objects, tags and uploads are kept at that cluster."""

    code = "media.stored_at_home"


class InvalidObject(InvalidInput):
    """The content of an object is not bytes."""

    code = "media.invalid_object"


class InvalidPurge(InvalidInput):
    """A purge names neither keys nor a prefix, or both, or its prefix begins no valid key."""

    code = "media.invalid_purge"


class NoNodes(Conflict):
    """The cluster has no active node."""

    code = "media.no_nodes"


class InvalidSimulation(InvalidInput):
    """A simulated cluster is invalid, or names a node that it does not have."""

    code = "media.invalid_simulation"


class NodeNotHere(Conflict):
    """No node with disks runs on this data folder."""

    code = "media.node_not_here"


class InvalidDiskSize(InvalidInput):
    """The size of a disk is not in the notation of sizes, or not one that it can have."""

    code = "media.invalid_disk_size"


class DiskRefused(Conflict):
    """The disk cannot be used: it has other content, or another node uses it."""

    code = "media.disk_refused"


class DiskUnknown(NotFound):
    """No disk of this id or path belongs to this node."""

    code = "media.disk_unknown"


class CommandUnknown(InvalidInput):
    """The process that manages a node's cache has no such command, or not with these arguments."""

    code = "media.command_unknown"


class FillerRunning(Conflict):
    """Another process manages this node's cache."""

    code = "media.filler_running"


class FillerAway(StoreUnavailable):
    """The process that manages this node's cache (the filler) does not answer."""

    code = "media.filler_away"


class SharedMemoryLost(Conflict):
    """The shared memory of this node's processes was removed while it runs."""

    code = "media.shared_memory_lost"
