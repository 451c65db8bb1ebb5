-- name: allow_long_statements
-- Let statements run for :milliseconds until the transaction, or else the session, ends.
SELECT set_config('statement_timeout', :milliseconds, :is_local);

-- name: has_session_setting
-- Whether a setting that this connection was opened with is in force.
SELECT source = 'client' FROM pg_catalog.pg_settings WHERE name = 'statement_timeout';

-- name: backend
-- The server process behind a connection.
SELECT pg_backend_pid();

-- name: identity
-- The server, since its last start, and the database.
SELECT pg_postmaster_start_time()::text || ' ' || current_database();
