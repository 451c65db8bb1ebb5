-- Lanes that follow their limiter, claims of lanes for many slots, extra starts, idle lanes away.

-- turn: what is left of a lane's turn that the end of a claim cut short; it goes on first. Without it, claims of
-- one job would give a lane of weight 3 no more than one of weight 1.
ALTER TABLE penstock.lane_queue ADD turn integer NOT NULL DEFAULT 0;

-- is_set: by a person; what code declares no longer changes it. is_spread: its lanes have these limits, too.
ALTER TABLE penstock.limiter
    ADD is_set boolean NOT NULL DEFAULT false,
    ADD is_spread boolean NOT NULL DEFAULT true;

-- Make the lanes that are missing, with their limiters' limits. The limiter's row is share-locked: who changes it
-- waits for lanes that are being made with the limits of before, and then finds them.
CREATE FUNCTION penstock.make_lanes_v1(p_limiters text[], p_names text[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_limiters text[];
    v_names text[];
BEGIN
    SELECT array_agg(u.limiter), array_agg(u.name) INTO v_limiters, v_names
    FROM (SELECT DISTINCT u.limiter, u.name FROM unnest(p_limiters, p_names) AS u(limiter, name)) u
    WHERE NOT EXISTS (SELECT FROM penstock.lane l WHERE l.limiter = u.limiter AND l.name = u.name);
    IF v_names IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO penstock.limiter (name)
    SELECT DISTINCT u.limiter FROM unnest(v_limiters) AS u(limiter)
    WHERE NOT EXISTS (SELECT FROM penstock.limiter m WHERE m.name = u.limiter)
    ORDER BY 1 ON CONFLICT DO NOTHING;
    PERFORM 1 FROM penstock.limiter m WHERE m.name = ANY(v_limiters) ORDER BY m.name FOR SHARE;
    INSERT INTO penstock.lane (limiter, name, starts_max, window_s, slack_s, concurrency)
    SELECT u.limiter, u.name, m.starts_max, m.window_s, m.slack_s, m.concurrency
    FROM unnest(v_limiters, v_names) AS u(limiter, name) JOIN penstock.limiter m ON m.name = u.limiter
    ORDER BY 1, 2 ON CONFLICT DO NOTHING;
END $$;

-- Carry up to p_max journal rows of a queue into its lanes' counts. An event of a busy lane waits.
CREATE FUNCTION penstock.fold_lanes_v2(p_queue integer, p_max integer)
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
    FROM (SELECT id, limiter, lane FROM penstock.lane_event WHERE queue = p_queue
          ORDER BY id LIMIT p_max FOR UPDATE SKIP LOCKED) e;
    IF v_ids IS NULL THEN
        RETURN;
    END IF;
    PERFORM penstock.make_lanes_v1(v_limiters, v_lanes);
    SELECT array_agg(l.limiter), array_agg(l.name) INTO v_got_limiters, v_got_lanes
    FROM (SELECT l.limiter, l.name FROM penstock.lane l
          JOIN (SELECT DISTINCT u.limiter, u.lane FROM unnest(v_limiters, v_lanes)
                AS u(limiter, lane)) w ON w.limiter = l.limiter AND w.lane = l.name
          FOR NO KEY UPDATE OF l SKIP LOCKED) l;
    v_now := clock_timestamp();
    WITH spent AS (
        DELETE FROM penstock.lane_event e
        USING unnest(v_ids, v_limiters, v_lanes) AS u(id, limiter, lane),
              unnest(v_got_limiters, v_got_lanes) AS g(limiter, lane)
        WHERE e.queue = p_queue AND e.id = u.id AND g.limiter = u.limiter AND g.lane = u.lane
        RETURNING e.limiter, e.lane, e.k
    ), sums AS (
        SELECT s.limiter, s.lane, sum(s.k)::integer AS k,
               CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                    ELSE greatest(l.free_at, v_now) END AS next_at
        FROM spent s JOIN penstock.lane l ON l.limiter = s.limiter AND l.name = s.lane
        GROUP BY 1, 2, l.paused, l.inflight, l.concurrency, l.free_at
    )
    INSERT INTO penstock.lane_queue AS q (limiter, lane, queue, waiting, ready_at)
    SELECT s.limiter, s.lane, p_queue, s.k, CASE WHEN s.k > 0 THEN s.next_at ELSE 'infinity' END
    FROM sums s
    ON CONFLICT (limiter, lane, queue) DO UPDATE SET
        waiting = q.waiting + excluded.waiting,
        ready_at = CASE WHEN q.waiting + excluded.waiting <= 0 THEN 'infinity'
                        WHEN q.waiting <= 0 THEN excluded.ready_at
                        ELSE q.ready_at END;
END $$;

-- Write leases for jobs that were taken out of their lanes: one for each p_batch of them in their order, and one of
-- its own for each job whose process died before, so that it takes no neighbours with it.
CREATE FUNCTION penstock.lease_lanes_v1(
    p_host bigint, p_queue integer, p_limiter text, p_granted_at timestamptz, p_batch integer,
    p_jobs penstock.lane_job[]
) RETURNS TABLE (
    lease_id bigint, is_plain boolean, ids bigint[], run_ats timestamptz[], priorities smallint[],
    attempts smallint[], losses smallint[], lanes text[], traceparents text[], versions smallint[],
    payloads bytea[]
) LANGUAGE sql SET enable_sort = off AS $$
    WITH placed AS (
        SELECT j.*, CASE WHEN j.losses > 0 THEN -j.ord ELSE (
            count(*) FILTER (WHERE j.losses = 0) OVER (ROWS UNBOUNDED PRECEDING) - 1
        ) / p_batch END AS part
        FROM unnest(p_jobs) WITH ORDINALITY
            AS j(id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key,
                 traceparent, payload, version, ord)
    )
    INSERT INTO penstock.job_lease AS l
        (host, queue, limiter, granted_at, ids, run_ats, group_ids, priorities, attempts,
         losses, lanes, unique_keys, traceparents, versions, payloads)
    SELECT p_host, p_queue, p_limiter, p_granted_at,
           array_agg(j.id), array_agg(j.run_at), array_agg(j.group_id), array_agg(j.priority),
           array_agg(j.attempt), array_agg(j.losses), array_agg(j.lane), array_agg(j.unique_key),
           array_agg(j.traceparent), array_agg(j.version), array_agg(j.payload)
    FROM placed j GROUP BY j.part
    RETURNING l.id, l.is_plain, l.ids, l.run_ats, l.priorities, l.attempts, l.losses, l.lanes,
        l.traceparents, l.versions, l.payloads;
$$;

-- Lease jobs of a queue's lanes in up to p_leases_max leases of p_batch: at most p_lanes_max lanes that have allowance,
-- in turns of p_quantum x weight. Acks as in claim_ready_v2. One row a lease, or one with lease_id NULL: nothing,
-- and wait_s says when to look again (NULL: not before something is enqueued). A start is allowed within
-- slack_s of the moment the claim was SENT.
CREATE FUNCTION penstock.claim_lanes_v2(
    p_host bigint, p_queue integer, p_leases_max integer, p_batch integer, p_lanes_max integer,
    p_quantum integer, p_done bigint[]
) RETURNS TABLE (
    claimed_at timestamptz, retries integer, limiter text, wait_s double precision,
    slack_s double precision, lost bigint[], busy bigint[],
    lease_id bigint, is_plain boolean, ids bigint[], run_ats timestamptz[], priorities smallint[],
    attempts smallint[], losses smallint[], lanes text[], traceparents text[], versions smallint[],
    payloads bytea[]
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
    v_lost bigint[];
    v_busy bigint[];
    v_retries integer;
    v_limiter text;
    v_now timestamptz := clock_timestamp();
    v_names text[];
    v_gives integer[];
    v_turns integer[];
    v_jobs penstock.lane_job[];
    v_slack double precision := 0;
    v_wait double precision := 0;
BEGIN
    IF p_done <> '{}' THEN
        SELECT a.lost, a.busy INTO v_lost, v_busy FROM penstock.ack_v1(p_done) a;
    END IF;
    SELECT coalesce(o.retries, q.retries), q.limiter INTO v_retries, v_limiter
    FROM penstock.host h
    JOIN penstock.queue q ON q.id = p_queue AND NOT q.paused
    LEFT JOIN penstock.queue_override o ON o.queue = q.id
    WHERE h.id = p_host AND h.expires_at > now() AND NOT h.is_draining;
    IF FOUND THEN
        PERFORM penstock.fold_lanes_v2(p_queue, 1000);
        v_now := clock_timestamp();
        -- The second bound on ready_at lets a generic plan use the partial index (20-42 ms without).
        SELECT array_agg(c.name) INTO v_names FROM (
            SELECT l.name FROM penstock.lane_queue q
            JOIN penstock.lane l ON l.limiter = q.limiter AND l.name = q.lane
            WHERE q.queue = p_queue AND q.ready_at <= v_now AND q.ready_at < 'infinity'
              AND q.limiter = v_limiter
            ORDER BY q.ready_at LIMIT p_lanes_max FOR NO KEY UPDATE OF l SKIP LOCKED
        ) c;
    END IF;
    IF v_names IS NULL THEN
        SELECT extract(epoch FROM min(q.ready_at) - clock_timestamp()) INTO v_wait
        FROM penstock.lane_queue q
        WHERE q.queue = p_queue AND q.ready_at < 'infinity' AND v_limiter IS NOT NULL;
    ELSE
        v_now := clock_timestamp();
        SELECT p.names, p.gives, p.turns, p.slack_s INTO v_names, v_gives, v_turns, v_slack
        FROM penstock.plan_lanes_v1(
            v_limiter, p_queue, v_names, p_leases_max * p_batch, p_quantum, v_now) p;
        WITH gone AS (
            DELETE FROM penstock.lane_job d WHERE d.ctid = ANY(ARRAY(
                SELECT k.ctid FROM (
                    SELECT c.ctid, count(*) FILTER (WHERE c.losses > 0) OVER w
                        + (count(*) FILTER (WHERE c.losses = 0) OVER w + p_batch - 1) / p_batch
                        AS leases
                    FROM unnest(v_names, v_gives) AS g(name, give), LATERAL (
                        SELECT j.ctid, j.losses FROM penstock.lane_job j
                        WHERE j.queue = p_queue AND j.lane = g.name
                        ORDER BY j.priority, j.id LIMIT g.give FOR UPDATE SKIP LOCKED
                    ) c WHERE g.give > 0 WINDOW w AS (ROWS UNBOUNDED PRECEDING)
                ) k WHERE k.leases <= p_leases_max
            )) RETURNING d AS job
        )
        SELECT array_agg(g.job ORDER BY (g.job).priority, (g.job).id)
        INTO v_jobs FROM gone g;
        PERFORM penstock.grant_v2(v_limiter, p_queue, v_names, v_turns, ARRAY(
            SELECT j.lane FROM unnest(v_jobs) j), v_now);
    END IF;
    IF v_jobs IS NULL THEN
        RETURN QUERY SELECT v_now, v_retries, v_limiter, v_wait, 0::double precision, v_lost, v_busy,
            NULL::bigint, NULL::boolean, NULL::bigint[], NULL::timestamptz[], NULL::smallint[],
            NULL::smallint[], NULL::smallint[], NULL::text[], NULL::text[], NULL::smallint[],
            NULL::bytea[];
        RETURN;
    END IF;
    RETURN QUERY SELECT v_now, v_retries, v_limiter, v_wait, v_slack, v_lost, v_busy, l.*
    FROM penstock.lease_lanes_v1(p_host, p_queue, v_limiter, v_now, p_batch, v_jobs) l;
END $$;

-- What each of the lanes p_names, which the caller holds locked, gives of p_jobs_max jobs: least of what waits, what
-- rate and concurrency allow, and its turn: p_quantum x weight, or more where so few lanes would not fill the claim.
-- A lane that the claim's end cuts short keeps its place and the rest of its turn (turns > 0); one that it cuts to
-- nothing is left out, untouched.
CREATE FUNCTION penstock.plan_lanes_v1(
    p_limiter text, p_queue integer, p_names text[], p_jobs_max integer, p_quantum integer,
    p_now timestamptz
) RETURNS TABLE (names text[], gives integer[], turns integer[], slack_s double precision)
LANGUAGE sql SET enable_seqscan = off AS $$
    WITH allowed AS (
        SELECT l.name, q.ready_at, l.slack_s, u.turn,
               CASE WHEN l.paused THEN 0 ELSE greatest(0, least(
                   q.waiting, l.concurrency - l.inflight, u.turn,
                   l.starts_max - (
                       SELECT coalesce(sum(s.n), 0) FROM unnest(l.at, l.n) AS s(at, n)
                       WHERE s.at > p_now - (l.window_s + l.slack_s) * interval '1 s'))) END AS give
        FROM unnest(p_names) AS v(name)
        JOIN penstock.lane l ON l.limiter = p_limiter AND l.name = v.name
        JOIN penstock.lane_queue q
          ON q.limiter = p_limiter AND q.lane = v.name AND q.queue = p_queue
        CROSS JOIN (
            SELECT greatest(p_quantum, ceil(p_jobs_max::double precision / sum(w.weight)))::integer AS quantum
            FROM penstock.lane w WHERE w.limiter = p_limiter AND w.name = ANY(p_names)
        ) fill
        CROSS JOIN LATERAL (
            SELECT CASE WHEN q.turn > 0 THEN q.turn ELSE fill.quantum * l.weight END AS turn) u
    ), running AS (
        SELECT a.*, p_jobs_max - coalesce(sum(a.give) OVER (
            ORDER BY a.ready_at, a.name ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS room
        FROM allowed a
    ), cut AS (
        SELECT r.*, least(r.give, r.room)::integer AS given FROM running r
        WHERE r.give = 0 OR r.room > 0
    )
    SELECT array_agg(c.name), array_agg(greatest(0, c.given)),
           array_agg(CASE WHEN c.given < c.give THEN c.turn - c.given ELSE 0 END),
           coalesce(min(c.slack_s) FILTER (WHERE c.given > 0), 0)
    FROM cut c;
$$;

-- Write grants into the lanes p_names, which the caller holds locked: p_lanes has a lane once for each job that it
-- gave at p_now. Also corrects the hints of lanes that gave nothing. Over 16 starts a window, grants of one
-- sixteenth of it share an entry, which takes the LATER instant: at most 17 entries, and still strict. Entries
-- of the future (extra starts that somebody waits for) count as live.
CREATE FUNCTION penstock.grant_v2(
    p_limiter text, p_queue integer, p_names text[], p_turns integer[], p_lanes text[],
    p_now timestamptz
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    WITH given AS (
        SELECT v.name, v.turn, count(u.lane)::integer AS k
        FROM unnest(p_names, p_turns) AS v(name, turn)
        LEFT JOIN unnest(p_lanes) AS u(lane) ON u.lane = v.name
        GROUP BY v.name, v.turn
    ), kept AS (
        SELECT l.name, g.k, g.turn, l.starts_max, l.window_s + l.slack_s AS span_s,
               coalesce(array_agg(s.at ORDER BY s.at) FILTER (WHERE s.is_live), '{}') AS at,
               coalesce(array_agg(s.n ORDER BY s.at) FILTER (WHERE s.is_live), '{}') AS n,
               coalesce(sum(s.n) FILTER (WHERE s.is_live), 0) AS live
        FROM given g JOIN penstock.lane l ON l.limiter = p_limiter AND l.name = g.name
        LEFT JOIN LATERAL (
            SELECT e.at, e.n, e.n > 0
                AND e.at > p_now - (l.window_s + l.slack_s) * interval '1 s' AS is_live
            FROM unnest(l.at, l.n) AS e(at, n)) s ON true
        GROUP BY l.name, g.k, g.turn, l.starts_max, l.window_s, l.slack_s
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
        UPDATE penstock.lane l SET
            at = CASE WHEN g.starts_max IS NULL THEN '{}' ELSE g.new_at END,
            n = CASE WHEN g.starts_max IS NULL THEN '{}' ELSE g.new_n END,
            inflight = l.inflight + g.k,
            started_at = CASE WHEN g.k > 0 THEN greatest(l.started_at, p_now) ELSE l.started_at END,
            free_at = CASE WHEN g.live + g.k >= g.starts_max
                           THEN least(g.new_at[1], CASE WHEN g.k > 0 THEN p_now END)
                                + g.span_s * interval '1 s'
                           ELSE '-infinity' END
        FROM logged g WHERE l.limiter = p_limiter AND l.name = g.name
        RETURNING l.name, g.k, g.turn,
            CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                 ELSE greatest(l.free_at, p_now) END AS next_at
    )
    UPDATE penstock.lane_queue q SET
        waiting = q.waiting - CASE WHEN q.queue = p_queue THEN g.k ELSE 0 END,
        turn = CASE WHEN q.queue = p_queue THEN g.turn ELSE q.turn END,
        ready_at = CASE WHEN q.queue <> p_queue THEN g.next_at
                        WHEN q.waiting - g.k <= 0 THEN 'infinity'
                        WHEN g.turn > 0 AND g.next_at <= p_now THEN q.ready_at
                        ELSE g.next_at END
    FROM granted g
    WHERE q.limiter = p_limiter AND q.lane = g.name
      AND (q.queue = p_queue OR q.ready_at < g.next_at);
END $$;

-- Take p_k further starts out of a lane, now or at the first instant that has room behind all others; seconds until
-- then. NULL: refused, for the lane is paused or that would be more than p_wait_max_s away; nothing was spent.
CREATE FUNCTION penstock.spend_v1(
    p_limiter text, p_name text, p_k integer, p_wait_max_s double precision
) RETURNS double precision LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '3s' AS $$
DECLARE
    v penstock.lane%ROWTYPE;
    v_span interval;
    v_now timestamptz;
    v_at timestamptz;
    v_last timestamptz;
    v_shares boolean;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM penstock.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        SELECT * INTO v FROM penstock.lane WHERE limiter = p_limiter AND name = p_name
        FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
    END LOOP;
    v_now := clock_timestamp();
    IF v.paused OR v.starts_max < p_k THEN
        RETURN NULL;
    END IF;
    IF v.starts_max IS NULL THEN
        UPDATE penstock.lane SET started_at = greatest(started_at, v_now)
        WHERE limiter = p_limiter AND name = p_name;
        RETURN 0;
    END IF;
    v_span := (v.window_s + v.slack_s) * interval '1 s';
    SELECT array_agg(s.at ORDER BY s.at), array_agg(s.n ORDER BY s.at) INTO v.at, v.n
    FROM unnest(v.at, v.n) AS s(at, n) WHERE s.n > 0 AND s.at > v_now - v_span;
    v_last := v.at[cardinality(v.at)];
    -- Never before an entry that is there: then no window of another's start can be overfilled.
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
    UPDATE penstock.lane SET
        at = v.at, n = v.n, started_at = greatest(started_at, v_at),
        free_at = CASE WHEN (SELECT sum(s.n) FROM unnest(v.n) AS s(n)) >= starts_max
                       THEN v.at[1] + v_span ELSE '-infinity' END
    WHERE limiter = p_limiter AND name = p_name;
    RETURN greatest(0, extract(epoch FROM v_at - v_now));
END $$;

-- Give lanes limits, live. Where starts will be remembered for longer than so far, an entry blocks the lane until the
-- starts that were forgotten could not matter any more; where slack shrinks, starts count as later by as much,
-- since grants of before are still good for the old slack.
CREATE FUNCTION penstock.limit_lanes_v1(
    p_limiter text, p_names text[], p_starts_max integer, p_window_s double precision,
    p_slack_s double precision, p_concurrency integer
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_now timestamptz;
BEGIN
    PERFORM 1 FROM penstock.lane l WHERE l.limiter = p_limiter AND l.name = ANY(p_names)
    ORDER BY l.name FOR NO KEY UPDATE;
    v_now := clock_timestamp();
    UPDATE penstock.lane l SET
        starts_max = p_starts_max, window_s = p_window_s, slack_s = p_slack_s,
        concurrency = p_concurrency, free_at = '-infinity',
        at = CASE WHEN p_window_s IS NULL THEN '{}' ELSE
            CASE WHEN b.at IS NULL THEN '{}'::timestamptz[] ELSE ARRAY[b.at] END || ARRAY(
                SELECT s.at + greatest(0, l.slack_s - p_slack_s) * interval '1 s'
                FROM unnest(l.at) WITH ORDINALITY AS s(at, ord) ORDER BY s.ord) END,
        n = CASE WHEN p_window_s IS NULL THEN '{}' ELSE
            CASE WHEN b.at IS NULL THEN '{}'::integer[] ELSE ARRAY[1000000000] END || l.n END
    FROM (
        SELECT o.name, CASE
            WHEN p_window_s IS NULL OR o.started_at IS NULL THEN NULL
            WHEN o.window_s IS NULL THEN o.started_at
            WHEN p_window_s + p_slack_s > o.window_s + o.slack_s
            THEN least(o.started_at, v_now - (o.window_s + o.slack_s) * interval '1 s') END AS at
        FROM penstock.lane o WHERE o.limiter = p_limiter AND o.name = ANY(p_names)
    ) b WHERE l.limiter = p_limiter AND l.name = b.name;
    UPDATE penstock.lane_queue q SET ready_at = v_now
    WHERE q.limiter = p_limiter AND q.lane = ANY(p_names) AND q.waiting > 0;
    PERFORM pg_notify('penstock_jobs', w.queue::text) FROM (
        SELECT DISTINCT q.queue FROM penstock.lane_queue q
        WHERE q.limiter = p_limiter AND q.lane = ANY(p_names) AND q.waiting > 0) w;
END $$;

-- Set a lane's own limits, its pause and its weight. is_own false: it follows its limiter again.
CREATE FUNCTION penstock.set_lane_v2(
    p_limiter text, p_name text, p_is_own boolean, p_starts_max integer, p_window_s double precision,
    p_concurrency integer, p_paused boolean, p_weight integer
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v penstock.limiter%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM penstock.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        SELECT * INTO v FROM penstock.limiter m WHERE m.name = p_limiter FOR SHARE;
        UPDATE penstock.lane SET is_own = p_is_own, paused = p_paused, weight = p_weight
        WHERE limiter = p_limiter AND name = p_name;
        EXIT WHEN FOUND;
    END LOOP;
    IF p_is_own THEN
        PERFORM penstock.limit_lanes_v1(
            p_limiter, ARRAY[p_name], p_starts_max, p_window_s, coalesce(v.slack_s, 0.25),
            p_concurrency);
    ELSE
        PERFORM penstock.limit_lanes_v1(
            p_limiter, ARRAY[p_name], v.starts_max, v.window_s, coalesce(v.slack_s, 0.25),
            v.concurrency);
    END IF;
END $$;

-- Write a limiter's limits; true where they changed and its lanes are still to follow. p_is_set: a person's word;
-- what code declares does not change it.
CREATE FUNCTION penstock.set_limiter_v1(
    p_name text, p_starts_max integer, p_window_s double precision, p_slack_s double precision,
    p_concurrency integer, p_is_set boolean
) RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_is_spread boolean;
BEGIN
    IF NOT p_is_set AND EXISTS (
        SELECT FROM penstock.limiter m WHERE m.name = p_name AND (m.is_set OR (
            m.starts_max, m.window_s, m.slack_s, m.concurrency) IS NOT DISTINCT FROM (
            p_starts_max, p_window_s, p_slack_s, p_concurrency) AND m.is_spread)
    ) THEN
        RETURN false;
    END IF;
    INSERT INTO penstock.limiter AS m
        (name, starts_max, window_s, slack_s, concurrency, is_set, is_spread)
    VALUES (p_name, p_starts_max, p_window_s, p_slack_s, p_concurrency, p_is_set, false)
    ON CONFLICT (name) DO UPDATE SET
        starts_max = p_starts_max, window_s = p_window_s, slack_s = p_slack_s,
        concurrency = p_concurrency, is_set = p_is_set, is_spread = false
    WHERE p_is_set OR NOT m.is_set
    RETURNING m.is_spread INTO v_is_spread;
    RETURN NOT coalesce(v_is_spread, true);
END $$;

-- Let up to p_max lanes after p_after follow their limiter; the last of them, or NULL: all do now.
CREATE FUNCTION penstock.spread_limiter_v1(p_name text, p_after text, p_max integer)
RETURNS text LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v penstock.limiter%ROWTYPE;
    v_names text[];
    v_last text;
BEGIN
    -- Not FOR SHARE: two that spread at once would wait for each other at the UPDATE below.
    SELECT * INTO v FROM penstock.limiter m WHERE m.name = p_name FOR NO KEY UPDATE;
    SELECT array_agg(c.name) FILTER (WHERE NOT c.is_own AND (
               c.starts_max, c.window_s, c.slack_s, c.concurrency) IS DISTINCT FROM (
               v.starts_max, v.window_s, v.slack_s, v.concurrency)),
           CASE WHEN count(*) = p_max THEN max(c.name) END
    INTO v_names, v_last FROM (
        SELECT l.* FROM penstock.lane l WHERE l.limiter = p_name AND l.name > p_after
        ORDER BY l.name LIMIT p_max) c;
    IF v_names IS NOT NULL THEN
        PERFORM penstock.limit_lanes_v1(
            p_name, v_names, v.starts_max, v.window_s, v.slack_s, v.concurrency);
    END IF;
    IF v_last IS NULL THEN
        UPDATE penstock.limiter m SET is_spread = true WHERE m.name = p_name AND NOT m.is_spread
          AND (m.starts_max, m.window_s, m.slack_s, m.concurrency) IS NOT DISTINCT FROM (
              v.starts_max, v.window_s, v.slack_s, v.concurrency);
    END IF;
    RETURN v_last;
END $$;

-- Remove idle ones of the next p_max lanes after (p_limiter, p_name) that follow their limiter: nothing waits or runs
-- and no start can matter any more, for p_idle_s at least. Safe: a job that comes meanwhile has a line in the
-- journal, and a fold makes the lane anew. Returns where it came to; NULL: the end.
CREATE FUNCTION penstock.remove_idle_lanes_v1(
    p_limiter text, p_name text, p_max integer, p_idle_s double precision
) RETURNS TABLE (last_limiter text, last_name text, removed integer)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_limiters text[];
    v_names text[];
    v_count integer := 0;
BEGIN
    SELECT array_agg(c.limiter), array_agg(c.name) INTO v_limiters, v_names FROM (
        SELECT l.limiter, l.name FROM penstock.lane l
        WHERE (l.limiter, l.name) > (p_limiter, p_name) ORDER BY l.limiter, l.name LIMIT p_max) c;
    last_limiter := v_limiters[p_max];
    last_name := v_names[p_max];
    SELECT array_agg(i.limiter), array_agg(i.name) INTO v_limiters, v_names FROM (
        SELECT l.limiter, l.name FROM penstock.lane l
        JOIN unnest(v_limiters, v_names) AS u(limiter, name) ON u.limiter = l.limiter AND u.name = l.name
        WHERE NOT l.is_own AND NOT l.paused AND l.weight = 1 AND l.inflight = 0
          AND coalesce(l.started_at, '-infinity')
            < now() - greatest(p_idle_s, l.window_s + l.slack_s) * interval '1 s'
          AND NOT EXISTS (SELECT FROM penstock.lane_queue q
                          WHERE q.limiter = l.limiter AND q.lane = l.name AND q.waiting <> 0)
        FOR UPDATE OF l SKIP LOCKED) i;
    IF v_names IS NOT NULL THEN
        -- Looked at once more under the lock: a job may have come between.
        WITH idle AS (
            SELECT u.limiter, u.name FROM unnest(v_limiters, v_names) AS u(limiter, name)
            WHERE NOT EXISTS (SELECT FROM penstock.lane_queue q
                              WHERE q.limiter = u.limiter AND q.lane = u.name AND q.waiting <> 0)
        ), emptied AS (
            DELETE FROM penstock.lane_queue q USING idle i
            WHERE q.limiter = i.limiter AND q.lane = i.name
        ), gone AS (
            DELETE FROM penstock.lane l USING idle i
            WHERE l.limiter = i.limiter AND l.name = i.name RETURNING 1
        )
        SELECT count(*) INTO v_count FROM gone;
    END IF;
    removed := v_count;
    RETURN NEXT;
END $$;

-- Which of p_queues have work that is due now, without lanes and in lanes (a hint or a line of the journal), and in
-- how many seconds the next becomes due of all that is known. Index probes alone.
CREATE FUNCTION penstock.work_ahead_v1(p_queues integer[])
RETURNS TABLE (ready integer[], laned integer[], wait_s double precision)
LANGUAGE sql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
    SELECT array_agg(w.id) FILTER (WHERE w.run_at <= now()),
           array_agg(w.id) FILTER (WHERE w.has_events OR w.ready_at <= now()),
           extract(epoch FROM least(
               min(w.run_at) FILTER (WHERE w.run_at > now()),
               min(w.ready_at) FILTER (WHERE w.ready_at > now())) - now())::double precision
    FROM (
        SELECT q.id,
               EXISTS (SELECT FROM penstock.lane_event e WHERE e.queue = q.id) AS has_events,
               (SELECT l.ready_at FROM penstock.lane_queue l
                WHERE l.queue = q.id AND l.ready_at < 'infinity'
                ORDER BY l.ready_at LIMIT 1) AS ready_at,
               CASE WHEN EXISTS (SELECT FROM penstock.job_ready r WHERE r.queue = q.id) THEN (
                   SELECT min(n.run_at) FROM generate_series(0, 9) AS p(priority), LATERAL (
                       SELECT r.run_at FROM penstock.job_ready r
                       WHERE r.queue = q.id AND r.priority = p.priority
                       ORDER BY r.run_at, r.id LIMIT 1) n) END AS run_at
        FROM unnest(p_queues) AS u(id) JOIN penstock.queue q ON q.id = u.id AND NOT q.paused
    ) w;
$$;
