-- Functions that put jobs in: one call each, whatever is asked for. Planner switches are set per function,
-- since a plan made while a table was empty otherwise stays a sequential scan (115 ms a claim, measured).

-- Give each job with a key its key, or the id of the job that has it. Keys are taken in order, so that
-- two callers with the same keys cannot lock each other out.
CREATE FUNCTION headrace.take_keys_v1(p_queues integer[], p_keys text[], p_ids bigint[])
RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_ids bigint[];
    v_missing integer;
BEGIN
    FOR i IN 1..5 LOOP
        INSERT INTO headrace.job_unique (queue, key, job_id)
        SELECT DISTINCT ON (r.queue, r.key) r.queue, r.key, r.id
        FROM unnest(p_queues, p_keys, p_ids) AS r(queue, key, id)
        WHERE r.key IS NOT NULL ORDER BY r.queue, r.key, r.id
        ON CONFLICT DO NOTHING;
        SELECT array_agg(CASE WHEN r.key IS NULL THEN r.id ELSE u.job_id END ORDER BY r.ord),
               count(*) FILTER (WHERE r.key IS NOT NULL AND u.job_id IS NULL)
        INTO v_ids, v_missing
        FROM unnest(p_queues, p_keys, p_ids) WITH ORDINALITY AS r(queue, key, id, ord)
        LEFT JOIN headrace.job_unique u ON u.queue = r.queue AND u.key = r.key;
        IF v_missing = 0 THEN
            RETURN v_ids;
        END IF;
        -- The holder of a key ended between the two statements: the key is free now, take it.
    END LOOP;
    RAISE EXCEPTION 'keys keep changing hands' USING ERRCODE = 'serialization_failure';
END $$;

-- Insert jobs; return their ids in order, or for a taken key the id of the job that has it.
-- A moment in the past counts as now. Jobs of lanes that are due go to their lane, with a journal row a
-- lane; the lane itself is never locked here.
CREATE FUNCTION headrace.enqueue_v1(
    p_queues integer[], p_priorities smallint[], p_run_ats timestamptz[],
    p_delays_s double precision[], p_lanes text[], p_keys text[], p_groups bigint[],
    p_payloads bytea[], p_traceparent text, p_notify boolean
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
        v_ids := headrace.take_keys_v1(p_queues, p_keys, v_own);
    END IF;
    INSERT INTO headrace.job_ready
        (id, queue, run_at, group_id, priority, lane, unique_key, traceparent, payload)
    SELECT r.own, r.queue,
           greatest(coalesce(r.run_at, now() + r.delay_s * interval '1 s'), now()),
           r.group_id, r.priority, r.lane, r.key, p_traceparent, r.payload
    FROM unnest(v_own, v_ids, p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
                p_groups, p_payloads)
        AS r(own, id, queue, priority, run_at, delay_s, lane, key, group_id, payload)
    WHERE r.own = r.id
      AND (r.lane IS NULL OR coalesce(r.run_at > now(), r.delay_s > 0, false));
    IF array_remove(p_lanes, NULL) <> '{}' THEN
        WITH added AS (
            INSERT INTO headrace.lane_job
                (id, queue, run_at, group_id, priority, lane, unique_key, traceparent, payload)
            SELECT r.own, r.queue, now(), r.group_id, r.priority, r.lane, r.key, p_traceparent,
                   r.payload
            FROM unnest(v_own, v_ids, p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes,
                        p_keys, p_groups, p_payloads)
                AS r(own, id, queue, priority, run_at, delay_s, lane, key, group_id, payload)
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

-- Count members of groups as final; the last one of a group enqueues its callback, with the counts spliced
-- into the payload as text (jsonb would refuse a \u0000 and with it every ack of the group).
-- Groups are locked in order of id, after lanes: one order for all.
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
    FOR v IN
        DELETE FROM headrace.job_group WHERE id = ANY(p_groups) AND pending <= 0 RETURNING *
    LOOP
        PERFORM headrace.enqueue_v1(
            ARRAY[v.queue], ARRAY[v.priority], ARRAY[v.run_at], ARRAY[v.delay_s], ARRAY[v.lane],
            ARRAY[v.unique_key], NULL,
            ARRAY[convert_to(format(
                '{"group":{"id":%s,"done":%s,"failed":%s,"cancelled":%s,"quarantined":%s}%s',
                v.id, v.done, v.failed, v.cancelled, v.quarantined,
                CASE WHEN v.payload = '{}'::bytea THEN '' ELSE ',' END
            ), 'UTF8') || substring(v.payload FROM 2)],
            v.traceparent, true);
    END LOOP;
END $$;

-- Insert groups with :pending members each; a group of none calls back at once.
CREATE FUNCTION headrace.add_groups_v1(
    p_pending integer[], p_queues integer[], p_priorities smallint[], p_run_ats timestamptz[],
    p_delays_s double precision[], p_lanes text[], p_keys text[], p_payloads bytea[],
    p_traceparent text
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
        (id, pending, queue, priority, run_at, delay_s, lane, unique_key, traceparent, payload)
    SELECT r.id, r.pending, r.queue, r.priority, r.run_at, r.delay_s, r.lane, r.key,
           p_traceparent, r.payload
    FROM unnest(v_ids, p_pending, p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
                p_payloads)
        AS r(id, pending, queue, priority, run_at, delay_s, lane, key, payload);
    SELECT array_agg(r.id) INTO v_empty
    FROM unnest(v_ids, p_pending) AS r(id, pending) WHERE r.pending = 0;
    IF v_empty IS NOT NULL THEN
        PERFORM headrace.finish_members_v1(v_empty, '{}');
    END IF;
    RETURN v_ids;
END $$;
