-- name: set_lane
-- Set a lane's own limits, pause and weight, live, NULL for these two: as they are; or let it follow its limiter again.
SELECT headrace.set_lane_v1(
    :limiter, :lane, :is_own, :starts_max::integer, :window_s::double precision,
    :concurrency::integer, :is_paused::boolean, :weight::integer);

-- name: pause_lane
-- Pause or resume a lane; the rest of it stays.
SELECT headrace.pause_lane_v1(:limiter, :lane, :is_paused);

-- name: find_lanes
-- Lanes of a limiter by name, the one of :lane or up to :lanes_max after :after, with what waits, journal included; a
-- lane that nobody claimed from yet is in the journal alone, and will have its limiter's limits.
SELECT l.limiter, l.name, l.starts_max, l.window_s, l.concurrency, l.paused, l.weight, l.inflight, l.is_own,
       coalesce((SELECT sum(w.waiting) FROM headrace.lane_queue w
                 WHERE w.limiter = l.limiter AND w.lane = l.name), 0)
           + coalesce(e.waiting, 0) AS waiting,
       (SELECT coalesce(sum(s.n), 0) FROM unnest(l.at, l.n) AS s(at, n)
        WHERE s.at > now() - (l.window_s + l.slack_s) * interval '1 s' AND s.n < 1000000000) AS starts_live,
       CASE WHEN l.free_at > now() THEN l.free_at END AS next_at
FROM (
    (SELECT limiter, name, starts_max, window_s, slack_s, concurrency, paused, weight, inflight, is_own,
            at, n, free_at
     FROM headrace.lane
     WHERE limiter = :limiter AND name > :after AND (:lane::text IS NULL OR name = :lane::text)
     ORDER BY name LIMIT :lanes_max)
    UNION ALL
    SELECT v.limiter, v.lane, m.starts_max, m.window_s, m.slack_s, m.concurrency, false, 1, 0, false,
           '{}', '{}', NULL
    FROM headrace.lane_event v LEFT JOIN headrace.limiter m ON m.name = v.limiter
    WHERE v.limiter = :limiter AND v.lane > :after AND (:lane::text IS NULL OR v.lane = :lane::text)
      AND NOT EXISTS (SELECT FROM headrace.lane o WHERE o.limiter = v.limiter AND o.name = v.lane)
    GROUP BY v.limiter, v.lane, m.name HAVING sum(v.k) > 0
    ORDER BY name LIMIT :lanes_max
) l LEFT JOIN (
    SELECT v.lane, sum(v.k) AS waiting FROM headrace.lane_event v
    WHERE v.limiter = :limiter AND (:lane::text IS NULL OR v.lane = :lane::text) GROUP BY v.lane
) e ON e.lane = l.name
ORDER BY l.name;

-- name: spend
-- Take further starts out of a lane; seconds until they may begin, or NULL: refused.
SELECT headrace.spend_v1(:limiter, :lane, :starts, :wait_max_s);

-- name: spend_of_queue
-- The same for a lane of a queue's limiter.
SELECT headrace.spend_v1(q.limiter, :lane, :starts, :wait_max_s) FROM headrace.queue q WHERE q.id = :queue;

-- name: set_limiter
-- Write a limiter's limits; whether its lanes are still to follow.
SELECT headrace.set_limiter_v1(
    :limiter, :starts_max::integer, :window_s::double precision, :slack_s, :concurrency::integer,
    :is_set);

-- name: reset_limiter
-- Take a person's word back: the limits that code declared, none where it declared none.
UPDATE headrace.limiter SET is_set = false, is_spread = false,
    starts_max = declared_starts_max, window_s = declared_window_s,
    slack_s = coalesce(declared_slack_s, 0.25), concurrency = declared_concurrency
WHERE name = :limiter AND is_set RETURNING name;

-- name: spread_limiter
-- Let up to :lanes_max lanes after :after follow their limiter; the last of them, NULL: that was all.
SELECT headrace.spread_limiter_v1(:limiter, :after, :lanes_max);

-- name: unspread_limiters
-- Limiters whose lanes do not all follow yet, since whoever changed them did not finish.
SELECT name FROM headrace.limiter WHERE NOT is_spread;

-- name: find_limiters
-- Limiters by name, all or the one of :limiter; those that only queues name, too.
SELECT n.name, m.starts_max, m.window_s, coalesce(m.slack_s, 0.25) AS slack_s, m.concurrency,
       coalesce(m.is_set, false) AS is_set,
       ARRAY(SELECT q.name FROM headrace.queue q WHERE q.limiter = n.name ORDER BY q.name) AS queues
FROM (SELECT name FROM headrace.limiter UNION SELECT limiter FROM headrace.queue) n
LEFT JOIN headrace.limiter m ON m.name = n.name
WHERE :limiter::text IS NULL OR n.name = :limiter::text ORDER BY n.name;

-- name: remove_idle_lanes
-- Remove idle ones of the next :lanes_max lanes that follow their limiter; where it came to, NULL: the end.
SELECT * FROM headrace.remove_idle_lanes_v1(:limiter, :lane, :lanes_max, :idle_s);
