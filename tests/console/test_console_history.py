"""Charts over time: drawn from recorded minutes, selected, marked, and readable without scripts."""

from __future__ import annotations

import html
import json
import math
import os
import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import combinations
from operator import mul
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import WIDTHS, browsing
from recorded import QUEUES, record
from served import app_of, serving, visiting
from tests.kit.waiting import wait_true

from headrace.console.chart_marks import MARK_NAMES
from headrace.console.screens.cards import RoomRates, fetch_card, media_card
from headrace.console.stored import newest_minute, read_minute
from headrace.console.views import PanelData, Rates
from headrace.engines.endpoints import Endpoints
from headrace.engines.sql import Query
from headrace.jobs.store import fleet as fleet_store

ROOMS = {
    "/console": ("jobs-ended", "http_time-line"),
    "/console/jobs": ("jobs-queues", "jobs_wait-line", "jobs_run-heat"),
    "/console/fetch": ("fetch_photos-stack", "fetch_first_byte-heat"),
    "/console/views": ("views_flushed-stack", "views_lag-line"),
    "/console/feed": ("feed_pages-stack", "feed_page_time-heat"),
    "/console/media": ("media_requests-stack", "media_ttfb-line"),
}
COLORS_OF_CHARTS = """() => [1, 2, 3, 4, 5, 6, 7, 8].map((place) => {
  const probe = document.createElement("i");
  probe.style.color = `var(--chart-${place})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
})"""
DRAWN_TEXTS = """
const fillText = CanvasRenderingContext2D.prototype.fillText;
window.drawnTexts = [];
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  window.drawnTexts.push(text);
  return fillText.call(this, text, ...rest);
};
"""
"""Records the texts of canvases: the ticks of charts."""
TICKS_OF = """([unit, values]) => {
  const figure = document.createElement("figure");
  figure.dataset.chart = "ticks";
  figure.innerHTML = '<span data-live="t" hidden></span><div class="plot" aria-label="x"></div>';
  const xs = values.map((_, index) => index);
  const lines = [{label: "all", values, tone: "", color: 0}];
  const labels = values.map(() => "");
  const data = {kind: "line", unit, xs, lines, labels, step: 0};
  figure.querySelector("span").textContent = JSON.stringify(data);
  document.querySelector("main").append(figure);
  window.drawnTexts = [];
  headraceCharts.draw(figure);
  return new Promise((done) => requestAnimationFrame(() => {
    figure.remove();
    done(window.drawnTexts.filter((text) => text.trim()));
  }));
}"""
SHAPES_OF_KINDS = """(kinds) => kinds.map((kind) => {
  const sign = document.createElement("i");
  sign.className = `kind ${kind}`;
  document.body.append(sign);
  const shape = getComputedStyle(sign).clipPath;
  sign.remove();
  return shape;
})"""
SIGN_OF_OUTAGE = """() => {
  const figure = document.querySelector("[data-chart='views_flushed-stack']");
  const canvas = figure.querySelector("canvas");
  const over = figure.querySelector(".u-over");
  const marks = JSON.parse(document.querySelector("[data-live='board:marks']").textContent);
  const outage = marks.find((mark) => mark.kind === "outage");
  const { xs, step } = JSON.parse(figure.querySelector("[data-live]").textContent);
  const share = (outage.at - xs[0]) / (xs[xs.length - 1] + step - xs[0]);
  const ratio = devicePixelRatio;
  const [box, area] = [canvas.getBoundingClientRect(), over.getBoundingClientRect()];
  const x = area.left - box.left + share * area.width;
  const y = area.top - box.top;
  const [left, width] = [Math.round((x - 3) * ratio), Math.round(6 * ratio) + 1];
  const row = Math.round((y + 7) * ratio);
  const { data } = canvas.getContext("2d").getImageData(left, row, width, 1);
  const isDrawn = (at) => data[4 * at + 3] > 200 && data[4 * at] > data[4 * at + 1];
  return [isDrawn(0), isDrawn(width - 1)];
}"""
OUTAGES_OF_DAYS = Query(
    "outages_of_days",
    "",
    "INSERT INTO headrace.engine_outage (id, host, engine, causes, began_at, until_at, is_over)"
    " SELECT id, host, engine, causes, now() - ago::interval, now() - ago::interval"
    " + lasted::interval, is_over FROM (VALUES"
    " (1, 'alpha', 'valkey', ARRAY['connection refused'], '22 min', '44 s', true),"
    " (2, 'beta', 'valkey', ARRAY['connection refused'], '22 min', '44 s', true),"
    " (3, 'gamma', 'postgres', ARRAY['no answer in time', 'read-only'], '3 h', '90 s', false),"
    " (4, 'alpha', 'valkey', ARRAY['connection lost'], '25 h', '60 s', true)"
    ") o(id, host, engine, causes, ago, lasted, is_over)",
    (),
)
CELL = "<t[hd][^>]*>(.*?)</t[hd]>"
PICTURES = "HISTORY_PICTURES"
"""Environment variable with a folder: then every board is also written there as a picture."""


@pytest.fixture(scope="module")
async def site(tmp_path_factory, running_engines):
    """A served console whose database has three hours of minutes."""
    folder = tmp_path_factory.mktemp("history")
    async with running_engines.database() as url:
        valkey_url = running_engines.endpoints.valkey_url
        app = app_of(folder, Endpoints(url, valkey_url, (folder / "blobs").as_uri()))
        for queue in QUEUES:
            await app.jobs.queues.create(queue)
        await record(app.engines.postgres, minutes=1500 if PICTURES in os.environ else 180)
        async with serving(app) as address:
            yield app, address


async def test_a_minute_without_growth_gives_no_rates_and_no_charts(served):
    app = served[0]
    written = "INSERT INTO headrace.history_minute (at, host, writer, center, seconds, sums, peaks)"
    moment = "date_trunc('minute', now()) - interval '2 min'"
    minute = f"{written} VALUES ({moment}, 'alpha', 1, '', 60, '{{}}', '{{}}')"
    await app.engines.postgres.run(Query("minute", "", minute, ()))
    context = SimpleNamespace(history=app.history, now_at=datetime.now(UTC))
    assert await read_minute(context) is None
    async with visiting(*served) as visitor:
        page = (await visitor.get("/console/views?range=6h")).text
        overview = (await visitor.get("/console")).text
    assert "up to 85 s after they happened" in overview
    assert (
        "Nothing in this time: Views written to PostgreSQL, Hits refused by the API and jobs, "
        in page
    )
    assert 'data-chart="views_flushed-stack"' not in page
    await app.engines.postgres.run(Query("minute", "", "DELETE FROM headrace.history_minute", ()))


async def test_the_overview_lists_the_outages_of_a_day(tmp_path, database_url, running_engines):
    endpoints = Endpoints(
        database_url, running_engines.endpoints.valkey_url, (tmp_path / "blobs").as_uri()
    )
    app = app_of(tmp_path, endpoints)
    async with serving(app) as address, visiting(app, address) as at:
        await app.engines.postgres.run(OUTAGES_OF_DAYS)
        page = (await at.get("/console")).text
        table = page.partition('aria-label="Outages of engines"')[2].partition("</table>")[0]
        found = [
            [re.sub("<[^>]*>", "", cell).strip() for cell in re.findall(CELL, row, re.DOTALL)]
            for row in table.split("<tr>")[2:]
        ]
        assert [[row[0], *row[2:]] for row in found] == [
            ["Valkey", "44 s", "alpha, beta", "connection refused"],
            ["PostgreSQL", "at least 90 s", "gamma", "no answer in time, then read-only"],
        ]
        assert all(re.fullmatch(r"[\d-]{10} [\d:]{8} UTC", row[1]) for row in found)
        headers = {"authorization": f"Bearer {await at.token('metrics:read')}"}
        marks = "/v1/history/marks?kind="
        [mark] = (await at.client.get(f"{marks}outage", headers=headers)).json()
        assert (mark["engines"], mark["hosts"]) == (["valkey"], ["alpha", "beta"])
        assert mark["cause"] == "connection refused"
        refused = await at.client.get(f"{marks}mistake", headers=headers)
        assert refused.status_code == 422
        assert "expected one of start, deploy, restart, deaths, outage" in refused.text


@pytest.fixture
def open_tab(chromium, site):
    """`async with open_tab(width=360) as screen`: a logged-in tab of the served console."""

    @asynccontextmanager
    async def opened(**options):
        async with visiting(*site) as visitor:
            cookies = [
                {"name": name, "value": value, "url": f"{site[1]}/console"}
                for name, value in visitor.client.cookies.items()
            ]
            async with browsing(chromium, site[1], cookies=cookies, **options) as screen:
                yield screen

    return opened


def lab_of(*rgb):
    """A color as CIE Lab, where equal distances look equally different."""
    linear = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
        for v in (part / 255 for part in rgb)
    ]
    rows = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (sum(map(mul, row, linear)) for row in rows)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


async def drawn(screen, name):
    """Wait until a chart is drawn."""
    await screen.page.locator(f"[data-chart='{name}'].drawn canvas").wait_for()


async def unfold_charts(screen):
    """Show all charts on a phone."""
    await screen.page.locator("summary", has_text="charts").click()


async def brush(screen, name, first, last):
    """Drag over a part of a chart, given as shares of its width."""
    over = screen.page.locator(f"[data-chart='{name}'] .u-over")
    await over.scroll_into_view_if_needed()
    box = await over.bounding_box()
    middle = box["y"] + box["height"] / 2
    await screen.page.mouse.move(box["x"] + box["width"] * first, middle)
    await screen.page.mouse.down()
    await screen.page.mouse.move(box["x"] + box["width"] * last, middle, steps=4)
    await screen.page.mouse.up()


async def test_until_rates_are_measured_those_of_the_last_minute_are_shown_with_its_time(site):
    app, _ = site
    rates = Rates(None)
    context = SimpleNamespace(rates=rates, history=app.history, now_at=datetime.now(UTC))
    minute = await newest_minute(context)
    assert minute.rate_per_s("media_requests") > 0
    card = media_card(rates, RoomRates(rates, minute), is_installed=True)
    assert card.span == f"all hosts, minute to {minute.ended_at:%H:%M} UTC"
    assert float(card.rate) > 0
    unrecorded = media_card(rates, RoomRates(rates, None), is_installed=True)
    assert (unrecorded.rate, unrecorded.span) == ("measuring", "")
    # Without an import no photo was requested, so there is no rate that could be unknown.
    fetch = fetch_card(rates, RoomRates(rates, None), PanelData([]))
    assert (fetch.rate, fetch.unit) == ("no photos yet", "")
    assert [one.split()[:4] for one in fetch.commands] == [
        ["headrace", "fetch", "customer", "set"],
        ["headrace", "fetch", "catalogue", "run"],
    ]


async def test_every_room_draws_its_minutes(open_tab):
    async with open_tab() as screen:
        for path, names in ROOMS.items():
            await screen.open(path)
            for name in names:
                await drawn(screen, name)
            assert await screen.findings(rules=["color-contrast", "list", "svg-img-alt"]) == []
        legend = screen.page.locator("[data-chart='media_requests-stack'] .u-legend")
        assert re.search(r"2xx\s*[\d.,]+k?", await legend.inner_text())


async def test_every_chart_has_its_legend_on_a_phone(open_tab):
    async with open_tab(width=WIDTHS["phone"]) as screen:
        for path, names in ROOMS.items():
            await screen.open(path)
            assert await screen.page.locator(".charts > *").filter(visible=True).count() == 1
            await unfold_charts(screen)
            await drawn(screen, names[0])
            for legend in await screen.page.locator("[data-chart].drawn .u-legend").all():
                entries = await legend.locator(".u-series").all_inner_texts()
                assert len(entries) > 1, "the time and each line"
                assert all(re.search(r"\S+\s+\S+", text) for text in entries), entries
                await legend.scroll_into_view_if_needed()
                box = await legend.bounding_box()
                assert box["height"] > 10, path
                assert box["x"] + box["width"] <= WIDTHS["phone"], path


async def test_a_selection_opens_the_failed_jobs_of_its_time_or_zooms(open_tab):
    async with open_tab() as screen:
        await screen.open("/console/jobs")
        await drawn(screen, "jobs-ended")
        await brush(screen, "jobs-ended", 0.4, 0.6)
        link = screen.page.locator("[data-chart='jobs-ended'] .brushed a")
        address = await link.first.get_attribute("href")
        assert re.search(r"/jobs/jobs\?state=failed&from=[^&]+Z&to=[^&]+Z$", address)
        await drawn(screen, "jobs_wait-line")
        async with screen.page.expect_navigation(wait_until="load"):
            await brush(screen, "jobs_wait-line", 0.4, 0.6)
        assert "from=" in screen.page.url
        await drawn(screen, "jobs_wait-line")
        assert "to" in await screen.text(".board-head small")


@pytest.mark.parametrize(
    ("unit", "top", "ticks"),
    [
        ("s", 0.0007, "0|200 µs|400 µs|600 µs"),
        ("s", 0.9, "0|200 ms|400 ms|600 ms|800 ms"),
        ("s", 8.0, "0|2 s|4 s|6 s|8 s"),
        ("s", 55.0, "0|15 s|30 s|45 s|60 s"),
        ("s", 110.0, "0|30 s|60 s|90 s|120 s"),
        ("s", 500.0, "0|2 min|4 min|6 min|8 min"),
        ("s", 900.0, "0|5 min|10 min|15 min"),
        ("s", 7_000.0, "0|30 min|60 min|90 min|120 min"),
        ("s", 80_000.0, "0|6 h|12 h|18 h|24 h"),
        ("s", 300_000.0, "0|1 d|2 d|3 d"),
        ("bytes/s", 3_500_000.0, "0 B|1 MiB|2 MiB|3 MiB"),
        ("jobs/min", 1, "0|1"),
        ("jobs/min", 9, "0|2|4|6|8"),
        ("jobs/min", 45_000, "0|10k|20k|30k|40k"),
        ("done/s", 0.9, "0|0.2|0.4|0.6|0.8"),
    ],
)
async def test_ticks_are_round_values_of_their_unit(open_tab, unit, top, ticks):
    async with open_tab() as screen:
        await screen.context.add_init_script(DRAWN_TEXTS)
        await screen.open("/console/audit")
        assert "|".join(await screen.page.evaluate(TICKS_OF, [unit, [0, top]])) == ticks


@pytest.mark.parametrize("path", ["/console/jobs?range=1h", "/console/jobs?range=24h"])
async def test_bounds_and_minutes_of_a_board_are_round(open_tab, path):
    async with open_tab(width=WIDTHS["phone"]) as screen:
        await screen.context.add_init_script(DRAWN_TEXTS)
        await screen.open(path)
        await unfold_charts(screen)
        await drawn(screen, "jobs_run-heat")
        texts = set(await screen.page.evaluate("window.drawnTexts"))
        times = {text for text in texts if re.search(r" (s|min|h|d)$", text)}
        assert times, texts
        assert not [
            text for text in times if "." in text and not re.fullmatch(r"\d\.5 m?s", text)
        ], times
        assert all(text[-1] in "05" for text in texts if re.fullmatch(r".*\d\d:\d\d", text))


async def test_the_crosshair_is_shared_and_marks_are_named(open_tab):
    async with open_tab() as screen:
        await screen.open("/console/views?range=6h")
        await drawn(screen, "views_flushed-stack")
        over = screen.page.locator("[data-chart='views_flushed-stack'] .u-over")
        box = await over.bounding_box()
        other = screen.page.locator("[data-chart='views_lag-line'] .u-legend")
        before = await other.inner_text()
        assert "latest" in before
        await screen.page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60)

        async def is_moved():
            return "latest" not in await other.inner_text()

        await wait_true(is_moved, what="the other chart shows the same time")
        events = screen.page.locator(".marks")
        await events.locator("summary").click()
        text = await events.inner_text()
        outage = r"outage until [\d:]{8}: Valkey did not answer alpha, beta for about 44 s: "
        assert re.search(outage + "connection refused", text)
        assert "deploy: api started on alpha, version 0.2.0" in text
        # Two minutes are one step of six hours: a start is not known to the second.
        assert re.search(r"in the 2 min from [\d-]{10} \d\d:\d\d UTC\s+deploy: api", text)


async def test_every_kind_of_marks_has_a_sign_of_its_own_in_charts_and_legend(open_tab):
    async with open_tab() as screen:
        await screen.open("/console/views?range=6h")
        await drawn(screen, "views_flushed-stack")
        shapes = await screen.page.evaluate(SHAPES_OF_KINDS, list(MARK_NAMES))
        assert all(shape.startswith("polygon(") for shape in shapes), shapes
        assert len(set(shapes)) == len(MARK_NAMES)
        # The mark of an outage is a square: the corners of its sign have its color.
        assert await screen.page.evaluate(SIGN_OF_OUTAGE) == [True, True]


def marks_of(text):
    """The marks of a board by kind, and the text of the legend of marks."""
    [document] = re.findall(r'<span data-live="board:marks" hidden>(.*?)</span>', text)
    legend = re.search(r'<p class="marks-legend">(.*?)</p>', text, re.DOTALL)
    words = re.sub(r"<[^>]+>", " ", legend[1]) if legend else ""
    return {mark["kind"] for mark in json.loads(html.unescape(document))}, " ".join(words.split())


async def test_a_board_is_shaded_by_alerts_of_its_own_room_and_names_its_marks(site):
    app, _ = site
    postgres = app.engines.postgres
    for subject in ("billing", "fetch.item"):
        await fleet_store.raise_alert(postgres, "oldest_waits", subject, "its oldest job waits")
        await fleet_store.clear_alert(postgres, "oldest_waits", subject)
    hours = "raised_at = raised_at - interval '3 h', cleared_at = cleared_at - interval '2 h'"
    await postgres.run(Query("age", "", f"UPDATE headrace.alert SET {hours}", ()))
    kinds, legends = {}, {}
    now = datetime.now(UTC)

    def span(from_at, to_at):
        return {"from": f"{from_at:%Y-%m-%dT%H:%M}Z", "to": f"{to_at:%Y-%m-%dT%H:%M}Z"}

    async with visiting(*site) as visitor:
        for room in ("jobs", "fetch", "views", "media"):
            # With minutes, which a range of days has not: it ends with a whole step.
            answer = await visitor.get(
                f"/console/{room}", params=span(now - timedelta(hours=5), now)
            )
            kinds[room], legends[room] = marks_of(answer.text)
        before = now - timedelta(days=3)
        empty = await visitor.get(
            "/console/views", params=span(before, before + timedelta(hours=1))
        )
    assert {room for room, found in kinds.items() if "alert" in found} == {"jobs", "fetch"}
    assert all("outage" in found for found in kinds.values()), "an engine concerns every room"
    assert "Shaded: time of outage or alert" in legends["jobs"]
    assert legends["media"].endswith("Shaded: time of outage")
    assert legends["media"].startswith("Marks in the charts: start deploy outage ")
    assert marks_of(empty.text) == (set(), "")


async def test_jobs_that_a_dead_worker_cut_off_are_not_called_lost(open_tab):
    async with open_tab() as screen:
        await screen.open("/console/jobs")
        await drawn(screen, "jobs-ended")
        legend = await screen.text("[data-chart='jobs-ended'] .u-legend")
        assert "cut off, run again" in legend
        assert "lost" not in legend


async def test_colors_of_charts_differ(open_tab):
    """In each theme, no two colors of lines are as near as two teals."""
    for scheme in ("light", "dark"):
        async with open_tab(scheme=scheme) as screen:
            await screen.open("/console/jobs")
            colors = await screen.page.evaluate(COLORS_OF_CHARTS)
            labs = [lab_of(*map(float, re.findall(r"[\d.]+", one)[:3])) for one in colors]
            for one, other in combinations(labs, 2):
                assert math.dist(one, other) > 20, (scheme, colors)


async def test_charts_by_host_and_without_scripts(open_tab):
    async with open_tab(scripts=False) as screen:
        await screen.open("/console/media")
        await screen.press(".choices a:has-text('by host')")
        text = await screen.text("[data-chart='media_requests-stack']")
        assert "alpha" in text
        assert "beta" in text
        await screen.press(".choices a:has-text('6h')")
        assert "by=host" in screen.page.url
        assert await screen.page.locator(".lines polyline").count() > 4


async def test_a_range_begins_with_the_history_of_a_young_site(site):
    async with visiting(*site) as visitor:
        answer = await visitor.get("/console/views?range=6h")
    [xs, *_] = re.findall(r'"xs":\s*\[([^\]]+)\]', html.unescape(answer.text))
    first, *_, last = map(float, xs.split(","))
    assert 2.5 <= (last - first) / 3600 <= 3.1


async def test_a_site_states_when_its_first_minute_appears(served, at):
    postgres = served[0].engines.postgres
    written = "INSERT INTO headrace.history_minute (at, host, writer, center, seconds, sums, peaks)"
    minute = f"{written} VALUES (date_trunc('minute', now()), 'alpha', 1, '', 60, '{{}}', '{{}}')"
    minute += " ON CONFLICT DO NOTHING"
    for url in ("/console/views", "/console/feed"):
        text = (await at.get(url)).text
        assert re.search(r"first one appears at \d\d:\d\d:15 UTC", text)
        assert "data-chart=" not in text
        # Written, but no chart shows it yet.
        await postgres.run(Query("write_minute", "", minute, ()))
        assert await served[0].history.begin() is not None
    await postgres.run(Query("delete_minutes", "", "DELETE FROM headrace.history_minute", ()))


@pytest.mark.parametrize(
    "query",
    ["range=2h", "from=x&to=y", "from=2026-01-02&to=2026-01-01", "by=queue", "from=2026-01-01",
     "from=1900-01-01&to=2026-01-01"],
)  # fmt: skip
async def test_a_bad_range_is_refused(site, query):
    async with visiting(*site) as visitor:
        assert (await visitor.get(f"/console/views?{query}")).status_code == 422


@pytest.mark.skipif(PICTURES not in os.environ, reason="writes pictures to look at")
@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_pictures_of_boards(open_tab, size, scheme):
    folder = Path(os.environ[PICTURES])
    async with open_tab(width=WIDTHS[size], scheme=scheme) as screen:
        for path, names in ROOMS.items():
            await screen.open(f"{path}?range={'6h' if size == 'desk' else '1h'}")
            await drawn(screen, names[0])
            assert await screen.overflow() == 0
            room = path.rpartition("/")[2]
            await screen.page.screenshot(
                path=folder / f"{room}-{size}-{scheme}.png", full_page=True
            )
