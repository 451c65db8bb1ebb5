-- Taking jobs back, several leases in one call, and keeping what is to be kept of done ones.

-- Done jobs that a queue keeps, with their results. Partitions by when they may go, dropped whole; the last one
-- catches what has none yet.
CREATE TABLE headrace.job_done (
    id bigint NOT NULL,
    queue integer NOT NULL,
    run_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
    drop_at timestamptz NOT NULL,
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    losses smallint NOT NULL,
    lane text,
    unique_key text,
    traceparent text,
    version smallint NOT NULL,
    payload bytea NOT NULL,
    result bytea,
    PRIMARY KEY (id, drop_at)
) PARTITION BY RANGE (drop_at);
CREATE TABLE headrace.job_done_rest PARTITION OF headrace.job_done DEFAULT;
CREATE INDEX job_done_rest_drop ON headrace.job_done_rest (drop_at);

-- How far jobs are that say so. Not logged: after a crash it is said anew or not missed.
CREATE UNLOGGED TABLE headrace.job_progress (
    job_id bigint PRIMARY KEY,
    ratio real NOT NULL,
    text text NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);

-- A job of a lease and what becomes of it.
CREATE TYPE headrace.settlement AS (
    lease bigint, ord integer, id bigint, queue integer, limiter text, granted_at timestamptz,
    lane text, group_id bigint, unique_key text,
    word text, delay_s double precision, error text, traceback text, result bytea, target integer
);

-- Release jobs of lanes: in flight goes down; what comes back unstarted, returned or lost waits again; an unstarted
-- job gives its grant back, but only while its own entry must still be there (else it would take another's).
-- A lane that was full and has work wakes the workers of its queues. One entry a job; done ones need no more than their
-- limiter and lane, and come last. Rows are found by key one at a time and written by ctid, whatever a plan that was
-- cached on empty tables believes: such plans walked every lane of a limiter (363 ms a claim with 5,000 of them).
CREATE FUNCTION headrace.settle_lanes_v2(
    p_limiters text[], p_lanes text[], p_queues integer[], p_words text[], p_granted_ats timestamptz[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '1s' AS $$
DECLARE
    v_now timestamptz;
    v_opened integer[];
BEGIN
    PERFORM 1 FROM (
        SELECT DISTINCT s.limiter, s.lane FROM unnest(p_limiters, p_lanes) AS s(limiter, lane) ORDER BY 1, 2
    ) w CROSS JOIN LATERAL (
        SELECT FROM headrace.lane l WHERE l.limiter = w.limiter AND l.name = w.lane FOR NO KEY UPDATE) l;
    v_now := clock_timestamp();
    WITH sums AS (
        SELECT s.limiter, s.lane, count(*)::integer AS k
        FROM unnest(p_limiters, p_lanes) AS s(limiter, lane) GROUP BY 1, 2
    ), back AS (
        SELECT s.limiter, s.lane, s.queue, count(*)::integer AS k
        FROM unnest(p_limiters, p_lanes, p_queues, p_words) AS s(limiter, lane, queue, word)
        WHERE s.word IN ('unstarted', 'returned', 'lost') GROUP BY 1, 2, 3
    ), unspent AS (
        SELECT u.limiter, u.lane, e.entry, sum(u.k)::integer AS k FROM (
            SELECT s.limiter, s.lane, s.granted_at, count(*) AS k
            FROM unnest(p_limiters, p_lanes, p_words, p_granted_ats) AS s(limiter, lane, word, granted_at)
            WHERE s.word = 'unstarted' GROUP BY 1, 2, 3
        ) u CROSS JOIN LATERAL (
            SELECT l.at, l.window_s FROM headrace.lane l
            WHERE l.limiter = u.limiter AND l.name = u.lane OFFSET 0
        ) l CROSS JOIN LATERAL (
            SELECT i AS entry FROM generate_subscripts(l.at, 1) AS i WHERE l.at[i] >= u.granted_at
            ORDER BY l.at[i], i LIMIT 1
        ) e WHERE u.granted_at > v_now - l.window_s * interval '1 s' GROUP BY 1, 2, 3
    ), released AS (
        UPDATE headrace.lane l SET
            inflight = l.inflight - b.k,
            n = coalesce(b.n, l.n),
            free_at = CASE WHEN b.n IS NULL THEN l.free_at ELSE '-infinity' END
        FROM (
            SELECT o.ctid, s.k, coalesce(o.inflight >= o.concurrency, false) AS was_full,
                CASE WHEN EXISTS (SELECT FROM unspent u WHERE u.limiter = s.limiter AND u.lane = s.lane)
                THEN ARRAY(
                    SELECT greatest(0, o.n[i] - coalesce(u.k, 0)) FROM generate_subscripts(o.n, 1) AS i
                    LEFT JOIN unspent u ON u.limiter = s.limiter AND u.lane = s.lane AND u.entry = i
                    ORDER BY i) END AS n
            FROM sums s CROSS JOIN LATERAL (
                SELECT o.ctid, o.inflight, o.concurrency, o.n FROM headrace.lane o
                WHERE o.limiter = s.limiter AND o.name = s.lane OFFSET 0) o
        ) b WHERE l.ctid = b.ctid
        RETURNING l.limiter, l.name, b.was_full, b.was_full OR b.n IS NOT NULL AS is_opened,
            CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                 ELSE greatest(l.free_at, v_now) END AS next_at
    ), hinted AS (
        UPDATE headrace.lane_queue q SET
            waiting = q.waiting + t.k,
            ready_at = CASE WHEN q.waiting + t.k <= 0 THEN 'infinity'
                            WHEN t.is_opened OR q.waiting <= 0 THEN least(q.ready_at, t.next_at)
                            ELSE q.ready_at END
        FROM (
            SELECT w.ctid, coalesce(b.k, 0) AS k, r.was_full, r.is_opened, r.next_at
            FROM (
                SELECT r.* FROM released r WHERE r.is_opened OR EXISTS (
                    SELECT FROM back b WHERE b.limiter = r.limiter AND b.lane = r.name)
            ) r CROSS JOIN LATERAL (
                SELECT w.ctid, w.queue FROM headrace.lane_queue w
                WHERE w.limiter = r.limiter AND w.lane = r.name OFFSET 0
            ) w LEFT JOIN back b ON b.limiter = r.limiter AND b.lane = r.name AND b.queue = w.queue
            WHERE r.is_opened OR b.k > 0
        ) t WHERE q.ctid = t.ctid
        RETURNING q.queue, t.was_full AND q.waiting > 0 AND q.ready_at < 'infinity' AS is_opened
    )
    SELECT array_agg(DISTINCT h.queue) INTO v_opened FROM hinted h WHERE h.is_opened;
    PERFORM pg_notify('headrace_jobs', q::text) FROM unnest(v_opened) AS q;
END $$;

-- Put jobs of leases back: retries and snoozes into job_ready after their delay, moved ones into their other queue
-- as new, the rest where they were. A job that goes to a lane it was not granted for has its line in the journal.
CREATE FUNCTION headrace.put_back_v2(p_jobs headrace.settlement[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    WITH back AS (
        SELECT r.id, coalesce(s.target, l.queue) AS queue,
               CASE WHEN s.word IN ('retry', 'snooze')
                    THEN now() + coalesce(s.delay_s, 0) * interval '1 s'
                    WHEN s.word = 'moved' THEN now() ELSE r.run_at END AS run_at,
               r.group_id, r.priority,
               CASE s.word WHEN 'moved' THEN 0
                    WHEN 'retry' THEN least(r.attempt + 1, 32767) ELSE r.attempt END::smallint AS attempt,
               CASE s.word WHEN 'moved' THEN 0
                    WHEN 'lost' THEN least(r.losses + 1, 32767) ELSE r.losses END::smallint AS losses,
               r.lane, s.unique_key, r.traceparent, r.payload, coalesce(r.version, 1) AS version,
               CASE WHEN s.word = 'retry' THEN nullif(left(s.error, 500), '') END AS last_error,
               s.word = 'moved' AND r.lane IS NOT NULL AS is_moved,
               r.lane IS NOT NULL AND (s.word = 'moved' OR l.limiter IS NOT NULL
                   AND s.word NOT IN ('retry', 'snooze')) AS is_for_lane
        FROM headrace.job_lease l
        CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses,
                             l.lanes, l.traceparents, l.payloads, l.versions) WITH ORDINALITY
            AS r(id, run_at, group_id, priority, attempt, losses, lane, traceparent, payload, version,
                 ord)
        JOIN unnest(p_jobs) s ON s.lease = l.id AND s.ord = r.ord
        WHERE l.id = ANY(ARRAY(SELECT DISTINCT p.lease FROM unnest(p_jobs) p))
          AND s.word IN ('retry', 'snooze', 'unstarted', 'returned', 'lost', 'moved')
    ), laned AS (
        INSERT INTO headrace.lane_job
            (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
             payload, version, last_error)
        SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
               payload, version, last_error FROM back WHERE is_for_lane
    ), told AS (
        INSERT INTO headrace.lane_event (limiter, lane, queue, k)
        SELECT q.limiter, b.lane, b.queue, count(*)
        FROM back b JOIN headrace.queue q ON q.id = b.queue WHERE b.is_moved GROUP BY 1, 2, 3
    )
    INSERT INTO headrace.job_ready
        (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent, payload,
         version, last_error)
    SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
           payload, version, last_error FROM back WHERE NOT is_for_lane;
    PERFORM pg_notify('headrace_jobs', q::text) FROM (
        SELECT DISTINCT coalesce(s.target, s.queue) FROM unnest(p_jobs) s
        WHERE s.word IN ('returned', 'lost', 'moved')) AS told(q);
END $$;

-- Keep jobs that ended failed, cancelled or quarantined; of done ones those whose queue says so, an hour where it
-- keeps the result alone.
CREATE FUNCTION headrace.keep_ended_v1(p_jobs headrace.settlement[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    WITH ended AS (
        SELECT l.queue, r.*, s.word, s.error, s.traceback, s.result, q.keep_result,
               now() + coalesce(q.keep_done_s, 3600) * interval '1 s' AS drop_at
        FROM headrace.job_lease l
        JOIN headrace.queue q ON q.id = l.queue
        CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses,
                             l.lanes, l.unique_keys, l.traceparents, l.payloads, l.versions)
            WITH ORDINALITY
            AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
                 payload, version, ord)
        JOIN unnest(p_jobs) s ON s.lease = l.id AND s.ord = r.ord
        WHERE l.id = ANY(ARRAY(SELECT DISTINCT p.lease FROM unnest(p_jobs) p))
          AND (s.word IN ('fail', 'cancel', 'quarantined')
               OR s.word = 'done' AND (q.keep_done_s IS NOT NULL OR q.keep_result))
    ), kept AS (
        INSERT INTO headrace.job_done
            (id, queue, run_at, ended_at, drop_at, group_id, priority, attempt, losses, lane,
             unique_key, traceparent, version, payload, result)
        SELECT e.id, e.queue, e.run_at, now(), e.drop_at, e.group_id, e.priority, e.attempt, e.losses,
               e.lane, e.unique_key, e.traceparent, coalesce(e.version, 1), e.payload,
               CASE WHEN e.keep_result THEN e.result END
        FROM ended e WHERE e.word = 'done'
    )
    INSERT INTO headrace.job_failed
        (id, queue, state, run_at, group_id, priority, attempt, losses, lane, unique_key,
         traceparent, error, traceback, payload, version)
    SELECT e.id, e.queue,
           CASE e.word WHEN 'fail' THEN 'failed' WHEN 'cancel' THEN 'cancelled' ELSE e.word END,
           e.run_at, e.group_id, e.priority,
           least(e.attempt + (e.word = 'fail')::integer, 32767)::smallint,
           least(e.losses + (e.word = 'quarantined')::integer, 32767)::smallint,
           e.lane, e.unique_key, e.traceparent, coalesce(e.error, ''), coalesce(e.traceback, ''),
           e.payload, coalesce(e.version, 1)
    FROM ended e WHERE e.word <> 'done';
END $$;

-- Release the keys of jobs that ended and carry those of moved ones into their other queue, where a job that has the
-- key already makes this one go on without. Before any lane is locked, since a key may have to be waited for.
CREATE FUNCTION headrace.settle_keys_v1(p_jobs headrace.settlement[])
RETURNS headrace.settlement[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_jobs headrace.settlement[];
BEGIN
    DELETE FROM headrace.job_unique u USING unnest(p_jobs) s
    WHERE s.word IN ('done', 'fail', 'cancel', 'quarantined', 'moved')
      AND u.queue = s.queue AND u.key = s.unique_key AND u.job_id = s.id;
    IF NOT EXISTS (SELECT FROM unnest(p_jobs) s WHERE s.word = 'moved') THEN
        RETURN p_jobs;
    END IF;
    INSERT INTO headrace.job_unique (queue, key, job_id)
    SELECT s.target, s.unique_key, s.id FROM unnest(p_jobs) s
    WHERE s.word = 'moved' AND s.unique_key IS NOT NULL ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    SELECT array_agg((s.lease, s.ord, s.id, s.queue, s.limiter, s.granted_at, s.lane, s.group_id,
                      CASE WHEN s.word <> 'moved' OR u.job_id = s.id THEN s.unique_key END,
                      s.word, s.delay_s, s.error, s.traceback, s.result, s.target)
                     ::headrace.settlement)
    INTO v_jobs FROM unnest(p_jobs) s
    LEFT JOIN headrace.job_unique u ON u.queue = s.target AND u.key = s.unique_key;
    RETURN v_jobs;
END $$;

-- Settle jobs whose leases the caller holds locked. Locks are waited for in one order everywhere: lanes by (limiter,
-- name), then groups by id; a short time only, since a user's transaction that adds to a group or has a key may stay
-- open. p_limiters, p_lanes: of further jobs, all done, whose leases are gone already.
CREATE FUNCTION headrace.settle_jobs_v1(
    p_jobs headrace.settlement[], p_limiters text[], p_lanes text[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '1s' AS $$
DECLARE
    v_jobs headrace.settlement[] := p_jobs;
    v_words text[];
    v_has_keys boolean;
    v_limiters text[];
    v_lanes text[];
    v_queues integer[];
    v_lane_words text[];
    v_granted_ats timestamptz[];
    v_groups bigint[];
    v_states text[];
BEGIN
    SELECT array_agg(DISTINCT s.word), bool_or(s.unique_key IS NOT NULL)
    INTO v_words, v_has_keys FROM unnest(v_jobs) s;
    IF v_has_keys THEN
        v_jobs := headrace.settle_keys_v1(v_jobs);
    END IF;
    SELECT array_agg(s.limiter), array_agg(s.lane), array_agg(s.queue), array_agg(s.word),
           array_agg(s.granted_at)
    INTO v_limiters, v_lanes, v_queues, v_lane_words, v_granted_ats
    FROM unnest(v_jobs) s WHERE s.limiter IS NOT NULL;
    IF v_limiters || p_limiters <> '{}' THEN
        PERFORM headrace.settle_lanes_v2(
            v_limiters || p_limiters, v_lanes || p_lanes, v_queues, v_lane_words, v_granted_ats);
    END IF;
    IF v_words && ARRAY['retry', 'snooze', 'unstarted', 'returned', 'lost', 'moved'] THEN
        PERFORM headrace.put_back_v2(v_jobs);
    END IF;
    IF v_words && ARRAY['fail', 'cancel', 'quarantined'] OR EXISTS (
        SELECT FROM headrace.queue q WHERE (q.keep_done_s IS NOT NULL OR q.keep_result)
        AND q.id = ANY(ARRAY(SELECT DISTINCT s.queue FROM unnest(v_jobs) s))
    ) THEN
        PERFORM headrace.keep_ended_v1(v_jobs);
    END IF;
    WITH parts AS (
        SELECT s.lease, array_agg(s.id) AS ids FROM unnest(v_jobs) s GROUP BY s.lease
    ), marked AS (
        UPDATE headrace.job_lease l SET settled = l.settled || p.ids FROM parts p
        WHERE l.id = p.lease
          AND cardinality(l.settled) + cardinality(p.ids) < cardinality(l.ids)
    )
    DELETE FROM headrace.job_lease l USING parts p
    WHERE l.id = p.lease AND cardinality(l.settled) + cardinality(p.ids) >= cardinality(l.ids);
    SELECT array_agg(s.group_id),
           array_agg(CASE s.word WHEN 'fail' THEN 'failed' WHEN 'cancel' THEN 'cancelled' ELSE s.word END)
    INTO v_groups, v_states FROM unnest(v_jobs) s
    WHERE s.word IN ('done', 'fail', 'cancel', 'quarantined') AND s.group_id IS NOT NULL;
    IF v_groups IS NOT NULL THEN
        PERFORM headrace.finish_members_v2(v_groups, v_states);
    END IF;
END $$;

-- Settle leases: p_whole with p_word for all jobs that are left, and of others the jobs p_ids of leases p_leases. A
-- job that was settled before stays as it was. Words: done, fail, cancel, quarantined end it; retry and snooze
-- (after delay_s), moved (to the queue of that name), unstarted (hands its grant back), returned, lost (its
-- process died; quarantined at p_losses_max) put it back. `lost`: leases that are gone, nothing was recorded;
-- `busy`: leases that a handler's own transaction holds, to be settled later.
CREATE FUNCTION headrace.settle_v2(
    p_whole bigint[], p_word text, p_leases bigint[], p_ids bigint[], p_words text[],
    p_delays_s double precision[], p_errors text[], p_tracebacks text[], p_results bytea[],
    p_queues text[], p_losses_max integer, p_progressed bigint[]
) RETURNS TABLE (lost bigint[], busy bigint[])
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_whole bigint[] := p_whole;
    v_all bigint[];
    v_held bigint[];
    v_jobs headrace.settlement[];
    v_limiters text[];
    v_lanes text[];
BEGIN
    -- The common case, a whole batch done with nothing hanging on it but lanes, is one delete.
    IF p_word = 'done' AND p_whole <> '{}' THEN
        WITH plain AS (
            DELETE FROM headrace.job_lease d WHERE d.ctid = ANY(ARRAY(
                SELECT l.ctid FROM headrace.job_lease l WHERE l.id = ANY(p_whole) AND l.is_plain
                  AND (l.limiter IS NULL OR l.settled = '{}')
                FOR UPDATE SKIP LOCKED))
            RETURNING d.id, d.limiter, d.lanes
        ), laned AS (
            SELECT p.limiter, u.lane FROM plain p CROSS JOIN LATERAL unnest(p.lanes) AS u(lane)
            WHERE p.limiter IS NOT NULL
        )
        SELECT ARRAY(SELECT a.id FROM unnest(p_whole) AS a(id)
                     WHERE NOT EXISTS (SELECT FROM plain p WHERE p.id = a.id)),
               ARRAY(SELECT l.limiter FROM laned l), ARRAY(SELECT l.lane FROM laned l)
        INTO v_whole, v_limiters, v_lanes;
    END IF;
    IF p_progressed <> '{}' THEN
        DELETE FROM headrace.job_progress p WHERE p.job_id = ANY(p_progressed);
    END IF;
    v_all := v_whole || p_leases;
    IF v_all = '{}' THEN
        IF v_limiters <> '{}' THEN
            PERFORM headrace.settle_lanes_v2(v_limiters, v_lanes, '{}', '{}', '{}');
        END IF;
        RETURN;
    END IF;
    SELECT coalesce(array_agg(h.id), '{}') INTO v_held FROM (
        SELECT l.id FROM headrace.job_lease l WHERE l.id = ANY(v_all) ORDER BY l.id
        FOR UPDATE SKIP LOCKED) h;
    SELECT array_agg((l.id, r.ord, r.id, l.queue, l.limiter, l.granted_at, r.lane, r.group_id,
                      r.unique_key, w.word, e.delay_s,
                      CASE WHEN w.word = 'quarantined' AND coalesce(e.error, '') = ''
                           THEN format('the process that ran it died %s times', r.losses + 1)
                           WHEN w.word = 'fail' AND e.word = 'moved'
                           THEN format('send_to: queue %s is not known', e.queue)
                           ELSE e.error END,
                      e.traceback, e.result, CASE WHEN w.word = 'moved' THEN t.id END
                     )::headrace.settlement)
    INTO v_jobs
    FROM headrace.job_lease l
    CROSS JOIN LATERAL unnest(l.ids, l.lanes, l.group_ids, l.unique_keys, l.losses) WITH ORDINALITY
        AS r(id, lane, group_id, unique_key, losses, ord)
    LEFT JOIN unnest(p_leases, p_ids, p_words, p_delays_s, p_errors, p_tracebacks, p_results, p_queues)
        AS e(lease, id, word, delay_s, error, traceback, result, queue)
      ON e.lease = l.id AND e.id = r.id
    LEFT JOIN headrace.queue t ON t.id = CASE WHEN e.word = 'moved' THEN coalesce(
        (SELECT q.id FROM headrace.queue q WHERE q.name = e.queue),
        (SELECT a.queue FROM headrace.queue_alias a WHERE a.name = e.queue)) END
    CROSS JOIN LATERAL (
        SELECT CASE WHEN coalesce(e.word, p_word) = 'lost' AND r.losses + 1 >= p_losses_max
                    THEN 'quarantined'
                    WHEN e.word = 'moved' AND t.id IS NULL THEN 'fail'
                    ELSE coalesce(e.word, p_word) END AS word
    ) w
    WHERE l.id = ANY(v_held) AND r.id <> ALL(l.settled)
      AND (e.lease IS NOT NULL OR l.id = ANY(v_whole));
    -- All lanes at once, so that their locks are taken in one order.
    IF v_jobs IS NOT NULL OR v_limiters <> '{}' THEN
        PERFORM headrace.settle_jobs_v1(v_jobs, v_limiters, v_lanes);
    END IF;
    IF cardinality(v_held) < cardinality(v_all) THEN
        RETURN QUERY
        SELECT array_agg(u.id) FILTER (WHERE l.id IS NULL),
               array_agg(u.id) FILTER (WHERE l.id IS NOT NULL)
        FROM (SELECT DISTINCT a.id FROM unnest(v_all) AS a(id) WHERE a.id <> ALL(v_held)) u
        LEFT JOIN headrace.job_lease l ON l.id = u.id;
    END IF;
END $$;

-- Take the acks of leases whose jobs are all done.
CREATE FUNCTION headrace.ack_v1(p_done bigint[])
RETURNS TABLE (lost bigint[], busy bigint[]) LANGUAGE sql AS $$
    SELECT * FROM headrace.settle_v2(
        p_done, 'done', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 1, '{}');
$$;

-- Return one lease of a host that expired or is gone; return how many jobs went back. Those of a taker, who merely
-- went away, return without a loss; those of a host count one. A lease that its handler's own transaction holds
-- is left for the next time.
CREATE FUNCTION headrace.return_lease_v2(p_lease bigint, p_losses_max integer)
RETURNS integer LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_jobs integer;
    v_word text;
BEGIN
    SELECT cardinality(l.ids) - cardinality(l.settled),
           CASE WHEN EXISTS (SELECT FROM headrace.host h WHERE h.id = l.host AND h.kind = 'taker')
                THEN 'returned' ELSE 'lost' END
    INTO v_jobs, v_word FROM headrace.job_lease l
    WHERE l.id = p_lease AND NOT EXISTS (
        SELECT FROM headrace.host h WHERE h.id = l.host AND h.expires_at > now())
    FOR UPDATE OF l SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    PERFORM headrace.settle_v2(ARRAY[p_lease], v_word, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
                               p_losses_max, '{}');
    RETURN v_jobs;
END $$;

-- Make the partitions of kept jobs ahead of need and drop those whose time is over, some in each call; return how
-- many of both. One caller at a time, and none that waits for a lock: the next call does what this one could not.
CREATE FUNCTION headrace.tend_kept_v1()
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_ahead_s double precision;
    v_start timestamptz := date_bin('6 hours', now(), 'epoch');
    v_name text;
    v_count integer := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('headrace.job_done')) THEN
        RETURN 0;
    END IF;
    PERFORM set_config('lock_timeout', '200', true);
    FOR v_name IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'headrace.job_done'::regclass AND c.relname ~ '^job_done_[0-9]{10}$'
          AND c.relname < to_char(v_start AT TIME ZONE 'UTC', '"job_done_"YYYYMMDDHH24')
    LOOP
        EXECUTE format('DROP TABLE headrace.%I', v_name);
        v_count := v_count + 1;
    END LOOP;
    SELECT max(coalesce(q.keep_done_s, 3600)) INTO v_ahead_s FROM headrace.queue q
    WHERE q.keep_done_s IS NOT NULL OR q.keep_result;
    v_ahead_s := CASE WHEN v_ahead_s < 8640000 THEN v_ahead_s + 43200 WHEN v_ahead_s > 0 THEN 8683200 END;
    WHILE v_count < 24 AND v_start < now() + v_ahead_s * interval '1 s' LOOP
        v_name := to_char(v_start AT TIME ZONE 'UTC', '"job_done_"YYYYMMDDHH24');
        IF to_regclass('headrace.' || v_name) IS NULL THEN
            -- Else a row on its way to job_done_rest meanwhile would be refused there.
            LOCK TABLE ONLY headrace.job_done IN SHARE ROW EXCLUSIVE MODE;
            IF NOT EXISTS (
                SELECT FROM headrace.job_done_rest r
                WHERE r.drop_at >= v_start AND r.drop_at < v_start + interval '6 hours'
            ) THEN
                EXECUTE format(
                    'CREATE TABLE headrace.%I (LIKE headrace.job_done INCLUDING ALL)', v_name);
                EXECUTE format(
                    'ALTER TABLE headrace.job_done ATTACH PARTITION headrace.%I'
                    ' FOR VALUES FROM (%L) TO (%L)', v_name, v_start, v_start + interval '6 hours');
                v_count := v_count + 1;
            END IF;
        END IF;
        v_start := v_start + interval '6 hours';
    END LOOP;
    RETURN v_count;
EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
END $$;
