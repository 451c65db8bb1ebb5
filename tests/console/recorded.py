"""A day of history in PostgreSQL, as the recorders of two hosts write it."""

from __future__ import annotations

import json
import math
import random
from datetime import UTC, datetime

from headrace.engines.postgres import Postgres
from headrace.engines.sql import Query

QUEUES = ("mail", "thumbs", "search.index", "fetch.1s", "billing")
INSERT = Query(
    "insert",
    "",
    "INSERT INTO headrace.history_minute SELECT to_timestamp(m.at), m.host, 1, m.center, 60,"
    " m.sums, m.peaks FROM jsonb_to_recordset($1::jsonb)"
    " AS m(at float8, host text, center text, sums jsonb, peaks jsonb) ON CONFLICT DO NOTHING",
    ("rows",),
)
HOURS = Query(
    "hours",
    "",
    "SELECT headrace.sum_history_hour_v1(h.at, h.host) FROM (SELECT DISTINCT"
    " date_trunc('hour', at) AS at, host FROM headrace.history_minute) h",
    (),
)
JOBS = Query(
    "jobs",
    "",
    "INSERT INTO headrace.queue_minute (queue, minute, done, failed, retried, lost, calls, run_s,"
    " wait_s, wait_max_s, slot_s, claimed, ready) SELECT q.id, to_timestamp(m.at), m.done,"
    " m.failed, m.failed, m.lost, m.done, 3, 1, 2, 60, m.done, m.ready"
    " FROM jsonb_to_recordset($1::jsonb)"
    " AS m(queue text, at float8, done bigint, failed bigint, lost bigint, ready integer)"
    " JOIN headrace.queue q ON q.name = m.queue ON CONFLICT DO NOTHING",
    ("rows",),
)
OUTAGES = Query(
    "outages",
    "",
    "INSERT INTO headrace.engine_outage SELECT n, host, 'valkey', '{connection refused}',"
    " to_timestamp($1::float8), to_timestamp($1::float8) + interval '44 s', true"
    " FROM (VALUES (1, 'alpha'), (2, 'beta')) h(n, host) ON CONFLICT DO NOTHING",
    ("at_s",),
)
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


async def record(postgres: Postgres, *, minutes: int) -> None:
    """Write `minutes` of two hosts up to now, with a gap, an outage, a deploy and an incident."""
    now_s = int(datetime.now(UTC).timestamp()) // 60 * 60
    source = random.Random(7)
    rows, jobs = [], []
    for ago in range(minutes, 0, -1):
        at = now_s - ago * 60
        wave = 1 + 0.4 * math.sin(at / 900) + 0.2 * source.random()
        is_bad = 18 <= ago < 24
        for host, share in (("alpha", 1.0), ("beta", 0.6)):
            if not 40 <= ago < 44:
                load = wave * share
                rows.append(
                    {
                        "at": at,
                        "host": host,
                        "center": "north" if host == "alpha" else "south",
                        "sums": sums(load, source, ago, host, is_bad=is_bad),
                        "peaks": {
                            "views_lag": {"all": (9.0 if is_bad else 1.0) * load},
                            "feed_lag": {"all": 0.3 * load},
                            "media_connections": {"all": round(40 * load)},
                        },
                    }
                )
        for place, queue in enumerate(QUEUES):
            done = round(wave * 600 / (place + 1))
            failed = round(done * (0.2 if is_bad and place == 1 else 0.004))
            waiting = round(wave * (90 if is_bad else 10) * place)
            jobs.append(
                {
                    "queue": queue,
                    "at": at,
                    "done": done,
                    "failed": failed,
                    "lost": 4 if is_bad and place == 0 else 0,
                    "ready": waiting,
                }
            )
    await postgres.run(INSERT, rows=json.dumps(rows))
    await postgres.run(OUTAGES, at_s=now_s - 22 * 60.0)
    await postgres.value(HOURS)
    await postgres.run(JOBS, rows=json.dumps(jobs))


def sums(load, source, ago, host, *, is_bad):
    """The growth of one minute."""

    def times(median_s, count):
        found = dict.fromkeys(map(str, BOUNDS), 0.0)
        for _ in range(40):
            value = median_s * (4 if is_bad else 1) * math.exp(source.gauss(0, 0.8))
            bound = next((one for one in BOUNDS if value <= one), BOUNDS[-1])
            found[str(bound)] += round(count * load / 40, 1)
        return found

    found = {
        "jobs_ended": {"done": 900 * load, "fail": 6 * load},
        "jobs_wait": times(0.03, 900),
        "jobs_run": times(0.02, 900),
        "fetch_photos": {
            "stored": 300 * load,
            "unchanged": 120 * load,
            "failed:timeout": (80 if is_bad else 4) * load,
            "refused:not_an_image": 6 * load,
        },
        "fetch_classes": {"1s": 380 * load, "5s": 40 * load, "30s": 8 * load},
        "fetch_first_byte": times(0.12, 400),
        "fetch_bytes": {"all": 4e7 * load},
        "views_hits": {"counted": 5000 * load, "refused": 20 * load},
        "views_flushed": {"all": 4900 * load},
        "feed_posts": {"all": 30 * load},
        "feed_pages": {"index": 800 * load, "postgres": 12 * load},
        "feed_page_time": times(0.002, 800),
        "media_requests": {"200": 300 * load, "206": 2000 * load, "404": 8 * load},
        "media_blocks": {"hit": 2500 * load, "miss": 90 * load},
        "media_bytes": {"memory": 4e8 * load, "disk": 1e8 * load, "origin": 2e7 * load},
        "media_ttfb": times(0.0015, 2300),
        "media_reads": {"stored": 90 * load},
        "http_requests": {"2xx": 3000 * load, "4xx": 60 * load, "5xx": (200 if is_bad else 0)},
        "http_time": times(0.004, 3000),
    }
    if ago in (60, 50) and host == "alpha":
        found["role_starts"] = {f"api {'0.1.0' if ago == 60 else '0.2.0'}": 1}
    return found
