-- name: add_members
-- Insert jobs as members of groups that are there; their ids in order, NULL where a group is not.
SELECT penstock.add_members_v1(
    :groups::bigint[], :queues::integer[], :priorities::smallint[], :run_ats::timestamptz[],
    :delays_s::double precision[], :lanes::text[], :keys::text[], :payloads::bytea[],
    :versions::smallint[], :traceparent, :is_hinted);

-- name: seal_groups
-- Take away the one member more that each of the open groups counts; one without others calls back.
SELECT penstock.finish_members_v2(
    :groups::bigint[], array_fill('sealed'::text, ARRAY[cardinality(:groups::bigint[])]));

-- name: drop_group
-- Forget a group with its callback; its members run on alone.
DELETE FROM penstock.job_group WHERE id = :group;
