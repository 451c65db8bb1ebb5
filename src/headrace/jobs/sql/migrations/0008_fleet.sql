-- Functions of the fleet.

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
CREATE FUNCTION headrace.write_plan_v1(p_leader text, p_term bigint, p_slots json, p_moves json)
RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off AS $$
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
        SELECT FROM json_to_recordset(p_slots) AS r(host text, queue integer)
        WHERE r.host = s.host AND r.queue = s.queue);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    INSERT INTO headrace.fleet_slot AS s (host, queue, slots)
    SELECT r.* FROM json_to_recordset(p_slots) AS r(host text, queue integer, slots integer)
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
    FROM json_to_recordset(p_moves) AS r(
        host text, queue text, before integer, after integer, code text, why text);
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
-- maximum. A request (SlotRequest) has the slots that the host works now, those that it keeps to
-- from the moment it sent this call, and those that it would work. p_call grows with each call of
-- the host: a call that arrives after a later one has no effect.
CREATE FUNCTION headrace.allow_slots_v1(p_host bigint, p_call bigint, p_requests json)
RETURNS TABLE (queue integer, slots integer) LANGUAGE plpgsql AS $$
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
            SELECT q.id AS queue, u.used, u.kept, u.wanted, q.slots_max
            FROM json_to_recordset(p_requests) AS u(
                queue_id integer, used integer, kept integer, wanted integer)
            JOIN headrace.queue_setting q ON q.id = u.queue_id
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
            SELECT q.slots_max INTO v_slots_max FROM headrace.queue_setting q
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
