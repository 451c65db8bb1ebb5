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

-- name: enqueue
-- Insert jobs; their ids in order, or for a taken key the id of the job that has it.
SELECT penstock.enqueue_v1(
    :queues::integer[], :priorities::smallint[], :run_ats::timestamptz[],
    :delays_s::double precision[], :lanes::text[], :keys::text[], :groups::bigint[],
    :payloads::bytea[], :traceparent, :is_hinted);

-- name: add_groups
-- Insert groups with their callbacks; a group without members calls back at once.
SELECT penstock.add_groups_v1(
    :pending::integer[], :queues::integer[], :priorities::smallint[], :run_ats::timestamptz[],
    :delays_s::double precision[], :lanes::text[], :keys::text[], :payloads::bytea[],
    :traceparent);

-- name: hint_queue
-- Tell listening workers that a queue has work.
SELECT pg_notify('penstock_jobs', :queue::text);

-- name: claim_ready
-- Lease up to :jobs_max due jobs of a queue past the scan marks; one row always.
SELECT * FROM penstock.claim_ready_v1(
    :host, :queue, :jobs_max, :priorities::smallint[], :marks_at::timestamptz[],
    :marks_id::bigint[]);

-- name: claim_lanes
-- Lease up to :jobs_max jobs of a queue's lanes within their limits; one row always.
SELECT * FROM penstock.claim_lanes_v1(:host, :queue, :jobs_max, :lanes_max, :quantum);

-- name: settle
-- Settle jobs of a lease (ids NULL: all left); false: the lease is gone.
SELECT penstock.settle_v1(
    :lease, :ids::bigint[], :outcomes::text[], :delays_s::double precision[], :errors::text[],
    :tracebacks::text[]);

-- name: lock_lease
-- Hold a lease until the end of the transaction, if it still is there.
SELECT 1 FROM penstock.job_lease WHERE id = :lease FOR SHARE;

-- name: add_host
-- Register a host; its leases hang on this row.
INSERT INTO penstock.host (name, queues, expires_at)
VALUES (:name, :queues::integer[], now() + :lease_s::double precision * interval '1 s')
RETURNING id;

-- name: renew_host
-- Renew every lease of a host at once; no row: it expired, its jobs are lost to it.
UPDATE penstock.host SET expires_at = now() + :lease_s::double precision * interval '1 s'
WHERE id = :host AND expires_at > now() RETURNING 1;

-- name: remove_host
-- Take a host away; leases that it still has are returned by the next sweep.
DELETE FROM penstock.host WHERE id = :host;

-- name: leases_of_host
-- The leases that a host has, to be compared with what it knows of.
SELECT id FROM penstock.job_lease WHERE host = :host;

-- name: expired_leases
-- Leases whose host expired or is gone, oldest first, at most :leases_max.
SELECT l.id FROM penstock.job_lease l LEFT JOIN penstock.host h ON h.id = l.host
WHERE h.id IS NULL OR h.expires_at <= now() ORDER BY l.id LIMIT :leases_max;

-- name: return_lease
-- Return one lease of a host that is no more; how many jobs went back.
SELECT penstock.return_lease_v1(:lease, :losses_max);

-- name: drop_hosts
-- Remove expired hosts that hold no lease any more.
DELETE FROM penstock.host h WHERE h.expires_at <= now()
AND NOT EXISTS (SELECT FROM penstock.job_lease l WHERE l.host = h.id);

-- name: move_due
-- Move up to :jobs_max jobs of lanes that became due from job_ready into their lanes.
WITH due AS (
    DELETE FROM penstock.job_ready WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM penstock.job_ready WHERE lane IS NOT NULL AND run_at <= now()
        ORDER BY run_at LIMIT :jobs_max FOR UPDATE SKIP LOCKED))
    RETURNING *
), moved AS (
    INSERT INTO penstock.lane_job
        (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent, payload)
    SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent, payload
    FROM due RETURNING queue, lane
), told AS (
    INSERT INTO penstock.lane_event (limiter, lane, queue, k)
    SELECT q.limiter, m.lane, m.queue, count(*)
    FROM moved m JOIN penstock.queue q ON q.id = m.queue GROUP BY 1, 2, 3
)
SELECT count(*) FROM moved;

-- name: drop_failed
-- Forget up to :jobs_max ended jobs that were kept longer than :kept_s.
DELETE FROM penstock.job_failed WHERE id IN (
    SELECT id FROM penstock.job_failed
    WHERE ended_at < now() - :kept_s::double precision * interval '1 s'
    ORDER BY ended_at LIMIT :jobs_max);

-- name: find_job
-- A job by id wherever it is; its state is told from the place and the clock.
SELECT r.id, CASE WHEN r.run_at > now() THEN 'scheduled' ELSE 'ready' END AS state,
       q.name AS queue, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key, r.group_id,
       NULL::text AS host, NULL::bigint AS lease_id, NULL::timestamptz AS ended_at,
       NULL::text AS error, NULL::text AS traceback, r.payload
FROM penstock.job_ready r JOIN penstock.queue q ON q.id = r.queue WHERE r.id = :job
UNION ALL
SELECT r.id, 'ready', q.name, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key,
       r.group_id, NULL, NULL, NULL, NULL, NULL, r.payload
FROM penstock.lane_job r JOIN penstock.queue q ON q.id = r.queue WHERE r.id = :job
UNION ALL
SELECT r.id, r.state, q.name, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key,
       r.group_id, NULL, NULL, r.ended_at, r.error, r.traceback, r.payload
FROM penstock.job_failed r JOIN penstock.queue q ON q.id = r.queue WHERE r.id = :job;

-- name: find_leased_job
-- A job by id among those handed out and not settled; reads the lease rows, one a batch.
SELECT r.id, 'leased' AS state, q.name AS queue, r.priority, r.run_at, r.attempt, r.losses, r.lane,
       r.unique_key, r.group_id, coalesce(h.name, 'a host that is gone') AS host, l.id AS lease_id,
       NULL::timestamptz AS ended_at, NULL::text AS error, NULL::text AS traceback, r.payload
FROM penstock.job_lease l
JOIN penstock.queue q ON q.id = l.queue
LEFT JOIN penstock.host h ON h.id = l.host
CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses, l.lanes,
                     l.unique_keys, l.payloads)
    AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key, payload)
WHERE :job = ANY(l.ids) AND :job <> ALL(l.settled) AND r.id = :job;

-- name: newest_job
-- The greatest id given so far; 0 before the first.
SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM penstock.job_id;

-- name: why_waiting
-- What bears on a waiting job of a queue and a lane: pauses, the lane's allowance, living hosts.
SELECT q.paused,
       EXISTS (SELECT FROM penstock.host h
               WHERE h.expires_at > now() AND q.id = ANY(h.queues)) AS is_worked,
       l.paused AS is_lane_paused, l.inflight, l.concurrency, l.starts_max, l.window_s,
       CASE WHEN l.free_at > now() THEN l.free_at END AS free_at
FROM penstock.queue q
LEFT JOIN penstock.lane l ON l.limiter = q.limiter AND l.name = :lane::text
WHERE q.name = :queue;

-- name: cancel_job
-- Cancel a waiting job; false: it does not wait.
SELECT penstock.cancel_v1(:job);

-- name: retry_ended
-- Give an ended job another life; false: it is not among the ended.
SELECT penstock.retry_ended_v1(:job);

-- name: ended_jobs
-- Jobs that ended failed, cancelled or quarantined, newest id first, below :before.
SELECT r.id, r.state, q.name AS queue, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key,
       r.group_id, NULL::text AS host, NULL::bigint AS lease_id, r.ended_at, r.error, r.traceback,
       r.payload
FROM penstock.job_failed r JOIN penstock.queue q ON q.id = r.queue
WHERE (:queue::text IS NULL OR q.name = :queue::text)
  AND (:state::text IS NULL OR r.state = :state::text)
  AND (:before::bigint IS NULL OR r.id < :before::bigint)
ORDER BY r.id DESC LIMIT :jobs_max;

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
