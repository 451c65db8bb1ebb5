-- name: server_settings
-- What the doctor asks of PostgreSQL, in one row.
SELECT
    current_setting('server_version') AS version,
    current_setting('server_version_num')::integer AS version_number,
    current_setting('fsync') AS fsync,
    current_setting('full_page_writes') AS full_page_writes,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('synchronous_standby_names') AS standbys,
    current_setting('application_name') <> 'penstock' AS transaction_pooler,
    (SELECT count(*) FROM pg_stat_replication) AS replicas,
    extract(epoch FROM clock_timestamp())::float8 AS clock_s;
