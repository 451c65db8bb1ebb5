-- name: declare_queues
-- Make the queues of running code known; :limiters are where the lanes of each belong.
INSERT INTO penstock.queue (name, limiter)
SELECT r.name, r.limiter FROM unnest(:names::text[], :limiters::text[]) AS r(name, limiter)
ORDER BY r.name ON CONFLICT (name) DO NOTHING;

-- name: find_queues
-- Ids and limiters of queues by name; NULL: all of them.
SELECT id, name, limiter FROM penstock.queue
WHERE :names::text[] IS NULL OR name = ANY(:names::text[]);

-- name: change_limiter
-- Give a queue another limiter, unless jobs of it ever were in lanes.
UPDATE penstock.queue q SET limiter = :limiter
WHERE q.id = :queue
  AND NOT EXISTS (SELECT FROM penstock.lane_queue l WHERE l.queue = q.id AND l.limiter <> :limiter)
  AND NOT EXISTS (SELECT FROM penstock.lane_event e WHERE e.queue = q.id)
RETURNING q.id;

-- name: hint_queue
-- Tell listening workers that a queue has work.
SELECT pg_notify('penstock_jobs', :queue::text);

-- name: queue_statuses
-- Every queue (or the one of :queue) with its backlog. Counts rows: seconds at ten million jobs.
WITH waiting AS (
    SELECT r.queue, count(*) FILTER (WHERE r.run_at <= now()) AS ready,
           count(*) FILTER (WHERE r.run_at > now()) AS scheduled,
           min(r.run_at) FILTER (WHERE r.run_at <= now()) AS oldest_at
    FROM penstock.job_ready r GROUP BY r.queue
), laned AS (
    SELECT j.queue, count(*) AS ready, min(j.run_at) AS oldest_at FROM penstock.lane_job j GROUP BY j.queue
), leased AS (
    SELECT l.queue, sum(cardinality(l.ids) - cardinality(l.settled)) AS jobs
    FROM penstock.job_lease l GROUP BY l.queue
), failed AS (
    SELECT f.queue, count(*) AS jobs FROM penstock.job_failed f
    WHERE f.state <> 'cancelled' GROUP BY f.queue
)
SELECT q.name, q.limiter, q.paused,
       coalesce(w.ready, 0) + coalesce(n.ready, 0) AS ready, coalesce(w.scheduled, 0) AS scheduled,
       coalesce(l.jobs, 0)::bigint AS leased, coalesce(f.jobs, 0) AS failed,
       extract(epoch FROM now() - least(w.oldest_at, n.oldest_at))::double precision
           AS oldest_ready_age_s
FROM penstock.queue q
LEFT JOIN waiting w ON w.queue = q.id LEFT JOIN laned n ON n.queue = q.id
LEFT JOIN leased l ON l.queue = q.id LEFT JOIN failed f ON f.queue = q.id
WHERE :queue::text IS NULL OR q.name = :queue::text
ORDER BY q.name;

-- name: set_paused
-- Pause or resume a queue and wake its workers; no row: there is no such queue.
UPDATE penstock.queue SET paused = :is_paused WHERE name = :queue
RETURNING pg_notify('penstock_jobs', id::text);
