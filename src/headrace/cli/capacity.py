"""How many machines a load needs: measured costs of single operations times their rates.

The costs are those of `make bench ROOM=costs` and of the rows that `tools/costs.py` names, in
`costs.json`. They are of one machine, without your own handlers, and a sum of costs ignores
waiting: plan with spare CPU (`share`) and check with your own load.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final

import click

from headrace.cli.app_context import CommandLine
from headrace.jobs.model import JobsConfig
from headrace.kernel.errors import InvalidInput

DAY_S: Final = 86_400
UNITS_S: Final = {"s": 1, "min": 60, "m": 60, "h": 3_600, "d": DAY_S, "day": DAY_S}
FACTORS: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
RANGE_BYTES: Final = 2**18
CARD_SHARE: Final = 0.7
"""Share of a network card that may be used at the peak."""


class InvalidRate(InvalidInput):
    """A rate for `headrace size` cannot be read."""

    code = "cli.invalid_rate"


@dataclass(frozen=True, slots=True)
class Constant:
    """A figure of a machine that a plan rests on: measured, or assumed where no record has it."""

    name: str
    unit: str
    row: str
    field: str
    assumed: float

    @property
    def measured(self) -> float | None:
        """The figure of the record."""
        found = constants().get(self.row, {}).get(self.field)
        return None if found is None else float(found)

    @property
    def value(self) -> float:
        """The figure that plans use."""
        return self.assumed if self.measured is None else self.measured


SYNCS: Final = Constant("syncs of a disk, one after the other", "1/s", "disk", "syncs", 5_000)
DISK: Final = Constant("synced writes of a disk in order", "B/s", "disk", "synced writes", 200e6)
SLOT: Final = Constant("memory of a slot without your code", "B", "slot", "memory", 12e6)
CONNECTION: Final = Constant(
    "memory of a slow media connection, TCP of both ends", "B", "connection of media", "memory", 6e4
)
CARD: Final = Constant("network card, used to 70 %", "bit/s", "card", "bits", 10e9)
CONSTANTS: Final = (SYNCS, DISK, SLOT, CONNECTION, CARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rates at the peak, per second, and what they are made of."""

    jobs: float = 0.0
    jobs_per_call: float = 1.0
    job_cpu_s: float = 0.0
    """CPU of your handler for one job."""
    job_s: float = 0.0
    """Duration of one job, with its waiting."""
    hits: float = 0.0
    totals: float = 0.0
    pages: float = 0.0
    posts: float = 0.0
    follows: float = 0.0
    photos: float = 0.0
    photo_bytes: float = 150e3
    media_bits: float = 0.0
    media_connections: float = 0.0
    is_tls: bool = False
    media_shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of ranges `from the disk`, `by a hop` and `filled`; the rest is in memory."""
    peak: float = 1.0
    """The peak divided by the average, which growth follows."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One resource: what the load uses, and the share of one machine's or engine's limit."""

    resource: str
    amount: float
    unit: str
    limit: float | None = None
    remedy: str = ""

    @property
    def used(self) -> float:
        """The share of the limit; 0 without one."""
        return self.amount / self.limit if self.limit else 0.0


@cache
def _record() -> dict[str, Any]:
    return dict(json.loads((files("headrace.cli") / "costs.json").read_text()))


def costs() -> dict[str, dict[str, float]]:
    """Measured costs by operation and resource: microseconds of CPU, bytes, syncs."""
    return dict(_record()["costs"])


def constants() -> dict[str, dict[str, float]]:
    """Measured figures of the machine and of single processes, such as their memory."""
    return dict(_record()["constants"])


def source() -> str:
    """The command, machine and date of the costs."""
    return str(_record()["source"])


def parse_per_second(text: str) -> float:
    """The number per second of `150`, `9k/min`, `4M/h` or `350M/day`. Raises: InvalidRate."""
    number, slash, unit = text.strip().partition("/")
    if slash and unit not in UNITS_S:
        raise _no_rate(text)
    return _parse_number(number, text) / UNITS_S[unit or "s"]


def _parse_number(number: str, text: str) -> float:
    factor = number[-1:] if number[-1:] in FACTORS else ""
    try:
        value = float(number.removesuffix(factor)) * FACTORS[factor]
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e12:
        raise _no_rate(text)
    return value


def _no_rate(text: str) -> InvalidRate:
    return InvalidRate(
        f"{text[:40]!r} is not a rate from 0: write 150/s, 9k/min, 4M/h or 350M/day, for media"
        " 100G or 100Gbit/s; without a unit it is per second"
    )


def demands(load: Load, *, cores: int) -> list[Demand]:
    """What `load` uses of each resource; machines have `cores` cores."""
    return [*_of_engines(load, cores), *_of_roles(load), *_of_media(load), *_growths(load)]


def _of_engines(load: Load, cores: int) -> list[Demand]:
    """What one server of each engine has to do."""
    rates = _rates(load)

    def total(resource: str, factor: float = 1.0) -> float:
        return factor * sum(rate * _cost(name, resource) for name, rate in rates.items())

    card = "a faster card; then a server per room"
    disks = "faster disks and links to standbys; then a server per room"
    syncs = "enqueue more jobs in a call: concurrent commits share syncs; then a server per room"
    cluster = "a primary for each core: Valkey Cluster"
    more = "more cores; then a server per room"
    log, network = DISK.value / 1e6, CARD.value / 1e9
    return [
        Demand("CPU of PostgreSQL", total("CPU of PostgreSQL", 1e-6), "cores", cores, more),
        Demand("write-ahead log", total("write-ahead log", 1e-6), "MB/s", log, disks),
        Demand("syncs of the log", total("syncs of the log"), "syncs/s", SYNCS.value, syncs),
        Demand("reads of the database", total("reads of the database"), "reads/s"),
        Demand("writes of the database", total("writes of the database"), "writes/s"),
        Demand("written by the database", total("written by the database", 1e-6), "MB/s"),
        Demand("CPU of Valkey", total("CPU of Valkey", 1e-6), "cores", 1.0, cluster),
        *(
            Demand(name, total(name, 8e-9), "Gbit/s", network, card)
            for name in ("network of PostgreSQL", "network of Valkey")
        ),
    ]


def _of_roles(load: Load) -> list[Demand]:
    """What agents, the API and flushers need: more of it by more machines."""
    agents = load.jobs * load.job_cpu_s + _of_agents(load) / 1e6
    slots = load.jobs * load.job_s
    request = costs()["request of the API"]["CPU"]
    page = request + _cost("page of 20 posts, 400 follows", "CPU of Headrace")
    api = ((load.hits + load.totals / 20) * request + load.pages * page) / 1e6
    flushers = load.hits * _cost("view flushed", "CPU of Headrace") / 1e6
    return [
        Demand("CPU of agents", agents, "cores", None, "more agents"),
        Demand("slots of agents", slots, "slots", None, "more agents"),
        Demand("memory of slots", slots * SLOT.value / 1e9, "GB", None, "more agents"),
        Demand("CPU of the API", api, "cores", None, "more `headrace api`, or `web.processes`"),
        Demand("CPU of flushers", flushers, "cores", None, "more flushers: shards of views"),
    ]


def _of_media(load: Load) -> list[Demand]:
    """What media nodes and downloads need."""
    ranges = load.media_bits / 8 / RANGE_BYTES
    from_disk, filled = (
        load.media_bits * load.media_shares.get(kind, 0.0) for kind in ("from the disk", "filled")
    )
    connections = load.media_connections * CONNECTION.value / 1e9
    downloads = load.photos * load.photo_bytes * 8 / 1e9
    nodes = "more media nodes"
    return [
        Demand("CPU of media nodes", ranges * _range_us(load) / 1e6, "cores", None, nodes),
        Demand("network of media nodes", load.media_bits / 1e9, "Gbit/s", None, nodes),
        Demand("memory of media connections", connections, "GB", None, nodes),
        Demand("reads of media disks", from_disk / 8e6, "MB/s", None, "more disks and nodes"),
        Demand("writes of media disks", filled / 8e6, "MB/s", None, "larger disks: fewer fills"),
        Demand("network of the object store", filled / 1e9, "Gbit/s"),
        Demand("network of downloads", downloads, "Gbit/s", None, "more agents with own links"),
    ]


def _growths(load: Load) -> list[Demand]:
    """What stays after a day of average load."""
    photos = load.photos * load.photo_bytes
    each = {
        "the object store": photos,
        "the database": _growth(load, "size of the database"),
        "Valkey": _growth(load, "memory of Valkey"),
    }
    return [
        Demand(f"growth of {what}", amount / load.peak * DAY_S / 1e9, "GB/day")
        for what, amount in each.items()
    ]


def machines(found: list[Demand], *, cores: int, share: float) -> dict[str, int]:
    """Machines of each kind that use `share` of their cores at the peak."""
    by_name = {one.resource: one.amount for one in found}

    def count(*names: str) -> int:
        return math.ceil(sum(by_name[name] for name in names) / (cores * share))

    slots = JobsConfig().slots_per_core * cores
    wires = math.ceil(by_name["network of media nodes"] / (CARD.value / 1e9 * CARD_SHARE))
    return {
        "PostgreSQL": count("CPU of PostgreSQL"),
        "Valkey, cores": math.ceil(by_name["CPU of Valkey"] / share),
        "agents": max(count("CPU of agents"), math.ceil(by_name["slots of agents"] / slots)),
        "API and flushers": count("CPU of the API", "CPU of flushers"),
        "media nodes": max(wires, count("CPU of media nodes")),
    }


def _rates(load: Load) -> dict[str, float]:
    """Operations per second; single and bulk enqueues are mixed by the jobs of a call."""
    single = 1 / max(1.0, load.jobs_per_call)
    return {
        "job enqueued, one a call": load.jobs * single,
        "job enqueued, 1,000 a call": load.jobs * (1 - single),
        "job run, batches of 100": load.jobs,
        "view counted, 20 a call": load.hits,
        "view flushed": load.hits,
        "total read, 20 a call": load.totals,
        "page of 20 posts, 400 follows": load.pages,
        "post published": load.posts,
        "author followed": load.follows,
        "photo of 150 KB": load.photos,
        "item of a new catalogue, 4 photos": load.photos / 4,
    }


def _of_agents(load: Load) -> float:
    rates = _rates(load)
    names = ("job run, batches of 100", "photo of 150 KB", "item of a new catalogue, 4 photos")
    return sum(rates[name] * _cost(name, "CPU of Headrace") for name in names)


def _growth(load: Load, resource: str) -> float:
    """Bytes a second that stay: rows of jobs are removed, those of views replaced by days."""
    kept = (
        "post published",
        "author followed",
        "photo of 150 KB",
        "item of a new catalogue, 4 photos",
    )
    rates = _rates(load)
    return sum(rates[name] * _cost(name, resource) for name in kept)


def _range_us(load: Load) -> float:
    """CPU of the nodes for a range, by where ranges come from; HTTPS adds the same to each."""
    memory_us = _cost("range of 256 KiB from memory", "CPU")
    tls_us = _cost("range of 256 KiB over HTTPS", "CPU") - memory_us if load.is_tls else 0.0
    more_us = sum(
        share * (_cost(f"range of 256 KiB {kind}", "CPU") - memory_us)
        for kind, share in load.media_shares.items()
    )
    return tls_us + memory_us + more_us


def _cost(operation: str, resource: str) -> float:
    return costs().get(operation, {}).get(resource, 0.0)


class _Rate(click.ParamType[float]):
    name = "rate"

    def convert(self, value: object, *_: object) -> float:
        return value if isinstance(value, float) else parse_per_second(str(value))


class _Count(click.ParamType[float]):
    name = "count"

    def convert(self, value: object, param: Any, ctx: Any) -> float:
        try:
            return value if isinstance(value, float) else _parse_number(str(value), str(value))
        except InvalidRate:
            self.fail(f"{value!r} is not a number such as 20000 or 500k", param, ctx)


class _Number(click.FloatRange):
    """A finite number in a range; click accepts inf and nan."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class _Bits(_Rate):
    name = "bits"

    def convert(self, value: object, *_: object) -> float:
        return super().convert(
            re.sub(r"bit(?=/|$)", "", value) if isinstance(value, str) else value
        )


RATE: Final = _Rate()
BITS: Final = _Bits()
COUNT: Final = _Count()
RATES: Final = ("jobs", "hits", "totals", "pages", "posts", "follows", "photos")
"""Options that are rates of operations; media and connections are rates too."""
SHARES: Final = {"from the disk": "from_disk", "by a hop": "hops", "filled": "fills"}
"""Options with the shares of ranges, by the words of their cost."""


@click.command("size", short_help="Compute the machines that a load needs.")
@click.option("--jobs", type=RATE, default="0", help="Jobs enqueued and run, such as 350M/day.")
@click.option("--jobs-per-call", type=_Number(1), default=1.0, help="Jobs of one enqueue call.")
@click.option("--job-ms", type=_Number(0), default=0.0, help="Duration of a job.")
@click.option("--job-cpu-ms", type=_Number(0), default=0.0, help="CPU of your handler for a job.")
@click.option("--hits", type=RATE, default="0", help="Views counted, such as 9k/min.")
@click.option("--totals", type=RATE, default="0", help="Totals read.")
@click.option("--pages", type=RATE, default="0", help="Pages of feeds read.")
@click.option("--posts", type=RATE, default="0", help="Posts published.")
@click.option("--follows", type=RATE, default="0", help="Authors followed.")
@click.option("--photos", type=RATE, default="0", help="Photos fetched, such as 4M/h.")
@click.option("--photo-kb", type=_Number(0, min_open=True), default=150.0, help="Size of a photo.")
@click.option(
    "--media", type=BITS, default="0", help="Bits of media sent, such as 100G or 100Gbit/s."
)
@click.option(
    "--connections", type=COUNT, default="0", help="Open connections of media, such as 500k."
)
@click.option(
    "--from-disk", type=_Number(0, 1), default=0.0, help="Share of media from disks, 0 to 1."
)
@click.option("--hops", type=_Number(0, 1), default=0.0, help="Share from other nodes, 0 to 1.")
@click.option("--fills", type=_Number(0, 1), default=0.0, help="Share not on disks yet, 0 to 1.")
@click.option("--tls", is_flag=True, help="Media is sent over HTTPS by its nodes.")
@click.option("--peak", type=_Number(1), default=1.0, help="Peak rate divided by the given rates.")
@click.option("--cores", type=click.IntRange(1), default=16, help="Cores of a machine.")
@click.option("--share", type=_Number(0.05, 1), default=0.5, help="Share of CPU used at the peak.")
@click.pass_obj
def size(line: CommandLine, /, *, peak: float, cores: int, share: float, **given: float) -> None:
    """Estimate the CPU, disk, memory and network that a load needs, and the number of machines.

    A rate without a unit is per second: --jobs 4k is --jobs 4k/s. Other units: 9k/min, 4M/h,
    350M/day. The first lines show how each rate was read. Costs are measured on one machine,
    without your handlers; docs/reference/capacity.md explains them.
    """
    if not any(given[name] for name in (*RATES, "media", "connections")):
        raise InvalidRate("no rate is given: name a load, such as --jobs 350M/day or --hits 9k/min")
    if sum(given[option] for option in SHARES.values()) > 1:
        raise InvalidRate(
            "--from-disk, --hops and --fills are shares of one sum: at most 1 together"
        )
    rates = {name: given[name] * peak for name in RATES}
    load = Load(
        **rates,
        jobs_per_call=given["jobs_per_call"],
        job_cpu_s=given["job_cpu_ms"] / 1e3,
        job_s=given["job_ms"] / 1e3,
        photo_bytes=given["photo_kb"] * 1e3,
        media_bits=given["media"] * peak,
        media_connections=given["connections"] * peak,
        is_tls=bool(given["tls"]),
        media_shares={kind: given[option] for kind, option in SHARES.items()},
        peak=peak,
    )
    found = demands(load, cores=cores)
    needed = machines(found, cores=cores, share=share)
    at_peak = {name: rate for name, rate in (*rates.items(), ("media", load.media_bits)) if rate}
    left_out = _left_out(load)
    value = {
        "per_second_at_peak": at_peak,
        "left_out": left_out,
        "resources": [
            {"resource": one.resource, "amount": one.amount, "unit": one.unit, "used": one.used}
            for one in found
        ],
        "machines": needed,
        "constants": [
            {
                "name": one.name,
                "value": one.value,
                "unit": one.unit,
                "is_measured": one.measured is not None,
            }
            for one in CONSTANTS
        ],
    }
    lines = [*_lines_of_rates(at_peak, peak), *lines_of(found, needed)]
    if left_out:
        lines += ["", "not given, so left out:", *(f"  {one}" for one in left_out)]
    line.show(value, "\n".join(lines))


def _left_out(load: Load) -> list[str]:
    """What the answer lacks because an option was not given."""
    wanted = {
        "CPU of your handlers: --job-cpu-ms": load.jobs and not load.job_cpu_s,
        "slots and their memory: --job-ms": load.jobs and not load.job_s,
        "media not in memory: --from-disk, --hops, --fills": load.media_bits
        and not any(load.media_shares.values()),
        "memory of connections: --connections": load.media_bits and not load.media_connections,
        "peaks above the average: --peak": load.peak == 1,
    }
    return [text for text, is_left_out in wanted.items() if is_left_out]


def _lines_of_rates(at_peak: Mapping[str, float], peak: float) -> list[str]:
    """Each rate per second and per day, so that a wrong unit is seen."""
    lines = ["load at the peak:"]
    for name, rate in at_peak.items():
        what = "bits of media" if name == "media" else name
        per_day = f"({shown(rate / peak * DAY_S)} in a day)" if name != "media" else ""
        lines.append(f"{'  ' + what:<28}{shown(rate):>10} a second {per_day}".rstrip())
    return [*lines, ""]


def lines_of(found: list[Demand], needed: dict[str, int]) -> list[str]:
    """The answer as lines: used resources, machines, and what is exhausted first."""
    used = [one for one in found if one.amount > 0]
    lines = [f"{one.resource:<28}{shown(one.amount):>10} {one.unit}" for one in used]
    lines += ["", "servers:"]
    lines += [f"{'  ' + kind:<28}{count:>10}" for kind, count in needed.items() if count]
    limited = sorted((one for one in used if one.limit), key=lambda one: one.used, reverse=True)
    if limited:
        lines += ["", "exhausted first, with its share of one server, and what then helps:"]
        lines += [f"  {one.used:>5.0%}  {one.resource}: {one.remedy}" for one in limited[:3]]
    guesses = [f"{one.name}: {one.value:,.0f} {one.unit}" for one in CONSTANTS if not one.measured]
    return [*lines, "", f"assumed, not measured: {'; '.join(guesses)}"] if guesses else lines


def shown(amount: float) -> str:
    """Two significant digits at least."""
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.2g}"


COMMANDS: Final = [size]
