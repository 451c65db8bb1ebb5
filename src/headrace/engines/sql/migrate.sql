-- name: create_schema
-- Create the schema that holds every table and function of Headrace.
CREATE SCHEMA IF NOT EXISTS headrace;

-- name: create_migration_table
-- Create the table of applied migrations.
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
-- Applied migrations, by room and number.
SELECT room, number, phase, name, checksum, applied_at
FROM headrace.migration ORDER BY room, number;

-- name: record_migration
-- Record a migration as applied, in the migration's transaction.
INSERT INTO headrace.migration (room, number, phase, name, checksum, oldest_code)
VALUES (:room, :number, :phase, :name, :checksum, :oldest_code);

-- name: oldest_codes
-- The oldest code version that each applied migration allows.
SELECT oldest_code FROM headrace.migration WHERE oldest_code IS NOT NULL;

-- name: lock_migrations
-- Wait for other migrators; the number is an arbitrary constant.
SELECT pg_advisory_lock(7090316110412);

-- name: unlock_migrations
-- Release the lock of `lock_migrations`.
SELECT pg_advisory_unlock(7090316110412);

-- name: set_lock_timeout
-- Limit the wait for a lock, because queries of the site queue behind a waiting migration.
SET LOCAL lock_timeout = '4s';

-- name: set_statement_timeout
-- Limit the run time of a migration's statement.
SET LOCAL statement_timeout = '5s';

-- name: set_planner_settings
-- Turn JIT compilation off in every function of the schema, for any server, role or connection.
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
