"""The workflow files: no known risk, pinned actions, and the Python versions that are declared."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}
ZIZMOR = shutil.which("zizmor", path=str(Path(sys.executable).parent))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = [
    name.rpartition(" :: ")[2]
    for name in PROJECT["classifiers"]
    if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", name)
]


def steps():
    """Each step with the names of its workflow and job."""
    for name, workflow in WORKFLOWS.items():
        for job, described in workflow["jobs"].items():
            for step in described["steps"]:
                yield f"{name}.{job}", step


@pytest.mark.skipif(ZIZMOR is None, reason="zizmor is not installed")
def test_zizmor_finds_nothing(tmp_path):
    """It also parses each file by the schema; its exit code is that of its worst finding."""
    command = [ZIZMOR, "--offline", "--no-progress", "--persona", "pedantic"]
    ran = subprocess.run([*command, FOLDER], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    broken = tmp_path / ".github" / "workflows"
    broken.mkdir(parents=True)
    text = (FOLDER / "test.yml").read_text().replace("permissions: {}\n", "")
    (broken / "test.yml").write_text(re.sub(r"@[0-9a-f]{40} # v", "@v", text))
    ran = subprocess.run([*command, broken], capture_output=True, text=True, check=False)
    assert "unpinned-uses" in ran.stdout, "this check can fail"


def test_actions_are_pinned_and_no_secret_is_used():
    used = {step["uses"] for _, step in steps() if "uses" in step}
    assert used
    assert [use for use in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", use)] == []
    assert [path.name for path in FOLDER.iterdir() if "secrets." in path.read_text()] == []


def test_the_matrix_has_the_declared_versions_of_python_and_both_machines():
    assert VERSIONS == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"
    tests, release = WORKFLOWS["test"]["jobs"], WORKFLOWS["release"]["jobs"]
    for job in (tests["pythons"], release["installed"]):
        assert job["strategy"]["matrix"]["python"] == VERSIONS
    machines = {one["machine"] for one in release["wheels"]["strategy"]["matrix"]["include"]}
    assert machines == {"x86_64", "aarch64"}


def test_publishing_needs_a_tag_and_every_check_before_it():
    jobs = WORKFLOWS["release"]["jobs"]
    publish = jobs["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert publish["permissions"] == {"id-token": "write"}
    needed, waiting = set(), ["publish"]
    while waiting:
        needs = jobs[waiting.pop()].get("needs", [])
        found = {needs} if isinstance(needs, str) else set(needs)
        waiting += found - needed
        needed |= found
    assert needed == jobs.keys() - {"publish"}


def test_commands_of_steps_exist():
    makefile = (ROOT / "Makefile").read_text()
    runs = [(place, step["run"]) for place, step in steps() if "run" in step]
    for place, text in runs:
        for target in re.findall(r"\bmake (\w+)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{place}: make {target}"
    assert any("headrace demo --seconds" in text for _, text in runs)
