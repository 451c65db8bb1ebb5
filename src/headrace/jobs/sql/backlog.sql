-- name: enqueue
-- Insert jobs; their ids in order, or for a taken key the id of the job that has it.
SELECT headrace.enqueue_v1(
    :queues::integer[], :priorities::smallint[], :run_ats::timestamptz[],
    :delays_s::double precision[], :lanes::text[], :keys::text[], :groups::bigint[],
    :payloads::bytea[], :versions::smallint[], :traceparent, :is_hinted);

-- name: enqueue_one
-- Insert one job without lane, key and group: half the server's time of the function that takes any.
WITH added AS (
    INSERT INTO headrace.job_ready (id, queue, run_at, priority, traceparent, payload, version)
    VALUES (nextval('headrace.job_id'), :queue::integer,
            greatest(coalesce((:run_ats::timestamptz[])[1],
                              now() + (:delays_s::double precision[])[1] * interval '1 s'), now()),
            :priority::smallint, :traceparent::text, :payload::bytea, :version::smallint)
    RETURNING id, queue
)
SELECT id, CASE WHEN :is_hinted::boolean THEN pg_notify('headrace_jobs', queue::text) END FROM added;

-- name: enqueue_alike
-- Insert jobs without lane, key and group that differ in their payloads alone; their ids in order.
WITH added AS (
    INSERT INTO headrace.job_ready (id, queue, run_at, priority, traceparent, payload, version)
    SELECT nextval('headrace.job_id'), :queue::integer,
           greatest(coalesce((:run_ats::timestamptz[])[1],
                              now() + (:delays_s::double precision[])[1] * interval '1 s'), now()),
           :priority::smallint, :traceparent::text, r.payload, :version::smallint
    FROM unnest(:payloads::bytea[]) AS r(payload)
    RETURNING id
)
SELECT array_agg(id ORDER BY id),
       CASE WHEN :is_hinted::boolean THEN pg_notify('headrace_jobs', :queue::integer::text) END
FROM added;

-- name: add_groups
-- Insert groups with their callbacks; a group without members calls back at once.
SELECT headrace.add_groups_v1(
    :pending::integer[], :queues::integer[], :priorities::smallint[], :run_ats::timestamptz[],
    :delays_s::double precision[], :lanes::text[], :keys::text[], :payloads::bytea[],
    :versions::smallint[], :traceparent);

-- name: move_due
-- Move up to :jobs_max jobs of lanes that became due from job_ready into their lanes.
WITH due AS (
    DELETE FROM headrace.job_ready WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM headrace.job_ready WHERE lane IS NOT NULL AND run_at <= now()
        ORDER BY run_at LIMIT :jobs_max FOR UPDATE SKIP LOCKED))
    RETURNING *
), moved AS (
    INSERT INTO headrace.lane_job
        (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent, payload,
         version, last_error)
    SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent, payload,
           version, last_error
    FROM due RETURNING queue, lane
), told AS (
    INSERT INTO headrace.lane_event (limiter, lane, queue, k)
    SELECT q.limiter, m.lane, m.queue, count(*)
    FROM moved m JOIN headrace.queue q ON q.id = m.queue GROUP BY 1, 2, 3
)
SELECT count(*) FROM moved;
