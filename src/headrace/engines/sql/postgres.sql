-- name: allow_long_statements
-- Set the statement timeout to :milliseconds until the transaction or the session ends.
SELECT set_config('statement_timeout', :milliseconds, :is_local);

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
