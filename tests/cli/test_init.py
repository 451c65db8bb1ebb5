"""`headrace init`: complete configuration, no overwritten files, working starters."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import httpx
import pytest

from headrace.__main__ import main
from headrace.app import sections
from headrace.cli.setup import NEXT_STEPS, commented_config, starter
from headrace.kernel.config import load_config, setting_rows
from headrace.testing import drain

DJANGO_PAGES = """
from django.test import Client
from django.contrib.auth.models import User
from headrace.testing import drain
from site_app import app
site = Client()
print(site.post("/users/ann").json()["job"] > 0, User.objects.count())
try:
    site.post("/users/ann")
except Exception as error:
    print(type(error).__name__)
print(app.sync(drain)(app))
print(site.get("/items/7").json(), site.get("/items/7").json()["views"])
print(site.post("/readers/1/sellers/5").status_code, site.post("/sellers/5/items/7").status_code)
print(site.get("/readers/1/feed").json()["items"])
"""


@pytest.fixture
def site(running_engines, database_url, tmp_path, monkeypatch):
    """An empty folder with an environment for this test's engines."""
    monkeypatch.setenv("HEADRACE_POSTGRES_URL", database_url)
    monkeypatch.setenv("HEADRACE_VALKEY_URL", running_engines.endpoints.valkey_url)
    monkeypatch.setenv("HEADRACE_VALKEY_PREFIX", f"test-{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_configuration_lists_every_setting_with_its_default():
    text = commented_config(sections())
    assert not [line for line in text.splitlines() if line and line[0] not in "#["]
    for row in setting_rows(sections()):
        assert re.search(rf"^# {row.name} = ", text, re.MULTILINE), row.name


def test_an_uncommented_setting_takes_effect(tmp_path):
    text = commented_config(sections())
    every = re.sub(r"^# (\w+ = )(?!\"\.\.\.\")", r"\1", text, flags=re.MULTILINE)
    file = tmp_path / "headrace.toml"
    file.write_text(every)
    loaded = load_config(sections(), env={}, file=file)
    assert loaded.sections == load_config(sections(), env={}).sections
    assert loaded.written["jobs.lease"] == ("30s", str(file))


@pytest.mark.parametrize("kind", NEXT_STEPS)
def test_a_starter_overwrites_no_file(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "site", "--for", kind]) == 0
    assert "cd site" in capsys.readouterr().out
    written = {path.name: path.read_text() for path in (tmp_path / "site").iterdir()}
    assert written.keys() == {"headrace.toml", *starter(kind)}
    for name, text in written.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
    (tmp_path / "site" / "headrace.toml").unlink()
    assert main(["init", "site", "--for", kind]) == 5
    assert "cli.file_exists" in capsys.readouterr().err
    assert not (tmp_path / "site" / "headrace.toml").exists()


@pytest.mark.slow
async def test_the_starter_for_fastapi(site, monkeypatch):
    assert main(["init", "--for", "fastapi"]) == 0
    monkeypatch.syspath_prepend(str(site))
    pages = importlib.import_module("site_web")
    transport = httpx.ASGITransport(pages.web)
    async with pages.app, httpx.AsyncClient(transport=transport, base_url="http://site") as client:
        assert (await client.post("/users?name=ann")).json()["job"] > 0
        assert await drain(pages.app) == {"done": 1}
        assert (await client.get("/items/7")).json() == {"item": "7", "views": 1}
        assert (await client.put("/readers/1/sellers/5")).status_code == 200
        assert (await client.post("/sellers/5/items/7")).status_code == 200
        assert (await client.get("/readers/1/feed")).json()["items"] == ["item:7"]
    for name in ("site_web", "site_app"):
        del sys.modules[name]


@pytest.mark.slow
def test_the_starter_for_django(site):
    assert main(["init", "--for", "django"]) == 0
    done = run_django(site, "migrate", "--verbosity", "0")
    assert done.returncode == 0, done.stderr
    done = run_django(site, "shell", "--no-imports", "--command", DJANGO_PAGES)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "[info" not in line] == [
        "True 1",
        "IntegrityError",
        "mail to ann: welcome",
        "{'done': 1}",
        "{'item': '7', 'views': 1} 2",
        "200 200",
        "['item:7']",
    ]


def run_django(folder, *words):
    """Run a Django command in a process."""
    command = [sys.executable, "manage.py", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
