"""`Engines`: the opened set of engines that rooms are given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.engines.blobs import Blobs
from headrace.engines.endpoints import Endpoints
from headrace.engines.multiplex import Multiplexer
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.kernel.config import Loaded


@dataclass(frozen=True, slots=True)
class Engines:
    """One of each; every one connects on first use."""

    postgres: Postgres
    valkey: Valkey
    multiplexer: Multiplexer
    blobs: Blobs

    @classmethod
    def at(
        cls, endpoints: Endpoints, config: Loaded, blobs: Blobs, *, is_slot: bool = False
    ) -> Engines:
        """Handles on the engines that answer at `endpoints`, beside an object store."""
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
        """Close what was opened."""
        await self.postgres.close()
        await self.multiplexer.close()
        await self.valkey.close()
        await self.blobs.close()
