-- name: drop_failed
-- Forget up to :jobs_max ended jobs that were kept longer than :kept_s.
DELETE FROM headrace.job_failed WHERE id IN (
    SELECT id FROM headrace.job_failed
    WHERE ended_at < now() - :kept_s::double precision * interval '1 s'
    ORDER BY ended_at LIMIT :jobs_max);

-- name: find_job
-- A job by id wherever it is; its state is told from the place and the clock.
SELECT r.id, CASE WHEN r.run_at > now() THEN 'scheduled' ELSE 'ready' END AS state,
       q.name AS queue, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key, r.group_id,
       NULL::text AS host, NULL::bigint AS lease_id, NULL::timestamptz AS ended_at,
       r.last_error AS error, NULL::text AS traceback, r.payload
FROM headrace.job_ready r JOIN headrace.queue q ON q.id = r.queue WHERE r.id = :job
UNION ALL
SELECT r.id, 'ready', q.name, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key,
       r.group_id, NULL, NULL, NULL, r.last_error, NULL, r.payload
FROM headrace.lane_job r JOIN headrace.queue q ON q.id = r.queue WHERE r.id = :job
UNION ALL
SELECT r.id, r.state, q.name, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key,
       r.group_id, NULL, NULL, r.ended_at, r.error, r.traceback, r.payload
FROM headrace.job_failed r JOIN headrace.queue q ON q.id = r.queue WHERE r.id = :job;

-- name: find_leased_job
-- A job by id among those handed out and not settled; reads the lease rows, one a batch.
SELECT r.id, 'leased' AS state, q.name AS queue, r.priority, r.run_at, r.attempt, r.losses, r.lane,
       r.unique_key, r.group_id, coalesce(h.name, 'a host that is gone') AS host, l.id AS lease_id,
       NULL::timestamptz AS ended_at, NULL::text AS error, NULL::text AS traceback, r.payload
FROM headrace.job_lease l
JOIN headrace.queue q ON q.id = l.queue
LEFT JOIN headrace.host h ON h.id = l.host
CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses, l.lanes,
                     l.unique_keys, l.payloads)
    AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key, payload)
WHERE :job = ANY(l.ids) AND :job <> ALL(l.settled) AND r.id = :job;

-- name: newest_job
-- The greatest id given so far; 0 before the first.
SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM headrace.job_id;

-- name: why_waiting
-- What keeps a due job where it is: pauses, limits, hosts, slots, and how many go before it, up to :count_max.
SELECT * FROM headrace.why_waiting_v1(:job, :count_max);

-- name: retries_of
-- How often a failed job of a queue runs again.
SELECT coalesce(o.retries, q.retries) FROM headrace.queue q
LEFT JOIN headrace.queue_override o ON o.queue = q.id WHERE q.name = :queue;

-- name: list_jobs
-- Jobs that fit, at most :jobs_max of each place; rows without a state say how far a search that was cut off came.
SELECT s.*, q.name AS queue_name, coalesce(h.name, CASE WHEN l.id IS NOT NULL THEN 'a host that is gone' END)
           AS host
FROM headrace.list_jobs_v1(:queue::integer, :states::text[], :lane, :q, :older_than_s, :ids::bigint[],
                           :before, :jobs_max, :window) s
LEFT JOIN headrace.queue q ON q.id = s.queue
LEFT JOIN headrace.job_lease l ON l.id = s.lease_id
LEFT JOIN headrace.host h ON h.id = l.host;

-- name: list_ids
-- The same, ids and states alone.
SELECT s.id, s.state
FROM headrace.list_jobs_v1(:queue::integer, :states::text[], :lane, :q, :older_than_s, :ids::bigint[],
                           :before, :jobs_max, :window) s;
