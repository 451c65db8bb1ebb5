-- name: create_schema
-- Make the one schema that everything of Headrace lives in.
CREATE SCHEMA IF NOT EXISTS headrace;

-- name: create_migration_table
-- Make the table that says which migrations were applied.
CREATE TABLE IF NOT EXISTS headrace.migration (
    room text NOT NULL,
    number integer NOT NULL,
    phase text NOT NULL CHECK (phase IN ('pre', 'post')),
    name text NOT NULL,
    checksum text NOT NULL,
    oldest_code text,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (room, number)
);

-- name: applied_migrations
-- Every migration applied so far.
SELECT room, number, phase, name, checksum, applied_at FROM headrace.migration ORDER BY room, number;

-- name: record_migration
-- Note a migration as applied, in its own transaction.
INSERT INTO headrace.migration (room, number, phase, name, checksum, oldest_code)
VALUES (:room, :number, :phase, :name, :checksum, :oldest_code);

-- name: oldest_codes
-- The oldest code that each migration still allows.
SELECT oldest_code FROM headrace.migration WHERE oldest_code IS NOT NULL;

-- name: lock_migrations
-- Wait for other migrators; the number is an arbitrary constant of ours.
SELECT pg_advisory_lock(7090316110412);

-- name: unlock_migrations
-- Let the next migrator in.
SELECT pg_advisory_unlock(7090316110412);

-- name: set_lock_timeout
-- A migration waits at most this long for a lock, so that it never queues the site behind it.
SET LOCAL lock_timeout = '4s';

-- name: set_statement_timeout
-- A migration's statement runs at most this long.
SET LOCAL statement_timeout = '5s';

-- name: set_planner_settings
-- Run every function of the schema without JIT compilation, whatever the server's, role's or connection's setting is.
DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN
        SELECT p.oid FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = 'headrace'::regnamespace AND p.prokind = 'f'
            AND NOT coalesce('jit=off' = ANY (p.proconfig), false)
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET jit = off', v_function);
    END LOOP;
END $$;
