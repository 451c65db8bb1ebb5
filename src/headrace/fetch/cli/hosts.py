"""Commands `headrace fetch host ...`."""

from __future__ import annotations

import click

from headrace.fetch.model import Host
from headrace.fetch.service import Fetch
from headrace.kernel.terminal import Terminal


@click.group("host")
def host_group() -> None:
    """The hosts that photos come from: how fast they are, what they answer."""


@host_group.command("ls", short_help="List hosts.")
@click.option("--customer", help="Only hosts of this customer's links.")
@click.option("--limit", default=100, show_default=True, help="Hosts shown at most.")
@click.pass_obj
def list_hosts(terminal: Terminal, customer: str | None, limit: int) -> None:
    """List the hosts that photos were asked of, each with the class in which its photos start."""
    found = terminal.run(Fetch, lambda fetch: fetch.hosts(customer=customer, hosts_max=limit))
    lines = [host_line(host) for host in found]
    terminal.show(found, "\n".join(lines) or "no hosts: no photo was asked for yet")


@host_group.command("show", short_help="Show a host.")
@click.argument("host")
@click.pass_obj
def show_host(terminal: Terminal, host: str) -> None:
    """Show HOST, a name as in the links or a link, for each customer whose links lead to it."""
    found = terminal.run(Fetch, lambda fetch: fetch.host(host))
    terminal.show(found, "\n".join(describe_host(one) for one in found))


def host_line(host: Host) -> str:
    """A host in one line."""
    mean = "not measured" if host.mean_s is None else f"mean {host.mean_s:.2f} s"
    bad = sum(
        count
        for outcome, count in host.photos_by_outcome.items()
        if outcome.startswith(("failed:", "refused:"))
    )
    return (
        f"{host.host} ({host.customer}): starts in {host.starts_in}, {mean},"
        f" {host.requests} requests, {bad} failed or refused, last {host.last_seen_at:%Y-%m-%d %H:%M:%S}"
    )


def describe_host(host: Host) -> str:
    """A host in a few lines."""
    lines = [host_line(host)]
    lines += [f"  {share:>6.1%} needed {name}" for name, share in host.needs.items()]
    lines += [f"  {count:>8} {outcome}" for outcome, count in host.photos_by_outcome.items()]
    if host.paused_until is not None:
        lines.append(
            f"  asked to be left alone until {host.paused_until:%Y-%m-%d %H:%M:%S} (Retry-After)"
        )
    if host.crawl_delay_s:
        lines.append(f"  robots.txt asks for {host.crawl_delay_s:g} s between requests")
    return "\n".join(lines)
