-- Views: totals and hours per entity, the flush offset of each shard, and the flusher that owns it.

-- `through`: id of the last stream entry counted here. It moves in the transaction that counts.
-- Every change of a shard's counts locks this row. `corrections` is the number of the last deletion
-- or move between classes, `changes` counts the rows of views_change, `setups` counts how often the
-- stream was set up in Valkey.
CREATE TABLE headrace.views_shard (
    shard integer PRIMARY KEY,
    through text NOT NULL DEFAULT '0-1',
    setups bigint NOT NULL DEFAULT 0,
    corrections bigint NOT NULL DEFAULT 0,
    changes bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- The flushers that are alive, and the shards each one owns. Two flushers of one shard do no harm.
-- A lease holds from `renewed_at` to `expires_at`. Before: the clock was set back.
CREATE TABLE headrace.views_flusher (
    name text PRIMARY KEY,
    renewed_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL
);
CREATE TABLE headrace.views_lease (
    shard integer PRIMARY KEY REFERENCES headrace.views_shard,
    flusher text,
    renewed_at timestamptz,
    expires_at timestamptz
) WITH (fillfactor = 50);

-- class: 0 human, 1 bot, 2 owner, 3 staff; plus 4 times the number of a counter.
CREATE TABLE headrace.views_counter (
    name text COLLATE "C" PRIMARY KEY,
    number smallint NOT NULL UNIQUE
);
CREATE TABLE headrace.views_total (
    id text COLLATE "C",
    class smallint,
    total bigint NOT NULL,
    PRIMARY KEY (id, class)
) WITH (fillfactor = 85);
-- One partition per month of UTC; 0002_history.sql creates them and turns old ones into days.
CREATE TABLE headrace.views_hour (
    id text COLLATE "C",
    hour timestamptz,
    class smallint,
    views bigint NOT NULL,
    PRIMARY KEY (id, hour, class)
) PARTITION BY RANGE (hour);
-- Rows arrive in order of time, so a BRIN index finds the hours of a top list.
CREATE INDEX views_hour_range ON headrace.views_hour USING brin (hour)
    WITH (pages_per_range = 32, autosummarize = on);

-- Estimated viewers per entity and day, with Valkey's HyperLogLog, kept for views.viewers_kept.
CREATE TABLE headrace.views_unique (
    id text COLLATE "C",
    day date,
    viewers bigint NOT NULL,
    sketch bytea NOT NULL,
    PRIMARY KEY (id, day)
);
-- The flusher removes whole days.
CREATE INDEX views_unique_day ON headrace.views_unique (day);

-- Deleted entities. Until `until_at` their hits are dropped; `dropped` counts them.
CREATE TABLE headrace.views_tombstone (
    id text COLLATE "C" PRIMARY KEY,
    until_at timestamptz NOT NULL,
    dropped bigint NOT NULL DEFAULT 0
);

-- Deletions and moves between classes. Valkey is changed after the commit: a flusher repeats there
-- what it did not receive, or lost.
CREATE TABLE headrace.views_correction (
    shard integer,
    number bigint,
    id text COLLATE "C" NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (shard, number)
);

-- Create the shards if there are none. Return how many exist.
CREATE FUNCTION headrace.ensure_view_shards_v1(p_shards integer)
RETURNS integer LANGUAGE plpgsql AS $$
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

-- Assign numbers to new names of counters, up to 1,000. Return the numbers of these names.
CREATE FUNCTION headrace.ensure_view_counters_v1(p_names text[])
RETURNS SETOF headrace.views_counter LANGUAGE plpgsql AS $$
BEGIN
    LOCK TABLE headrace.views_counter IN SHARE ROW EXCLUSIVE MODE;
    INSERT INTO headrace.views_counter (name, number)
    SELECT n.name, n.number FROM (
        SELECT g.name, row_number() OVER () + (
            SELECT coalesce(max(c.number), 0) FROM headrace.views_counter c) AS number
        FROM unnest(p_names) g (name)
        WHERE NOT EXISTS (SELECT FROM headrace.views_counter c WHERE c.name = g.name)
    ) n WHERE n.number <= 1000;
    RETURN QUERY SELECT c.* FROM headrace.views_counter c WHERE c.name = ANY (p_names);
END $$;

-- Renew a flusher and assign its share of the shards: those it owns, then free or expired ones.
CREATE FUNCTION headrace.lease_view_shards_v1(p_name text, p_lease_s double precision)
RETURNS TABLE (shard integer, through text, setups bigint, corrections bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz;
    v_until_at timestamptz;
    v_share integer;
BEGIN
    LOCK TABLE headrace.views_flusher IN SHARE ROW EXCLUSIVE MODE;
    -- After the lock, so that it is later than every other renewal.
    v_now := clock_timestamp();
    v_until_at := v_now + p_lease_s * interval '1 second';
    INSERT INTO headrace.views_flusher (name, renewed_at, expires_at)
    VALUES (p_name, v_now, v_until_at)
    ON CONFLICT (name) DO UPDATE
    SET renewed_at = excluded.renewed_at, expires_at = excluded.expires_at;
    DELETE FROM headrace.views_flusher WHERE v_now NOT BETWEEN renewed_at AND expires_at;
    v_share := (SELECT ceil((SELECT count(*) FROM headrace.views_shard)::numeric / count(*))
        FROM headrace.views_flusher);
    UPDATE headrace.views_lease l SET flusher = NULL, renewed_at = NULL, expires_at = NULL
    WHERE l.flusher = p_name AND l.shard NOT IN (
        SELECT k.shard FROM headrace.views_lease k WHERE k.flusher = p_name
        ORDER BY k.shard LIMIT v_share);
    UPDATE headrace.views_lease l
    SET flusher = p_name, renewed_at = v_now, expires_at = v_until_at
    WHERE l.shard IN (
        SELECT k.shard FROM headrace.views_lease k
        WHERE k.flusher = p_name OR k.flusher IS NULL
            OR v_now NOT BETWEEN k.renewed_at AND k.expires_at
        ORDER BY (k.flusher = p_name) IS NOT TRUE, k.shard LIMIT v_share);
    RETURN QUERY SELECT s.shard, s.through, s.setups, s.corrections
        FROM headrace.views_shard s JOIN headrace.views_lease l USING (shard)
        WHERE l.flusher = p_name;
END $$;

-- Release the shards of a flusher that ends.
CREATE FUNCTION headrace.leave_view_shards_v1(p_name text) RETURNS void LANGUAGE sql AS $$
    UPDATE headrace.views_lease SET flusher = NULL, renewed_at = NULL, expires_at = NULL
    WHERE flusher = p_name;
    DELETE FROM headrace.views_flusher WHERE name = p_name;
$$;

-- Count the stream entries after p_from up to and including p_to, and move the offset.
-- NULL: the offset is no longer p_from, or the stream was set up since p_setups was read, which was
-- before the entries. Nothing was done: Valkey may have lost them and given their ids again.
-- Otherwise: the deleted entities among p_ids, whose views were dropped.
CREATE FUNCTION headrace.flush_views_v1(
    p_shard integer, p_setups bigint, p_from text, p_to text,
    p_ids text[], p_classes smallint[], p_hours timestamptz[], p_views bigint[]
) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    v_dead text[] := '{}';
    v_history record;
BEGIN
    UPDATE headrace.views_shard s SET through = p_to
    WHERE s.shard = p_shard AND s.through = p_from AND s.setups = p_setups;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    -- After the lock, which excludes the end of a month.
    SELECT * INTO v_history FROM headrace.views_history;
    PERFORM headrace.ensure_view_months_v1(
        ARRAY(SELECT DISTINCT h FROM unnest(p_hours) h WHERE h >= v_history.hours_from));
    IF EXISTS (SELECT FROM headrace.views_tombstone) THEN
        WITH dead AS (
            UPDATE headrace.views_tombstone t SET dropped = t.dropped + g.views
            FROM (
                SELECT u.id, sum(u.views) AS views
                FROM unnest(p_ids, p_views) u (id, views) GROUP BY 1
            ) g
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
    WHERE u.hour >= v_history.hours_from AND (v_dead = '{}' OR u.id <> ALL (v_dead))
    ORDER BY 1, 2, 3
    ON CONFLICT (id, hour, class) DO UPDATE SET views = h.views + excluded.views;
    IF EXISTS (SELECT FROM unnest(p_hours) h WHERE h < v_history.hours_from) THEN
        -- Hits that waited for PostgreSQL longer than hours are kept.
        INSERT INTO headrace.views_day AS d (id, day, class, views)
        SELECT u.id, (u.hour AT TIME ZONE v_history.time_zone)::date, u.class, sum(u.views)
        FROM unnest(p_ids, p_classes, p_hours, p_views) u (id, class, hour, views)
        WHERE u.hour < v_history.hours_from AND (v_dead = '{}' OR u.id <> ALL (v_dead))
        GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
        ON CONFLICT (id, day, class) DO UPDATE SET views = d.views + excluded.views;
    END IF;
    IF v_history.keeps_changes THEN
        PERFORM headrace.note_view_changes_v1(
            p_shard, array_agg(u.id), array_agg(u.class), array_agg(u.hour), array_agg(u.views))
        FROM unnest(p_ids, p_classes, p_hours, p_views) u (id, class, hour, views)
        WHERE u.id <> ALL (v_dead);
    END IF;
    RETURN v_dead;
END $$;

-- The number before the first correction of this timeline. A failover begins a new timeline and may
-- lose commits. So no number is used again: Valkey may have applied the lost correction.
CREATE FUNCTION headrace.view_corrections_base_v1() RETURNS bigint LANGUAGE sql AS $$
    SELECT (('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint - 1)
        << 40;
$$;

-- Number a deletion or move. Shards that PostgreSQL lost are created again. Until the commit the
-- lock of the shard's row excludes a flush.
CREATE FUNCTION headrace.note_view_correction_v1(p_id text, p_shard integer, p_shards integer)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_number bigint;
BEGIN
    PERFORM headrace.ensure_view_shards_v1(p_shards);
    UPDATE headrace.views_shard s
    SET corrections = greatest(s.corrections, headrace.view_corrections_base_v1()) + 1
    WHERE s.shard = p_shard RETURNING s.corrections INTO STRICT v_number;
    INSERT INTO headrace.views_correction (shard, number, id) VALUES (p_shard, v_number, p_id);
    RETURN v_number;
END $$;

-- Delete an entity and leave a tombstone.
-- Return its human total, and the shard's new number of corrections.
CREATE FUNCTION headrace.delete_views_v1(
    p_id text, p_shard integer, p_shards integer, p_kept_s double precision,
    OUT total bigint, OUT until_at timestamptz, OUT corrections bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    corrections := headrace.note_view_correction_v1(p_id, p_shard, p_shards);
    INSERT INTO headrace.views_tombstone AS t (id, until_at)
    VALUES (p_id, now() + p_kept_s * interval '1 second')
    ON CONFLICT (id) DO UPDATE SET until_at = excluded.until_at
    RETURNING t.until_at INTO until_at;
    WITH gone AS (
        DELETE FROM headrace.views_total t WHERE t.id = p_id RETURNING t.class, t.total
    ) SELECT coalesce(sum(g.total) FILTER (WHERE g.class = 0), 0) INTO total FROM gone g;
    DELETE FROM headrace.views_hour h WHERE h.id = p_id;
    DELETE FROM headrace.views_day d WHERE d.id = p_id;
    DELETE FROM headrace.views_unique u WHERE u.id = p_id;
    DELETE FROM headrace.views_mark m WHERE m.id = p_id;
    IF (SELECT s.keeps_changes FROM headrace.views_history s) THEN
        PERFORM headrace.note_view_changes_v1(p_shard, ARRAY[p_id], '{-1}', ARRAY[now()], '{0}');
    END IF;
END $$;

-- Move an entity's views of whole hours between classes.
-- Return how many moved, and the shard's new number of corrections.
CREATE FUNCTION headrace.reclassify_views_v1(
    p_id text, p_shard integer, p_shards integer, p_from timestamptz, p_to timestamptz,
    p_source smallint, p_target smallint,
    OUT views bigint, OUT corrections bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_shift smallint := p_target - p_source;
    v_classes smallint[];
    v_hours timestamptz[];
    v_views bigint[];
BEGIN
    corrections := headrace.note_view_correction_v1(p_id, p_shard, p_shards);
    WITH moved AS (
        DELETE FROM headrace.views_hour h
        WHERE h.id = p_id AND h.class % 4 = p_source AND h.hour >= p_from AND h.hour < p_to
            AND h.hour >= (SELECT s.hours_from FROM headrace.views_history s)
        RETURNING h.class, h.hour, h.views
    ), placed AS (
        INSERT INTO headrace.views_hour AS h (id, hour, class, views)
        SELECT p_id, m.hour, m.class + v_shift, m.views FROM moved m
        ON CONFLICT (id, hour, class) DO UPDATE SET views = h.views + excluded.views
    )
    SELECT coalesce(sum(m.views) FILTER (WHERE m.class < 4), 0),
        array_agg(m.class), array_agg(m.hour), array_agg(m.views)
    INTO views, v_classes, v_hours, v_views FROM moved m;
    IF v_classes IS NULL THEN
        RETURN;
    END IF;
    SELECT array_agg(g.class), array_agg(g.hour), array_agg(g.views)
    INTO v_classes, v_hours, v_views FROM (
        SELECT u.class, u.hour, -u.views AS views
        FROM unnest(v_classes, v_hours, v_views) u (class, hour, views)
        UNION ALL
        SELECT (u.class + v_shift)::smallint, u.hour, u.views
        FROM unnest(v_classes, v_hours, v_views) u (class, hour, views)
    ) g;
    INSERT INTO headrace.views_total AS t (id, class, total)
    SELECT p_id, u.class, sum(u.views) FROM unnest(v_classes, v_views) u (class, views) GROUP BY 2
    ON CONFLICT (id, class) DO UPDATE SET total = t.total + excluded.total;
    IF (SELECT s.keeps_changes FROM headrace.views_history s) THEN
        PERFORM headrace.note_view_changes_v1(
            p_shard, array_fill(p_id, ARRAY[cardinality(v_classes)]), v_classes, v_hours, v_views);
    END IF;
END $$;
