"""Write docs/reference and clients/typescript from the code; with `--check` only compare.

Run `make reference` after a change of settings, commands, routes, metrics or errors. The tests run
the check, so a setting or a route without documentation fails.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

import headrace
from headrace.app import Headrace, sections
from headrace.cli.main import build_group
from headrace.engines.endpoints import Endpoints
from headrace.kernel.config import setting_rows
from headrace.kernel.config_schema import config_schema
from headrace.kernel.errors import KINDS, error_table, kind_of
from headrace.kernel.metrics import declared_metrics
from headrace.web.server import describe_api
from tools.capacity_page import capacity_page
from tools.python_reference import python_pages
from tools.typescript_client import typescript_files

ROOT: Final = Path(__file__).parents[1]
NOTE: Final = "Written by `make reference` from the code; do not edit.\n"


def settings_page() -> str:
    """Every setting."""
    rows = setting_rows(sections())
    lines = ["# Settings\n", NOTE]
    lines.append(
        "A value comes from a command-line flag, else the environment, else `headrace.toml` (or the"
        " file named by `--config` or `HEADRACE_CONFIG`), else its default. Durations are written"
        " `30s`, `10m`, `2h`; sizes `64KiB`, `25MiB`; lists with commas. `HEADRACE_SECRET` is the"
        " root of all signatures; without it one is made in the data folder. `HEADRACE_APP` is left"
        " to units and compose files, which name the application by it. Settings of rooms that are"
        " not installed are accepted. `headrace config show` prints the effective settings.\n"
    )
    for section in dict.fromkeys(row.section for row in rows):
        lines += [
            f"## [{section}]\n",
            "| setting | environment | default | what it is |",
            "| --- | --- | --- | --- |",
        ]
        for row in (r for r in rows if r.section == section):
            default = f"`{row.default}`" if row.default else "unset"
            assert row.help, f"{section}.{row.name} has no help"
            lines.append(f"| `{row.name}` | `{row.env}` | {default} | {row.help} |")
        lines.append("")
    return "\n".join(lines)


def errors_page() -> str:
    """Every error code."""
    lines = [
        "# Errors\n",
        NOTE,
        "Over HTTP an error is `application/problem+json` (RFC 9457) with these",
    ]
    lines += [
        "codes; the command line prints the code in brackets and exits with the code of its kind.\n"
    ]
    lines += ["| kind | HTTP status | exit code | try again |", "| --- | --- | --- | --- |"]
    for kind in KINDS:
        again = "yes" if kind.retryable else "no"
        lines.append(f"| {kind.__name__} | {kind.status} | {kind.exit_code} | {again} |")
    lines += ["", "| code | kind | what it means |", "| --- | --- | --- |"]
    for code, error in error_table().items():
        if not error.__module__.startswith("headrace."):
            continue
        meaning = " ".join((error.__doc__ or "").split())
        assert meaning, f"{error.__name__} has no docstring"
        lines.append(f"| `{code}` | {kind_of(error).__name__} | {meaning} |")
    return "\n".join([*lines, ""])


def commands_page() -> str:
    """Every command with the text of its `--help`."""
    lines = ["# Commands\n", NOTE]
    lines.append(
        "`--json`, `--config FILE` and `--data FOLDER` are accepted anywhere on the line. Exit"
        " codes: 0 done, 1 a fault of Headrace, 2 wrong input, 3 not permitted, 4 not found, 5 in"
        " conflict with the present state, 6 over a limit, 7 something needed is down, 8 stored"
        " data is corrupt, 130 interrupted. [In scripts](../scripting.md) describes the output.\n"
    )
    for path, command in leaves(build_group(), "headrace"):
        names = ["-h", "--help"]
        context = click.Context(
            command, info_name=path, max_content_width=100, help_option_names=names
        )
        assert command.help, f"{path} has no help"
        lines += [f"## {path}\n", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def leaves(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its full name."""
    if isinstance(command, click.Group):
        if command.invoke_without_command:
            yield path, command
        for name, inner in sorted(command.commands.items()):
            yield from leaves(inner, f"{path} {name}")
    elif not command.hidden:
        yield path, command


def metrics_page() -> str:
    """Every metric."""
    lines = [
        "# Metrics\n",
        NOTE,
        "Served at `GET /metrics` of the API, for all roles of the machine under a",
    ]
    lines += ["label `role`. Label values are a fixed set; anything else counts as `other`.\n"]
    lines += ["| metric | labels | what it counts |", "| --- | --- | --- |"]
    for name, (help_text, labels) in declared_metrics().items():
        assert help_text, f"{name} has no help"
        lines.append(f"| `{name}` | {', '.join(labels) or 'none'} | {help_text} |")
    return "\n".join([*lines, ""])


def http_page(description: dict[str, Any]) -> str:
    """Every route of the OpenAPI description."""
    lines = ["# HTTP API\n", NOTE]
    lines.append(
        "The description itself is OpenAPI 3.1, at `GET /openapi.json`. Callers send"
        " `Authorization: Bearer TOKEN`; `headrace tokens create` makes one. Photos are served by"
        " the media role at `GET|HEAD /m/KEY`, with Range.\n"
    )
    lines += ["| route | scope | what it does |", "| --- | --- | --- |"]
    for path, operations in sorted(description["paths"].items()):
        for method, operation in operations.items():
            summary = operation.get("description") or operation.get("summary") or ""
            assert summary, f"{method} {path} has no description"
            security = operation.get("security") or []
            needed = security[0]["bearer"] if security else []
            scope = f"`{needed[0]}`" if needed else "any token" if security else "open"
            first = summary.strip().split("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{method.upper()} {path}` | {scope} | {first} |")
    return "\n".join([*lines, ""])


def load_everything() -> None:
    """Import every module: metrics and errors are declared where they are used."""
    for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
        if not module.name.endswith("__main__"):
            import_module(module.name)


def pages() -> dict[str, str]:
    """Path -> text."""
    load_everything()
    app = Headrace(flags={"data.folder": "headrace-data"})
    nowhere = Endpoints("postgresql://nobody@/none?host=/nowhere", "unix:///nowhere", "file:///tmp")
    app.use_endpoints(nowhere)
    app.load_rooms()
    description = describe_api(app)
    reference = {
        "settings.md": settings_page(),
        "commands.md": commands_page(),
        "metrics.md": metrics_page(),
        "http.md": http_page(description),
        "errors.md": errors_page(),
        "capacity.md": capacity_page(),
        "headrace.schema.json": json.dumps(config_schema(sections()), indent=2) + "\n",
        **python_pages(app, NOTE),
    }
    client = typescript_files(description)
    return {
        **{f"docs/reference/{name}": text for name, text in reference.items()},
        **{f"clients/typescript/{name}": text for name, text in client.items()},
    }


def main() -> int:
    """Write the pages, or check them; returns the exit code."""
    stale = []
    for name, text in pages().items():
        path = ROOT / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if stale:
        print(("not up to date: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
