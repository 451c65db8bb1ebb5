-- Written by `make reference` from the migrations of every room, with pg_dump; do not edit.

CREATE SCHEMA headrace;

CREATE TYPE headrace.settlement AS (
	lease bigint,
	ord integer,
	id bigint,
	queue integer,
	limiter text,
	granted_at timestamp with time zone,
	lane text,
	group_id bigint,
	unique_key text,
	word text,
	delay_s double precision,
	error text,
	traceback text,
	result bytea,
	target integer
);

CREATE FUNCTION headrace.ack_v1(p_done bigint[]) RETURNS TABLE(lost bigint[], busy bigint[])
    LANGUAGE sql
    SET jit TO 'off'
    AS $$
    SELECT * FROM headrace.settle_v2(
        p_done, 'done', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 1, '{}');
$$;

CREATE FUNCTION headrace.add_counts_v1(p_host bigint, p_queues integer[], p_done bigint[], p_failed bigint[], p_retried bigint[], p_lost bigint[], p_calls bigint[], p_run_s double precision[], p_wait_s double precision[], p_wait_max_s double precision[], p_slot_s double precision[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    INSERT INTO headrace.queue_minute AS m
        (queue, minute, done, failed, retried, lost, calls, run_s, wait_s, wait_max_s, slot_s)
    SELECT r.queue, date_trunc('minute', now()), sum(r.done), sum(r.failed), sum(r.retried),
           sum(r.lost), sum(r.calls), sum(r.run_s), sum(r.wait_s), max(r.wait_max_s), sum(r.slot_s)
    FROM unnest(p_queues, p_done, p_failed, p_retried, p_lost, p_calls, p_run_s, p_wait_s,
                p_wait_max_s, p_slot_s)
        AS r(queue, done, failed, retried, lost, calls, run_s, wait_s, wait_max_s, slot_s)
    GROUP BY r.queue ORDER BY r.queue
    ON CONFLICT (queue, minute) DO UPDATE SET
        done = m.done + excluded.done, failed = m.failed + excluded.failed,
        retried = m.retried + excluded.retried, lost = m.lost + excluded.lost,
        calls = m.calls + excluded.calls, run_s = m.run_s + excluded.run_s,
        wait_s = m.wait_s + excluded.wait_s, slot_s = m.slot_s + excluded.slot_s,
        wait_max_s = greatest(m.wait_max_s, excluded.wait_max_s);
    INSERT INTO headrace.queue_total AS t
        (queue, done, failed, retried, lost, calls, run_s, wait_s, slot_s)
    SELECT r.queue, sum(r.done), sum(r.failed), sum(r.retried), sum(r.lost), sum(r.calls),
           sum(r.run_s), sum(r.wait_s), sum(r.slot_s)
    FROM unnest(p_queues, p_done, p_failed, p_retried, p_lost, p_calls, p_run_s, p_wait_s, p_slot_s)
        AS r(queue, done, failed, retried, lost, calls, run_s, wait_s, slot_s)
    GROUP BY r.queue ORDER BY r.queue
    ON CONFLICT (queue) DO UPDATE SET
        done = t.done + excluded.done, failed = t.failed + excluded.failed,
        retried = t.retried + excluded.retried, lost = t.lost + excluded.lost,
        calls = t.calls + excluded.calls, run_s = t.run_s + excluded.run_s,
        wait_s = t.wait_s + excluded.wait_s, slot_s = t.slot_s + excluded.slot_s;
    UPDATE headrace.host SET jobs_ended = jobs_ended + r.ended
    FROM (SELECT sum(done + failed) AS ended FROM unnest(p_done, p_failed) AS c(done, failed)) r
    WHERE id = p_host AND r.ended > 0;
END $$;

CREATE FUNCTION headrace.add_counts_v2(p_host bigint, p_queues integer[], p_done bigint[], p_failed bigint[], p_retried bigint[], p_lost bigint[], p_calls bigint[], p_claimed bigint[], p_run_s double precision[], p_wait_s double precision[], p_wait_max_s double precision[], p_slot_s double precision[]) RETURNS void
    LANGUAGE sql
    SET jit TO 'off'
    AS $$
    SELECT headrace.add_counts_v3(
        p_host, (SELECT sum(c.done + c.failed)::bigint FROM unnest(p_done, p_failed) AS c(done, failed)),
        p_queues, p_calls::integer[], p_run_s, p_slot_s);
$$;

CREATE FUNCTION headrace.add_counts_v3(p_host bigint, p_ended bigint, p_queues integer[], p_calls integer[], p_run_s double precision[], p_slot_s double precision[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    INSERT INTO headrace.job_count (queue, calls, run_s, slot_s)
    SELECT r.queue, r.calls, r.run_s, r.slot_s
    FROM unnest(p_queues, p_calls, p_run_s, p_slot_s) AS r(queue, calls, run_s, slot_s);
    UPDATE headrace.host SET jobs_ended = jobs_ended + p_ended WHERE id = p_host AND p_ended > 0;
    PERFORM headrace.fold_counts_v1(10000);
END $$;

CREATE FUNCTION headrace.add_groups_v2(p_pending integer[], p_queues integer[], p_priorities smallint[], p_run_ats timestamp with time zone[], p_delays_s double precision[], p_lanes text[], p_keys text[], p_payloads bytea[], p_versions smallint[], p_traceparent text) RETURNS bigint[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
        PERFORM headrace.finish_members_v2(v_empty, '{}');
    END IF;
    RETURN v_ids;
END $$;

CREATE FUNCTION headrace.add_members_v1(p_groups bigint[], p_queues integer[], p_priorities smallint[], p_run_ats timestamp with time zone[], p_delays_s double precision[], p_lanes text[], p_keys text[], p_payloads bytea[], p_versions smallint[], p_traceparent text, p_notify boolean) RETURNS bigint[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
        v_ids := headrace.enqueue_v2(p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
            p_groups, p_payloads, p_versions, p_traceparent, p_notify);
        v_added := p_groups;
    ELSE
        v_mark := nextval('headrace.job_group_id');
        v_ids := headrace.enqueue_v2(p_queues, p_priorities, p_run_ats, p_delays_s, p_lanes, p_keys,
            array_fill(v_mark, ARRAY[cardinality(p_queues)]), p_payloads, p_versions, p_traceparent,
            p_notify);
        WITH members AS (
            SELECT DISTINCT ON (m.id) m.id, m.group_id
            FROM unnest(v_ids, p_groups) WITH ORDINALITY AS m(id, group_id, ord) ORDER BY m.id, m.ord
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
        FROM (SELECT unnest(v_added) AS id, count(*)::integer AS n GROUP BY 1) AS a WHERE g.id = a.id;
    END IF;
    RETURN v_ids;
END $$;

CREATE FUNCTION headrace.allow_slots_v1(p_host bigint, p_call bigint, p_queues integer[], p_used integer[], p_kept integer[], p_wanted integer[]) RETURNS TABLE(queue integer, slots integer)
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    r record;
    v_is_alive boolean;
    v_held integer;
    v_next integer;
    v_most integer;
    v_limit bigint;
    v_call bigint;
BEGIN
    v_is_alive := EXISTS (SELECT FROM headrace.host h WHERE h.id = p_host AND h.expires_at > now());
    FOR r IN
        WITH asked AS (
            SELECT u.queue, u.used, u.kept, u.wanted, coalesce(o.slots_max, q.slots_max) AS most
            FROM unnest(p_queues, p_used, p_kept, p_wanted) AS u(queue, used, kept, wanted)
            JOIN headrace.queue q ON q.id = u.queue
            LEFT JOIN headrace.queue_override o ON o.queue = u.queue
        ), busy AS (
            SELECT array_agg(a.queue) AS queues, array_agg(a.most) AS mosts
            FROM asked a WHERE a.most < 100000 AND (a.kept > 0 OR a.wanted > 0)
        )
        SELECT a.*, coalesce(s.slots, 0) AS held, coalesce(s.is_short, false) AS was_short,
               greatest(0, a.most - coalesce(e.slots, 0)) AS free
        FROM asked a
        LEFT JOIN headrace.slot_allowance s ON s.queue = a.queue AND s.host = p_host
        LEFT JOIN (SELECT x.* FROM busy b, headrace.slots_elsewhere_v1(p_host, b.queues, b.mosts) x) e
            ON e.queue = a.queue
        ORDER BY a.queue
    LOOP
        queue := r.queue;
        slots := NULL;
        IF r.most >= 100000 THEN
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
            -- Only now the lock: most calls change nothing. What was read before it may be out of date.
            PERFORM pg_advisory_xact_lock(hashtext('headrace.slot_allowance'), r.queue);
            v_held := 0;
            SELECT a.slots, a.call INTO v_held, v_call
            FROM headrace.slot_allowance a WHERE a.queue = r.queue AND a.host = p_host;
            v_held := coalesce(v_held, 0);
            IF v_call > p_call THEN
                RETURN;
            END IF;
            SELECT coalesce(o.slots_max, q.slots_max) INTO v_most
            FROM headrace.queue q LEFT JOIN headrace.queue_override o ON o.queue = q.id
            WHERE q.id = r.queue;
            SELECT greatest(0, v_most - coalesce(sum(e.slots), 0)) INTO v_limit
            FROM headrace.slots_elsewhere_v1(p_host, ARRAY[r.queue], ARRAY[v_most]) e;
            v_next := greatest(least(v_held, r.kept), r.used);
            IF v_is_alive THEN
                v_next := greatest(v_next, least(r.wanted, v_limit));
            END IF;
            INSERT INTO headrace.slot_allowance AS a (queue, host, slots, is_short, call)
            SELECT r.queue, h.id, v_next, v_next < r.wanted, p_call
            FROM headrace.host h WHERE h.id = p_host
            ON CONFLICT (queue, host) DO UPDATE SET
                slots = excluded.slots, is_short = excluded.is_short, call = excluded.call;
            -- Who was refused asks again at once, and who holds more than it can use gives that up.
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

CREATE FUNCTION headrace.bar_v1(p_viewer bigint, p_authors bigint[], p_kind text, p_is_set boolean) RETURNS TABLE(changed integer, entity bigint, version bigint, items text[], scores bigint[])
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_changed integer;
    v_row record;
BEGIN
    PERFORM headrace.lock_feed_viewers_v1(
        CASE WHEN p_kind = 'block' THEN array_append(p_authors, p_viewer) ELSE ARRAY[p_viewer] END);
    IF p_is_set THEN
        INSERT INTO headrace.feed_bar (viewer, author, kind)
        SELECT DISTINCT p_viewer, u.author, p_kind FROM unnest(p_authors) u (author) ORDER BY 2
        ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM headrace.feed_bar b WHERE b.viewer = p_viewer AND b.author = ANY (p_authors) AND b.kind = p_kind;
    END IF;
    GET DIAGNOSTICS v_changed = ROW_COUNT;
    RETURN QUERY SELECT v_changed, p_viewer, NULL::bigint, NULL::text[], NULL::bigint[];
    FOR v_row IN
        WITH moved AS (
            UPDATE headrace.feed_follow f SET is_shown = NOT f.is_shown
            WHERE ((f.viewer = p_viewer AND f.author = ANY (p_authors))
                    OR (p_kind = 'block' AND f.author = p_viewer AND f.viewer = ANY (p_authors)))
                AND f.is_shown <> headrace.is_feed_shown_v1(f.viewer, f.author)
            RETURNING f.viewer, f.author, f.is_shown
        ) SELECT m.viewer, array_agg(m.author::text) AS items,
            array_agg(CASE WHEN m.is_shown THEN 0 ELSE -1 END::bigint) AS scores
        FROM moved m GROUP BY 1 ORDER BY 1
    LOOP
        RETURN QUERY SELECT v_changed, v_row.viewer,
            headrace.log_feed_v1(0::smallint, v_row.viewer, v_row.items, v_row.scores), v_row.items, v_row.scores;
    END LOOP;
END $$;

CREATE FUNCTION headrace.bar_v2(p_viewer bigint, p_authors bigint[], p_kind text, p_is_set boolean, p_bars_max integer) RETURNS TABLE(changed integer, entity bigint, version bigint, items text[], scores bigint[])
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_changed integer;
    v_old integer;
    v_new integer;
    v_row record;
BEGIN
    PERFORM headrace.lock_feed_viewers_v1(
        CASE WHEN p_kind = 'block' THEN array_append(p_authors, p_viewer) ELSE ARRAY[p_viewer] END);
    IF p_is_set THEN
        SELECT count(*) INTO v_old FROM headrace.feed_bar b WHERE b.viewer = p_viewer AND b.kind = p_kind;
        SELECT count(DISTINCT u.author) INTO v_new FROM unnest(p_authors) u (author)
        WHERE NOT EXISTS (
            SELECT FROM headrace.feed_bar b WHERE b.viewer = p_viewer AND b.author = u.author AND b.kind = p_kind);
        IF v_new > 0 AND v_old + v_new > p_bars_max THEN
            RETURN QUERY SELECT -1, p_viewer, NULL::bigint, NULL::text[], NULL::bigint[];
            RETURN;
        END IF;
        INSERT INTO headrace.feed_bar (viewer, author, kind)
        SELECT DISTINCT p_viewer, u.author, p_kind FROM unnest(p_authors) u (author) ORDER BY 2
        ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM headrace.feed_bar b WHERE b.viewer = p_viewer AND b.author = ANY (p_authors) AND b.kind = p_kind;
    END IF;
    GET DIAGNOSTICS v_changed = ROW_COUNT;
    RETURN QUERY SELECT v_changed, p_viewer, NULL::bigint, NULL::text[], NULL::bigint[];
    FOR v_row IN
        WITH moved AS (
            UPDATE headrace.feed_follow f SET is_shown = NOT f.is_shown
            WHERE ((f.viewer = p_viewer AND f.author = ANY (p_authors))
                    OR (p_kind = 'block' AND f.author = p_viewer AND f.viewer = ANY (p_authors)))
                AND f.is_shown <> headrace.is_feed_shown_v1(f.viewer, f.author)
            RETURNING f.viewer, f.author, f.is_shown
        ) SELECT m.viewer, array_agg(m.author::text) AS items,
            array_agg(CASE WHEN m.is_shown THEN 0 ELSE -1 END::bigint) AS scores
        FROM moved m GROUP BY 1 ORDER BY 1
    LOOP
        RETURN QUERY SELECT v_changed, v_row.viewer,
            headrace.log_feed_v1(0::smallint, v_row.viewer, v_row.items, v_row.scores), v_row.items, v_row.scores;
    END LOOP;
END $$;

CREATE FUNCTION headrace.claim_lanes_v2(p_host bigint, p_queue integer, p_leases_max integer, p_batch integer, p_lanes_max integer, p_quantum integer, p_done bigint[]) RETURNS TABLE(claimed_at timestamp with time zone, retries integer, limiter text, wait_s double precision, slack_s double precision, lost bigint[], busy bigint[], lease_id bigint, is_plain boolean, ids bigint[], run_ats timestamp with time zone[], priorities smallint[], attempts smallint[], losses smallint[], lanes text[], traceparents text[], versions smallint[], payloads bytea[])
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.claim_ready_v2(p_host bigint, p_queue integer, p_leases_max integer, p_batch integer, p_priorities smallint[], p_marks_at timestamp with time zone[], p_marks_id bigint[], p_done bigint[]) RETURNS TABLE(claimed_at timestamp with time zone, retries integer, moved integer, lost bigint[], busy bigint[], lease_id bigint, is_plain boolean, ids bigint[], run_ats timestamp with time zone[], priorities smallint[], attempts smallint[], losses smallint[], lanes text[], traceparents text[], versions smallint[], payloads bytea[])
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.count_waiting_v1(p_max integer) RETURNS TABLE(queue integer, jobs bigint, oldest_age_s double precision)
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    RETURN QUERY
    SELECT q.id, least(ready.n + laned.n + greatest(told.n, 0), p_max)::bigint,
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
    ) AS told
    WHERE NOT q.paused;
END $$;

CREATE FUNCTION headrace.delete_jobs_v1(p_ids bigint[], p_states text[]) RETURNS bigint[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_ids bigint[];
BEGIN
    WITH failed AS (
        DELETE FROM headrace.job_failed f WHERE f.ctid = ANY(ARRAY(
            SELECT o.ctid FROM headrace.job_failed o WHERE o.id = ANY(p_ids) AND o.state = ANY(p_states)
            ORDER BY o.id FOR UPDATE))
        RETURNING f.id
    ), done AS (
        DELETE FROM headrace.job_done d WHERE d.id = ANY(p_ids) AND 'done' = ANY(p_states) RETURNING d.id
    )
    SELECT coalesce(array_agg(g.id), '{}') INTO v_ids
    FROM (SELECT * FROM failed UNION ALL SELECT * FROM done) g;
    IF p_states && ARRAY['scheduled', 'ready'] THEN
        v_ids := v_ids || headrace.end_waiting_v1(
            ARRAY(SELECT p.id FROM unnest(p_ids) AS p(id) EXCEPT SELECT unnest(v_ids)), false);
    END IF;
    RETURN v_ids;
END $$;

CREATE FUNCTION headrace.delete_posts_v1(p_ids text[]) RETURNS TABLE(id text, author bigint, state smallint, ref text, version bigint)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_gone headrace.feed_post[];
    v_row record;
BEGIN
    PERFORM FROM headrace.feed_post p WHERE p.id = ANY (p_ids) ORDER BY p.id FOR UPDATE;
    WITH gone AS (DELETE FROM headrace.feed_post p WHERE p.id = ANY (p_ids) RETURNING p.*)
    SELECT array_agg(ROW (g.*)::headrace.feed_post) INTO v_gone FROM gone g;
    FOR v_row IN
        SELECT g.author, array_agg(g.id) AS items FROM unnest(v_gone) g WHERE g.state = 0 GROUP BY 1 ORDER BY 1
    LOOP
        PERFORM headrace.log_feed_v1(1::smallint, v_row.author, v_row.items,
            array_fill(-1::bigint, ARRAY[cardinality(v_row.items)]));
    END LOOP;
    RETURN QUERY SELECT g.id, g.author, g.state, g.ref, v.version FROM unnest(v_gone) g
        LEFT JOIN headrace.feed_version v ON v.kind = 1 AND v.entity = g.author AND g.state = 0;
END $$;

CREATE FUNCTION headrace.delete_views_v1(p_id text, p_shard integer, p_kept_s double precision, OUT total bigint, OUT until_at timestamp with time zone) RETURNS record
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
BEGIN
    PERFORM FROM headrace.views_shard s WHERE s.shard = p_shard FOR UPDATE;
    INSERT INTO headrace.views_tombstone AS t (id, until_at)
    VALUES (p_id, now() + p_kept_s * interval '1 second')
    ON CONFLICT (id) DO UPDATE SET until_at = excluded.until_at
    RETURNING t.until_at INTO until_at;
    WITH gone AS (DELETE FROM headrace.views_total t WHERE t.id = p_id RETURNING t.class, t.total)
    SELECT coalesce(sum(g.total) FILTER (WHERE g.class = 0), 0) INTO total FROM gone g;
    DELETE FROM headrace.views_hour h WHERE h.id = p_id;
    DELETE FROM headrace.views_unique u WHERE u.id = p_id;
END $$;

CREATE FUNCTION headrace.end_waiting_v1(p_ids bigint[], p_is_kept boolean) RETURNS bigint[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_ids bigint[] := '{}';
    v_queues integer[] := '{}';
    v_keys text[] := '{}';
    v_groups bigint[] := '{}';
    v record;
BEGIN
    -- Twice, since a job may move from job_ready to its lane between the two looks.
    FOR i IN 1..2 LOOP
        WITH ready AS (
            DELETE FROM headrace.job_ready d WHERE d.ctid = ANY(ARRAY(
                SELECT r.ctid FROM headrace.job_ready r WHERE r.id = ANY(p_ids) ORDER BY r.id FOR UPDATE))
            RETURNING *
        ), laned AS (
            DELETE FROM headrace.lane_job d WHERE d.ctid = ANY(ARRAY(
                SELECT r.ctid FROM headrace.lane_job r WHERE r.id = ANY(p_ids) ORDER BY r.id FOR UPDATE))
            RETURNING *
        ), told AS (
            INSERT INTO headrace.lane_event (limiter, lane, queue, k)
            SELECT q.limiter, l.lane, l.queue, -count(*)
            FROM laned l JOIN headrace.queue q ON q.id = l.queue GROUP BY 1, 2, 3
        ), gone AS (
            SELECT * FROM ready UNION ALL SELECT * FROM laned
        ), kept AS (
            INSERT INTO headrace.job_failed
                (id, queue, state, run_at, group_id, priority, attempt, losses, lane, unique_key,
                 traceparent, error, traceback, payload, version)
            SELECT g.id, g.queue, 'cancelled', g.run_at, g.group_id, g.priority, g.attempt, g.losses,
                   g.lane, g.unique_key, g.traceparent, 'cancelled', '', g.payload, g.version
            FROM gone g WHERE p_is_kept
        )
        SELECT array_agg(g.id) AS ids,
               array_agg(g.queue) FILTER (WHERE g.unique_key IS NOT NULL) AS queues,
               array_agg(g.unique_key) FILTER (WHERE g.unique_key IS NOT NULL) AS keys,
               array_agg(g.group_id) FILTER (WHERE g.group_id IS NOT NULL) AS groups
        INTO v FROM gone g;
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
        PERFORM headrace.finish_members_v2(
            v_groups, array_fill('cancelled'::text, ARRAY[cardinality(v_groups)]));
    END IF;
    RETURN v_ids;
END $$;

CREATE FUNCTION headrace.enqueue_v2(p_queues integer[], p_priorities smallint[], p_run_ats timestamp with time zone[], p_delays_s double precision[], p_lanes text[], p_keys text[], p_groups bigint[], p_payloads bytea[], p_versions smallint[], p_traceparent text, p_notify boolean) RETURNS bigint[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
                AS r(own, id, queue, priority, run_at, delay_s, lane, key, group_id, payload, version)
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

CREATE FUNCTION headrace.ensure_feed_shards_v1(p_shards integer) RETURNS integer
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $$
DECLARE
    v_shards integer;
BEGIN
    SELECT i.shards INTO v_shards FROM headrace.feed_index i;
    IF NOT FOUND THEN
        INSERT INTO headrace.feed_index (shards) VALUES (p_shards) ON CONFLICT DO NOTHING;
        SELECT i.shards INTO v_shards FROM headrace.feed_index i;
    END IF;
    RETURN v_shards;
END $$;

CREATE FUNCTION headrace.ensure_view_shards_v1(p_shards integer) RETURNS integer
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $$
DECLARE
    v_shards integer;
BEGIN
    SELECT count(*) INTO v_shards FROM headrace.views_shard;
    IF v_shards = 0 THEN
        LOCK TABLE headrace.views_shard IN SHARE ROW EXCLUSIVE MODE;
        IF NOT EXISTS (SELECT FROM headrace.views_shard) THEN
            INSERT INTO headrace.views_shard (shard) SELECT generate_series(0, p_shards - 1);
            INSERT INTO headrace.views_lease (shard) SELECT generate_series(0, p_shards - 1);
        END IF;
        SELECT count(*) INTO v_shards FROM headrace.views_shard;
    END IF;
    RETURN v_shards;
END $$;

CREATE FUNCTION headrace.feed_names_v1(p_names text[]) RETURNS TABLE(id bigint, name text)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO headrace.feed_name (name)
    SELECT u.name FROM unnest(p_names) u (name)
    WHERE NOT EXISTS (SELECT FROM headrace.feed_name n WHERE n.name = u.name)
    GROUP BY 1 ORDER BY 1 ON CONFLICT DO NOTHING;
    RETURN QUERY SELECT n.id, n.name FROM headrace.feed_name n WHERE n.name = ANY (p_names);
END $$;

CREATE FUNCTION headrace.fetch_decide_v1(p_runs bigint[], p_customers text[], p_items text[], p_urls text[], p_outcomes text[], p_etags text[], p_last_modifieds text[], p_touch_links boolean[], p_hashes text[], p_keys text[], p_formats text[], p_sizes_bytes bigint[], p_widths integer[], p_heights integer[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    INSERT INTO headrace.fetch_photo (sha256, key, format, size_bytes, width, height)
    SELECT DISTINCT ON (sha256) * FROM unnest(p_hashes, p_keys, p_formats, p_sizes_bytes, p_widths, p_heights)
        AS g (sha256, key, format, size_bytes, width, height)
    WHERE sha256 IS NOT NULL ORDER BY sha256
    ON CONFLICT (sha256) DO NOTHING;

    INSERT INTO headrace.fetch_link AS l
        (customer, url, outcome, sha256, etag, last_modified, failures, run_id, due_round, recheck_at)
    SELECT DISTINCT ON (customer, url) customer, url, outcome, sha256, etag, last_modified,
        f.failed::integer, run_id,
        CASE WHEN f.failed THEN headrace.fetch_due_round_v1(
            (SELECT r.round FROM headrace.fetch_run r WHERE r.id = g.run_id), 1) ELSE 0 END,
        CASE WHEN f.failed THEN now() + headrace.fetch_recheck_wait_v1()
            WHEN outcome = 'failed:lost' THEN now() END
    FROM unnest(p_customers, p_urls, p_outcomes, p_hashes, p_etags, p_last_modifieds, p_runs, p_touch_links)
        AS g (customer, url, outcome, sha256, etag, last_modified, run_id, touches_link)
    CROSS JOIN LATERAL (SELECT outcome NOT IN ('stored', 'unchanged', 'failed:lost') AS failed) f
    WHERE touches_link ORDER BY customer, url
    ON CONFLICT (customer, url) DO UPDATE SET
        outcome = excluded.outcome,
        sha256 = coalesce(excluded.sha256, l.sha256),
        etag = CASE excluded.outcome WHEN 'stored' THEN excluded.etag
            WHEN 'unchanged' THEN coalesce(excluded.etag, l.etag) ELSE l.etag END,
        last_modified = CASE excluded.outcome WHEN 'stored' THEN excluded.last_modified
            WHEN 'unchanged' THEN coalesce(excluded.last_modified, l.last_modified) ELSE l.last_modified END,
        failures = CASE WHEN excluded.outcome = 'failed:lost' THEN l.failures
            WHEN excluded.failures = 0 THEN 0 ELSE l.failures + 1 END,
        due_round = CASE WHEN excluded.failures = 0 THEN 0 ELSE headrace.fetch_due_round_v1(
            (SELECT r.round FROM headrace.fetch_run r WHERE r.id = excluded.run_id), l.failures + 1) END,
        recheck_at = excluded.recheck_at,
        copied_at = CASE WHEN excluded.sha256 <> coalesce(l.sha256, '') THEN now() ELSE l.copied_at END,
        checked_at = now(),
        run_id = excluded.run_id;

    -- How fast the run gets on is told from the photos of its last minutes.
    WITH decided AS (
        UPDATE headrace.fetch_need n SET outcome = g.outcome
        FROM unnest(p_runs, p_items, p_urls, p_outcomes) AS g (run_id, item, url, outcome)
        WHERE n.run_id = g.run_id AND n.item = g.item AND n.url = g.url AND n.outcome IS NULL
        RETURNING n.run_id, n.outcome
    ), paced AS (
        INSERT INTO headrace.fetch_pace AS p (run_id, minute, photos)
        SELECT run_id, date_trunc('minute', now()), count(*) FROM decided GROUP BY run_id ORDER BY run_id
        ON CONFLICT (run_id, minute) DO UPDATE SET photos = p.photos + excluded.photos
    )
    INSERT INTO headrace.fetch_count AS c (run_id, outcome, photos)
    SELECT run_id, outcome, count(*) FROM decided GROUP BY run_id, outcome ORDER BY run_id, outcome
    ON CONFLICT (run_id, outcome) DO UPDATE SET photos = c.photos + excluded.photos;
END $$;

CREATE FUNCTION headrace.fetch_due_round_v1(p_round bigint, p_failures integer) RETURNS bigint
    LANGUAGE sql IMMUTABLE
    SET jit TO 'off'
    RETURN ((COALESCE(p_round, (0)::bigint) + p_failures) + 1);

CREATE FUNCTION headrace.fetch_is_due_v1(p_due_round bigint, p_recheck_at timestamp with time zone, p_round bigint) RETURNS boolean
    LANGUAGE sql STABLE
    SET jit TO 'off'
    RETURN ((p_due_round <= p_round) OR COALESCE((p_recheck_at <= now()), false));

CREATE FUNCTION headrace.fetch_recheck_wait_v1() RETURNS interval
    LANGUAGE sql IMMUTABLE
    SET jit TO 'off'
    RETURN '23:30:00'::interval;

CREATE FUNCTION headrace.finish_members_v2(p_groups bigint[], p_states text[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
        -- Keys of callbacks in one order, for two who take the same ones at once.
        SELECT * FROM ended e ORDER BY e.queue, e.unique_key
    LOOP
        PERFORM headrace.enqueue_v2(
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

CREATE FUNCTION headrace.flush_views_v1(p_shard integer, p_from text, p_to text, p_ids text[], p_classes smallint[], p_hours timestamp with time zone[], p_views bigint[]) RETURNS text[]
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $$
DECLARE
    v_dead text[] := '{}';
BEGIN
    UPDATE headrace.views_shard s SET through = p_to WHERE s.shard = p_shard AND s.through = p_from;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF EXISTS (SELECT FROM headrace.views_tombstone) THEN
        WITH dead AS (
            UPDATE headrace.views_tombstone t SET dropped = t.dropped + g.views
            FROM (SELECT u.id, sum(u.views) AS views FROM unnest(p_ids, p_views) u (id, views) GROUP BY 1) g
            WHERE t.id = g.id AND t.until_at > now()
            RETURNING t.id
        ) SELECT coalesce(array_agg(d.id), '{}') INTO v_dead FROM dead d;
    END IF;
    INSERT INTO headrace.views_total AS t (id, class, total)
    SELECT u.id, u.class, sum(u.views)
    FROM unnest(p_ids, p_classes, p_views) u (id, class, views)
    WHERE v_dead = '{}' OR u.id <> ALL (v_dead)
    GROUP BY 1, 2 ORDER BY 1, 2
    ON CONFLICT (id, class) DO UPDATE SET total = t.total + excluded.total;
    INSERT INTO headrace.views_hour AS h (id, hour, class, views)
    SELECT u.id, u.hour, u.class, u.views
    FROM unnest(p_ids, p_classes, p_hours, p_views) u (id, class, hour, views)
    WHERE v_dead = '{}' OR u.id <> ALL (v_dead)
    ORDER BY 1, 2, 3
    ON CONFLICT (id, hour, class) DO UPDATE SET views = h.views + excluded.views;
    RETURN v_dead;
END $$;

CREATE FUNCTION headrace.fold_counts_v1(p_max integer) RETURNS integer
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.fold_lanes_v2(p_queue integer, p_max integer) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_rows tid[];
    v_limiters text[];
    v_lanes text[];
    v_got_limiters text[];
    v_got_lanes text[];
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
    SELECT array_agg(w.limiter), array_agg(w.lane) INTO v_got_limiters, v_got_lanes
    FROM (SELECT DISTINCT u.limiter, u.lane FROM unnest(v_limiters, v_lanes) AS u(limiter, lane)) w
    CROSS JOIN LATERAL (SELECT FROM headrace.lane l WHERE l.limiter = w.limiter AND l.name = w.lane
                        FOR NO KEY UPDATE SKIP LOCKED) l;
    v_now := clock_timestamp();
    WITH spent AS (
        DELETE FROM headrace.lane_event e WHERE e.ctid = ANY(ARRAY(
            SELECT u.ctid FROM unnest(v_rows, v_limiters, v_lanes) AS u(ctid, limiter, lane)
            JOIN unnest(v_got_limiters, v_got_lanes) AS g(limiter, lane)
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

CREATE FUNCTION headrace.follow_v1(p_viewer bigint, p_authors bigint[], p_ats timestamp with time zone[], p_follows_max integer, OUT changed integer, OUT entity bigint, OUT version bigint, OUT items text[], OUT scores bigint[]) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_old integer;
    v_new integer;
BEGIN
    entity := p_viewer;
    PERFORM headrace.lock_feed_viewers_v1(ARRAY[p_viewer]);
    SELECT count(*) INTO v_old FROM headrace.feed_follow f WHERE f.viewer = p_viewer;
    SELECT count(DISTINCT u.author) INTO v_new FROM unnest(p_authors) u (author)
    WHERE NOT EXISTS (SELECT FROM headrace.feed_follow f WHERE f.viewer = p_viewer AND f.author = u.author);
    IF v_new > 0 AND v_old + v_new > p_follows_max THEN
        changed := -1;
        RETURN;
    END IF;
    WITH placed AS (
        INSERT INTO headrace.feed_follow (viewer, author, followed_at, is_shown)
        SELECT p_viewer, u.author, coalesce(min(u.at), now()), count(b.author) = 0
        FROM unnest(p_authors, p_ats) u (author, at)
        LEFT JOIN (
            SELECT m.author FROM headrace.feed_bar m WHERE m.viewer = p_viewer
            UNION ALL
            SELECT k.viewer FROM headrace.feed_bar k WHERE k.author = p_viewer AND k.kind = 'block'
        ) b ON b.author = u.author
        GROUP BY u.author ORDER BY u.author
        ON CONFLICT DO NOTHING
        RETURNING author, is_shown
    ) SELECT count(*), array_agg(p.author::text) FILTER (WHERE p.is_shown) INTO changed, items FROM placed p;
    IF items IS NOT NULL THEN
        scores := array_fill(0::bigint, ARRAY[cardinality(items)]);
        version := headrace.log_feed_v1(0::smallint, p_viewer, items, scores);
    END IF;
END $$;

CREATE FUNCTION headrace.grant_v2(p_limiter text, p_queue integer, p_names text[], p_turns integer[], p_lanes text[], p_now timestamp with time zone) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    WITH kept AS (
        SELECT l.ctid, g.name, coalesce(u.k, 0) AS k, g.turn, l.starts_max,
               l.window_s + l.slack_s AS span_s, s.at, s.n, s.live
        FROM unnest(p_names, p_turns) AS g(name, turn)
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
        RETURNING l.name, g.k, g.turn,
            CASE WHEN l.paused OR l.inflight >= l.concurrency THEN 'infinity'
                 ELSE greatest(l.free_at, p_now) END AS next_at
    )
    UPDATE headrace.lane_queue q SET
        waiting = q.waiting - CASE WHEN q.queue = p_queue THEN t.k ELSE 0 END,
        turn = CASE WHEN q.queue = p_queue THEN t.turn ELSE q.turn END,
        ready_at = CASE WHEN q.queue <> p_queue THEN t.next_at
                        WHEN q.waiting - t.k <= 0 THEN 'infinity'
                        WHEN t.turn > 0 AND t.next_at <= p_now THEN q.ready_at
                        ELSE t.next_at END
    FROM (
        SELECT w.ctid, g.* FROM granted g CROSS JOIN LATERAL (
            SELECT w.ctid FROM headrace.lane_queue w WHERE w.limiter = p_limiter AND w.lane = g.name
              AND (w.queue = p_queue OR w.ready_at < g.next_at) OFFSET 0) w
    ) t WHERE q.ctid = t.ctid;
END $$;

CREATE FUNCTION headrace.is_feed_shown_v1(p_viewer bigint, p_author bigint) RETURNS boolean
    LANGUAGE sql STABLE
    SET jit TO 'off'
    AS $$
    SELECT NOT EXISTS (SELECT FROM headrace.feed_bar b WHERE b.viewer = p_viewer AND b.author = p_author)
        AND NOT EXISTS (
            SELECT FROM headrace.feed_bar b
            WHERE b.viewer = p_author AND b.author = p_viewer AND b.kind = 'block');
$$;

CREATE FUNCTION headrace.keep_ended_v1(p_jobs headrace.settlement[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.lease_view_shards_v1(p_name text, p_lease_s double precision) RETURNS TABLE(shard integer, through text, corrections bigint)
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_share integer;
BEGIN
    LOCK TABLE headrace.views_flusher IN SHARE ROW EXCLUSIVE MODE;
    INSERT INTO headrace.views_flusher (name, expires_at) VALUES (p_name, now() + p_lease_s * interval '1 second')
    ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at;
    DELETE FROM headrace.views_flusher WHERE expires_at < now();
    v_share := (SELECT ceil((SELECT count(*) FROM headrace.views_shard)::numeric / count(*)) FROM headrace.views_flusher);
    UPDATE headrace.views_lease l SET flusher = NULL, expires_at = NULL
    WHERE l.flusher = p_name AND l.shard NOT IN (
        SELECT k.shard FROM headrace.views_lease k WHERE k.flusher = p_name ORDER BY k.shard LIMIT v_share);
    UPDATE headrace.views_lease l SET flusher = p_name, expires_at = now() + p_lease_s * interval '1 second'
    WHERE l.shard IN (
        SELECT k.shard FROM headrace.views_lease k
        WHERE k.flusher = p_name OR k.flusher IS NULL OR k.expires_at < now()
        ORDER BY (k.flusher = p_name) IS NOT TRUE, k.shard LIMIT v_share);
    RETURN QUERY SELECT s.shard, s.through, s.corrections
        FROM headrace.views_shard s JOIN headrace.views_lease l USING (shard) WHERE l.flusher = p_name;
END $$;

CREATE FUNCTION headrace.leave_view_shards_v1(p_name text) RETURNS void
    LANGUAGE sql
    SET jit TO 'off'
    AS $$
    UPDATE headrace.views_lease SET flusher = NULL, expires_at = NULL WHERE flusher = p_name;
    DELETE FROM headrace.views_flusher WHERE name = p_name;
$$;

CREATE FUNCTION headrace.limit_lanes_v1(p_limiter text, p_names text[], p_starts_max integer, p_window_s double precision, p_slack_s double precision, p_concurrency integer) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.list_jobs_v1(p_queue integer, p_states text[], p_lane text, p_error text, p_older_than_s double precision, p_ids bigint[], p_before bigint, p_jobs_max integer, p_window integer) RETURNS TABLE(id bigint, state text, queue integer, priority smallint, run_at timestamp with time zone, attempt smallint, losses smallint, lane text, unique_key text, group_id bigint, lease_id bigint, ended_at timestamp with time zone, error text)
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $_$
#variable_conflict use_column
DECLARE
    v_place record;
    v_is_short boolean;
    v_bounds text := CASE
        WHEN p_ids IS NOT NULL THEN 'r.id = ANY($6) AND r.id < $7 ORDER BY r.id DESC'
        WHEN p_queue IS NULL THEN 'r.id < $7 ORDER BY r.id DESC'
        ELSE '(r.queue, r.id) < ($1, $7) AND (r.queue, r.id) > ($1, 0) ORDER BY r.queue DESC, r.id DESC'
        END;
    v_fits text := '($1 IS NULL OR s.queue = $1) AND s.state = ANY($2) AND ($3 IS NULL OR s.lane = $3)'
        ' AND ($4 IS NULL OR s.ended_at IS NOT NULL AND position(lower($4) IN lower(s.error)) > 0)'
        ' AND ($5 IS NULL OR coalesce(s.ended_at, s.run_at) < now() - $5 * interval ''1 s'')';
BEGIN
    FOR v_place IN
        SELECT * FROM (VALUES
            ('job_ready', true, ARRAY['scheduled', 'ready'],
             'CASE WHEN r.run_at > now() THEN ''scheduled'' ELSE ''ready'' END', 'NULL::timestamptz',
             'r.last_error'),
            ('lane_job', false, ARRAY['ready'], '''ready''', 'NULL::timestamptz', 'r.last_error'),
            ('job_failed', true, ARRAY['failed', 'cancelled', 'quarantined'], 'r.state', 'r.ended_at',
             'r.error'),
            ('job_done', false, ARRAY['done'], '''done''', 'r.ended_at', 'NULL')
        ) AS p(name, has_lanes, states, state, ended_at, error)
        WHERE p.states && p_states AND (p.name <> 'lane_job' OR p_lane IS NULL OR p_ids IS NOT NULL)
    LOOP
        v_is_short := NULL;
        IF v_place.name IN ('job_ready', 'lane_job') AND p_queue IS NOT NULL AND p_ids IS NULL THEN
            EXECUTE format('SELECT count(*) <= $2 FROM ('
                           ' SELECT FROM headrace.%I WHERE queue = $1 LIMIT $2 + 1) c', v_place.name)
            INTO v_is_short USING p_queue, p_window;
        END IF;
        RETURN QUERY EXECUTE format(
            'WITH seen AS MATERIALIZED ('
            ' SELECT r.id, %s AS state, r.queue, r.priority, r.run_at, r.attempt, r.losses, r.lane,'
            '  r.unique_key, r.group_id, NULL::bigint AS lease_id, %s AS ended_at, %s::text AS error'
            ' FROM headrace.%I r WHERE %s LIMIT $9'
            '), fit AS MATERIALIZED (SELECT s.* FROM seen s WHERE %s LIMIT $8)'
            ' SELECT * FROM fit UNION ALL'
            ' SELECT min(s.id), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL'
            ' FROM seen s WHERE (SELECT count(*) FROM fit) < $8 HAVING count(*) >= $9',
            v_place.state, v_place.ended_at, v_place.error, v_place.name,
            CASE WHEN v_place.has_lanes AND p_lane IS NOT NULL AND p_ids IS NULL
                 THEN 'r.lane IS NOT NULL AND (r.lane, r.id) < ($3, $7) AND (r.lane, r.id) > ($3, 0)'
                      ' ORDER BY r.lane DESC, r.id DESC'
                 WHEN v_is_short THEN 'r.queue = $1 AND r.id + 0 < $7 ORDER BY r.id + 0 DESC'
                 WHEN NOT v_is_short THEN 'r.id < $7 ORDER BY r.id DESC'
                 ELSE v_bounds END,
            v_fits)
        USING p_queue, p_states, p_lane, p_error, p_older_than_s, p_ids, p_before, p_jobs_max, p_window;
    END LOOP;
    -- A lane has an index of its own, by priority.
    IF 'ready' = ANY(p_states) AND p_lane IS NOT NULL AND p_ids IS NULL AND p_error IS NULL THEN
        RETURN QUERY
        SELECT j.id, 'ready', j.queue, j.priority, j.run_at, j.attempt, j.losses, j.lane, j.unique_key,
               j.group_id, NULL::bigint, NULL::timestamptz, j.last_error
        FROM headrace.queue q CROSS JOIN generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
            SELECT * FROM headrace.lane_job k
            WHERE k.queue = q.id AND k.lane = p_lane AND k.priority = p.priority AND k.id < p_before
              AND (p_older_than_s IS NULL OR k.run_at < now() - p_older_than_s * interval '1 s')
            ORDER BY k.id DESC LIMIT p_jobs_max) j
        WHERE p_queue IS NULL OR q.id = p_queue ORDER BY j.id DESC LIMIT p_jobs_max;
    END IF;
    -- One row a batch, so few; payloads are not read.
    IF 'leased' = ANY(p_states) AND p_error IS NULL THEN
        RETURN QUERY
        SELECT r.id, 'leased', l.queue, r.priority, r.run_at, r.attempt, r.losses, r.lane, r.unique_key,
               r.group_id, l.id, NULL::timestamptz, NULL::text
        FROM headrace.job_lease l
        CROSS JOIN LATERAL unnest(l.ids, l.run_ats, l.group_ids, l.priorities, l.attempts, l.losses,
                                  l.lanes, l.unique_keys)
            AS r(id, run_at, group_id, priority, attempt, losses, lane, unique_key)
        WHERE (p_queue IS NULL OR l.queue = p_queue) AND r.id < p_before AND r.id <> ALL(l.settled)
          AND (p_lane IS NULL OR r.lane = p_lane) AND (p_ids IS NULL OR r.id = ANY(p_ids))
          AND (p_older_than_s IS NULL OR r.run_at < now() - p_older_than_s * interval '1 s')
        ORDER BY r.id DESC LIMIT p_jobs_max;
    END IF;
END $_$;

CREATE FUNCTION headrace.lock_feed_viewers_v1(p_viewers bigint[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    INSERT INTO headrace.feed_version (kind, entity, version)
    SELECT 0, u.viewer, 0 FROM unnest(p_viewers) u (viewer)
    WHERE NOT EXISTS (SELECT FROM headrace.feed_version v WHERE v.kind = 0 AND v.entity = u.viewer)
    GROUP BY u.viewer ORDER BY u.viewer ON CONFLICT DO NOTHING;
    PERFORM FROM headrace.feed_version v WHERE v.kind = 0 AND v.entity = ANY (p_viewers)
    ORDER BY v.entity FOR UPDATE;
END $$;

CREATE FUNCTION headrace.log_feed_v1(p_kind smallint, p_entity bigint, p_items text[], p_scores bigint[]) RETURNS bigint
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $$
DECLARE
    v_version bigint;
BEGIN
    INSERT INTO headrace.feed_version AS v (kind, entity, version) VALUES (p_kind, p_entity, 1)
    ON CONFLICT (kind, entity) DO UPDATE SET version = v.version + 1
    RETURNING v.version INTO v_version;
    INSERT INTO headrace.feed_outbox (kind, entity, version, items, scores)
    VALUES (p_kind, p_entity, v_version, p_items, p_scores);
    RETURN v_version;
END $$;

CREATE FUNCTION headrace.make_lanes_v1(p_limiters text[], p_names text[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
    FROM unnest(v_limiters, v_names) AS u(limiter, name) JOIN headrace.limiter m ON m.name = u.limiter
    ORDER BY 1, 2 ON CONFLICT DO NOTHING;
END $$;

CREATE FUNCTION headrace.note_hosts_v1(p_customers text[], p_hosts text[], p_requests integer[], p_photos integer[], p_seconds double precision[], p_pauses_s double precision[], s_customers text[], s_hosts text[], s_classes_s double precision[], s_photos integer[], o_customers text[], o_hosts text[], o_outcomes text[], o_photos integer[], p_half_life_s double precision, p_recent double precision) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    INSERT INTO headrace.fetch_host AS h
        (customer, host, requests, photos, seconds, paused_until)
    SELECT g.customer, g.host, g.requests, g.photos, g.seconds,
           CASE WHEN g.pause_s > 0 THEN now() + g.pause_s * interval '1 s' END
    FROM unnest(p_customers, p_hosts, p_requests, p_photos, p_seconds, p_pauses_s)
        AS g(customer, host, requests, photos, seconds, pause_s)
    ORDER BY g.customer, g.host
    ON CONFLICT (customer, host) DO UPDATE SET
        requests = h.requests + excluded.requests,
        left_share = power(0.5, extract(epoch FROM now() - h.last_seen_at) / p_half_life_s)
            * greatest(0, 1 - excluded.photos / p_recent),
        photos = excluded.photos + h.photos
            * power(0.5, extract(epoch FROM now() - h.last_seen_at) / p_half_life_s)
            * greatest(0, 1 - excluded.photos / p_recent),
        seconds = excluded.seconds + h.seconds
            * power(0.5, extract(epoch FROM now() - h.last_seen_at) / p_half_life_s)
            * greatest(0, 1 - excluded.photos / p_recent),
        paused_until = greatest(h.paused_until, excluded.paused_until),
        last_seen_at = now();
    UPDATE headrace.fetch_speed s SET weight = s.weight * h.left_share
    FROM (
        SELECT t.ctid, r.left_share FROM unnest(p_customers, p_hosts) AS g(customer, host)
        CROSS JOIN LATERAL (SELECT r.left_share FROM headrace.fetch_host r
                            WHERE r.customer = g.customer AND r.host = g.host OFFSET 0) r
        CROSS JOIN LATERAL (SELECT t.ctid FROM headrace.fetch_speed t
                            WHERE t.customer = g.customer AND t.host = g.host OFFSET 0) t
    ) h WHERE s.ctid = h.ctid;
    INSERT INTO headrace.fetch_speed AS s (customer, host, class_s, weight)
    SELECT g.customer, g.host, g.class_s, g.photos
    FROM unnest(s_customers, s_hosts, s_classes_s, s_photos) AS g(customer, host, class_s, photos)
    ORDER BY 1, 2, 3
    ON CONFLICT (customer, host, class_s) DO UPDATE SET weight = s.weight + excluded.weight;
    INSERT INTO headrace.fetch_host_outcome AS o (customer, host, outcome, photos)
    SELECT g.customer, g.host, g.outcome, g.photos
    FROM unnest(o_customers, o_hosts, o_outcomes, o_photos) AS g(customer, host, outcome, photos)
    ORDER BY 1, 2, 3
    ON CONFLICT (customer, host, outcome) DO UPDATE SET
        photos = o.photos + excluded.photos, last_at = now();
END $$;

CREATE FUNCTION headrace.pause_lane_v1(p_limiter text, p_name text, p_paused boolean) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
    PERFORM headrace.set_lane_v2(
        p_limiter, p_name, v.is_own, v.starts_max, v.window_s, v.concurrency, p_paused, v.weight);
END $$;

CREATE FUNCTION headrace.pause_lane_v2(p_limiter text, p_name text, p_paused boolean) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
    PERFORM headrace.set_lane_v3(
        p_limiter, p_name, v.is_own, v.starts_max, v.window_s, v.concurrency, p_paused, v.weight);
END $$;

CREATE FUNCTION headrace.plan_lanes_v1(p_limiter text, p_queue integer, p_names text[], p_jobs_max integer, p_quantum integer, p_now timestamp with time zone) RETURNS TABLE(names text[], gives integer[], turns integer[], slack_s double precision)
    LANGUAGE sql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
    WITH allowed AS (
        SELECT l.name, l.ready_at, l.slack_s, l.turn,
               CASE WHEN l.paused THEN 0 ELSE greatest(0, least(
                   l.waiting, l.concurrency - l.inflight, l.turn,
                   l.starts_max - (
                       SELECT coalesce(sum(s.n), 0) FROM unnest(l.at, l.n) AS s(at, n)
                       WHERE s.at > p_now - (l.window_s + l.slack_s) * interval '1 s'))) END AS give
        FROM (
            SELECT l.*, q.waiting, q.ready_at, CASE WHEN q.turn > 0 THEN q.turn ELSE l.weight * greatest(
                p_quantum, ceil(p_jobs_max::double precision / sum(l.weight) OVER ()))::integer END AS turn
            FROM unnest(p_names) AS v(name)
            CROSS JOIN LATERAL (SELECT * FROM headrace.lane l
                                WHERE l.limiter = p_limiter AND l.name = v.name OFFSET 0) l
            CROSS JOIN LATERAL (SELECT q.waiting, q.ready_at, q.turn FROM headrace.lane_queue q
                                WHERE q.limiter = p_limiter AND q.lane = v.name AND q.queue = p_queue OFFSET 0) q
        ) l
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

CREATE FUNCTION headrace.post_v1(p_ids text[], p_authors bigint[], p_ats timestamp with time zone[], p_refs text[]) RETURNS TABLE(id text, author bigint, score bigint, state smallint, visible_at timestamp with time zone, is_new boolean, version bigint)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_new text[];
BEGIN
    WITH given AS MATERIALIZED (
        SELECT u.id, u.author, coalesce(u.at, now()) AS at, u.ref,
            CASE WHEN u.at IS NULL THEN nextval('headrace.feed_tick') ELSE 0 END AS tick
        FROM unnest(p_ids, p_authors, p_ats, p_refs) WITH ORDINALITY u (id, author, at, ref, n) ORDER BY u.n
    ), placed AS (
        INSERT INTO headrace.feed_post (id, author, score, state, visible_at, ref)
        SELECT g.id, g.author, (floor(extract(epoch FROM g.at) * 1000)::bigint << 11) + g.tick,
            CASE WHEN g.at > now() THEN 1 ELSE 0 END, g.at, g.ref
        FROM given g ORDER BY g.id
        ON CONFLICT DO NOTHING RETURNING id
    ) SELECT array_agg(p.id) INTO v_new FROM placed p;
    WITH shown AS MATERIALIZED (
        SELECT p.author, array_agg(p.id) AS items, array_agg(p.score) AS scores
        FROM headrace.feed_post p WHERE p.id = ANY (v_new) AND p.state = 0 GROUP BY 1
    ), raised AS (
        INSERT INTO headrace.feed_version AS v (kind, entity, version)
        SELECT 1, s.author, 1 FROM shown s ORDER BY s.author
        ON CONFLICT (kind, entity) DO UPDATE SET version = v.version + 1
        RETURNING v.entity, v.version
    )
    INSERT INTO headrace.feed_outbox (kind, entity, version, items, scores)
    SELECT 1, r.entity, r.version, s.items, s.scores FROM raised r JOIN shown s ON s.author = r.entity;
    RETURN QUERY SELECT p.id, p.author, p.score, p.state, p.visible_at, n.id IS NOT NULL, v.version
        FROM headrace.feed_post p
        LEFT JOIN unnest(v_new) n (id) ON n.id = p.id
        LEFT JOIN headrace.feed_version v ON v.kind = 1 AND v.entity = p.author AND n.id IS NOT NULL AND p.state = 0
        WHERE p.id = ANY (p_ids);
END $$;

CREATE FUNCTION headrace.publish_posts_v1(p_ids text[]) RETURNS TABLE(entity bigint, version bigint, items text[], scores bigint[])
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_row record;
BEGIN
    PERFORM FROM headrace.feed_post p WHERE p.id = ANY (p_ids) ORDER BY p.id FOR UPDATE;
    FOR v_row IN
        WITH shown AS (
            UPDATE headrace.feed_post p SET state = 0,
                score = (floor(extract(epoch FROM now()) * 1000)::bigint << 11) + nextval('headrace.feed_tick')
            WHERE p.id = ANY (p_ids) AND p.state = 1 AND p.visible_at <= now()
            RETURNING p.id, p.author, p.score
        ) SELECT s.author, array_agg(s.id) AS items, array_agg(s.score) AS scores
        FROM shown s GROUP BY 1 ORDER BY 1
    LOOP
        RETURN QUERY SELECT v_row.author,
            headrace.log_feed_v1(1::smallint, v_row.author, v_row.items, v_row.scores), v_row.items, v_row.scores;
    END LOOP;
END $$;

CREATE FUNCTION headrace.put_back_v2(p_jobs headrace.settlement[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.queue_counts_v1(p_queue text, p_max integer) RETURNS TABLE(queue integer, ready bigint, laned bigint, scheduled bigint, leased bigint, failed bigint, ended bigint, oldest_at timestamp with time zone, slots bigint, is_known boolean)
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH hosts AS MATERIALIZED (
        SELECT h.queues, h.slots FROM headrace.host h WHERE h.kind <> 'taker' AND h.expires_at > now()
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
        SELECT count(*) AS n FROM (SELECT FROM headrace.lane_job j WHERE j.queue = q.id LIMIT p_max) c
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

CREATE FUNCTION headrace.reclassify_views_v1(p_id text, p_shard integer, p_from timestamp with time zone, p_to timestamp with time zone, p_source smallint, p_target smallint, OUT views bigint, OUT corrections bigint) RETURNS record
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
BEGIN
    UPDATE headrace.views_shard s SET corrections = s.corrections + 1 WHERE s.shard = p_shard
    RETURNING s.corrections INTO corrections;
    WITH moved AS (
        DELETE FROM headrace.views_hour h
        WHERE h.id = p_id AND h.class = p_source AND h.hour >= p_from AND h.hour < p_to
        RETURNING h.hour, h.views
    ), placed AS (
        INSERT INTO headrace.views_hour AS h (id, hour, class, views)
        SELECT p_id, m.hour, p_target, m.views FROM moved m
        ON CONFLICT (id, hour, class) DO UPDATE SET views = h.views + excluded.views
    )
    SELECT coalesce(sum(m.views), 0) INTO views FROM moved m;
    IF views > 0 THEN
        UPDATE headrace.views_total t SET total = t.total - views WHERE t.id = p_id AND t.class = p_source;
        INSERT INTO headrace.views_total AS t (id, class, total) VALUES (p_id, p_target, views)
        ON CONFLICT (id, class) DO UPDATE SET total = t.total + excluded.total;
    END IF;
END $$;

CREATE FUNCTION headrace.remove_idle_lanes_v1(p_limiter text, p_name text, p_max integer, p_idle_s double precision) RETURNS TABLE(last_limiter text, last_name text, removed integer)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
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
    -- What waits is looked at under the lock.
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
    ), gone AS (
        DELETE FROM headrace.lane l USING idle i WHERE l.ctid = i.ctid RETURNING 1
    )
    SELECT count(*) INTO v_count FROM gone;
    removed := v_count;
    RETURN NEXT;
END $$;

CREATE FUNCTION headrace.retry_jobs_v1(p_ids bigint[], p_states text[]) RETURNS TABLE(retried bigint[], taken bigint[])
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
        SELECT b.id, b.queue, now(), b.priority, b.lane, b.unique_key, b.traceparent, b.payload, b.version
        FROM back b
    )
    SELECT array_agg(DISTINCT b.queue) INTO v_queues FROM back b;
    PERFORM pg_notify('headrace_jobs', q::text) FROM unnest(v_queues) AS q;
    RETURN NEXT;
END $$;

CREATE FUNCTION headrace.return_lease_v2(p_lease bigint, p_losses_max integer) RETURNS integer
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.set_lane_v2(p_limiter text, p_name text, p_is_own boolean, p_starts_max integer, p_window_s double precision, p_concurrency integer, p_paused boolean, p_weight integer) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v headrace.limiter%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        SELECT * INTO v FROM headrace.limiter m WHERE m.name = p_limiter FOR SHARE;
        UPDATE headrace.lane SET is_own = p_is_own, paused = p_paused, weight = p_weight
        WHERE limiter = p_limiter AND name = p_name;
        EXIT WHEN FOUND;
    END LOOP;
    IF p_is_own THEN
        PERFORM headrace.limit_lanes_v1(
            p_limiter, ARRAY[p_name], p_starts_max, p_window_s, coalesce(v.slack_s, 0.25),
            p_concurrency);
    ELSE
        PERFORM headrace.limit_lanes_v1(
            p_limiter, ARRAY[p_name], v.starts_max, v.window_s, coalesce(v.slack_s, 0.25),
            v.concurrency);
    END IF;
END $$;

CREATE FUNCTION headrace.set_lane_v3(p_limiter text, p_name text, p_is_own boolean, p_starts_max integer, p_window_s double precision, p_concurrency integer, p_paused boolean, p_weight integer) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v headrace.limiter%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        SELECT * INTO v FROM headrace.limiter m WHERE m.name = p_limiter FOR SHARE;
        UPDATE headrace.lane SET is_own = p_is_own, paused = p_paused, weight = p_weight
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

CREATE FUNCTION headrace.set_lane_v4(p_limiter text, p_name text, p_is_own boolean, p_starts_max integer, p_window_s double precision, p_concurrency integer, p_paused boolean, p_weight integer) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v headrace.limiter%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        SELECT * INTO v FROM headrace.limiter m WHERE m.name = p_limiter FOR SHARE;
        UPDATE headrace.lane SET is_own = p_is_own, paused = coalesce(p_paused, paused), weight = coalesce(p_weight, weight)
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

CREATE FUNCTION headrace.set_limiter_v1(p_name text, p_starts_max integer, p_window_s double precision, p_slack_s double precision, p_concurrency integer, p_is_set boolean) RETURNS boolean
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_is_spread boolean;
BEGIN
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

CREATE FUNCTION headrace.set_limiter_v2(p_name text, p_starts_max integer, p_window_s double precision, p_slack_s double precision, p_concurrency integer, p_is_set boolean) RETURNS boolean
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
    RETURN headrace.set_limiter_v1(
        p_name, p_starts_max, p_window_s, p_slack_s, p_concurrency, p_is_set);
END $$;

CREATE FUNCTION headrace.settle_jobs_v1(p_jobs headrace.settlement[], p_limiters text[], p_lanes text[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET lock_timeout TO '1s'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.settle_keys_v1(p_jobs headrace.settlement[]) RETURNS headrace.settlement[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.settle_lanes_v2(p_limiters text[], p_lanes text[], p_queues integer[], p_words text[], p_granted_ats timestamp with time zone[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET lock_timeout TO '1s'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.settle_v2(p_whole bigint[], p_word text, p_leases bigint[], p_ids bigint[], p_words text[], p_delays_s double precision[], p_errors text[], p_tracebacks text[], p_results bytea[], p_queues text[], p_losses_max integer, p_progressed bigint[]) RETURNS TABLE(lost bigint[], busy bigint[])
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.slots_elsewhere_v1(p_host bigint, p_queues integer[], p_mosts integer[]) RETURNS TABLE(queue integer, slots bigint)
    LANGUAGE sql
    SET jit TO 'off'
    AS $$
    WITH living AS (
        SELECT DISTINCT ON (h.name) h.id, h.name FROM headrace.host h
        WHERE h.kind <> 'taker' AND h.expires_at > now() AND NOT h.is_draining
        ORDER BY h.name, h.id DESC
    ), planned AS (
        SELECT f.queue, l.id AS host, f.slots, w.most,
               sum(f.slots) OVER (PARTITION BY f.queue ORDER BY f.host) - f.slots AS before
        FROM unnest(p_queues, p_mosts) AS w(queue, most)
        JOIN headrace.fleet_slot f ON f.queue = w.queue
        JOIN living l ON l.name = f.host
    ), parts AS (
        SELECT a.queue, a.host, a.slots::bigint AS held, 0::bigint AS bound
        FROM headrace.slot_allowance a
        JOIN headrace.host h ON h.id = a.host AND h.expires_at > now() - interval '5 s'
        WHERE a.queue = ANY(p_queues) AND a.slots > 0
        UNION ALL
        SELECT p.queue, p.host, 0, greatest(0, least(p.slots, p.most - p.before)) FROM planned p
    ), hosts AS (
        SELECT p.queue, greatest(sum(p.held), sum(p.bound)) AS slots
        FROM parts p WHERE p.host <> p_host GROUP BY p.queue, p.host
    )
    SELECT h.queue, sum(h.slots)::bigint FROM hosts h GROUP BY h.queue
$$;

CREATE FUNCTION headrace.spend_v1(p_limiter text, p_name text, p_k integer, p_wait_max_s double precision) RETURNS double precision
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET lock_timeout TO '3s'
    SET jit TO 'off'
    AS $$
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
    UPDATE headrace.lane SET
        at = v.at, n = v.n, started_at = greatest(started_at, v_at),
        free_at = CASE WHEN (SELECT sum(s.n) FROM unnest(v.n) AS s(n)) >= starts_max
                       THEN v.at[1] + v_span ELSE '-infinity' END
    WHERE limiter = p_limiter AND name = p_name;
    RETURN greatest(0, extract(epoch FROM v_at - v_now));
END $$;

CREATE FUNCTION headrace.spread_limiter_v1(p_name text, p_after text, p_max integer) RETURNS text
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v headrace.limiter%ROWTYPE;
    v_names text[];
    v_last text;
BEGIN
    -- Not FOR SHARE: two that spread at once would wait for each other at the UPDATE below.
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

CREATE FUNCTION headrace.take_keys_v1(p_queues integer[], p_keys text[], p_ids bigint[]) RETURNS bigint[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
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
    RAISE EXCEPTION 'keys keep changing hands' USING ERRCODE = 'serialization_failure';
END $$;

CREATE FUNCTION headrace.tend_kept_v1() RETURNS integer
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $_$
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
END $_$;

CREATE FUNCTION headrace.unfollow_all_v1(p_viewer bigint, OUT changed integer, OUT version bigint) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_shown boolean;
BEGIN
    PERFORM headrace.lock_feed_viewers_v1(ARRAY[p_viewer]);
    SELECT count(*), bool_or(f.is_shown) INTO changed, v_shown FROM headrace.feed_follow f WHERE f.viewer = p_viewer;
    DELETE FROM headrace.feed_follow f WHERE f.viewer = p_viewer;
    IF v_shown THEN
        version := headrace.log_feed_v1(0::smallint, p_viewer, '{}', '{}');
    END IF;
END $$;

CREATE FUNCTION headrace.unfollow_v1(p_viewer bigint, p_authors bigint[], OUT changed integer, OUT entity bigint, OUT version bigint, OUT items text[], OUT scores bigint[]) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
BEGIN
    entity := p_viewer;
    PERFORM headrace.lock_feed_viewers_v1(ARRAY[p_viewer]);
    WITH gone AS (
        DELETE FROM headrace.feed_follow f
        WHERE f.viewer = p_viewer AND (p_authors IS NULL OR f.author = ANY (p_authors))
        RETURNING f.author, f.is_shown
    ) SELECT count(*), array_agg(g.author::text) FILTER (WHERE g.is_shown) INTO changed, items FROM gone g;
    IF items IS NOT NULL THEN
        scores := array_fill(-1::bigint, ARRAY[cardinality(items)]);
        version := headrace.log_feed_v1(0::smallint, p_viewer, items, scores);
    END IF;
END $$;

CREATE FUNCTION headrace.why_waiting_v1(p_id bigint, p_max integer) RETURNS TABLE(is_paused boolean, tag text, slots_max integer, hosts bigint, tagged_hosts bigint, open_hosts bigint, is_told boolean, slots bigint, free_slots bigint, is_lane_paused boolean, inflight integer, concurrency integer, starts_max integer, window_s double precision, free_at timestamp with time zone, ahead bigint)
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
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
           known.is_told, known.slots, known.free, l.paused, l.inflight, l.concurrency, l.starts_max,
           l.window_s, CASE WHEN l.free_at > now() THEN l.free_at END,
           CASE WHEN j.is_ready THEN before.n ELSE laned.n END
    FROM job j
    JOIN headrace.queue q ON q.id = j.queue
    LEFT JOIN headrace.queue_override o ON o.queue = q.id
    LEFT JOIN headrace.lane l ON l.limiter = q.limiter AND l.name = j.lane
    CROSS JOIN LATERAL (
        SELECT count(*) AS n, count(*) FILTER (WHERE h.is_tagged) AS tagged,
               count(*) FILTER (WHERE h.is_open) AS open,
               coalesce(bool_and(h.is_told) FILTER (WHERE h.is_open), false) AS is_told,
               coalesce(sum(h.slots) FILTER (WHERE h.is_open), 0)::bigint AS slots,
               coalesce(sum(h.free) FILTER (WHERE h.is_open), 0)::bigint AS free
        FROM (
            SELECT t.is_tagged, t.is_tagged AND NOT h.is_draining AS is_open,
                   h.reported_at IS NOT NULL AS is_told, s.slots, s.free
            FROM headrace.host h
            CROSS JOIN LATERAL (SELECT q.tag IS NULL OR q.tag = ANY(h.tags) AS is_tagged) t
            CROSS JOIN LATERAL (
                SELECT count(*) AS slots,
                       count(*) FILTER (WHERE coalesce((e.slot ->> 'busy_s')::double precision, 0) = 0)
                           AS free
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
                  AND (p.priority < j.priority OR (r.run_at, r.id) < (j.run_at, j.id)) LIMIT p_max) c
            LIMIT p_max) c
    ) AS before
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (
            SELECT FROM generate_series(0, 9) AS p(priority) CROSS JOIN LATERAL (
                SELECT FROM headrace.lane_job r
                WHERE r.queue = j.queue AND r.lane = j.lane AND r.priority = p.priority
                  AND p.priority <= j.priority AND (p.priority < j.priority OR r.id < j.id) LIMIT p_max) c
            LIMIT p_max) c
    ) AS laned;
END $$;

CREATE FUNCTION headrace.work_ahead_v1(p_queues integer[]) RETURNS TABLE(ready integer[], laned integer[], wait_s double precision)
    LANGUAGE sql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION headrace.write_plan_v1(p_leader text, p_term bigint, p_hosts text[], p_queues integer[], p_slots integer[], p_changed_hosts text[], p_changed_queues text[], p_befores integer[], p_afters integer[], p_codes text[], p_whys text[]) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_version bigint;
    v_gone integer;
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
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    INSERT INTO headrace.fleet_slot AS s (host, queue, slots)
    SELECT r.host, r.queue, r.slots FROM unnest(p_hosts, p_queues, p_slots) AS r(host, queue, slots)
    ON CONFLICT (host, queue) DO UPDATE SET slots = excluded.slots WHERE s.slots <> excluded.slots;
    GET DIAGNOSTICS v_put = ROW_COUNT;
    -- The first plan of all counts as a change, even if it binds nothing: hosts may now rely on there being one.
    IF v_gone = 0 AND v_put = 0 AND v_version > 0 THEN
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

CREATE TABLE headrace.alert (
    id bigint NOT NULL,
    rule text NOT NULL,
    subject text NOT NULL,
    text text NOT NULL,
    raised_at timestamp with time zone DEFAULT now() NOT NULL,
    cleared_at timestamp with time zone,
    is_raise_told boolean DEFAULT false NOT NULL,
    is_clear_told boolean DEFAULT false NOT NULL
);

ALTER TABLE headrace.alert ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.alert_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.audit (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    actor text NOT NULL,
    place text NOT NULL,
    action text NOT NULL,
    command text NOT NULL,
    outcome text DEFAULT 'begun'::text NOT NULL,
    told text,
    CONSTRAINT audit_outcome_check CHECK ((outcome = ANY (ARRAY['begun'::text, 'done'::text, 'refused'::text, 'failed'::text])))
);

ALTER TABLE headrace.audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.console_link (
    sha256 bytea NOT NULL,
    token_id bigint NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    CONSTRAINT console_link_sha256_check CHECK ((length(sha256) = 32))
);

CREATE TABLE headrace.console_session (
    sha256 bytea NOT NULL,
    token_id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    CONSTRAINT console_session_sha256_check CHECK ((length(sha256) = 32))
);

CREATE TABLE headrace.cron (
    name text NOT NULL,
    spec text NOT NULL,
    tz text NOT NULL,
    queue text NOT NULL,
    payload bytea NOT NULL,
    priority smallint NOT NULL,
    next_at timestamp with time zone NOT NULL,
    last_at timestamp with time zone,
    last_job bigint,
    paused boolean DEFAULT false NOT NULL,
    source text NOT NULL,
    declared_at timestamp with time zone DEFAULT now() NOT NULL,
    error text,
    CONSTRAINT cron_source_check CHECK ((source = ANY (ARRAY['code'::text, 'api'::text])))
);

CREATE TABLE headrace.feed_bar (
    viewer bigint NOT NULL,
    author bigint NOT NULL,
    kind text NOT NULL,
    made_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE headrace.feed_follow (
    viewer bigint NOT NULL,
    author bigint NOT NULL,
    followed_at timestamp with time zone NOT NULL,
    is_shown boolean NOT NULL
);

CREATE TABLE headrace.feed_index (
    is_only boolean DEFAULT true NOT NULL,
    shards integer NOT NULL,
    forgotten bigint DEFAULT 0 NOT NULL,
    CONSTRAINT feed_index_is_only_check CHECK (is_only)
);

CREATE TABLE headrace.feed_marker (
    viewer bigint NOT NULL,
    score bigint NOT NULL,
    id text NOT NULL COLLATE pg_catalog."C",
    set_at timestamp with time zone NOT NULL
);

CREATE SEQUENCE headrace.feed_name_id
    START WITH -1
    INCREMENT BY -1
    MINVALUE -9007199254740991
    NO MAXVALUE
    CACHE 1;

CREATE TABLE headrace.feed_name (
    id bigint DEFAULT nextval('headrace.feed_name_id'::regclass) NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C"
);

CREATE TABLE headrace.feed_outbox (
    id bigint NOT NULL,
    kind smallint NOT NULL,
    entity bigint NOT NULL,
    version bigint NOT NULL,
    items text[] NOT NULL,
    scores bigint[] NOT NULL,
    made_at timestamp with time zone DEFAULT now() NOT NULL,
    is_swept boolean DEFAULT false NOT NULL
);

ALTER TABLE headrace.feed_outbox ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.feed_outbox_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.feed_post (
    id text NOT NULL COLLATE pg_catalog."C",
    author bigint NOT NULL,
    score bigint NOT NULL,
    state smallint NOT NULL,
    visible_at timestamp with time zone NOT NULL,
    ref text
);

CREATE SEQUENCE headrace.feed_tick
    AS integer
    START WITH 0
    INCREMENT BY 1
    MINVALUE 0
    MAXVALUE 2047
    CACHE 1
    CYCLE;

CREATE TABLE headrace.feed_version (
    kind smallint NOT NULL,
    entity bigint NOT NULL,
    version bigint NOT NULL
)
WITH (fillfactor='70');

CREATE TABLE headrace.fetch_absent (
    consumer text NOT NULL,
    seq bigint NOT NULL,
    since timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE headrace.fetch_before (
    run_id bigint NOT NULL,
    item text NOT NULL,
    hash bytea NOT NULL,
    raw_hash bytea,
    fields text NOT NULL,
    photos text[] NOT NULL
);

CREATE TABLE headrace.fetch_change (
    run_id bigint NOT NULL,
    item text NOT NULL,
    kind text NOT NULL,
    version bigint NOT NULL,
    has_other_photos boolean NOT NULL,
    published_at timestamp with time zone,
    fields text[] DEFAULT '{}'::text[] NOT NULL,
    late_at timestamp with time zone,
    CONSTRAINT fetch_change_kind_check CHECK ((kind = ANY (ARRAY['new'::text, 'changed'::text, 'gone'::text, 'retry'::text])))
);

CREATE TABLE headrace.fetch_consumer (
    name text NOT NULL,
    id bigint NOT NULL,
    added_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE headrace.fetch_consumer ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.fetch_consumer_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.fetch_count (
    run_id bigint NOT NULL,
    outcome text NOT NULL,
    photos bigint NOT NULL
);

CREATE TABLE headrace.fetch_customer (
    customer text NOT NULL,
    starts_max integer NOT NULL,
    window_s double precision NOT NULL,
    connections integer NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    hold_share double precision,
    hold_items integer,
    refresh_s double precision
);

CREATE TABLE headrace.fetch_delivery (
    consumer text NOT NULL,
    customer text NOT NULL,
    item text NOT NULL,
    version bigint DEFAULT 0 NOT NULL,
    is_shown boolean DEFAULT false NOT NULL,
    busy_job bigint,
    busy_until timestamp with time zone
);

CREATE TABLE headrace.fetch_host (
    customer text NOT NULL,
    host text NOT NULL,
    requests bigint DEFAULT 0 NOT NULL,
    photos double precision DEFAULT 0 NOT NULL,
    seconds double precision DEFAULT 0 NOT NULL,
    left_share double precision DEFAULT 1 NOT NULL,
    paused_until timestamp with time zone,
    first_seen_at timestamp with time zone DEFAULT now() NOT NULL,
    last_seen_at timestamp with time zone DEFAULT now() NOT NULL
)
WITH (fillfactor='70');

CREATE TABLE headrace.fetch_host_outcome (
    customer text NOT NULL,
    host text NOT NULL,
    outcome text NOT NULL,
    photos bigint NOT NULL,
    last_at timestamp with time zone DEFAULT now() NOT NULL
)
WITH (fillfactor='70');

CREATE TABLE headrace.fetch_item (
    customer text NOT NULL,
    item text NOT NULL,
    version bigint NOT NULL,
    is_gone boolean NOT NULL,
    run_id bigint NOT NULL,
    hash bytea NOT NULL,
    fields text NOT NULL,
    photos text[] NOT NULL,
    raw_hash bytea,
    sent_run bigint DEFAULT 0 NOT NULL
);

CREATE TABLE headrace.fetch_link (
    customer text NOT NULL,
    url text NOT NULL,
    outcome text NOT NULL,
    sha256 text,
    etag text,
    last_modified text,
    checked_at timestamp with time zone DEFAULT now() NOT NULL,
    failures integer DEFAULT 0 NOT NULL,
    run_id bigint NOT NULL,
    due_round bigint DEFAULT 0 NOT NULL,
    copied_at timestamp with time zone,
    recheck_at timestamp with time zone
);

CREATE TABLE headrace.fetch_mapping (
    name text NOT NULL,
    mapping json NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE headrace.fetch_need (
    run_id bigint NOT NULL,
    item text NOT NULL,
    url text NOT NULL,
    outcome text,
    id bigint NOT NULL,
    is_late boolean DEFAULT false NOT NULL
);

ALTER TABLE headrace.fetch_need ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.fetch_need_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.fetch_pace (
    run_id bigint NOT NULL,
    minute timestamp with time zone NOT NULL,
    photos bigint NOT NULL
);

CREATE TABLE headrace.fetch_photo (
    sha256 text NOT NULL,
    key text NOT NULL,
    format text NOT NULL,
    size_bytes bigint NOT NULL,
    width integer NOT NULL,
    height integer NOT NULL,
    stored_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE headrace.fetch_problem (
    run_id bigint NOT NULL,
    id bigint NOT NULL,
    row_number integer NOT NULL,
    line integer NOT NULL,
    item text,
    field text NOT NULL,
    code text NOT NULL,
    problem text NOT NULL,
    parameters text DEFAULT '{}'::text NOT NULL
);

ALTER TABLE headrace.fetch_problem ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.fetch_problem_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.fetch_result (
    seq bigint NOT NULL,
    customer text NOT NULL,
    item text NOT NULL,
    version bigint NOT NULL,
    action text NOT NULL,
    fields text NOT NULL,
    photos text NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT fetch_result_action_check CHECK ((action = ANY (ARRAY['publish'::text, 'edit'::text, 'unpublish'::text])))
);

ALTER TABLE headrace.fetch_result ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.fetch_result_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.fetch_robots (
    host text NOT NULL,
    crawl_delay_s double precision,
    begun_at timestamp with time zone NOT NULL,
    read_at timestamp with time zone,
    next_at timestamp with time zone DEFAULT now() NOT NULL
)
WITH (fillfactor='70');

CREATE TABLE headrace.fetch_run (
    id bigint NOT NULL,
    customer text NOT NULL,
    state text NOT NULL,
    file_name text NOT NULL,
    format text NOT NULL,
    reason text,
    rows_read integer DEFAULT 0 NOT NULL,
    invalid integer DEFAULT 0 NOT NULL,
    new integer DEFAULT 0 NOT NULL,
    changed integer DEFAULT 0 NOT NULL,
    unchanged integer DEFAULT 0 NOT NULL,
    gone integer DEFAULT 0 NOT NULL,
    problems integer DEFAULT 0 NOT NULL,
    items_pending integer DEFAULT 0 NOT NULL,
    photos integer DEFAULT 0 NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    ended_at timestamp with time zone,
    is_whole boolean DEFAULT true NOT NULL,
    applied_at timestamp with time zone,
    sample text,
    round bigint,
    is_round boolean DEFAULT false NOT NULL,
    prior_at timestamp with time zone,
    asks_before timestamp with time zone,
    undone_by bigint,
    items_late integer DEFAULT 0 NOT NULL,
    fault jsonb,
    has_line_break boolean
);

ALTER TABLE headrace.fetch_run ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.fetch_run_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.fetch_schema (
    plain text NOT NULL,
    category text NOT NULL,
    schema json NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE headrace.fetch_source (
    customer text NOT NULL,
    url text NOT NULL,
    cron text NOT NULL,
    tz text NOT NULL,
    format text,
    mapping text,
    etag text,
    last_modified text,
    sha256 text,
    rules bytea,
    good_run bigint,
    outcome text,
    problem text,
    run_id bigint,
    tried_at timestamp with time zone,
    failures integer DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE headrace.fetch_speed (
    customer text NOT NULL,
    host text NOT NULL,
    class_s double precision NOT NULL,
    weight double precision NOT NULL
)
WITH (fillfactor='70');

CREATE TABLE headrace.fetch_staged (
    run_id bigint NOT NULL,
    item text NOT NULL,
    hash bytea,
    fields text NOT NULL,
    photos text[] NOT NULL,
    refused jsonb NOT NULL,
    raw_hash bytea,
    is_gone boolean DEFAULT false NOT NULL
);

CREATE TABLE headrace.fetch_webhook (
    customer text NOT NULL,
    id bigint NOT NULL,
    url text NOT NULL,
    secret text NOT NULL,
    old_secret text,
    old_until timestamp with time zone,
    taken_seq bigint NOT NULL,
    turn bigint DEFAULT 0 NOT NULL,
    failures integer DEFAULT 0 NOT NULL,
    failing_since timestamp with time zone,
    next_at timestamp with time zone,
    last_at timestamp with time zone,
    last_status integer,
    last_error text,
    disabled_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE headrace.fetch_webhook ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.fetch_webhook_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.fleet_decision (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    version bigint NOT NULL,
    host text NOT NULL,
    queue text NOT NULL,
    before integer NOT NULL,
    after integer NOT NULL,
    code text NOT NULL,
    why text NOT NULL
);

ALTER TABLE headrace.fleet_decision ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.fleet_decision_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.fleet_plan (
    is_one boolean DEFAULT true NOT NULL,
    leader text,
    leads_until timestamp with time zone DEFAULT '-infinity'::timestamp with time zone NOT NULL,
    term bigint DEFAULT 0 NOT NULL,
    version bigint DEFAULT 0 NOT NULL,
    planned_at timestamp with time zone,
    CONSTRAINT fleet_plan_is_one_check CHECK (is_one)
)
WITH (fillfactor='50');

CREATE TABLE headrace.fleet_slot (
    host text NOT NULL,
    queue integer NOT NULL,
    slots integer NOT NULL,
    CONSTRAINT fleet_slot_slots_check CHECK ((slots > 0))
)
WITH (fillfactor='50');

CREATE TABLE headrace.host (
    id bigint NOT NULL,
    name text NOT NULL,
    queues integer[] NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    kind text DEFAULT 'work'::text NOT NULL,
    tags text[] DEFAULT '{}'::text[] NOT NULL,
    cores integer DEFAULT 1 NOT NULL,
    capacity integer DEFAULT 0 NOT NULL,
    load_per_core real DEFAULT 0 NOT NULL,
    is_draining boolean DEFAULT false NOT NULL,
    slots jsonb DEFAULT '[]'::jsonb NOT NULL,
    reported_at timestamp with time zone,
    jobs_ended bigint DEFAULT 0 NOT NULL,
    cpu_pressure real DEFAULT 0 NOT NULL,
    CONSTRAINT host_kind_check CHECK ((kind = ANY (ARRAY['agent'::text, 'work'::text, 'taker'::text])))
)
WITH (fillfactor='50');

ALTER TABLE headrace.host ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.host_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.idempotency_key (
    caller bigint NOT NULL,
    key text NOT NULL,
    sha256 bytea NOT NULL,
    status smallint,
    body bytea,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT idempotency_key_key_check CHECK (((length(key) >= 1) AND (length(key) <= 128))),
    CONSTRAINT idempotency_key_sha256_check CHECK ((length(sha256) = 32))
);

CREATE TABLE headrace.job_count (
    at timestamp with time zone DEFAULT now() NOT NULL,
    queue integer NOT NULL,
    done integer,
    failed integer,
    retried integer,
    lost integer,
    claimed integer,
    calls integer,
    run_s double precision,
    wait_s double precision,
    wait_max_s double precision,
    slot_s double precision
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0');

CREATE TABLE headrace.job_count_fold (
    is_one boolean DEFAULT true NOT NULL,
    whole_at timestamp with time zone DEFAULT '-infinity'::timestamp with time zone NOT NULL,
    CONSTRAINT job_count_fold_is_one_check CHECK (is_one)
)
WITH (fillfactor='50');

CREATE TABLE headrace.job_done (
    id bigint NOT NULL,
    queue integer NOT NULL,
    run_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone NOT NULL,
    drop_at timestamp with time zone NOT NULL,
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    losses smallint NOT NULL,
    lane text,
    unique_key text,
    traceparent text,
    version smallint NOT NULL,
    payload bytea NOT NULL,
    result bytea
)
PARTITION BY RANGE (drop_at);

CREATE TABLE headrace.job_done_rest (
    id bigint CONSTRAINT job_done_id_not_null NOT NULL,
    queue integer CONSTRAINT job_done_queue_not_null NOT NULL,
    run_at timestamp with time zone CONSTRAINT job_done_run_at_not_null NOT NULL,
    ended_at timestamp with time zone CONSTRAINT job_done_ended_at_not_null NOT NULL,
    drop_at timestamp with time zone CONSTRAINT job_done_drop_at_not_null NOT NULL,
    group_id bigint,
    priority smallint CONSTRAINT job_done_priority_not_null NOT NULL,
    attempt smallint CONSTRAINT job_done_attempt_not_null NOT NULL,
    losses smallint CONSTRAINT job_done_losses_not_null NOT NULL,
    lane text,
    unique_key text,
    traceparent text,
    version smallint CONSTRAINT job_done_version_not_null NOT NULL,
    payload bytea CONSTRAINT job_done_payload_not_null NOT NULL,
    result bytea
);

CREATE TABLE headrace.job_failed (
    id bigint NOT NULL,
    queue integer NOT NULL,
    state text NOT NULL,
    run_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone DEFAULT now() NOT NULL,
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    losses smallint NOT NULL,
    lane text,
    unique_key text,
    traceparent text,
    error text NOT NULL,
    traceback text NOT NULL,
    payload bytea NOT NULL,
    version smallint DEFAULT 1 NOT NULL,
    CONSTRAINT job_failed_state_check CHECK ((state = ANY (ARRAY['failed'::text, 'cancelled'::text, 'quarantined'::text])))
);

CREATE TABLE headrace.job_group (
    id bigint NOT NULL,
    pending integer NOT NULL,
    done integer DEFAULT 0 NOT NULL,
    failed integer DEFAULT 0 NOT NULL,
    cancelled integer DEFAULT 0 NOT NULL,
    quarantined integer DEFAULT 0 NOT NULL,
    queue integer NOT NULL,
    priority smallint NOT NULL,
    run_at timestamp with time zone,
    delay_s double precision,
    lane text,
    unique_key text,
    traceparent text,
    payload bytea NOT NULL,
    version smallint DEFAULT 1 NOT NULL,
    opened_at timestamp with time zone
)
WITH (fillfactor='70');

CREATE SEQUENCE headrace.job_group_id
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE SEQUENCE headrace.job_id
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE TABLE headrace.job_lease (
    id bigint NOT NULL,
    host bigint NOT NULL,
    queue integer NOT NULL,
    limiter text,
    granted_at timestamp with time zone NOT NULL,
    settled bigint[] DEFAULT '{}'::bigint[] NOT NULL,
    ids bigint[] NOT NULL,
    run_ats timestamp with time zone[] NOT NULL,
    group_ids bigint[] NOT NULL,
    priorities smallint[] NOT NULL,
    attempts smallint[] NOT NULL,
    losses smallint[] NOT NULL,
    lanes text[] NOT NULL,
    unique_keys text[] NOT NULL,
    traceparents text[] NOT NULL,
    payloads bytea[] NOT NULL,
    versions smallint[],
    is_plain boolean DEFAULT false NOT NULL,
    jobs integer
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='500', autovacuum_vacuum_cost_delay='0', toast.autovacuum_vacuum_threshold='500', toast.autovacuum_vacuum_scale_factor='0.02', toast.autovacuum_vacuum_cost_delay='0');
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN ids SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN run_ats SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN group_ids SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN priorities SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN attempts SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN losses SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN lanes SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN unique_keys SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN traceparents SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN payloads SET STORAGE EXTERNAL;
ALTER TABLE ONLY headrace.job_lease ALTER COLUMN versions SET STORAGE EXTERNAL;

ALTER TABLE headrace.job_lease ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.job_lease_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE UNLOGGED TABLE headrace.job_progress (
    job_id bigint NOT NULL,
    ratio real NOT NULL,
    text text NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    lease_id bigint NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE headrace.job_ready (
    id bigint NOT NULL,
    queue integer NOT NULL,
    run_at timestamp with time zone NOT NULL,
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint DEFAULT 0 NOT NULL,
    losses smallint DEFAULT 0 NOT NULL,
    lane text,
    unique_key text,
    traceparent text,
    payload bytea NOT NULL,
    version smallint DEFAULT 1 NOT NULL,
    last_error text
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0', toast.autovacuum_vacuum_cost_delay='0');
ALTER TABLE ONLY headrace.job_ready ALTER COLUMN payload SET STORAGE EXTERNAL;

CREATE TABLE headrace.job_unique (
    queue integer NOT NULL,
    key text NOT NULL,
    job_id bigint NOT NULL
);

CREATE TABLE headrace.lane (
    limiter text NOT NULL,
    name text NOT NULL,
    starts_max integer,
    window_s double precision,
    slack_s double precision DEFAULT 0.25 NOT NULL,
    concurrency integer,
    weight integer DEFAULT 1 NOT NULL,
    paused boolean DEFAULT false NOT NULL,
    inflight integer DEFAULT 0 NOT NULL,
    free_at timestamp with time zone DEFAULT '-infinity'::timestamp with time zone NOT NULL,
    started_at timestamp with time zone,
    at timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[] NOT NULL,
    n integer[] DEFAULT '{}'::integer[] NOT NULL,
    is_own boolean DEFAULT false NOT NULL,
    CONSTRAINT lane_check CHECK (((starts_max IS NULL) = (window_s IS NULL))),
    CONSTRAINT lane_concurrency_check CHECK ((concurrency > 0)),
    CONSTRAINT lane_starts_max_check CHECK ((starts_max > 0)),
    CONSTRAINT lane_weight_check CHECK ((weight > 0)),
    CONSTRAINT lane_window_s_check CHECK ((window_s > (0)::double precision))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_cost_delay='0');

CREATE TABLE headrace.lane_event (
    id bigint NOT NULL,
    limiter text NOT NULL,
    lane text NOT NULL,
    queue integer NOT NULL,
    k integer NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0');

ALTER TABLE headrace.lane_event ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.lane_event_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.lane_job (
    id bigint NOT NULL,
    queue integer NOT NULL,
    run_at timestamp with time zone NOT NULL,
    group_id bigint,
    priority smallint NOT NULL,
    attempt smallint DEFAULT 0 NOT NULL,
    losses smallint DEFAULT 0 NOT NULL,
    lane text NOT NULL,
    unique_key text,
    traceparent text,
    payload bytea NOT NULL,
    version smallint DEFAULT 1 NOT NULL,
    last_error text
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0', toast.autovacuum_vacuum_cost_delay='0');
ALTER TABLE ONLY headrace.lane_job ALTER COLUMN payload SET STORAGE EXTERNAL;

CREATE TABLE headrace.lane_queue (
    limiter text NOT NULL,
    lane text NOT NULL,
    queue integer NOT NULL,
    waiting integer DEFAULT 0 NOT NULL,
    ready_at timestamp with time zone DEFAULT 'infinity'::timestamp with time zone NOT NULL,
    turn integer DEFAULT 0 NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_cost_delay='0');

CREATE TABLE headrace.limiter (
    name text NOT NULL,
    starts_max integer,
    window_s double precision,
    slack_s double precision DEFAULT 0.25 NOT NULL,
    concurrency integer,
    is_set boolean DEFAULT false NOT NULL,
    is_spread boolean DEFAULT true NOT NULL,
    declared_starts_max integer,
    declared_window_s double precision,
    declared_slack_s double precision,
    declared_concurrency integer,
    CONSTRAINT limiter_check CHECK (((starts_max IS NULL) = (window_s IS NULL))),
    CONSTRAINT limiter_concurrency_check CHECK ((concurrency > 0)),
    CONSTRAINT limiter_starts_max_check CHECK ((starts_max > 0)),
    CONSTRAINT limiter_window_s_check CHECK ((window_s > (0)::double precision))
);

CREATE TABLE headrace.migration (
    room text NOT NULL,
    number integer NOT NULL,
    phase text NOT NULL,
    name text NOT NULL,
    checksum text NOT NULL,
    oldest_code text,
    applied_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT migration_phase_check CHECK ((phase = ANY (ARRAY['pre'::text, 'post'::text])))
);

CREATE TABLE headrace.object_store (
    one boolean DEFAULT true NOT NULL,
    mark text NOT NULL,
    since timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT object_store_one_check CHECK (one)
);

CREATE TABLE headrace.queue (
    id integer NOT NULL,
    name text NOT NULL,
    limiter text NOT NULL,
    paused boolean DEFAULT false NOT NULL,
    importance smallint DEFAULT 5 NOT NULL,
    slots_min integer DEFAULT 0 NOT NULL,
    slots_max integer DEFAULT 100000 NOT NULL,
    batch integer DEFAULT 1 NOT NULL,
    retries integer DEFAULT 5 NOT NULL,
    timeout_s double precision DEFAULT 7200 NOT NULL,
    tag text,
    keep_done_s double precision,
    keep_result boolean DEFAULT false NOT NULL,
    declared_at timestamp with time zone DEFAULT now() NOT NULL,
    needs_lane boolean DEFAULT false NOT NULL,
    CONSTRAINT queue_batch_check CHECK ((batch > 0)),
    CONSTRAINT queue_check CHECK ((slots_max >= slots_min)),
    CONSTRAINT queue_importance_check CHECK (((importance >= 0) AND (importance <= 9))),
    CONSTRAINT queue_retries_check CHECK ((retries >= 0)),
    CONSTRAINT queue_slots_min_check CHECK ((slots_min >= 0))
);

CREATE TABLE headrace.queue_alias (
    name text NOT NULL,
    queue integer NOT NULL
);

ALTER TABLE headrace.queue ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.queue_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.queue_minute (
    queue integer NOT NULL,
    minute timestamp with time zone NOT NULL,
    done bigint NOT NULL,
    failed bigint NOT NULL,
    retried bigint NOT NULL,
    lost bigint NOT NULL,
    calls bigint NOT NULL,
    run_s double precision NOT NULL,
    wait_s double precision NOT NULL,
    wait_max_s double precision NOT NULL,
    slot_s double precision NOT NULL,
    claimed bigint DEFAULT 0 NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE headrace.queue_override (
    queue integer NOT NULL,
    importance smallint,
    slots_min integer,
    slots_max integer,
    retries integer,
    CONSTRAINT queue_override_importance_check CHECK (((importance >= 0) AND (importance <= 9))),
    CONSTRAINT queue_override_retries_check CHECK ((retries >= 0)),
    CONSTRAINT queue_override_slots_max_check CHECK ((slots_max >= 0)),
    CONSTRAINT queue_override_slots_min_check CHECK ((slots_min >= 0))
);

CREATE TABLE headrace.queue_total (
    queue integer NOT NULL,
    done bigint NOT NULL,
    failed bigint NOT NULL,
    retried bigint NOT NULL,
    lost bigint NOT NULL,
    calls bigint NOT NULL,
    run_s double precision NOT NULL,
    wait_s double precision NOT NULL,
    slot_s double precision NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE headrace.slot_allowance (
    queue integer NOT NULL,
    host bigint NOT NULL,
    slots integer NOT NULL,
    is_short boolean DEFAULT false NOT NULL,
    call bigint NOT NULL,
    CONSTRAINT slot_allowance_slots_check CHECK ((slots >= 0))
)
WITH (fillfactor='50');

CREATE TABLE headrace.token (
    id bigint NOT NULL,
    name text NOT NULL,
    sha256 bytea NOT NULL,
    scopes text[] NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    last_used_at timestamp with time zone,
    CONSTRAINT token_name_check CHECK (((length(name) >= 1) AND (length(name) <= 128))),
    CONSTRAINT token_scopes_check CHECK ((cardinality(scopes) > 0)),
    CONSTRAINT token_sha256_check CHECK ((length(sha256) = 32))
);

ALTER TABLE headrace.token ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME headrace.token_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE headrace.views_flusher (
    name text NOT NULL,
    expires_at timestamp with time zone NOT NULL
);

CREATE TABLE headrace.views_hour (
    id text NOT NULL COLLATE pg_catalog."C",
    hour timestamp with time zone NOT NULL,
    class smallint NOT NULL,
    views bigint NOT NULL
)
WITH (fillfactor='85');

CREATE TABLE headrace.views_lease (
    shard integer NOT NULL,
    flusher text,
    expires_at timestamp with time zone
)
WITH (fillfactor='50');

CREATE TABLE headrace.views_shard (
    shard integer NOT NULL,
    through text DEFAULT '0-1'::text NOT NULL,
    corrections bigint DEFAULT 0 NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE headrace.views_tombstone (
    id text NOT NULL COLLATE pg_catalog."C",
    until_at timestamp with time zone NOT NULL,
    dropped bigint DEFAULT 0 NOT NULL
);

CREATE TABLE headrace.views_total (
    id text NOT NULL COLLATE pg_catalog."C",
    class smallint NOT NULL,
    total bigint NOT NULL
)
WITH (fillfactor='85');

CREATE TABLE headrace.views_unique (
    id text NOT NULL COLLATE pg_catalog."C",
    day date NOT NULL,
    viewers bigint NOT NULL
);

ALTER TABLE ONLY headrace.job_done ATTACH PARTITION headrace.job_done_rest DEFAULT;

ALTER TABLE ONLY headrace.alert
    ADD CONSTRAINT alert_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.audit
    ADD CONSTRAINT audit_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.console_link
    ADD CONSTRAINT console_link_pkey PRIMARY KEY (sha256);

ALTER TABLE ONLY headrace.console_session
    ADD CONSTRAINT console_session_pkey PRIMARY KEY (sha256);

ALTER TABLE ONLY headrace.cron
    ADD CONSTRAINT cron_pkey PRIMARY KEY (name);

ALTER TABLE ONLY headrace.feed_bar
    ADD CONSTRAINT feed_bar_pkey PRIMARY KEY (viewer, author, kind);

ALTER TABLE ONLY headrace.feed_follow
    ADD CONSTRAINT feed_follow_pkey PRIMARY KEY (viewer, author);

ALTER TABLE ONLY headrace.feed_index
    ADD CONSTRAINT feed_index_pkey PRIMARY KEY (is_only);

ALTER TABLE ONLY headrace.feed_marker
    ADD CONSTRAINT feed_marker_pkey PRIMARY KEY (viewer);

ALTER TABLE ONLY headrace.feed_name
    ADD CONSTRAINT feed_name_name_key UNIQUE (name);

ALTER TABLE ONLY headrace.feed_name
    ADD CONSTRAINT feed_name_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.feed_outbox
    ADD CONSTRAINT feed_outbox_kind_entity_version_key UNIQUE (kind, entity, version);

ALTER TABLE ONLY headrace.feed_outbox
    ADD CONSTRAINT feed_outbox_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.feed_post
    ADD CONSTRAINT feed_post_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.feed_version
    ADD CONSTRAINT feed_version_pkey PRIMARY KEY (kind, entity);

ALTER TABLE ONLY headrace.fetch_absent
    ADD CONSTRAINT fetch_absent_pkey PRIMARY KEY (consumer, seq);

ALTER TABLE ONLY headrace.fetch_before
    ADD CONSTRAINT fetch_before_pkey PRIMARY KEY (run_id, item);

ALTER TABLE ONLY headrace.fetch_change
    ADD CONSTRAINT fetch_change_pkey PRIMARY KEY (run_id, item);

ALTER TABLE ONLY headrace.fetch_consumer
    ADD CONSTRAINT fetch_consumer_pkey PRIMARY KEY (name);

ALTER TABLE ONLY headrace.fetch_count
    ADD CONSTRAINT fetch_count_pkey PRIMARY KEY (run_id, outcome);

ALTER TABLE ONLY headrace.fetch_customer
    ADD CONSTRAINT fetch_customer_pkey PRIMARY KEY (customer);

ALTER TABLE ONLY headrace.fetch_delivery
    ADD CONSTRAINT fetch_delivery_pkey PRIMARY KEY (consumer, customer, item);

ALTER TABLE ONLY headrace.fetch_host_outcome
    ADD CONSTRAINT fetch_host_outcome_pkey PRIMARY KEY (customer, host, outcome);

ALTER TABLE ONLY headrace.fetch_host
    ADD CONSTRAINT fetch_host_pkey PRIMARY KEY (customer, host);

ALTER TABLE ONLY headrace.fetch_item
    ADD CONSTRAINT fetch_item_pkey PRIMARY KEY (customer, item);

ALTER TABLE ONLY headrace.fetch_link
    ADD CONSTRAINT fetch_link_pkey PRIMARY KEY (customer, url);

ALTER TABLE ONLY headrace.fetch_mapping
    ADD CONSTRAINT fetch_mapping_pkey PRIMARY KEY (name);

ALTER TABLE ONLY headrace.fetch_pace
    ADD CONSTRAINT fetch_pace_pkey PRIMARY KEY (run_id, minute);

ALTER TABLE ONLY headrace.fetch_photo
    ADD CONSTRAINT fetch_photo_pkey PRIMARY KEY (sha256);

ALTER TABLE ONLY headrace.fetch_problem
    ADD CONSTRAINT fetch_problem_pkey PRIMARY KEY (run_id, id);

ALTER TABLE ONLY headrace.fetch_result
    ADD CONSTRAINT fetch_result_customer_item_version_key UNIQUE (customer, item, version);

ALTER TABLE ONLY headrace.fetch_result
    ADD CONSTRAINT fetch_result_pkey PRIMARY KEY (seq);

ALTER TABLE ONLY headrace.fetch_robots
    ADD CONSTRAINT fetch_robots_pkey PRIMARY KEY (host);

ALTER TABLE ONLY headrace.fetch_run
    ADD CONSTRAINT fetch_run_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.fetch_schema
    ADD CONSTRAINT fetch_schema_pkey PRIMARY KEY (plain);

ALTER TABLE ONLY headrace.fetch_source
    ADD CONSTRAINT fetch_source_pkey PRIMARY KEY (customer);

ALTER TABLE ONLY headrace.fetch_speed
    ADD CONSTRAINT fetch_speed_pkey PRIMARY KEY (customer, host, class_s);

ALTER TABLE ONLY headrace.fetch_staged
    ADD CONSTRAINT fetch_staged_pkey PRIMARY KEY (run_id, item);

ALTER TABLE ONLY headrace.fetch_webhook
    ADD CONSTRAINT fetch_webhook_id_key UNIQUE (id);

ALTER TABLE ONLY headrace.fetch_webhook
    ADD CONSTRAINT fetch_webhook_pkey PRIMARY KEY (customer);

ALTER TABLE ONLY headrace.fleet_decision
    ADD CONSTRAINT fleet_decision_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.fleet_plan
    ADD CONSTRAINT fleet_plan_pkey PRIMARY KEY (is_one);

ALTER TABLE ONLY headrace.fleet_slot
    ADD CONSTRAINT fleet_slot_pkey PRIMARY KEY (host, queue);

ALTER TABLE ONLY headrace.host
    ADD CONSTRAINT host_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.idempotency_key
    ADD CONSTRAINT idempotency_key_pkey PRIMARY KEY (caller, key);

ALTER TABLE ONLY headrace.job_count_fold
    ADD CONSTRAINT job_count_fold_pkey PRIMARY KEY (is_one);

ALTER TABLE ONLY headrace.job_done
    ADD CONSTRAINT job_done_pkey PRIMARY KEY (id, drop_at);

ALTER TABLE ONLY headrace.job_done_rest
    ADD CONSTRAINT job_done_rest_pkey PRIMARY KEY (id, drop_at);

ALTER TABLE ONLY headrace.job_failed
    ADD CONSTRAINT job_failed_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.job_group
    ADD CONSTRAINT job_group_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.job_lease
    ADD CONSTRAINT job_lease_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.job_progress
    ADD CONSTRAINT job_progress_pkey PRIMARY KEY (job_id);

ALTER TABLE ONLY headrace.job_unique
    ADD CONSTRAINT job_unique_pkey PRIMARY KEY (queue, key);

ALTER TABLE ONLY headrace.lane
    ADD CONSTRAINT lane_pkey PRIMARY KEY (limiter, name);

ALTER TABLE ONLY headrace.lane_queue
    ADD CONSTRAINT lane_queue_pkey PRIMARY KEY (limiter, lane, queue);

ALTER TABLE ONLY headrace.limiter
    ADD CONSTRAINT limiter_pkey PRIMARY KEY (name);

ALTER TABLE ONLY headrace.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (room, number);

ALTER TABLE ONLY headrace.object_store
    ADD CONSTRAINT object_store_pkey PRIMARY KEY (one);

ALTER TABLE ONLY headrace.queue_alias
    ADD CONSTRAINT queue_alias_pkey PRIMARY KEY (name);

ALTER TABLE ONLY headrace.queue_minute
    ADD CONSTRAINT queue_minute_pkey PRIMARY KEY (queue, minute);

ALTER TABLE ONLY headrace.queue
    ADD CONSTRAINT queue_name_key UNIQUE (name);

ALTER TABLE ONLY headrace.queue_override
    ADD CONSTRAINT queue_override_pkey PRIMARY KEY (queue);

ALTER TABLE ONLY headrace.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.queue_total
    ADD CONSTRAINT queue_total_pkey PRIMARY KEY (queue);

ALTER TABLE ONLY headrace.slot_allowance
    ADD CONSTRAINT slot_allowance_pkey PRIMARY KEY (queue, host);

ALTER TABLE ONLY headrace.token
    ADD CONSTRAINT token_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.token
    ADD CONSTRAINT token_sha256_key UNIQUE (sha256);

ALTER TABLE ONLY headrace.views_flusher
    ADD CONSTRAINT views_flusher_pkey PRIMARY KEY (name);

ALTER TABLE ONLY headrace.views_hour
    ADD CONSTRAINT views_hour_pkey PRIMARY KEY (id, hour, class);

ALTER TABLE ONLY headrace.views_lease
    ADD CONSTRAINT views_lease_pkey PRIMARY KEY (shard);

ALTER TABLE ONLY headrace.views_shard
    ADD CONSTRAINT views_shard_pkey PRIMARY KEY (shard);

ALTER TABLE ONLY headrace.views_tombstone
    ADD CONSTRAINT views_tombstone_pkey PRIMARY KEY (id);

ALTER TABLE ONLY headrace.views_total
    ADD CONSTRAINT views_total_pkey PRIMARY KEY (id, class);

ALTER TABLE ONLY headrace.views_unique
    ADD CONSTRAINT views_unique_pkey PRIMARY KEY (id, day);

CREATE UNIQUE INDEX alert_open ON headrace.alert USING btree (rule, subject) WHERE (cleared_at IS NULL);

CREATE INDEX alert_raised ON headrace.alert USING btree (raised_at);

CREATE INDEX audit_at ON headrace.audit USING btree (at);

CREATE INDEX console_session_expires ON headrace.console_session USING btree (expires_at);

CREATE INDEX cron_next ON headrace.cron USING btree (next_at) WHERE (NOT paused);

CREATE INDEX feed_bar_block ON headrace.feed_bar USING btree (author, viewer) WHERE (kind = 'block'::text);

CREATE INDEX feed_follow_author ON headrace.feed_follow USING btree (author, followed_at, viewer);

CREATE INDEX feed_outbox_unswept ON headrace.feed_outbox USING btree (id) WHERE (NOT is_swept);

CREATE INDEX feed_post_author ON headrace.feed_post USING btree (author, score, id) WHERE (state = 0);

CREATE INDEX fetch_host_host ON headrace.fetch_host USING btree (host, customer);

CREATE INDEX fetch_link_copied ON headrace.fetch_link USING btree (customer, copied_at) WHERE (copied_at IS NOT NULL);

CREATE INDEX fetch_link_failed ON headrace.fetch_link USING btree (customer, url) WHERE (outcome <> ALL (ARRAY['stored'::text, 'unchanged'::text]));

CREATE INDEX fetch_link_recheck ON headrace.fetch_link USING btree (recheck_at) WHERE (recheck_at IS NOT NULL);

CREATE INDEX fetch_link_url ON headrace.fetch_link USING btree (url);

CREATE INDEX fetch_need_bad ON headrace.fetch_need USING btree (run_id, id) WHERE ((outcome ~~ 'failed:%'::text) OR (outcome ~~ 'refused:%'::text) OR is_late);

CREATE UNIQUE INDEX fetch_need_photo ON headrace.fetch_need USING btree (run_id, item, hashtextextended(url, (0)::bigint));

CREATE INDEX fetch_result_customer ON headrace.fetch_result USING btree (customer, seq);

CREATE INDEX fetch_run_customer ON headrace.fetch_run USING btree (customer, id);

CREATE INDEX fleet_decision_at ON headrace.fleet_decision USING btree (at);

CREATE INDEX idempotency_key_created ON headrace.idempotency_key USING btree (created_at);

CREATE INDEX job_count_at ON headrace.job_count USING btree (at);

CREATE INDEX job_done_queue ON ONLY headrace.job_done USING btree (queue, id);

CREATE INDEX job_done_rest_drop ON headrace.job_done_rest USING btree (drop_at);

CREATE INDEX job_done_rest_queue_id_idx ON headrace.job_done_rest USING btree (queue, id);

CREATE INDEX job_failed_ended ON headrace.job_failed USING btree (ended_at);

CREATE INDEX job_failed_lane ON headrace.job_failed USING btree (lane, id) WHERE (lane IS NOT NULL);

CREATE INDEX job_failed_queue ON headrace.job_failed USING btree (queue, id);

CREATE INDEX job_group_opened ON headrace.job_group USING btree (opened_at) WHERE (opened_at IS NOT NULL);

CREATE INDEX job_lease_host ON headrace.job_lease USING btree (host);

CREATE INDEX job_progress_lease ON headrace.job_progress USING btree (lease_id);

CREATE INDEX job_ready_claim ON headrace.job_ready USING btree (queue, priority, run_at, id);

CREATE UNIQUE INDEX job_ready_id ON headrace.job_ready USING btree (id);

CREATE INDEX job_ready_lane ON headrace.job_ready USING btree (lane, id) WHERE (lane IS NOT NULL);

CREATE INDEX job_ready_lane_due ON headrace.job_ready USING btree (run_at) WHERE (lane IS NOT NULL);

CREATE INDEX lane_event_queue ON headrace.lane_event USING btree (queue, id);

CREATE INDEX lane_job_claim ON headrace.lane_job USING btree (queue, lane, priority, id);

CREATE UNIQUE INDEX lane_job_id ON headrace.lane_job USING btree (id);

CREATE INDEX lane_queue_ready ON headrace.lane_queue USING btree (queue, ready_at) WHERE (ready_at < 'infinity'::timestamp with time zone);

CREATE INDEX queue_minute_minute ON headrace.queue_minute USING btree (minute);

CREATE INDEX slot_allowance_host ON headrace.slot_allowance USING btree (host);

CREATE UNIQUE INDEX token_name_taken ON headrace.token USING btree (name) WHERE (revoked_at IS NULL);

CREATE INDEX views_hour_range ON headrace.views_hour USING brin (hour) WITH (pages_per_range='32', autosummarize='on');

CREATE INDEX views_unique_day ON headrace.views_unique USING btree (day);

ALTER INDEX headrace.job_done_pkey ATTACH PARTITION headrace.job_done_rest_pkey;

ALTER INDEX headrace.job_done_queue ATTACH PARTITION headrace.job_done_rest_queue_id_idx;

ALTER TABLE ONLY headrace.console_link
    ADD CONSTRAINT console_link_token_id_fkey FOREIGN KEY (token_id) REFERENCES headrace.token(id) ON DELETE CASCADE;

ALTER TABLE ONLY headrace.console_session
    ADD CONSTRAINT console_session_token_id_fkey FOREIGN KEY (token_id) REFERENCES headrace.token(id) ON DELETE CASCADE;

ALTER TABLE ONLY headrace.fetch_count
    ADD CONSTRAINT fetch_count_run_id_fkey FOREIGN KEY (run_id) REFERENCES headrace.fetch_run(id) ON DELETE CASCADE;

ALTER TABLE ONLY headrace.fetch_link
    ADD CONSTRAINT fetch_link_sha256_fkey FOREIGN KEY (sha256) REFERENCES headrace.fetch_photo(sha256);

ALTER TABLE ONLY headrace.fetch_problem
    ADD CONSTRAINT fetch_problem_run_id_fkey FOREIGN KEY (run_id) REFERENCES headrace.fetch_run(id) ON DELETE CASCADE;

ALTER TABLE ONLY headrace.fetch_run
    ADD CONSTRAINT fetch_run_customer_fkey FOREIGN KEY (customer) REFERENCES headrace.fetch_customer(customer);

ALTER TABLE ONLY headrace.fetch_source
    ADD CONSTRAINT fetch_source_customer_fkey FOREIGN KEY (customer) REFERENCES headrace.fetch_customer(customer);

ALTER TABLE ONLY headrace.fetch_webhook
    ADD CONSTRAINT fetch_webhook_customer_fkey FOREIGN KEY (customer) REFERENCES headrace.fetch_customer(customer);

ALTER TABLE ONLY headrace.job_progress
    ADD CONSTRAINT job_progress_lease_id_fkey FOREIGN KEY (lease_id) REFERENCES headrace.job_lease(id) ON DELETE CASCADE;

ALTER TABLE ONLY headrace.queue_alias
    ADD CONSTRAINT queue_alias_queue_fkey FOREIGN KEY (queue) REFERENCES headrace.queue(id);

ALTER TABLE ONLY headrace.queue_override
    ADD CONSTRAINT queue_override_queue_fkey FOREIGN KEY (queue) REFERENCES headrace.queue(id);

ALTER TABLE ONLY headrace.slot_allowance
    ADD CONSTRAINT slot_allowance_host_fkey FOREIGN KEY (host) REFERENCES headrace.host(id) ON DELETE CASCADE;

ALTER TABLE ONLY headrace.views_lease
    ADD CONSTRAINT views_lease_shard_fkey FOREIGN KEY (shard) REFERENCES headrace.views_shard(shard);
