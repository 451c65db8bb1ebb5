"""What stands beside the code for those who run it: alerts, dashboard, units, compose file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "penstock.rules.yml").read_text())[
        "groups"
    ]
    for rule in group["rules"]
]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
NOT_OURS = {"up"}


def _declared():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    return set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))


def _asked(query):
    names = set(re.findall(r"\b([a-z]+_[a-z_]+?)(?:_bucket)?\b(?=[{\[)]| [<>]|$)", query))
    return names - NOT_OURS


def _commands():
    return set(
        re.findall(
            r"^## (penstock .+)$",
            (ROOT / "docs" / "reference" / "commands.md").read_text(),
            re.MULTILINE,
        )
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_what_is_declared(rule):
    asked = _asked(rule["expr"])
    assert asked or "up{" in rule["expr"]
    assert asked <= _declared()


def test_every_alert_has_its_entry_in_the_runbook_and_no_entry_is_left_over():
    page = (ROOT / "docs" / "runbook.md").read_text()
    entries = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert entries == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_the_runbook_names_commands_that_exist():
    page = (ROOT / "docs" / "runbook.md").read_text()
    known = _commands()
    for words in re.findall(r"`(penstock [a-z][a-z ]*[a-z])", page):
        assert any(words.startswith(command) or command.startswith(words) for command in known), (
            words
        )


def test_the_dashboard_is_what_its_tool_says_and_asks_what_is_declared():
    command = [sys.executable, "-m", "tools.dashboard", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}: run `make reference`"
    shown = json.loads((DEPLOY / "grafana" / "penstock.json").read_text())
    queries = [target["expr"] for panel in shown["panels"] for target in panel.get("targets", [])]
    assert queries
    for query in queries:
        assert _asked(query) & _declared(), query


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_exists_and_stops_it_in_order(unit):
    text = unit.read_text()
    started = re.search(r"^ExecStart=/opt/penstock/bin/(penstock [a-z ]+)", text, re.MULTILINE)
    assert started
    assert started[1].strip() in _commands()
    assert "KillMode=mixed" in text
    assert "TimeoutStopSec=60" in text


def test_the_compose_file_runs_every_role():
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    commands = {name: service.get("command", "") for name, service in compose["services"].items()}
    assert set(commands) == {
        "postgres", "valkey", "migrate", "api", "agent", "scheduler", "flusher", "media",
    }  # fmt: skip
    for name in ("migrate", "api", "agent", "scheduler", "flusher", "media"):
        words = f"penstock {commands[name]}".split(" ${")[0]
        assert words in _commands()
