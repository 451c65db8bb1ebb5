-- The minute history of every host, for charts.

-- One row per host and minute. A host writes its own; `writer` is random per process and keeps the
-- rows of two processes apart that shared a minute, so that an insert can be repeated.
-- sums: {series: {key: growth}}; the key is a label, or the upper bound of a bucket.
-- peaks: {series: {key: greatest value}}. Zeros are left out, so a missing key of a row is 0.
CREATE TABLE headrace.history_minute (
    at timestamptz NOT NULL,
    host text NOT NULL,
    writer bigint NOT NULL,
    center text NOT NULL,
    seconds real NOT NULL,          -- how much of the minute the row covers
    sums jsonb NOT NULL,
    peaks jsonb NOT NULL,
    PRIMARY KEY (at, host, writer)
);

-- The same per hour, written again with each minute of the hour.
CREATE TABLE headrace.history_hour (
    at timestamptz NOT NULL,
    host text NOT NULL,
    center text NOT NULL,
    seconds real NOT NULL,
    sums jsonb NOT NULL,
    peaks jsonb NOT NULL,
    PRIMARY KEY (at, host)
) WITH (fillfactor = 50);

-- Sum the minutes of a host's hour to its row in history_hour.
CREATE FUNCTION headrace.sum_history_hour_v1(p_hour timestamptz, p_host text)
RETURNS void LANGUAGE sql SET jit = off AS $$
    WITH minutes AS MATERIALIZED (
        SELECT m.center, m.seconds, m.sums, m.peaks FROM headrace.history_minute m
        WHERE m.at >= p_hour AND m.at < p_hour + interval '1 hour' AND m.host = p_host
    ), summed AS (
        SELECT s.key AS series, k.key, sum(k.value::float8) AS value
        FROM minutes m, jsonb_each(m.sums) s, jsonb_each_text(s.value) k GROUP BY 1, 2
    ), highest AS (
        SELECT s.key AS series, k.key, max(k.value::float8) AS value
        FROM minutes m, jsonb_each(m.peaks) s, jsonb_each_text(s.value) k GROUP BY 1, 2
    ), documents AS (
        SELECT (SELECT jsonb_object_agg(d.series, d.keys) FROM (
                    SELECT x.series, jsonb_object_agg(x.key, x.value) AS keys
                    FROM summed x GROUP BY x.series) d) AS sums,
               (SELECT jsonb_object_agg(d.series, d.keys) FROM (
                    SELECT x.series, jsonb_object_agg(x.key, x.value) AS keys
                    FROM highest x GROUP BY x.series) d) AS peaks
    )
    INSERT INTO headrace.history_hour AS h (at, host, center, seconds, sums, peaks)
    SELECT p_hour, p_host, max(m.center), sum(m.seconds), coalesce(d.sums, '{}'),
           coalesce(d.peaks, '{}')
    FROM minutes m CROSS JOIN documents d GROUP BY d.sums, d.peaks
    ON CONFLICT (at, host) DO UPDATE SET center = excluded.center, seconds = excluded.seconds,
        sums = excluded.sums, peaks = excluded.peaks;
$$;

-- Values of series in steps, by key and by part: a host, a data center, or '' for all. Sums are
-- added and peaks compared.
CREATE FUNCTION headrace.read_history_v1(
    p_is_hourly boolean, p_from timestamptz, p_to timestamptz, p_step_s double precision,
    p_series text[], p_by text
) RETURNS TABLE (at timestamptz, series text, part text, key text, value double precision)
LANGUAGE sql STABLE SET jit = off AS $$
    WITH rows AS (
        SELECT m.at, m.host, m.center, m.sums, m.peaks FROM headrace.history_minute m
        WHERE NOT p_is_hourly AND m.at >= p_from AND m.at < p_to
        UNION ALL
        SELECT h.at, h.host, h.center, h.sums, h.peaks FROM headrace.history_hour h
        WHERE p_is_hourly AND h.at >= p_from AND h.at < p_to
    ), parts AS (
        SELECT date_bin(p_step_s * interval '1 second', r.at, timestamptz 'epoch') AS at,
               CASE p_by WHEN 'host' THEN r.host WHEN 'center' THEN r.center ELSE '' END AS part,
               r.sums, r.peaks
        FROM rows r
    )
    SELECT p.at, s.name, p.part, k.key, sum(k.value::float8)
    FROM parts p CROSS JOIN unnest(p_series) s(name)
    CROSS JOIN LATERAL jsonb_each_text(p.sums -> s.name) k GROUP BY 1, 2, 3, 4
    UNION ALL
    SELECT p.at, s.name, p.part, k.key, max(k.value::float8)
    FROM parts p CROSS JOIN unnest(p_series) s(name)
    CROSS JOIN LATERAL jsonb_each_text(p.peaks -> s.name) k GROUP BY 1, 2, 3, 4
    ORDER BY 1, 2, 3, 4;
$$;
