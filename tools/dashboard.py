"""Writes deploy/grafana/headrace.json: the five rooms on one dashboard; `--check` only compares.

A panel is a title, a unit and its queries; where it stands follows from its row. `make reference`
writes it, and a house test holds every query against the metrics that the code declares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

FILE: Final = Path(__file__).parents[1] / "deploy" / "grafana" / "headrace.json"
SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
COLUMNS: Final = 24
HEIGHT: Final = 8


class Panel(NamedTuple):
    """One chart: what it shows, in which unit, by which queries and legends."""

    title: str
    unit: str
    queries: dict[str, str]


def _rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[$__rate_interval]))"


def _quantile(share: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))"
    )


ROWS: Final[dict[str, list[Panel]]] = {
    "API": [
        Panel("Answers", "reqps", {"{{status}}": _rate("web_requests_total", "status")}),
        Panel(
            "Time to the last byte, p99",
            "s",
            {"{{route}}": f"topk(8, {_quantile(0.99, 'web_request_seconds', 'route')})"},
        ),
        Panel(
            "Calls without an answer of Valkey",
            "ops",
            {"{{outcome}}": _rate("valkey_multiplexed_failures_total", "outcome")},
        ),
    ],
    "Jobs": [
        Panel(
            "Enqueued and given back",
            "ops",
            {
                "enqueued": _rate("jobs_enqueued_total"),
                "{{outcome}}": _rate("jobs_finished_total", "outcome"),
            },
        ),
        Panel(
            "From due to claimed",
            "s",
            {
                "p50": _quantile(0.5, "jobs_wait_seconds"),
                "p99": _quantile(0.99, "jobs_wait_seconds"),
            },
        ),
        Panel(
            "Run time of handlers",
            "s",
            {
                "p50": _quantile(0.5, "jobs_run_seconds"),
                "p99": _quantile(0.99, "jobs_run_seconds"),
            },
        ),
        Panel(
            "Backlog of the largest queues",
            "none",
            {"{{queue}}": 'topk(8, max by (queue) (jobs_queue_jobs{state="ready"}))'},
        ),
        Panel(
            "Age of the oldest ready job",
            "s",
            {"{{queue}}": "topk(8, max by (queue) (jobs_queue_oldest_seconds))"},
        ),
        Panel(
            "Failed and quarantined",
            "none",
            {
                "{{queue}} {{state}}": (
                    'topk(8, max by (queue, state) (jobs_queue_jobs{state=~"failed|quarantined"}))'
                )
            },
        ),
        Panel("Done by queue", "ops", {"{{queue}}": _rate("jobs_queue_settled_total", "queue")}),
        Panel("Slots", "none", {"slots": "sum(agent_slots)"}),
        Panel("Slots that ended", "ops", {"{{how}}": _rate("agent_slots_ended_total", "how")}),
        Panel("Alerts open", "none", {"{{rule}}": "max by (rule) (jobs_alerts_open)"}),
    ],
    "Fetch": [
        Panel("Photos decided", "ops", {"{{outcome}}": _rate("fetch_photos_total", "outcome")}),
        Panel("Bytes received", "Bps", {"bytes": _rate("fetch_received_bytes_total")}),
        Panel(
            "Messages to webhooks",
            "ops",
            {"{{outcome}}": _rate("fetch_webhook_posts_total", "outcome")},
        ),
    ],
    "Views": [
        Panel("Views stored", "ops", {"views": _rate("views_flushed_total")}),
        Panel(
            "Age of the oldest hit not in PostgreSQL", "s", {"lag": "max(views_flush_lag_seconds)"}
        ),
        Panel("Rows written", "ops", {"rows": _rate("views_flushed_rows_total")}),
    ],
    "Feed": [
        Panel("Pages by source", "ops", {"{{source}}": _rate("feed_pages_total", "source")}),
        Panel("Age of the oldest change not swept", "s", {"lag": "max(feed_sweep_lag_seconds)"}),
        Panel(
            "Changes of the index", "ops", {"{{outcome}}": _rate("feed_changes_total", "outcome")}
        ),
    ],
    "Media": [
        Panel("Answers", "reqps", {"{{status}}": _rate("media_requests_total", "status")}),
        Panel("Bytes sent, by source", "Bps", {"{{source}}": _rate("media_bytes_total", "source")}),
        Panel(
            "Time to the first byte",
            "s",
            {
                "p50": _quantile(0.5, "media_ttfb_seconds"),
                "p99": _quantile(0.99, "media_ttfb_seconds"),
            },
        ),
        Panel("Clients", "none", {"clients": "sum(media_connections)"}),
        Panel("Answers cut", "ops", {"{{reason}}": _rate("media_cuts_total", "reason")}),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    shown: list[dict[str, Any]] = []
    top = 0
    for title, panels in ROWS.items():
        shown.append(_row(title, len(shown) + 1, top))
        top += 1
        for start in range(0, len(panels), 3):
            line = panels[start : start + 3]
            width = COLUMNS // len(line)
            for place, panel in enumerate(line):
                box = {"x": place * width, "y": top, "w": width, "h": HEIGHT}
                shown.append(_chart(panel, len(shown) + 1, box))
            top += HEIGHT
    return {
        "title": "Headrace",
        "uid": "headrace",
        "tags": ["headrace"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": shown,
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
            ]
        },
    }


def _row(title: str, number: int, top: int) -> dict[str, Any]:
    box = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": box,
        "panels": [],
    }


def _chart(panel: Panel, number: int, box: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend,
        }
        for place, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": box,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
    }


def main() -> int:
    """Write the file, or check it; returns the exit code."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if FILE.exists() and FILE.read_text() == text:
        return 0
    if "--check" in sys.argv:
        print(f"not up to date: {FILE.name}")
        return 1
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text)
    print(f"written: {FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
