"""A site of two hosts whose PostgreSQL fails over, under the load of `SiteClients`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from site_clients import SiteClients
from tests.kit.hosts import Host, Hosts
from tests.kit.processes import HeadraceProcess, is_alive

from headrace.app import PACKAGES
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig

ROLES: Final = {
    "agent": ("agent", "site_app:app"),
    "api": ("api", "site_app:app"),
    "scheduler": ("scheduler", "site_app:app"),
    "flusher": ("flusher",),
}


class FailoverSite(SiteClients):
    """The roles on their hosts, and the clients."""

    def __init__(self, folder: Path, net: Hosts, env: dict[str, str]) -> None:
        super().__init__(folder, Postgres(env["HEADRACE_POSTGRES_URL"], PostgresConfig()))
        self.hosts: dict[str, Host] = {"work": net.add("work"), "front": net.add("front")}
        address = f"{self.hosts['front'].address}:8080"
        self.api_url = f"http://{address}"
        self._env = {
            "HEADRACE_SECRET": "the secret of a site, thirty-two characters",
            "HEADRACE_BLOBS_URL": (folder / "blobs").as_uri(),
            "HEADRACE_WEB_LISTEN": address,
            "PYTHONPATH": str(Path(__file__).parent),
            "RECEIVED": str(folder),
            **env,
        }
        (folder / "blobs").mkdir(parents=True)
        self.roles: dict[str, HeadraceProcess] = {}

    async def start(self) -> None:
        """Migrate and start the roles; wait until the API answers."""
        await apply_migrations(self.postgres, PACKAGES)
        await self.make_token()
        pythons = {name: host.python(self.received) for name, host in self.hosts.items()}
        for name, words in ROLES.items():
            self.roles[name] = HeadraceProcess(
                list(words),
                folder=self.received,
                env=self._env,
                python=pythons["work" if name == "agent" else "front"],
            )
        await self.begin()

    def require_running(self) -> None:
        """No role ended or was restarted."""
        for name, process in self.roles.items():
            if not is_alive(process.pid):
                text = f"{process.wait_exit()}: {process.out[-800:]}{process.err[-3000:]}"
                raise AssertionError(f"{name} ended with {text}")

    async def end(self) -> None:
        for process in self.roles.values():
            process.end()
        await self.postgres.close()
