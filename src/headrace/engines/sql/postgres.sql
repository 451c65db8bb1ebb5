-- name: allow_long_statements
-- Set the statement timeout until the transaction or the session ends; return the backend.
SELECT pg_backend_pid() FROM set_config('statement_timeout', :milliseconds, :is_local);

-- name: is_running
-- Whether the backend runs a statement; true if its state is hidden.
SELECT coalesce(
    (SELECT coalesce(state NOT LIKE 'idle%', true) FROM pg_stat_activity WHERE pid = :backend),
    false);

-- name: has_session_setting
-- Whether a start-up setting of this connection is in effect.
SELECT source = 'client' FROM pg_catalog.pg_settings WHERE name = 'statement_timeout';

-- name: backend
-- The process id of the backend.
SELECT pg_backend_pid();

-- name: identity
-- The start time of the server and the name of the database.
SELECT pg_postmaster_start_time()::text || ' ' || current_database();

-- name: replica_lag
-- Age in seconds of the last transaction that this standby replayed; NULL: not a standby.
SELECT CASE WHEN pg_is_in_recovery() THEN greatest(0, coalesce(
    extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()), 1e9))::float8 END;

-- name: commit_standbys
-- Which synchronous standbys commits need, how many are connected, and how long commits wait.
SELECT
    current_setting('synchronous_standby_names') AS names,
    current_setting('synchronous_commit') AS synchronous_commit,
    pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS sees_states,
    (SELECT count(*) FROM pg_stat_replication) AS senders,
    (SELECT count(*) FROM pg_stat_replication
        WHERE sync_state IN ('sync', 'quorum')) AS synchronous,
    coalesce((SELECT extract(epoch FROM clock_timestamp() - min(query_start))
        FROM pg_stat_activity WHERE wait_event = 'SyncRep'), 0)::float8 AS waited_s,
    quote_ident(current_user) AS role;
