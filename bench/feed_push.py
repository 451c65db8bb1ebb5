"""When would an inbox per viewer, written at each post, cost less than merging at each read?

Pushing costs a write a follower and post; pulling costs more a page. So pushing is cheaper for a
viewer who reads more pages a day than (posts a day of all followed authors) * write / (pull - read
of an inbox), in CPU of Valkey. The plot shows that number. It leaves out what else an inbox
is: a second truth, which deletions, unfollows, blocks and late posts have to be carried into, and
which ends at its cap.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import log10

from bench.children import cpu_of
from bench.feed_stage import FOLLOWS, PER_PAGE, make_world, staged
from bench.figures import Figure, Runs, figure
from bench.harness import Run
from bench.peers.feed_merges import Merges
from bench.report import write_plot

INBOXES, CAP, PER_CALL = 1_000, 120, 10_000
RATES = (0.1, 1.0, 3.3)
"""Posts a day of one author."""
WIDTH, HEIGHT, LEFT, TOP = 860, 420, 70, 40
MOST, LEAST = 10_000.0, 0.1
COLOURS = ("#1f6feb", "#2da44e", "#bf3989")


async def measure_push(run: Run) -> list[Figure]:
    """Costs, and from how many pages a day on pushing pays."""
    found = await run.alternate({"headrace": lambda: _costs(run)})
    costs = {name: row["headrace"] for name, row in found.items()}
    rows = [
        figure("CPU of Valkey, push and pull", "us", name, ours=runs)
        for name, runs in costs.items()
    ]
    if costs:
        write_plot(run.results, "feed_push", plot({n: r.median for n, r in costs.items()}))
        write, read = costs["write into an inbox"].median, costs["read of an inbox"].median
        for follows in FOLLOWS:
            pull = costs[_pull(follows)].median
            pages = pays_from(follows, 1.0, write=write, read=read, pull=pull)
            size = f"{follows:,} follows, each posts once a day"
            rows.append(figure("pages a day from which push pays", "", size, ours=Runs((pages,))))
    return rows


def pays_from(follows: int, rate: float, *, write: float, read: float, pull: float) -> float:
    """Pages a day from which on pushing costs less."""
    return follows * rate * write / max(0.1, pull - read)


async def _costs(run: Run) -> Mapping[str, float]:
    """Microseconds of Valkey's CPU."""
    world = make_world("uniform", posts=run.sized(400_000, 50_000), viewers=5)
    await run.engines.clear_valkey()
    pid, found = run.engines.valkey_pid, dict[str, float]()
    merges = Merges(run.engines.endpoints.valkey_url, "headrace:{f:0}:")
    try:
        async with run.cell() as cell, staged(cell, world) as app:
            for follows in FOLLOWS:
                count, began_s = run.sized(1_000, 200), cpu_of(pid)
                viewers = world.viewers[follows]
                for number in range(count):
                    await app.feed.page(viewers[number % len(viewers)], PER_PAGE)
                found[_pull(follows)] = (cpu_of(pid) - began_s) / count * 1e6
            writes, began_s = run.sized(400_000, 100_000), cpu_of(pid)
            for start in range(0, writes, PER_CALL):
                await merges.push(INBOXES, range(start, start + PER_CALL), CAP)
            found["write into an inbox"] = (cpu_of(pid) - began_s) / writes * 1e6
            reads, began_s, ends_s = 0, cpu_of(pid), time.perf_counter() + 60
            while reads < writes and time.perf_counter() < ends_s:
                assert await merges.read_inboxes(INBOXES, PER_PAGE) == INBOXES * min(PER_PAGE, CAP)
                reads += INBOXES
            found["read of an inbox"] = (cpu_of(pid) - began_s) / reads * 1e6
    finally:
        await merges.close()
        await run.engines.clear_valkey()
    return found


def _pull(follows: int) -> str:
    return f"pull, {follows:,} follows"


def plot(costs: Mapping[str, float]) -> str:
    """Lines over the number of follows, one for each rate of posting; both axes are logarithmic."""
    write, read = costs["write into an inbox"], costs["read of an inbox"]
    parts = [
        _text(8, 20, "Pages a day of one viewer from which on an inbox costs less CPU of Valkey"),
        _text(8, HEIGHT - 6, "followed authors (below a line pull is cheaper)"),
    ]
    for power in range(-1, 5):
        y = _y(10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 150}" stroke="#ddd"/>')
        parts.append(_text(8, y + 4, f"{10.0**power:g}"))
    parts += [_text(_x(follows) - 12, HEIGHT - 28, f"{follows:,}") for follows in FOLLOWS]
    for rate, colour in zip(RATES, COLOURS, strict=True):
        points = []
        for follows in FOLLOWS:
            pull = costs[_pull(follows)]
            pages = pays_from(follows, rate, write=write, read=read, pull=pull)
            points.append(f"{_x(follows):.1f},{_y(pages):.1f}")
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"'
            ' stroke-width="2"/>'
        )
        end = float(points[-1].split(",")[1])
        parts.append(_text(WIDTH - 145, end + 4, f"{rate:g} posts a day each"))
    style = "text{font-family:sans-serif;font-size:12px;fill:#444}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}"><style>{style}</style>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


def _x(follows: float) -> float:
    share = (log10(follows) - log10(FOLLOWS[0])) / (log10(FOLLOWS[-1]) - log10(FOLLOWS[0]))
    return LEFT + share * (WIDTH - 160 - LEFT)


def _y(pages: float) -> float:
    bounded = min(MOST, max(LEAST, pages))
    share = (log10(bounded) - log10(LEAST)) / (log10(MOST) - log10(LEAST))
    return HEIGHT - 50 - share * (HEIGHT - 50 - TOP)


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{text}</text>'
