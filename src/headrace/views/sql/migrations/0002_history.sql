-- History: a partition of hours per month of UTC, and the days that replace it after its retention.

-- Views by day of the time zone. Each view is counted in one of views_hour and views_day.
CREATE TABLE headrace.views_day (
    id text COLLATE "C",
    day date,
    class smallint,
    views bigint NOT NULL,
    PRIMARY KEY (id, day, class)
);

-- Hours before `hours_from` are closed: no flush and no move writes them. While the closed month is
-- turned into days, its hours count only for ids after `rolled_id`. `keeps_changes`: whether
-- flushes write views_change.
CREATE TABLE headrace.views_history (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    hours_from timestamptz NOT NULL DEFAULT '-infinity',
    rolled_id text COLLATE "C" NOT NULL DEFAULT '',
    time_zone text NOT NULL DEFAULT 'UTC',
    keeps_changes boolean NOT NULL DEFAULT false
);
INSERT INTO headrace.views_history DEFAULT VALUES;

-- Create the partitions of these hours. Attaching one does not block reads and flushes.
CREATE FUNCTION headrace.ensure_view_months_v1(p_hours timestamptz[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_month timestamp;
    v_name text;
BEGIN
    FOR v_month IN SELECT DISTINCT date_trunc('month', h AT TIME ZONE 'UTC') FROM unnest(p_hours) h
    LOOP
        v_name := to_char(v_month, '"views_hour_"YYYY_MM');
        CONTINUE WHEN to_regclass('headrace.' || v_name) IS NOT NULL;
        LOCK TABLE headrace.views_hour IN SHARE UPDATE EXCLUSIVE MODE;
        CONTINUE WHEN to_regclass('headrace.' || v_name) IS NOT NULL;
        EXECUTE format('CREATE TABLE headrace.%I (LIKE headrace.views_hour INCLUDING ALL)'
            ' WITH (fillfactor = 85)', v_name);
        EXECUTE format('ALTER TABLE headrace.views_hour ATTACH PARTITION headrace.%I'
            ' FOR VALUES FROM (%L) TO (%L)', v_name, v_month AT TIME ZONE 'UTC',
            (v_month + interval '1 month') AT TIME ZONE 'UTC');
    END LOOP;
END $$;

-- Take one step to replace the oldest month by days, if it ended before p_before: close it, copy
-- p_ids entities, or drop it when all are copied. Return whether there may be another step.
CREATE FUNCTION headrace.roll_up_views_v1(p_before timestamptz, p_zone text, p_ids integer)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_history headrace.views_history;
    v_month text;
    v_end timestamptz;
    v_last text;
BEGIN
    SELECT * INTO v_history FROM headrace.views_history FOR UPDATE;
    SELECT min(c.relname) INTO v_month FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'headrace.views_hour'::regclass;
    v_end := (to_timestamp(right(v_month, 7) || '+00', 'YYYY_MMTZH') AT TIME ZONE 'UTC'
        + interval '1 month') AT TIME ZONE 'UTC';
    IF v_end IS NULL OR v_end > p_before THEN
        RETURN false;
    END IF;
    IF v_history.hours_from < v_end THEN
        -- Every flush and move locks a shard before it reads hours_from.
        PERFORM FROM headrace.views_shard ORDER BY shard FOR UPDATE;
        UPDATE headrace.views_history SET hours_from = v_end, rolled_id = '', time_zone = p_zone;
        RETURN true;
    END IF;
    -- Only a deletion still writes here. It deletes the entity's days after its hours.
    EXECUTE format('LOCK TABLE headrace.%I IN SHARE MODE', v_month);
    EXECUTE format('SELECT max(g.id) FROM (SELECT DISTINCT h.id FROM headrace.%I h WHERE h.id > $1'
        ' ORDER BY h.id LIMIT $2) g', v_month) INTO v_last USING v_history.rolled_id, p_ids;
    IF v_last IS NULL THEN
        PERFORM set_config('lock_timeout', '200ms', true);
        EXECUTE format('DROP TABLE headrace.%I', v_month);
    ELSE
        EXECUTE format('INSERT INTO headrace.views_day AS d (id, day, class, views)'
            ' SELECT h.id, (h.hour AT TIME ZONE $3)::date, h.class, sum(h.views)'
            ' FROM headrace.%I h WHERE h.id > $1 AND h.id <= $2 GROUP BY 1, 2, 3 ORDER BY 1, 2, 3'
            ' ON CONFLICT (id, day, class) DO UPDATE SET views = d.views + excluded.views', v_month)
        USING v_history.rolled_id, v_last, v_history.time_zone;
    END IF;
    -- An older month, created again by a wrong clock, is empty and must not reset the position.
    UPDATE headrace.views_history SET rolled_id = coalesce(v_last, '') WHERE hours_from = v_end;
    RETURN true;
END $$;
