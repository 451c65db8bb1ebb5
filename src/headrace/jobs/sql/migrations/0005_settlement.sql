-- Functions that settle leases.

-- Release jobs of lanes: decrement inflight, and count unstarted, returned and lost jobs as
-- waiting again. An unstarted job returns its start, but only while its own entry must still
-- exist. A lane that was full and has work notifies the workers of its queues. One array element
-- per job; done jobs need only limiter, lane and lease and come last. Rows are found by key one at
-- a time and written by ctid, which no plan cached on empty tables can credit into a scan.
CREATE FUNCTION headrace.settle_lanes_v1(
    p_limiters text[], p_lanes text[], p_leases bigint[], p_queues integer[], p_outcomes text[],
    p_granted_ats timestamptz[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '1s' AS $$
DECLARE
    v_now timestamptz;
    v_opened integer[];
BEGIN
    PERFORM 1 FROM (
        SELECT DISTINCT s.limiter, s.lane FROM unnest(p_limiters, p_lanes) AS s(limiter, lane)
            ORDER BY 1, 2
    ) w CROSS JOIN LATERAL (
        SELECT FROM headrace.lane l WHERE l.limiter = w.limiter
            AND l.name = w.lane FOR NO KEY UPDATE) l;
    v_now := clock_timestamp();
    WITH sums AS (
        SELECT s.limiter, s.lane, array_agg(s.lease) AS leases
        FROM unnest(p_limiters, p_lanes, p_leases) AS s(limiter, lane, lease) GROUP BY 1, 2
    ), back AS (
        SELECT s.limiter, s.lane, s.queue, count(*)::integer AS k
        FROM unnest(p_limiters, p_lanes, p_queues, p_outcomes) AS s(limiter, lane, queue, outcome)
        WHERE s.outcome IN ('unstarted', 'returned', 'lost') GROUP BY 1, 2, 3
    ), unspent AS (
        SELECT u.limiter, u.lane, e.entry, sum(u.k)::integer AS k FROM (
            SELECT s.limiter, s.lane, s.granted_at, count(*) AS k
            FROM unnest(p_limiters, p_lanes, p_outcomes, p_granted_ats)
                AS s(limiter, lane, outcome, granted_at)
            WHERE s.outcome = 'unstarted' GROUP BY 1, 2, 3
        ) u CROSS JOIN LATERAL (
            SELECT l.at, l.window_s FROM headrace.lane l
            WHERE l.limiter = u.limiter AND l.name = u.lane OFFSET 0
        ) l CROSS JOIN LATERAL (
            SELECT i AS entry FROM generate_subscripts(l.at, 1) AS i WHERE l.at[i] >= u.granted_at
            ORDER BY l.at[i], i LIMIT 1
        ) e WHERE u.granted_at > v_now - l.window_s * interval '1 s' GROUP BY 1, 2, 3
    ), released AS (
        UPDATE headrace.lane l SET
            inflight = CASE WHEN l.concurrency IS NULL THEN 0 ELSE l.inflight - (
                SELECT count(*) FROM unnest(b.leases) AS s(lease) WHERE s.lease > l.counted_from
            ) END,
            n = coalesce(b.n, l.n),
            free_at = CASE WHEN b.n IS NULL THEN l.free_at ELSE '-infinity' END
        FROM (
            SELECT o.ctid, s.leases,
                coalesce(o.inflight + o.uncounted >= o.concurrency, false) AS was_full,
                CASE WHEN EXISTS (SELECT FROM unspent u
                    WHERE u.limiter = s.limiter AND u.lane = s.lane)
                THEN ARRAY(
                    SELECT greatest(0, o.n[i] - coalesce(u.k, 0))
                        FROM generate_subscripts(o.n, 1) AS i
                    LEFT JOIN unspent u ON u.limiter = s.limiter AND u.lane = s.lane AND u.entry = i
                    ORDER BY i) END AS n
            FROM sums s CROSS JOIN LATERAL (
                SELECT o.ctid, o.inflight, o.uncounted, o.concurrency, o.n FROM headrace.lane o
                WHERE o.limiter = s.limiter AND o.name = s.lane OFFSET 0) o
        ) b WHERE l.ctid = b.ctid
        RETURNING l.limiter, l.name, b.was_full, b.was_full OR b.n IS NOT NULL AS is_opened,
            CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                 WHEN l.inflight + l.uncounted >= l.concurrency THEN v_now + interval '1 s'
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

-- Put jobs of leases back: retries and snoozes into job_ready with their delay, moved ones into
-- the target queue as new, the rest where they were. A job that enters a lane without a grant of
-- it gets a journal row.
CREATE FUNCTION headrace.put_back_v1(p_jobs headrace.settlement[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    WITH back AS (
        SELECT r.id, coalesce(s.target, l.queue) AS queue,
               CASE WHEN s.outcome IN ('retry', 'snooze')
                    THEN now() + coalesce(s.delay_s, 0) * interval '1 s'
                    WHEN s.outcome = 'moved' THEN now() ELSE r.run_at END AS run_at,
               r.group_id, r.priority,
               CASE s.outcome WHEN 'moved' THEN 0
                    WHEN 'retry' THEN least(r.attempt + 1, 32767)
                    ELSE r.attempt END::smallint AS attempt,
               CASE s.outcome WHEN 'moved' THEN 0
                    WHEN 'lost' THEN least(r.losses + 1, 32767)
                    ELSE r.losses END::smallint AS losses,
               r.lane, s.unique_key,
               -- It has started, so it cannot expire any more.
               CASE WHEN length(r.headers) > 55 AND s.outcome IN ('retry', 'snooze')
                    THEN regexp_replace(r.headers, ' expires=\S+', '')
                    ELSE r.headers END AS headers,
               r.payload, r.version,
               CASE WHEN s.outcome IN ('retry', 'snooze')
                    THEN nullif(left(s.error, 500), '') END AS last_error,
               s.outcome = 'moved' AND r.lane IS NOT NULL AS is_moved,
               r.lane IS NOT NULL AND (s.outcome = 'moved' OR l.limiter IS NOT NULL
                   AND s.outcome NOT IN ('retry', 'snooze')) AS is_for_lane
        FROM headrace.job_lease l
        CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses,
                             l.lanes, l.headers, l.payloads, l.versions) WITH ORDINALITY
            AS r(id, run_at, group_id, priority, attempt, losses, lane, headers, payload,
                version,
                 ord)
        JOIN unnest(p_jobs) s ON s.lease = l.id AND s.ord = r.ord
        WHERE l.id = ANY(ARRAY(SELECT DISTINCT p.lease FROM unnest(p_jobs) p))
          AND s.outcome IN ('retry', 'snooze', 'unstarted', 'returned', 'lost', 'moved')
    ), laned AS (
        INSERT INTO headrace.lane_job
            (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, headers,
             payload, version, last_error)
        SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key,
            headers,
               payload, version, last_error FROM back WHERE is_for_lane
    ), journaled AS (
        INSERT INTO headrace.lane_event (limiter, lane, queue, k)
        SELECT q.limiter, b.lane, b.queue, count(*)
        FROM back b JOIN headrace.queue q ON q.id = b.queue WHERE b.is_moved GROUP BY 1, 2, 3
    )
    INSERT INTO headrace.job_ready
        (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, headers,
            payload,
         version, last_error)
    SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, headers,
           payload, version, last_error FROM back WHERE NOT is_for_lane;
    PERFORM headrace.unpark_v1(ARRAY(
        SELECT s.id FROM unnest(p_jobs) s WHERE s.outcome <> 'moved'));
    PERFORM pg_notify('headrace_jobs', q::text) FROM (
        SELECT DISTINCT coalesce(s.target, s.queue) FROM unnest(p_jobs) s
        WHERE s.outcome IN ('returned', 'lost', 'moved')) AS queues(q);
END $$;

-- Store jobs that failed, were cancelled or quarantined. Store done jobs whose queue keeps them;
-- for an hour if the queue keeps only results.
CREATE FUNCTION headrace.keep_ended_v1(p_jobs headrace.settlement[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    WITH ended AS (
        SELECT l.queue, r.*, s.outcome, s.error, s.traceback, s.result, q.keep_result,
               now() + coalesce(q.keep_done_s, 3600) * interval '1 s' AS drop_at
        FROM headrace.job_lease l
        JOIN headrace.queue q ON q.id = l.queue
        CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses,
                             l.lanes, l.unique_keys, l.headers, l.payloads, l.versions)
            WITH ORDINALITY
            AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key, headers,
                 payload, version, ord)
        JOIN unnest(p_jobs) s ON s.lease = l.id AND s.ord = r.ord
        WHERE l.id = ANY(ARRAY(SELECT DISTINCT p.lease FROM unnest(p_jobs) p))
          AND (s.outcome IN ('fail', 'cancel', 'quarantined')
               OR s.outcome = 'done' AND (q.keep_done_s IS NOT NULL OR q.keep_result))
    ), kept AS (
        INSERT INTO headrace.job_done
            (id, queue, run_at, ended_at, drop_at, group_id, priority, attempt, losses, lane,
             unique_key, headers, version, payload, result)
        SELECT e.id, e.queue, e.run_at, now(), e.drop_at, e.group_id, e.priority, e.attempt,
            e.losses,
               e.lane, e.unique_key, e.headers, e.version, e.payload,
               CASE WHEN e.keep_result THEN e.result END
        FROM ended e WHERE e.outcome = 'done'
    )
    INSERT INTO headrace.job_failed
        (id, queue, state, run_at, group_id, priority, attempt, losses, lane, unique_key,
         headers, error, traceback, payload, version)
    SELECT e.id, e.queue,
           CASE e.outcome WHEN 'fail' THEN 'failed' WHEN 'cancel' THEN 'cancelled'
                ELSE e.outcome END,
           e.run_at, e.group_id, e.priority,
           least(e.attempt + (e.outcome = 'fail')::integer, 32767)::smallint,
           least(e.losses + (e.outcome = 'quarantined')::integer, 32767)::smallint,
           e.lane, e.unique_key, e.headers, coalesce(e.error, ''), coalesce(e.traceback, ''),
           e.payload, e.version
    FROM ended e WHERE e.outcome <> 'done';
END $$;

-- Release the unique keys of ended jobs and move those of moved jobs to the target queue. If the
-- key is taken there, the moved job continues without it. Runs before any lane lock, since a key
-- may be waited for.
CREATE FUNCTION headrace.settle_keys_v1(p_jobs headrace.settlement[])
RETURNS headrace.settlement[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_jobs headrace.settlement[];
BEGIN
    UPDATE headrace.job_unique u SET is_done = true FROM unnest(p_jobs) s
    WHERE s.outcome = 'done' AND u.queue = s.queue AND u.key = s.unique_key AND u.job_id = s.id
      AND u.kept_until > now();
    DELETE FROM headrace.job_unique u USING unnest(p_jobs) s
    WHERE NOT u.is_done AND s.outcome IN ('done', 'fail', 'cancel', 'quarantined', 'moved')
      AND u.queue = s.queue AND u.key = s.unique_key AND u.job_id = s.id;
    IF NOT EXISTS (SELECT FROM unnest(p_jobs) s WHERE s.outcome = 'moved') THEN
        RETURN p_jobs;
    END IF;
    INSERT INTO headrace.job_unique (queue, key, job_id)
    SELECT s.target, s.unique_key, s.id FROM unnest(p_jobs) s
    WHERE s.outcome = 'moved' AND s.unique_key IS NOT NULL ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    SELECT array_agg((s.lease, s.ord, s.id, s.queue, s.limiter, s.granted_at, s.lane, s.group_id,
                      CASE WHEN s.outcome <> 'moved' OR u.job_id = s.id THEN s.unique_key END,
                      s.outcome, s.delay_s, s.error, s.traceback, s.result, s.target)
                     ::headrace.settlement)
    INTO v_jobs FROM unnest(p_jobs) s
    LEFT JOIN headrace.job_unique u ON u.queue = s.target AND u.key = s.unique_key;
    RETURN v_jobs;
END $$;

-- Remove ended jobs from their chains; what is now the first of its chain becomes due.
CREATE FUNCTION headrace.advance_chains_v1(p_ids bigint[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_queues integer[];
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(c.chain, c.queue)) FROM (
        SELECT DISTINCT o.queue, o.chain FROM headrace.job_chain o WHERE o.job_id = ANY(p_ids)
        ORDER BY 1, 2) c;
    WITH ended AS (
        DELETE FROM headrace.job_chain o WHERE o.job_id = ANY(p_ids) RETURNING *
    ), next AS (
        SELECT f.* FROM (SELECT DISTINCT e.queue, e.chain FROM ended e) c CROSS JOIN LATERAL (
            SELECT o.job_id, o.due_at FROM headrace.job_chain o
            WHERE o.queue = c.queue AND o.chain = c.chain AND o.job_id <> ALL(p_ids)
            ORDER BY o.n LIMIT 1) f
    ), due AS (
        UPDATE headrace.job_ready r SET run_at = greatest(n.due_at, now()) FROM next n
        WHERE r.id = n.job_id AND r.run_at >= '9999-01-01' RETURNING r.queue
    )
    SELECT array_agg(DISTINCT d.queue) INTO v_queues FROM due d;
    PERFORM pg_notify('headrace_jobs', q::text) FROM unnest(v_queues) AS q;
END $$;

-- Settle jobs of leases that the caller holds locked. Locks are taken in one order everywhere:
-- keys, chains, lanes by (limiter, name), then groups by id. Lock waits are short, since a caller's
-- transaction that adds to a group or holds a key may stay open. p_limiters, p_lanes, p_leases:
-- lanes of further done jobs whose leases are already deleted.
CREATE FUNCTION headrace.settle_jobs_v1(
    p_jobs headrace.settlement[], p_limiters text[], p_lanes text[], p_leases bigint[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '1s' AS $$
DECLARE
    v_jobs headrace.settlement[] := p_jobs;
    v_outcomes text[];
    v_has_keys boolean;
    v_limiters text[];
    v_lanes text[];
    v_leases bigint[];
    v_queues integer[];
    v_lane_outcomes text[];
    v_granted_ats timestamptz[];
    v_groups bigint[];
    v_states text[];
BEGIN
    SELECT array_agg(DISTINCT s.outcome), bool_or(s.unique_key IS NOT NULL)
    INTO v_outcomes, v_has_keys FROM unnest(v_jobs) s;
    IF v_has_keys THEN
        v_jobs := headrace.settle_keys_v1(v_jobs);
    END IF;
    IF EXISTS (SELECT FROM headrace.job_chain)
       AND v_outcomes && ARRAY['done', 'fail', 'cancel', 'quarantined', 'moved'] THEN
        PERFORM headrace.advance_chains_v1(ARRAY(
            SELECT s.id FROM unnest(v_jobs) s
            WHERE s.outcome IN ('done', 'fail', 'cancel', 'quarantined', 'moved')));
    END IF;
    SELECT array_agg(s.limiter), array_agg(s.lane), array_agg(s.lease), array_agg(s.queue),
           array_agg(s.outcome), array_agg(s.granted_at)
    INTO v_limiters, v_lanes, v_leases, v_queues, v_lane_outcomes, v_granted_ats
    FROM unnest(v_jobs) s WHERE s.limiter IS NOT NULL;
    IF v_limiters || p_limiters <> '{}' THEN
        PERFORM headrace.settle_lanes_v1(
            v_limiters || p_limiters, v_lanes || p_lanes, v_leases || p_leases, v_queues,
            v_lane_outcomes, v_granted_ats);
    END IF;
    IF v_outcomes && ARRAY['retry', 'snooze', 'unstarted', 'returned', 'lost', 'moved'] THEN
        PERFORM headrace.put_back_v1(v_jobs);
    END IF;
    IF v_outcomes && ARRAY['fail', 'cancel', 'quarantined'] OR EXISTS (
        SELECT FROM headrace.queue q WHERE (q.keep_done_s IS NOT NULL OR q.keep_result)
        AND q.id = ANY(ARRAY(SELECT DISTINCT s.queue FROM unnest(v_jobs) s))
    ) THEN
        PERFORM headrace.keep_ended_v1(v_jobs);
    END IF;
    INSERT INTO headrace.job_count (queue, done, failed, cancelled, retried, lost)
    SELECT s.queue, count(*) FILTER (WHERE s.outcome = 'done'),
           count(*) FILTER (WHERE s.outcome IN ('fail', 'quarantined')),
           count(*) FILTER (WHERE s.outcome = 'cancel'),
           count(*) FILTER (WHERE s.outcome IN ('retry', 'snooze', 'moved')),
           count(*) FILTER (WHERE s.outcome = 'lost')
    FROM unnest(v_jobs) s WHERE s.outcome NOT IN ('returned', 'unstarted') GROUP BY s.queue;
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
           array_agg(CASE s.outcome WHEN 'fail' THEN 'failed' WHEN 'cancel' THEN 'cancelled'
                     ELSE s.outcome END)
    INTO v_groups, v_states FROM unnest(v_jobs) s
    WHERE s.outcome IN ('done', 'fail', 'cancel', 'quarantined') AND s.group_id IS NOT NULL;
    IF v_groups IS NOT NULL THEN
        PERFORM headrace.keep_member_results_v1(v_jobs);
        PERFORM headrace.finish_members_v1(v_groups, v_states);
    END IF;
END $$;

-- Settle leases: the leases p_whole with p_outcome for every job left, and single jobs p_ids of
-- the leases p_leases. A job that was settled before keeps its outcome. Outcomes: done, fail,
-- cancel and quarantined end a job; retry and snooze (after delay_s), moved (to the named queue),
-- unstarted (returns its start), returned and lost (its process died; quarantined at p_losses_max)
-- put it back. Return `lost`: leases that no longer exist, nothing was recorded; `busy`: leases
-- that a handler's own transaction holds, to be settled later.
CREATE FUNCTION headrace.settle_v1(
    p_whole bigint[], p_outcome text, p_leases bigint[], p_ids bigint[], p_outcomes text[],
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
    v_leases bigint[];
BEGIN
    -- Common case: a whole plain batch is done. One delete.
    IF p_outcome = 'done' AND p_whole <> '{}' THEN
        WITH plain AS (
            DELETE FROM headrace.job_lease d WHERE d.ctid = ANY(ARRAY(
                SELECT l.ctid FROM headrace.job_lease l WHERE l.id = ANY(p_whole) AND l.is_plain
                  AND (NOT l.is_counted OR l.settled = '{}')
                FOR UPDATE SKIP LOCKED))
            RETURNING d.id, d.queue, CASE WHEN d.is_counted THEN d.limiter END AS limiter,
                CASE WHEN d.is_counted THEN d.lanes END AS lanes,
                d.jobs - cardinality(d.settled) AS jobs
        ), counted AS (
            INSERT INTO headrace.job_count (queue, done)
            SELECT p.queue, sum(p.jobs) FROM plain p GROUP BY p.queue
        ), laned AS (
            SELECT p.id, p.limiter, u.lane
            FROM plain p CROSS JOIN LATERAL unnest(p.lanes) AS u(lane)
            WHERE p.limiter IS NOT NULL
        )
        SELECT ARRAY(SELECT a.id FROM unnest(p_whole) AS a(id)
                     WHERE NOT EXISTS (SELECT FROM plain p WHERE p.id = a.id)),
               ARRAY(SELECT l.limiter FROM laned l), ARRAY(SELECT l.lane FROM laned l),
               ARRAY(SELECT l.id FROM laned l)
        INTO v_whole, v_limiters, v_lanes, v_leases;
    END IF;
    IF p_progressed <> '{}' THEN
        DELETE FROM headrace.job_progress p WHERE p.job_id = ANY(p_progressed);
    END IF;
    v_all := v_whole || p_leases;
    IF v_all = '{}' THEN
        IF v_limiters <> '{}' THEN
            PERFORM headrace.settle_lanes_v1(v_limiters, v_lanes, v_leases, '{}', '{}', '{}');
        END IF;
        RETURN;
    END IF;
    SELECT coalesce(array_agg(h.id), '{}') INTO v_held FROM (
        SELECT l.id FROM headrace.job_lease l WHERE l.id = ANY(v_all) ORDER BY l.id
        FOR UPDATE SKIP LOCKED) h;
    -- A job that ends changes its lane only if jobs in flight are counted.
    SELECT array_agg((l.id, r.ord, r.id, l.queue,
                      CASE WHEN l.is_counted OR w.outcome IN ('unstarted', 'returned', 'lost')
                           THEN l.limiter END,
                      l.granted_at, r.lane, r.group_id, r.unique_key, w.outcome, e.delay_s,
                      CASE WHEN w.outcome = 'quarantined' AND coalesce(e.error, '') = ''
                           THEN format('the process that ran it died %s times', r.losses + 1)
                           WHEN w.outcome = 'fail' AND e.outcome = 'moved'
                           THEN format('send_to: queue %s is not known', e.queue)
                           ELSE e.error END,
                      e.traceback, e.result, CASE WHEN w.outcome = 'moved' THEN t.id END
                     )::headrace.settlement)
    INTO v_jobs
    FROM headrace.job_lease l
    CROSS JOIN LATERAL unnest(l.ids, l.lanes, l.group_ids, l.unique_keys, l.losses) WITH ORDINALITY
        AS r(id, lane, group_id, unique_key, losses, ord)
    LEFT JOIN unnest(p_leases, p_ids, p_outcomes, p_delays_s, p_errors, p_tracebacks, p_results,
        p_queues)
        AS e(lease, id, outcome, delay_s, error, traceback, result, queue)
      ON e.lease = l.id AND e.id = r.id
    LEFT JOIN headrace.queue t ON t.id = CASE WHEN e.outcome = 'moved' THEN coalesce(
        (SELECT q.id FROM headrace.queue q WHERE q.name = e.queue),
        (SELECT a.queue FROM headrace.queue_alias a WHERE a.name = e.queue)) END
    CROSS JOIN LATERAL (
        SELECT CASE WHEN coalesce(e.outcome, p_outcome) = 'lost' AND r.losses + 1 >= p_losses_max
                    THEN 'quarantined'
                    WHEN e.outcome = 'moved' AND t.id IS NULL THEN 'fail'
                    ELSE coalesce(e.outcome, p_outcome) END AS outcome
    ) w
    WHERE l.id = ANY(v_held) AND r.id <> ALL(l.settled)
      AND (e.lease IS NOT NULL OR l.id = ANY(v_whole));
    -- Lock all lanes at once, in one order.
    IF v_jobs IS NOT NULL OR v_limiters <> '{}' THEN
        PERFORM headrace.settle_jobs_v1(v_jobs, v_limiters, v_lanes, v_leases);
    END IF;
    IF cardinality(v_held) < cardinality(v_all) THEN
        RETURN QUERY
        SELECT array_agg(u.id) FILTER (WHERE l.id IS NULL),
               array_agg(u.id) FILTER (WHERE l.id IS NOT NULL)
        FROM (SELECT DISTINCT a.id FROM unnest(v_all) AS a(id) WHERE a.id <> ALL(v_held)) u
        LEFT JOIN headrace.job_lease l ON l.id = u.id;
    END IF;
END $$;

-- Settle leases whose jobs are all done.
CREATE FUNCTION headrace.ack_v1(p_done bigint[])
RETURNS TABLE (lost bigint[], busy bigint[]) LANGUAGE sql AS $$
    SELECT * FROM headrace.settle_v1(
        p_done, 'done', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 1, '{}');
$$;

-- Return the jobs of one lease of an expired or missing host. Return how many. Jobs of a taker
-- count no loss; those of a host count one. A lease that a handler's own transaction holds is left
-- for the next call.
CREATE FUNCTION headrace.return_lease_v1(p_lease bigint, p_losses_max integer)
RETURNS integer LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_jobs integer;
    v_outcome text;
BEGIN
    SELECT cardinality(l.ids) - cardinality(l.settled),
           CASE WHEN EXISTS (SELECT FROM headrace.host h WHERE h.id = l.host AND h.kind = 'taker')
                THEN 'returned' ELSE 'lost' END
    INTO v_jobs, v_outcome FROM headrace.job_lease l
    WHERE l.id = p_lease AND NOT EXISTS (
        SELECT FROM headrace.host h WHERE h.id = l.host AND h.expires_at > now())
    FOR UPDATE OF l SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    PERFORM headrace.settle_v1(ARRAY[p_lease], v_outcome, '{}', '{}', '{}', '{}', '{}', '{}', '{}',
        '{}',
                               p_losses_max, '{}');
    RETURN v_jobs;
END $$;

-- Create partitions of job_done ahead of need and drop expired ones. Return how many of both. One
-- caller at a time. No call waits for a lock: the next call does the rest.
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
    v_ahead_s := CASE WHEN v_ahead_s < 8640000 THEN v_ahead_s + 43200 WHEN v_ahead_s > 0
        THEN 8683200 END;
    WHILE v_count < 24 AND v_start < now() + v_ahead_s * interval '1 s' LOOP
        v_name := to_char(v_start AT TIME ZONE 'UTC', '"job_done_"YYYYMMDDHH24');
        IF to_regclass('headrace.' || v_name) IS NULL THEN
            -- Otherwise a concurrent insert into job_done_rest would be refused.
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
