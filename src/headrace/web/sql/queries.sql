-- name: ping
-- Check that PostgreSQL runs a statement.
SELECT 1;

-- name: insert_token
-- Store a new token; a valid token of the same name violates the unique index.
INSERT INTO headrace.token (name, sha256, scopes, expires_at)
VALUES (:name, :sha256, :scopes::text[], now() + :expires_s::float8 * interval '1 second')
RETURNING name, scopes, created_at, expires_at, revoked_at, last_used_at;

-- name: find_caller
-- The caller of a valid token. Updates the time of use at most once a minute to save writes.
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
-- Tokens, newest first, including expired and revoked tokens.
SELECT name, scopes, created_at, expires_at, revoked_at, last_used_at
FROM headrace.token
ORDER BY id DESC
LIMIT :rows_max;

-- name: revoke_token
-- Revoke the valid token of a name; no row if there is none.
UPDATE headrace.token SET revoked_at = now()
WHERE name = :name AND revoked_at IS NULL
RETURNING name, scopes, created_at, expires_at, revoked_at, last_used_at;

-- name: token_state
-- The state of a token: valid, revoked or expired; no row if it was never stored here.
SELECT CASE
    WHEN revoked_at IS NOT NULL THEN 'revoked'
    WHEN expires_at <= now() THEN 'expired'
    ELSE 'valid'
END
FROM headrace.token
WHERE sha256 = :sha256;

-- name: insert_token_once
-- Store a token unless its hash exists, which includes a revoked token.
INSERT INTO headrace.token (name, sha256, scopes)
VALUES (:name, :sha256, :scopes::text[])
ON CONFLICT DO NOTHING;
