-- Functions that hand jobs out. The lane row is the only mutex of a lane: lock first, read the clock after the
-- lock (now() is older than the lock, and a claim that began first but locked last would let one window
-- hold too many), SKIP LOCKED throughout.

-- Lease up to p_jobs_max due jobs of a queue, in the order of p_priorities, past the scan marks (run_at, id)
-- of the consumer; marks keep a claim off dead index entries while a long transaction holds back vacuum.
-- Due jobs of lanes met on the way are moved to their lanes. One row always; lease_id NULL: nothing.
CREATE FUNCTION headrace.claim_ready_v1(
    p_host bigint, p_queue integer, p_jobs_max integer, p_priorities smallint[],
    p_marks_at timestamptz[], p_marks_id bigint[]
) RETURNS TABLE (
    lease_id bigint, moved integer, ids bigint[], run_ats timestamptz[], priorities smallint[],
    attempts smallint[], lanes text[], traceparents text[], payloads bytea[], claimed_at timestamptz
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
BEGIN
    IF NOT EXISTS (
        SELECT FROM headrace.host h, headrace.queue q
        WHERE h.id = p_host AND h.expires_at > now() AND q.id = p_queue AND NOT q.paused
    ) THEN
        RETURN QUERY SELECT NULL::bigint, 0, NULL::bigint[], NULL::timestamptz[], NULL::smallint[],
            NULL::smallint[], NULL::text[], NULL::text[], NULL::bytea[], now();
        RETURN;
    END IF;
    RETURN QUERY
    WITH gone AS (
        DELETE FROM headrace.job_ready j WHERE j.ctid = ANY(ARRAY(
            SELECT c.ctid FROM unnest(p_priorities) AS p(priority), LATERAL (
                SELECT r.ctid FROM headrace.job_ready r
                WHERE r.queue = p_queue AND r.priority = p.priority AND r.run_at <= now()
                  AND (r.run_at, r.id) > (p_marks_at[p.priority + 1], p_marks_id[p.priority + 1])
                ORDER BY r.run_at, r.id LIMIT p_jobs_max FOR UPDATE SKIP LOCKED
            ) c LIMIT p_jobs_max
        )) RETURNING j.*
    ), shifted AS (
        INSERT INTO headrace.lane_job
            (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
             payload)
        SELECT g.id, g.queue, g.run_at, g.group_id, g.priority, g.attempt, g.losses, g.lane,
               g.unique_key, g.traceparent, g.payload
        FROM gone g WHERE g.lane IS NOT NULL RETURNING lane_job.queue, lane_job.lane
    ), told AS (
        INSERT INTO headrace.lane_event (limiter, lane, queue, k)
        SELECT q.limiter, s.lane, s.queue, count(*)
        FROM shifted s JOIN headrace.queue q ON q.id = s.queue GROUP BY 1, 2, 3
    ), lease AS (
        INSERT INTO headrace.job_lease
            (host, queue, granted_at, ids, run_ats, group_ids, priorities, attempts, losses, lanes,
             unique_keys, traceparents, payloads)
        SELECT p_host, p_queue, now(), array_agg(g.id), array_agg(g.run_at), array_agg(g.group_id),
               array_agg(g.priority), array_agg(g.attempt), array_agg(g.losses), array_agg(g.lane),
               array_agg(g.unique_key), array_agg(g.traceparent), array_agg(g.payload)
        FROM (SELECT * FROM gone WHERE gone.lane IS NULL
              ORDER BY gone.priority, gone.run_at, gone.id) g
        HAVING count(*) > 0
        RETURNING job_lease.*
    )
    SELECT l.id, m.n, l.ids, l.run_ats, l.priorities, l.attempts, l.lanes, l.traceparents,
           l.payloads, now()
    FROM (SELECT count(*)::integer AS n FROM shifted) m LEFT JOIN lease l ON true;
END $$;

-- Carry up to p_max journal rows of a queue into its lanes' counts. An event of a busy lane waits.
CREATE FUNCTION headrace.fold_lanes_v1(p_queue integer, p_max integer)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_ids bigint[];
    v_limiters text[];
    v_lanes text[];
    v_got_limiters text[];
    v_got_lanes text[];
    v_now timestamptz;
BEGIN
    SELECT array_agg(e.id), array_agg(e.limiter), array_agg(e.lane)
    INTO v_ids, v_limiters, v_lanes
    FROM (SELECT id, limiter, lane FROM headrace.lane_event WHERE queue = p_queue
          ORDER BY id LIMIT p_max FOR UPDATE SKIP LOCKED) e;
    IF v_ids IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO headrace.lane (limiter, name)
    SELECT DISTINCT u.limiter, u.lane FROM unnest(v_limiters, v_lanes) AS u(limiter, lane)
    WHERE NOT EXISTS (SELECT FROM headrace.lane l WHERE l.limiter = u.limiter AND l.name = u.lane)
    ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    SELECT array_agg(l.limiter), array_agg(l.name) INTO v_got_limiters, v_got_lanes
    FROM (SELECT l.limiter, l.name FROM headrace.lane l
          JOIN (SELECT DISTINCT u.limiter, u.lane FROM unnest(v_limiters, v_lanes)
                AS u(limiter, lane)) w ON w.limiter = l.limiter AND w.lane = l.name
          FOR NO KEY UPDATE OF l SKIP LOCKED) l;
    v_now := clock_timestamp();
    WITH spent AS (
        DELETE FROM headrace.lane_event e
        USING unnest(v_ids, v_limiters, v_lanes) AS u(id, limiter, lane),
              unnest(v_got_limiters, v_got_lanes) AS g(limiter, lane)
        WHERE e.queue = p_queue AND e.id = u.id AND g.limiter = u.limiter AND g.lane = u.lane
        RETURNING e.limiter, e.lane, e.k
    ), sums AS (
        SELECT s.limiter, s.lane, sum(s.k)::integer AS k,
               CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                    ELSE greatest(l.free_at, v_now) END AS next_at
        FROM spent s JOIN headrace.lane l ON l.limiter = s.limiter AND l.name = s.lane
        GROUP BY 1, 2, l.paused, l.inflight, l.concurrency, l.free_at
    )
    INSERT INTO headrace.lane_queue AS q (limiter, lane, queue, waiting, ready_at)
    SELECT s.limiter, s.lane, p_queue, s.k, CASE WHEN s.k > 0 THEN s.next_at ELSE 'infinity' END
    FROM sums s
    ON CONFLICT (limiter, lane, queue) DO UPDATE SET
        waiting = q.waiting + excluded.waiting,
        ready_at = CASE WHEN q.waiting + excluded.waiting <= 0 THEN 'infinity'
                        WHEN q.waiting <= 0 THEN excluded.ready_at
                        ELSE q.ready_at END;
END $$;

-- Lease up to p_jobs_max jobs of a queue's lanes: at most p_lanes_max lanes that have allowance, each giving at
-- most p_quantum x its weight. One row always; lease_id NULL: nothing, and wait_s says when to look again
-- (NULL: not before something is enqueued). A start is allowed within slack_s of the moment the claim was SENT.
CREATE FUNCTION headrace.claim_lanes_v1(
    p_host bigint, p_queue integer, p_jobs_max integer, p_lanes_max integer, p_quantum integer
) RETURNS TABLE (
    lease_id bigint, wait_s double precision, slack_s double precision, ids bigint[],
    run_ats timestamptz[], priorities smallint[], attempts smallint[], lanes text[],
    traceparents text[], payloads bytea[], claimed_at timestamptz
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
    v_limiter text;
    v_names text[];
    v_gives integer[];
    v_lanes text[];
    v_lease headrace.job_lease%ROWTYPE;
    v_slack double precision;
    v_wait double precision;
BEGIN
    IF EXISTS (
        SELECT FROM headrace.host h, headrace.queue q
        WHERE h.id = p_host AND h.expires_at > now() AND q.id = p_queue AND NOT q.paused
    ) THEN
        SELECT q.limiter INTO v_limiter FROM headrace.queue q WHERE q.id = p_queue;
        PERFORM headrace.fold_lanes_v1(p_queue, 1000);
        v_now := clock_timestamp();
        -- The second bound on ready_at lets a generic plan use the partial index (20-42 ms without).
        SELECT array_agg(c.name) INTO v_names FROM (
            SELECT l.name FROM headrace.lane_queue q
            JOIN headrace.lane l ON l.limiter = q.limiter AND l.name = q.lane
            WHERE q.queue = p_queue AND q.ready_at <= v_now AND q.ready_at < 'infinity'
              AND q.limiter = v_limiter
            ORDER BY q.ready_at LIMIT p_lanes_max FOR NO KEY UPDATE OF l SKIP LOCKED
        ) c;
    END IF;
    IF v_names IS NULL THEN
        SELECT extract(epoch FROM min(q.ready_at) - clock_timestamp()) INTO v_wait
        FROM headrace.lane_queue q WHERE q.queue = p_queue AND q.ready_at < 'infinity';
        RETURN QUERY SELECT NULL::bigint, v_wait, 0::double precision, NULL::bigint[],
            NULL::timestamptz[], NULL::smallint[], NULL::smallint[], NULL::text[], NULL::text[],
            NULL::bytea[], v_now;
        RETURN;
    END IF;
    v_now := clock_timestamp();
    -- A lane that the batch's end cuts to nothing is left out, untouched, and keeps its place.
    WITH allowed AS (
        SELECT l.name, q.ready_at,
               CASE WHEN l.paused THEN 0 ELSE greatest(0, least(
                   q.waiting, l.concurrency - l.inflight, p_quantum * l.weight,
                   l.starts_max - (
                       SELECT coalesce(sum(s.n), 0) FROM unnest(l.at, l.n) AS s(at, n)
                       WHERE s.at > v_now - (l.window_s + l.slack_s) * interval '1 s'))) END AS give
        FROM unnest(v_names) AS v(name)
        JOIN headrace.lane l ON l.limiter = v_limiter AND l.name = v.name
        JOIN headrace.lane_queue q
          ON q.limiter = v_limiter AND q.lane = v.name AND q.queue = p_queue
    ), running AS (
        SELECT a.name, a.give, p_jobs_max - coalesce(sum(a.give) OVER (
            ORDER BY a.ready_at, a.name ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS room
        FROM allowed a
    )
    SELECT array_agg(r.name), array_agg(greatest(0, least(r.give, r.room))::integer)
    INTO v_names, v_gives FROM running r WHERE r.give = 0 OR r.room > 0;

    WITH gone AS (
        DELETE FROM headrace.lane_job d WHERE d.ctid = ANY(ARRAY(
            SELECT c.ctid FROM unnest(v_names, v_gives) AS g(name, give), LATERAL (
                SELECT j.ctid FROM headrace.lane_job j
                WHERE j.queue = p_queue AND j.lane = g.name
                ORDER BY j.priority, j.id LIMIT g.give FOR UPDATE SKIP LOCKED
            ) c WHERE g.give > 0
        )) RETURNING d.*
    )
    INSERT INTO headrace.job_lease AS l
        (host, queue, limiter, granted_at, ids, run_ats, group_ids, priorities, attempts, losses,
         lanes, unique_keys, traceparents, payloads)
    SELECT p_host, p_queue, v_limiter, v_now, array_agg(g.id), array_agg(g.run_at),
           array_agg(g.group_id), array_agg(g.priority), array_agg(g.attempt), array_agg(g.losses),
           array_agg(g.lane), array_agg(g.unique_key), array_agg(g.traceparent), array_agg(g.payload)
    FROM (SELECT * FROM gone ORDER BY gone.priority, gone.id) g
    HAVING count(*) > 0 RETURNING l.* INTO v_lease;
    v_lanes := coalesce(v_lease.lanes, '{}');

    v_slack := headrace.grant_v1(v_limiter, p_queue, v_names, v_lanes, v_now);
    RETURN QUERY SELECT v_lease.id, 0::double precision, v_slack, v_lease.ids, v_lease.run_ats,
        v_lease.priorities, v_lease.attempts, v_lease.lanes, v_lease.traceparents,
        v_lease.payloads, v_now;
END $$;

-- Write grants into the lanes p_names, which the caller holds locked: p_lanes has a lane once for each job that it
-- gave at p_now. Also corrects the hints of lanes that gave nothing. Returns the least slack of those that gave.
-- Over 16 starts a window, grants of one sixteenth of it share an entry, which takes the LATER instant: at
-- most 17 entries, and still strict.
CREATE FUNCTION headrace.grant_v1(
    p_limiter text, p_queue integer, p_names text[], p_lanes text[], p_now timestamptz
) RETURNS double precision LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_slack double precision;
BEGIN
    WITH given AS (
        SELECT v.name, count(u.lane)::integer AS k
        FROM unnest(p_names) AS v(name) LEFT JOIN unnest(p_lanes) AS u(lane) ON u.lane = v.name
        GROUP BY v.name
    ), kept AS (
        SELECT l.name, g.k, l.starts_max, l.window_s + l.slack_s AS span_s,
               coalesce(array_agg(s.at ORDER BY s.at) FILTER (WHERE s.is_live), '{}') AS at,
               coalesce(array_agg(s.n ORDER BY s.at) FILTER (WHERE s.is_live), '{}') AS n,
               coalesce(sum(s.n) FILTER (WHERE s.is_live), 0) AS live
        FROM given g JOIN headrace.lane l ON l.limiter = p_limiter AND l.name = g.name
        LEFT JOIN LATERAL (
            SELECT e.at, e.n, e.n > 0
                AND e.at > p_now - (l.window_s + l.slack_s) * interval '1 s' AS is_live
            FROM unnest(l.at, l.n) AS e(at, n)) s ON true
        GROUP BY l.name, g.k, l.starts_max, l.window_s, l.slack_s
    ), logged AS (
        SELECT c.*,
            CASE WHEN c.k = 0 THEN c.at WHEN c.shares THEN trim_array(c.at, 1) || p_now
                 ELSE c.at || p_now END AS new_at,
            CASE WHEN c.k = 0 THEN c.n
                 WHEN c.shares THEN trim_array(c.n, 1) || (c.n[cardinality(c.n)] + c.k)
                 ELSE c.n || c.k END AS new_n
        FROM (SELECT d.*, d.starts_max > 16 AND cardinality(d.at) > 0
                  AND floor(extract(epoch FROM d.at[cardinality(d.at)]) * 16 / d.span_s)
                    = floor(extract(epoch FROM p_now) * 16 / d.span_s) AS shares FROM kept d) c
    ), granted AS (
        UPDATE headrace.lane l SET
            at = CASE WHEN g.starts_max IS NULL THEN '{}' ELSE g.new_at END,
            n = CASE WHEN g.starts_max IS NULL THEN '{}' ELSE g.new_n END,
            inflight = l.inflight + g.k,
            started_at = CASE WHEN g.k > 0 THEN p_now ELSE l.started_at END,
            free_at = CASE WHEN g.live + g.k >= g.starts_max
                           THEN g.new_at[1] + g.span_s * interval '1 s' ELSE '-infinity' END
        FROM logged g WHERE l.limiter = p_limiter AND l.name = g.name
        RETURNING l.name, g.k, l.slack_s,
            CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                 ELSE greatest(l.free_at, p_now) END AS next_at
    ), hinted AS (
        UPDATE headrace.lane_queue q SET
            waiting = q.waiting - CASE WHEN q.queue = p_queue THEN g.k ELSE 0 END,
            ready_at = CASE WHEN q.queue = p_queue AND q.waiting - g.k <= 0 THEN 'infinity'
                            ELSE g.next_at END
        FROM granted g
        WHERE q.limiter = p_limiter AND q.lane = g.name
          AND (q.queue = p_queue OR q.ready_at < g.next_at)
    )
    SELECT min(g.slack_s) FILTER (WHERE g.k > 0) INTO v_slack FROM granted g;
    RETURN coalesce(v_slack, 0);
END $$;
