-- name: rename_queues
-- Rename queues in place whose code gave them a new name: the first of :olds that is stored.
WITH chosen AS (
    SELECT DISTINCT ON (r.name) q.id, r.name
    FROM unnest(:olds::text[], :names::text[]) WITH ORDINALITY AS r(old, name, ord)
    JOIN headrace.queue q ON q.name = r.old
    WHERE NOT EXISTS (SELECT FROM headrace.queue n WHERE n.name = r.name)
    ORDER BY r.name, r.ord
)
UPDATE headrace.queue q SET name = c.name FROM chosen c WHERE q.id = c.id;

-- name: declare_queues
-- Store the queues that running code declares. A name that is now an alias is skipped.
INSERT INTO headrace.queue AS q
    (name, limiter, batch, retries, timeout_s, importance, slots_min, slots_max, tag, keep_done_s,
     keep_result, needs_lane, decisions)
SELECT r.name, r.limiter, r.batch, r.retries, r.timeout_s, r.importance, r.slots_min, r.slots_max,
       r.tag, r.keep_done_s, r.keep_result, r.needs_lane, r.decisions::text
FROM json_to_recordset(:queues::json) AS r(
    name text, limiter text, batch integer, retries integer, timeout_s double precision,
    importance smallint, slots_min integer, slots_max integer, tag text,
    keep_done_s double precision, keep_result boolean, needs_lane boolean, decisions json)
WHERE NOT EXISTS (SELECT FROM headrace.queue_alias a WHERE a.name = r.name)
   OR EXISTS (SELECT FROM headrace.queue n WHERE n.name = r.name)
ORDER BY r.name
ON CONFLICT (name) DO UPDATE SET
    batch = excluded.batch, retries = excluded.retries, timeout_s = excluded.timeout_s,
    importance = excluded.importance, slots_min = excluded.slots_min,
        slots_max = excluded.slots_max,
    tag = excluded.tag, keep_done_s = excluded.keep_done_s, keep_result = excluded.keep_result,
    needs_lane = excluded.needs_lane, decisions = excluded.decisions, declared_at = now(),
    is_removed = false
WHERE (q.batch, q.retries, q.timeout_s, q.importance, q.slots_min, q.slots_max, q.tag,
    q.keep_done_s,
       q.keep_result, q.needs_lane, q.decisions, q.is_removed)
    IS DISTINCT FROM (excluded.batch, excluded.retries, excluded.timeout_s, excluded.importance,
                      excluded.slots_min, excluded.slots_max, excluded.tag, excluded.keep_done_s,
                      excluded.keep_result, excluded.needs_lane, excluded.decisions, false);

-- name: declare_aliases
-- Store :olds as aliases of the queues :names, unless queues of those names exist.
INSERT INTO headrace.queue_alias AS a (name, queue)
SELECT DISTINCT ON (r.old) r.old, q.id
FROM unnest(:olds::text[], :names::text[]) AS r(old, name)
JOIN headrace.queue q ON q.name = r.name
WHERE NOT EXISTS (SELECT FROM headrace.queue o WHERE o.name = r.old)
ORDER BY r.old
ON CONFLICT (name) DO UPDATE SET queue = excluded.queue WHERE a.queue <> excluded.queue;

-- name: find_queues
-- Ids and limiters of queues by name or alias. NULL: all of them.
SELECT q.id, q.name, q.limiter, false AS is_alias, q.needs_lane FROM headrace.queue q
WHERE NOT q.is_removed AND (:names::text[] IS NULL OR q.name = ANY(:names::text[]))
UNION ALL
SELECT q.id, a.name, q.limiter, true, q.needs_lane FROM headrace.queue_alias a
JOIN headrace.queue q ON q.id = a.queue
WHERE (:names::text[] IS NULL OR a.name = ANY(:names::text[])) AND NOT q.is_removed
  AND NOT EXISTS (SELECT FROM headrace.queue n WHERE n.name = a.name);

-- name: queue_settings
-- The settings of a queue by name or alias, and the overrides among them.
SELECT s.* FROM headrace.queue_setting s
WHERE NOT s.is_removed AND (s.name = :queue
    OR s.id = (SELECT a.queue FROM headrace.queue_alias a WHERE a.name = :queue))
ORDER BY s.name <> :queue LIMIT 1;

-- name: names_like
-- Queues, crons and limiters whose name contains a text; those that begin with it first.
SELECT n.kind, n.name FROM (
    SELECT 'queue' AS kind, name FROM headrace.queue WHERE NOT is_removed
    UNION ALL SELECT 'cron', name FROM headrace.cron
    UNION ALL SELECT 'limiter', name FROM headrace.limiter
) n WHERE strpos(lower(n.name), lower(:part)) > 0
ORDER BY strpos(lower(n.name), lower(:part)) > 1, n.kind = 'limiter', n.name LIMIT :rows_max;

-- name: override_queue
-- Override the settings of a queue. NULL: as declared by code.
INSERT INTO headrace.queue_override (queue, importance, slots_min, slots_max, retries, decisions)
SELECT q.id, :importance::smallint, :slots_min::integer, :slots_max::integer, :retries::integer,
       :decisions::text
FROM headrace.queue q WHERE q.name = :queue
ON CONFLICT (queue) DO UPDATE SET
    importance = excluded.importance, slots_min = excluded.slots_min,
    slots_max = excluded.slots_max, retries = excluded.retries, decisions = excluded.decisions
RETURNING pg_notify('headrace_fleet', '');

-- name: change_limiter
-- Change the limiter of a queue. No row: jobs of it have been in lanes.
UPDATE headrace.queue q SET limiter = :limiter
WHERE q.id = :queue
  AND NOT EXISTS (SELECT FROM headrace.lane_queue l WHERE l.queue = q.id AND l.limiter <> :limiter)
  AND NOT EXISTS (SELECT FROM headrace.lane_event e WHERE e.queue = q.id)
RETURNING q.id;

-- name: notify_queue
-- Notify listening workers that a queue has work.
SELECT pg_notify('headrace_jobs', :queue::text);

-- name: create_queue
-- Create a queue without code, unless the name exists.
INSERT INTO headrace.queue AS q (name, limiter) VALUES (:queue, :queue)
ON CONFLICT (name) DO UPDATE SET is_removed = false WHERE q.is_removed;

-- name: queue_uses
-- What keeps a queue from being removed.
SELECT u.use FROM headrace.queue q CROSS JOIN LATERAL (VALUES
    ('waiting jobs', EXISTS (SELECT FROM headrace.job_ready j WHERE j.queue = q.id)
        OR EXISTS (SELECT FROM headrace.lane_job j WHERE j.queue = q.id)),
    ('leased jobs', EXISTS (SELECT FROM headrace.job_lease l WHERE l.queue = q.id)),
    ('failed, cancelled or quarantined jobs',
        EXISTS (SELECT FROM headrace.job_failed f WHERE f.queue = q.id)),
    ('crons', EXISTS (SELECT FROM headrace.cron c WHERE c.queue = q.name)),
    ('hosts that run its code', EXISTS (SELECT FROM headrace.host h
        WHERE h.kind <> 'taker' AND h.expires_at > now() AND q.id = ANY(h.queues)))
) AS u(use, is_used) WHERE q.name = :queue AND u.is_used;

-- name: remove_queue
-- Hide a queue and delete its overrides.
WITH removed AS (
    UPDATE headrace.queue SET is_removed = true, paused = false WHERE name = :queue RETURNING id
)
DELETE FROM headrace.queue_override o USING removed r WHERE o.queue = r.id;

-- name: restore_queues
-- Show removed queues again that have got jobs since.
UPDATE headrace.queue q SET is_removed = false
WHERE q.is_removed AND (
    EXISTS (SELECT FROM headrace.job_ready j WHERE j.queue = q.id)
    OR EXISTS (SELECT FROM headrace.lane_job j WHERE j.queue = q.id)
    OR EXISTS (SELECT FROM headrace.job_failed f WHERE f.queue = q.id));

-- name: queue_statuses
-- Every queue, or the queue :queue, with its settings and backlog, counted up to :count_max.
SELECT s.*, c.ready + c.laned AS ready, c.scheduled, c.leased, c.failed, c.slots, c.is_known,
       c.ready + c.laned >= :count_max::integer AS ready_is_capped,
       c.scheduled >= :count_max::integer AS scheduled_is_capped,
       c.ended >= :count_max::integer AS failed_is_capped,
       extract(epoch FROM now() - c.oldest_at)::double precision AS oldest_ready_age_s
FROM headrace.queue_counts_v1(:queue, :count_max::integer) c
JOIN headrace.queue_setting s ON s.id = c.queue WHERE NOT s.is_removed ORDER BY s.name;

-- name: set_paused
-- Pause or resume a queue and notify its workers. No row: no such queue.
UPDATE headrace.queue SET paused = :is_paused WHERE name = :queue
RETURNING pg_notify('headrace_jobs', id::text);

-- name: set_lane
-- Set a lane's own limits, let it follow its limiter, or (:is_own NULL) leave its limits. NULL
-- pause or weight: unchanged.
SELECT headrace.set_lane_v1(
    :limiter, :lane, :is_own::boolean, :starts_max::integer, :window_s::double precision,
    :concurrency::integer, :is_paused::boolean, :weight::integer);

-- name: find_lanes
-- Lanes of a limiter by name, the lane :lane or up to :lanes_max after :after, with their waiting
-- jobs, and those in flight as read from the leases. A lane without a claim so far is only in the
-- journal and has its limiter's limits.
SELECT l.limiter, l.name, l.starts_max, l.window_s, l.concurrency, l.paused, l.weight,
       coalesce(f.inflight, 0) AS inflight, l.is_own,
       coalesce((SELECT sum(w.waiting) FROM headrace.lane_queue w
                 WHERE w.limiter = l.limiter AND w.lane = l.name), 0)
           + coalesce(e.waiting, 0) AS waiting,
       (SELECT coalesce(sum(s.n), 0) FROM unnest(l.at, l.n) AS s(at, n)
        WHERE s.at > now() - (l.window_s + l.slack_s) * interval '1 s'
            AND s.n < 1000000000) AS starts_live,
       CASE WHEN l.free_at > now() THEN l.free_at END AS next_at
FROM (
    (SELECT limiter, name, starts_max, window_s, slack_s, concurrency, paused, weight, is_own,
        at, n, free_at
     FROM headrace.lane
     WHERE limiter = :limiter AND name > :after AND (:lane::text IS NULL OR name = :lane::text)
     ORDER BY name LIMIT :lanes_max)
    UNION ALL
    SELECT v.limiter, v.lane, m.starts_max, m.window_s, m.slack_s, m.concurrency, false, 1,
        false, '{}', '{}', NULL
    FROM headrace.lane_event v LEFT JOIN headrace.limiter m ON m.name = v.limiter
    WHERE v.limiter = :limiter AND v.lane > :after AND (:lane::text IS NULL OR v.lane = :lane::text)
      AND NOT EXISTS (SELECT FROM headrace.lane o WHERE o.limiter = v.limiter AND o.name = v.lane)
    GROUP BY v.limiter, v.lane, m.name HAVING sum(v.k) > 0
    ORDER BY name LIMIT :lanes_max
) l LEFT JOIN (
    SELECT v.lane, sum(v.k) AS waiting FROM headrace.lane_event v
    WHERE v.limiter = :limiter AND (:lane::text IS NULL OR v.lane = :lane::text) GROUP BY v.lane
) e ON e.lane = l.name
LEFT JOIN (
    SELECT r.lane, count(*) AS inflight FROM headrace.job_lease j
    CROSS JOIN LATERAL unnest(j.ids, j.lanes) AS r(id, lane)
    WHERE j.limiter = :limiter AND (:lane::text IS NULL OR j.lanes @> ARRAY[:lane::text])
      AND r.id <> ALL(j.settled) GROUP BY r.lane
) f ON f.lane = l.name
ORDER BY l.name;

-- name: spend
-- Consume further starts of a lane. Return the seconds until they may begin; NULL: refused. No
-- row: no such limiter.
SELECT headrace.spend_v1(:limiter, :lane, :starts, :wait_max_s) AS wait_s
WHERE EXISTS (SELECT FROM headrace.limiter m WHERE m.name = :limiter)
   OR EXISTS (SELECT FROM headrace.queue q WHERE q.limiter = :limiter AND NOT q.is_removed);

-- name: spend_of_queue
-- Consume further starts of a lane of a queue's limiter.
SELECT headrace.spend_v1(q.limiter, :lane, :starts, :wait_max_s) FROM headrace.queue q
    WHERE q.id = :queue;

-- name: set_limiter
-- Write a limiter's limits. Return whether its lanes must follow.
SELECT headrace.set_limiter_v1(
    :limiter, :starts_max::integer, :window_s::double precision, :slack_s, :concurrency::integer,
    :is_set);

-- name: reset_limiter
-- Restore the limits that code declared; none if it declared none.
UPDATE headrace.limiter SET is_set = false, is_spread = false,
    starts_max = declared_starts_max, window_s = declared_window_s,
    slack_s = coalesce(declared_slack_s, 0.25), concurrency = declared_concurrency
WHERE name = :limiter AND is_set RETURNING name;

-- name: limiter_uses
-- What keeps a limiter from being removed.
SELECT u.use FROM (VALUES
    ('code that declares its limits', EXISTS (SELECT FROM headrace.limiter m
        WHERE m.name = :limiter AND m.declared_slack_s IS NOT NULL)),
    ('queues', EXISTS (SELECT FROM headrace.queue q
        WHERE q.limiter = :limiter AND NOT q.is_removed)),
    ('jobs in its lanes', EXISTS (SELECT FROM headrace.lane_event e WHERE e.limiter = :limiter)
        OR EXISTS (SELECT FROM headrace.lane_queue w
                   WHERE w.limiter = :limiter AND w.waiting > 0)
        OR EXISTS (SELECT FROM headrace.job_lease l WHERE l.limiter = :limiter))
) AS u(use, is_used) WHERE u.is_used;

-- name: remove_limiter
-- Delete a limiter that no code declares, with its lanes.
WITH gone AS (
    DELETE FROM headrace.limiter WHERE name = :limiter AND declared_slack_s IS NULL RETURNING name
), emptied AS (
    DELETE FROM headrace.lane_queue w USING gone g WHERE w.limiter = g.name
)
DELETE FROM headrace.lane l USING gone g WHERE l.limiter = g.name;

-- name: spread_limiter
-- Apply a limiter's limits to up to :lanes_max lanes after :after. Return the last; NULL: done.
SELECT headrace.spread_limiter_v1(:limiter, :after, :lanes_max);

-- name: unspread_limiters
-- Limiters whose lanes do not all follow yet, since a process stopped in between.
SELECT name FROM headrace.limiter WHERE NOT is_spread;

-- name: find_limiters
-- Limiters by name, all or the one called :limiter, with those that only queues name.
SELECT n.name, m.starts_max, m.window_s, coalesce(m.slack_s, 0.25) AS slack_s, m.concurrency,
       coalesce(m.is_set, false) AS is_set,
       ARRAY(SELECT q.name FROM headrace.queue q WHERE q.limiter = n.name AND NOT q.is_removed
             ORDER BY q.name) AS queues
FROM (SELECT name FROM headrace.limiter
      UNION SELECT limiter FROM headrace.queue WHERE NOT is_removed) n
LEFT JOIN headrace.limiter m ON m.name = n.name
WHERE :limiter::text IS NULL OR n.name = :limiter::text ORDER BY n.name;

-- name: remove_idle_lanes
-- Remove idle lanes among the next :lanes_max. Return the last lane seen; NULL: the end.
SELECT * FROM headrace.remove_idle_lanes_v1(:limiter, :lane, :lanes_max, :idle_s);
