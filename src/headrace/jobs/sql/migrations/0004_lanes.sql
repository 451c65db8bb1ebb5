-- Functions of lanes and limiters.

-- Create missing lanes with their limiters' limits. The limiter's row is share-locked, so that a
-- change of its limits waits and then finds the new lanes; the caller must hold no lane.
CREATE FUNCTION headrace.make_lanes_v1(p_limiters text[], p_names text[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.limiter (name)
    SELECT DISTINCT u.limiter FROM unnest(p_limiters) AS u(limiter)
    WHERE NOT EXISTS (SELECT FROM headrace.limiter m WHERE m.name = u.limiter)
    ORDER BY 1 ON CONFLICT DO NOTHING;
    PERFORM 1 FROM headrace.limiter m WHERE m.name = ANY(p_limiters) ORDER BY m.name FOR SHARE;
    INSERT INTO headrace.lane (limiter, name, starts_max, window_s, slack_s, concurrency)
    SELECT u.limiter, u.name, m.starts_max, m.window_s, m.slack_s, m.concurrency
    FROM unnest(p_limiters, p_names) AS u(limiter, name)
        JOIN headrace.limiter m ON m.name = u.limiter
    ORDER BY 1, 2 ON CONFLICT DO NOTHING;
END $$;

-- Add up to p_max journal rows of a queue, those after the row p_after, to the counts of its
-- lanes. Return how many, and the last of them. Lanes that another transaction has locked get a new
-- row, to be folded later.
CREATE FUNCTION headrace.fold_lanes_v1(p_queue integer, p_after bigint, p_max integer)
RETURNS TABLE (folded integer, last_event bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_limiters text[];
    v_lanes text[];
    v_counts integer[];
    v_nexts timestamptz[];
    v_new_limiters text[];
    v_new_lanes text[];
    v_left integer;
    v_now timestamptz;
BEGIN
    WITH spent AS (
        DELETE FROM headrace.lane_event d WHERE d.ctid = ANY(ARRAY(
            SELECT e.ctid FROM headrace.lane_event e WHERE e.queue = p_queue AND e.id > p_after
            ORDER BY e.id LIMIT p_max FOR UPDATE SKIP LOCKED))
        RETURNING d.id, d.limiter, d.lane, d.k
    )
    SELECT sum(s.events), max(s.last_id), array_agg(s.limiter), array_agg(s.lane), array_agg(s.k)
    INTO folded, last_event, v_limiters, v_lanes, v_counts FROM (
        SELECT s.limiter, s.lane, count(*) AS events, max(s.id) AS last_id, sum(s.k)::integer AS k
        FROM spent s GROUP BY 1, 2) s;
    IF v_lanes IS NULL THEN
        RETURN QUERY SELECT 0, p_after;
        RETURN;
    END IF;
    SELECT array_agg(u.limiter), array_agg(u.lane) INTO v_new_limiters, v_new_lanes
    FROM unnest(v_limiters, v_lanes) AS u(limiter, lane)
    LEFT JOIN LATERAL (SELECT true AS is_there FROM headrace.lane l
                       WHERE l.limiter = u.limiter AND l.name = u.lane OFFSET 0) l ON true
    WHERE l.is_there IS NULL;
    IF v_new_lanes IS NOT NULL THEN
        PERFORM headrace.make_lanes_v1(v_new_limiters, v_new_lanes);
    END IF;
    v_now := clock_timestamp();
    SELECT array_agg(u.limiter), array_agg(u.lane), array_agg(u.k), array_agg(l.next_at)
    INTO v_limiters, v_lanes, v_counts, v_nexts
    FROM unnest(v_limiters, v_lanes, v_counts) AS u(limiter, lane, k) LEFT JOIN LATERAL (
        SELECT CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                    WHEN l.inflight + l.uncounted >= l.concurrency THEN v_now + interval '1 s'
                    ELSE greatest(l.free_at, v_now) END AS next_at
        FROM headrace.lane l WHERE l.limiter = u.limiter AND l.name = u.lane
        FOR NO KEY UPDATE SKIP LOCKED) l ON true;
    INSERT INTO headrace.lane_event (limiter, lane, queue, k)
    SELECT u.limiter, u.lane, p_queue, u.k
    FROM unnest(v_limiters, v_lanes, v_counts, v_nexts) AS u(limiter, lane, k, next_at)
    WHERE u.next_at IS NULL;
    GET DIAGNOSTICS v_left = ROW_COUNT;
    folded := folded - v_left;
    INSERT INTO headrace.lane_queue AS q (limiter, lane, queue, waiting, ready_at)
    SELECT u.limiter, u.lane, p_queue, u.k, CASE WHEN u.k > 0 THEN u.next_at ELSE 'infinity' END
    FROM unnest(v_limiters, v_lanes, v_counts, v_nexts) AS u(limiter, lane, k, next_at)
    WHERE u.next_at IS NOT NULL
    ON CONFLICT (limiter, lane, queue) DO UPDATE SET
        waiting = q.waiting + excluded.waiting,
        ready_at = CASE WHEN q.waiting + excluded.waiting <= 0 THEN 'infinity'
                        WHEN q.waiting <= 0 THEN excluded.ready_at
                        ELSE q.ready_at END;
    RETURN NEXT;
END $$;

-- Choose how many of p_jobs_max jobs each locked lane of p_names gives. The number is the least of
-- waiting jobs, rate, concurrency and round-robin share: p_quantum x weight, or more if so few
-- lanes would not fill the claim. A lane that the end of the claim cuts short keeps its place and
-- the rest of its share (credits > 0). A lane that would give nothing for lack of room is left
-- out. p_rows: the rows of the lanes. is_counted: one of them has a concurrency limit.
CREATE FUNCTION headrace.plan_lanes_v1(
    p_limiter text, p_queue integer, p_names text[], p_rows tid[], p_jobs_max integer,
    p_quantum integer, p_now timestamptz
) RETURNS TABLE (
    names text[], lane_rows tid[], gives integer[], credits integer[], slack_s double precision,
    is_counted boolean
)
LANGUAGE sql SET enable_seqscan = off AS $$
    WITH allowed AS (
        SELECT l.name, l.lane_row, l.ready_at, l.slack_s, l.credit, l.concurrency,
               CASE WHEN l.paused THEN 0 ELSE greatest(0, least(
                   l.waiting, l.concurrency - l.inflight - l.uncounted, l.credit,
                   CASE WHEN l.at = '{}' THEN l.starts_max ELSE l.starts_max - (
                       SELECT coalesce(sum(s.n), 0) FROM unnest(l.at, l.n) AS s(at, n)
                       WHERE s.at > p_now - (l.window_s + l.slack_s) * interval '1 s') END
               )) END AS give
        FROM (
            SELECT l.*, v.lane_row, q.waiting, q.ready_at, CASE WHEN q.credit > 0 THEN q.credit
                ELSE l.weight * greatest(
                p_quantum, ceil(p_jobs_max::double precision / sum(l.weight) OVER ())
            )::integer END AS credit
            FROM unnest(p_names, p_rows) AS v(name, lane_row)
            CROSS JOIN LATERAL (SELECT * FROM headrace.lane l
                                WHERE l.ctid = v.lane_row OFFSET 0) l
            CROSS JOIN LATERAL (SELECT q.waiting, q.ready_at, q.credit FROM headrace.lane_queue q
                                WHERE q.limiter = p_limiter AND q.lane = v.name
                                    AND q.queue = p_queue OFFSET 0) q
        ) l
    ), running AS (
        SELECT a.*, p_jobs_max - coalesce(sum(a.give) OVER (
            ORDER BY a.ready_at, a.name ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)
                AS room
        FROM allowed a
    ), cut AS (
        SELECT r.*, least(r.give, r.room)::integer AS given FROM running r
        WHERE r.give = 0 OR r.room > 0
    )
    SELECT array_agg(c.name), array_agg(c.lane_row), array_agg(greatest(0, c.given)),
           array_agg(CASE WHEN c.given < c.give THEN c.credit - c.given ELSE 0 END),
           coalesce(min(c.slack_s) FILTER (WHERE c.given > 0), 0),
           coalesce(bool_or(c.concurrency IS NOT NULL), false)
    FROM cut c;
$$;

-- Record grants in the locked lanes p_names. p_lanes names a lane once per job granted at p_now.
-- Also correct ready_at of lanes that gave nothing. Above 16 starts per window, grants within a
-- sixteenth of it share one entry with the LATER instant: at most 17 entries, and the limit stays
-- strict. Entries in the future (starts that a caller waits for) count as live.
CREATE FUNCTION headrace.grant_v1(
    p_limiter text, p_queue integer, p_names text[], p_rows tid[], p_credits integer[],
    p_lanes text[], p_now timestamptz
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    WITH kept AS (
        SELECT l.ctid, g.name, coalesce(u.k, 0) AS k, g.credit, l.starts_max,
               l.window_s + l.slack_s AS span_s, s.at, s.n, s.live
        FROM unnest(p_names, p_rows, p_credits) AS g(name, lane_row, credit)
        LEFT JOIN (SELECT lane, count(*)::integer AS k FROM unnest(p_lanes) AS w(lane) GROUP BY 1) u
          ON u.lane = g.name
        CROSS JOIN LATERAL (SELECT l.ctid, l.* FROM headrace.lane l
                            WHERE l.ctid = g.lane_row OFFSET 0) l
        CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(e.at ORDER BY e.at), '{}') AS at,
                   coalesce(array_agg(e.n ORDER BY e.at), '{}') AS n, coalesce(sum(e.n), 0) AS live
            FROM unnest(l.at, l.n) AS e(at, n)
            WHERE e.n > 0 AND e.at > p_now - (l.window_s + l.slack_s) * interval '1 s') s
    ), logged AS (
        SELECT c.*,
            CASE WHEN c.k = 0 THEN c.at WHEN c.shares THEN trim_array(c.at, 1) || p_now
                 ELSE c.at || p_now END AS new_at,
            CASE WHEN c.k = 0 THEN c.n
                 WHEN c.shares THEN trim_array(c.n, 1) || (c.n[cardinality(c.n)] + c.k)
                 ELSE c.n || c.k END AS new_n
        FROM (SELECT d.*, d.starts_max > 16 AND cardinality(d.at) > 0
                  AND d.at[cardinality(d.at)] <= p_now
                  AND floor(extract(epoch FROM d.at[cardinality(d.at)]) * 16 / d.span_s)
                    = floor(extract(epoch FROM p_now) * 16 / d.span_s) AS shares FROM kept d) c
    ), granted AS (
        UPDATE headrace.lane l SET
            at = CASE WHEN g.starts_max IS NULL THEN '{}' ELSE g.new_at END,
            n = CASE WHEN g.starts_max IS NULL THEN '{}' ELSE g.new_n END,
            inflight = CASE WHEN l.concurrency IS NULL THEN 0 ELSE l.inflight + g.k END,
            started_at = CASE WHEN g.k > 0 THEN greatest(l.started_at, p_now) ELSE l.started_at END,
            free_at = CASE WHEN g.live + g.k >= g.starts_max
                           THEN least(g.new_at[1], CASE WHEN g.k > 0 THEN p_now END)
                                + g.span_s * interval '1 s'
                           ELSE '-infinity' END
        FROM logged g WHERE l.ctid = g.ctid
        RETURNING l.name, g.k, g.credit,
            CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                 WHEN l.inflight + l.uncounted >= l.concurrency THEN p_now + interval '1 s'
                 ELSE greatest(l.free_at, p_now) END AS next_at
    )
    UPDATE headrace.lane_queue q SET
        waiting = q.waiting - CASE WHEN q.queue = p_queue THEN t.k ELSE 0 END,
        credit = CASE WHEN q.queue = p_queue THEN t.credit ELSE q.credit END,
        ready_at = CASE WHEN q.queue <> p_queue THEN t.next_at
                        WHEN q.waiting - t.k <= 0 THEN 'infinity'
                        WHEN t.credit > 0 AND t.next_at <= p_now THEN q.ready_at
                        ELSE t.next_at END
    FROM (
        SELECT w.ctid, g.* FROM granted g CROSS JOIN LATERAL (
            SELECT w.ctid FROM headrace.lane_queue w WHERE w.limiter = p_limiter AND w.lane = g.name
              AND (w.queue = p_queue OR w.ready_at < g.next_at) OFFSET 0) w
    ) t WHERE q.ctid = t.ctid;
END $$;

-- Consume p_k starts of a lane, now or at the first instant with room after all earlier starts.
-- Return the seconds until then. NULL: refused, since the lane is paused or the wait would exceed
-- p_wait_max_s.
CREATE FUNCTION headrace.spend_v1(
    p_limiter text, p_name text, p_k integer, p_wait_max_s double precision
) RETURNS double precision LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '3s' AS $$
DECLARE
    v headrace.lane%ROWTYPE;
    v_span interval;
    v_now timestamptz;
    v_at timestamptz;
    v_last timestamptz;
    v_shares boolean;
BEGIN
    FOR i IN 1..3 LOOP
        SELECT * INTO v FROM headrace.lane WHERE limiter = p_limiter AND name = p_name
        FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
    END LOOP;
    v_now := clock_timestamp();
    IF v.paused OR v.starts_max < p_k THEN
        RETURN NULL;
    END IF;
    IF v.starts_max IS NULL THEN
        UPDATE headrace.lane SET started_at = greatest(started_at, v_now)
        WHERE limiter = p_limiter AND name = p_name;
        RETURN 0;
    END IF;
    v_span := (v.window_s + v.slack_s) * interval '1 s';
    SELECT array_agg(s.at ORDER BY s.at), array_agg(s.n ORDER BY s.at) INTO v.at, v.n
    FROM unnest(v.at, v.n) AS s(at, n) WHERE s.n > 0 AND s.at > v_now - v_span;
    v_last := v.at[cardinality(v.at)];
    -- Never before a recorded entry, so that no earlier start's window overfills.
    SELECT min(c.at) INTO v_at FROM (
        SELECT greatest(v_now, v_last) AS at
        UNION ALL SELECT greatest(v_now, v_last, s.at + v_span) FROM unnest(v.at) AS s(at)
    ) c WHERE p_k <= v.starts_max - (
        SELECT coalesce(sum(s.n), 0) FROM unnest(v.at, v.n) AS s(at, n) WHERE s.at > c.at - v_span);
    IF v_at IS NULL OR v_at > v_now + p_wait_max_s * interval '1 s' THEN
        RETURN NULL;
    END IF;
    v_shares := v_at = v_last OR v.starts_max > 16
        AND floor(extract(epoch FROM v_last) * 16 / (v.window_s + v.slack_s))
          = floor(extract(epoch FROM v_at) * 16 / (v.window_s + v.slack_s));
    IF v_shares THEN
        v.n[cardinality(v.n)] := v.n[cardinality(v.n)] + p_k;
        v.at[cardinality(v.at)] := v_at;
    ELSE
        v.at := v.at || v_at;
        v.n := v.n || p_k;
    END IF;
    UPDATE headrace.lane SET
        at = v.at, n = v.n, started_at = greatest(started_at, v_at),
        free_at = CASE WHEN (SELECT sum(s.n) FROM unnest(v.n) AS s(n)) >= starts_max
                       THEN v.at[1] + v_span ELSE '-infinity' END
    WHERE limiter = p_limiter AND name = p_name;
    RETURN greatest(0, extract(epoch FROM v_at - v_now));
END $$;

-- Read again from the leases how many jobs of the locked lanes p_names are in flight without being
-- counted, and return the lanes' rows. Their settling changes no lane, so every claim recounts
-- until they have ended; while they fill a lane, it is visited once a second.
CREATE FUNCTION headrace.recount_lanes_v1(p_limiter text, p_names text[])
RETURNS tid[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_rows tid[];
BEGIN
    WITH old AS (
        SELECT j.id AS lease, r.lane FROM headrace.job_lease j
        CROSS JOIN LATERAL unnest(j.ids, j.lanes) AS r(id, lane)
        WHERE j.limiter = p_limiter AND j.lanes && p_names AND r.id <> ALL(j.settled)
    ), recounted AS (
        UPDATE headrace.lane l SET uncounted = c.n FROM (
            SELECT o.ctid, o.name, CASE WHEN o.concurrency IS NULL THEN 0 ELSE (
                SELECT count(*)::integer FROM old
                WHERE old.lane = o.name AND old.lease < o.counted_from) END AS n
            FROM unnest(p_names) AS w(name) CROSS JOIN LATERAL (
                SELECT o.ctid, o.name, o.counted_from, o.concurrency FROM headrace.lane o
                WHERE o.limiter = p_limiter AND o.name = w.name OFFSET 0) o
        ) c WHERE l.ctid = c.ctid RETURNING l.name, l.ctid
    )
    SELECT array_agg(r.ctid ORDER BY w.ord) INTO v_rows
    FROM unnest(p_names) WITH ORDINALITY AS w(name, ord) JOIN recounted r ON r.name = w.name;
    RETURN v_rows;
END $$;

-- Change the limits of lanes while they run. If starts must be remembered longer than before, one
-- entry blocks the lane until forgotten starts cannot matter. If the slack shrinks, recorded
-- starts move later by the difference, since earlier grants may still use the old slack.
CREATE FUNCTION headrace.limit_lanes_v1(
    p_limiter text, p_names text[], p_starts_max integer, p_window_s double precision,
    p_slack_s double precision, p_concurrency integer
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_now timestamptz;
    v_queues integer[];
    v_starts_counting boolean;
BEGIN
    SELECT coalesce(bool_or(l.is_uncounted), false) AND p_concurrency IS NOT NULL
    INTO v_starts_counting
    FROM (SELECT DISTINCT u.name FROM unnest(p_names) AS u(name) ORDER BY 1) u
    CROSS JOIN LATERAL (SELECT l.concurrency IS NULL AS is_uncounted FROM headrace.lane l
                        WHERE l.limiter = p_limiter AND l.name = u.name FOR NO KEY UPDATE) l;
    v_now := clock_timestamp();
    UPDATE headrace.lane l SET
        starts_max = p_starts_max, window_s = p_window_s, slack_s = p_slack_s,
        concurrency = p_concurrency, free_at = '-infinity',
        -- Leases get their numbers under the lane's lock: those of earlier claims are below.
        counted_from = CASE WHEN l.concurrency IS NULL AND v_starts_counting
            THEN nextval('headrace.job_lease_id_seq') ELSE l.counted_from END,
        inflight = CASE WHEN l.concurrency IS NULL OR p_concurrency IS NULL THEN 0
            ELSE l.inflight END,
        uncounted = CASE WHEN p_concurrency IS NULL THEN 0 ELSE l.uncounted END,
        at = CASE WHEN p_window_s IS NULL THEN '{}' ELSE
            CASE WHEN b.at IS NULL THEN '{}'::timestamptz[] ELSE ARRAY[b.at] END || ARRAY(
                SELECT s.at + greatest(0, l.slack_s - p_slack_s) * interval '1 s'
                FROM unnest(l.at) WITH ORDINALITY AS s(at, ord) ORDER BY s.ord) END,
        n = CASE WHEN p_window_s IS NULL THEN '{}' ELSE
            CASE WHEN b.at IS NULL THEN '{}'::integer[] ELSE ARRAY[1000000000] END || l.n END
    FROM (
        SELECT o.ctid, CASE
            WHEN p_window_s IS NULL OR o.started_at IS NULL THEN NULL
            WHEN o.window_s IS NULL THEN o.started_at
            WHEN p_window_s + p_slack_s > o.window_s + o.slack_s
            THEN least(o.started_at, v_now - (o.window_s + o.slack_s) * interval '1 s') END AS at
        FROM unnest(p_names) AS u(name) CROSS JOIN LATERAL (
            SELECT o.ctid, o.started_at, o.window_s, o.slack_s FROM headrace.lane o
            WHERE o.limiter = p_limiter AND o.name = u.name OFFSET 0) o
    ) b WHERE l.ctid = b.ctid;
    IF v_starts_counting THEN
        PERFORM headrace.recount_lanes_v1(p_limiter, p_names);
    END IF;
    WITH woken AS (
        UPDATE headrace.lane_queue q SET ready_at = v_now
        FROM unnest(p_names) AS u(name) CROSS JOIN LATERAL (
            SELECT w.ctid FROM headrace.lane_queue w
            WHERE w.limiter = p_limiter AND w.lane = u.name AND w.waiting > 0 OFFSET 0
        ) w WHERE q.ctid = w.ctid RETURNING q.queue
    )
    SELECT array_agg(DISTINCT w.queue) INTO v_queues FROM woken w;
    PERFORM pg_notify('headrace_jobs', q::text) FROM unnest(v_queues) AS q;
END $$;

-- Set a lane's limits, its pause and its weight. p_is_own: true, the given limits; false, those of
-- its limiter, which it then follows; NULL, limits as they are. p_paused, p_weight NULL: unchanged.
-- The slack of own limits grows with the window: many starts granted at once take a busy process
-- longer to begin. The limiter's row is locked before the lane's, the same order as spread_limiter.
CREATE FUNCTION headrace.set_lane_v1(
    p_limiter text, p_name text, p_is_own boolean, p_starts_max integer,
    p_window_s double precision, p_concurrency integer, p_paused boolean, p_weight integer
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v headrace.limiter%ROWTYPE;
    l headrace.lane%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        SELECT * INTO v FROM headrace.limiter m WHERE m.name = p_limiter FOR SHARE;
        UPDATE headrace.lane SET is_own = coalesce(p_is_own, is_own),
            paused = coalesce(p_paused, paused), weight = coalesce(p_weight, weight)
        WHERE limiter = p_limiter AND name = p_name RETURNING * INTO l;
        EXIT WHEN FOUND;
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
    END LOOP;
    IF p_is_own IS NULL THEN
        p_starts_max := l.starts_max;
        p_window_s := l.window_s;
        p_concurrency := l.concurrency;
    END IF;
    IF l.is_own THEN
        PERFORM headrace.limit_lanes_v1(
            p_limiter, ARRAY[p_name], p_starts_max, p_window_s,
            greatest(coalesce(v.slack_s, 0.25), least(1, p_window_s / 60)), p_concurrency);
    ELSE
        PERFORM headrace.limit_lanes_v1(
            p_limiter, ARRAY[p_name], v.starts_max, v.window_s, coalesce(v.slack_s, 0.25),
            v.concurrency);
    END IF;
END $$;

-- Write a limiter's limits. Return true if they changed and its lanes must follow. p_is_set: set
-- by an operator, so declarations are stored beside the limits and change nothing.
CREATE FUNCTION headrace.set_limiter_v1(
    p_name text, p_starts_max integer, p_window_s double precision, p_slack_s double precision,
    p_concurrency integer, p_is_set boolean
) RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_is_spread boolean;
BEGIN
    IF NOT p_is_set AND NOT EXISTS (
        SELECT FROM headrace.limiter m WHERE m.name = p_name AND (
            m.declared_starts_max, m.declared_window_s, m.declared_slack_s, m.declared_concurrency
        ) IS NOT DISTINCT FROM (p_starts_max, p_window_s, p_slack_s, p_concurrency)
    ) THEN
        INSERT INTO headrace.limiter
            (name, declared_starts_max, declared_window_s, declared_slack_s, declared_concurrency)
        VALUES (p_name, p_starts_max, p_window_s, p_slack_s, p_concurrency)
        ON CONFLICT (name) DO UPDATE SET
            declared_starts_max = p_starts_max, declared_window_s = p_window_s,
            declared_slack_s = p_slack_s, declared_concurrency = p_concurrency;
    END IF;
    IF NOT p_is_set AND EXISTS (
        SELECT FROM headrace.limiter m WHERE m.name = p_name AND (m.is_set OR (
            m.starts_max, m.window_s, m.slack_s, m.concurrency) IS NOT DISTINCT FROM (
            p_starts_max, p_window_s, p_slack_s, p_concurrency) AND m.is_spread)
    ) THEN
        RETURN false;
    END IF;
    INSERT INTO headrace.limiter AS m
        (name, starts_max, window_s, slack_s, concurrency, is_set, is_spread)
    VALUES (p_name, p_starts_max, p_window_s, p_slack_s, p_concurrency, p_is_set, false)
    ON CONFLICT (name) DO UPDATE SET
        starts_max = p_starts_max, window_s = p_window_s, slack_s = p_slack_s,
        concurrency = p_concurrency, is_set = p_is_set, is_spread = false
    WHERE p_is_set OR NOT m.is_set
    RETURNING m.is_spread INTO v_is_spread;
    RETURN NOT coalesce(v_is_spread, true);
END $$;

-- Apply a limiter's limits to up to p_max of its lanes after p_after. Return the last of them;
-- NULL: all lanes follow.
CREATE FUNCTION headrace.spread_limiter_v1(p_name text, p_after text, p_max integer)
RETURNS text LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v headrace.limiter%ROWTYPE;
    v_names text[];
    v_last text;
BEGIN
    -- Not FOR SHARE: two concurrent calls would deadlock at the UPDATE below.
    SELECT * INTO v FROM headrace.limiter m WHERE m.name = p_name FOR NO KEY UPDATE;
    SELECT array_agg(c.name) FILTER (WHERE NOT c.is_own AND (
               c.starts_max, c.window_s, c.slack_s, c.concurrency) IS DISTINCT FROM (
               v.starts_max, v.window_s, v.slack_s, v.concurrency)),
           CASE WHEN count(*) = p_max THEN max(c.name) END
    INTO v_names, v_last FROM (
        SELECT l.* FROM headrace.lane l WHERE l.limiter = p_name AND l.name > p_after
        ORDER BY l.name LIMIT p_max) c;
    IF v_names IS NOT NULL THEN
        PERFORM headrace.limit_lanes_v1(
            p_name, v_names, v.starts_max, v.window_s, v.slack_s, v.concurrency);
    END IF;
    IF v_last IS NULL THEN
        UPDATE headrace.limiter m SET is_spread = true WHERE m.name = p_name AND NOT m.is_spread
          AND (m.starts_max, m.window_s, m.slack_s, m.concurrency) IS NOT DISTINCT FROM (
              v.starts_max, v.window_s, v.slack_s, v.concurrency);
    END IF;
    RETURN v_last;
END $$;

-- Remove idle lanes among the next p_max after (p_limiter, p_name). Idle: follows its limiter,
-- nothing waits or runs, and no start matters any more, for at least p_idle_s. Safe, since a new
-- job has a journal row and folding creates the lane again. Return the last lane seen; NULL: the
-- end.
CREATE FUNCTION headrace.remove_idle_lanes_v1(
    p_limiter text, p_name text, p_max integer, p_idle_s double precision
) RETURNS TABLE (last_limiter text, last_name text, removed integer)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_limiters text[];
    v_names text[];
    v_count integer := 0;
BEGIN
    SELECT array_agg(c.limiter), array_agg(c.name) INTO v_limiters, v_names FROM (
        SELECT l.limiter, l.name FROM headrace.lane l
        WHERE (l.limiter, l.name) > (p_limiter, p_name) ORDER BY l.limiter, l.name LIMIT p_max) c;
    last_limiter := v_limiters[p_max];
    last_name := v_names[p_max];
    SELECT array_agg(u.limiter), array_agg(u.name) INTO v_limiters, v_names
    FROM unnest(v_limiters, v_names) AS u(limiter, name) CROSS JOIN LATERAL (
        SELECT FROM headrace.lane l WHERE l.limiter = u.limiter AND l.name = u.name
          AND NOT l.is_own AND NOT l.paused AND l.weight = 1 AND l.inflight = 0
          AND coalesce(l.started_at, '-infinity')
            < now() - greatest(p_idle_s, l.window_s + l.slack_s) * interval '1 s'
        FOR UPDATE SKIP LOCKED) l;
    -- Check waiting jobs and leases under the lock.
    WITH leased AS MATERIALIZED (
        SELECT DISTINCT j.limiter, r.lane FROM headrace.job_lease j
        CROSS JOIN LATERAL unnest(j.lanes) AS r(lane) WHERE j.limiter = ANY(v_limiters)
    ), idle AS (
        SELECT u.limiter, u.name, l.ctid FROM unnest(v_limiters, v_names) AS u(limiter, name)
        CROSS JOIN LATERAL (SELECT l.ctid FROM headrace.lane l
                            WHERE l.limiter = u.limiter AND l.name = u.name OFFSET 0) l
        CROSS JOIN LATERAL (SELECT coalesce(bool_and(w.waiting = 0), true) AS is_empty
                            FROM headrace.lane_queue w
                            WHERE w.limiter = u.limiter AND w.lane = u.name) w
        WHERE w.is_empty AND (u.limiter, u.name) NOT IN (SELECT d.limiter, d.lane FROM leased d)
    ), emptied AS (
        DELETE FROM headrace.lane_queue q USING idle i CROSS JOIN LATERAL (
            SELECT w.ctid FROM headrace.lane_queue w
            WHERE w.limiter = i.limiter AND w.lane = i.name OFFSET 0) w
        WHERE q.ctid = w.ctid
    ), deleted AS (
        DELETE FROM headrace.lane l USING idle i WHERE l.ctid = i.ctid RETURNING 1
    )
    SELECT count(*) INTO v_count FROM deleted;
    removed := v_count;
    RETURN NEXT;
END $$;
