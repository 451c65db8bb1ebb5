"""The pytest plugin: an application on real engines, with empty stores for every test.

    [tool.pytest.ini_options]
    headrace_app = "shop:app"

    async def test_mail(headrace_app): ...

`headrace_app` is the application of that module. The engines start once per session, on first use,
in a temporary folder. Each test has its own database, keys and objects. The configuration file and
the addresses of the environment are not read, so a test cannot reach the stores of a site.

Nothing is imported here before a fixture is used: pytest loads plugins in every project.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

if TYPE_CHECKING:
    from headrace.testing.databases import EnginesForTests

T = TypeVar("T")
SETTING: Final = "headrace_app"
KEPT: Final = ("HEADRACE_POSTGRES_BIN", "HEADRACE_VALKEY_BIN")
"""Variables that name programs, not data."""


class SessionEngines:
    """The engines of a session, used from plain functions through an event loop of their own."""

    def __init__(self, engines: EnginesForTests, loop: asyncio.AbstractEventLoop) -> None:
        self.engines = engines
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end, outside of any test's event loop."""
        return self._loop.run_until_complete(work)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting that names the application."""
    parser.addini(SETTING, "The application of the fixture headrace_app, as MODULE:NAME.")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let async tests close the application in their own event loop.

    A fixture of this plugin runs outside of it, whichever plugin runs the async tests.
    """
    for item in items:
        if isinstance(item, pytest.Function) and "headrace_app" in item.fixturenames:
            item.obj = _closing(item.obj)


def _closing(test: Callable[..., Any]) -> Callable[..., Any]:
    """`test`, which closes the application at its end if it is async."""
    if not inspect.iscoroutinefunction(test):
        return test

    @functools.wraps(test)
    async def closed(*arguments: Any, **named: Any) -> Any:
        try:
            return await test(*arguments, **named)
        finally:
            for app in _in_use:
                await app.close()

    return closed


_in_use: Final[list[Any]] = []
"""The application of the running test."""


@pytest.fixture(scope="session")
def headrace_application(pytestconfig: pytest.Config) -> Any:
    """The application that `headrace_app` of pytest's settings names; override it for another."""
    named = str(pytestconfig.getini(SETTING) or "")
    module_name, separator, name = named.partition(":")
    if not (module_name and separator and name):
        pytest.fail(
            f"the fixture headrace_app has no application: got {named!r}; write"
            f' `{SETTING} = "module:app"` below [tool.pytest.ini_options], or override the'
            " fixture headrace_application",
            pytrace=False,
        )
    if str(pytestconfig.rootpath) not in sys.path:
        sys.path.insert(0, str(pytestconfig.rootpath))
    application = getattr(importlib.import_module(module_name), name, None)
    if not hasattr(application, "use_endpoints"):
        pytest.fail(
            f"{SETTING} = {named!r} names no Headrace(): got {application!r}", pytrace=False
        )
    return application


@pytest.fixture(scope="session")
def headrace_engines(headrace_application: Any) -> Iterator[SessionEngines]:
    """PostgreSQL and Valkey for this session, in a temporary folder."""
    from headrace.testing.databases import engines_for_tests

    loop = asyncio.new_event_loop()
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            context = engines_for_tests(Path(folder), headrace_application.packages)
            engines = loop.run_until_complete(context.__aenter__())
            try:
                yield SessionEngines(engines, loop)
            finally:
                loop.run_until_complete(context.__aexit__(None, None, None))
    finally:
        loop.close()


@pytest.fixture
def headrace_app(
    headrace_application: Any,
    headrace_engines: SessionEngines,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """The application with empty stores of this test's own. Jobs run when the test drains them."""
    from headrace.engines.endpoints import Endpoints

    app = headrace_application
    for name in list(os.environ):
        if name.startswith("HEADRACE_") and name not in KEPT:
            monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("headrace")
    (folder / "headrace.toml").write_text("")
    database = headrace_engines.engines.database()
    url = headrace_engines.run(database.__aenter__())
    app.forget()
    app.use_config_file(str(folder / "headrace.toml"))
    app.use_flags({"data.folder": str(folder), "valkey.prefix": f"test-{secrets.token_hex(4)}"})
    valkey_url = headrace_engines.engines.endpoints.valkey_url
    app.use_endpoints(Endpoints(url, valkey_url, (folder / "blobs").as_uri()))
    _in_use.append(app)
    try:
        yield app
    finally:
        _in_use.remove(app)
        if "sync" in vars(app):
            app.sync.close()
        app.forget()
        headrace_engines.run(database.__aexit__(None, None, None))
