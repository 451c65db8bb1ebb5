-- Lists and bulk actions.

-- Matching jobs below the id p_before, at most p_jobs_max per table, unsorted. NULL: any queue,
-- lane, error text, age or time. Age and time are of the end, or of when the job was due. Work is
-- bounded: at most p_window rows of a table are read. If that ended the search, a row without a
-- state holds the id that it reached. job_ready and lane_job have no index by queue and id, which
-- every enqueue would pay for: a queue of at most p_window waiting jobs is read and sorted, a
-- longer one is found by id among the jobs of all queues. Statements are planned on each call,
-- since a plan cached on an empty table reads a full one whole; the row comparison leaves one
-- index order, however wrong the statistics are.
CREATE FUNCTION headrace.list_jobs_v1(
    p_queue integer, p_states text[], p_lane text, p_error text, p_older_than_s double precision,
    p_ids bigint[], p_before bigint, p_jobs_max integer, p_window integer,
    p_from timestamptz, p_to timestamptz
) RETURNS TABLE (
    id bigint, state text, queue integer, priority smallint, run_at timestamptz, attempt smallint,
    losses smallint, lane text, unique_key text, group_id bigint, lease_id bigint,
    ended_at timestamptz, error text
) LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_place record;
    v_is_short boolean;
    v_bounds text := CASE
        WHEN p_ids IS NOT NULL THEN 'r.id = ANY($6) AND r.id < $7 ORDER BY r.id DESC'
        WHEN p_queue IS NULL THEN 'r.id < $7 ORDER BY r.id DESC'
        ELSE '(r.queue, r.id) < ($1, $7) AND (r.queue, r.id) > ($1, 0)'
             ' ORDER BY r.queue DESC, r.id DESC'
        END;
    v_fits text := '($1 IS NULL OR s.queue = $1) AND s.state = ANY($2)'
        ' AND ($3 IS NULL OR s.lane = $3)'
        ' AND ($4 IS NULL OR s.ended_at IS NOT NULL AND position(lower($4) IN lower(s.error)) > 0)'
        ' AND ($5 IS NULL OR coalesce(s.ended_at, s.run_at) < now() - $5 * interval ''1 s'')'
        ' AND ($10 IS NULL OR coalesce(s.ended_at, s.run_at) >= $10)'
        ' AND ($11 IS NULL OR coalesce(s.ended_at, s.run_at) < $11)';
BEGIN
    FOR v_place IN
        SELECT * FROM (VALUES
            ('job_ready', true, ARRAY['scheduled', 'ready'],
             'CASE WHEN r.run_at > now() THEN ''scheduled'' ELSE ''ready'' END',
             'NULL::timestamptz', 'r.last_error'),
            ('lane_job', false, ARRAY['ready'], '''ready''', 'NULL::timestamptz', 'r.last_error'),
            ('job_failed', true, ARRAY['failed', 'cancelled', 'quarantined'], 'r.state',
             'r.ended_at', 'r.error'),
            ('job_done', false, ARRAY['done'], '''done''', 'r.ended_at', 'NULL')
        ) AS p(name, has_lanes, states, state, ended_at, error)
        WHERE p.states && p_states AND (p.name <> 'lane_job' OR p_lane IS NULL OR p_ids IS NOT NULL)
    LOOP
        v_is_short := NULL;
        IF v_place.name IN ('job_ready', 'lane_job') AND p_queue IS NOT NULL AND p_ids IS NULL THEN
            EXECUTE format('SELECT count(*) <= $2 FROM ('
                           ' SELECT FROM headrace.%I WHERE queue = $1 LIMIT $2 + 1) c',
                           v_place.name)
            INTO v_is_short USING p_queue, p_window;
        END IF;
        RETURN QUERY EXECUTE format(
            'WITH seen AS MATERIALIZED ('
            ' SELECT r.id, %s AS state, r.queue, r.priority, r.run_at, r.attempt, r.losses, r.lane,'
            '  r.unique_key, r.group_id, NULL::bigint AS lease_id, %s AS ended_at,'
            '  %s::text AS error'
            ' FROM headrace.%I r WHERE %s LIMIT $9'
            '), fit AS MATERIALIZED (SELECT s.* FROM seen s WHERE %s LIMIT $8)'
            ' SELECT * FROM fit UNION ALL'
            ' SELECT min(s.id), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,'
            '  NULL'
            ' FROM seen s WHERE (SELECT count(*) FROM fit) < $8 HAVING count(*) >= $9',
            v_place.state, v_place.ended_at, v_place.error, v_place.name,
            CASE WHEN v_place.has_lanes AND p_lane IS NOT NULL AND p_ids IS NULL
                 THEN 'r.lane IS NOT NULL AND (r.lane, r.id) < ($3, $7)'
                      ' AND (r.lane, r.id) > ($3, 0)'
                      ' ORDER BY r.lane DESC, r.id DESC'
                 WHEN v_is_short THEN 'r.queue = $1 AND r.id + 0 < $7 ORDER BY r.id + 0 DESC'
                 WHEN NOT v_is_short THEN 'r.id < $7 ORDER BY r.id DESC'
                 ELSE v_bounds END,
            v_fits)
        USING p_queue, p_states, p_lane, p_error, p_older_than_s, p_ids, p_before, p_jobs_max,
            p_window, p_from, p_to;
    END LOOP;
    -- lane_job has an index by lane and priority.
    IF 'ready' = ANY(p_states) AND p_lane IS NOT NULL AND p_ids IS NULL AND p_error IS NULL THEN
        RETURN QUERY
        SELECT j.id, 'ready', j.queue, j.priority, j.run_at, j.attempt, j.losses, j.lane,
               j.unique_key, j.group_id, NULL::bigint, NULL::timestamptz, j.last_error
        FROM headrace.queue q CROSS JOIN generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
            SELECT * FROM headrace.lane_job k
            WHERE k.queue = q.id AND k.lane = p_lane AND k.priority = p.priority AND k.id < p_before
              AND (p_older_than_s IS NULL OR k.run_at < now() - p_older_than_s * interval '1 s')
              AND (p_from IS NULL OR k.run_at >= p_from) AND (p_to IS NULL OR k.run_at < p_to)
            ORDER BY k.id DESC LIMIT p_jobs_max) j
        WHERE p_queue IS NULL OR q.id = p_queue ORDER BY j.id DESC LIMIT p_jobs_max;
    END IF;
    -- Few rows, one per batch. Payloads are not read.
    IF 'leased' = ANY(p_states) AND p_error IS NULL THEN
        RETURN QUERY
        SELECT r.id, 'leased', l.queue, r.priority, r.run_at, r.attempt, r.losses, r.lane,
               r.unique_key, r.group_id, l.id, NULL::timestamptz, NULL::text
        FROM headrace.job_lease l
        CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses,
                                  l.lanes, l.unique_keys)
            AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key)
        WHERE (p_queue IS NULL OR l.queue = p_queue) AND r.id < p_before AND r.id <> ALL(l.settled)
          AND (p_lane IS NULL OR r.lane = p_lane) AND (p_ids IS NULL OR r.id = ANY(p_ids))
          AND (p_older_than_s IS NULL OR r.run_at < now() - p_older_than_s * interval '1 s')
          AND (p_from IS NULL OR r.run_at >= p_from) AND (p_to IS NULL OR r.run_at < p_to)
        ORDER BY r.id DESC LIMIT p_jobs_max;
    END IF;
END $$;

-- Remove waiting jobs, stored as cancelled if p_is_kept. Return the ids of those that waited. Keys
-- are released; groups count them as cancelled. Rows are locked in order of id, then keys, then
-- groups, each once: returning to rows after groups would deadlock.
CREATE FUNCTION headrace.end_waiting_v1(p_ids bigint[], p_is_kept boolean)
RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_ids bigint[] := '{}';
    v_queues integer[] := '{}';
    v_keys text[] := '{}';
    v_groups bigint[] := '{}';
    v record;
BEGIN
    -- Twice, since a job may move from job_ready to its lane between the two reads.
    FOR i IN 1..2 LOOP
        WITH ready AS (
            DELETE FROM headrace.job_ready d WHERE d.ctid = ANY(ARRAY(
                SELECT r.ctid FROM headrace.job_ready r WHERE r.id = ANY(p_ids)
                    ORDER BY r.id FOR UPDATE))
            RETURNING *
        ), laned AS (
            DELETE FROM headrace.lane_job d WHERE d.ctid = ANY(ARRAY(
                SELECT r.ctid FROM headrace.lane_job r WHERE r.id = ANY(p_ids)
                    ORDER BY r.id FOR UPDATE))
            RETURNING *
        ), journaled AS (
            INSERT INTO headrace.lane_event (limiter, lane, queue, k)
            SELECT q.limiter, l.lane, l.queue, -count(*)
            FROM laned l JOIN headrace.queue q ON q.id = l.queue GROUP BY 1, 2, 3
        ), deleted AS (
            SELECT * FROM ready UNION ALL SELECT * FROM laned
        ), kept AS (
            INSERT INTO headrace.job_failed
                (id, queue, state, run_at, group_id, priority, attempt, losses, lane, unique_key,
                 headers, error, traceback, payload, version)
            SELECT g.id, g.queue, 'cancelled', g.run_at, g.group_id, g.priority, g.attempt,
                   g.losses, g.lane, g.unique_key, g.headers, 'cancelled', '', g.payload,
                   g.version
            FROM deleted g WHERE p_is_kept
        )
        SELECT array_agg(g.id) AS ids,
               array_agg(g.queue) FILTER (WHERE g.unique_key IS NOT NULL) AS queues,
               array_agg(g.unique_key) FILTER (WHERE g.unique_key IS NOT NULL) AS keys,
               array_agg(g.group_id) FILTER (WHERE g.group_id IS NOT NULL) AS groups
        INTO v FROM deleted g;
        v_ids := v_ids || v.ids;
        v_queues := v_queues || v.queues;
        v_keys := v_keys || v.keys;
        v_groups := v_groups || v.groups;
        EXIT WHEN cardinality(v_ids) >= cardinality(p_ids);
    END LOOP;
    IF v_keys <> '{}' THEN
        DELETE FROM headrace.job_unique u USING unnest(v_queues, v_keys) AS k(queue, key)
        WHERE u.queue = k.queue AND u.key = k.key AND u.job_id = ANY(v_ids);
    END IF;
    IF v_ids <> '{}' AND EXISTS (SELECT FROM headrace.job_chain) THEN
        PERFORM headrace.advance_chains_v1(v_ids);
    END IF;
    IF v_groups <> '{}' THEN
        PERFORM headrace.finish_members_v1(
            v_groups, array_fill('cancelled'::text, ARRAY[cardinality(v_groups)]));
    END IF;
    RETURN v_ids;
END $$;

-- Change a waiting job: its payload with the version, priority and due time, NULL for as it is.
-- Return whether it waited. A due job of a lane that becomes due later leaves its lane until then.
CREATE FUNCTION headrace.edit_waiting_v1(
    p_id bigint, p_payload bytea, p_version smallint, p_priority smallint, p_run_at timestamptz,
    p_delay_s double precision
) RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_run_at timestamptz := greatest(
        coalesce(p_run_at, now() + p_delay_s * interval '1 s'), now());
    v_queue integer;
BEGIN
    IF p_run_at IS NULL AND p_delay_s IS NULL THEN
        v_run_at := NULL;
    END IF;
    IF v_run_at > now() THEN
        WITH moved AS (
            DELETE FROM headrace.lane_job WHERE id = p_id RETURNING *
        ), journaled AS (
            INSERT INTO headrace.lane_event (limiter, lane, queue, k)
            SELECT q.limiter, m.lane, m.queue, -1
            FROM moved m JOIN headrace.queue q ON q.id = m.queue
        )
        INSERT INTO headrace.job_ready SELECT * FROM moved;
    END IF;
    UPDATE headrace.job_ready SET
        payload = coalesce(p_payload, payload), version = coalesce(p_version, version),
        priority = coalesce(p_priority, priority), run_at = coalesce(v_run_at, run_at)
    WHERE id = p_id AND (v_run_at IS NULL OR run_at < '9999-01-01') RETURNING queue INTO v_queue;
    IF NOT FOUND THEN
        UPDATE headrace.lane_job SET
            payload = coalesce(p_payload, payload), version = coalesce(p_version, version),
            priority = coalesce(p_priority, priority)
        WHERE id = p_id RETURNING queue INTO v_queue;
    END IF;
    PERFORM pg_notify('headrace_jobs', v_queue::text) WHERE v_queue IS NOT NULL;
    RETURN v_queue IS NOT NULL;
END $$;

-- Put jobs that ended in one of p_states back with all their retries; they have left their groups.
-- A job whose key another unfinished job has stays, and of several with one key all but the
-- newest.
CREATE FUNCTION headrace.retry_jobs_v1(p_ids bigint[], p_states text[])
RETURNS TABLE (retried bigint[], taken bigint[])
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_ids bigint[];
    v_queues integer[];
BEGIN
    SELECT array_agg(f.id) INTO v_ids FROM (
        SELECT o.id FROM headrace.job_failed o WHERE o.id = ANY(p_ids) AND o.state = ANY(p_states)
        ORDER BY o.id FOR UPDATE) f;
    WITH keyed AS (
        INSERT INTO headrace.job_unique (queue, key, job_id)
        SELECT DISTINCT ON (f.queue, f.unique_key) f.queue, f.unique_key, f.id
        FROM headrace.job_failed f WHERE f.id = ANY(v_ids) AND f.unique_key IS NOT NULL
        ORDER BY f.queue, f.unique_key, f.id DESC
        ON CONFLICT DO NOTHING RETURNING job_id
    )
    SELECT array_agg(f.id) FILTER (WHERE f.unique_key IS NULL OR k.job_id IS NOT NULL),
           array_agg(f.id) FILTER (WHERE f.unique_key IS NOT NULL AND k.job_id IS NULL)
    INTO retried, taken
    FROM headrace.job_failed f LEFT JOIN keyed k ON k.job_id = f.id WHERE f.id = ANY(v_ids);
    DELETE FROM headrace.job_cancel c WHERE c.job_id = ANY(retried);
    WITH back AS (
        DELETE FROM headrace.job_failed f WHERE f.id = ANY(retried) RETURNING *
    ), put AS (
        INSERT INTO headrace.job_ready
            (id, queue, run_at, priority, lane, unique_key, headers, payload, version)
        SELECT b.id, b.queue, now(), b.priority, b.lane, b.unique_key,
            regexp_replace(b.headers, ' (expires|chain)=\S+', '', 'g'), b.payload,
            b.version
        FROM back b
    )
    SELECT array_agg(DISTINCT b.queue) INTO v_queues FROM back b;
    PERFORM pg_notify('headrace_jobs', q::text) FROM unnest(v_queues) AS q;
    RETURN NEXT;
END $$;

-- Delete jobs in one of p_states, waiting or ended. Return the ids of those that existed. A
-- waiting job ends as if cancelled.
CREATE FUNCTION headrace.delete_jobs_v1(p_ids bigint[], p_states text[])
RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_ids bigint[];
BEGIN
    WITH failed AS (
        DELETE FROM headrace.job_failed f WHERE f.ctid = ANY(ARRAY(
            SELECT o.ctid FROM headrace.job_failed o
                WHERE o.id = ANY(p_ids) AND o.state = ANY(p_states)
            ORDER BY o.id FOR UPDATE))
        RETURNING f.id
    ), done AS (
        DELETE FROM headrace.job_done d WHERE d.id = ANY(p_ids) AND 'done' = ANY(p_states)
        RETURNING d.id
    )
    SELECT coalesce(array_agg(g.id), '{}') INTO v_ids
    FROM (SELECT * FROM failed UNION ALL SELECT * FROM done) g;
    IF p_states && ARRAY['scheduled', 'ready'] THEN
        v_ids := v_ids || headrace.end_waiting_v1(
            ARRAY(SELECT p.id FROM unnest(p_ids) AS p(id) EXCEPT SELECT unnest(v_ids)), false);
    END IF;
    RETURN v_ids;
END $$;

-- Every queue, or the queue with the name or alias p_queue, with its backlog counted through
-- indexes up to p_max; of ended jobs the newest p_max are read. A number equal to p_max may be
-- more. oldest_at covers the first 1,000 jobs of lanes.
CREATE FUNCTION headrace.queue_counts_v1(p_queue text, p_max integer)
RETURNS TABLE (
    queue integer, ready bigint, laned bigint, scheduled bigint, leased bigint, failed bigint,
    quarantined bigint, ended bigint, oldest_at timestamptz, slots bigint, is_known boolean
) LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH hosts AS MATERIALIZED (
        SELECT h.queues, h.slots FROM headrace.host h
        WHERE h.kind <> 'taker' AND h.expires_at > now()
    ), leases AS MATERIALIZED (
        SELECT l.queue, sum(cardinality(l.ids) - cardinality(l.settled))::bigint AS n
        FROM headrace.job_lease l GROUP BY l.queue
    ), bound AS MATERIALIZED (
        SELECT s.slot ->> 'queue' AS name, count(*) AS n
        FROM hosts h CROSS JOIN LATERAL jsonb_array_elements(h.slots) AS s(slot) GROUP BY 1
    )
    SELECT q.id, due.n, laned.n, later.n, coalesce(leases.n, 0), ended.failed,
           ended.quarantined, ended.n,
           least(due.oldest_at, first.oldest_at), coalesce(bound.n, 0),
           EXISTS (SELECT FROM hosts h WHERE q.id = ANY(h.queues))
    FROM headrace.queue q
    CROSS JOIN LATERAL (
        SELECT count(*) AS n, min(c.run_at) AS oldest_at FROM (
            SELECT r.run_at FROM generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
                SELECT k.run_at FROM headrace.job_ready k
                WHERE k.queue = q.id AND k.priority = p.priority AND k.run_at <= now()
                ORDER BY k.run_at LIMIT p_max) r
            LIMIT p_max) c
    ) AS due
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (
            SELECT FROM generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
                SELECT FROM headrace.job_ready k
                WHERE k.queue = q.id AND k.priority = p.priority AND k.run_at > now() LIMIT p_max) r
            LIMIT p_max) c
    ) AS later
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (SELECT FROM headrace.lane_job j WHERE j.queue = q.id
            LIMIT p_max) c
    ) AS laned
    CROSS JOIN LATERAL (
        SELECT min(f.run_at) AS oldest_at FROM (
            SELECT j.run_at FROM headrace.lane_job j WHERE j.queue = q.id
            ORDER BY j.queue, j.lane, j.priority, j.id LIMIT 1000) f
    ) AS first
    CROSS JOIN LATERAL (
        SELECT count(*) AS n, count(*) FILTER (WHERE c.state <> 'cancelled') AS failed,
               count(*) FILTER (WHERE c.state = 'quarantined') AS quarantined FROM (
            SELECT f.state FROM headrace.job_failed f WHERE f.queue = q.id
            ORDER BY f.queue DESC, f.id DESC LIMIT p_max) c
    ) AS ended
    LEFT JOIN leases ON leases.queue = q.id
    LEFT JOIN bound ON bound.name = q.name
    WHERE p_queue IS NULL OR q.name = p_queue
       OR q.id = (SELECT a.queue FROM headrace.queue_alias a WHERE a.name = p_queue
                  AND NOT EXISTS (SELECT FROM headrace.queue o WHERE o.name = p_queue));
END $$;

-- What keeps a due job waiting; no row: its queue does not exist. `ahead`: jobs before it, counted
-- up to p_max. Slots are those of live hosts that serve the queue, have its tag and do not drain;
-- free: idle, and bound to the queue or floating. is_reported: each of those hosts has reported
-- its slots.
CREATE FUNCTION headrace.why_waiting_v1(p_id bigint, p_max integer)
RETURNS TABLE (
    is_paused boolean, tag text, slots_max integer, hosts bigint, tagged_hosts bigint,
    open_hosts bigint, is_reported boolean, slots bigint, free_slots bigint, is_lane_paused boolean,
    inflight integer, concurrency integer, starts_max integer, window_s double precision,
    free_at timestamptz, ahead bigint
) LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH job AS MATERIALIZED (
        SELECT r.id, r.queue, r.priority, r.run_at, r.lane, true AS is_ready
        FROM headrace.job_ready r WHERE r.id = p_id
        UNION ALL
        SELECT r.id, r.queue, r.priority, r.run_at, r.lane, false
        FROM headrace.lane_job r WHERE r.id = p_id LIMIT 1
    )
    SELECT q.paused, q.tag, q.slots_max, known.n, known.tagged, known.open,
           known.is_reported, known.slots, known.free, l.paused, l.inflight + l.uncounted,
           l.concurrency, l.starts_max, l.window_s, CASE WHEN l.free_at > now() THEN l.free_at END,
           CASE WHEN j.is_ready THEN before.n ELSE laned.n END
    FROM job j
    JOIN headrace.queue_setting q ON q.id = j.queue
    LEFT JOIN headrace.lane l ON l.limiter = q.limiter AND l.name = j.lane
    CROSS JOIN LATERAL (
        SELECT count(*) AS n, count(*) FILTER (WHERE h.is_tagged) AS tagged,
               count(*) FILTER (WHERE h.is_open) AS open,
               coalesce(bool_and(h.is_reported) FILTER (WHERE h.is_open), false) AS is_reported,
               coalesce(sum(h.slots) FILTER (WHERE h.is_open), 0)::bigint AS slots,
               coalesce(sum(h.free) FILTER (WHERE h.is_open), 0)::bigint AS free
        FROM (
            SELECT t.is_tagged, t.is_tagged AND NOT h.is_draining AS is_open,
                   h.reported_at IS NOT NULL AS is_reported, s.slots, s.free
            FROM headrace.host h
            CROSS JOIN LATERAL (SELECT q.tag IS NULL OR q.tag = ANY(h.tags) AS is_tagged) t
            CROSS JOIN LATERAL (
                SELECT count(*) AS slots,
                       count(*) FILTER (
                           WHERE coalesce((e.slot ->> 'busy_s')::double precision, 0) = 0) AS free
                FROM jsonb_array_elements(h.slots) AS e(slot)
                WHERE e.slot ->> 'queue' IS NULL OR e.slot ->> 'queue' = q.name) s
            WHERE h.kind <> 'taker' AND h.expires_at > now() AND q.id = ANY(h.queues)
        ) h
    ) AS known
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (
            SELECT FROM generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
                SELECT FROM headrace.job_ready r
                WHERE r.queue = j.queue AND r.priority = p.priority AND r.run_at <= now()
                  AND p.priority <= j.priority
                  AND (p.priority < j.priority OR (r.run_at, r.id) < (j.run_at, j.id))
                      LIMIT p_max) c
            LIMIT p_max) c
    ) AS before
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (
            SELECT FROM generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
                SELECT FROM headrace.lane_job r
                WHERE r.queue = j.queue AND r.lane = j.lane AND r.priority = p.priority
                  AND p.priority <= j.priority AND (p.priority < j.priority OR r.id < j.id)
                      LIMIT p_max) c
            LIMIT p_max) c
    ) AS laned;
END $$;
