-- name: outage_clock
-- The clock that stamps the history, when the server started, and whether it refuses writes.
SELECT extract(epoch FROM clock_timestamp())::float8 AS now_s,
    extract(epoch FROM pg_postmaster_start_time())::float8 AS started_s,
    current_setting('transaction_read_only') = 'on' AS is_read_only;

-- name: store_outage
-- Store an outage, or extend it.
INSERT INTO headrace.engine_outage (id, host, engine, causes, began_at, until_at, is_over)
VALUES (:id, :host, :engine, :causes::text[], to_timestamp(:began_s::float8),
        to_timestamp(:until_s::float8), :is_over)
ON CONFLICT (id) DO UPDATE SET causes = excluded.causes, until_at = excluded.until_at,
    is_over = excluded.is_over;

-- name: delete_old_outages
-- Delete up to :rows_max outages older than :kept_s, and those of a host beyond :outages_kept.
DELETE FROM headrace.engine_outage WHERE id = ANY(ARRAY(
    (SELECT id FROM headrace.engine_outage
     WHERE until_at < now() - :kept_s::float8 * interval '1 second' LIMIT :rows_max)
    UNION ALL
    (SELECT id FROM headrace.engine_outage WHERE host = :host
     ORDER BY began_at DESC OFFSET :outages_kept LIMIT :rows_max)));

-- name: read_outages
-- Outages in a span, the newest :outages_max.
SELECT host, engine, causes, began_at, until_at, is_over FROM headrace.engine_outage
WHERE until_at >= :from_at AND began_at < :to_at
ORDER BY until_at DESC, began_at DESC, id LIMIT :outages_max;
