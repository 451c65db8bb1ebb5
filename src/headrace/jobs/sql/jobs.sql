-- name: enqueue
-- Insert jobs. Return their ids in order; for a taken key the id of the job that has it.
SELECT headrace.enqueue_v1(
    :queues::integer[], :priorities::smallint[], :run_ats::timestamptz[],
    :delays_s::double precision[], :lanes::text[], :keys::text[], :groups::bigint[],
    :payloads::bytea[], :versions::smallint[], :headers::text[], :is_hinted,
    :key_times_s::double precision[], :chains::text[]);

-- name: enqueue_one
-- Insert one job without lane, key and group, at half the server time of enqueue.
WITH added AS (
    INSERT INTO headrace.job_ready (id, queue, run_at, priority, headers, payload, version)
    VALUES (nextval('headrace.job_id'), :queue::integer,
            greatest(coalesce((:run_ats::timestamptz[])[1],
                              now() + (:delays_s::double precision[])[1] * interval '1 s'), now()),
            :priority::smallint, :headers::text, :payload::bytea, :version::smallint)
    RETURNING id, queue
)
SELECT id, CASE WHEN :is_hinted::boolean THEN pg_notify('headrace_jobs', queue::text) END
    FROM added;

-- name: enqueue_alike
-- Insert jobs without lane, key and group that differ only in payload. Return their ids in order.
WITH added AS (
    INSERT INTO headrace.job_ready (id, queue, run_at, priority, headers, payload, version)
    SELECT nextval('headrace.job_id'), :queue::integer,
           greatest(coalesce((:run_ats::timestamptz[])[1],
                              now() + (:delays_s::double precision[])[1] * interval '1 s'), now()),
           :priority::smallint, :headers::text, r.payload, :version::smallint
    FROM unnest(:payloads::bytea[]) AS r(payload)
    RETURNING id
)
SELECT array_agg(id ORDER BY id),
       CASE WHEN :is_hinted::boolean THEN pg_notify('headrace_jobs', :queue::integer::text) END
FROM added;

-- name: add_groups
-- Insert groups with their callbacks. A group without members calls back at once.
SELECT headrace.add_groups_v1(
    :pending::integer[], :queues::integer[], :priorities::smallint[], :run_ats::timestamptz[],
    :delays_s::double precision[], :lanes::text[], :keys::text[], :payloads::bytea[],
    :versions::smallint[], :headers::text[]);

-- name: move_due
-- Move up to :jobs_max due jobs of lanes from job_ready into their lanes.
WITH due AS (
    DELETE FROM headrace.job_ready WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM headrace.job_ready WHERE lane IS NOT NULL AND run_at <= now()
        ORDER BY run_at LIMIT :jobs_max FOR UPDATE SKIP LOCKED))
    RETURNING *
), moved AS (
    INSERT INTO headrace.lane_job SELECT * FROM due RETURNING queue, lane
), journaled AS (
    INSERT INTO headrace.lane_event (limiter, lane, queue, k)
    SELECT q.limiter, m.lane, m.queue, count(*)
    FROM moved m JOIN headrace.queue q ON q.id = m.queue GROUP BY 1, 2, 3
)
SELECT count(*) FROM moved;

-- name: add_members
-- Insert jobs as members of existing groups. Return their ids in order; NULL if a group does not
-- exist.
SELECT headrace.add_members_v1(
    :groups::bigint[], :queues::integer[], :priorities::smallint[], :run_ats::timestamptz[],
    :delays_s::double precision[], :lanes::text[], :keys::text[], :payloads::bytea[],
    :versions::smallint[], :headers::text[], :is_hinted,
    :key_times_s::double precision[], :chains::text[]);

-- name: seal_groups
-- Remove the extra member that each open group counts. A group without other members calls back.
SELECT headrace.finish_members_v1(
    :groups::bigint[], array_fill('sealed'::text, ARRAY[cardinality(:groups::bigint[])]));

-- name: drop_group
-- Delete a group with its callback. Its members run on alone.
DELETE FROM headrace.job_group WHERE id = :group;

-- name: mark_group_open
-- Record when a group's block was opened.
UPDATE headrace.job_group SET opened_at = now() WHERE id = :group;

-- name: mark_group_closed
-- Record the end of a group's block. No row: the group does not exist any more.
UPDATE headrace.job_group SET opened_at = NULL WHERE id = :group RETURNING id;

-- name: drop_old
-- Delete up to :rows_max rows of :table whose moment :column was :kept_s ago. Return how many.
SELECT headrace.drop_old_v1(:table, :column, :kept_s, :rows_max);

-- name: drop_old_keys
-- Delete up to :keys_max keys of done jobs whose time is over.
DELETE FROM headrace.job_unique WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM headrace.job_unique WHERE kept_until <= now() AND is_done
    LIMIT :keys_max FOR UPDATE SKIP LOCKED));

-- name: find_job
-- A job by id from any table, with its payload. One snapshot: a job that moves is seen once. The
-- tables are read in order until one has it; the leases, one row per batch, are read whole.
SELECT j.*, q.name AS queue_name, p.ratio, p.text, p.at,
       CASE WHEN j.state = 'leased' THEN coalesce(h.name, 'a removed host') END AS host
FROM (
    SELECT r.id, CASE WHEN r.run_at > now() THEN 'scheduled' ELSE 'ready' END AS state, r.queue,
           r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key, r.group_id, r.headers,
           r.payload, r.last_error AS error, NULL::text AS traceback, NULL::bytea AS result,
           NULL::timestamptz AS ended_at, NULL::bigint AS lease_id, NULL::bigint AS host_id
    FROM (SELECT * FROM headrace.job_ready UNION ALL SELECT * FROM headrace.lane_job) r
    WHERE r.id = :job
    UNION ALL
    SELECT r.id, r.state, r.queue, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key,
           r.group_id, r.headers, r.payload, r.error, r.traceback, NULL, r.ended_at, NULL, NULL
    FROM headrace.job_failed r WHERE r.id = :job
    UNION ALL
    SELECT r.id, 'done', r.queue, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key,
           r.group_id, r.headers, r.payload, NULL, NULL, r.result, r.ended_at, NULL, NULL
    FROM headrace.job_done r WHERE r.id = :job
    UNION ALL
    SELECT r.id, 'leased', l.queue, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key,
           r.group_id, r.headers, r.payload, NULL, NULL, NULL, NULL, l.id, l.host
    FROM headrace.job_lease l
    CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses,
                              l.lanes, l.unique_keys, l.payloads, l.headers)
        AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key, payload, headers)
    WHERE :job = ANY(l.ids) AND :job <> ALL(l.settled) AND r.id = :job
    LIMIT 1
) j
JOIN headrace.queue q ON q.id = j.queue
LEFT JOIN headrace.host h ON h.id = j.host_id
LEFT JOIN headrace.job_progress p ON p.job_id = j.id AND j.state = 'leased';

-- name: newest_job
-- The greatest id assigned so far; 0 before the first.
SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM headrace.job_id;

-- name: why_waiting
-- What keeps a due job waiting: pauses, limits, hosts, slots and jobs before it, up to :count_max.
SELECT * FROM headrace.why_waiting_v1(:job, :count_max);

-- name: retries_of
-- Retries of a queue's failed jobs.
SELECT retries FROM headrace.queue_setting WHERE name = :queue;

-- name: list_jobs
-- Matching jobs, at most :jobs_max per table. A row without a state holds the id where a search
-- was cut off.
SELECT s.*, q.name AS queue_name, coalesce(h.name, CASE WHEN l.id IS NOT NULL
    THEN 'a removed host' END)
           AS host
FROM headrace.list_jobs_v1(:queue::integer, :states::text[], :lane, :q, :older_than_s,
    :ids::bigint[],
                           :before, :jobs_max, :window, :from_at, :to_at) s
LEFT JOIN headrace.queue q ON q.id = s.queue
LEFT JOIN headrace.job_lease l ON l.id = s.lease_id
LEFT JOIN headrace.host h ON h.id = l.host;

-- name: list_ids
-- The ids and states of list_jobs.
SELECT s.id, s.state
FROM headrace.list_jobs_v1(:queue::integer, :states::text[], :lane, :q, :older_than_s,
    :ids::bigint[],
                           :before, :jobs_max, :window, :from_at, :to_at) s;

-- name: maintain_done_partitions
-- Create partitions of done jobs ahead of need and drop expired ones. Return how many of both.
SELECT headrace.tend_kept_v1();

-- name: write_progress
-- Store the progress of jobs still open under these leases. The lock keeps an ack from passing
-- between check and write. Leases that are being settled are skipped.
WITH open AS MATERIALIZED (
    SELECT l.id, l.settled FROM headrace.job_lease l WHERE l.id = ANY(:leases::bigint[])
        ORDER BY l.id
    FOR KEY SHARE SKIP LOCKED
)
INSERT INTO headrace.job_progress AS p (job_id, lease_id, ratio, text)
SELECT r.job_id, o.id, r.ratio, r.text
FROM unnest(:ids::bigint[], :leases::bigint[], :ratios::real[], :texts::text[]) AS r(job_id,
    lease_id, ratio, text)
JOIN open o ON o.id = r.lease_id AND r.job_id <> ALL (o.settled) ORDER BY r.job_id
ON CONFLICT (job_id) DO UPDATE SET lease_id = excluded.lease_id, ratio = excluded.ratio,
    text = excluded.text, at = now();

-- name: find_ending
-- How a job ended, if that is kept, with its result.
SELECT 'done' AS state, ''::text AS error, d.result FROM headrace.job_done d WHERE d.id = :job
UNION ALL
SELECT f.state, f.error, NULL FROM headrace.job_failed f WHERE f.id = :job
LIMIT 1;

-- name: end_waiting
-- Cancel waiting jobs. Return the ids of those that waited.
SELECT headrace.end_waiting_v1(:ids::bigint[], true);

-- name: edit_waiting
-- Change a waiting job; NULL: as it is. Return whether it waited.
SELECT headrace.edit_waiting_v1(:job, :payload::bytea, :version::smallint, :priority::smallint,
                                :run_at::timestamptz, :delay_s::double precision);

-- name: retry_jobs
-- Make jobs that ended in :states ready again. Return which, and which stay since their key is
-- taken.
SELECT retried, taken FROM headrace.retry_jobs_v2(:ids::bigint[], :states::text[]);

-- name: delete_jobs
-- Delete jobs in :states. Return the ids of those that existed.
SELECT headrace.delete_jobs_v1(:ids::bigint[], :states::text[]);
