"""Files for operators: alerts, runbook, dashboard, systemd units, compose file, Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from headrace.app import sections
from headrace.kernel.config import load_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "headrace.rules.yml").read_text())[
        "groups"
    ]
    for rule in group["rules"]
]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SSL_REQUEST = 80877103
AWAY = "127.0.0.1:1"
KUBERNETES = DEPLOY / "kubernetes"
KUBERNETES_VERSION = "1.33"
OTHER_KINDS = {"Kustomization", "Cluster", "ScaledObject"}
"""Of kustomize, CloudNativePG and KEDA, whose schemas are not those of Kubernetes."""
EXAMPLE = DEPLOY / "systemd" / "headrace.env.example"
RUN_EACH = """
import contextlib, io, json, sys
from headrace.__main__ import main
ends = []
for words in json.loads(sys.argv[1]):
    sys.modules.pop(sys.argv[2], None)  # each command has its own application
    with contextlib.redirect_stderr(io.TextIOWrapper(io.BytesIO(), write_through=True)) as errors:
        ends.append((main(words), errors.buffer.getvalue().decode()))
print(json.dumps(ends))
"""


def test_the_collector_connects_what_it_defines():
    config = yaml.safe_load((DEPLOY / "opentelemetry" / "collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for part, names in pipeline.items():
            assert set(names) <= config[part].keys()
    [scrape] = config["receivers"]["prometheus"]["config"]["scrape_configs"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert scrape["static_configs"] == prometheus["scrape_configs"][0]["static_configs"]


RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
METRICS = set(
    re.findall(
        r"^\| `(\w+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text(), re.MULTILINE
    )
)
COMMANDS = set(
    re.findall(
        r"^## (headrace .+)$",
        (ROOT / "docs" / "reference" / "commands.md").read_text(),
        re.MULTILINE,
    )
)


def metrics_of(query):
    """The metrics of a query."""
    names = set(re.findall(r"\b([a-z]+_[a-z_]+?)(?:_bucket)?\b(?=[{\[)]| [<>]|$)", query))
    return names - {"up"}


def test_alerts_use_declared_metrics_and_have_an_entry_in_the_runbook():
    assert re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE) == [rule["alert"] for rule in RULES]
    for rule in RULES:
        used = metrics_of(rule["expr"])
        assert used or "up{" in rule["expr"]
        assert used <= METRICS, rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
    for words in re.findall(r"`(headrace [a-z][a-z ]*[a-z])", RUNBOOK):
        assert any(words.startswith(known) or known.startswith(words) for known in COMMANDS), words


def test_the_dashboard_is_generated_and_uses_declared_metrics():
    command = [sys.executable, "-m", "tools.dashboard", "--check"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}: run `make reference`"
    shown = json.loads((DEPLOY / "grafana" / "headrace.json").read_text())
    queries = [target["expr"] for panel in shown["panels"] for target in panel.get("targets", [])]
    assert queries
    assert [query for query in queries if not metrics_of(query) & METRICS] == []


def test_a_unit_starts_an_existing_command_and_stops_it_in_order():
    for unit in UNITS:
        text = unit.read_text()
        started = re.search(r"^ExecStart=/opt/headrace/bin/(headrace [a-z ]+)", text, re.MULTILINE)
        assert started[1].strip() in COMMANDS
        assert "KillMode=mixed" in text
        assert "TimeoutStopSec=60" in text


def settings_of_example():
    """Every line of the example, also commented ones."""
    lines = re.findall(r"^#? ?(HEADRACE_\w+)=(.*)$", EXAMPLE.read_text(), re.MULTILINE)
    return {name: text or "a text with the length of a secret" for name, text in lines}


def started_by(unit, settings):
    """The words of the unit's command, with the settings filled in as by systemd."""
    [line] = re.findall(r"^ExecStart=\S+/headrace (.*)$", unit.read_text(), re.MULTILINE)
    return [re.sub(r"\$\{(\w+)\}", lambda name: settings[name[1]], word) for word in line.split()]


@contextmanager
def refusing_postgres():
    """The address of a server that refuses every user, as PostgreSQL does."""

    class Refusal(socketserver.BaseRequestHandler):
        def handle(self):
            while len(head := self.request.recv(8, socket.MSG_WAITALL)) == 8:
                size, word = struct.unpack("!ii", head)
                if word == SSL_REQUEST:
                    self.request.sendall(b"N")
                    continue
                self.request.recv(size - 8, socket.MSG_WAITALL)
                fields = b"SFATAL\0VFATAL\0C28000\0Mno such user\0\0"
                self.request.sendall(b"E" + struct.pack("!i", len(fields) + 4) + fields)
                return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield "{}:{}".format(*server.server_address)
        finally:
            server.shutdown()


@pytest.mark.slow
def test_a_unit_s_command_takes_the_settings_of_the_example(tmp_path):
    """Each command fails at PostgreSQL, which refuses it, or at the last check before start."""
    settings = settings_of_example()
    assert {"HEADRACE_APP", "HEADRACE_POSTGRES_URL", "HEADRACE_MEDIA_LISTEN"} <= settings.keys()
    module = settings["HEADRACE_APP"].partition(":")[0]
    (tmp_path / f"{module}.py").write_text("from headrace import Headrace\napp = Headrace()\n")
    ends = {"up": (2, "no engine to start"), "media": (5, "cannot listen on")}
    commands = {unit.stem: started_by(unit, settings) for unit in UNITS}
    commands["headrace-up"].append("--engines-only")
    with socket.create_server(("127.0.0.1", 0)) as taken, refusing_postgres() as refusing:
        settings |= {
            "HEADRACE_DATA_FOLDER": str(tmp_path / "data"),
            "HEADRACE_POSTGRES_URL": f"postgresql://headrace@{refusing}/headrace",
            "HEADRACE_VALKEY_URL": f"valkey://{AWAY}",
            "HEADRACE_BLOBS_URL": f"file://{tmp_path}/blobs",
            "HEADRACE_MEDIA_LISTEN": f"127.0.0.1:{taken.getsockname()[1]}",
        }
        ran = subprocess.run(
            [sys.executable, "-c", RUN_EACH, json.dumps(list(commands.values())), module],
            cwd=tmp_path,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    for words, (code, errors) in zip(commands.values(), json.loads(ran.stdout), strict=True):
        assert code == ends.get(words[0], (7,))[0], f"{words}: {errors}"
        assert ends.get(words[0], (7, refusing))[1] in errors, f"{words}: {errors}"


def test_the_settings_and_the_entry_of_four_hosts_are_valid(tmp_path):
    page = (ROOT / "docs" / "several-hosts.md").read_text()
    blocks = re.findall(r"^```(?:ini|haproxy)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    [shared] = [one for one in blocks if "HEADRACE_APP=" in one]
    [own] = [one for one in blocks if "HEADRACE_MEDIA_NODE=a\n" in one]
    env = dict(re.findall(r"^(\w+)=(.*)$", shared + own, re.MULTILINE))
    loaded = load_config(sections(), env=env, file=None, flags={})
    assert loaded.sections["media"].node == "a"
    assert loaded.sections["web"].listen == ("10.0.0.1", 8080)
    units = {f"headrace-{role}" for role in ("api", "agent", "scheduler", "flusher", "media")}
    assert units <= {path.stem for path in (ROOT / "deploy" / "systemd").glob("*.service")}
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed")
    [proxy] = [one for one in blocks if "backend headrace_api" in one]
    config = tmp_path / "haproxy.cfg"
    config.write_text(proxy)
    found = subprocess.run(
        ["haproxy", "-c", "-f", str(config)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


def test_the_compose_file_runs_every_role():
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    roles = {"migrate", "api", "agent", "scheduler", "flusher", "media"}
    assert set(compose["services"]) == {"postgres", "valkey"} | roles
    assert "HEADRACE_MEDIA_PUBLIC_URL" in compose["services"]["media"]["environment"]
    for name in roles:
        words = f"headrace {compose['services'][name]['command']}".split(" ${")[0]
        assert words in COMMANDS
        service = compose["services"][name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]


def manifests(*parts):
    """Every object of the files in a folder of deploy/kubernetes."""
    files = sorted(KUBERNETES.joinpath(*parts).rglob("*.yaml"))
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def test_kubernetes_objects_fit_their_schemas():
    known = [one for one in manifests() if one["kind"] not in OTHER_KINDS]
    assert len(known) > 15
    for one in known:
        kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)


def test_kubernetes_runs_every_role_without_privileges():
    started = set()
    for one in manifests("base"):
        if one["kind"] not in {"Deployment", "StatefulSet", "Job"}:
            continue
        pod = one["spec"]["template"]["spec"]
        [container] = pod["containers"]
        words = f"headrace {' '.join(container['args'])}".split(" $")[0].split(" --")[0]
        assert words in COMMANDS
        started.add(one["metadata"]["name"].removeprefix("headrace-"))
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert one["kind"] == "Job" or container["livenessProbe"]
    assert started == {"migrate", "api", "agent", "scheduler", "flusher", "media"}


def test_kubernetes_settings_exist():
    known = set(re.findall(r"`(HEADRACE_\w+)`", (ROOT / "docs/reference/settings.md").read_text()))
    lines = "".join(
        (KUBERNETES / "site" / name).read_text() for name in ("settings.env", "secrets.env")
    )
    names = set(re.findall(r"^(HEADRACE_\w+)=", lines, re.MULTILINE))
    for one in manifests("base"):
        names |= set(re.findall(r"HEADRACE_\w+", json.dumps(one)))
    assert names <= known | {"HEADRACE_SECRET", "HEADRACE_APP"}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl renders the site, and is not here")
def test_kubectl_renders_the_example_of_a_site():
    command = ["kubectl", "kustomize", str(KUBERNETES / "site")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    rendered = list(yaml.safe_load_all(ran.stdout))
    for one in rendered:
        kubernetes_validate.validate(one, KUBERNETES_VERSION, strict=True)
    pods = [
        one["spec"]["template"]["spec"] for one in rendered if "template" in one.get("spec", {})
    ]
    assert {pod["containers"][0]["image"] for pod in pods} == {"registry.example.com/site:1"}
