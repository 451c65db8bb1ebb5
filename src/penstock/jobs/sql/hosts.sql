-- name: add_host
-- Register a host; its leases hang on this row.
INSERT INTO penstock.host (name, queues, expires_at)
VALUES (:name, :queues::integer[], now() + :lease_s::double precision * interval '1 s')
RETURNING id;

-- name: renew_host
-- Renew every lease of a host at once; no row: it expired, its jobs are lost to it.
UPDATE penstock.host SET expires_at = now() + :lease_s::double precision * interval '1 s'
WHERE id = :host AND expires_at > now() RETURNING 1;

-- name: remove_host
-- Take a host away; leases that it still has are returned by the next sweep.
DELETE FROM penstock.host WHERE id = :host;

-- name: drop_hosts
-- Remove expired hosts that hold no lease any more.
DELETE FROM penstock.host h WHERE h.expires_at <= now()
AND NOT EXISTS (SELECT FROM penstock.job_lease l WHERE l.host = h.id);
