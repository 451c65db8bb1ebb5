-- name: server_settings
-- Facts about server, database and role, as statements of the pool see them.
SELECT
    current_setting('server_version') AS version,
    current_setting('server_version_num')::integer AS version_number,
    current_setting('fsync') AS fsync,
    current_setting('full_page_writes') AS full_page_writes,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('synchronous_standby_names') AS standbys,
    (SELECT count(*) FROM pg_stat_replication WHERE state <> 'backup') AS replicas,
    t.setting AS statement_timeout_ms,
    t.source AS statement_timeout_source,
    quote_ident(current_user) AS role,
    quote_ident(d.datname) AS database,
    pg_encoding_to_char(d.encoding) AS encoding,
    d.datcollversion AS collation_made,
    pg_database_collation_actual_version(d.oid) AS collation_now,
    least(
        current_setting('max_connections')::integer
            - current_setting('superuser_reserved_connections')::integer
            - coalesce(current_setting('reserved_connections', true)::integer, 0),
        nullif(d.datconnlimit, -1),
        (SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = current_user)
    ) AS connections_max,
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
    extract(epoch FROM clock_timestamp())::float8 AS clock_s
FROM pg_database d, pg_settings t
WHERE d.datname = current_database() AND t.name = 'statement_timeout';

-- name: harmful_settings
-- Settings that end or change statements, with the source of each.
SELECT name, setting, source FROM pg_settings
WHERE name IN (
    'lock_timeout', 'idle_in_transaction_session_timeout', 'idle_session_timeout',
    'transaction_timeout', 'statement_timeout', 'default_transaction_isolation',
    'default_transaction_read_only'
);

-- name: server_identity
-- Identity of the database and its server.
SELECT format('%s started %s', quote_ident(current_database()), pg_postmaster_start_time());
