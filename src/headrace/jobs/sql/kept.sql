-- name: find_done
-- A done job that its queue keeps.
SELECT d.id, 'done' AS state, q.name AS queue, d.priority, d.run_at, d.attempt, d.losses, d.lane, d.unique_key,
       d.group_id, NULL::text AS host, NULL::bigint AS lease_id, d.ended_at, NULL::text AS error,
       NULL::text AS traceback, d.payload, d.result, d.version
FROM headrace.job_done d JOIN headrace.queue q ON q.id = d.queue WHERE d.id = :job;

-- name: tend_kept
-- Make partitions of kept jobs ahead of need, drop those whose time is over; how many of both.
SELECT headrace.tend_kept_v1();

-- name: drop_kept
-- Forget up to :jobs_max kept jobs whose time is over and that are in no partition of their own.
DELETE FROM headrace.job_done_rest WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM headrace.job_done_rest WHERE drop_at <= now() ORDER BY drop_at LIMIT :jobs_max));

-- name: tell_progress
-- Write how far jobs are that are still open under these leases. The lock keeps an ack from
-- passing between check and write; a lease that is being settled is left out.
WITH open AS MATERIALIZED (
    SELECT l.id, l.settled FROM headrace.job_lease l WHERE l.id = ANY(:leases::bigint[]) ORDER BY l.id
    FOR KEY SHARE SKIP LOCKED
)
INSERT INTO headrace.job_progress AS p (job_id, lease_id, ratio, text)
SELECT r.job_id, o.id, r.ratio, r.text
FROM unnest(:ids::bigint[], :leases::bigint[], :ratios::real[], :texts::text[]) AS r(job_id, lease_id, ratio, text)
JOIN open o ON o.id = r.lease_id AND r.job_id <> ALL (o.settled) ORDER BY r.job_id
ON CONFLICT (job_id) DO UPDATE SET lease_id = excluded.lease_id, ratio = excluded.ratio, text = excluded.text, at = now();

-- name: find_progress
-- How far a job said that it is.
SELECT ratio, text, at FROM headrace.job_progress WHERE job_id = :job;
