"""A folder for the engines of a test run (`headrace.testing.databases` starts them), and their
backups: none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.kit.run_cleanup import MEMORY_VARIABLE

from headrace.engines.backup.archive import BackupConfig
from headrace.engines.backup.service import Backups

NO_BACKUPS: Final = Backups(BackupConfig(), Path("/nonexistent"), None)
"""As with `postgres.url`, where another tool makes the backups."""


@contextmanager
def engines_folder() -> Iterator[Path]:
    """A folder for the engines, in memory if possible, where databases are three times as fast."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir=os.environ[MEMORY_VARIABLE]) as folder:
        yield Path(folder)
