-- name: raise_alert
-- Note that a rule is broken; no row: it was noted already.
INSERT INTO headrace.alert (rule, subject, text) VALUES (:rule, :subject, :text)
ON CONFLICT (rule, subject) WHERE cleared_at IS NULL DO NOTHING RETURNING id, raised_at;

-- name: clear_alert
-- Note that a rule is kept again; no row: that was known.
UPDATE headrace.alert SET cleared_at = now()
WHERE rule = :rule AND subject = :subject AND cleared_at IS NULL
RETURNING id, text, raised_at, cleared_at;

-- name: alerts
-- Alerts, newest first; open ones only where :is_open.
SELECT id, rule, subject, text, raised_at, cleared_at FROM headrace.alert
WHERE NOT :is_open OR cleared_at IS NULL ORDER BY raised_at DESC, id DESC LIMIT :alerts_max;

-- name: count_open_alerts
-- How many alerts are open.
SELECT count(*) AS alerts FROM headrace.alert WHERE cleared_at IS NULL;

-- name: drop_alerts
-- Forget cleared alerts that were kept long enough.
DELETE FROM headrace.alert WHERE cleared_at < now() - :kept_s::double precision * interval '1 s';

-- name: unsent_alerts
-- What the webhook has not taken yet of the last :age_s seconds, a clearing only after its raising.
SELECT id, rule, subject, text, raised_at, cleared_at, is_raise_sent FROM headrace.alert
WHERE (NOT is_raise_sent AND raised_at > now() - :age_s::double precision * interval '1 s')
   OR (is_raise_sent AND NOT is_clear_sent
       AND cleared_at > now() - :age_s::double precision * interval '1 s')
ORDER BY id LIMIT :alerts_max;

-- name: mark_sent
-- Note that the webhook took an alert's raising, or else its clearing.
UPDATE headrace.alert SET is_raise_sent = true, is_clear_sent = is_clear_sent OR NOT :is_raise
WHERE id = :alert;
