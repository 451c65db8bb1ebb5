-- Functions that claim jobs.

-- Ack the leases p_done, then lease due jobs of a queue: up to p_leases_max leases of p_batch, in
-- the order of p_priorities, after the scan marks (run_at, id). Marks keep a claim off dead index
-- entries while a long transaction holds back vacuum. Due jobs of lanes met by the scan move to
-- their lanes. One row per lease, or one with lease_id NULL. A paused queue, and a host that
-- expired or drains, lease nothing; acks are recorded all the same. scan_s is the time of the
-- search, without the commit, which may wait for a standby.
CREATE FUNCTION headrace.claim_ready_v1(
    p_host bigint, p_queue integer, p_leases_max integer, p_batch integer, p_priorities smallint[],
    p_marks_at timestamptz[], p_marks_id bigint[], p_done bigint[]
) RETURNS TABLE (
    claimed_at timestamptz, retries integer, moved integer, lost bigint[], busy bigint[],
    scan_s double precision,
    lease_id bigint, is_plain boolean, ids bigint[], run_ats timestamptz[], priorities smallint[],
    attempts smallint[], losses smallint[], lanes text[], headers text[], versions smallint[],
    payloads bytea[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_lost bigint[];
    v_busy bigint[];
    v_retries integer;
    v_is_plain boolean;
    v_began timestamptz;
BEGIN
    IF p_done <> '{}' THEN
        SELECT a.lost, a.busy INTO v_lost, v_busy FROM headrace.ack_v1(p_done) a;
    END IF;
    v_began := clock_timestamp();
    SELECT q.retries, q.keep_done_s IS NULL AND NOT q.keep_result
    INTO v_retries, v_is_plain
    FROM headrace.host h
    JOIN headrace.queue_setting q ON q.id = p_queue AND NOT q.paused
    WHERE h.id = p_host AND h.expires_at > now() AND NOT h.is_draining;
    IF NOT FOUND THEN
        RETURN QUERY SELECT now(), v_retries, 0, v_lost, v_busy, 0::double precision,
            NULL::bigint, NULL::boolean, NULL::bigint[], NULL::timestamptz[], NULL::smallint[],
            NULL::smallint[], NULL::smallint[], NULL::text[], NULL::text[],
            NULL::smallint[], NULL::bytea[];
        RETURN;
    END IF;
    -- One statement: passing the jobs as arrays to another function costs a fifth more CPU.
    RETURN QUERY
    WITH deleted AS (
        DELETE FROM headrace.job_ready j WHERE j.ctid = ANY(ARRAY(
            SELECT k.ctid FROM (
                SELECT c.ctid, count(*) FILTER (WHERE c.losses > 0) OVER w
                    + (count(*) FILTER (WHERE c.losses = 0) OVER w + p_batch - 1) / p_batch
                    AS leases
                FROM unnest(p_priorities) AS p(priority), LATERAL (
                    SELECT r.ctid, r.losses FROM headrace.job_ready r
                    WHERE r.queue = p_queue AND r.priority = p.priority AND r.run_at <= now()
                      AND (r.run_at, r.id) > (p_marks_at[p.priority + 1],
                          p_marks_id[p.priority + 1])
                    ORDER BY r.run_at, r.id LIMIT p_leases_max * p_batch FOR UPDATE SKIP LOCKED
                ) c WINDOW w AS (ROWS UNBOUNDED PRECEDING) LIMIT p_leases_max * p_batch
            ) k WHERE k.leases <= p_leases_max
        )) RETURNING j.*
    ), to_lanes AS (
        INSERT INTO headrace.lane_job SELECT g.* FROM deleted g WHERE g.lane IS NOT NULL
        RETURNING lane_job.queue, lane_job.lane
    ), journaled AS (
        INSERT INTO headrace.lane_event (limiter, lane, queue, k)
        SELECT q.limiter, s.lane, s.queue, count(*)
        FROM to_lanes s JOIN headrace.queue q ON q.id = s.queue GROUP BY 1, 2, 3
    ), numbered AS (
        SELECT g.*, CASE WHEN g.losses > 0 THEN -row_number() OVER w ELSE (
            count(*) FILTER (WHERE g.losses = 0) OVER w - 1) / p_batch END AS part
        FROM deleted g WHERE g.lane IS NULL
        WINDOW w AS (ORDER BY g.priority, g.run_at, g.id ROWS UNBOUNDED PRECEDING)
    ), lease AS (
        INSERT INTO headrace.job_lease
            (host, queue, granted_at, is_plain, ids, run_ats, group_ids, priorities, attempts,
                losses,
             lanes, unique_keys, headers, versions, payloads, jobs)
        SELECT p_host, p_queue, now(),
               v_is_plain AND bool_and(
                   j.unique_key IS NULL AND j.group_id IS NULL
                   AND coalesce(length(j.headers) <= 55, true)),
               array_agg(j.id), array_agg(j.run_at), array_agg(j.group_id), array_agg(j.priority),
               array_agg(j.attempt), array_agg(j.losses), array_agg(j.lane),
                   array_agg(j.unique_key),
               array_agg(j.headers), array_agg(j.version), array_agg(j.payload), count(*)
        FROM numbered j GROUP BY j.part
        RETURNING job_lease.*
    ), counted AS (
        INSERT INTO headrace.job_count (queue, claimed, wait_s, wait_max_s)
        SELECT p_queue, count(*), date_part('epoch', sum(now() - g.run_at)),
               date_part('epoch', now() - min(g.run_at))
        FROM deleted g WHERE g.lane IS NULL HAVING count(*) > 0
    )
    SELECT now(), v_retries, m.n, v_lost, v_busy,
           extract(epoch FROM clock_timestamp() - v_began)::double precision,
           l.id, l.is_plain, l.ids, l.run_ats, l.priorities,
           l.attempts, l.losses, l.lanes, l.headers, l.versions, l.payloads
    FROM (SELECT count(*)::integer AS n FROM to_lanes) m LEFT JOIN lease l ON true;
END $$;

-- Lease jobs of a queue's lanes: up to p_leases_max leases of p_batch, from at most p_lanes_max
-- lanes with room, in shares of p_quantum x weight. One row per lease, or one with lease_id NULL:
-- no lease, and wait_s is the time until the next claim (NULL: after the next enqueue). A start
-- is allowed within slack_s of the moment the claim was SENT. p_is_folding: first fold journal rows
-- after p_event; last_event is the last of them. Lanes ready before p_ready_from are not searched;
-- first_ready is the first one found. Like marks, both keep a claim off dead index entries; scan_s
-- is the time of these searches. is_full: p_lanes_max lanes were visited.
CREATE FUNCTION headrace.claim_lanes_v1(
    p_host bigint, p_queue integer, p_leases_max integer, p_batch integer, p_lanes_max integer,
    p_quantum integer, p_is_folding boolean, p_event bigint, p_ready_from timestamptz
) RETURNS TABLE (
    claimed_at timestamptz, retries integer, limiter text, wait_s double precision,
    last_event bigint, first_ready timestamptz, scan_s double precision, is_full boolean,
    slack_s double precision, is_counted boolean, lease_id bigint, is_plain boolean, ids bigint[],
        run_ats timestamptz[], priorities smallint[],
    attempts smallint[], losses smallint[], lanes text[], headers text[], versions smallint[],
    payloads bytea[]
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_retries integer;
    v_is_plain boolean;
    v_limiter text;
    v_now timestamptz := clock_timestamp();
    v_began timestamptz := v_now;
    v_event bigint := p_event;
    v_first timestamptz;
    v_scan_s double precision := 0;
    v_names text[];
    v_rows tid[];
    v_is_stale boolean;
    v_is_counted boolean;
    v_is_full boolean;
    v_gives integer[];
    v_credits integer[];
    v_slack double precision := 0;
    v_wait double precision;
BEGIN
    SELECT q.retries, q.keep_done_s IS NULL AND NOT q.keep_result, q.limiter
    INTO v_retries, v_is_plain, v_limiter
    FROM headrace.host h
    JOIN headrace.queue_setting q ON q.id = p_queue AND NOT q.paused
    WHERE h.id = p_host AND h.expires_at > now() AND NOT h.is_draining;
    IF FOUND THEN
        IF p_is_folding THEN
            SELECT f.last_event INTO v_event FROM headrace.fold_lanes_v1(p_queue, p_event, 500) f;
        END IF;
        SELECT q.ready_at INTO v_first FROM headrace.lane_queue q
        WHERE q.queue = p_queue AND q.ready_at >= p_ready_from AND q.ready_at < 'infinity'
        ORDER BY q.ready_at LIMIT 1;
        v_now := clock_timestamp();
        -- The second bound on ready_at lets a generic plan use the partial index.
        SELECT array_agg(c.lane), array_agg(c.ctid), bool_or(c.is_stale)
        INTO v_names, v_rows, v_is_stale FROM (
            SELECT q.lane, l.ctid, l.is_stale FROM (
                SELECT w.lane FROM headrace.lane_queue w
                WHERE w.queue = p_queue AND w.ready_at >= v_first AND w.ready_at <= v_now
                  AND w.ready_at < 'infinity'
                  AND w.limiter = v_limiter ORDER BY w.ready_at OFFSET 0
            ) q CROSS JOIN LATERAL (
                SELECT l.ctid, l.uncounted > 0 AS is_stale FROM headrace.lane l
                WHERE l.limiter = v_limiter AND l.name = q.lane FOR NO KEY UPDATE SKIP LOCKED
            ) l LIMIT p_lanes_max
        ) c;
        v_scan_s := extract(epoch FROM clock_timestamp() - v_began);
    END IF;
    IF v_names IS NULL THEN
        v_wait := CASE WHEN p_is_folding THEN extract(epoch FROM v_first - clock_timestamp())
            ELSE 0 END;
        RETURN QUERY SELECT v_now, v_retries, v_limiter, v_wait, v_event, v_first, v_scan_s, false,
            0::double precision, false, NULL::bigint, NULL::boolean, NULL::bigint[],
            NULL::timestamptz[], NULL::smallint[], NULL::smallint[], NULL::smallint[],
            NULL::text[], NULL::text[], NULL::smallint[], NULL::bytea[];
        RETURN;
    END IF;
    v_is_full := cardinality(v_names) >= p_lanes_max;
    IF v_is_stale THEN
        v_rows := headrace.recount_lanes_v1(v_limiter, v_names);
    END IF;
    v_now := clock_timestamp();
    SELECT p.names, p.lane_rows, p.gives, p.credits, p.slack_s, p.is_counted
    INTO v_names, v_rows, v_gives, v_credits, v_slack, v_is_counted
    FROM headrace.plan_lanes_v1(
        v_limiter, p_queue, v_names, v_rows, p_leases_max * p_batch, p_quantum, v_now) p;
    RETURN QUERY
    WITH deleted AS (
        DELETE FROM headrace.lane_job d WHERE d.ctid = ANY(ARRAY(
            SELECT k.ctid FROM (
                SELECT c.ctid, count(*) FILTER (WHERE c.losses > 0) OVER w
                    + (count(*) FILTER (WHERE c.losses = 0) OVER w + p_batch - 1) / p_batch
                    AS leases
                FROM unnest(v_names, v_gives) AS g(name, give), LATERAL (
                    SELECT j.ctid, j.losses FROM headrace.lane_job j
                    WHERE j.queue = p_queue AND j.lane = g.name
                    ORDER BY j.priority, j.id LIMIT g.give FOR UPDATE SKIP LOCKED
                ) c WHERE g.give > 0 WINDOW w AS (ROWS UNBOUNDED PRECEDING)
            ) k WHERE k.leases <= p_leases_max
        )) RETURNING d.*
    ), numbered AS (
        SELECT g.*, CASE WHEN g.losses > 0 THEN -row_number() OVER w ELSE (
            count(*) FILTER (WHERE g.losses = 0) OVER w - 1) / p_batch END AS part
        FROM deleted g WINDOW w AS (ORDER BY g.priority, g.id ROWS UNBOUNDED PRECEDING)
    ), lease AS (
        INSERT INTO headrace.job_lease
            (host, queue, limiter, is_counted, granted_at, is_plain, ids, run_ats, group_ids,
             priorities, attempts, losses, lanes, unique_keys, headers, versions, payloads,
             jobs)
        SELECT p_host, p_queue, v_limiter, v_is_counted, v_now,
               v_is_plain AND bool_and(
                   j.unique_key IS NULL AND j.group_id IS NULL
                   AND coalesce(length(j.headers) <= 55, true)),
               array_agg(j.id), array_agg(j.run_at), array_agg(j.group_id), array_agg(j.priority),
               array_agg(j.attempt), array_agg(j.losses), array_agg(j.lane),
                   array_agg(j.unique_key),
               array_agg(j.headers), array_agg(j.version), array_agg(j.payload), count(*)
        FROM numbered j GROUP BY j.part
        RETURNING job_lease.*
    ), counted AS (
        INSERT INTO headrace.job_count (queue, claimed, wait_s, wait_max_s)
        SELECT p_queue, count(*), date_part('epoch', sum(v_now - g.run_at)),
               date_part('epoch', v_now - min(g.run_at))
        FROM deleted g HAVING count(*) > 0
    )
    SELECT v_now, v_retries, v_limiter, 0::double precision, v_event, v_first, v_scan_s,
           v_is_full, v_slack, v_is_counted, l.id, l.is_plain,
           l.ids, l.run_ats, l.priorities, l.attempts, l.losses, l.lanes, l.headers,
               l.versions,
           l.payloads
    FROM headrace.grant_v1(v_limiter, p_queue, v_names, v_rows, v_credits,
        ARRAY(SELECT g.lane FROM deleted g), v_now)
    LEFT JOIN lease l ON true;
END $$;

-- Queues of p_queues with due work, without lanes and in lanes (a hint or a journal row), and the
-- seconds until the next job becomes due. Index probes only. Only jobs due since p_from, lanes
-- ready since then and journal rows after p_event are searched: like the marks of a claim, both
-- keep the search off dead index entries. polled_at, last_event: marks for later calls. took_s:
-- the time of the search.
CREATE FUNCTION headrace.work_ahead_v1(
    p_queues integer[], p_from timestamptz, p_event bigint
) RETURNS TABLE (
    ready integer[], laned integer[], wait_s double precision, polled_at timestamptz,
    last_event bigint, took_s double precision
) LANGUAGE sql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
    SELECT array_agg(w.id) FILTER (WHERE w.run_at <= now()),
           array_agg(w.id) FILTER (WHERE w.has_events OR w.ready_at <= now()),
           extract(epoch FROM least(
               min(w.run_at) FILTER (WHERE w.run_at > now()),
               min(w.ready_at) FILTER (WHERE w.ready_at > now())) - now())::double precision,
           now(),
           (SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END
            FROM headrace.lane_event_id_seq s),
           extract(epoch FROM clock_timestamp() - now())::double precision
    FROM (
        SELECT q.id,
               EXISTS (SELECT FROM headrace.lane_event e
                       WHERE e.queue = q.id AND e.id > p_event) AS has_events,
               (SELECT l.ready_at FROM headrace.lane_queue l
                WHERE l.queue = q.id AND l.ready_at >= p_from AND l.ready_at < 'infinity'
                ORDER BY l.ready_at LIMIT 1) AS ready_at,
               -- Without marks, one probe is enough for an empty queue.
               CASE WHEN p_from > 'epoch' OR EXISTS (
                   SELECT FROM headrace.job_ready r WHERE r.queue = q.id
               ) THEN (
                   SELECT min(n.run_at) FROM generate_series(0, 9) AS p(priority), LATERAL (
                       SELECT r.run_at FROM headrace.job_ready r
                       WHERE r.queue = q.id AND r.priority = p.priority AND r.run_at >= p_from
                       ORDER BY r.run_at, r.id LIMIT 1) n) END AS run_at
        FROM unnest(p_queues) AS u(id) JOIN headrace.queue q ON q.id = u.id AND NOT q.paused
    ) w;
$$;
