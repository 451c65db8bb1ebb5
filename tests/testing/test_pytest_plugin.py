"""The pytest plugin in a project that has only the installed package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
APPLICATION = '''
from headrace import Headrace

app = Headrace()
sent = []


@app.task("mail")
async def send_mail(to: str) -> None:
    sent.append(to)


@app.on_item
async def publish(item) -> None:
    """Its handler is registered again with each new room."""
'''
TESTS = '''
import os

import pytest
from shop import app, send_mail, sent

from headrace.testing import assert_enqueued, drain, refute_enqueued

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("round", [1, 2, 3])
async def test_async(headrace_app, round):
    """Each round begins with empty stores, whatever the one before left."""
    assert headrace_app is app
    await refute_enqueued(app, "mail")
    assert (await app.views.totals(["item:1"]))[0].total == 0
    assert (await app.views.hit("item:1")).total == 1
    await app.feed.post(1, "item:1")
    await app.feed.follow(7, 1)
    assert [post.id for post in (await app.feed.page(7)).posts] == ["item:1"]
    await app.fetch.customers.set("shop", starts_max=9, window_s=1, connections=1)
    await app.media.objects.put("a.txt", b"a")
    await send_mail.enqueue(to="ann")
    await assert_enqueued(app, "mail", payload={"to": "ann"})
    await send_mail.enqueue(to="later", after_s=60)
    sent.clear()
    assert (await drain(app))["done"] >= 1
    assert sent == ["ann"]


@pytest.mark.parametrize("round", [1, 2])
def test_sync(headrace_app, round):
    headrace_app.sync(refute_enqueued)(app, "mail")
    send_mail.sync.enqueue(to="bob")
    sent.clear()
    assert headrace_app.sync(drain)(app, "mail") == {"done": 1}
    assert sent == ["bob"]


def test_the_stores_of_a_site_are_out_of_reach(headrace_app):
    assert headrace_app.config.section(type(headrace_app.config.sections["postgres"])).url is None
    assert "HEADRACE_POSTGRES_URL" not in os.environ
    assert headrace_app.config.sections["postgres"].replica_url is None


def test_other_tests_start_nothing():
    assert os.environ["HEADRACE_POSTGRES_URL"] == "postgresql://site/production"
'''
SETTINGS = """
[tool.pytest.ini_options]
headrace_app = "shop:app"
asyncio_mode = "auto"
"""


@pytest.fixture
def project(tmp_path):
    """A folder with an application, its configuration of a site, and tests."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "headrace.toml").write_text('[postgres]\nreplica_url = "postgresql://replica/x"\n')
    return tmp_path


def run(project, *words):
    """Run pytest there, without this tree on its path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON"))}
    env |= {"HEADRACE_POSTGRES_URL": "postgresql://site/production"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_each_test_has_an_application_with_empty_stores(project):
    ran = run(project, "-p", "no:xdist")
    assert "7 passed" in ran.stdout, ran.stdout + ran.stderr


def test_the_code_of_the_guide_runs(project):
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    (project / "pyproject.toml").write_text(
        re.search(r"```toml-pytest\n(.*?)```", page, re.DOTALL)[1]
    )
    (project / "test_shop.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    handler = "async def send_mail(to: str, text: str)"
    (project / "shop.py").write_text(re.sub(r"async def send_mail\(.*?\)", handler, APPLICATION))
    ran = run(project, "-p", "no:xdist")
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr


def test_without_the_setting_the_error_names_it(project):
    (project / "pyproject.toml").write_text(SETTINGS.replace("headrace_app", "# headrace_app"))
    ran = run(project, "-k", "sync and 1")
    assert 'write `headrace_app = "module:app"`' in ran.stdout, ran.stdout
    (project / "pyproject.toml").write_text(SETTINGS.replace("shop:app", "shop:sent"))
    assert "'shop:sent' names no Headrace(): got []" in run(project, "-k", "sync and 1").stdout


def test_the_plugin_is_cheap_where_no_fixture_is_used(project):
    """pytest loads it in every project of the environment."""
    code = textwrap.dedent("""
        import sys
        import pytest
        loaded = set(sys.modules)
        import headrace.testing.plugin
        own = {name for name in set(sys.modules) - loaded if name.startswith("headrace.")}
        assert own == {"headrace.testing", "headrace.testing.plugin"}, own
        assert "asyncpg" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
