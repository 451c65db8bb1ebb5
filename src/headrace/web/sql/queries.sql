-- name: ping
-- Whether PostgreSQL answers a statement at all.
SELECT 1;

-- name: insert_token
-- Store a new token; its name must not be taken.
INSERT INTO headrace.token (name, sha256, scopes, expires_at)
VALUES (:name, :sha256, :scopes::text[], now() + :expires_s::float8 * interval '1 second')
RETURNING id, name, scopes, created_at, expires_at, revoked_at, last_used_at;

-- name: find_caller
-- The caller of a valid token; notes its use at most once a minute, so that reads stay reads.
WITH found AS (
    SELECT id, name, scopes, last_used_at
    FROM headrace.token
    WHERE sha256 = :sha256 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
), used AS (
    UPDATE headrace.token SET last_used_at = now()
    WHERE id IN (
        SELECT id FROM found
        WHERE last_used_at IS NULL OR last_used_at < now() - interval '1 minute'
    )
)
SELECT id, name, scopes FROM found;

-- name: list_tokens
-- Every token, newest first.
SELECT id, name, scopes, created_at, expires_at, revoked_at, last_used_at
FROM headrace.token
ORDER BY id DESC
LIMIT :rows_max;

-- name: revoke_token
-- End the token that holds a name now.
UPDATE headrace.token SET revoked_at = now()
WHERE name = :name AND revoked_at IS NULL
RETURNING id, name, scopes, created_at, expires_at, revoked_at, last_used_at;

-- name: token_state
-- Whether the token of :sha256 is valid; no row if it was never stored here.
SELECT CASE
    WHEN revoked_at IS NOT NULL THEN 'revoked'
    WHEN expires_at <= now() THEN 'expired'
    ELSE 'valid'
END
FROM headrace.token
WHERE sha256 = :sha256;

-- name: insert_token_once
-- Store a token unless it is known, also as a revoked one.
INSERT INTO headrace.token (name, sha256, scopes)
VALUES (:name, :sha256, :scopes::text[])
ON CONFLICT DO NOTHING;
