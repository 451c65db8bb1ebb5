"""The page docs/reference/capacity.md: measured costs, and what the systems of origin need."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.cli.capacity import Demand, Load, costs, demands, machines, shown, source

SYSTEMS: Final = {
    "jobs of a social network: 350 million a day, the peak at 1.6 times the average": Load(
        jobs=350e6 / 86_400 * 1.6, jobs_per_call=10, job_s=0.4, job_cpu_s=0.02
    ),
    "photos of a classifieds site: 4 million an hour": Load(photos=4e6 / 3600),
    "views of a classifieds group: 9,000 hits and 300,000 reads of 20 totals a minute": Load(
        hits=9_000 / 60, totals=300_000 / 60 * 20
    ),
    "feeds, as an example: 500 pages, 5 posts, 20 follows a second": Load(
        pages=500, posts=5, follows=20
    ),
    "media of a music site: 100 Gbit/s to half a million connections": Load(
        media_bits=100e9, media_connections=500e3
    ),
}
TIMES: Final = (1, 10, 100)
CORES: Final = 16
SHARE: Final = 0.5
TEXT: Final = """# Capacity

Written by `make reference` from the record of benchmarks; do not edit.

`headrace size` computes what a load needs, from the cost of each operation and its rate:

```sh
headrace size --jobs 350M/d --peak 1.6 --jobs-per-call 10 --job-ms 400 --job-cpu-ms 20
headrace size --hits 9k/min --totals 100k --media 100G --connections 500k --tls --cores 32
```

A plan is an estimate. The costs are of one machine; your handlers, payloads, caches and disks
change them. Measure with your own load before you buy machines, and keep half of the CPU unused at
the peak: waiting grows fast above that.

## Costs of one operation
"""

NOTES: Final = """CPU of Headrace is that of the client's process, of the agent with its slots, or
of the flusher. A call over HTTP costs `request of the API` more. Jobs leave the database when they
end, and days replace views by hour, so neither grows it for good.
"""


def capacity_page() -> str:
    """The page."""
    lines = [TEXT, f"`{source()}`. CPU in microseconds, the rest in bytes.\n"]
    names = list(dict.fromkeys(name for cost in costs().values() for name in cost))
    lines += [f"| operation | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for operation, cost in costs().items():
        cells = [shown(cost[name]) if name in cost else "" for name in names]
        lines.append(f"| {operation} | {' | '.join(cells)} |")
    machine = f"{CORES} cores, {SHARE:.0%} of them used at the peak, cards of 10 Gbit/s"
    lines += ["", NOTES, f"## The systems of origin\nMachines with {machine}.\n"]
    for title, load in SYSTEMS.items():
        lines += [f"### {title[0].upper()}{title[1:]}\n", *_table(load), ""]
    return "\n".join(lines)


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
    first = [max(column, key=lambda one: one.used) for column in columns]
    cells = " | ".join(f"{one.resource} ({one.used:.0%})" for one in first)
    lines += [f"| exhausted first | {cells} | of one server |", "", _remedies(first)]
    return lines


def _remedies(first: list[Demand]) -> str:
    texts = dict.fromkeys(f"{one.resource}: {one.remedy}" for one in first if one.used > SHARE)
    return f"Remedy: {'; '.join(texts)}." if texts else "One server of each engine carries it."


def _times(load: Load, times: int) -> Load:
    rates = ("jobs", "hits", "totals", "pages", "posts", "follows", "photos", "media_bits")
    names = (*rates, "media_connections")
    return replace(load, **{name: getattr(load, name) * times for name in names})
