-- Functions that take jobs back. Whoever holds the lease row settles its jobs, so each leaves `leased` exactly
-- once. Locks are waited for in one order everywhere: the lease, its lanes by name, groups by id.

-- Release jobs of lanes: in flight goes down; what comes back unstarted or returned waits again; an unstarted job
-- gives its grant back, but only while its own entry must still be there (else it would take another's).
CREATE FUNCTION headrace.settle_lanes_v1(
    p_limiter text, p_queue integer, p_granted_at timestamptz, p_lanes text[], p_outcomes text[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_now timestamptz;
BEGIN
    PERFORM 1 FROM headrace.lane WHERE limiter = p_limiter AND name = ANY(p_lanes)
    ORDER BY name FOR NO KEY UPDATE;
    v_now := clock_timestamp();
    WITH sums AS (
        SELECT u.lane, count(*)::integer AS k,
               (count(*) FILTER (WHERE u.outcome = 'unstarted'))::integer AS unstarted,
               (count(*) FILTER (WHERE u.outcome IN ('unstarted', 'returned', 'lost')))::integer AS back
        FROM unnest(p_lanes, p_outcomes) AS u(lane, outcome) GROUP BY u.lane
    ), before AS (
        SELECT l.name, s.k, s.unstarted, s.back,
               coalesce(l.inflight >= l.concurrency, false) AS was_full,
               CASE WHEN s.unstarted > 0 AND p_granted_at > v_now - l.window_s * interval '1 s'
                    THEN (SELECT min(i) FROM generate_subscripts(l.at, 1) AS i
                          WHERE l.at[i] >= p_granted_at) END AS entry
        FROM sums s JOIN headrace.lane l ON l.limiter = p_limiter AND l.name = s.lane
    ), released AS (
        UPDATE headrace.lane l SET
            inflight = l.inflight - b.k,
            n = CASE WHEN b.entry IS NULL THEN l.n
                     ELSE l.n[:b.entry - 1] || greatest(0, l.n[b.entry] - b.unstarted)
                          || l.n[b.entry + 1:] END,
            free_at = CASE WHEN b.entry IS NULL THEN l.free_at ELSE '-infinity' END
        FROM before b WHERE l.limiter = p_limiter AND l.name = b.name
        RETURNING l.name, b.back, b.was_full OR b.entry IS NOT NULL AS is_opened,
            CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                 ELSE greatest(l.free_at, v_now) END AS next_at
    )
    UPDATE headrace.lane_queue q SET
        waiting = q.waiting + CASE WHEN q.queue = p_queue THEN r.back ELSE 0 END,
        ready_at = CASE
            WHEN q.waiting + CASE WHEN q.queue = p_queue THEN r.back ELSE 0 END <= 0 THEN 'infinity'
            WHEN r.is_opened OR q.waiting <= 0 THEN least(q.ready_at, r.next_at)
            ELSE q.ready_at END
    FROM released r
    WHERE q.limiter = p_limiter AND q.lane = r.name
      AND (r.is_opened OR (q.queue = p_queue AND r.back > 0));
END $$;

-- Put jobs of a lease back: retries and snoozes into job_ready after their delay; the rest where they were.
CREATE FUNCTION headrace.put_back_v1(
    p_lease bigint, p_ords integer[], p_outcomes text[], p_delays_s double precision[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    WITH back AS (
        SELECT r.id, l.queue,
               CASE WHEN s.outcome IN ('retry', 'snooze')
                    THEN now() + coalesce(s.delay_s, 0) * interval '1 s' ELSE r.run_at END AS run_at,
               r.group_id, r.priority,
               least(r.attempt + (s.outcome = 'retry')::integer, 32767)::smallint AS attempt,
               least(r.losses + (s.outcome = 'lost')::integer, 32767)::smallint AS losses,
               r.lane, r.unique_key, r.traceparent, r.payload,
               l.limiter IS NOT NULL AND s.outcome NOT IN ('retry', 'snooze') AS is_for_lane
        FROM headrace.job_lease l
        CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses,
                             l.lanes, l.unique_keys, l.traceparents, l.payloads) WITH ORDINALITY
            AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
                 payload, ord)
        JOIN unnest(p_ords, p_outcomes, p_delays_s) AS s(ord, outcome, delay_s) ON s.ord = r.ord
        WHERE l.id = p_lease AND s.outcome IN ('retry', 'snooze', 'unstarted', 'returned', 'lost')
    ), laned AS (
        INSERT INTO headrace.lane_job
            (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
             payload)
        SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
               payload FROM back WHERE is_for_lane
    )
    INSERT INTO headrace.job_ready
        (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent, payload)
    SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
           payload FROM back WHERE NOT is_for_lane;
END $$;

-- Keep jobs of a lease that ended failed or quarantined.
CREATE FUNCTION headrace.keep_failed_v1(
    p_lease bigint, p_ords integer[], p_outcomes text[], p_errors text[], p_tracebacks text[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.job_failed
        (id, queue, state, run_at, group_id, priority, attempt, losses, lane, unique_key,
         traceparent, error, traceback, payload)
    SELECT r.id, l.queue, CASE s.outcome WHEN 'fail' THEN 'failed' ELSE s.outcome END, r.run_at,
           r.group_id, r.priority,
           least(r.attempt + (s.outcome = 'fail')::integer, 32767)::smallint,
           least(r.losses + (s.outcome = 'quarantined')::integer, 32767)::smallint,
           r.lane, r.unique_key, r.traceparent, coalesce(s.error, ''), coalesce(s.traceback, ''),
           r.payload
    FROM headrace.job_lease l
    CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses, l.lanes,
                         l.unique_keys, l.traceparents, l.payloads) WITH ORDINALITY
        AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent, payload,
             ord)
    JOIN unnest(p_ords, p_outcomes, p_errors, p_tracebacks) AS s(ord, outcome, error, traceback)
      ON s.ord = r.ord
    WHERE l.id = p_lease AND s.outcome IN ('fail', 'quarantined');
END $$;

-- Settle jobs of a lease; p_ids NULL: all that are left, by the first outcome. False: the lease is gone, nothing
-- was recorded. Outcomes: done, retry, snooze, fail; unstarted (hands its grant back), returned (stopped), lost
-- (its process died), quarantined. Settling a job again is a no-op.
CREATE FUNCTION headrace.settle_v1(
    p_lease bigint, p_ids bigint[], p_outcomes text[], p_delays_s double precision[],
    p_errors text[], p_tracebacks text[]
) RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v record;
    v_ords integer[];
    v_outcomes text[];
    v_delays double precision[];
    v_errors text[];
    v_tracebacks text[];
    v_groups bigint[];
    v_states text[];
BEGIN
    SELECT queue, limiter, granted_at, settled, ids, group_ids, lanes, unique_keys INTO v
    FROM headrace.job_lease WHERE id = p_lease FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- The common case, a whole batch done with nothing hanging on it, is one delete.
    IF p_ids IS NULL AND p_outcomes[1] = 'done' AND v.limiter IS NULL
       AND array_remove(v.unique_keys, NULL) = '{}' AND array_remove(v.group_ids, NULL) = '{}' THEN
        DELETE FROM headrace.job_lease WHERE id = p_lease;
        RETURN true;
    END IF;
    SELECT array_agg(r.ord::integer), array_agg(s.outcome), array_agg(s.delay_s),
           array_agg(s.error), array_agg(s.traceback)
    INTO v_ords, v_outcomes, v_delays, v_errors, v_tracebacks
    FROM unnest(v.ids) WITH ORDINALITY AS r(id, ord)
    JOIN unnest(CASE WHEN p_ids IS NULL THEN v.ids ELSE p_ids END,
                CASE WHEN p_ids IS NULL THEN array_fill(p_outcomes[1], ARRAY[cardinality(v.ids)])
                     ELSE p_outcomes END,
                p_delays_s, p_errors, p_tracebacks) AS s(id, outcome, delay_s, error, traceback)
      ON s.id = r.id
    WHERE r.id <> ALL(v.settled);
    IF v_ords IS NULL THEN
        RETURN true;
    END IF;
    IF v.limiter IS NOT NULL THEN
        PERFORM headrace.settle_lanes_v1(v.limiter, v.queue, v.granted_at,
            ARRAY(SELECT v.lanes[s.ord] FROM unnest(v_ords) WITH ORDINALITY AS s(ord, i) ORDER BY s.i),
            v_outcomes);
    END IF;
    IF v_outcomes && ARRAY['retry', 'snooze', 'unstarted', 'returned', 'lost'] THEN
        PERFORM headrace.put_back_v1(p_lease, v_ords, v_outcomes, v_delays);
    END IF;
    IF v_outcomes && ARRAY['fail', 'quarantined'] THEN
        PERFORM headrace.keep_failed_v1(p_lease, v_ords, v_outcomes, v_errors, v_tracebacks);
    END IF;
    IF array_remove(v.unique_keys, NULL) <> '{}' THEN
        DELETE FROM headrace.job_unique u USING unnest(v_ords, v_outcomes) AS s(ord, outcome)
        WHERE s.outcome IN ('done', 'fail', 'quarantined')
          AND u.queue = v.queue AND u.key = v.unique_keys[s.ord] AND u.job_id = v.ids[s.ord];
    END IF;
    IF cardinality(v.settled) + cardinality(v_ords) >= cardinality(v.ids) THEN
        DELETE FROM headrace.job_lease WHERE id = p_lease;
    ELSE
        UPDATE headrace.job_lease
        SET settled = settled || ARRAY(SELECT v.ids[s.ord] FROM unnest(v_ords) AS s(ord))
        WHERE id = p_lease;
    END IF;
    IF array_remove(v.group_ids, NULL) <> '{}' THEN
        SELECT array_agg(v.group_ids[s.ord]),
               array_agg(CASE s.outcome WHEN 'fail' THEN 'failed' ELSE s.outcome END)
        INTO v_groups, v_states
        FROM unnest(v_ords, v_outcomes) AS s(ord, outcome)
        WHERE s.outcome IN ('done', 'fail', 'quarantined') AND v.group_ids[s.ord] IS NOT NULL;
        IF v_groups IS NOT NULL THEN
            PERFORM headrace.finish_members_v1(v_groups, v_states);
        END IF;
    END IF;
    RETURN true;
END $$;

-- Return one lease of a host that expired or is gone; return how many jobs went back. A job lost so often
-- is quarantined. A lease that its handler's own transaction holds is left for the next time.
CREATE FUNCTION headrace.return_lease_v1(p_lease bigint, p_losses_max integer)
RETURNS integer LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_ids bigint[];
    v_outcomes text[];
    v_errors text[];
BEGIN
    PERFORM 1 FROM headrace.job_lease l
    WHERE l.id = p_lease AND NOT EXISTS (
        SELECT FROM headrace.host h WHERE h.id = l.host AND h.expires_at > now())
    FOR UPDATE OF l SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    SELECT array_agg(r.id),
           array_agg(CASE WHEN r.losses + 1 >= p_losses_max THEN 'quarantined' ELSE 'lost' END),
           array_agg(format('the process that ran it died %s times', r.losses + 1))
    INTO v_ids, v_outcomes, v_errors
    FROM headrace.job_lease l
    CROSS JOIN LATERAL unnest(l.ids, l.losses) AS r(id, losses)
    WHERE l.id = p_lease AND r.id <> ALL(l.settled);
    PERFORM headrace.settle_v1(p_lease, v_ids, v_outcomes, NULL, v_errors, NULL);
    RETURN coalesce(cardinality(v_ids), 0);
END $$;
