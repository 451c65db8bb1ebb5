-- name: crons
-- Every cron by name, or the one called :name.
SELECT name, spec, tz, queue, payload, priority, next_at, last_at, last_job, paused, source, error
FROM headrace.cron WHERE :name::text IS NULL OR name = :name::text ORDER BY name;

-- name: database_now
-- The database clock, which decides what is due.
SELECT clock_timestamp();

-- name: add_cron
-- Store a cron created over the API. No row: the name is taken.
INSERT INTO headrace.cron (name, spec, tz, queue, payload, priority, next_at, source)
VALUES (:name, :spec, :tz, :queue, :payload, :priority, :next_at, 'api')
ON CONFLICT (name) DO NOTHING RETURNING name;

-- name: declare_cron
-- Store a cron declared by code. A changed schedule starts afresh; an unchanged one keeps a missed
-- scheduled time.
INSERT INTO headrace.cron AS c (name, spec, tz, queue, payload, priority, next_at, source)
VALUES (:name, :spec, :tz, :queue, :payload, :priority, :next_at, 'code')
ON CONFLICT (name) DO UPDATE SET
    spec = excluded.spec, tz = excluded.tz, queue = excluded.queue, payload = excluded.payload,
    priority = excluded.priority, source = 'code', declared_at = now(),
    next_at = CASE WHEN (c.spec, c.tz) = (excluded.spec, excluded.tz) THEN c.next_at
                   ELSE excluded.next_at END,
    paused = c.paused AND c.error IS NULL, error = NULL;

-- name: change_cron
-- Replace all fields of an API cron. No row: no such cron, or code declares it.
UPDATE headrace.cron SET spec = :spec, tz = :tz, queue = :queue, payload = :payload,
    priority = :priority, next_at = :next_at, paused = :is_paused, error = NULL
WHERE name = :name AND source = 'api' RETURNING name;

-- name: pause_cron
-- Pause a cron, with the error if it pauses itself. No row: no such cron.
UPDATE headrace.cron SET paused = true, error = :error::text WHERE name = :name RETURNING name;

-- name: resume_cron
-- Resume a paused cron at :next_at. No row: no such paused cron.
UPDATE headrace.cron SET paused = false, error = NULL, next_at = :next_at
WHERE name = :name AND paused RETURNING name;

-- name: remove_cron
-- Delete a cron that no running code declares. No row: no such cron, or code declares it.
DELETE FROM headrace.cron WHERE name = :name AND (source = 'api'
    OR declared_at < now() - :forgotten_s::double precision * interval '1 s') RETURNING name;

-- name: drop_undeclared
-- Delete crons that no running code has declared for :kept_s.
DELETE FROM headrace.cron WHERE source = 'code'
AND declared_at < now() - :kept_s::double precision * interval '1 s';

-- name: bound_idle
-- Limit the idle time of this transaction, in milliseconds as text, so that a suspended process
-- holds no lock.
SELECT set_config('idle_in_transaction_session_timeout', :milliseconds, true);

-- name: lock_due_cron
-- Lock the unlocked cron that has been due longest. Skip crons that code stopped declaring.
SELECT name, spec, tz, queue, payload, priority, greatest(next_at, now()) AS after_at
FROM headrace.cron
WHERE NOT paused AND next_at <= now()
  AND (source = 'api' OR declared_at > now() - :forgotten_s::double precision * interval '1 s')
ORDER BY next_at LIMIT 1 FOR UPDATE SKIP LOCKED;

-- name: move_cron
-- Record the job of a cron's scheduled time and its next scheduled time.
UPDATE headrace.cron SET last_at = now(), last_job = :job, next_at = :next_at WHERE name = :name;

-- name: note_cron_job
-- Record a job that an operator started; the next scheduled time stays.
UPDATE headrace.cron SET last_at = now(), last_job = :job WHERE name = :name;
