"""What sellers do: hand in catalogues by HTTP or command line, look how their runs go."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from examples.bazaar.client import Client
from examples.bazaar.shops import Shop
from examples.bazaar.stage import Stage

LIMITS: Final = {"starts_max": 600, "window_s": 60.0, "connections": 8}


@dataclass(frozen=True, slots=True)
class Run:
    """One reading of a catalogue, as the API shows it."""

    id: int
    state: str
    counts: dict[str, int]
    photos: int
    photos_by_outcome: dict[str, int]

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.state not in ("reading", "applied")


class Desk:
    """Where catalogues are handed in. Keeps the latest state of every run it started."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        # Two connections, so that looking never waits behind a catalogue.
        self._handing = Client(stage.api_url, token=stage.token())
        self._watching = Client(stage.api_url, token=stage.token())
        self.runs: dict[int, Run] = {}

    def close(self) -> None:
        """Close the connections."""
        self._handing.close()
        self._watching.close()

    async def make_customer(self, shop: Shop) -> None:
        """Make the shop a customer with its limits, or change them."""
        body = json.dumps(LIMITS).encode()
        await self._call("PUT", f"/v1/fetch/customers/{shop.name}", body)

    async def hand_in(self, shop: Shop, file: Path) -> int:
        """Send the catalogue over HTTP; returns the number of its run."""
        path = f"/v1/fetch/customers/{shop.name}/catalogues?file_name={file.name}"
        return self._note(await self._call("POST", path, await asyncio.to_thread(file.read_bytes)))

    async def hand_in_by_command(self, shop: Shop, file: Path) -> int:
        """Run the catalogue with `headrace fetch catalogue run`; returns the number of its run.

        Raises: CommandFailedError, with the output of the command.
        """
        words = ("fetch", "catalogue", "run", str(file), "--customer", shop.name)
        return self._note(json.loads(await self._stage.command(*words, "--no-wait", "--json")))

    async def look(self) -> None:
        """Bring the runs that are not over up to date."""
        for run in [run for run in self.runs.values() if not run.is_over]:
            self._note(await self._watching.get_json(f"/v1/fetch/runs/{run.id}"))

    async def queues(self) -> list[dict[str, Any]]:
        """The backlog of every queue."""
        found: list[dict[str, Any]] = await self._watching.get_json("/v1/queues")
        return found

    async def views_pending(self) -> int:
        """Calls with views that are counted and not yet in PostgreSQL."""
        shards = await self._watching.get_json("/v1/views/lag")
        return sum(int(shard["pending"]) for shard in shards)

    async def jobs_done(self) -> int:
        """Jobs done since `headrace up` started; the roles report every two seconds."""
        reply = await self._watching.request("GET", "/metrics")
        lines = reply.body.decode().splitlines() if reply.status == 200 else []
        done = [line for line in lines if "jobs_finished_total{" in line and '"done"' in line]
        return sum(int(float(line.rpartition(" ")[2])) for line in done)

    def _note(self, answer: dict[str, Any]) -> int:
        names = ("new", "changed", "gone", "unchanged", "invalid")
        counts = {name: int(answer[name]) for name in names}
        run = Run(
            id=int(answer["run"]),
            state=answer["state"],
            counts=counts,
            photos=int(answer["photos"]),
            photos_by_outcome=dict(answer["photos_by_outcome"]),
        )
        self.runs[run.id] = run
        return run.id

    async def _call(self, method: str, path: str, body: bytes = b"") -> Any:
        kind = "application/json" if method == "PUT" else "application/octet-stream"
        headers = {"Content-Type": kind}
        # The same catalogue a second time has no effect.
        reply = await self._handing.request(
            method, path, body=body, headers=headers, is_repeatable=True
        )
        return reply.json()
