"""Commands `headrace fetch photo` and `headrace fetch why`: one link."""

from __future__ import annotations

import click

from headrace.fetch.cli.text import describe_photo, describe_url, step_line
from headrace.fetch.service import Fetch
from headrace.kernel.terminal import Terminal


@click.command("photo", short_help="Download one photo now.")
@click.argument("url")
@click.option("--verbose", is_flag=True, help="Also each request: address, status and times.")
@click.pass_obj
def try_photo(terminal: Terminal, url: str, *, verbose: bool) -> None:
    """Download URL now and say what becomes of it; nothing is stored."""
    found = terminal.run(Fetch, lambda fetch: fetch.photo(url))
    lines = [describe_photo(found), *(step_line(step) for step in found.steps if verbose)]
    terminal.show(found, "\n".join(lines))
    if found.outcome != "stored":
        raise click.exceptions.Exit(1)


@click.command("why", short_help="Say why a photo is there or not.")
@click.argument("url")
@click.pass_obj
def why(terminal: Terminal, url: str) -> None:
    """Say whether URL may be asked and what every customer's last run made of it."""
    found = terminal.run(Fetch, lambda fetch: fetch.why(url))
    terminal.show(found, describe_url(found))
