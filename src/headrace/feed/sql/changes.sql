-- name: unswept
-- The oldest changes that were not swept, of those made a moment ago, or, where the clock was set back since, after now.
SELECT id, kind, entity, version, items, scores FROM headrace.feed_outbox
WHERE NOT is_swept AND (made_at < now() - :older_s * interval '1 second' OR made_at > now())
ORDER BY id LIMIT :rows_max;

-- name: mark_swept
-- These changes are in the index.
UPDATE headrace.feed_outbox SET is_swept = true WHERE id = ANY (:ids::bigint[]);

-- name: unsweep
-- Sweep again what got its number after a change, or was made after it or shortly before: the index may have lost it.
UPDATE headrace.feed_outbox SET is_swept = false
WHERE is_swept AND (id > :swept OR made_at >= coalesce(
    (SELECT o.made_at FROM headrace.feed_outbox o WHERE o.id = :swept) - :late_s * interval '1 second', '-infinity'));

-- name: drop_swept
-- Forget swept changes that the index cannot have lost any more, and note up to which; how many.
WITH old AS (
    SELECT o.id FROM headrace.feed_outbox o
    WHERE o.made_at < now() - :older_s * interval '1 second' AND o.is_swept ORDER BY o.id LIMIT :rows_max
), gone AS (
    DELETE FROM headrace.feed_outbox o USING old WHERE o.id = old.id RETURNING o.id
), noted AS (
    UPDATE headrace.feed_index SET forgotten = greatest(forgotten, (SELECT max(id) FROM gone))
    WHERE EXISTS (SELECT FROM gone)
)
SELECT count(*) FROM gone;

-- name: forgotten
-- The last change that was forgotten.
SELECT forgotten FROM headrace.feed_index;

-- name: changes_after
-- The changes of a viewer or author after a version, in order.
SELECT id, kind, entity, version, items, scores FROM headrace.feed_outbox
WHERE kind = :kind AND entity = :entity AND version > :version ORDER BY version;

-- name: oldest_unswept
-- The age of the oldest change that was not swept, in seconds.
SELECT extract(epoch FROM now() - min(made_at))::double precision FROM headrace.feed_outbox WHERE NOT is_swept;

-- name: entities_after
-- Viewers or authors with a version, in order, after one of them.
SELECT entity FROM headrace.feed_version WHERE kind = :kind AND entity > :after ORDER BY entity LIMIT :rows_max;

-- name: sample_entities
-- Some viewers or authors.
SELECT entity FROM headrace.feed_version WHERE kind = :kind ORDER BY random() LIMIT :rows_max;

-- name: count_entities
-- How many viewers and authors have a version.
SELECT count(*) FROM headrace.feed_version;

-- name: has_entities
-- Whether there are more viewers and authors than so many.
SELECT count(*) > :rows FROM (SELECT FROM headrace.feed_version LIMIT :rows + 1) v;

-- name: whole_posts
-- Authors with version and posts from a score on, and the last one before it, as of one moment.
SELECT v.entity, v.version, coalesce(p.items, '{}') AS items, coalesce(p.scores, '{}') AS scores
FROM headrace.feed_version v LEFT JOIN LATERAL (
    SELECT array_agg(q.id) AS items, array_agg(q.score) AS scores FROM headrace.feed_post q
    WHERE q.author = v.entity AND q.state = 0 AND q.score >= coalesce((
        SELECT max(r.score) FROM headrace.feed_post r
        WHERE r.author = v.entity AND r.state = 0 AND r.score < :floor), :floor)
) p ON true
WHERE v.kind = 1 AND v.entity = ANY (:entities::bigint[]);

-- name: whole_follows
-- Viewers with version and the authors that they are to see, as of one moment.
SELECT v.entity, v.version, coalesce(f.items, '{}') AS items,
    array_fill(0::bigint, ARRAY[coalesce(cardinality(f.items), 0)]) AS scores
FROM headrace.feed_version v LEFT JOIN LATERAL (
    SELECT array_agg(g.author::text) AS items FROM headrace.feed_follow g WHERE g.viewer = v.entity AND g.is_shown
) f ON true
WHERE v.kind = 0 AND v.entity = ANY (:entities::bigint[]);

-- name: now_ms
-- Milliseconds since 1970, by the clock that decides.
SELECT floor(extract(epoch FROM now()) * 1000)::bigint;
