-- How many slots of a queue with a maximum each host may work at once, floating slots included.
-- The sum over hosts never exceeds the maximum: a host gives up before another receives. An allowance ends with its
-- host row, 5 s after that expired, since the host's slots are killed within that time.
CREATE TABLE headrace.slot_allowance (
    queue integer NOT NULL,
    host bigint NOT NULL REFERENCES headrace.host (id) ON DELETE CASCADE,
    slots integer NOT NULL CHECK (slots >= 0),
    is_short boolean NOT NULL DEFAULT false,    -- the host asked for more
    call bigint NOT NULL,                       -- the host's call that wrote the row: an older one changes nothing
    PRIMARY KEY (queue, host)
) WITH (fillfactor = 50);
CREATE INDEX slot_allowance_host ON headrace.slot_allowance (host);

-- Slots that other hosts than p_host may work of each queue: what they hold, or what the plan binds to them if that is
-- more. The plan counts up to the queue's maximum p_mosts, so that the sum of all is never above it.
CREATE FUNCTION headrace.slots_elsewhere_v1(p_host bigint, p_queues integer[], p_mosts integer[])
RETURNS TABLE (queue integer, slots bigint) LANGUAGE sql VOLATILE AS $$
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

-- Change the allowances of a host and return them, a row for each queue; NULL: the queue has no maximum. The host
-- works p_used slots of a queue now, keeps to p_kept from the moment it sent this, and would work p_wanted.
-- p_call grows with each call of the host: a call that arrives after a later one changes nothing.
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
