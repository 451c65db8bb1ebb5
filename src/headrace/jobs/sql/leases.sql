-- name: add_host
-- Register a host. Its leases refer to this row.
INSERT INTO headrace.host (name, queues, kind, tags, cores, expires_at)
VALUES (:name, :queues::integer[], :kind, :tags::text[], :cores,
        now() + :lease_s::double precision * interval '1 s')
RETURNING id;

-- name: lock_host_name
-- Serialize the registrations of agents with this name until the transaction ends.
SELECT pg_advisory_xact_lock(hashtextextended('headrace.host:' || :name::text, 0));

-- name: other_agent
-- A live agent of this name, which is none of the rows :own.
SELECT id, expires_at, started_at,
       extract(epoch FROM expires_at - clock_timestamp())::double precision AS left_s
FROM headrace.host
WHERE name = :name AND kind = 'agent' AND expires_at > clock_timestamp()
  AND id <> ALL(:own::bigint[])
ORDER BY id DESC LIMIT 1;

-- name: renew_host
-- Renew every lease of a host at once. No row: it expired and its jobs are lost to it.
UPDATE headrace.host SET expires_at = now() + :lease_s::double precision * interval '1 s'
WHERE id = :host AND expires_at > now() RETURNING 1;

-- name: extend_take
-- Extend a taker's lease to :lease_s from now. No row: the lease has ended.
UPDATE headrace.host h SET expires_at = now() + :lease_s::double precision * interval '1 s'
FROM headrace.job_lease l
WHERE l.id = :lease AND h.id = l.host AND h.kind = 'taker' AND h.expires_at > now()
RETURNING h.expires_at;

-- name: host_expires_at
-- When a host's leases expire unless renewed.
SELECT expires_at FROM headrace.host WHERE id = :host;

-- name: remove_host
-- Delete a host. The next sweep returns the leases that it still has.
DELETE FROM headrace.host WHERE id = :host;

-- name: end_take
-- Delete a taker whose lease is fully settled.
DELETE FROM headrace.host h WHERE h.id = :host AND h.kind = 'taker'
AND NOT EXISTS (SELECT FROM headrace.job_lease l WHERE l.host = h.id);

-- name: expire_host
-- Expire a host whose slots are known to have ended, and free its allowances.
WITH freed AS (DELETE FROM headrace.slot_allowance WHERE host = :host)
UPDATE headrace.host SET expires_at = least(expires_at, now()) WHERE id = :host;

-- name: end_hosts
-- Expire all agents and workers, and free their allowances. Takers keep their leases.
WITH ended AS (
    UPDATE headrace.host SET expires_at = now() WHERE kind <> 'taker' AND expires_at > now()
    RETURNING id)
DELETE FROM headrace.slot_allowance a USING ended WHERE a.host = ended.id;

-- name: drop_hosts
-- Delete expired hosts without leases and without live allowances. Skip locked rows. The row of a
-- lost agent stays for :lost_kept_s, unless a newer one has its name.
DELETE FROM headrace.host WHERE id = ANY(ARRAY(
    SELECT h.id FROM headrace.host h WHERE h.expires_at <= now()
    AND NOT EXISTS (SELECT FROM headrace.job_lease l WHERE l.host = h.id)
    AND (h.expires_at <= now() - interval '5 s' OR NOT EXISTS (
        SELECT FROM headrace.slot_allowance a WHERE a.host = h.id AND a.slots > 0))
    AND (h.kind <> 'agent' OR h.reported_at IS NULL
        OR h.expires_at <= now() - :lost_kept_s::double precision * interval '1 s'
        OR EXISTS (SELECT FROM headrace.host n
            WHERE n.name = h.name AND n.kind = 'agent' AND n.id > h.id))
    FOR UPDATE SKIP LOCKED));

-- name: claim_ready
-- Ack the leases :done, then lease due jobs of a queue after the scan marks; at least one row.
SELECT * FROM headrace.claim_ready_v1(
    :host, :queue, :leases_max, :batch, :priorities::smallint[], :marks_at::timestamptz[],
    :marks_id::bigint[], :done::bigint[]);

-- name: claim_lanes
-- Lease jobs of a queue's lanes within their limits; one row per lease, at least one.
SELECT * FROM headrace.claim_lanes_v1(
    :host, :queue, :leases_max, :batch, :lanes_max, :quantum, :is_folding, :event, :ready_from);

-- name: fold_lanes
-- Add journal rows after :event to the counts of their lanes. Return how many, and the last.
SELECT * FROM headrace.fold_lanes_v1(:queue, :event, :events_max);

-- name: settle
-- Settle whole leases with one outcome, and single jobs of others. Return missing and locked
-- leases.
SELECT * FROM headrace.settle_v1(
    :whole::bigint[], :outcome, :leases::bigint[], :ids::bigint[], :outcomes::text[],
    :delays_s::double precision[], :errors::text[], :tracebacks::text[], :results::bytea[],
    :queues::text[], :losses_max, :progressed::bigint[]);

-- name: lock_leases
-- Lock leases in order until the transaction ends. Return those that exist. The server ends the
-- transaction after :milliseconds without a statement (null: as the session is set), so that a
-- suspended process keeps no lease locked.
SELECT id, set_config('idle_in_transaction_session_timeout', coalesce(:milliseconds::text,
    current_setting('idle_in_transaction_session_timeout')), true)
FROM headrace.job_lease WHERE id = ANY(:leases::bigint[]) ORDER BY id FOR SHARE;

-- name: leases_of_host
-- The leases of a host, to compare with those it holds.
SELECT id FROM headrace.job_lease WHERE host = :host;

-- name: expired_leases
-- Unlocked leases of expired or missing hosts, oldest first, at most :leases_max.
SELECT l.id FROM headrace.job_lease l WHERE NOT EXISTS (
    SELECT FROM headrace.host h WHERE h.id = l.host AND h.expires_at > now())
ORDER BY l.id LIMIT :leases_max FOR UPDATE SKIP LOCKED;

-- name: end_stuck_claims
-- Terminate claims whose result no client has read for :lease_s. They keep their rows locked: a
-- result larger than the socket's buffer is sent before its transaction commits, and no server
-- timeout ends a statement that waits for its client.
SELECT count(pg_terminate_backend(a.pid)) FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.usename = current_user AND a.wait_event = 'ClientWrite'
AND position('headrace.claim_' IN a.query) > 0
AND a.query_start < now() - :lease_s::double precision * interval '1 s';

-- name: return_lease
-- Return the jobs of one lease of a dead host. Return how many.
SELECT headrace.return_lease_v1(:lease, :losses_max);

-- name: taken_jobs
-- Lock a taker's lease, and return its jobs with retries and decisions of their queue. No row: the
-- lease has ended.
SELECT l.ids, l.attempts, l.headers, l.settled, l.acked, l.host, q.retries, q.decisions
FROM headrace.job_lease l
JOIN headrace.host h ON h.id = l.host AND h.kind = 'taker'
JOIN headrace.queue_setting q ON q.id = l.queue
WHERE l.id = :lease FOR UPDATE OF l;

-- name: add_acked
-- Remember the outcomes that a taker acked, so that a repeat differs from a change.
UPDATE headrace.job_lease SET acked = acked || :acked::bigint[] WHERE id = :lease;

-- name: work_ahead
-- Queues that have due work, and the seconds until the next job is due, after the marks :from_at
-- and :event.
SELECT * FROM headrace.work_ahead_v1(:queues::integer[], :from_at, :event);
