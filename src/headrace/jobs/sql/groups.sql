-- name: add_members
-- Insert jobs as members of groups that are there; their ids in order, NULL where a group is not.
SELECT headrace.add_members_v1(
    :groups::bigint[], :queues::integer[], :priorities::smallint[], :run_ats::timestamptz[],
    :delays_s::double precision[], :lanes::text[], :keys::text[], :payloads::bytea[],
    :versions::smallint[], :traceparent, :is_hinted);

-- name: seal_groups
-- Take away the one member more that each of the open groups counts; one without others calls back.
SELECT headrace.finish_members_v1(
    :groups::bigint[], array_fill('sealed'::text, ARRAY[cardinality(:groups::bigint[])]));

-- name: drop_group
-- Forget a group with its callback; its members run on alone.
DELETE FROM headrace.job_group WHERE id = :group;

-- name: mark_group_open
-- Note since when a group's block is open.
UPDATE headrace.job_group SET opened_at = now() WHERE id = :group;

-- name: mark_group_closed
-- Note that a group's block ends; no row: the group is not there any more.
UPDATE headrace.job_group SET opened_at = NULL WHERE id = :group RETURNING id;

-- name: drop_groups_left_open
-- Forget up to :groups_max groups whose block began long ago and never ended; their members run on alone.
DELETE FROM headrace.job_group WHERE id = ANY(ARRAY(
    SELECT id FROM headrace.job_group
    WHERE opened_at < now() - :open_s::double precision * interval '1 s'
    ORDER BY opened_at LIMIT :groups_max FOR UPDATE SKIP LOCKED));
