"""The processes of a media node: how the role starts them, and the hidden commands they are.

They are started anew, not forked: the object store's client has threads, which no fork survives. A child imports no
application; it goes by the settings that its parent found, which come down its control socket, so that no
secret stands on a command line.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import click

from penstock.cli.house import App
from penstock.cli.terminal import CommandLine
from penstock.kernel.logs import configure_logs
from penstock.kernel.secrets import derive_key

STORE_KEY_USE: Final = "media-store"


def settings_of(app: App) -> dict[str, str]:
    """What a child must be told: every setting that is not a default, as it was written."""
    written = app.config.written.items()
    return {key: text for key, (text, source) in written if source != "default"}


def child_command(command: Sequence[str], kind: str, options: Sequence[str]) -> list[str]:
    """The command line of a child of this node; `command` runs `penstock` with our configuration."""
    return [*command, "media", kind, *options]


@click.command("worker", hidden=True)
@click.option("--control", type=int, required=True)
@click.option("--number", type=int, required=True)
@click.option("--workers", type=int, required=True)
@click.option("--boot", required=True)
@click.option("--listener", type=int, required=True)
@click.option("--tls-listener", type=int)
@click.pass_obj
def worker(
    line: CommandLine,
    *,
    control: int,
    number: int,
    workers: int,
    boot: str,
    listener: int,
    tls_listener: int | None,
) -> None:
    """Serve clients as one worker of the node that started this."""
    from penstock.media.worker.serving import Place, run_worker
    from penstock.media.worker.telling import Teller

    teller = Teller(socket.socket(fileno=control))
    tls = socket.socket(fileno=tls_listener) if tls_listener is not None else None
    place = Place(number, workers, boot, socket.socket(fileno=listener), tls)

    async def body(app: App, stop: asyncio.Event) -> None:
        await run_worker(app.media, stop, place, teller)

    run_child(line, f"media-worker-{number}", teller.read_settings(), body)


@click.command("filler", hidden=True)
@click.option("--control", type=int, required=True)
@click.option("--boot", required=True)
@click.pass_obj
def filler(line: CommandLine, *, control: int, boot: str) -> None:
    """Fill and keep the store of the node that started this."""
    from penstock.media.store import Filler
    from penstock.media.worker.telling import Teller

    teller = Teller(socket.socket(fileno=control))

    async def body(app: App, stop: asyncio.Event) -> None:
        media = app.media
        keeping = Filler(
            media.blobs,
            media.config.disks,
            run=media.folder,
            boot=boot,
            hash_key=derive_key(app.secret, STORE_KEY_USE).secret,
            timeout_s=media.config.origin_timeout_s,
        )
        telling = asyncio.create_task(teller.run(stop))
        try:
            await keeping.run(stop, teller.tell_ready)
        finally:
            telling.cancel()
            await teller.close()

    run_child(line, "media-filler", teller.read_settings(), body)


def run_child(
    line: CommandLine,
    role: str,
    settings: dict[str, str],
    body: Callable[[App, asyncio.Event], Awaitable[None]],
) -> None:
    """Run `body` on an app of these settings until SIGTERM; Ctrl-C is the parent's."""
    app = line.make_app(line.config_file)
    app.use_flags(settings)
    configure_logs(role, level=app.config.sections["data"].log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        try:
            await body(app, stop)
        finally:
            await app.close()

    # The standard loop: the data plane is an epoll of its own, and TLS writes are faster on it.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(main())


COMMANDS: Final[list[click.Command]] = [worker, filler]
