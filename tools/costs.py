"""Write src/headrace/cli/costs.json, which `headrace size` reads, from the record of benchmarks.

`python -m tools.costs --check` only compares the two; the tests run it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
TARGET: Final = ROOT / "src" / "headrace" / "cli" / "costs.json"
GIB: Final = 2**30
RANGE: Final = 2**18
CONSTANTS: Final = (
    *("scheduler", "flusher", "API process", "agent", "slot"),
    *("session of PostgreSQL", "disk"),
)
"""Rows that belong to no operation."""
CONNECTIONS: Final = ("memory of the processes", "memory of TCP, both ends")
CONNECTIONS_HELD: Final = 100_000
"""Connections of these two rows."""


def figures_of(room: str) -> list[dict[str, Any]]:
    """The rows of a room's record that have a figure."""
    document = json.loads((ROOT / "bench" / "results" / f"{room}.json").read_text())
    return [row for row in document["figures"] if row["ours"] is not None]


def one(room: str, name: str) -> float:
    """The figure of the first row with this name."""
    return float(next(row["ours"] for row in figures_of(room) if row["name"] == name))


def document() -> dict[str, Any]:
    """Costs by operation and resource, and where they come from."""
    costs: dict[str, dict[str, float]] = {}
    for row in figures_of("costs"):
        operation, _, resource = row["name"].rpartition(": ")
        costs.setdefault(operation, {})[resource] = row["ours"]
    constants = {name: costs.pop(name) for name in CONSTANTS if name in costs}
    for name, tls in (("from memory", ""), ("over HTTPS", " over HTTPS")):
        per_gib_s = one("media", f"CPU of the server, ranges of 256 KiB{tls}")
        cost = {"CPU": round(per_gib_s * 1e6 * RANGE / GIB, 1)}
        costs.setdefault(f"range of 256 KiB {name}", cost)
    costs["request of the API"] = {"CPU": one("views", "CPU of a read of 20 totals")}
    per_connection = [one("media", name) for name in CONNECTIONS]
    tcp_bytes = per_connection[1] * 2**20 / CONNECTIONS_HELD
    constants["connection of media"] = {"memory": round(per_connection[0] * 1024 + tcp_bytes)}
    head = json.loads((ROOT / "bench" / "results" / "costs.json").read_text())
    cores, cpu = head["machine"]["cores"], head["machine"]["cpu"]
    return {
        "source": f"{head['command']}, {cores} cores ({cpu}), {head['date'][:10]}",
        "units": {"CPU": "us", "log, size, memory, file": "B"},
        "costs": costs,
        "constants": constants | {"disk": disk_of(constants, head)},
    }


def disk_of(constants: dict[str, Any], head: dict[str, Any]) -> dict[str, float]:
    """Commits and bytes a second of the disk, one after the other."""
    syncs_per_s = round(1e6 / head["machine"]["sync_us"]["median"])
    return {**constants.get("disk", {}), "syncs": syncs_per_s}


def main() -> None:
    """Write the file, or compare it."""
    text = json.dumps(document(), indent=1) + "\n"
    if "--check" in sys.argv:
        sys.exit(
            TARGET.read_text() != text
            and f"{TARGET.name} is not of the record: python -m tools.costs"
        )
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
