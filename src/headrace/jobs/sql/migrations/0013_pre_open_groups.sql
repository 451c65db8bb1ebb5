-- Groups that are filled while they are open: they count one member more than they have (see store/groups.py).

-- Insert jobs as members of groups that are there; their ids in order, NULL where a group is not. A job whose
-- unique key is taken is not inserted and no member. With keys, new jobs are told from existing ones by a mark in
-- place of the group: an id alone does not say which call inserted it, since another may have just taken the key.
-- Groups are locked in order of id, and last: whoever holds one waits for nothing else.
CREATE FUNCTION headrace.add_members_v1(
    p_groups bigint[], p_queues integer[], p_priorities smallint[], p_run_ats timestamptz[],
    p_delays_s double precision[], p_lanes text[], p_keys text[], p_payloads bytea[],
    p_versions smallint[], p_traceparent text, p_notify boolean
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_ids bigint[];
    v_added bigint[];
    v_mark bigint;
BEGIN
    PERFORM 1 FROM (SELECT DISTINCT unnest(p_groups) AS id) AS g
    WHERE NOT EXISTS (SELECT FROM headrace.job_group j WHERE j.id = g.id);
    IF FOUND THEN
        RETURN NULL;
    END IF;
    IF array_remove(p_keys, NULL) = '{}' THEN
        v_ids := headrace.enqueue_v2(p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
            p_groups, p_payloads, p_versions, p_traceparent, p_notify);
        v_added := p_groups;
    ELSE
        v_mark := nextval('headrace.job_group_id');
        v_ids := headrace.enqueue_v2(p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
            array_fill(v_mark, ARRAY[cardinality(p_queues)]), p_payloads, p_versions, p_traceparent,
            p_notify);
        WITH members AS (
            SELECT DISTINCT ON (m.id) m.id, m.group_id
            FROM unnest(v_ids, p_groups) WITH ORDINALITY AS m(id, group_id, ord) ORDER BY m.id, m.ord
        ), ready AS (
            UPDATE headrace.job_ready r SET group_id = m.group_id
            FROM members m WHERE r.id = m.id AND r.group_id = v_mark RETURNING m.group_id
        ), laned AS (
            UPDATE headrace.lane_job r SET group_id = m.group_id
            FROM members m WHERE r.id = m.id AND r.group_id = v_mark RETURNING m.group_id
        )
        SELECT array_agg(a.group_id) INTO v_added
        FROM (SELECT group_id FROM ready UNION ALL SELECT group_id FROM laned) AS a;
    END IF;
    IF v_added IS NOT NULL THEN
        PERFORM 1 FROM headrace.job_group WHERE id = ANY(v_added) ORDER BY id FOR UPDATE;
        UPDATE headrace.job_group g SET pending = g.pending + a.n
        FROM (SELECT unnest(v_added) AS id, count(*)::integer AS n GROUP BY 1) AS a WHERE g.id = a.id;
    END IF;
    RETURN v_ids;
END $$;
