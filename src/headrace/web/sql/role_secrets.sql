-- name: note_secrets
-- Store the fingerprints of a host's roles; forget its other roles, and hosts of a day ago.
WITH ended AS (
    DELETE FROM headrace.role_secret WHERE host = :host AND role <> ALL(:roles::text[])
), forgotten AS (
    DELETE FROM headrace.role_secret WHERE host <> :host AND seen_at < now() - interval '1 day'
)
INSERT INTO headrace.role_secret AS s (host, role, fingerprint, accepted, seen_at)
SELECT :host, r.role, r.fingerprint, r.accepted, now()
FROM unnest(:roles::text[], :fingerprints::text[], :accepted::text[])
    AS r(role, fingerprint, accepted)
ON CONFLICT (host, role) DO UPDATE SET fingerprint = excluded.fingerprint,
    accepted = excluded.accepted, seen_at = excluded.seen_at;

-- name: role_secrets
-- Fingerprints of the roles that ran in the last :age_s seconds.
SELECT host, role, fingerprint, accepted FROM headrace.role_secret
WHERE seen_at > now() - :age_s::float8 * interval '1 second' ORDER BY host, role;
