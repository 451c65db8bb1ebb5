"""What the commands need of an application, without importing the floor above them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Protocol

from penstock.engines import Engines
from penstock.engines.endpoints import Endpoints
from penstock.kernel.config import Loaded
from penstock.kernel.errors import InvalidInput


class AppNotFound(InvalidInput):
    """`module:app` names nothing that can be imported, or something that is no application."""

    code = "cli.app_not_found"


class App(Protocol):
    """The part of `penstock.Penstock` that commands use."""

    version: str

    @property
    def config(self) -> Loaded: ...

    @property
    def data_folder(self) -> Path: ...

    @property
    def metrics_folder(self) -> Path: ...

    @property
    def uses_embedded(self) -> bool: ...

    @property
    def engines(self) -> Engines: ...

    @property
    def secret(self) -> str: ...

    @property
    def jobs(self) -> Any: ...

    @property
    def media(self) -> Any: ...

    @property
    def tokens(self) -> Any: ...

    def configured_urls(self) -> Endpoints: ...

    def use_endpoints(self, endpoints: Endpoints) -> None: ...

    def use_flags(self, flags: dict[str, str]) -> None: ...

    def use_config_file(self, file: str) -> None: ...

    def load_rooms(self) -> None: ...

    def services(self) -> dict[str, Any]: ...

    def routes(self) -> list[Any]: ...

    async def close(self) -> None: ...


def load_app(name: str) -> App:
    """The application at `module:attribute`, with the current folder importable.

    Raises: AppNotFound. An error inside the user's module passes through with its traceback.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise AppNotFound(
            f"{name!r} is no application: write module:attribute, such as shop.site:app"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise AppNotFound(
            f"application {name!r}: no module {error.name!r} in {Path.cwd()} or the installed packages"
        ) from error
    app: Any = getattr(module, attribute, None)
    if app is None or not hasattr(app, "load_rooms"):
        raise AppNotFound(
            f"application {name!r}: module {module_name} has no Penstock() {attribute!r}"
        )
    found: App = app
    return found
