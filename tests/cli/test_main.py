"""The command line: global options anywhere, exit codes, helpful errors."""

from __future__ import annotations

import importlib
import json
import socket

import pytest

from headrace.__main__ import main
from headrace.cli.app_context import CommandLine
from headrace.cli.extras import LIBRARIES
from headrace.cli.main import NAMES, ROOMS, build_group, take_global_options
from headrace.web.model import AddressInUse


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder without configuration."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(*given):
    line = CommandLine(lambda _: None, ())
    return take_global_options(given, line), line


def test_global_options_may_appear_anywhere_before_a_lone_dash_dash():
    kept, line = words(
        "jobs", "--json", "show", "7", "--data", "d", "--config=c.toml", "--", "--json"
    )
    assert kept == ["jobs", "show", "7", "--", "--json"]
    assert (line.is_json, line.flags, line.config_file) == (True, {"data.folder": "d"}, "c.toml")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["no-such-noun"], 2, "'no-such-noun' is not a command"),
        (["jobs", "show"], 2, "Missing argument"),
        (["-v"], 2, "for the version run `headrace --version`"),
        (["init", "django"], 2, "headrace init FOLDER --for django"),
        (["init", "fastpi"], 2, "headrace init FOLDER --for fastapi"),
        (["up", "nofile:app"], 2, "run the command in the folder of nofile.py"),
        (["queues", "ls"], 7, "`--data FOLDER` or `--config FILE`"),
        (["config", "show", "--data"], 2, "--data needs a value"),
        (["up", "nonsense"], 2, "use module:attribute"),
        (["up", "no_such_module:app"], 2, "no module 'no_such_module'"),
        (["up", "json:app"], 2, "module json has no Headrace() named 'app'"),
        (["up", "site:app"], 2, "'site' is a module of Python's standard library and hides"),
        (["up", "site.web:app"], 2, "rename yours, such as to site_app.py"),
        (["jobs", "show", "1"], 7, "headrace up"),
        (["agent", "--name", "a b"], 2, "host 'a b' is not a valid id"),
        (["agent", "--name", ""], 2, "host '' is not a valid id"),
        (["migrate"], 7, "headrace up"),
        (["config", "show", "--config", "absent.toml"], 2, "no such file"),
    ],
)
def test_errors_have_exit_codes_and_advice(folder, capfd, arguments, exit_code, said):
    assert main(arguments) == exit_code
    assert said in capfd.readouterr().err


def test_up_names_all_used_addresses_before_it_starts_anything(folder, capfd, monkeypatch):
    with (
        socket.create_server(("127.0.0.1", 0)) as web,
        socket.create_server(("127.0.0.1", 0)) as media,
    ):
        for name, used in (("WEB", web), ("MEDIA", media)):
            monkeypatch.setenv(f"HEADRACE_{name}_LISTEN", f"127.0.0.1:{used.getsockname()[1]}")
        assert main(["up"]) == AddressInUse.exit_code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for said in ("HEADRACE_WEB_LISTEN", "HEADRACE_MEDIA_LISTEN", "port 0", "Nothing was started"):
        assert said in err
    assert list(folder.iterdir()) == []


def test_with_json_an_error_is_one_document(folder, capfd):
    assert main(["jobs", "show", "1", "--json"]) == 7
    problem = json.loads(capfd.readouterr().err)["error"]
    assert problem["code"] == "engines.not_running"
    assert problem["retryable"] is True


def test_config_show_names_sources_and_masks_secrets(folder, capfd, monkeypatch):
    (folder / "headrace.toml").write_text('[web]\nlisten = "127.0.0.1:9999"\n')
    monkeypatch.setenv("HEADRACE_POSTGRES_URL", "postgresql://me:hunter2@db/site")
    monkeypatch.setenv("HEADRACE_MEDIA_PUBLIC_URL", "https://me:hunter2@cdn.example/x")
    monkeypatch.setenv("HEADRACE_BLOBS_URL", "s3://AKIA:hunter2@bucket/x")
    monkeypatch.setenv("HEADRACE_JOBS_ALERTS_WEBHOOK_URL", "https://hooks.example/T0/hunter2")
    assert main(["config", "show", "--json"]) == 0
    out = capfd.readouterr().out
    rows = {row["name"]: row for row in json.loads(out)["items"]}
    assert rows["web.listen"]["source"] == "headrace.toml"
    assert rows["postgres.url"]["source"] == "HEADRACE_POSTGRES_URL"
    assert rows["blobs.put_threads"]["source"] == "default"
    assert rows["postgres.url"]["value"] == "postgresql://me:(masked)@db/site"
    assert "hunter2" not in out


@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("import inner\n", "ImportError: cannot import name 'hole' from 'json'"),
        ("app = (\n", "SyntaxError: '(' was never closed"),
        ("import json\njson.loads('')\n", "Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_import_errors_show_lines_of_the_application(folder, capfd, monkeypatch, code, last_line):
    monkeypatch.syspath_prepend(folder)
    # A new name each time, as Python caches imported modules.
    name = f"broken_{len(code)}"
    (folder / f"{name}.py").write_text(code)
    (folder / "inner.py").write_text("from json import hole\n")
    assert main(["up", f"{name}:app"]) == 2
    reported = capfd.readouterr().err
    assert "[cli.app_broken]" in reported
    assert last_line in reported
    assert str(folder) in reported
    for strange in ("importlib", "click", "house.py", "json/decoder.py"):
        assert strange not in reported
    assert len(reported.splitlines()) < 9


def test_a_missing_dependency_is_not_a_missing_application(folder, capfd, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "needy.py").write_text("import need\n")
    assert main(["up", "needy:app"]) == 2
    assert "No module named 'need'" in capfd.readouterr().err


def test_an_invalid_setting_is_reported_once(folder, capfd):
    (folder / "headrace.toml").write_text('[web]\nlisten = "nowhere"\nbody_max = "big"\n')
    assert main(["config", "show"]) == 2
    reported = capfd.readouterr().err
    assert reported.count("nowhere") == 1
    assert reported.count("body_max") == 1


def test_engines_only_needs_an_embedded_engine(folder, capfd, monkeypatch):
    monkeypatch.setenv("HEADRACE_POSTGRES_URL", "postgresql://me@127.0.0.1:1/site")
    monkeypatch.setenv("HEADRACE_VALKEY_URL", "valkey://127.0.0.1:1")
    assert main(["up", "--engines-only"]) == 2
    assert "[cli.no_engines]" in capfd.readouterr().err


def test_an_unreachable_server_is_named(folder, capfd, monkeypatch):
    monkeypatch.setenv("HEADRACE_POSTGRES_URL", "postgresql://me:hunter2@127.0.0.1:1/site")
    monkeypatch.setenv("HEADRACE_VALKEY_URL", "valkey://127.0.0.1:1")
    assert main(["queues", "ls"]) == 7
    reported = capfd.readouterr().err
    assert "PostgreSQL at 127.0.0.1:1 does not respond" in reported
    assert "hunter2" not in reported
    assert main(["doctor"]) == 7
    reported = capfd.readouterr().out
    assert "valkey: Valkey at 127.0.0.1:1 failed" in reported


def test_doctor_without_engines_prints_a_fix(folder, capfd):
    assert main(["doctor"]) == 7
    reported = capfd.readouterr().out
    assert "fix: start them with `headrace up`" in reported
    assert reported.count("headrace up") == 1


URLS = {"POSTGRES": "postgresql://me:hunter2@127.0.0.1:1/site", "VALKEY": "valkey://127.0.0.1:1"}


@pytest.mark.parametrize(("given", "missing"), [("POSTGRES", "VALKEY"), ("VALKEY", "POSTGRES")])
@pytest.mark.usefixtures("folder")
def test_one_url_alone_is_named_with_the_missing_one(capfd, monkeypatch, given, missing):
    monkeypatch.setenv(f"HEADRACE_{given}_URL", URLS[given])
    fix = f"set {missing.lower()}.url (HEADRACE_{missing}_URL) too"
    assert main(["queues", "ls"]) == 7
    reported = capfd.readouterr().err
    assert main(["doctor"]) == 7
    for text in (reported, capfd.readouterr().out):
        assert f"{given.lower()}.url (HEADRACE_{given}_URL) is {given.lower()}" in text
        assert f"HEADRACE_{missing}_URL) is not set" in text
        assert text.count(fix) == 1
        assert "hunter2" not in text


def test_a_missing_extra_is_named(folder, capfd, monkeypatch):
    monkeypatch.setitem(ROOMS, "headrace.fetch.cli", "no_such_library")
    assert main(["fetch", "runs", "ls", "--max", "3"]) == 2
    assert "`headrace fetch` needs `[fetch]`: pip install 'WHEEL[fetch]'" in capfd.readouterr().err
    monkeypatch.setitem(LIBRARIES, "web", ("no_such_library",))
    for role in ("api", "up"):
        assert main([role]) == 2
        fix = f"`headrace {role}` needs `[web]`: pip install 'WHEEL[web]'"
        assert fix in capfd.readouterr().err


def test_all_missing_extras_are_named_at_once(folder, capfd, monkeypatch):
    (folder / "headrace.toml").write_text('[media]\nvariants = ""\n')
    monkeypatch.setenv("HEADRACE_MEDIA_VARIANTS", "320x240")
    for extra in ("web", "media", "variants"):
        monkeypatch.setitem(LIBRARIES, extra, ("no_such_library",))
    assert main(["up"]) == 2
    reported = capfd.readouterr().err
    assert "`headrace up` needs `[web]` and `[media]` and `[variants]`: pip install" in reported
    assert "pip install 'WHEEL[web,media,variants]'" in reported


def test_a_command_imports_only_its_modules():
    for module in ROOMS:
        found = tuple(command.name for command in importlib.import_module(module).COMMANDS)
        assert found == NAMES[module]
        for name in found:
            assert name in build_group(name).commands
    assert set(build_group("media").commands) == set(NAMES["headrace.cli.roles"])
    assert set(build_group("no-such").commands) == {n for names in NAMES.values() for n in names}


def test_every_command_has_help():
    def walk(command):
        yield command
        for inner in getattr(command, "commands", {}).values():
            yield from walk(inner)

    for command in walk(build_group()):
        assert command.help, command.name


def test_an_absurd_number_of_api_processes_is_refused(folder, monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_WEB_PROCESSES", "100000")
    assert main(["config", "show"]) == 2
    assert "expected a whole number from 1 to 256, got '100000'" in capsys.readouterr().err
