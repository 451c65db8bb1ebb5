-- Functions of the jobs room, by topic. Each is one call that does all or nothing. Functions set
-- the planner options that they need: a plan cached while a table was empty would otherwise stay a
-- sequential scan.

-- Enqueue. ---------------------------------------------------------------------------------------

-- Assign each job its unique key, or the id of the unfinished job that has the key. Keys are taken
-- in order, so that two callers with the same keys cannot deadlock.
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
    RAISE EXCEPTION 'unique keys keep changing: retry the transaction'
        USING ERRCODE = 'serialization_failure';
END $$;

-- Insert jobs. Return their ids in order; for a taken key the id of the job that has it. A run_at
-- in the past counts as now. Due jobs of lanes go to their lane with one journal row per lane; no
-- lane is locked.
CREATE FUNCTION headrace.enqueue_v1(
    p_queues integer[], p_priorities smallint[], p_run_ats timestamptz[],
    p_delays_s double precision[], p_lanes text[], p_keys text[], p_groups bigint[],
    p_payloads bytea[], p_versions smallint[], p_traceparent text, p_notify boolean
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
        (id, queue, run_at, group_id, priority, lane, unique_key, traceparent, payload, version)
    SELECT r.own, r.queue,
           greatest(coalesce(r.run_at, now() + r.delay_s * interval '1 s'), now()),
           r.group_id, r.priority, r.lane, r.key, p_traceparent, r.payload, coalesce(r.version, 1)
    FROM unnest(v_own, v_ids, p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
                p_groups, p_payloads, p_versions)
        AS r(own, id, queue, priority, run_at, delay_s, lane, key, group_id, payload, version)
    WHERE r.own = r.id
      AND (r.lane IS NULL OR coalesce(r.run_at > now(), r.delay_s > 0, false));
    IF array_remove(p_lanes, NULL) <> '{}' THEN
        WITH added AS (
            INSERT INTO headrace.lane_job
                (id, queue, run_at, group_id, priority, lane, unique_key, traceparent, payload,
                 version)
            SELECT r.own, r.queue, now(), r.group_id, r.priority, r.lane, r.key, p_traceparent,
                   r.payload, coalesce(r.version, 1)
            FROM unnest(v_own, v_ids, p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes,
                        p_keys, p_groups, p_payloads, p_versions)
                AS r(own, id, queue, priority, run_at, delay_s, lane, key, group_id, payload,
                    version)
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

-- Count members of groups as ended. The last member of a group enqueues the callback; the counts
-- are spliced into the payload as text, since jsonb would refuse \u0000 and with it every ack of
-- the group. Lock order: lanes first, then groups by id.
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
        WITH ended AS (
            DELETE FROM headrace.job_group WHERE id = ANY(p_groups) AND pending <= 0 RETURNING *
        )
        -- Callbacks in order of key: concurrent callers must take keys in one order.
        SELECT * FROM ended e ORDER BY e.queue, e.unique_key
    LOOP
        PERFORM headrace.enqueue_v1(
            ARRAY[v.queue], ARRAY[v.priority], ARRAY[v.run_at], ARRAY[v.delay_s], ARRAY[v.lane],
            ARRAY[v.unique_key], NULL,
            ARRAY[convert_to(format(
                '{"group":{"id":%s,"done":%s,"failed":%s,"cancelled":%s,"quarantined":%s}%s',
                v.id, v.done, v.failed, v.cancelled, v.quarantined,
                CASE WHEN v.payload = '{}'::bytea THEN '' ELSE ',' END
            ), 'UTF8') || substring(v.payload FROM 2)],
            ARRAY[v.version], v.traceparent, true);
    END LOOP;
END $$;

-- Insert groups of p_pending members each. A group without members calls back at once.
CREATE FUNCTION headrace.add_groups_v1(
    p_pending integer[], p_queues integer[], p_priorities smallint[], p_run_ats timestamptz[],
    p_delays_s double precision[], p_lanes text[], p_keys text[], p_payloads bytea[],
    p_versions smallint[], p_traceparent text
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
        (id, pending, queue, priority, run_at, delay_s, lane, unique_key, traceparent, payload,
         version)
    SELECT r.id, r.pending, r.queue, r.priority, r.run_at, r.delay_s, r.lane, r.key,
           p_traceparent, r.payload, coalesce(r.version, 1)
    FROM unnest(v_ids, p_pending, p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
                p_payloads, p_versions)
        AS r(id, pending, queue, priority, run_at, delay_s, lane, key, payload, version);
    SELECT array_agg(r.id) INTO v_empty
    FROM unnest(v_ids, p_pending) AS r(id, pending) WHERE r.pending = 0;
    IF v_empty IS NOT NULL THEN
        PERFORM headrace.finish_members_v1(v_empty, '{}');
    END IF;
    RETURN v_ids;
END $$;

-- Insert jobs as members of existing groups. Return their ids in order; NULL if one of the groups
-- does not exist. A job whose unique key is taken is neither inserted nor a member. With keys, a
-- temporary group id marks the jobs that this call inserted: an id alone does not show it, since
-- another caller may have taken the key a moment ago. Groups are locked in order of id, and last,
-- so that a caller that holds one waits for no other lock.
CREATE FUNCTION headrace.add_members_v1(
    p_groups bigint[], p_queues integer[], p_priorities smallint[], p_run_ats timestamptz[],
    p_delays_s double precision[], p_lanes text[], p_keys text[], p_payloads bytea[],
    p_versions smallint[], p_traceparent text, p_notify boolean
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_ids bigint[];
    v_added bigint[];
    v_mark bigint;
BEGIN
    PERFORM 1 FROM (SELECT DISTINCT unnest(p_groups) AS id) AS g
    WHERE NOT EXISTS (SELECT FROM headrace.job_group j WHERE j.id = g.id);
    IF FOUND THEN
        RETURN NULL;
    END IF;
    IF array_remove(p_keys, NULL) = '{}' THEN
        v_ids := headrace.enqueue_v1(p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
            p_groups, p_payloads, p_versions, p_traceparent, p_notify);
        v_added := p_groups;
    ELSE
        v_mark := nextval('headrace.job_group_id');
        v_ids := headrace.enqueue_v1(p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
            array_fill(v_mark, ARRAY[cardinality(p_queues)]), p_payloads, p_versions, p_traceparent,
            p_notify);
        WITH members AS (
            SELECT DISTINCT ON (m.id) m.id, m.group_id
            FROM unnest(v_ids, p_groups) WITH ORDINALITY AS m(id, group_id, ord)
                ORDER BY m.id, m.ord
        ), ready AS (
            UPDATE headrace.job_ready r SET group_id = m.group_id
            FROM members m WHERE r.id = m.id AND r.group_id = v_mark RETURNING m.group_id
        ), laned AS (
            UPDATE headrace.lane_job r SET group_id = m.group_id
            FROM members m WHERE r.id = m.id AND r.group_id = v_mark RETURNING m.group_id
        )
        SELECT array_agg(a.group_id) INTO v_added
        FROM (SELECT group_id FROM ready UNION ALL SELECT group_id FROM laned) AS a;
    END IF;
    IF v_added IS NOT NULL THEN
        PERFORM 1 FROM headrace.job_group WHERE id = ANY(v_added) ORDER BY id FOR UPDATE;
        UPDATE headrace.job_group g SET pending = g.pending + a.n
        FROM (SELECT unnest(v_added) AS id, count(*)::integer AS n GROUP BY 1)
            AS a WHERE g.id = a.id;
    END IF;
    RETURN v_ids;
END $$;

-- Counts. ----------------------------------------------------------------------------------------

-- Add up to p_max rows of job_count, oldest first, to minutes and totals. Return how many. Only
-- one caller folds at a time; others return 0. Most calls read the rows of the last 20 s: while a
-- long transaction holds back vacuum, a full scan would pass every row ever folded. Once a minute
-- a call reads all rows, for those of transactions that lasted longer.
CREATE FUNCTION headrace.fold_counts_v1(p_max integer)
RETURNS integer LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_whole_at timestamptz;
    v_rows integer;
BEGIN
    SELECT f.whole_at INTO v_whole_at FROM headrace.job_count_fold f FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    WITH deleted AS (
        DELETE FROM headrace.job_count d WHERE d.ctid = ANY(ARRAY(
            SELECT c.ctid FROM headrace.job_count c
            WHERE c.at >= CASE WHEN v_whole_at <= now() THEN '-infinity'
                               ELSE now() - interval '20 s' END
            ORDER BY c.at LIMIT p_max))
        RETURNING d.*
    ), sums AS (
        SELECT g.queue, date_trunc('minute', g.at) AS minute, count(*) AS k,
               coalesce(sum(g.done), 0) AS done, coalesce(sum(g.failed), 0) AS failed,
               coalesce(sum(g.retried), 0) AS retried, coalesce(sum(g.lost), 0) AS lost,
               coalesce(sum(g.calls), 0) AS calls, coalesce(sum(g.claimed), 0) AS claimed,
               coalesce(sum(g.run_s), 0) AS run_s, coalesce(sum(g.wait_s), 0) AS wait_s,
               coalesce(max(g.wait_max_s), 0) AS wait_max_s, coalesce(sum(g.slot_s), 0) AS slot_s
        FROM deleted g GROUP BY 1, 2
    ), minutes AS (
        INSERT INTO headrace.queue_minute AS m
            (queue, minute, done, failed, retried, lost, calls, claimed, run_s, wait_s, wait_max_s,
                slot_s)
        SELECT s.queue, s.minute, s.done, s.failed, s.retried, s.lost, s.calls, s.claimed, s.run_s,
               s.wait_s, s.wait_max_s, s.slot_s FROM sums s
        ON CONFLICT (queue, minute) DO UPDATE SET
            done = m.done + excluded.done, failed = m.failed + excluded.failed,
            retried = m.retried + excluded.retried, lost = m.lost + excluded.lost,
            calls = m.calls + excluded.calls, claimed = m.claimed + excluded.claimed,
            run_s = m.run_s + excluded.run_s, wait_s = m.wait_s + excluded.wait_s,
            slot_s = m.slot_s + excluded.slot_s,
            wait_max_s = greatest(m.wait_max_s, excluded.wait_max_s)
    ), totals AS (
        INSERT INTO headrace.queue_total AS t
            (queue, done, failed, retried, lost, calls, run_s, wait_s, slot_s)
        SELECT s.queue, sum(s.done), sum(s.failed), sum(s.retried), sum(s.lost), sum(s.calls),
               sum(s.run_s), sum(s.wait_s), sum(s.slot_s) FROM sums s GROUP BY s.queue
        ON CONFLICT (queue) DO UPDATE SET
            done = t.done + excluded.done, failed = t.failed + excluded.failed,
            retried = t.retried + excluded.retried, lost = t.lost + excluded.lost,
            calls = t.calls + excluded.calls, run_s = t.run_s + excluded.run_s,
            wait_s = t.wait_s + excluded.wait_s, slot_s = t.slot_s + excluded.slot_s
    )
    SELECT coalesce(sum(s.k), 0) INTO v_rows FROM sums s;
    IF v_whole_at <= now() AND v_rows < p_max THEN
        UPDATE headrace.job_count_fold SET whole_at = now() + interval '1 minute';
    END IF;
    RETURN v_rows;
END $$;

-- Add the counts that only a host has: calls, run time, slot time and ended jobs. Then fold.
CREATE FUNCTION headrace.add_counts_v1(
    p_host bigint, p_ended bigint, p_queues integer[], p_calls integer[],
        p_run_s double precision[],
    p_slot_s double precision[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.job_count (queue, calls, run_s, slot_s)
    SELECT r.queue, r.calls, r.run_s, r.slot_s
    FROM unnest(p_queues, p_calls, p_run_s, p_slot_s) AS r(queue, calls, run_s, slot_s);
    UPDATE headrace.host SET jobs_ended = jobs_ended + p_ended WHERE id = p_host AND p_ended > 0;
    PERFORM headrace.fold_counts_v1(10000);
END $$;

-- Lanes and limiters. ----------------------------------------------------------------------------

-- Create missing lanes with their limiters' limits. The limiter's row is share-locked, so that a
-- change of its limits waits and then finds the new lanes.
CREATE FUNCTION headrace.make_lanes_v1(p_limiters text[], p_names text[])
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_limiters text[];
    v_names text[];
BEGIN
    SELECT array_agg(u.limiter), array_agg(u.name) INTO v_limiters, v_names
    FROM (SELECT DISTINCT u.limiter, u.name FROM unnest(p_limiters, p_names) AS u(limiter, name)) u
    LEFT JOIN LATERAL (SELECT true AS is_there FROM headrace.lane l
                       WHERE l.limiter = u.limiter AND l.name = u.name OFFSET 0) l ON true
    WHERE l.is_there IS NULL;
    IF v_names IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO headrace.limiter (name)
    SELECT DISTINCT u.limiter FROM unnest(v_limiters) AS u(limiter)
    WHERE NOT EXISTS (SELECT FROM headrace.limiter m WHERE m.name = u.limiter)
    ORDER BY 1 ON CONFLICT DO NOTHING;
    PERFORM 1 FROM headrace.limiter m WHERE m.name = ANY(v_limiters) ORDER BY m.name FOR SHARE;
    INSERT INTO headrace.lane (limiter, name, starts_max, window_s, slack_s, concurrency)
    SELECT u.limiter, u.name, m.starts_max, m.window_s, m.slack_s, m.concurrency
    FROM unnest(v_limiters, v_names) AS u(limiter, name)
        JOIN headrace.limiter m ON m.name = u.limiter
    ORDER BY 1, 2 ON CONFLICT DO NOTHING;
END $$;

-- Add up to p_max journal rows of a queue to the counts of its lanes. Rows of locked lanes wait.
CREATE FUNCTION headrace.fold_lanes_v1(p_queue integer, p_max integer)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_rows tid[];
    v_limiters text[];
    v_lanes text[];
    v_locked_limiters text[];
    v_locked_lanes text[];
    v_now timestamptz;
BEGIN
    SELECT array_agg(e.ctid), array_agg(e.limiter), array_agg(e.lane)
    INTO v_rows, v_limiters, v_lanes
    FROM (SELECT ctid, limiter, lane FROM headrace.lane_event WHERE queue = p_queue
          ORDER BY id LIMIT p_max FOR UPDATE SKIP LOCKED) e;
    IF v_rows IS NULL THEN
        RETURN;
    END IF;
    PERFORM headrace.make_lanes_v1(v_limiters, v_lanes);
    SELECT array_agg(w.limiter), array_agg(w.lane) INTO v_locked_limiters, v_locked_lanes
    FROM (SELECT DISTINCT u.limiter, u.lane FROM unnest(v_limiters, v_lanes) AS u(limiter, lane)) w
    CROSS JOIN LATERAL (SELECT FROM headrace.lane l WHERE l.limiter = w.limiter AND l.name = w.lane
                        FOR NO KEY UPDATE SKIP LOCKED) l;
    v_now := clock_timestamp();
    WITH spent AS (
        DELETE FROM headrace.lane_event e WHERE e.ctid = ANY(ARRAY(
            SELECT u.ctid FROM unnest(v_rows, v_limiters, v_lanes) AS u(ctid, limiter, lane)
            JOIN unnest(v_locked_limiters, v_locked_lanes) AS g(limiter, lane)
              ON g.limiter = u.limiter AND g.lane = u.lane))
        RETURNING e.limiter, e.lane, e.k
    )
    INSERT INTO headrace.lane_queue AS q (limiter, lane, queue, waiting, ready_at)
    SELECT s.limiter, s.lane, p_queue, s.k, CASE WHEN s.k > 0 THEN l.next_at ELSE 'infinity' END
    FROM (SELECT t.limiter, t.lane, sum(t.k)::integer AS k FROM spent t GROUP BY 1, 2) s
    CROSS JOIN LATERAL (
        SELECT CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                    ELSE greatest(l.free_at, v_now) END AS next_at
        FROM headrace.lane l WHERE l.limiter = s.limiter AND l.name = s.lane OFFSET 0) l
    ON CONFLICT (limiter, lane, queue) DO UPDATE SET
        waiting = q.waiting + excluded.waiting,
        ready_at = CASE WHEN q.waiting + excluded.waiting <= 0 THEN 'infinity'
                        WHEN q.waiting <= 0 THEN excluded.ready_at
                        ELSE q.ready_at END;
END $$;

-- Choose how many of p_jobs_max jobs each locked lane of p_names gives. The number is the least of
-- waiting jobs, rate, concurrency and round-robin share: p_quantum x weight, or more if so few
-- lanes would not fill the claim. A lane that the end of the claim cuts short keeps its place and
-- the rest of its share (credits > 0). A lane that would give nothing for lack of room is left
-- out.
CREATE FUNCTION headrace.plan_lanes_v1(
    p_limiter text, p_queue integer, p_names text[], p_jobs_max integer, p_quantum integer,
    p_now timestamptz
) RETURNS TABLE (names text[], gives integer[], credits integer[], slack_s double precision)
LANGUAGE sql SET enable_seqscan = off AS $$
    WITH allowed AS (
        SELECT l.name, l.ready_at, l.slack_s, l.credit,
               CASE WHEN l.paused THEN 0 ELSE greatest(0, least(
                   l.waiting, l.concurrency - l.inflight, l.credit,
                   l.starts_max - (
                       SELECT coalesce(sum(s.n), 0) FROM unnest(l.at, l.n) AS s(at, n)
                       WHERE s.at > p_now - (l.window_s + l.slack_s) * interval '1 s'))) END AS give
        FROM (
            SELECT l.*, q.waiting, q.ready_at, CASE WHEN q.credit > 0 THEN q.credit
                ELSE l.weight * greatest(
                p_quantum, ceil(p_jobs_max::double precision / sum(l.weight) OVER ())
            )::integer END AS credit
            FROM unnest(p_names) AS v(name)
            CROSS JOIN LATERAL (SELECT * FROM headrace.lane l
                                WHERE l.limiter = p_limiter AND l.name = v.name OFFSET 0) l
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
    SELECT array_agg(c.name), array_agg(greatest(0, c.given)),
           array_agg(CASE WHEN c.given < c.give THEN c.credit - c.given ELSE 0 END),
           coalesce(min(c.slack_s) FILTER (WHERE c.given > 0), 0)
    FROM cut c;
$$;

-- Record grants in the locked lanes p_names. p_lanes names a lane once per job granted at p_now.
-- Also correct ready_at of lanes that gave nothing. Above 16 starts per window, grants within a
-- sixteenth of it share one entry with the LATER instant: at most 17 entries, and the limit stays
-- strict. Entries in the future (starts that a caller waits for) count as live.
CREATE FUNCTION headrace.grant_v1(
    p_limiter text, p_queue integer, p_names text[], p_credits integer[], p_lanes text[],
    p_now timestamptz
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    WITH kept AS (
        SELECT l.ctid, g.name, coalesce(u.k, 0) AS k, g.credit, l.starts_max,
               l.window_s + l.slack_s AS span_s, s.at, s.n, s.live
        FROM unnest(p_names, p_credits) AS g(name, credit)
        LEFT JOIN (SELECT lane, count(*)::integer AS k FROM unnest(p_lanes) AS w(lane) GROUP BY 1) u
          ON u.lane = g.name
        CROSS JOIN LATERAL (SELECT l.ctid, l.* FROM headrace.lane l
                            WHERE l.limiter = p_limiter AND l.name = g.name OFFSET 0) l
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
            inflight = l.inflight + g.k,
            started_at = CASE WHEN g.k > 0 THEN greatest(l.started_at, p_now) ELSE l.started_at END,
            free_at = CASE WHEN g.live + g.k >= g.starts_max
                           THEN least(g.new_at[1], CASE WHEN g.k > 0 THEN p_now END)
                                + g.span_s * interval '1 s'
                           ELSE '-infinity' END
        FROM logged g WHERE l.ctid = g.ctid
        RETURNING l.name, g.k, g.credit,
            CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
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
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        SELECT * INTO v FROM headrace.lane WHERE limiter = p_limiter AND name = p_name
        FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
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
BEGIN
    PERFORM 1 FROM (SELECT DISTINCT u.name FROM unnest(p_names) AS u(name) ORDER BY 1) u
    CROSS JOIN LATERAL (SELECT FROM headrace.lane l WHERE l.limiter = p_limiter AND l.name = u.name
                        FOR NO KEY UPDATE) l;
    v_now := clock_timestamp();
    UPDATE headrace.lane l SET
        starts_max = p_starts_max, window_s = p_window_s, slack_s = p_slack_s,
        concurrency = p_concurrency, free_at = '-infinity',
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

-- Set a lane's own limits, its pause and its weight. p_paused, p_weight NULL: unchanged. p_is_own
-- false: follow the limiter again. The slack of own limits grows with the window: many starts
-- granted at once take a busy process longer to begin.
CREATE FUNCTION headrace.set_lane_v1(
    p_limiter text, p_name text, p_is_own boolean, p_starts_max integer,
        p_window_s double precision,
    p_concurrency integer, p_paused boolean, p_weight integer
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v headrace.limiter%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        SELECT * INTO v FROM headrace.limiter m WHERE m.name = p_limiter FOR SHARE;
        UPDATE headrace.lane SET is_own = p_is_own, paused = coalesce(p_paused, paused),
            weight = coalesce(p_weight, weight)
        WHERE limiter = p_limiter AND name = p_name;
        EXIT WHEN FOUND;
    END LOOP;
    IF p_is_own THEN
        PERFORM headrace.limit_lanes_v1(
            p_limiter, ARRAY[p_name], p_starts_max, p_window_s,
            greatest(coalesce(v.slack_s, 0.25), least(1, p_window_s / 60)), p_concurrency);
    ELSE
        PERFORM headrace.limit_lanes_v1(
            p_limiter, ARRAY[p_name], v.starts_max, v.window_s, coalesce(v.slack_s, 0.25),
            v.concurrency);
    END IF;
END $$;

-- Pause or resume a lane; limits and weight stay. The limiter's row is locked before the lane's,
-- the same order as spread_limiter.
CREATE FUNCTION headrace.pause_lane_v1(p_limiter text, p_name text, p_paused boolean)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v headrace.lane%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        PERFORM 1 FROM headrace.limiter m WHERE m.name = p_limiter FOR SHARE;
        SELECT * INTO v FROM headrace.lane l WHERE l.limiter = p_limiter AND l.name = p_name
        FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
    END LOOP;
    PERFORM headrace.set_lane_v1(
        p_limiter, p_name, v.is_own, v.starts_max, v.window_s, v.concurrency, p_paused, v.weight);
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
    -- Check waiting jobs under the lock.
    WITH idle AS (
        SELECT u.limiter, u.name, l.ctid FROM unnest(v_limiters, v_names) AS u(limiter, name)
        CROSS JOIN LATERAL (SELECT l.ctid FROM headrace.lane l
                            WHERE l.limiter = u.limiter AND l.name = u.name OFFSET 0) l
        CROSS JOIN LATERAL (SELECT coalesce(bool_and(w.waiting = 0), true) AS is_empty
                            FROM headrace.lane_queue w
                            WHERE w.limiter = u.limiter AND w.lane = u.name) w
        WHERE w.is_empty
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

-- Settlement. ------------------------------------------------------------------------------------

-- Release jobs of lanes: decrement inflight, and count unstarted, returned and lost jobs as
-- waiting again. An unstarted job returns its start, but only while its own entry must still
-- exist. A lane that was full and has work notifies the workers of its queues. One array element
-- per job; done jobs need only limiter and lane and come last. Rows are found by key one at a time
-- and written by ctid, which no plan cached on empty tables can credit into a scan.
CREATE FUNCTION headrace.settle_lanes_v1(
    p_limiters text[], p_lanes text[], p_queues integer[], p_outcomes text[],
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
        SELECT s.limiter, s.lane, count(*)::integer AS k
        FROM unnest(p_limiters, p_lanes) AS s(limiter, lane) GROUP BY 1, 2
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
            inflight = l.inflight - b.k,
            n = coalesce(b.n, l.n),
            free_at = CASE WHEN b.n IS NULL THEN l.free_at ELSE '-infinity' END
        FROM (
            SELECT o.ctid, s.k, coalesce(o.inflight >= o.concurrency, false) AS was_full,
                CASE WHEN EXISTS (SELECT FROM unspent u
                    WHERE u.limiter = s.limiter AND u.lane = s.lane)
                THEN ARRAY(
                    SELECT greatest(0, o.n[i] - coalesce(u.k, 0))
                        FROM generate_subscripts(o.n, 1) AS i
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
               r.lane, s.unique_key, r.traceparent, r.payload, r.version,
               CASE WHEN s.outcome = 'retry' THEN nullif(left(s.error, 500), '') END AS last_error,
               s.outcome = 'moved' AND r.lane IS NOT NULL AS is_moved,
               r.lane IS NOT NULL AND (s.outcome = 'moved' OR l.limiter IS NOT NULL
                   AND s.outcome NOT IN ('retry', 'snooze')) AS is_for_lane
        FROM headrace.job_lease l
        CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses,
                             l.lanes, l.traceparents, l.payloads, l.versions) WITH ORDINALITY
            AS r(id, run_at, group_id, priority, attempt, losses, lane, traceparent, payload,
                version,
                 ord)
        JOIN unnest(p_jobs) s ON s.lease = l.id AND s.ord = r.ord
        WHERE l.id = ANY(ARRAY(SELECT DISTINCT p.lease FROM unnest(p_jobs) p))
          AND s.outcome IN ('retry', 'snooze', 'unstarted', 'returned', 'lost', 'moved')
    ), laned AS (
        INSERT INTO headrace.lane_job
            (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
             payload, version, last_error)
        SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key,
            traceparent,
               payload, version, last_error FROM back WHERE is_for_lane
    ), journaled AS (
        INSERT INTO headrace.lane_event (limiter, lane, queue, k)
        SELECT q.limiter, b.lane, b.queue, count(*)
        FROM back b JOIN headrace.queue q ON q.id = b.queue WHERE b.is_moved GROUP BY 1, 2, 3
    )
    INSERT INTO headrace.job_ready
        (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
            payload,
         version, last_error)
    SELECT id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
           payload, version, last_error FROM back WHERE NOT is_for_lane;
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
                             l.lanes, l.unique_keys, l.traceparents, l.payloads, l.versions)
            WITH ORDINALITY
            AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
                 payload, version, ord)
        JOIN unnest(p_jobs) s ON s.lease = l.id AND s.ord = r.ord
        WHERE l.id = ANY(ARRAY(SELECT DISTINCT p.lease FROM unnest(p_jobs) p))
          AND (s.outcome IN ('fail', 'cancel', 'quarantined')
               OR s.outcome = 'done' AND (q.keep_done_s IS NOT NULL OR q.keep_result))
    ), kept AS (
        INSERT INTO headrace.job_done
            (id, queue, run_at, ended_at, drop_at, group_id, priority, attempt, losses, lane,
             unique_key, traceparent, version, payload, result)
        SELECT e.id, e.queue, e.run_at, now(), e.drop_at, e.group_id, e.priority, e.attempt,
            e.losses,
               e.lane, e.unique_key, e.traceparent, e.version, e.payload,
               CASE WHEN e.keep_result THEN e.result END
        FROM ended e WHERE e.outcome = 'done'
    )
    INSERT INTO headrace.job_failed
        (id, queue, state, run_at, group_id, priority, attempt, losses, lane, unique_key,
         traceparent, error, traceback, payload, version)
    SELECT e.id, e.queue,
           CASE e.outcome WHEN 'fail' THEN 'failed' WHEN 'cancel' THEN 'cancelled'
                ELSE e.outcome END,
           e.run_at, e.group_id, e.priority,
           least(e.attempt + (e.outcome = 'fail')::integer, 32767)::smallint,
           least(e.losses + (e.outcome = 'quarantined')::integer, 32767)::smallint,
           e.lane, e.unique_key, e.traceparent, coalesce(e.error, ''), coalesce(e.traceback, ''),
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
    DELETE FROM headrace.job_unique u USING unnest(p_jobs) s
    WHERE s.outcome IN ('done', 'fail', 'cancel', 'quarantined', 'moved')
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

-- Settle jobs of leases that the caller holds locked. Locks are taken in one order everywhere:
-- lanes by (limiter, name), then groups by id. Lock waits are short, since a caller's transaction
-- that adds to a group or holds a key may stay open. p_limiters, p_lanes: lanes of further done
-- jobs whose leases are already deleted.
CREATE FUNCTION headrace.settle_jobs_v1(
    p_jobs headrace.settlement[], p_limiters text[], p_lanes text[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '1s' AS $$
DECLARE
    v_jobs headrace.settlement[] := p_jobs;
    v_outcomes text[];
    v_has_keys boolean;
    v_limiters text[];
    v_lanes text[];
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
    SELECT array_agg(s.limiter), array_agg(s.lane), array_agg(s.queue), array_agg(s.outcome),
           array_agg(s.granted_at)
    INTO v_limiters, v_lanes, v_queues, v_lane_outcomes, v_granted_ats
    FROM unnest(v_jobs) s WHERE s.limiter IS NOT NULL;
    IF v_limiters || p_limiters <> '{}' THEN
        PERFORM headrace.settle_lanes_v1(
            v_limiters || p_limiters, v_lanes || p_lanes, v_queues, v_lane_outcomes, v_granted_ats);
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
    INSERT INTO headrace.job_count (queue, done, failed, retried, lost)
    SELECT s.queue, count(*) FILTER (WHERE s.outcome = 'done'),
           count(*) FILTER (WHERE s.outcome IN ('fail', 'cancel', 'quarantined')),
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
BEGIN
    -- Common case: a whole plain batch is done. One delete.
    IF p_outcome = 'done' AND p_whole <> '{}' THEN
        WITH plain AS (
            DELETE FROM headrace.job_lease d WHERE d.ctid = ANY(ARRAY(
                SELECT l.ctid FROM headrace.job_lease l WHERE l.id = ANY(p_whole) AND l.is_plain
                  AND (l.limiter IS NULL OR l.settled = '{}')
                FOR UPDATE SKIP LOCKED))
            RETURNING d.id, d.queue, d.limiter, d.lanes,
                d.jobs - cardinality(d.settled) AS jobs
        ), counted AS (
            INSERT INTO headrace.job_count (queue, done)
            SELECT p.queue, sum(p.jobs) FROM plain p GROUP BY p.queue
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
            PERFORM headrace.settle_lanes_v1(v_limiters, v_lanes, '{}', '{}', '{}');
        END IF;
        RETURN;
    END IF;
    SELECT coalesce(array_agg(h.id), '{}') INTO v_held FROM (
        SELECT l.id FROM headrace.job_lease l WHERE l.id = ANY(v_all) ORDER BY l.id
        FOR UPDATE SKIP LOCKED) h;
    SELECT array_agg((l.id, r.ord, r.id, l.queue, l.limiter, l.granted_at, r.lane, r.group_id,
                      r.unique_key, w.outcome, e.delay_s,
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

-- Claim. -----------------------------------------------------------------------------------------

-- Ack the leases p_done, then lease due jobs of a queue: up to p_leases_max leases of p_batch, in
-- the order of p_priorities, after the scan marks (run_at, id). Marks keep a claim off dead index
-- entries while a long transaction holds back vacuum. Due jobs of lanes met by the scan move to
-- their lanes. One row per lease, or one with lease_id NULL. A paused queue, and a host that
-- expired or drains, lease nothing; acks are recorded all the same.
CREATE FUNCTION headrace.claim_ready_v1(
    p_host bigint, p_queue integer, p_leases_max integer, p_batch integer, p_priorities smallint[],
    p_marks_at timestamptz[], p_marks_id bigint[], p_done bigint[]
) RETURNS TABLE (
    claimed_at timestamptz, retries integer, moved integer, lost bigint[], busy bigint[],
    lease_id bigint, is_plain boolean, ids bigint[], run_ats timestamptz[], priorities smallint[],
    attempts smallint[], losses smallint[], lanes text[], traceparents text[], versions smallint[],
    payloads bytea[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_lost bigint[];
    v_busy bigint[];
    v_retries integer;
    v_is_plain boolean;
BEGIN
    IF p_done <> '{}' THEN
        SELECT a.lost, a.busy INTO v_lost, v_busy FROM headrace.ack_v1(p_done) a;
    END IF;
    SELECT coalesce(o.retries, q.retries), q.keep_done_s IS NULL AND NOT q.keep_result
    INTO v_retries, v_is_plain
    FROM headrace.host h
    JOIN headrace.queue q ON q.id = p_queue AND NOT q.paused
    LEFT JOIN headrace.queue_override o ON o.queue = q.id
    WHERE h.id = p_host AND h.expires_at > now() AND NOT h.is_draining;
    IF NOT FOUND THEN
        RETURN QUERY SELECT now(), v_retries, 0, v_lost, v_busy, NULL::bigint, NULL::boolean,
            NULL::bigint[], NULL::timestamptz[], NULL::smallint[], NULL::smallint[],
                NULL::smallint[],
            NULL::text[], NULL::text[], NULL::smallint[], NULL::bytea[];
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
        INSERT INTO headrace.lane_job
            (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
             payload, version, last_error)
        SELECT g.id, g.queue, g.run_at, g.group_id, g.priority, g.attempt, g.losses, g.lane,
               g.unique_key, g.traceparent, g.payload, g.version, g.last_error
        FROM deleted g WHERE g.lane IS NOT NULL RETURNING lane_job.queue, lane_job.lane
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
             lanes, unique_keys, traceparents, versions, payloads, jobs)
        SELECT p_host, p_queue, now(),
               v_is_plain AND bool_and(j.unique_key IS NULL AND j.group_id IS NULL),
               array_agg(j.id), array_agg(j.run_at), array_agg(j.group_id), array_agg(j.priority),
               array_agg(j.attempt), array_agg(j.losses), array_agg(j.lane),
                   array_agg(j.unique_key),
               array_agg(j.traceparent), array_agg(j.version), array_agg(j.payload), count(*)
        FROM numbered j GROUP BY j.part
        RETURNING job_lease.*
    ), counted AS (
        INSERT INTO headrace.job_count (queue, claimed, wait_s, wait_max_s)
        SELECT p_queue, count(*), date_part('epoch', sum(now() - g.run_at)),
               date_part('epoch', now() - min(g.run_at))
        FROM deleted g WHERE g.lane IS NULL HAVING count(*) > 0
    )
    SELECT now(), v_retries, m.n, v_lost, v_busy, l.id, l.is_plain, l.ids, l.run_ats, l.priorities,
           l.attempts, l.losses, l.lanes, l.traceparents, l.versions, l.payloads
    FROM (SELECT count(*)::integer AS n FROM to_lanes) m LEFT JOIN lease l ON true;
END $$;

-- Lease jobs of a queue's lanes: up to p_leases_max leases of p_batch, from at most p_lanes_max
-- lanes with room, in shares of p_quantum x weight. One row per lease, or one with lease_id NULL:
-- no lease, and wait_s is the time until the next claim (NULL: after the next enqueue). A start
-- is allowed within slack_s of the moment the claim was SENT.
CREATE FUNCTION headrace.claim_lanes_v1(
    p_host bigint, p_queue integer, p_leases_max integer, p_batch integer, p_lanes_max integer,
    p_quantum integer
) RETURNS TABLE (
    claimed_at timestamptz, retries integer, limiter text, wait_s double precision,
    slack_s double precision, lease_id bigint, is_plain boolean, ids bigint[],
        run_ats timestamptz[], priorities smallint[],
    attempts smallint[], losses smallint[], lanes text[], traceparents text[], versions smallint[],
    payloads bytea[]
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_retries integer;
    v_is_plain boolean;
    v_limiter text;
    v_now timestamptz := clock_timestamp();
    v_names text[];
    v_gives integer[];
    v_credits integer[];
    v_slack double precision := 0;
    v_wait double precision;
BEGIN
    SELECT coalesce(o.retries, q.retries), q.keep_done_s IS NULL AND NOT q.keep_result, q.limiter
    INTO v_retries, v_is_plain, v_limiter
    FROM headrace.host h
    JOIN headrace.queue q ON q.id = p_queue AND NOT q.paused
    LEFT JOIN headrace.queue_override o ON o.queue = q.id
    WHERE h.id = p_host AND h.expires_at > now() AND NOT h.is_draining;
    IF FOUND THEN
        PERFORM headrace.fold_lanes_v1(p_queue, 500);
        v_now := clock_timestamp();
        -- The second bound on ready_at lets a generic plan use the partial index.
        SELECT array_agg(c.lane) INTO v_names FROM (
            SELECT q.lane FROM (
                SELECT w.lane FROM headrace.lane_queue w
                WHERE w.queue = p_queue AND w.ready_at <= v_now AND w.ready_at < 'infinity'
                  AND w.limiter = v_limiter ORDER BY w.ready_at OFFSET 0
            ) q CROSS JOIN LATERAL (
                SELECT FROM headrace.lane l WHERE l.limiter = v_limiter AND l.name = q.lane
                FOR NO KEY UPDATE SKIP LOCKED
            ) l LIMIT p_lanes_max
        ) c;
    END IF;
    IF v_names IS NULL THEN
        SELECT extract(epoch FROM min(q.ready_at) - clock_timestamp()) INTO v_wait
        FROM headrace.lane_queue q
        WHERE q.queue = p_queue AND q.ready_at < 'infinity' AND v_limiter IS NOT NULL;
        RETURN QUERY SELECT v_now, v_retries, v_limiter, v_wait, 0::double precision,
            NULL::bigint, NULL::boolean, NULL::bigint[], NULL::timestamptz[], NULL::smallint[],
            NULL::smallint[], NULL::smallint[], NULL::text[], NULL::text[], NULL::smallint[],
            NULL::bytea[];
        RETURN;
    END IF;
    v_now := clock_timestamp();
    SELECT p.names, p.gives, p.credits, p.slack_s INTO v_names, v_gives, v_credits, v_slack
    FROM headrace.plan_lanes_v1(
        v_limiter, p_queue, v_names, p_leases_max * p_batch, p_quantum, v_now) p;
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
            (host, queue, limiter, granted_at, is_plain, ids, run_ats, group_ids, priorities,
                attempts,
             losses, lanes, unique_keys, traceparents, versions, payloads, jobs)
        SELECT p_host, p_queue, v_limiter, v_now,
               v_is_plain AND bool_and(j.unique_key IS NULL AND j.group_id IS NULL),
               array_agg(j.id), array_agg(j.run_at), array_agg(j.group_id), array_agg(j.priority),
               array_agg(j.attempt), array_agg(j.losses), array_agg(j.lane),
                   array_agg(j.unique_key),
               array_agg(j.traceparent), array_agg(j.version), array_agg(j.payload), count(*)
        FROM numbered j GROUP BY j.part
        RETURNING job_lease.*
    ), counted AS (
        INSERT INTO headrace.job_count (queue, claimed, wait_s, wait_max_s)
        SELECT p_queue, count(*), date_part('epoch', sum(v_now - g.run_at)),
               date_part('epoch', v_now - min(g.run_at))
        FROM deleted g HAVING count(*) > 0
    )
    SELECT v_now, v_retries, v_limiter, 0::double precision, v_slack, l.id, l.is_plain,
           l.ids, l.run_ats, l.priorities, l.attempts, l.losses, l.lanes, l.traceparents,
               l.versions,
           l.payloads
    FROM headrace.grant_v1(v_limiter, p_queue, v_names, v_credits, ARRAY(SELECT g.lane
        FROM deleted g), v_now)
    LEFT JOIN lease l ON true;
END $$;

-- Queues of p_queues with due work, without lanes and in lanes (a hint or a journal row), and the
-- seconds until the next job becomes due. Index probes only.
CREATE FUNCTION headrace.work_ahead_v1(p_queues integer[])
RETURNS TABLE (ready integer[], laned integer[], wait_s double precision)
LANGUAGE sql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
    SELECT array_agg(w.id) FILTER (WHERE w.run_at <= now()),
           array_agg(w.id) FILTER (WHERE w.has_events OR w.ready_at <= now()),
           extract(epoch FROM least(
               min(w.run_at) FILTER (WHERE w.run_at > now()),
               min(w.ready_at) FILTER (WHERE w.ready_at > now())) - now())::double precision
    FROM (
        SELECT q.id,
               EXISTS (SELECT FROM headrace.lane_event e WHERE e.queue = q.id) AS has_events,
               (SELECT l.ready_at FROM headrace.lane_queue l
                WHERE l.queue = q.id AND l.ready_at < 'infinity'
                ORDER BY l.ready_at LIMIT 1) AS ready_at,
               CASE WHEN EXISTS (SELECT FROM headrace.job_ready r WHERE r.queue = q.id) THEN (
                   SELECT min(n.run_at) FROM generate_series(0, 9) AS p(priority), LATERAL (
                       SELECT r.run_at FROM headrace.job_ready r
                       WHERE r.queue = q.id AND r.priority = p.priority
                       ORDER BY r.run_at, r.id LIMIT 1) n) END AS run_at
        FROM unnest(p_queues) AS u(id) JOIN headrace.queue q ON q.id = u.id AND NOT q.paused
    ) w;
$$;

-- Lists and bulk actions. ------------------------------------------------------------------------

-- Matching jobs below the id p_before, at most p_jobs_max per table, unsorted. NULL: any queue,
-- lane, error text or age. Age counts from the end, or from when the job was due. Work is bounded:
-- at most p_window rows of a table are read. If that ended the search, a row without a state holds
-- the id that it reached. job_ready and lane_job have no index by queue and id, which every
-- enqueue would pay for: a queue of at most p_window waiting jobs is read and sorted, a longer one
-- is found by id among the jobs of all queues. Statements are planned on each call, since a plan
-- cached on an empty table reads a full one whole; the row comparison leaves one index order,
-- however wrong the statistics are.
CREATE FUNCTION headrace.list_jobs_v1(
    p_queue integer, p_states text[], p_lane text, p_error text, p_older_than_s double precision,
    p_ids bigint[], p_before bigint, p_jobs_max integer, p_window integer
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
        ' AND ($5 IS NULL OR coalesce(s.ended_at, s.run_at) < now() - $5 * interval ''1 s'')';
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
            p_window;
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
                 traceparent, error, traceback, payload, version)
            SELECT g.id, g.queue, 'cancelled', g.run_at, g.group_id, g.priority, g.attempt,
                   g.losses, g.lane, g.unique_key, g.traceparent, 'cancelled', '', g.payload,
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
    IF v_groups <> '{}' THEN
        PERFORM headrace.finish_members_v1(
            v_groups, array_fill('cancelled'::text, ARRAY[cardinality(v_groups)]));
    END IF;
    RETURN v_ids;
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
    WITH back AS (
        DELETE FROM headrace.job_failed f WHERE f.id = ANY(retried) RETURNING *
    ), put AS (
        INSERT INTO headrace.job_ready
            (id, queue, run_at, priority, lane, unique_key, traceparent, payload, version)
        SELECT b.id, b.queue, now(), b.priority, b.lane, b.unique_key, b.traceparent, b.payload,
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
    ended bigint, oldest_at timestamptz, slots bigint, is_known boolean
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
    SELECT q.id, due.n, laned.n, later.n, coalesce(leases.n, 0), ended.failed, ended.n,
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
        SELECT count(*) AS n, count(*) FILTER (WHERE c.state <> 'cancelled') AS failed FROM (
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
    SELECT q.paused, q.tag, coalesce(o.slots_max, q.slots_max), known.n, known.tagged, known.open,
           known.is_reported, known.slots, known.free, l.paused, l.inflight, l.concurrency,
               l.starts_max,
           l.window_s, CASE WHEN l.free_at > now() THEN l.free_at END,
           CASE WHEN j.is_ready THEN before.n ELSE laned.n END
    FROM job j
    JOIN headrace.queue q ON q.id = j.queue
    LEFT JOIN headrace.queue_override o ON o.queue = q.id
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

-- Fleet. -----------------------------------------------------------------------------------------

-- Due jobs of each queue, counted up to p_max through the index, and the age of the oldest. Jobs
-- of lanes count as far as their lane may start them now; the journal counts too, since only a
-- claim folds it.
CREATE FUNCTION headrace.count_waiting_v1(p_max integer)
RETURNS TABLE (queue integer, jobs bigint, oldest_age_s double precision)
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    RETURN QUERY
    SELECT q.id, least(ready.n + laned.n + greatest(journal.n, 0), p_max)::bigint,
           extract(epoch FROM now() - oldest.run_at)::double precision
    FROM headrace.queue q
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (
            SELECT FROM unnest('{0,1,2,3,4,5,6,7,8,9}'::smallint[]) AS p(priority)
            CROSS JOIN LATERAL (
                SELECT FROM headrace.job_ready r
                WHERE r.queue = q.id AND r.priority = p.priority AND r.run_at <= now()
                LIMIT p_max) AS due
            LIMIT p_max) AS counted
    ) AS ready
    CROSS JOIN LATERAL (
        SELECT min(first.run_at) AS run_at
        FROM unnest('{0,1,2,3,4,5,6,7,8,9}'::smallint[]) AS p(priority)
        CROSS JOIN LATERAL (
            SELECT r.run_at FROM headrace.job_ready r
            WHERE r.queue = q.id AND r.priority = p.priority AND r.run_at <= now()
            ORDER BY r.run_at LIMIT 1) AS first
    ) AS oldest
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(least(w.waiting, coalesce(l.starts_max, w.waiting),
                                  coalesce(l.concurrency, w.waiting))), 0) AS n
        FROM (SELECT k.limiter, k.lane, k.waiting FROM headrace.lane_queue k
              WHERE k.queue = q.id AND k.ready_at <= now() AND k.ready_at < 'infinity'
                AND k.waiting > 0 LIMIT 2000) AS w
        JOIN headrace.lane l ON l.limiter = w.limiter AND l.name = w.lane
    ) AS laned
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(e.k), 0) AS n FROM (
            SELECT v.k FROM headrace.lane_event v WHERE v.queue = q.id LIMIT 2000) AS e
    ) AS journal
    WHERE NOT q.paused;
END $$;

-- Write the plan of a leader that still leads. Return its new version; NULL: the leader was
-- replaced, or another writes at this moment. One statement, so that a leader that stops at any
-- point holds no lock.
CREATE FUNCTION headrace.write_plan_v1(
    p_leader text, p_term bigint, p_hosts text[], p_queues integer[], p_slots integer[],
    p_changed_hosts text[], p_changed_queues text[], p_befores integer[], p_afters integer[],
    p_codes text[], p_whys text[]
) RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_version bigint;
    v_deleted integer;
    v_put integer;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('headrace.fleet_plan')) THEN
        RETURN NULL;
    END IF;
    UPDATE headrace.fleet_plan SET planned_at = now()
    WHERE leader = p_leader AND term = p_term RETURNING version INTO v_version;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    DELETE FROM headrace.fleet_slot s WHERE NOT EXISTS (
        SELECT FROM unnest(p_hosts, p_queues) AS r(host, queue)
        WHERE r.host = s.host AND r.queue = s.queue);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    INSERT INTO headrace.fleet_slot AS s (host, queue, slots)
    SELECT r.host, r.queue, r.slots FROM unnest(p_hosts, p_queues, p_slots) AS r(host, queue, slots)
    ON CONFLICT (host, queue) DO UPDATE SET slots = excluded.slots WHERE s.slots <> excluded.slots;
    GET DIAGNOSTICS v_put = ROW_COUNT;
    -- The first plan counts as a change even if it binds nothing: hosts may now rely on it.
    IF v_deleted = 0 AND v_put = 0 AND v_version > 0 THEN
        RETURN v_version;
    END IF;
    v_version := v_version + 1;
    UPDATE headrace.fleet_plan SET version = v_version;
    INSERT INTO headrace.fleet_decision (version, host, queue, before, after, code, why)
    SELECT v_version, r.host, r.queue, r.before, r.after, r.code, r.why
    FROM unnest(p_changed_hosts, p_changed_queues, p_befores, p_afters, p_codes, p_whys)
        AS r(host, queue, before, after, code, why);
    PERFORM pg_notify('headrace_fleet', v_version::text);
    RETURN v_version;
END $$;

-- Slots of each queue that hosts other than p_host may work: those they hold, or those the plan
-- binds to them if that is more. The plan counts up to the queue's maximum p_slots_maxs, so that
-- the sum of all never exceeds it.
CREATE FUNCTION headrace.slots_elsewhere_v1(p_host bigint, p_queues integer[],
    p_slots_maxs integer[])
RETURNS TABLE (queue integer, slots bigint) LANGUAGE sql VOLATILE AS $$
    WITH live AS (
        SELECT DISTINCT ON (h.name) h.id, h.name FROM headrace.host h
        WHERE h.kind <> 'taker' AND h.expires_at > now() AND NOT h.is_draining
        ORDER BY h.name, h.id DESC
    ), planned AS (
        SELECT f.queue, l.id AS host, f.slots, w.slots_max,
               sum(f.slots) OVER (PARTITION BY f.queue ORDER BY f.host) - f.slots AS before
        FROM unnest(p_queues, p_slots_maxs) AS w(queue, slots_max)
        JOIN headrace.fleet_slot f ON f.queue = w.queue
        JOIN live l ON l.name = f.host
    ), parts AS (
        SELECT a.queue, a.host, a.slots::bigint AS held, 0::bigint AS bound
        FROM headrace.slot_allowance a
        JOIN headrace.host h ON h.id = a.host AND h.expires_at > now() - interval '5 s'
        WHERE a.queue = ANY(p_queues) AND a.slots > 0
        UNION ALL
        SELECT p.queue, p.host, 0, greatest(0, least(p.slots, p.slots_max - p.before))
            FROM planned p
    ), hosts AS (
        SELECT p.queue, greatest(sum(p.held), sum(p.bound)) AS slots
        FROM parts p WHERE p.host <> p_host GROUP BY p.queue, p.host
    )
    SELECT h.queue, sum(h.slots)::bigint FROM hosts h GROUP BY h.queue
$$;

-- Change a host's slot allowances and return them, one row per queue; NULL: the queue has no
-- maximum. The host works p_used slots of a queue now, keeps to p_kept from the moment it sent
-- this call, and would work p_wanted. p_call grows with each call of the host: a call that arrives
-- after a later one has no effect.
CREATE FUNCTION headrace.allow_slots_v1(
    p_host bigint, p_call bigint, p_queues integer[], p_used integer[], p_kept integer[],
    p_wanted integer[]
) RETURNS TABLE (queue integer, slots integer) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r record;
    v_is_alive boolean;
    v_held integer;
    v_next integer;
    v_slots_max integer;
    v_limit bigint;
    v_call bigint;
BEGIN
    v_is_alive := EXISTS (SELECT FROM headrace.host h WHERE h.id = p_host AND h.expires_at > now());
    FOR r IN
        WITH requested AS (
            SELECT u.queue, u.used, u.kept, u.wanted, coalesce(o.slots_max, q.slots_max)
                AS slots_max
            FROM unnest(p_queues, p_used, p_kept, p_wanted) AS u(queue, used, kept, wanted)
            JOIN headrace.queue q ON q.id = u.queue
            LEFT JOIN headrace.queue_override o ON o.queue = u.queue
        ), busy AS (
            SELECT array_agg(a.queue) AS queues, array_agg(a.slots_max) AS slots_maxs
            FROM requested a WHERE a.slots_max < 100000 AND (a.kept > 0 OR a.wanted > 0)
        )
        SELECT a.*, coalesce(s.slots, 0) AS held, coalesce(s.is_short, false) AS was_short,
               greatest(0, a.slots_max - coalesce(e.slots, 0)) AS free
        FROM requested a
        LEFT JOIN headrace.slot_allowance s ON s.queue = a.queue AND s.host = p_host
        LEFT JOIN (SELECT x.* FROM busy b, headrace.slots_elsewhere_v1(p_host, b.queues,
            b.slots_maxs) x) e
            ON e.queue = a.queue
        ORDER BY a.queue
    LOOP
        queue := r.queue;
        slots := NULL;
        IF r.slots_max >= 100000 THEN
            RETURN NEXT;
            CONTINUE;
        END IF;
        v_held := r.held;
        v_limit := r.free;
        v_next := greatest(least(v_held, r.kept), r.used);
        IF v_is_alive THEN
            v_next := greatest(v_next, least(r.wanted, v_limit));
        END IF;
        IF v_next <> v_held OR (v_next < r.wanted) <> r.was_short THEN
            -- Lock only now, since few calls change anything. Read again: the values may be stale.
            PERFORM pg_advisory_xact_lock(hashtext('headrace.slot_allowance'), r.queue);
            v_held := 0;
            SELECT a.slots, a.call INTO v_held, v_call
            FROM headrace.slot_allowance a WHERE a.queue = r.queue AND a.host = p_host;
            v_held := coalesce(v_held, 0);
            IF v_call > p_call THEN
                RETURN;
            END IF;
            SELECT coalesce(o.slots_max, q.slots_max) INTO v_slots_max
            FROM headrace.queue q LEFT JOIN headrace.queue_override o ON o.queue = q.id
            WHERE q.id = r.queue;
            SELECT greatest(0, v_slots_max - coalesce(sum(e.slots), 0)) INTO v_limit
            FROM headrace.slots_elsewhere_v1(p_host, ARRAY[r.queue], ARRAY[v_slots_max]) e;
            v_next := greatest(least(v_held, r.kept), r.used);
            IF v_is_alive THEN
                v_next := greatest(v_next, least(r.wanted, v_limit));
            END IF;
            INSERT INTO headrace.slot_allowance AS a (queue, host, slots, is_short, call)
            SELECT r.queue, h.id, v_next, v_next < r.wanted, p_call
            FROM headrace.host h WHERE h.id = p_host
            ON CONFLICT (queue, host) DO UPDATE SET
                slots = excluded.slots, is_short = excluded.is_short, call = excluded.call;
            -- A refused host retries at once; a host with spare slots gives them up.
            IF (v_next < r.wanted AND NOT r.was_short) OR (v_next < v_held AND EXISTS (
                SELECT FROM headrace.slot_allowance a
                WHERE a.queue = r.queue AND a.host <> p_host AND a.is_short)) THEN
                PERFORM pg_notify('headrace_fleet', '');
            END IF;
        END IF;
        slots := least(v_next, v_limit);
        RETURN NEXT;
    END LOOP;
END $$;
