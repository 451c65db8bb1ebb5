"""One run of a command: the application it works on, and how it shows answers and errors."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import uvloop

from headrace.cli.house import App, load_app
from headrace.engines.migrate import check_schema
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import configure_logs

Service = TypeVar("Service")
Answer = TypeVar("Answer")


@dataclass(slots=True)
class CommandLine:
    """The terminal of `headrace`; implements `kernel.terminal.Terminal`."""

    make_app: Callable[[str | None], App]
    packages: tuple[str, ...]
    is_json: bool = False
    config_file: str | None = None
    """The file named by `--config`, handed on to the roles that `up` starts."""
    flags: dict[str, str] = field(default_factory=dict)
    _has_progress: bool = False

    def app(self, name: str | None = None) -> App:
        """The application named on the command line, or a plain one with the rooms alone."""
        app = load_app(name) if name else self.make_app(self.config_file)
        if name and self.config_file:
            app.use_config_file(self.config_file)
        app.use_flags(self.flags)
        return app

    def run(self, kind: type[Service], verb: Callable[[Service], Awaitable[Answer]]) -> Answer:
        """Give the room's service of type `kind` to `verb`, with the engines open meanwhile."""
        keeps_rows = getattr(kind, "keeps_rows", True)
        return self.run_app(lambda app: verb(_service(app, kind)), checked=keeps_rows)

    def run_app(self, work: Callable[[App], Awaitable[Answer]], *, checked: bool = True) -> Answer:
        """Run `work` on the plain application; `checked` asks whether the schema fits first."""
        configure_logs("cli", level="warning")

        async def in_loop() -> Answer:
            app = self.app()
            try:
                if checked:
                    await check_schema(app.engines.postgres, self.packages, version=app.version)
                return await work(app)
            finally:
                await app.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(in_loop())

    def show(self, value: Any, text: str) -> None:
        """Print one JSON document under `--json`, else the text."""
        self._end_progress()
        if self.is_json:
            print(msgspec.json.encode(value, enc_hook=str).decode())
        else:
            print(text)

    def progress(self, text: str) -> None:
        """Replace the progress line on standard error, where a person watches."""
        if self.is_json or not sys.stderr.isatty():
            return
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
        self._has_progress = True

    def show_error(self, error: HeadraceError) -> int:
        """Print the error on standard error; returns the exit code of its kind."""
        self._end_progress()
        if self.is_json:
            problem = {
                "code": error.code,
                "detail": error.text,
                "retryable": error.retryable,
                "errors": error.problems,
            }
            print(msgspec.json.encode(problem).decode(), file=sys.stderr)
        else:
            print(f"headrace: {error.text} [{error.code}]", file=sys.stderr)
            for row in error.problems:
                told = f"{row.pointer}: {row.text}"
                # Some errors tell the first of their problems, or all, in their own text.
                if told not in error.text:
                    print(f"  {told}", file=sys.stderr)
        return error.exit_code

    def _end_progress(self) -> None:
        if self._has_progress:
            print(file=sys.stderr)
            self._has_progress = False


def _service(app: App, kind: type[Service]) -> Service:
    service = getattr(app, kind.__name__.lower())
    assert isinstance(service, kind), f"the application's {kind.__name__.lower()} is another thing"
    return service
