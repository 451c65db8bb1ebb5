"""The page docs/reference/capacity.md: measured costs, and what five example loads need."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from headrace.cli.capacity import (
    CARD,
    CONSTANTS,
    DISK,
    SYNCS,
    Demand,
    Load,
    constants,
    costs,
    demands,
    machines,
    shown,
    source,
)

DAY_LOAD: Final = Load(jobs=350e6 / 86_400, jobs_per_call=10, job_s=0.4, job_cpu_s=0.02)
"""The average of the first system, which the simulated day repeats."""
DAY_PEAK: Final = 1.6
SYSTEMS: Final = {
    "jobs of a social network: 350 million a day, the peak at 1.6 times the average": replace(
        DAY_LOAD, jobs=DAY_LOAD.jobs * DAY_PEAK, peak=DAY_PEAK
    ),
    "photos of a classifieds site: 4 million an hour": Load(photos=4e6 / 3600),
    "views of a classifieds group: 9,000 hits and 300,000 reads of 20 totals a minute": Load(
        hits=9_000 / 60, totals=300_000 / 60 * 20
    ),
    "feeds, as an example: 500 pages, 5 posts, 20 follows a second": Load(
        pages=500, posts=5, follows=20
    ),
    "media of a music site: 100 Gbit/s to half a million connections, 30 % from disks": Load(
        media_bits=100e9,
        media_connections=500e3,
        media_shares={"from the disk": 0.3, "filled": 0.02, "by a hop": 0.0},
    ),
}
TIMES: Final = (1, 10, 100)
CORES: Final = 16
SHARE: Final = 0.5
BREAKS_SHOWN: Final = 3
BREAKS_AT_MOST: Final = 1_000
"""A factor above is not worth a line."""
DAY: Final = Path(__file__).parents[1] / "bench" / "results" / "capacity_day.json"
TEXT: Final = """# Capacity

Written by `make reference` from the record of benchmarks; do not edit.

`headrace size` computes the CPU, memory, disk and network that a load needs: the measured cost of
each operation times its rate.

```sh
headrace size --jobs 350M/day --peak 1.6 --jobs-per-call 10 --job-ms 400 --job-cpu-ms 20
headrace size --hits 9k/min --totals 100k --media 100G --connections 500k --from-disk 0.3 --cores 32
```

A rate without a unit is per second; other units are `/min`, `/h` and `/day`. The first lines of the
output show how each rate was read.

The result is an estimate. The costs were measured on one machine; your handlers, payloads, caches
and disks change them. Measure with your own load before you buy machines, and plan for half of the
CPU at the peak, because waiting times grow fast above that.

## Costs of one operation
"""

NOTES: Final = """An empty cell means that the operation does not use the resource, or that its use
was not measured. CPU of Headrace is that of the process that calls Headrace, of the agent with its
slots (worker processes), or of the flusher. The last column is the CPU of the one process that
answers: a media node or the API. A call over HTTP costs `request of the API` in addition.

Jobs leave the database when they end, and days replace views by hour, so the database does not grow
with their number for good. `writes of the database` and `written by the database` count operations
on files and their bytes: blocks of the write-ahead log, and pages that a checkpoint right after the
operations writes. PostgreSQL and Valkey read nothing from disks, because all their data was in
memory. Valkey synced its append-only file once a second. The bytes of a photo pass the network
twice: from the seller's host, and to the object store, unless this is a local folder; a folder
syncs photos in batches.

The ranges are requests for 256 KiB of an object of media. `by a hop`: forwarded to another node.
`filled`: read from the object store and written to the node's disk. `from the disk`: read from the
node's disk. `from memory`: from the page cache.
"""


def capacity_page() -> str:
    """The page."""
    units = (
        "CPU is in microseconds; `syncs of the log` and `writes of the database` are numbers; all"
        " other columns are bytes."
    )
    lines = [TEXT, f"`{source()}`. {units}\n"]
    names = list(dict.fromkeys(name for cost in costs().values() for name in cost))
    lines += [f"| operation | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for operation, cost in costs().items():
        cells = [shown(cost[name]) if name in cost else "" for name in names]
        lines.append(f"| {operation} | {' | '.join(cells)} |")
    lines += ["", NOTES, *_constants()]
    machine = f"{CORES} cores, {SHARE:.0%} of them used at the peak"
    lines += [f"## Example loads\nThe machines have {machine}.\n", _full(), ""]
    for title, load in SYSTEMS.items():
        lines += [f"### {title[0].upper()}{title[1:]}\n", *_table(load), ""]
    return "\n".join([*lines, *_simulated_day()])


def _full() -> str:
    """What the words `server full` count."""
    return (
        "The columns are the load itself, and 10 and 100 times the load. A server is full when the"
        " load at its peak needs all of one of its resources:"
        f" all {CORES} cores for CPU of PostgreSQL, one core for CPU of Valkey,"
        f" {DISK.value / 1e6:,.0f} MB/s of synced writes for the write-ahead log,"
        f" {SYNCS.value:,.0f} syncs/s, or {CARD.value / 1e9:,.0f} Gbit/s for a network. Only the"
        " operations of this page are counted: no handlers, standbys, vacuum or reads from disks."
        " The numbers of machines are computed with only a part of the CPU in use (`--share`, 0.5),"
        " so they grow before a server is full."
    )


def _constants() -> list[str]:
    """The figures of machines that plans use."""
    lines = ["## Figures of a machine\n", "| figure | value | origin |", "| --- | --- | --- |"]
    for one in CONSTANTS:
        origin = "assumed" if one.measured is None else "measured"
        lines.append(f"| {one.name} | {one.value:,.0f} {one.unit} | {origin} |")
    used = {one.row for one in CONSTANTS}
    lines += [
        f"| memory of one {name}, idle | {figures['memory']:,.0f} B | measured |"
        for name, figures in constants().items()
        if name not in used
    ]
    return [*lines, "", "The disks and network cards of your machines differ: compare.", ""]


def _table(load: Load) -> list[str]:
    columns = [demands(_times(load, times), cores=CORES) for times in TIMES]
    head = " | ".join(f"{times} x" for times in TIMES)
    lines = [f"| resource | {head} | unit |", "| --- |" + " --- |" * (len(TIMES) + 1)]
    for rows in zip(*columns, strict=True):
        if rows[0].amount > 0:
            cells = " | ".join(shown(row.amount) for row in rows)
            lines.append(f"| {rows[0].resource} | {cells} | {rows[0].unit} |")
    counts = [machines(column, cores=CORES, share=SHARE) for column in columns]
    for kind in counts[0]:
        if counts[-1][kind] > 1:
            cells = " | ".join(str(count[kind]) for count in counts)
            lines.append(f"| **{kind}** | {cells} | |")
    return [*lines, "", *_breaks(columns[0])]


def _breaks(found: list[Demand]) -> list[str]:
    """What breaks first as the load grows, and what to do."""
    limited = sorted((one for one in found if one.used > 0), key=lambda one: -one.used)
    breaking = [one for one in limited if 1 / one.used <= BREAKS_AT_MOST][:BREAKS_SHOWN]
    lines = [
        f"{number}. {one.resource}: one server is full at {shown(1 / one.used)} times the load."
        f" Remedy: {one.remedy}."
        for number, one in enumerate(breaking, 1)
    ]
    spread = [one for one in found if one.amount > 0 and one.limit is None and one.remedy]
    remedies: dict[str, list[str]] = {}
    for one in spread:
        remedies.setdefault(one.remedy, []).append(one.resource)
    also = "; ".join(f"{remedy} for {', '.join(names)}" for remedy, names in remedies.items())
    amounts = {one.resource: one.amount for one in found}
    if amounts["network of media nodes"]:
        lines.append(_of_nodes(amounts))
    if not lines:
        lines = [f"No engine is full below {BREAKS_AT_MOST:,} times the load."]
    return [
        "What is full first as the load grows:\n",
        *lines,
        "",
        f"For the other resources add machines or processes: {also}.",
    ]


def _of_nodes(amounts: dict[str, float]) -> str:
    """What of a media node is full first."""
    card = CARD.value / 1e9
    cores = amounts["CPU of media nodes"] * card / amounts["network of media nodes"]
    if cores > CORES * SHARE:
        return f"Of a media node the CPU is full before its network card of {card:g} Gbit/s."
    return (
        f"Of a media node the network card is full first: {card:g} Gbit/s need only"
        f" {shown(cores)} cores. Use faster cards, then more nodes."
    )


def _simulated_day() -> list[str]:
    """What the simulated day used beside the plan."""
    document = json.loads(DAY.read_text())
    day = document["day"]
    mean, peak = (
        next(one for one in demands(load, cores=CORES) if one.resource == "slots of agents").amount
        for load in (DAY_LOAD, SYSTEMS[next(iter(SYSTEMS))])
    )
    sizes, busy = day["sizes"], day["busy_slots"]
    waits = max(day["wait_s"][name]["p99"] for name in ("p0-1", "p2-3"))
    rows = [
        ("busy slots, average", mean, busy["mean"]),
        ("busy slots in the busiest hour", peak, busy["peak"]),
    ]
    fleet = (
        f"`{document['command']}` ({document['date'][:10]}) simulates a day of the first example"
        " load: the planner of Headrace's scheduler assigns slots on a simulated fleet."
        f" The fleet has the {sizes['hosts']} agents of the table above, and {sizes['slots']:,}"
        " slots, a third more than the table needs at the peak."
        f" The day has {day['jobs'] / 1e6:.0f} million jobs, with bursts, a backlog, and a fifth of"
        " the hosts dead for half an hour. The slots that the plan computed and that the simulation"
        " used:\n"
    )
    result = (
        f"99 % of the jobs of important queues waited at most {waits:g} s. At the end"
        f" {day['still_waiting']} jobs were waiting. CPU, log and network of the engines are not"
        " simulated."
    )
    return [
        "## The plan compared with a simulated day\n",
        fleet,
        "| figure | plan | simulated |",
        "| --- | --- | --- |",
        *(f"| {name} | {plan:,.0f} | {simulated:,.0f} |" for name, plan, simulated in rows),
        "",
        result,
        "",
    ]


def _times(load: Load, times: int) -> Load:
    rates = ("jobs", "hits", "totals", "pages", "posts", "follows", "photos", "media_bits")
    names = (*rates, "media_connections")
    return replace(load, **{name: getattr(load, name) * times for name in names})
