"""The application that a command uses, and how it prints results and errors."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import click
import msgspec
import uvloop

from headrace.cli.screen import ERROR_STYLE, ProgressView, draw, is_screen, painted
from headrace.engines import Engines
from headrace.engines.blobs import Blobs
from headrace.engines.embedded import NotRunning
from headrace.engines.endpoints import Endpoints, server_of
from headrace.engines.migrate import check_schema
from headrace.kernel import spans
from headrace.kernel.config import Loaded
from headrace.kernel.errors import HeadraceError, InvalidInput
from headrace.kernel.logs import configure_logs


class AppNotFound(InvalidInput):
    """`module:app` cannot be imported or is not an application."""

    code = "cli.app_not_found"


class AppBroken(InvalidInput):
    """The module of the application raises an error on import."""

    code = "cli.app_broken"


class ModuleHidden(InvalidInput):
    """A file in the current folder or PYTHONPATH hides a module of Python, and an import fails."""

    code = "cli.module_hidden"


class App(Protocol):
    """The interface of `headrace.Headrace` that commands use."""

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
    def registry(self) -> Registry: ...

    @property
    def jobs(self) -> Jobs: ...

    @property
    def views(self) -> Views: ...

    @property
    def feed(self) -> Feed: ...

    @property
    def media(self) -> Media: ...

    @property
    def tokens(self) -> Tokens: ...

    def configured_urls(self) -> Endpoints: ...

    def use_endpoints(self, endpoints: Endpoints) -> None: ...

    def use_as_slot(self) -> None: ...

    def use_flags(self, flags: dict[str, str]) -> None: ...

    def use_config_file(self, file: str) -> None: ...

    def load_rooms(self) -> None: ...

    def installed_fetch(self) -> Fetch | None: ...

    def services(self) -> dict[str, Any]: ...

    def routes(self) -> list[Any]: ...

    def pages(self) -> Pages: ...

    async def close(self) -> None: ...


def load_app(name: str) -> App:
    """Import the application at `module:attribute`, also from the current folder.

    Raises: AppNotFound, AppBroken.
    """
    module_name, _, attribute = name.partition(":")
    if meant := _module_of_file(module_name):
        raise AppNotFound(
            f"{name!r} names a file: name its module, `{meant}:{attribute or 'app'}`, in the folder"
            " where its import begins"
        )
    if not module_name or not attribute:
        raise AppNotFound(
            f"{name!r} is not an application: use module:attribute, such as"
            f" {module_name or 'shop.site'}:{attribute or 'app'}"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except NotRunning as error:
        raise AppBroken(
            f"application {name!r} uses an engine while its module is imported, before engines run:"
            f" move the call into a function; a task is declared by @app.task:\n{_traceback(error)}"
        ) from error
    except HeadraceError as error:
        error.text = _place(error) + error.text
        raise
    except Exception as error:
        if file := hiding_file(error):
            raise module_hidden(file) from error
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise AppBroken(
                f"application {name!r} failed to import; fix the error and"
                f" retry:\n{_traceback(error)}"
            ) from error
        raise AppNotFound(
            f"application {name!r}: no module {missing!r} in {Path.cwd()} or in the installed"
            f" packages: correct the name, or run the command in the folder of {missing}.py"
            + _hiding(module_name)
        ) from error
    app: Any = getattr(module, attribute, None)
    if app is None or not hasattr(app, "load_rooms"):
        raise AppNotFound(
            f"application {name!r}: module {module_name} has no Headrace() named {attribute!r}"
            + _instead(module, attribute)
            + _hiding(module_name)
        )
    found: App = app
    return found


def _module_of_file(path: str) -> str:
    """The name of the module in the file `path`, relative to the current folder if it is there."""
    if "/" not in path and not path.endswith(".py"):
        return ""
    file = Path(path)
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    parts = file.with_suffix("").parts
    return ".".join(parts[-1:] if file.is_absolute() or ".." in parts else parts)


def _instead(module: Any, attribute: str) -> str:
    """Which names of `module` are applications, or how to use a function that makes one."""
    found = getattr(module, attribute, None)
    names = [name for name, value in vars(module).items() if hasattr(value, "load_rooms")]
    names = [name for name in names if not isinstance(getattr(module, name), type)]
    if names:
        return f": did you mean {' or '.join(f'{module.__name__}:{name}' for name in names[:3])}?"
    if callable(found):
        return f": {attribute} is a function: assign its result to a name of the module"
    return ": create it there with `app = Headrace()`" if found is None else ""


def _hiding(module_name: str) -> str:
    """Advice if a standard module hides the user's file of the same name."""
    first = module_name.partition(".")[0]
    file = getattr(sys.modules.get(first), "__file__", None) or ""
    if first not in sys.stdlib_module_names or Path(file).parent in own_folders():
        return ""
    return (
        f"; {first!r} is a module of Python's standard library and hides a file of that name:"
        " rename yours, such as to site_app.py"
    )


def own_folders() -> set[Path]:
    """The folders of the user's own modules: the current one, and those of PYTHONPATH."""
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = {Path.cwd(), *(Path(one).absolute() for one in listed if one)}
    return folders - {Path(sysconfig.get_path("stdlib"))}


def hiding_file(error: Exception) -> Path | None:
    """The user's own file or package that hides a standard module and caused `error`.

    Python then reports that the module lacks a name or a submodule.
    """
    if not isinstance(error, ImportError | AttributeError):
        return None
    for name in sys.stdlib_module_names & sys.modules.keys():
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        place = file.parent if file.name == "__init__.py" else file
        if place.parent in own_folders() and re.search(rf"'{re.escape(name)}[.']", str(error)):
            return place
    return None


def module_hidden(place: Path) -> ModuleHidden:
    """The error for a file or package that hides a standard module."""
    folder = "" if place.suffix else "folder "
    return ModuleHidden(
        f"{folder}{place.name} in {place.parent} hides Python's module {place.stem!r}: rename it,"
        f" such as to my_{place.name}"
    )


def _traceback(error: Exception) -> str:
    """The error with the stack frames of the user's own files."""
    # If the application is an installed package, keep all frames.
    frames = _own_frames(error) or _frames(error)
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()


def _place(error: Exception) -> str:
    """`shop.py:3: `, the user's line that raised `error`; empty if none did."""
    frames = _own_frames(error)
    if not frames:
        return ""
    file = Path(frames[-1].filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}:{frames[-1].lineno}: "


def _own_frames(error: Exception) -> list[traceback.FrameSummary]:
    """The stack frames in files that are neither of Python nor of an installed package."""
    others = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    return [frame for frame in _frames(error) if not frame.filename.startswith(others)]


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    ours = str(Path(__file__).parents[1])
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", ours, str(importlib.__file__)))
    ]


if TYPE_CHECKING:
    from headrace.feed import Feed
    from headrace.fetch import Fetch
    from headrace.jobs import Jobs, Registry
    from headrace.media import Media
    from headrace.views import Views
    from headrace.web.server import Pages
    from headrace.web.tokens import Tokens

REACHED_S: Final = 3.0
"""Longest attempt to reach a server, to name its URL in an error."""
_SERVERS: Final = {
    "PostgreSQL": ("postgres.url (HEADRACE_POSTGRES_URL)", 5432, ".s.PGSQL.5432"),
    "Valkey": ("valkey.url (HEADRACE_VALKEY_URL)", 6379, ""),
}
"""The setting, the default port and the name of the socket file of each engine."""
Service = TypeVar("Service")
Answer = TypeVar("Answer")


@dataclass(slots=True)
class CommandLine:
    """The terminal of `headrace`; implements `kernel.terminal.Terminal`."""

    make_app: Callable[[str | None], App]
    packages: tuple[str, ...]
    is_json: bool = False
    config_file: str | None = None
    """The file of `--config`; `up` passes it to its roles."""
    flags: dict[str, str] = field(default_factory=dict)
    _progress: ProgressView = field(default_factory=ProgressView)

    def app(self, name: str | None = None) -> App:
        """The application named on the command line, or one with the rooms only."""
        app = load_app(name) if name else self.make_app(self.config_file)
        if name and self.config_file:
            app.use_config_file(self.config_file)
        app.use_flags(self.flags)
        return app

    def run(
        self,
        kind: type[Service],
        verb: Callable[[Service], Awaitable[Answer]],
        *,
        application: str | None = None,
    ) -> Answer:
        """Run `verb` with the service of type `kind`, then close the engines."""
        keeps_rows = getattr(kind, "keeps_rows", True)
        return self.run_app(
            lambda app: verb(_service(app, kind)), checked=keeps_rows, application=application
        )

    def run_app(
        self,
        work: Callable[[App], Awaitable[Answer]],
        *,
        checked: bool = True,
        application: str | None = None,
    ) -> Answer:
        """Run `work` on the application, by default the plain one; `checked` verifies the schema.

        Raises: AppNotFound, AppBroken.
        """
        configure_logs("cli", level="warning")
        spans.start("cli")
        app = self.app(application)

        async def in_loop() -> Answer:
            try:
                if checked:
                    await check_schema(app.engines.postgres, self.packages, version=app.version)
                return await work(app)
            except NotRunning as error:
                # It names the engine whose URL is not set; the other one may be wrong, too.
                urls = app.configured_urls()
                before = await unreachable("PostgreSQL", urls.postgres_url)
                after = await unreachable("Valkey", urls.valkey_url)
                error.text = "; ".join(filter(None, (before, error.text, after)))
                raise
            finally:
                await app.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            answer = runner.run(in_loop())
        spans.flush()
        return answer

    def show(self, value: Any, text: str) -> None:
        """Print `value` as JSON with `--json`, else `text`; on a terminal with columns and colors.

        A list is an object with `items`, so that fields can be added to it.
        """
        self._progress.close()
        try:
            self._print(value, text)
            sys.stdout.flush()
        except BrokenPipeError:
            # click would exit with 1.
            discard_output()
            raise click.exceptions.Exit(0) from None

    def _print(self, value: Any, text: str) -> None:
        if not self.is_json:
            if is_screen(sys.stdout):
                draw(text)
            else:
                print(text)
            return
        assert not isinstance(value, (list, tuple, NoneType)), "use listing() for lists"
        document = msgspec.json.encode(value, enc_hook=str)
        print((msgspec.json.format(document) if sys.stdout.isatty() else document).decode())

    def note(self, text: str) -> None:
        """Print a remark on standard error if that is a terminal, and not with `--json`."""
        if not self.is_json and sys.stderr.isatty():
            print(f"headrace: {text}", file=sys.stderr)

    def progress(self, text: str, done: float = 0, total: float | None = None) -> None:
        """Show progress on standard error, unless with `--json`."""
        if not self.is_json:
            self._progress.update(text, done, total)

    def show_error(self, error: HeadraceError) -> int:
        """Print `error` on standard error; return its exit code."""
        self._progress.close()
        if self.is_json:
            print(error_document(error), file=sys.stderr)
            return error.exit_code
        head = painted("headrace:", ERROR_STYLE, sys.stderr)
        print(f"{head} {error.text} [{error.code}]", file=sys.stderr)
        for row in error.problems:
            detail = f"{row.pointer}: {row.text}"
            # The text of some errors already contains the first problem or all of them.
            if detail not in error.text:
                print(f"  {detail}", file=sys.stderr)
        return error.exit_code

    def close(self) -> None:
        """Remove the progress."""
        self._progress.close()


async def unreachable(engine: str, url: str) -> str:
    """Why no connection to the configured server of `engine` opens; empty if one does."""
    setting, port, socket = _SERVERS[engine]
    server = server_of(url, port=port, socket=socket) if url else ""
    host, _, written_port = server.rpartition(":")
    try:
        async with asyncio.timeout(REACHED_S):
            if server.startswith("/"):
                _, writer = await asyncio.open_unix_connection(server)
            elif host and "," not in host and written_port.isdecimal():
                _, writer = await asyncio.open_connection(host.strip("[]"), int(written_port))
            else:
                return ""  # not configured, or a list of servers
    except OSError as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else "no connection"
        return f"{engine} at {server} does not respond ({why}): correct {setting} or start it"
    writer.close()
    return ""


def discard_output() -> None:
    """Drop the rest of standard output, whose reader, such as `head`, has enough.

    Python would report the closed pipe again at its exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error_document(error: HeadraceError) -> str:
    """`error` as the JSON document of `--json`."""
    problem = {
        "code": error.code,
        "message": error.text,
        "retryable": error.retryable,
        "exit_code": error.exit_code,
        "problems": error.problems,
    }
    return msgspec.json.encode({"error": problem}).decode()


def _service(app: App, kind: type[Service]) -> Service:
    name = kind.__name__.lower()
    service = getattr(app, name)
    if not isinstance(service, kind):
        raise TypeError(f"app.{name} is a {type(service).__name__}, expected {kind.__name__}")
    return service
