"""The only importer of drivers: PostgreSQL, Valkey and the object store.

postgres             the source of truth: connection pool, transactions, named queries (asyncpg)
postgres_servers     the writable server of a URL, and the end of connections to silent hosts
commit_wait          commits that wait for a synchronous standby that is not connected
replica              reads on a standby that may lag, else on the primary
sql                  named SQL statements from files
remote               rows and errors of statements that another process runs
migrate              schema migrations and the check for a pooler in transaction mode
caller_transaction   our queries on a connection of the caller's own driver
valkey               pools of connections to one server or a cluster (valkey-py); data may be lost
multiplex            one pipelined connection shared by all callers, for hot paths
functions            versioned Lua function libraries
bucket_endpoint      the address of the S3 store, checked before a client is created
blobs                objects in a local folder or S3 (obstore)
durable_files        files that survive a power cut
mount_guard          refusal of a blob folder whose marker is missing
embedded             PostgreSQL and Valkey from wheels, in one data folder
endpoints            URLs of the engines, without their secrets

`Engines` is the opened set that rooms receive. Drivers are imported on first use, so a process
that serves only media loads no PostgreSQL driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.engines.blobs import Blobs
    from headrace.engines.endpoints import Endpoints
    from headrace.engines.multiplex import Multiplexer
    from headrace.engines.postgres import Postgres
    from headrace.engines.valkey import Valkey
    from headrace.kernel.config import Loaded


@dataclass(frozen=True, slots=True)
class Engines:
    """One handle per engine; each connects on first use."""

    postgres: Postgres
    valkey: Valkey
    multiplexer: Multiplexer
    blobs: Blobs

    @classmethod
    def at(
        cls, endpoints: Endpoints, config: Loaded, blobs: Blobs, *, is_slot: bool = False
    ) -> Engines:
        """Handles for the engines at `endpoints` and the object store `blobs`."""
        from headrace.engines.multiplex import Multiplexer
        from headrace.engines.postgres import Postgres, PostgresConfig
        from headrace.engines.valkey import Valkey, ValkeyConfig

        postgres = config.section(PostgresConfig)
        if is_slot:
            postgres = replace(postgres, connections_max=postgres.slot_connections_max)
        return cls(
            Postgres(endpoints.postgres_url, postgres),
            Valkey(endpoints.valkey_url, config.section(ValkeyConfig)),
            Multiplexer(endpoints.valkey_url, config.section(ValkeyConfig)),
            blobs,
        )

    async def close(self) -> None:
        """Close every engine that was opened."""
        await self.postgres.close()
        await self.multiplexer.close()
        await self.valkey.close()
        await self.blobs.close()
