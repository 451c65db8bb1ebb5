-- name: set_lane
-- Set a lane's limits, live.
SELECT penstock.set_lane_v1(
    :limiter, :lane, :starts_max::integer, :window_s::double precision, :concurrency::integer,
    :is_paused, :weight);

-- name: find_lane
-- A lane with what waits in it, journal included.
SELECT l.limiter, l.name, l.starts_max, l.window_s, l.concurrency, l.paused, l.weight, l.inflight,
       (SELECT coalesce(sum(w.waiting), 0) FROM penstock.lane_queue w
        WHERE w.limiter = l.limiter AND w.lane = l.name)
       + (SELECT coalesce(sum(e.k), 0) FROM penstock.lane_event e
          WHERE e.limiter = l.limiter AND e.lane = l.name) AS waiting,
       (SELECT coalesce(sum(s.n), 0) FROM unnest(l.at, l.n) AS s(at, n)
        WHERE s.at > now() - (l.window_s + l.slack_s) * interval '1 s') AS starts_live,
       CASE WHEN l.free_at > now() THEN l.free_at END AS next_at
FROM penstock.lane l WHERE l.limiter = :limiter AND l.name = :lane;
