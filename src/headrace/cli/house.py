"""What the commands need of an application, without importing the floor above them."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Protocol

from headrace.engines import Engines
from headrace.engines.blobs import Blobs
from headrace.engines.endpoints import Endpoints
from headrace.kernel.config import Loaded
from headrace.kernel.errors import HeadraceError, InvalidInput


class AppNotFound(InvalidInput):
    """`module:app` names nothing that can be imported, or something that is no application."""

    code = "cli.app_not_found"


class AppBroken(InvalidInput):
    """The module of the application is there and fails while it is imported."""

    code = "cli.app_broken"


class App(Protocol):
    """The part of `headrace.Headrace` that commands use."""

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
    def blobs(self) -> Blobs: ...

    @property
    def secret(self) -> str: ...

    @property
    def registry(self) -> Any: ...

    @property
    def jobs(self) -> Any: ...

    @property
    def feed(self) -> Any: ...

    @property
    def media(self) -> Any: ...

    @property
    def tokens(self) -> Any: ...

    def configured_urls(self) -> Endpoints: ...

    def use_endpoints(self, endpoints: Endpoints) -> None: ...

    def use_as_slot(self) -> None: ...

    def use_flags(self, flags: dict[str, str]) -> None: ...

    def use_config_file(self, file: str) -> None: ...

    def load_rooms(self) -> None: ...

    def services(self) -> dict[str, Any]: ...

    def routes(self) -> list[Any]: ...

    def pages(self) -> Any: ...

    async def close(self) -> None: ...


def load_app(name: str) -> App:
    """The application at `module:attribute`, with the current folder importable.

    Raises: AppNotFound, AppBroken.
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
    except HeadraceError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise AppBroken(
                f"application {name!r} cannot be imported, mend it and try again:\n{_told(error)}"
            ) from error
        raise AppNotFound(
            f"application {name!r}: no module {missing!r} in {Path.cwd()} or the installed packages"
            + _hiding(module_name)
        ) from error
    app: Any = getattr(module, attribute, None)
    if app is None or not hasattr(app, "load_rooms"):
        raise AppNotFound(
            f"application {name!r}: module {module_name} has no Headrace() {attribute!r}"
            + _hiding(module_name)
        )
    found: App = app
    return found


def _hiding(module_name: str) -> str:
    """What to do where Python has a module of that name itself, which hides the user's file."""
    first = module_name.partition(".")[0]
    file = getattr(sys.modules.get(first), "__file__", None) or ""
    if first not in sys.stdlib_module_names or Path(file).parent == Path.cwd():
        return ""
    return (
        f"; {first!r} is a module of Python's standard library, which hides a file of that name:"
        " call yours otherwise, such as site_app.py"
    )


def _told(error: Exception) -> str:
    """The frames of the user's own files, and the error itself: what Python would show at its end."""
    ours = str(Path(__file__).parents[1])
    others = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", ours, str(importlib.__file__)))
    ]
    # An application may be an installed package itself: then nothing is left but what all have.
    own = [frame for frame in frames if not frame.filename.startswith(others)] or frames
    lines = [*traceback.format_list(own), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()
