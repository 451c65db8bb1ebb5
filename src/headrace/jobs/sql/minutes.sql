-- name: queue_minutes
-- What a queue did in each minute from :from_at up to before :to_at, oldest first; not minutes of idle slots alone.
SELECT m.minute, m.done, m.failed, m.retried, m.lost, m.calls, m.claimed, m.run_s, m.wait_s, m.wait_max_s, m.slot_s
FROM headrace.queue_minute m
WHERE m.queue = :queue AND m.minute >= :from_at AND m.minute < :to_at
  AND m.done + m.failed + m.retried + m.lost + m.calls + m.claimed > 0
ORDER BY m.minute LIMIT :minutes_max;

-- name: recent_outcomes
-- Jobs that ended done and failed in the last :minutes whole minutes and this one, by queue.
SELECT m.queue, sum(m.done)::bigint AS done, sum(m.failed)::bigint AS failed FROM headrace.queue_minute m
WHERE m.minute >= date_trunc('minute', now()) - :minutes::integer * interval '1 minute' GROUP BY m.queue;

-- name: queue_loads
-- What each queue did since the minute began that was :minutes minutes ago.
SELECT q.name AS queue, sum(m.done)::bigint AS done, sum(m.failed)::bigint AS failed, sum(m.retried)::bigint AS retried,
    sum(m.lost)::bigint AS lost, sum(m.calls)::bigint AS calls, sum(m.claimed)::bigint AS claimed, sum(m.run_s)::float8 AS run_s,
    coalesce(sum(m.wait_s) FILTER (WHERE m.claimed > 0), 0)::float8 AS wait_s,
    max(m.wait_max_s)::float8 AS wait_max_s, sum(m.slot_s)::float8 AS slot_s
FROM headrace.queue_minute m JOIN headrace.queue q ON q.id = m.queue
WHERE m.minute >= date_trunc('minute', now()) - :minutes::integer * interval '1 minute'
GROUP BY q.name ORDER BY q.name;

-- name: load_span
-- Seconds since the minute began that was :minutes minutes ago, or since there are minutes here at all.
SELECT greatest(1.0, extract(epoch FROM now() - greatest(
    date_trunc('minute', now()) - :minutes::integer * interval '1 minute', min(applied_at)))::float8)
FROM headrace.migration WHERE room = 'jobs';

-- name: fleet_minutes
-- What all queues did in each of the last :minutes minutes, this one included, oldest first.
SELECT m.minute, sum(m.done)::bigint AS done, sum(m.failed)::bigint AS failed, sum(m.retried)::bigint AS retried,
    sum(m.run_s)::float8 AS run_s, max(m.wait_max_s)::float8 AS wait_max_s, sum(m.slot_s)::float8 AS slot_s
FROM headrace.queue_minute m
WHERE m.minute > date_trunc('minute', now()) - :minutes::integer * interval '1 minute'
GROUP BY m.minute ORDER BY m.minute;

-- name: recent_failures
-- Jobs that failed or were quarantined in the last :span_s seconds, of the newest :jobs_max, by queue and state.
SELECT q.name AS queue, f.state, count(*)::bigint AS jobs, max(f.ended_at) AS last_at,
    (array_agg(f.error ORDER BY f.ended_at DESC))[1] AS last_error
FROM (
    SELECT queue, state, ended_at, left(error, 200) AS error FROM headrace.job_failed
    WHERE ended_at > now() - :span_s::double precision * interval '1 s' AND state <> 'cancelled'
    ORDER BY ended_at DESC LIMIT :jobs_max
) f JOIN headrace.queue q ON q.id = f.queue
GROUP BY q.name, f.state ORDER BY jobs DESC, q.name;

-- name: fold_counts
-- Add up to :rows_max rows of counts that are not yet added up to minutes and totals; how many.
SELECT headrace.fold_counts_v1(:rows_max);

-- name: drop_minutes
-- Forget minutes that were kept long enough, the oldest first.
DELETE FROM headrace.queue_minute WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM headrace.queue_minute
    WHERE minute < now() - :kept_s::double precision * interval '1 s'
    ORDER BY minute LIMIT :rows_max));
