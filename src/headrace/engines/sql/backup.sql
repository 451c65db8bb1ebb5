-- name: log_state
-- Flush position, the moment it was read, and the archive's replication slot, if it exists.
SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint AS flushed,
    clock_timestamp() AS read_at,
    ('x' || substr(pg_walfile_name(pg_current_wal_flush_lsn()), 1, 8))::bit(32)::integer
        AS timeline,
    (SELECT system_identifier::text FROM pg_control_system()) AS system,
    slot.wal_status,
    (slot.restart_lsn - '0/0')::bigint AS kept_from
FROM (SELECT 1) one
LEFT JOIN pg_replication_slots slot ON slot.slot_name = 'headrace_archive';

-- name: create_archive_slot
-- Keep the log from the last checkpoint on for the archive.
SELECT lsn::text FROM pg_create_physical_replication_slot('headrace_archive', true);

-- name: advance_archive_slot
-- Release the log before :position, which is archived.
SELECT pg_replication_slot_advance('headrace_archive', :position::text::pg_lsn);

-- name: drop_archive_slot
-- Release the log that is kept for the archive.
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
WHERE slot_name = 'headrace_archive';

-- name: has_migrations
-- Whether the database has the schema.
SELECT to_regclass('headrace.migration') IS NOT NULL;

-- name: migration_count
-- The number of applied migrations.
SELECT count(*) FROM headrace.migration;

-- name: schema_tables
-- Every table of the schema, as a quoted name.
SELECT relation.oid::regclass::text FROM pg_class relation
WHERE relation.relnamespace = to_regnamespace('headrace') AND relation.relkind = 'r'
ORDER BY 1;

-- name: standby_state
-- Whether this server recovers, its replayed position, and its last replayed commit.
SELECT pg_is_in_recovery() AS recovers,
    (pg_last_wal_replay_lsn() - '0/0')::bigint AS replayed,
    pg_last_xact_replay_timestamp() AS committed_at;

-- name: promote
-- End recovery and begin a new timeline; return whether it ended within a minute.
SELECT pg_promote(true, 60);
