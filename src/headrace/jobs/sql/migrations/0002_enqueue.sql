-- Functions that enqueue jobs.

-- Assign each job its unique key, or the id of the unfinished job that has the key. Keys are taken
-- in order, so that two callers with the same keys cannot deadlock. p_times_s: how long the end of
-- a job does not release its key.
CREATE FUNCTION headrace.take_keys_v1(
    p_queues integer[], p_keys text[], p_ids bigint[], p_times_s double precision[]
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_ids bigint[];
    v_missing integer;
    v_old tid[];
BEGIN
    FOR i IN 1..5 LOOP
        INSERT INTO headrace.job_unique (queue, key, job_id, kept_until)
        SELECT DISTINCT ON (r.queue, r.key) r.queue, r.key, r.id, now() + r.time_s * interval '1 s'
        FROM unnest(p_queues, p_keys, p_ids, p_times_s) AS r(queue, key, id, time_s)
        WHERE r.key IS NOT NULL ORDER BY r.queue, r.key, r.id
        ON CONFLICT DO NOTHING;
        SELECT array_agg(CASE WHEN r.key IS NULL THEN r.id ELSE u.job_id END ORDER BY r.ord),
               count(*) FILTER (WHERE r.key IS NOT NULL AND u.job_id IS NULL),
               array_agg(u.ctid) FILTER (WHERE u.is_done AND u.kept_until <= now())
        INTO v_ids, v_missing, v_old
        FROM unnest(p_queues, p_keys, p_ids) WITH ORDINALITY AS r(queue, key, id, ord)
        LEFT JOIN headrace.job_unique u ON u.queue = r.queue AND u.key = r.key;
        IF v_missing = 0 AND v_old IS NULL THEN
            RETURN v_ids;
        END IF;
        -- The holder of a key ended between the two statements, or was done and its time is over:
        -- the key is free now, take it.
        DELETE FROM headrace.job_unique u WHERE u.ctid = ANY(ARRAY(
            SELECT o.ctid FROM headrace.job_unique o WHERE o.ctid = ANY(v_old)
              AND o.is_done AND o.kept_until <= now() ORDER BY o.queue, o.key FOR UPDATE));
    END LOOP;
    RAISE EXCEPTION 'unique keys keep changing: retry the transaction'
        USING ERRCODE = 'serialization_failure';
END $$;

-- Append jobs to their chains. Return run_at of each job: the year 9999 for those that are not the
-- first of their chain. p_ids are new, except for jobs whose key was taken (p_ids <> p_own).
-- The lock of a chain is held until the end of the transaction, so that no job passes another one.
CREATE FUNCTION headrace.link_chains_v1(
    p_queues integer[], p_chains text[], p_own bigint[], p_ids bigint[], p_run_ats timestamptz[],
    p_delays_s double precision[]
) RETURNS timestamptz[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(c.chain, c.queue)) FROM (
        SELECT DISTINCT r.queue, r.chain FROM unnest(p_queues, p_chains) AS r(queue, chain)
        WHERE r.chain IS NOT NULL ORDER BY 1, 2) c;
    INSERT INTO headrace.job_chain (queue, chain, job_id, due_at)
    SELECT r.queue, r.chain, r.own,
           greatest(coalesce(r.run_at, now() + r.delay_s * interval '1 s'), now())
    FROM unnest(p_queues, p_chains, p_own, p_ids, p_run_ats, p_delays_s) WITH ORDINALITY
        AS r(queue, chain, own, id, run_at, delay_s, ord)
    WHERE r.chain IS NOT NULL AND r.own = r.id ORDER BY r.ord;
    RETURN (
        SELECT array_agg(CASE WHEN EXISTS (
            SELECT FROM headrace.job_chain o
            JOIN headrace.job_chain c ON c.queue = o.queue AND c.chain = o.chain AND c.n > o.n
            WHERE c.job_id = r.own
        ) THEN '9999-01-01' ELSE r.run_at END ORDER BY r.ord)
        FROM unnest(p_own, p_run_ats) WITH ORDINALITY AS r(own, run_at, ord)
        WHERE r.own IS NOT NULL);
END $$;

-- Insert jobs. Return their ids in order; for a taken key the id of the job that has it. A run_at
-- in the past counts as now. Due jobs of lanes go to their lane with one journal row per lane; no
-- lane is locked. p_headers has one element for all jobs, or one per job.
CREATE FUNCTION headrace.enqueue_v1(
    p_queues integer[], p_priorities smallint[], p_run_ats timestamptz[],
    p_delays_s double precision[], p_lanes text[], p_keys text[], p_groups bigint[],
    p_payloads bytea[], p_versions smallint[], p_headers text[], p_notify boolean,
    p_key_times_s double precision[] DEFAULT NULL, p_chains text[] DEFAULT NULL
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_own bigint[];
    v_ids bigint[];
BEGIN
    SELECT array_agg(nextval('headrace.job_id')) INTO v_own
    FROM generate_series(1, cardinality(p_queues));
    IF v_own IS NULL THEN
        RETURN '{}';
    END IF;
    v_ids := v_own;
    IF array_remove(p_keys, NULL) <> '{}' THEN
        v_ids := headrace.take_keys_v1(p_queues, p_keys, v_own, p_key_times_s);
    END IF;
    IF p_chains IS NOT NULL THEN
        p_run_ats := headrace.link_chains_v1(
            p_queues, p_chains, v_own, v_ids, p_run_ats, p_delays_s);
    END IF;
    INSERT INTO headrace.job_ready
        (id, queue, run_at, group_id, priority, lane, unique_key, headers, payload, version)
    SELECT r.own, r.queue,
           greatest(coalesce(r.run_at, now() + r.delay_s * interval '1 s'), now()),
           r.group_id, r.priority, r.lane, r.key, coalesce(r.headers, p_headers[1]),
           r.payload, coalesce(r.version, 1)
    FROM unnest(v_own, v_ids, p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
                p_groups, p_payloads, p_versions, p_headers)
        AS r(own, id, queue, priority, run_at, delay_s, lane, key, group_id, payload, version,
            headers)
    WHERE r.own = r.id
      AND (r.lane IS NULL OR coalesce(r.run_at > now(), r.delay_s > 0, false));
    IF array_remove(p_lanes, NULL) <> '{}' THEN
        WITH added AS (
            INSERT INTO headrace.lane_job
                (id, queue, run_at, group_id, priority, lane, unique_key, headers, payload,
                 version)
            SELECT r.own, r.queue, now(), r.group_id, r.priority, r.lane, r.key,
                   coalesce(r.headers, p_headers[1]), r.payload, coalesce(r.version, 1)
            FROM unnest(v_own, v_ids, p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes,
                        p_keys, p_groups, p_payloads, p_versions, p_headers)
                AS r(own, id, queue, priority, run_at, delay_s, lane, key, group_id, payload,
                    version, headers)
            WHERE r.own = r.id AND r.lane IS NOT NULL
              AND NOT coalesce(r.run_at > now(), r.delay_s > 0, false)
            RETURNING lane_job.queue, lane_job.lane
        )
        INSERT INTO headrace.lane_event (limiter, lane, queue, k)
        SELECT q.limiter, a.lane, a.queue, count(*)
        FROM added a JOIN headrace.queue q ON q.id = a.queue GROUP BY 1, 2, 3;
    END IF;
    IF p_notify THEN
        PERFORM pg_notify('headrace_jobs', q::text)
        FROM (SELECT DISTINCT unnest(p_queues) AS q) AS queues;
    END IF;
    RETURN v_ids;
END $$;

-- Count members of groups as ended. The last member of a group enqueues the callback; the counts
-- are spliced into the payload as text, since jsonb would refuse \u0000 and with it every ack of
-- the group. Lock order: lanes first, then groups by id.
CREATE FUNCTION headrace.finish_members_v1(p_groups bigint[], p_states text[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    PERFORM 1 FROM headrace.job_group WHERE id = ANY(p_groups) ORDER BY id FOR UPDATE;
    UPDATE headrace.job_group g
    SET pending = g.pending - c.n, done = g.done + c.done, failed = g.failed + c.failed,
        cancelled = g.cancelled + c.cancelled, quarantined = g.quarantined + c.quarantined
    FROM (
        SELECT m.group_id, count(*) AS n,
               count(*) FILTER (WHERE m.state = 'done') AS done,
               count(*) FILTER (WHERE m.state = 'failed') AS failed,
               count(*) FILTER (WHERE m.state = 'cancelled') AS cancelled,
               count(*) FILTER (WHERE m.state = 'quarantined') AS quarantined
        FROM unnest(p_groups, p_states) AS m(group_id, state)
        WHERE m.group_id IS NOT NULL GROUP BY m.group_id
    ) c WHERE g.id = c.group_id;
    WITH ended AS (
        DELETE FROM headrace.job_group WHERE id = ANY(p_groups) AND pending <= 0 RETURNING *
    ), callbacks AS (
        -- In order of key: concurrent callers must take keys in one order.
        SELECT * FROM ended WHERE workflow IS NULL ORDER BY queue, unique_key
    )
    SELECT array_agg(e.queue) AS queues, array_agg(e.priority) AS priorities,
           array_agg(e.run_at) AS run_ats, array_agg(e.delay_s) AS delays_s,
           array_agg(e.lane) AS lanes, array_agg(e.unique_key) AS keys,
           array_agg(convert_to(format(
               '{"group":{"id":%s,"done":%s,"failed":%s,"cancelled":%s,"quarantined":%s}%s',
               e.id, e.done, e.failed, e.cancelled, e.quarantined,
               CASE WHEN e.payload = '{}'::bytea THEN '' ELSE ',' END
           ), 'UTF8') || substring(e.payload FROM 2)) AS payloads,
           array_agg(e.version) AS versions, array_agg(e.headers) AS headers,
           (SELECT array_agg(w.workflow ORDER BY w.workflow) FROM ended w
            WHERE w.workflow IS NOT NULL) AS workflows
    INTO v FROM callbacks e;
    IF v.workflows IS NOT NULL THEN
        PERFORM headrace.wake_workflows_v1(v.workflows);
    END IF;
    IF v.queues IS NOT NULL THEN
        PERFORM headrace.enqueue_v1(
            v.queues, v.priorities, v.run_ats, v.delays_s, v.lanes, v.keys, NULL, v.payloads,
            v.versions, v.headers, true);
    END IF;
END $$;

-- Insert groups of p_pending members each. A group without members calls back at once.
CREATE FUNCTION headrace.add_groups_v1(
    p_pending integer[], p_queues integer[], p_priorities smallint[], p_run_ats timestamptz[],
    p_delays_s double precision[], p_lanes text[], p_keys text[], p_payloads bytea[],
    p_versions smallint[], p_headers text[]
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_ids bigint[];
    v_empty bigint[];
BEGIN
    SELECT array_agg(nextval('headrace.job_group_id')) INTO v_ids
    FROM generate_series(1, cardinality(p_pending));
    IF v_ids IS NULL THEN
        RETURN '{}';
    END IF;
    INSERT INTO headrace.job_group
        (id, pending, queue, priority, run_at, delay_s, lane, unique_key, headers, payload,
         version)
    SELECT r.id, r.pending, r.queue, r.priority, r.run_at, r.delay_s, r.lane, r.key,
           coalesce(r.headers, p_headers[1]), r.payload, coalesce(r.version, 1)
    FROM unnest(v_ids, p_pending, p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
                p_payloads, p_versions, p_headers)
        AS r(id, pending, queue, priority, run_at, delay_s, lane, key, payload, version, headers);
    SELECT array_agg(r.id) INTO v_empty
    FROM unnest(v_ids, p_pending) AS r(id, pending) WHERE r.pending = 0;
    IF v_empty IS NOT NULL THEN
        PERFORM headrace.finish_members_v1(v_empty, '{}');
    END IF;
    RETURN v_ids;
END $$;

-- Insert jobs as members of existing groups. Return their ids in order; NULL if one of the groups
-- does not exist. A job whose unique key is taken is neither inserted nor a member. With keys, a
-- temporary group id marks the jobs that this call inserted: an id alone does not show it, since
-- another caller may have taken the key a moment ago. Groups are locked in order of id, and last,
-- so that a caller that holds one waits for no other lock.
CREATE FUNCTION headrace.add_members_v1(
    p_groups bigint[], p_queues integer[], p_priorities smallint[], p_run_ats timestamptz[],
    p_delays_s double precision[], p_lanes text[], p_keys text[], p_payloads bytea[],
    p_versions smallint[], p_headers text[], p_notify boolean,
    p_key_times_s double precision[], p_chains text[]
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
    IF array_remove(p_keys, NULL) <> '{}' THEN
        v_mark := nextval('headrace.job_group_id');
        v_ids := headrace.enqueue_v1(p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
            array_fill(v_mark, ARRAY[cardinality(p_queues)]), p_payloads, p_versions,
            p_headers, p_notify, p_key_times_s, p_chains);
        WITH members AS (
            SELECT DISTINCT ON (m.id) m.id, m.group_id
            FROM unnest(v_ids, p_groups) WITH ORDINALITY AS m(id, group_id, ord)
                ORDER BY m.id, m.ord
        ), ready AS (
            UPDATE headrace.job_ready r SET group_id = m.group_id
            FROM members m WHERE r.id = m.id AND r.group_id = v_mark RETURNING m.group_id
        ), laned AS (
            UPDATE headrace.lane_job r SET group_id = m.group_id
            FROM members m WHERE r.id = m.id AND r.group_id = v_mark RETURNING m.group_id
        )
        SELECT array_agg(a.group_id) INTO v_added
        FROM (SELECT group_id FROM ready UNION ALL SELECT group_id FROM laned) AS a;
    ELSE
        v_ids := headrace.enqueue_v1(p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
            p_groups, p_payloads, p_versions, p_headers, p_notify, NULL, p_chains);
        v_added := p_groups;
    END IF;
    IF v_added IS NOT NULL THEN
        PERFORM 1 FROM headrace.job_group WHERE id = ANY(v_added) ORDER BY id FOR UPDATE;
        UPDATE headrace.job_group g SET pending = g.pending + a.n
        FROM (SELECT unnest(v_added) AS id, count(*)::integer AS n GROUP BY 1)
            AS a WHERE g.id = a.id;
    END IF;
    RETURN v_ids;
END $$;
