"""Registers our adapter with the harness and runs its command line, in the harness' own Python.

CONTRIBUTING_ADAPTERS.md has an entry of `ADAPTERS` for that; adding it here leaves the harness'
files as they are. Our adapter is started as the peers are, by the harness' own launcher.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def main() -> int:
    """Run the harness in the current folder, its checkout."""
    sys.path.insert(0, str(Path.cwd()))
    adapters = import_module("bench_harness.adapters")
    adapters.ADAPTERS["headrace"] = adapters.AdapterEntry(
        bench_dir=Path.cwd() / "headrace-bench",
        builder=lambda _skip: None,
        launcher=lambda manifest, overrides: adapters._docker_launch(  # noqa: SLF001
            "headrace-bench", manifest, overrides
        ),
    )
    orchestrator = import_module("bench_harness.orchestrator")
    # Plots come after summary.json and would load the machine that the next cell shares.
    orchestrator.render_all = orchestrator.write_interactive_report = lambda *_, **__: None
    return int(orchestrator.main() or 0)


if __name__ == "__main__":
    sys.exit(main())
