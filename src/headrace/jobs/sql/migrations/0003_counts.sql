-- Functions that count jobs.

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
               coalesce(sum(g.cancelled), 0) AS cancelled,
               coalesce(sum(g.retried), 0) AS retried, coalesce(sum(g.lost), 0) AS lost,
               coalesce(sum(g.calls), 0) AS calls, coalesce(sum(g.claimed), 0) AS claimed,
               coalesce(sum(g.run_s), 0) AS run_s, coalesce(sum(g.wait_s), 0) AS wait_s,
               coalesce(max(g.wait_max_s), 0) AS wait_max_s, coalesce(sum(g.slot_s), 0) AS slot_s
        FROM deleted g GROUP BY 1, 2
    ), minutes AS (
        INSERT INTO headrace.queue_minute AS m
            (queue, minute, done, failed, cancelled, retried, lost, calls, claimed, run_s, wait_s,
                wait_max_s, slot_s)
        SELECT s.queue, s.minute, s.done, s.failed, s.cancelled, s.retried, s.lost, s.calls,
               s.claimed, s.run_s, s.wait_s, s.wait_max_s, s.slot_s FROM sums s
        ON CONFLICT (queue, minute) DO UPDATE SET
            done = m.done + excluded.done, failed = m.failed + excluded.failed,
            cancelled = m.cancelled + excluded.cancelled,
            retried = m.retried + excluded.retried, lost = m.lost + excluded.lost,
            calls = m.calls + excluded.calls, claimed = m.claimed + excluded.claimed,
            run_s = m.run_s + excluded.run_s, wait_s = m.wait_s + excluded.wait_s,
            slot_s = m.slot_s + excluded.slot_s,
            wait_max_s = greatest(m.wait_max_s, excluded.wait_max_s)
    ), totals AS (
        INSERT INTO headrace.queue_total AS t
            (queue, done, failed, cancelled, retried, lost, calls, run_s, wait_s, slot_s)
        SELECT s.queue, sum(s.done), sum(s.failed), sum(s.cancelled), sum(s.retried), sum(s.lost),
               sum(s.calls), sum(s.run_s), sum(s.wait_s), sum(s.slot_s) FROM sums s GROUP BY s.queue
        ON CONFLICT (queue) DO UPDATE SET
            done = t.done + excluded.done, failed = t.failed + excluded.failed,
            cancelled = t.cancelled + excluded.cancelled,
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

-- Count the backlog of each queue up to p_max and store it in the current minute. Return it with
-- the totals, by name.
CREATE FUNCTION headrace.record_backlog_v1(p_max integer)
RETURNS TABLE (
    queue text, ready integer, scheduled integer, running integer, failed_kept integer,
    quarantined integer, oldest_s double precision, done bigint, failed bigint,
    cancelled bigint, retried bigint, lost bigint, run_s double precision, wait_s double precision
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH counted AS MATERIALIZED (
        SELECT c.queue AS id, (c.ready + c.laned)::integer AS ready,
               c.scheduled::integer AS scheduled, c.leased::integer AS running,
               c.failed::integer AS failed_kept, c.quarantined::integer AS quarantined,
               coalesce(extract(epoch FROM now() - c.oldest_at), 0)::double precision AS oldest_s
        FROM headrace.queue_counts_v1(NULL, p_max) c
    ), stored AS (
        INSERT INTO headrace.queue_minute AS m
            (queue, minute, done, failed, retried, lost, calls, run_s, wait_s, wait_max_s, slot_s,
                ready, scheduled, running, failed_kept, oldest_s)
        SELECT c.id, date_trunc('minute', now()), 0, 0, 0, 0, 0, 0, 0, 0, 0,
               c.ready, c.scheduled, c.running, c.failed_kept, c.oldest_s
        FROM counted c
        WHERE c.ready + c.scheduled + c.running + c.failed_kept > 0 OR EXISTS (
            SELECT FROM headrace.queue_minute o
            WHERE o.queue = c.id AND o.minute = date_trunc('minute', now()))
        ORDER BY c.id
        ON CONFLICT (queue, minute) DO UPDATE SET
            ready = excluded.ready, scheduled = excluded.scheduled, running = excluded.running,
            failed_kept = excluded.failed_kept, oldest_s = excluded.oldest_s
    )
    SELECT q.name, c.ready, c.scheduled, c.running, c.failed_kept, c.quarantined, c.oldest_s,
           coalesce(t.done, 0), coalesce(t.failed, 0), coalesce(t.cancelled, 0),
           coalesce(t.retried, 0), coalesce(t.lost, 0), coalesce(t.run_s, 0), coalesce(t.wait_s, 0)
    FROM counted c
    JOIN headrace.queue q ON q.id = c.id
    LEFT JOIN headrace.queue_total t ON t.queue = c.id
    ORDER BY q.name;
END $$;

-- Sum minutes to hours: the last two stored hours again, and all later ones.
CREATE FUNCTION headrace.sum_hours_v1() RETURNS void LANGUAGE sql
SET enable_seqscan = off SET jit = off AS $$
    INSERT INTO headrace.queue_hour AS h
        (queue, hour, done, failed, cancelled, retried, lost, claimed, calls, run_s, wait_s,
            wait_max_s, slot_s, ready, scheduled, running, failed_kept, oldest_s)
    SELECT m.queue, date_trunc('hour', m.minute, 'UTC'), sum(m.done), sum(m.failed),
           sum(m.cancelled), sum(m.retried), sum(m.lost), sum(m.claimed), sum(m.calls),
           sum(m.run_s), sum(m.wait_s), max(m.wait_max_s), sum(m.slot_s),
           max(m.ready), max(m.scheduled), max(m.running), max(m.failed_kept), max(m.oldest_s)
    FROM headrace.queue_minute m
    WHERE m.minute >= coalesce(
        (SELECT max(l.hour) FROM headrace.queue_hour l) - interval '1 hour', '-infinity')
    GROUP BY 1, 2 ORDER BY 1, 2
    ON CONFLICT (queue, hour) DO UPDATE SET
        done = excluded.done, failed = excluded.failed, cancelled = excluded.cancelled,
        retried = excluded.retried, lost = excluded.lost, claimed = excluded.claimed,
        calls = excluded.calls, run_s = excluded.run_s, wait_s = excluded.wait_s,
        wait_max_s = excluded.wait_max_s, slot_s = excluded.slot_s, ready = excluded.ready,
        scheduled = excluded.scheduled, running = excluded.running,
        failed_kept = excluded.failed_kept, oldest_s = excluded.oldest_s;
$$;

-- Delete up to p_max rows of a table whose moment p_column was p_kept_s ago, oldest first, without
-- waiting for locks. Return how many.
CREATE FUNCTION headrace.drop_old_v1(
    p_table text, p_column text, p_kept_s double precision, p_max integer
) RETURNS integer LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_rows integer;
BEGIN
    EXECUTE format(
        'DELETE FROM headrace.%1$I WHERE ctid = ANY(ARRAY('
        ' SELECT ctid FROM headrace.%1$I WHERE %2$I <= now() - $1 * interval ''1 s'''
        ' ORDER BY %2$I LIMIT $2 FOR UPDATE SKIP LOCKED))', p_table, p_column)
    USING p_kept_s, p_max;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    RETURN v_rows;
END $$;

-- Add the counts that only a host has: calls, run time, slot time and ended jobs. Then fold.
CREATE FUNCTION headrace.add_counts_v1(p_host bigint, p_ended bigint, p_counts json)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.job_count (queue, calls, run_s, slot_s)
    SELECT r.* FROM json_to_recordset(p_counts) AS r(
        queue_id integer, calls integer, run_s double precision, slot_s double precision);
    UPDATE headrace.host SET jobs_ended = jobs_ended + p_ended WHERE id = p_host AND p_ended > 0;
    PERFORM headrace.fold_counts_v1(10000);
END $$;
