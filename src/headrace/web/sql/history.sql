-- name: insert_minute
-- Store a host's minute; a repeated insert of the same process has no effect.
INSERT INTO headrace.history_minute (at, host, writer, center, seconds, sums, peaks)
VALUES (to_timestamp(:at_s::float8), :host, :writer, :center, :seconds, :sums::jsonb,
        :peaks::jsonb)
ON CONFLICT DO NOTHING;

-- name: sum_history_hour
-- Sum the minutes of a host's hour again.
SELECT headrace.sum_history_hour_v1(to_timestamp(:hour_s::float8), :host);

-- name: delete_old_minutes
-- Delete up to :rows_max minutes older than :kept_s, of any host.
DELETE FROM headrace.history_minute WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM headrace.history_minute
    WHERE at < now() - :kept_s::float8 * interval '1 second'
    ORDER BY at LIMIT :rows_max FOR UPDATE SKIP LOCKED));

-- name: delete_old_hours
-- The same for hours.
DELETE FROM headrace.history_hour WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM headrace.history_hour
    WHERE at < now() - :kept_s::float8 * interval '1 second'
    ORDER BY at LIMIT :rows_max FOR UPDATE SKIP LOCKED));

-- name: read_history
-- Values of series in steps, by key and part.
SELECT * FROM headrace.read_history_v1(
    :is_hourly, :from_at, :to_at, :step_s, :series::text[], :by);

-- name: recorded_seconds
-- Recorded time of each step and host.
SELECT date_bin(:step_s::float8 * interval '1 second', r.at, timestamptz 'epoch') AS at,
    r.host, r.center, sum(r.seconds)::float8 AS seconds
FROM (
    SELECT m.at, m.host, m.center, m.seconds FROM headrace.history_minute m
    WHERE NOT :is_hourly::boolean AND m.at >= :from_at AND m.at < :to_at
    UNION ALL
    SELECT h.at, h.host, h.center, h.seconds FROM headrace.history_hour h
    WHERE :is_hourly::boolean AND h.at >= :from_at AND h.at < :to_at
) r GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;

-- name: history_begin
-- Since when there is history, NULL for none. An hour begins before its first minute.
SELECT CASE WHEN h.at < date_trunc('hour', m.at) THEN h.at ELSE m.at END
FROM (SELECT min(at) AS at FROM headrace.history_minute) m,
    (SELECT min(at) AS at FROM headrace.history_hour) h;
