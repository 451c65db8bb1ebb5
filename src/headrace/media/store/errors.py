"""What the store refuses: a disk, a command, a second filler."""

from __future__ import annotations

from headrace.kernel.errors import Conflict, InvalidInput, NotFound
from headrace.media.model import StoreUnavailable


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
