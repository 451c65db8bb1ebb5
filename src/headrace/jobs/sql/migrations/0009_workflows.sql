-- Workflows: jobs whose handler is replayed. The result of each step is a row, so a run that begins
-- again continues after the last recorded one. A workflow that waits is a job that waits in
-- job_ready; what it waits for moves its due time to now.

-- Workflows that have begun. The row is the lock between the settlement that parks a job and the
-- event that wakes it.
CREATE TABLE headrace.workflow (
    job_id bigint PRIMARY KEY,
    queue integer NOT NULL,
    version smallint NOT NULL,
    is_woken boolean NOT NULL DEFAULT false,    -- something happened since its last run began
    begun_at timestamptz NOT NULL DEFAULT now(),
    checked_at timestamptz NOT NULL DEFAULT now()   -- when a sweep last saw its job
) WITH (fillfactor = 70);
CREATE INDEX workflow_checked ON headrace.workflow (checked_at);
CREATE INDEX workflow_queue ON headrace.workflow (queue, job_id);

-- Steps of workflows in the order of their calls.
CREATE TABLE headrace.workflow_step (
    job_id bigint NOT NULL,
    ord integer NOT NULL,
    name text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('step', 'sleep', 'event', 'jobs')),
    -- waiting: for a moment, an event, jobs, or the next attempt of a step that raised.
    state text NOT NULL CHECK (state IN ('waiting', 'done', 'failed')),
    failures smallint NOT NULL DEFAULT 0,
    wake_at timestamptz,                -- end of a sleep, timeout of an event, next attempt
    event_name text,
    event_key text,
    group_id bigint,                    -- of the jobs that it started
    job_ids bigint[],
    is_uncaught boolean NOT NULL DEFAULT false,     -- its failure ended the job; a retry repeats it
    begun_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    error text,
    result bytea,
    PRIMARY KEY (job_id, ord)
);
CREATE INDEX workflow_step_event ON headrace.workflow_step (event_name, event_key)
    WHERE kind = 'event' AND state = 'waiting';

-- Events that were sent. The first payload of a name and key stays.
CREATE TABLE headrace.workflow_event (
    name text NOT NULL,
    key text NOT NULL,
    sent_at timestamptz NOT NULL DEFAULT now(),
    payload bytea NOT NULL,
    PRIMARY KEY (name, key)
);
CREATE INDEX workflow_event_sent ON headrace.workflow_event (sent_at);

-- Results of the members of groups that keep them.
CREATE TABLE headrace.group_result (
    group_id bigint NOT NULL,
    job_id bigint NOT NULL,
    workflow bigint,                    -- the workflow that started the group
    state text NOT NULL,
    ended_at timestamptz NOT NULL DEFAULT now(),
    error text,
    result bytea,
    PRIMARY KEY (group_id, job_id)
);
CREATE INDEX group_result_ended ON headrace.group_result (ended_at) WHERE workflow IS NULL;

-- Jobs to cancel although they run. A run that ends otherwise than done or failed ends cancelled.
CREATE TABLE headrace.job_cancel (
    job_id bigint PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now()
);

-- Lock the lease of a running workflow until the transaction ends. Return 'held'; 'lost' if another
-- run may have the job; 'cancelled' if it must end.
CREATE FUNCTION headrace.hold_workflow_v1(p_lease bigint, p_job bigint)
RETURNS text LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    PERFORM FROM headrace.job_lease l
    WHERE l.id = p_lease AND p_job = ANY(l.ids) AND p_job <> ALL(l.settled) FOR SHARE;
    IF NOT FOUND THEN
        RETURN 'lost';
    END IF;
    PERFORM FROM headrace.job_cancel c WHERE c.job_id = p_job;
    RETURN CASE WHEN FOUND THEN 'cancelled' ELSE 'held' END;
END $$;

-- Begin a run. Return its recorded steps; the first row has number 0 and the state of the lease.
CREATE FUNCTION headrace.begin_workflow_v1(p_lease bigint, p_job bigint, p_version smallint)
RETURNS TABLE (
    ord integer, name text, kind text, state text, failures smallint, wait_s double precision,
    group_id bigint, error text, result bytea
) LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_state text := headrace.hold_workflow_v1(p_lease, p_job);
BEGIN
    IF v_state <> 'lost' THEN
        INSERT INTO headrace.workflow (job_id, queue, version)
        SELECT p_job, l.queue, p_version FROM headrace.job_lease l WHERE l.id = p_lease
        ON CONFLICT DO NOTHING;
        -- Without waiting for a transaction that wakes it: at worst it runs once more.
        UPDATE headrace.workflow w SET is_woken = false WHERE w.ctid = ANY(ARRAY(
            SELECT o.ctid FROM headrace.workflow o WHERE o.job_id = p_job AND o.is_woken
            FOR NO KEY UPDATE SKIP LOCKED));
        DELETE FROM headrace.workflow_step s WHERE s.job_id = p_job AND s.is_uncaught;
    END IF;
    RETURN QUERY SELECT 0, NULL, NULL, v_state, 0::smallint, NULL::double precision, NULL::bigint,
        NULL, NULL::bytea;
    RETURN QUERY
    SELECT s.ord, s.name, s.kind, s.state, s.failures,
           extract(epoch FROM s.wake_at - clock_timestamp())::double precision, s.group_id,
           s.error, s.result
    FROM headrace.workflow_step s WHERE s.job_id = p_job AND v_state = 'held' ORDER BY s.ord;
END $$;

-- Record the end of a step, or its failed attempt, which waits for the next one. Return the state
-- of the lease; nothing is recorded unless it is held.
CREATE FUNCTION headrace.record_step_v1(
    p_lease bigint, p_job bigint, p_ord integer, p_name text, p_state text, p_failures integer,
    p_wait_s double precision, p_error text, p_result bytea
) RETURNS text LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_state text := headrace.hold_workflow_v1(p_lease, p_job);
BEGIN
    IF v_state = 'held' THEN
        INSERT INTO headrace.workflow_step AS s
            (job_id, ord, name, kind, state, failures, wake_at, ended_at, error, result)
        VALUES (p_job, p_ord, p_name, 'step', p_state, p_failures,
                now() + p_wait_s * interval '1 s',
                CASE WHEN p_state <> 'waiting' THEN now() END, p_error, p_result)
        ON CONFLICT (job_id, ord) DO UPDATE SET
            state = excluded.state, failures = excluded.failures, wake_at = excluded.wake_at,
            ended_at = excluded.ended_at, error = excluded.error, result = excluded.result
        WHERE s.state = 'waiting';
    END IF;
    RETURN v_state;
END $$;

-- Record that a workflow waits for a moment, an event or jobs, unless it is recorded. Return the
-- state of the lease, and of the step with the seconds until its time. An event whose sender has
-- not committed yet cannot be seen: then the step is looked at again after a second.
CREATE FUNCTION headrace.wait_step_v1(
    p_lease bigint, p_job bigint, p_ord integer, p_name text, p_kind text,
    p_wait_s double precision, p_event_name text, p_event_key text
) RETURNS TABLE (held text, state text, wait_s double precision, error text, result bytea)
LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_look_s double precision;
    v_event headrace.workflow_event;
BEGIN
    held := headrace.hold_workflow_v1(p_lease, p_job);
    IF held <> 'held' THEN
        RETURN NEXT;
        RETURN;
    END IF;
    INSERT INTO headrace.workflow_step
        (job_id, ord, name, kind, state, wake_at, event_name, event_key)
    VALUES (p_job, p_ord, p_name, p_kind, 'waiting', now() + p_wait_s * interval '1 s',
            p_event_name, p_event_key)
    ON CONFLICT (job_id, ord) DO NOTHING;
    IF p_kind = 'event' THEN
        IF NOT pg_try_advisory_xact_lock_shared(
                headrace.event_lock_v1(p_event_name, p_event_key)) THEN
            v_look_s := 1;
        END IF;
        SELECT e.* INTO v_event FROM headrace.workflow_event e
        WHERE e.name = p_event_name AND e.key = p_event_key;
        UPDATE headrace.workflow_step s SET
            state = CASE WHEN v_event.name IS NULL THEN 'failed' ELSE 'done' END,
            error = CASE WHEN v_event.name IS NULL THEN 'timeout' END,
            result = v_event.payload, ended_at = now()
        WHERE s.job_id = p_job AND s.ord = p_ord AND s.state = 'waiting'
          AND (v_event.name IS NOT NULL OR s.wake_at <= now() AND v_look_s IS NULL);
    END IF;
    RETURN QUERY
    SELECT 'held', s.state,
           least(extract(epoch FROM s.wake_at - clock_timestamp())::double precision, v_look_s),
           s.error, s.result
    FROM headrace.workflow_step s WHERE s.job_id = p_job AND s.ord = p_ord;
END $$;

-- The lock that a sender of an event and its waiters share, so that neither misses the other.
CREATE FUNCTION headrace.event_lock_v1(p_name text, p_key text)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtextextended(p_name || E'\x1f' || p_key, 9);
$$;

-- Make parked workflows due now. One that is still leased is found by unpark_v1.
CREATE FUNCTION headrace.wake_workflows_v1(p_jobs bigint[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_queues integer[];
BEGIN
    PERFORM FROM headrace.workflow w WHERE w.job_id = ANY(p_jobs) ORDER BY w.job_id
    FOR NO KEY UPDATE;
    UPDATE headrace.workflow w SET is_woken = true WHERE w.job_id = ANY(p_jobs) AND NOT w.is_woken;
    WITH woken AS (
        UPDATE headrace.job_ready r SET run_at = now()
        WHERE r.id = ANY(p_jobs) AND r.run_at > now() RETURNING r.queue
    )
    SELECT array_agg(DISTINCT w.queue) INTO v_queues FROM woken w;
    PERFORM pg_notify('headrace_jobs', q::text) FROM unnest(v_queues) AS q;
END $$;

-- End jobs that were put back although they are to be cancelled, and count them.
CREATE FUNCTION headrace.end_marked_v1(p_jobs bigint[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_ended bigint[] := headrace.end_waiting_v1(p_jobs, true);
BEGIN
    INSERT INTO headrace.job_count (queue, cancelled)
    SELECT f.queue, count(*) FROM headrace.job_failed f WHERE f.id = ANY(v_ended) GROUP BY f.queue;
END $$;

-- Look at jobs that a settlement just put back. End those to cancel. Make workflows due now that
-- something woke during their run. A row that is locked is being woken by a transaction which
-- cannot see the job yet: the workflow looks again after a second.
CREATE FUNCTION headrace.unpark_v1(p_jobs bigint[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_cancelled bigint[] := ARRAY(
        SELECT c.job_id FROM headrace.job_cancel c WHERE c.job_id = ANY(p_jobs));
    v_seen bigint[];
    v_woken bigint[];
BEGIN
    IF v_cancelled <> '{}' THEN
        PERFORM headrace.end_marked_v1(v_cancelled);
    END IF;
    SELECT array_agg(s.job_id), array_agg(s.job_id) FILTER (WHERE s.is_woken)
    INTO v_seen, v_woken FROM (
        SELECT w.job_id, w.is_woken FROM headrace.workflow w WHERE w.job_id = ANY(p_jobs)
        FOR NO KEY UPDATE SKIP LOCKED) s;
    UPDATE headrace.job_ready r SET run_at = least(r.run_at,
        now() + CASE WHEN w.job_id = ANY(v_woken) THEN 0 ELSE 1 END * interval '1 s')
    FROM headrace.workflow w
    WHERE r.id = ANY(p_jobs) AND w.job_id = r.id AND r.run_at > now()
      AND (w.job_id = ANY(v_woken) OR (w.job_id = ANY(v_seen)) IS NOT TRUE);
END $$;

-- Send an event to all workflows that wait for it, now or later. Return whether it is the first of
-- this name and key; a later one has no effect.
CREATE FUNCTION headrace.send_event_v1(p_name text, p_key text, p_payload bytea)
RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_jobs bigint[];
BEGIN
    PERFORM pg_advisory_xact_lock(headrace.event_lock_v1(p_name, p_key));
    INSERT INTO headrace.workflow_event (name, key, payload) VALUES (p_name, p_key, p_payload)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    WITH ended AS (
        UPDATE headrace.workflow_step s
        SET state = 'done', result = p_payload, ended_at = now()
        WHERE s.event_name = p_name AND s.event_key = p_key AND s.kind = 'event'
          AND s.state = 'waiting' RETURNING s.job_id
    )
    SELECT array_agg(DISTINCT e.job_id) INTO v_jobs FROM ended e;
    PERFORM headrace.wake_workflows_v1(v_jobs) WHERE v_jobs IS NOT NULL;
    RETURN true;
END $$;

-- Store the results of ended members of groups that keep them.
CREATE FUNCTION headrace.keep_member_results_v1(p_jobs headrace.settlement[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.group_result (group_id, job_id, workflow, state, error, result)
    SELECT s.group_id, s.id, g.workflow,
           CASE s.outcome WHEN 'fail' THEN 'failed' WHEN 'cancel' THEN 'cancelled'
                ELSE s.outcome END, nullif(s.error, ''), s.result
    FROM unnest(p_jobs) s JOIN headrace.job_group g ON g.id = s.group_id AND g.keeps_results
    WHERE s.outcome IN ('done', 'fail', 'cancel', 'quarantined')
    ON CONFLICT DO NOTHING;
END $$;

-- Cancel jobs, and the jobs that they started as workflows. Waiting ones end now. Running ones are
-- marked, and end at their next step, when their handler is cancelled, or when they are put back.
-- Return the ids of both kinds.
CREATE FUNCTION headrace.cancel_tree_v1(p_jobs bigint[])
RETURNS TABLE (ended bigint[], marked bigint[])
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_all bigint[];
BEGIN
    WITH RECURSIVE tree AS (
        SELECT t.id FROM unnest(p_jobs) AS t(id)
        UNION
        SELECT j.id FROM tree t
        JOIN headrace.workflow_step s ON s.job_id = t.id AND s.kind = 'jobs'
        CROSS JOIN LATERAL unnest(s.job_ids) AS j(id)
    )
    SELECT array_agg(t.id ORDER BY t.id) INTO v_all FROM tree t;
    ended := headrace.end_waiting_v1(v_all, true);
    WITH running AS (
        INSERT INTO headrace.job_cancel (job_id)
        SELECT u.id FROM headrace.job_lease l CROSS JOIN LATERAL unnest(l.ids) AS u(id)
        WHERE u.id = ANY(v_all) AND u.id <> ALL(l.settled) ORDER BY 1
        ON CONFLICT (job_id) DO UPDATE SET at = job_cancel.at RETURNING job_id
    )
    SELECT coalesce(array_agg(r.job_id), '{}') INTO marked FROM running r;
    IF marked <> '{}' THEN
        PERFORM pg_notify('headrace_fleet', '');
    END IF;
    RETURN NEXT;
END $$;

-- End marked jobs that wait after all, and forget marks of ended ones. Delete workflows whose job
-- is not kept any more, and results of groups that are p_kept_s old. Return whether more are left.
CREATE FUNCTION headrace.tend_workflows_v1(p_kept_s double precision, p_max integer)
RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_jobs bigint[];
    v_gone bigint[];
    v_rows integer;
BEGIN
    v_jobs := ARRAY(SELECT c.job_id FROM headrace.job_cancel c ORDER BY c.job_id LIMIT p_max);
    IF v_jobs <> '{}' THEN
        PERFORM headrace.end_marked_v1(v_jobs);
        DELETE FROM headrace.job_cancel c WHERE c.job_id = ANY(v_jobs) AND NOT EXISTS (
            SELECT FROM headrace.job_lease l WHERE c.job_id = ANY(l.ids));
    END IF;
    v_jobs := ARRAY(
        SELECT w.job_id FROM headrace.workflow w WHERE w.checked_at < now() - interval '1 hour'
        ORDER BY w.checked_at LIMIT p_max FOR UPDATE SKIP LOCKED);
    IF v_jobs <> '{}' THEN
        SELECT coalesce(array_agg(j.id), '{}') INTO v_gone FROM unnest(v_jobs) AS j(id)
        WHERE NOT EXISTS (SELECT FROM headrace.job_ready r WHERE r.id = j.id)
          AND NOT EXISTS (SELECT FROM headrace.lane_job r WHERE r.id = j.id)
          AND NOT EXISTS (SELECT FROM headrace.job_failed r WHERE r.id = j.id)
          AND NOT EXISTS (SELECT FROM headrace.job_done r WHERE r.id = j.id)
          AND NOT EXISTS (SELECT FROM headrace.job_lease l WHERE j.id = ANY(l.ids));
        DELETE FROM headrace.group_result g USING headrace.workflow_step s
        WHERE s.job_id = ANY(v_gone) AND g.group_id = s.group_id;
        DELETE FROM headrace.workflow_step s WHERE s.job_id = ANY(v_gone);
        DELETE FROM headrace.workflow w WHERE w.job_id = ANY(v_gone);
        UPDATE headrace.workflow w SET checked_at = now() WHERE w.job_id = ANY(v_jobs);
    END IF;
    DELETE FROM headrace.group_result g WHERE g.ctid = ANY(ARRAY(
        SELECT o.ctid FROM headrace.group_result o
        WHERE o.workflow IS NULL AND o.ended_at < now() - p_kept_s * interval '1 s'
        ORDER BY o.ended_at LIMIT p_max));
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    RETURN p_max IN (cardinality(v_jobs), v_rows);
END $$;
