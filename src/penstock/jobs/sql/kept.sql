-- name: find_done
-- A done job that its queue keeps.
SELECT d.id, 'done' AS state, q.name AS queue, d.priority, d.run_at, d.attempt, d.losses, d.lane, d.unique_key,
       d.group_id, NULL::text AS host, NULL::bigint AS lease_id, d.ended_at, NULL::text AS error,
       NULL::text AS traceback, d.payload, d.result, d.version
FROM penstock.job_done d JOIN penstock.queue q ON q.id = d.queue WHERE d.id = :job;

-- name: tend_kept
-- Make partitions of kept jobs ahead of need, drop those whose time is over; how many of both.
SELECT penstock.tend_kept_v1();

-- name: drop_kept
-- Forget up to :jobs_max kept jobs whose time is over and that are in no partition of their own.
DELETE FROM penstock.job_done_rest WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM penstock.job_done_rest WHERE drop_at <= now() ORDER BY drop_at LIMIT :jobs_max));

-- name: tell_progress
-- Write how far jobs are.
INSERT INTO penstock.job_progress AS p (job_id, ratio, text)
SELECT r.job_id, r.ratio, r.text
FROM unnest(:ids::bigint[], :ratios::real[], :texts::text[]) AS r(job_id, ratio, text) ORDER BY r.job_id
ON CONFLICT (job_id) DO UPDATE SET ratio = excluded.ratio, text = excluded.text, at = now();

-- name: find_progress
-- How far a job said that it is.
SELECT ratio, text, at FROM penstock.job_progress WHERE job_id = :job;

-- name: drop_progress
-- Forget what jobs said long ago: their end was not told.
DELETE FROM penstock.job_progress WHERE at < now() - :kept_s::double precision * interval '1 s';
