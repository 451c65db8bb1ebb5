-- name: begin_workflow
-- Begin a run of a workflow. Return the state of its lease as step 0, and its recorded steps.
SELECT * FROM headrace.begin_workflow_v1(:lease, :job, :version::smallint);

-- name: record_steps
-- Record the ends of steps or their failed attempts. Return the states of the leases in order.
SELECT array_agg(headrace.record_step_v1(r.lease, r.job, r.number, r.name, r.state, r.failures,
                                         r.wait_s, r.error, r.result) ORDER BY r.ord)
FROM unnest(:leases::bigint[], :jobs::bigint[], :numbers::integer[], :names::text[],
            :states::text[], :failures::integer[], :waits_s::double precision[], :errors::text[],
            :results::bytea[]) WITH ORDINALITY
    AS r(lease, job, number, name, state, failures, wait_s, error, result, ord);

-- name: wait_step
-- Record that a workflow waits. Return the states of the lease and of the step.
SELECT * FROM headrace.wait_step_v1(:lease, :job, :number, :name, :kind,
                                    :wait_s::double precision, :event_name, :event_key);

-- name: mark_uncaught
-- Mark a step whose failure ends the job, so that a retry of the job repeats it.
UPDATE headrace.workflow_step SET is_uncaught = true
WHERE job_id = :job AND ord = :number AND headrace.hold_workflow_v1(:lease, :job) = 'held';

-- name: end_jobs_step
-- Record the end of the jobs that a workflow started. Return the state of the lease.
WITH held AS MATERIALIZED (SELECT headrace.hold_workflow_v1(:lease, :job) AS state), ended AS (
    UPDATE headrace.workflow_step s SET state = :state, error = :error, ended_at = now()
    FROM held h WHERE s.job_id = :job AND s.ord = :number AND h.state = 'held'
)
SELECT state FROM held;

-- name: add_workflow_group
-- Insert the group of jobs that a workflow starts. Its end wakes the workflow.
INSERT INTO headrace.job_group (id, pending, queue, priority, payload, keeps_results, workflow)
SELECT nextval('headrace.job_group_id'), :pending, w.queue, 5, '{}', true, w.job_id
FROM headrace.workflow w WHERE w.job_id = :job RETURNING id;

-- name: join_step
-- Note the group and the jobs of a step.
UPDATE headrace.workflow_step SET group_id = :group, job_ids = :ids::bigint[]
WHERE job_id = :job AND ord = :number;

-- name: step_jobs
-- The jobs of a step in order with their results, and whether all have ended. A job without a row
-- was cancelled before it began.
SELECT j.id, r.state, r.error, r.result,
       NOT EXISTS (SELECT FROM headrace.job_group g WHERE g.id = s.group_id) AS has_ended
FROM headrace.workflow_step s
CROSS JOIN LATERAL unnest(s.job_ids) WITH ORDINALITY AS j(id, ord)
LEFT JOIN headrace.group_result r ON r.group_id = s.group_id AND r.job_id = j.id
WHERE s.job_id = :job AND s.ord = :number ORDER BY j.ord;

-- name: group_results
-- Results of the members of a group after the job :after, in order of their ids.
SELECT job_id, state, error, result FROM headrace.group_result
WHERE group_id = :group AND job_id > :after ORDER BY job_id LIMIT :jobs_max;

-- name: keep_results
-- Let a group keep the results of its members.
UPDATE headrace.job_group SET keeps_results = true WHERE id = :group;

-- name: send_event
-- Send an event. Return whether it is the first of this name and key.
SELECT headrace.send_event_v1(:name, :key, :payload::bytea);

-- name: cancel_tree
-- Cancel jobs and the jobs that they started. Return those that ended and those that still run.
SELECT ended, marked FROM headrace.cancel_tree_v1(:ids::bigint[]);

-- name: marked_jobs
-- Running jobs of a host that were cancelled, with their leases.
SELECT c.job_id, l.id AS lease_id FROM headrace.job_cancel c
JOIN headrace.job_lease l ON c.job_id = ANY(l.ids) AND c.job_id <> ALL(l.settled)
WHERE l.host = :host;

-- name: tend_workflows
-- Forget workflows without a job, and old results. Return whether more are left.
SELECT headrace.tend_workflows_v1(:kept_s::double precision, :rows_max);

-- name: find_workflow
-- A workflow that has begun.
SELECT w.version, w.begun_at FROM headrace.workflow w WHERE w.job_id = :job;

-- name: workflow_steps
-- The steps of a workflow in order.
SELECT s.ord AS number, s.name, s.kind,
       CASE WHEN s.kind = 'sleep' AND s.wake_at <= now() THEN 'done' ELSE s.state END AS state,
       s.failures, s.begun_at, coalesce(s.ended_at, CASE WHEN s.kind = 'sleep'
           AND s.wake_at <= now() THEN s.wake_at END) AS ended_at,
       CASE WHEN s.state = 'waiting' THEN s.wake_at END AS wake_at, s.event_name, s.event_key,
       s.job_ids, s.error, s.result
FROM headrace.workflow_step s WHERE s.job_id = :job ORDER BY s.ord;

-- name: waiting_steps
-- What a workflow waits for.
SELECT s.ord AS number, s.name, s.kind, s.failures, s.wake_at, s.event_name, s.event_key
FROM headrace.workflow_step s
WHERE s.job_id = :job AND s.state = 'waiting' AND (s.kind <> 'sleep' OR s.wake_at > now())
ORDER BY s.ord LIMIT 3;
