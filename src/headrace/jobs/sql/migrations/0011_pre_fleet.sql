-- The fleet: what it did (minutes, totals), what it is to do (the plan), why (decisions), what is wrong (alerts).

-- What each queue did in each minute, added up by whoever runs its jobs.
CREATE TABLE headrace.queue_minute (
    queue integer NOT NULL,
    minute timestamptz NOT NULL,
    done bigint NOT NULL,
    failed bigint NOT NULL,
    retried bigint NOT NULL,
    lost bigint NOT NULL,
    calls bigint NOT NULL,
    run_s double precision NOT NULL,        -- handlers' run time
    wait_s double precision NOT NULL,       -- from due to claimed, over all jobs that ended
    wait_max_s double precision NOT NULL,
    slot_s double precision NOT NULL,       -- life time of the slots that worked it
    PRIMARY KEY (queue, minute)
) WITH (fillfactor = 50);
CREATE INDEX queue_minute_minute ON headrace.queue_minute (minute);

-- The same summed up since ever. Never goes down, so whoever differences it at his own pace loses nothing.
CREATE TABLE headrace.queue_total (
    queue integer PRIMARY KEY,
    done bigint NOT NULL,
    failed bigint NOT NULL,
    retried bigint NOT NULL,
    lost bigint NOT NULL,
    calls bigint NOT NULL,
    run_s double precision NOT NULL,
    wait_s double precision NOT NULL,
    slot_s double precision NOT NULL
) WITH (fillfactor = 50);

ALTER TABLE headrace.host ADD jobs_ended bigint NOT NULL DEFAULT 0;

-- The one plan. `leader` may write it until `leads_until`; `term` grows with each change of the leader and `version`
-- with each change of the map, so that a leader which was stopped and wakes up is refused.
CREATE TABLE headrace.fleet_plan (
    is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one),
    leader text,
    leads_until timestamptz NOT NULL DEFAULT '-infinity',
    term bigint NOT NULL DEFAULT 0,
    version bigint NOT NULL DEFAULT 0,
    planned_at timestamptz
) WITH (fillfactor = 50);
INSERT INTO headrace.fleet_plan DEFAULT VALUES;

-- Its map: how many slots of a host belong to a queue. What is in no row floats.
CREATE TABLE headrace.fleet_slot (
    host text NOT NULL,
    queue integer NOT NULL,
    slots integer NOT NULL CHECK (slots > 0),
    PRIMARY KEY (host, queue)
) WITH (fillfactor = 50);

CREATE TABLE headrace.fleet_decision (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    version bigint NOT NULL,
    host text NOT NULL,
    queue text NOT NULL,
    before integer NOT NULL,
    after integer NOT NULL,
    code text NOT NULL,
    why text NOT NULL
);
CREATE INDEX fleet_decision_at ON headrace.fleet_decision (at);

-- One row a time that a rule was broken; cleared_at NULL: it still is.
CREATE TABLE headrace.alert (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rule text NOT NULL,
    subject text NOT NULL,
    text text NOT NULL,
    raised_at timestamptz NOT NULL DEFAULT now(),
    cleared_at timestamptz,
    is_raise_told boolean NOT NULL DEFAULT false,   -- the webhook took it
    is_clear_told boolean NOT NULL DEFAULT false
);
CREATE UNIQUE INDEX alert_open ON headrace.alert (rule, subject) WHERE cleared_at IS NULL;
CREATE INDEX alert_raised ON headrace.alert (raised_at);

-- Add what a host's slots did since its last call. Rows are taken in order of queue, so that hosts cannot lock each
-- other out.
CREATE FUNCTION headrace.add_counts_v1(
    p_host bigint, p_queues integer[], p_done bigint[], p_failed bigint[], p_retried bigint[],
    p_lost bigint[], p_calls bigint[], p_run_s double precision[], p_wait_s double precision[],
    p_wait_max_s double precision[], p_slot_s double precision[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
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

-- Count the due jobs of each queue up to p_max through the index alone, and tell how old the oldest is. Jobs of lanes
-- count as far as their lane may start them now; its journal counts too, since nobody folds it before somebody claims.
-- Never a sequential scan: its plan is kept, and the tables may have been empty when it was made.
CREATE FUNCTION headrace.count_waiting_v1(p_max integer)
RETURNS TABLE (queue integer, jobs bigint, oldest_age_s double precision)
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET enable_bitmapscan = off AS $$
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

-- Write the plan of a leader that still leads: its new version, or NULL where it was replaced meanwhile or another
-- writes at this moment. One statement, so that a leader stopped at any point holds no lock.
CREATE FUNCTION headrace.write_plan_v1(
    p_leader text, p_term bigint, p_hosts text[], p_queues integer[], p_slots integer[],
    p_changed_hosts text[], p_changed_queues text[], p_befores integer[], p_afters integer[],
    p_codes text[], p_whys text[]
) RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off AS $$
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
