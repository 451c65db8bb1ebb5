-- name: begin_session
-- Store a session for a valid secret token; no row if the token is not valid.
-- Deletes expired sessions.
WITH old AS (
    DELETE FROM headrace.console_session WHERE expires_at < now()
), used AS (
    UPDATE headrace.token SET last_used_at = now()
    WHERE sha256 = :token_sha256 AND revoked_at IS NULL
      AND (expires_at IS NULL OR expires_at > now())
    RETURNING id, expires_at
)
INSERT INTO headrace.console_session (sha256, token_id, expires_at)
SELECT :sha256, id, least(now() + :lasts_s::float8 * interval '1 second', expires_at) FROM used
RETURNING token_id;

-- name: make_link
-- Store a one-time link for a valid secret token; no row if the token is not valid.
-- Deletes expired links.
WITH old AS (
    DELETE FROM headrace.console_link WHERE expires_at < now()
)
INSERT INTO headrace.console_link (sha256, token_id, expires_at)
SELECT :sha256, id, now() + :lasts_s::float8 * interval '1 second' FROM headrace.token
WHERE sha256 = :token_sha256 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
RETURNING token_id;

-- name: begin_session_by_link
-- Delete a link and store a session for its token.
-- No row if the link is unknown, used or expired, or its token is not valid.
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
-- The caller of a session whose token is valid. Updates the time of use at most once a minute.
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
-- Delete a session.
DELETE FROM headrace.console_session WHERE sha256 = :sha256;

-- name: begin_audit
-- Insert an audit row before its action; deletes up to 20 rows older than :kept_s.
WITH old AS (
    DELETE FROM headrace.audit WHERE id = ANY(ARRAY(
        SELECT id FROM headrace.audit WHERE at < now() - :kept_s::float8 * interval '1 second'
        ORDER BY at LIMIT 20 FOR UPDATE SKIP LOCKED))
)
INSERT INTO headrace.audit (actor, address, action, command)
VALUES (:actor, :address, :action, :command) RETURNING id;

-- name: end_audit
-- Store the outcome of an action.
UPDATE headrace.audit SET outcome = :outcome, detail = :detail WHERE id = :id;

-- name: list_audit
-- Audit rows, newest first, with ids below :before unless it is null.
SELECT id, at, actor, address, action, command, outcome, detail FROM headrace.audit
WHERE :before::bigint IS NULL OR id < :before::bigint ORDER BY id DESC LIMIT :rows_max;
