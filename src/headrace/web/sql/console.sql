-- name: begin_session
-- Store the session of a valid token that is not publishable, which is a use of it; no row if there is no such token. Old
-- sessions go.
WITH old AS (
    DELETE FROM headrace.console_session WHERE expires_at < now()
), used AS (
    UPDATE headrace.token SET last_used_at = now()
    WHERE sha256 = :token_sha256 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
    RETURNING id, expires_at
)
INSERT INTO headrace.console_session (sha256, token_id, expires_at)
SELECT :sha256, id, least(now() + :lasts_s::float8 * interval '1 second', expires_at) FROM used
RETURNING token_id;

-- name: make_link
-- Store a one-time link of a valid token that is not publishable; no row if there is no such token. Old links go.
WITH old AS (
    DELETE FROM headrace.console_link WHERE expires_at < now()
)
INSERT INTO headrace.console_link (sha256, token_id, expires_at)
SELECT :sha256, id, now() + :lasts_s::float8 * interval '1 second' FROM headrace.token
WHERE sha256 = :token_sha256 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
RETURNING token_id;

-- name: begin_session_by_link
-- Remove a link and store the session of its token; no row if the link is unknown, used or expired, or its token is not valid.
WITH link AS (
    DELETE FROM headrace.console_link WHERE sha256 = :link_sha256 RETURNING token_id, expires_at
), used AS (
    UPDATE headrace.token t SET last_used_at = now() FROM link
    WHERE t.id = link.token_id AND link.expires_at > now()
      AND t.revoked_at IS NULL AND (t.expires_at IS NULL OR t.expires_at > now())
    RETURNING t.id, t.expires_at
)
INSERT INTO headrace.console_session (sha256, token_id, expires_at)
SELECT :sha256, id, least(now() + :lasts_s::float8 * interval '1 second', expires_at) FROM used
RETURNING token_id;

-- name: find_session
-- The caller of a session whose token is still valid; notes its use at most once a minute, so that looks stay looks.
WITH found AS (
    SELECT t.id, t.name, t.scopes, t.last_used_at
    FROM headrace.console_session s JOIN headrace.token t ON t.id = s.token_id
    WHERE s.sha256 = :sha256 AND s.expires_at > now()
      AND t.revoked_at IS NULL AND (t.expires_at IS NULL OR t.expires_at > now())
), used AS (
    UPDATE headrace.token SET last_used_at = now()
    WHERE id IN (
        SELECT id FROM found
        WHERE last_used_at IS NULL OR last_used_at < now() - interval '1 minute'
    )
)
SELECT id, name, scopes FROM found;

-- name: end_session
-- Forget a session.
DELETE FROM headrace.console_session WHERE sha256 = :sha256;

-- name: begin_audit
-- Write down what somebody is about to do; a few lines that were kept long enough go.
WITH old AS (
    DELETE FROM headrace.audit WHERE id = ANY(ARRAY(
        SELECT id FROM headrace.audit WHERE at < now() - :kept_s::float8 * interval '1 second'
        ORDER BY at LIMIT 20 FOR UPDATE SKIP LOCKED))
)
INSERT INTO headrace.audit (actor, place, action, command)
VALUES (:actor, :place, :action, :command) RETURNING id;

-- name: end_audit
-- Write down what became of it.
UPDATE headrace.audit SET outcome = :outcome, told = :told WHERE id = :id;

-- name: list_audit
-- What was done, newest first, below :before where that is given.
SELECT id, at, actor, place, action, command, outcome, told FROM headrace.audit
WHERE :before::bigint IS NULL OR id < :before::bigint ORDER BY id DESC LIMIT :rows_max;
