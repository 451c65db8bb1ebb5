"""`headrace init`: complete configuration, no overwritten files, working starters."""

from __future__ import annotations

import importlib
import io
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from tests.kit.processes import HeadraceProcess, wait_until

from headrace.__main__ import main
from headrace.app import sections
from headrace.cli.setup import NEXT_STEPS, commented_config, starter
from headrace.kernel.config import load_config, setting_rows

ITEM = "id,name,price,photos\nbike-1,City bike,120,{photo}\n"
DJANGO_PAGES = """
from django.test import Client
from django.contrib.auth.models import User
from site_app import app
site = Client()
print(site.post("/users/ann").json()["job"] > 0, User.objects.count())
try:
    site.post("/users/ann")
except Exception as error:
    print(type(error).__name__)
print(site.get("/items/7").json(), site.get("/items/7").json()["views"])
print(site.post("/readers/1/sellers/5").status_code, site.post("/sellers/5/items/7").status_code)
print(site.get("/readers/1/feed").json()["items"])
"""
DJANGO_SHOWS = [
    "True 1",
    "IntegrityError",
    "{'item': '7', 'views': 1} 2",
    "200 200",
    "['item:7']",
]


@pytest.fixture
def site(running_engines, database_url, tmp_path, monkeypatch):
    """An empty folder with an environment for the engines of the test run."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        media_port = probe.getsockname()[1]
    env = {
        "HEADRACE_POSTGRES_URL": database_url,
        "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
        "HEADRACE_VALKEY_PREFIX": f"test-{tmp_path.name}",
        "HEADRACE_WEB_LISTEN": "127.0.0.1:0",
        "HEADRACE_MEDIA_LISTEN": f"127.0.0.1:{media_port}",
        "HEADRACE_FETCH_ALLOW_NETWORKS": "127.0.0.1/32",
        "HEADRACE_FETCH_ALLOW_PORTS": "1-65535",
        "HEADRACE_JOBS_POLL": "200ms",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(folder=tmp_path, env=env)


@pytest.fixture
def photo_url():
    """The URL of a photo on a seller's host."""
    out = io.BytesIO()
    Image.new("RGB", (64, 48), "teal").save(out, "JPEG")

    class Host(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/bike.jpg" else 404)
            self.send_header("content-type", "image/jpeg")
            self.send_header("content-length", str(len(out.getvalue())))
            self.end_headers()
            self.wfile.write(out.getvalue())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/bike.jpg", out.getvalue()
    server.shutdown()
    thread.join()
    server.server_close()


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


def plain_pages(site):
    """Enqueue a job as the starter describes."""
    assert main(["jobs", "add", "mail", '{"to": "ann"}']) == 0


def fastapi_pages(site):
    """Use every page of the FastAPI starter."""
    sys.path.insert(0, str(site.folder))
    try:
        pages = importlib.import_module("site_web")
        with TestClient(pages.web) as client:
            assert client.post("/users?name=ann").json()["job"] > 0
            assert client.get("/items/7").json() == {"item": "7", "views": 1}
            assert client.put("/readers/1/sellers/5").status_code == 200
            assert client.post("/sellers/5/items/7").status_code == 200
            assert client.get("/readers/1/feed").json()["items"] == ["item:7"]
    finally:
        sys.path.remove(str(site.folder))
        for name in ("site_web", "site_app"):
            sys.modules.pop(name, None)


def django_pages(site):
    """Use every page of the Django starter, in processes of its own."""
    shown = ""
    for words in (
        ("migrate", "--verbosity", "0"),
        ("shell", "--no-imports", "--command", DJANGO_PAGES),
    ):
        command = [sys.executable, "manage.py", *words]
        ran = subprocess.run(
            command, cwd=site.folder, capture_output=True, text=True, check=False, timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        shown = ran.stdout
    assert [line for line in shown.splitlines() if "[info" not in line] == DJANGO_SHOWS


PAGES = {"plain": plain_pages, "fastapi": fastapi_pages, "django": django_pages}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEXT_STEPS)
def test_a_starter_runs_jobs_and_publishes_an_item_with_its_photo(site, photo_url, kind):
    url, photo = photo_url
    assert main(["init", "--for", kind]) == 0
    up = HeadraceProcess(["up", "site_app:app"], folder=site.folder, env=site.env)
    try:
        up.wait_out("(token in")
        PAGES[kind](site)
        up.wait_out("mail to ann: welcome")
        (site.folder / "catalogue.csv").write_text(ITEM.format(photo=url))
        assert main(["fetch", "customer", "set", "shop"]) == 0
        assert main(["fetch", "catalogue", "run", "catalogue.csv", "--customer", "shop"]) == 0
        line = re.compile(r"(?:publish|edit) bike-1 City bike (http\S+)\n")
        [shown] = wait_until(lambda: line.findall(up.out), what="the item with its photo")[:1]
        assert httpx.get(shown).content == photo
    finally:
        up.end()
