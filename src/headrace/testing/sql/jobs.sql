-- name: waiting_jobs
-- Waiting jobs of one queue or of all queues, oldest first.
SELECT j.id, q.name AS queue, j.run_at, j.priority, j.lane, j.unique_key, j.payload
FROM (SELECT id, queue, run_at, priority, lane, unique_key, payload FROM headrace.job_ready
      UNION ALL
      SELECT id, queue, run_at, priority, lane, unique_key, payload FROM headrace.lane_job) j
JOIN headrace.queue q ON q.id = j.queue
WHERE :queue::text IS NULL OR q.name = :queue::text
ORDER BY j.id;

-- name: count_due
-- The number of due jobs of :queues.
SELECT (SELECT count(*) FROM headrace.job_ready
        WHERE queue = ANY(:queues::integer[]) AND run_at <= now())
     + (SELECT count(*) FROM headrace.lane_job WHERE queue = ANY(:queues::integer[]));
