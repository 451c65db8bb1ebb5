"""What must hold in the lanes' books at any moment, whoever was killed.

For tests that end with a look at them.
"""

from __future__ import annotations

from headrace.engines.sql import compile_query

_BOOKS = """
    -- What contradicts itself.
    WITH rows AS (
        SELECT q.limiter, j.lane, j.queue, count(*) AS n FROM headrace.lane_job j
        JOIN headrace.queue q ON q.id = j.queue GROUP BY 1, 2, 3
    ), journal AS (
        SELECT limiter, lane, queue, sum(k) AS n FROM headrace.lane_event GROUP BY 1, 2, 3
    ), counted AS (
        SELECT limiter, lane, queue, waiting AS n FROM headrace.lane_queue
    ), leased AS (
        SELECT l.limiter, u.lane, count(*) AS n
        FROM headrace.job_lease l, unnest(l.ids, l.lanes) AS u(id, lane)
        WHERE l.limiter IS NOT NULL AND u.id <> ALL(l.settled) GROUP BY 1, 2
    )
    SELECT 'waiting + journal = rows' AS rule, limiter, lane,
           coalesce(w.n, 0) + coalesce(e.n, 0) AS found, coalesce(r.n, 0) AS expected
    FROM counted w FULL JOIN rows r USING (limiter, lane, queue)
    FULL JOIN journal e USING (limiter, lane, queue)
    WHERE coalesce(w.n, 0) + coalesce(e.n, 0) <> coalesce(r.n, 0)
    UNION ALL
    SELECT 'in flight = leased', coalesce(l.limiter, d.limiter), coalesce(l.name, d.lane),
           coalesce(l.inflight, 0), coalesce(d.n, 0)
    FROM headrace.lane l FULL JOIN leased d ON d.limiter = l.limiter AND d.lane = l.name
    WHERE coalesce(l.inflight, 0) <> coalesce(d.n, 0)
    UNION ALL
    SELECT 'parked with work', w.limiter, w.lane, w.waiting, 0 FROM headrace.lane_queue w
    JOIN headrace.lane l ON l.limiter = w.limiter AND l.name = w.lane
    WHERE w.ready_at = 'infinity' AND w.waiting > 0 AND NOT l.paused
      AND coalesce(l.inflight < l.concurrency, true)
    UNION ALL
    SELECT 'armed without work', w.limiter, w.lane, w.waiting, 0 FROM headrace.lane_queue w
    WHERE w.ready_at < 'infinity' AND w.waiting <= 0
    UNION ALL
    SELECT 'a queue of a lane that is not there', w.limiter, w.lane, w.waiting, 0
    FROM headrace.lane_queue w
    WHERE NOT EXISTS (SELECT FROM headrace.lane l WHERE l.limiter = w.limiter AND l.name = w.lane)
    UNION ALL
    SELECT 'a log as long as its counts', l.limiter, l.name, cardinality(l.at), cardinality(l.n)
    FROM headrace.lane l WHERE cardinality(l.at) <> cardinality(l.n)
"""


async def broken_books(runner):
    """Every line of the lanes' books that contradicts another; none when all is well."""
    rows = await runner.all(compile_query("books", _BOOKS))
    return [tuple(row) for row in rows]


def most_in_a_window(starts, window_s):
    """The most starts in any window of that length."""
    starts = sorted(starts)
    most, first = 0, 0
    for index, start in enumerate(starts):
        while starts[first] <= start - window_s:
            first += 1
        most = max(most, index - first + 1)
    return most
