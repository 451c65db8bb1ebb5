-- Counts of jobs commit with the claim or the settlement that they count, so none is lost with the process that worked
-- them, and none is counted twice. Such a transaction inserts a row that nobody else touches; folding adds these rows up.

-- What happened to jobs of a queue and is not yet added up in queue_minute and queue_total. NULL: nothing of that kind.
CREATE TABLE headrace.job_count (
    at timestamptz NOT NULL DEFAULT now(),
    queue integer NOT NULL,
    done integer,
    failed integer,                     -- failed, cancelled, quarantined
    retried integer,                    -- waits for a later moment, or in another queue
    lost integer,                       -- waits again, since its process died
    claimed integer,
    calls integer,
    run_s double precision,
    wait_s double precision,
    wait_max_s double precision,
    slot_s double precision
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_count_at ON headrace.job_count (at);

-- Locked by whoever folds. From whole_at on, the next one reads the whole of job_count.
CREATE TABLE headrace.job_count_fold (
    is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one),
    whole_at timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);
INSERT INTO headrace.job_count_fold DEFAULT VALUES;

-- Jobs of the lease, so that an ack need not read its arrays. NULL: a lease from before this column.
ALTER TABLE headrace.job_lease ADD jobs integer;

-- Add up to p_max rows of job_count, the oldest first, to minutes and totals; return how many. One caller at a time, the
-- others do nothing. Most calls read rows of the last 20 s alone: beside a long transaction, which keeps vacuum from the
-- index, each would walk over every row that was ever folded. Rows of transactions that lasted longer wait a minute.
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
    WITH gone AS (
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
        FROM gone g GROUP BY 1, 2
    ), minutes AS (
        INSERT INTO headrace.queue_minute AS m
            (queue, minute, done, failed, retried, lost, calls, claimed, run_s, wait_s, wait_max_s, slot_s)
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

-- Add what only a host knows of its queues, and how many jobs ended there; fold what is there.
CREATE FUNCTION headrace.add_counts_v3(
    p_host bigint, p_ended bigint, p_queues integer[], p_calls integer[], p_run_s double precision[],
    p_slot_s double precision[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.job_count (queue, calls, run_s, slot_s)
    SELECT r.queue, r.calls, r.run_s, r.slot_s
    FROM unnest(p_queues, p_calls, p_run_s, p_slot_s) AS r(queue, calls, run_s, slot_s);
    UPDATE headrace.host SET jobs_ended = jobs_ended + p_ended WHERE id = p_host AND p_ended > 0;
    PERFORM headrace.fold_counts_v1(10000);
END $$;

-- For agents from before add_counts_v3: the jobs that they counted are counted by claims and settlements now.
CREATE OR REPLACE FUNCTION headrace.add_counts_v2(
    p_host bigint, p_queues integer[], p_done bigint[], p_failed bigint[], p_retried bigint[],
    p_lost bigint[], p_calls bigint[], p_claimed bigint[], p_run_s double precision[], p_wait_s double precision[],
    p_wait_max_s double precision[], p_slot_s double precision[]
) RETURNS void LANGUAGE sql AS $$
    SELECT headrace.add_counts_v3(
        p_host, (SELECT sum(c.done + c.failed)::bigint FROM unnest(p_done, p_failed) AS c(done, failed)),
        p_queues, p_calls::integer[], p_run_s, p_slot_s);
$$;

-- As in 0008, and counts the jobs.
CREATE OR REPLACE FUNCTION headrace.settle_jobs_v1(
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
    INSERT INTO headrace.job_count (queue, done, failed, retried, lost)
    SELECT s.queue, count(*) FILTER (WHERE s.word = 'done'),
           count(*) FILTER (WHERE s.word IN ('fail', 'cancel', 'quarantined')),
           count(*) FILTER (WHERE s.word IN ('retry', 'snooze', 'moved')),
           count(*) FILTER (WHERE s.word = 'lost')
    FROM unnest(v_jobs) s WHERE s.word NOT IN ('returned', 'unstarted') GROUP BY s.queue;
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

-- As in 0008, and counts the jobs.
CREATE OR REPLACE FUNCTION headrace.settle_v2(
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
            RETURNING d.id, d.queue, d.limiter, d.lanes,
                coalesce(d.jobs, cardinality(d.ids)) - cardinality(d.settled) AS jobs
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

-- As in 0007, and counts the jobs.
CREATE OR REPLACE FUNCTION headrace.claim_ready_v2(
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
            NULL::bigint[], NULL::timestamptz[], NULL::smallint[], NULL::smallint[], NULL::smallint[],
            NULL::text[], NULL::text[], NULL::smallint[], NULL::bytea[];
        RETURN;
    END IF;
    -- All in one statement: passing the jobs on as an array to a function of their own cost a fifth more CPU.
    RETURN QUERY
    WITH gone AS (
        DELETE FROM headrace.job_ready j WHERE j.ctid = ANY(ARRAY(
            SELECT k.ctid FROM (
                SELECT c.ctid, count(*) FILTER (WHERE c.losses > 0) OVER w
                    + (count(*) FILTER (WHERE c.losses = 0) OVER w + p_batch - 1) / p_batch AS leases
                FROM unnest(p_priorities) AS p(priority), LATERAL (
                    SELECT r.ctid, r.losses FROM headrace.job_ready r
                    WHERE r.queue = p_queue AND r.priority = p.priority AND r.run_at <= now()
                      AND (r.run_at, r.id) > (p_marks_at[p.priority + 1], p_marks_id[p.priority + 1])
                    ORDER BY r.run_at, r.id LIMIT p_leases_max * p_batch FOR UPDATE SKIP LOCKED
                ) c WINDOW w AS (ROWS UNBOUNDED PRECEDING) LIMIT p_leases_max * p_batch
            ) k WHERE k.leases <= p_leases_max
        )) RETURNING j.*
    ), shifted AS (
        INSERT INTO headrace.lane_job
            (id, queue, run_at, group_id, priority, attempt, losses, lane, unique_key, traceparent,
             payload, version, last_error)
        SELECT g.id, g.queue, g.run_at, g.group_id, g.priority, g.attempt, g.losses, g.lane,
               g.unique_key, g.traceparent, g.payload, g.version, g.last_error
        FROM gone g WHERE g.lane IS NOT NULL RETURNING lane_job.queue, lane_job.lane
    ), told AS (
        INSERT INTO headrace.lane_event (limiter, lane, queue, k)
        SELECT q.limiter, s.lane, s.queue, count(*)
        FROM shifted s JOIN headrace.queue q ON q.id = s.queue GROUP BY 1, 2, 3
    ), placed AS (
        SELECT g.*, CASE WHEN g.losses > 0 THEN -row_number() OVER w ELSE (
            count(*) FILTER (WHERE g.losses = 0) OVER w - 1) / p_batch END AS part
        FROM gone g WHERE g.lane IS NULL
        WINDOW w AS (ORDER BY g.priority, g.run_at, g.id ROWS UNBOUNDED PRECEDING)
    ), lease AS (
        INSERT INTO headrace.job_lease
            (host, queue, granted_at, is_plain, ids, run_ats, group_ids, priorities, attempts, losses,
             lanes, unique_keys, traceparents, versions, payloads, jobs)
        SELECT p_host, p_queue, now(),
               v_is_plain AND bool_and(j.unique_key IS NULL AND j.group_id IS NULL),
               array_agg(j.id), array_agg(j.run_at), array_agg(j.group_id), array_agg(j.priority),
               array_agg(j.attempt), array_agg(j.losses), array_agg(j.lane), array_agg(j.unique_key),
               array_agg(j.traceparent), array_agg(j.version), array_agg(j.payload), count(*)
        FROM placed j GROUP BY j.part
        RETURNING job_lease.*
    ), counted AS (
        INSERT INTO headrace.job_count (queue, claimed, wait_s, wait_max_s)
        SELECT p_queue, count(*), date_part('epoch', sum(now() - g.run_at)),
               date_part('epoch', now() - min(g.run_at))
        FROM gone g WHERE g.lane IS NULL HAVING count(*) > 0
    )
    SELECT now(), v_retries, m.n, v_lost, v_busy, l.id, l.is_plain, l.ids, l.run_ats, l.priorities,
           l.attempts, l.losses, l.lanes, l.traceparents, l.versions, l.payloads
    FROM (SELECT count(*)::integer AS n FROM shifted) m LEFT JOIN lease l ON true;
END $$;

-- As in 0009, and counts the jobs.
CREATE OR REPLACE FUNCTION headrace.claim_lanes_v2(
    p_host bigint, p_queue integer, p_leases_max integer, p_batch integer, p_lanes_max integer,
    p_quantum integer, p_done bigint[]
) RETURNS TABLE (
    claimed_at timestamptz, retries integer, limiter text, wait_s double precision,
    slack_s double precision, lost bigint[], busy bigint[],
    lease_id bigint, is_plain boolean, ids bigint[], run_ats timestamptz[], priorities smallint[],
    attempts smallint[], losses smallint[], lanes text[], traceparents text[], versions smallint[],
    payloads bytea[]
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_lost bigint[];
    v_busy bigint[];
    v_retries integer;
    v_is_plain boolean;
    v_limiter text;
    v_now timestamptz := clock_timestamp();
    v_names text[];
    v_gives integer[];
    v_turns integer[];
    v_slack double precision := 0;
    v_wait double precision;
BEGIN
    IF p_done <> '{}' THEN
        SELECT a.lost, a.busy INTO v_lost, v_busy FROM headrace.ack_v1(p_done) a;
    END IF;
    SELECT coalesce(o.retries, q.retries), q.keep_done_s IS NULL AND NOT q.keep_result, q.limiter
    INTO v_retries, v_is_plain, v_limiter
    FROM headrace.host h
    JOIN headrace.queue q ON q.id = p_queue AND NOT q.paused
    LEFT JOIN headrace.queue_override o ON o.queue = q.id
    WHERE h.id = p_host AND h.expires_at > now() AND NOT h.is_draining;
    IF FOUND THEN
        PERFORM headrace.fold_lanes_v2(p_queue, 500);
        v_now := clock_timestamp();
        -- The second bound on ready_at lets a generic plan use the partial index (20-42 ms without).
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
        RETURN QUERY SELECT v_now, v_retries, v_limiter, v_wait, 0::double precision, v_lost, v_busy,
            NULL::bigint, NULL::boolean, NULL::bigint[], NULL::timestamptz[], NULL::smallint[],
            NULL::smallint[], NULL::smallint[], NULL::text[], NULL::text[], NULL::smallint[],
            NULL::bytea[];
        RETURN;
    END IF;
    v_now := clock_timestamp();
    SELECT p.names, p.gives, p.turns, p.slack_s INTO v_names, v_gives, v_turns, v_slack
    FROM headrace.plan_lanes_v1(
        v_limiter, p_queue, v_names, p_leases_max * p_batch, p_quantum, v_now) p;
    RETURN QUERY
    WITH gone AS (
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
    ), placed AS (
        SELECT g.*, CASE WHEN g.losses > 0 THEN -row_number() OVER w ELSE (
            count(*) FILTER (WHERE g.losses = 0) OVER w - 1) / p_batch END AS part
        FROM gone g WINDOW w AS (ORDER BY g.priority, g.id ROWS UNBOUNDED PRECEDING)
    ), lease AS (
        INSERT INTO headrace.job_lease
            (host, queue, limiter, granted_at, is_plain, ids, run_ats, group_ids, priorities, attempts,
             losses, lanes, unique_keys, traceparents, versions, payloads, jobs)
        SELECT p_host, p_queue, v_limiter, v_now,
               v_is_plain AND bool_and(j.unique_key IS NULL AND j.group_id IS NULL),
               array_agg(j.id), array_agg(j.run_at), array_agg(j.group_id), array_agg(j.priority),
               array_agg(j.attempt), array_agg(j.losses), array_agg(j.lane), array_agg(j.unique_key),
               array_agg(j.traceparent), array_agg(j.version), array_agg(j.payload), count(*)
        FROM placed j GROUP BY j.part
        RETURNING job_lease.*
    ), counted AS (
        INSERT INTO headrace.job_count (queue, claimed, wait_s, wait_max_s)
        SELECT p_queue, count(*), date_part('epoch', sum(v_now - g.run_at)),
               date_part('epoch', v_now - min(g.run_at))
        FROM gone g HAVING count(*) > 0
    )
    SELECT v_now, v_retries, v_limiter, 0::double precision, v_slack, v_lost, v_busy, l.id, l.is_plain,
           l.ids, l.run_ats, l.priorities, l.attempts, l.losses, l.lanes, l.traceparents, l.versions,
           l.payloads
    FROM headrace.grant_v2(v_limiter, p_queue, v_names, v_turns, ARRAY(SELECT g.lane FROM gone g), v_now)
    LEFT JOIN lease l ON true;
END $$;
