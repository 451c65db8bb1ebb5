-- name: ensure_shards
-- Store the number of shards if there is none. Return the stored number.
SELECT headrace.ensure_feed_shards_v1(:shards::integer);

-- name: create_ids
-- Numbers of text ids, created where missing.
SELECT id, name FROM headrace.map_feed_ids_v1(:names::text[]);

-- name: find_ids
-- Numbers of the text ids that have one.
SELECT id, name FROM headrace.feed_id_map WHERE name = ANY (:names::text[]);

-- name: names_of
-- Text ids by their numbers.
SELECT id, name FROM headrace.feed_id_map WHERE id = ANY (:ids::bigint[]);

-- name: post
-- Add posts. Return each as stored.
SELECT id, author, score, state = 1 AS is_waiting, visible_at, ref, kind, is_new, version
FROM headrace.post_v1(
    :ids::text[], :authors::bigint[], :ats::timestamptz[], :refs::text[], :kinds::text[]);

-- name: publish
-- Make due posts visible.
SELECT entity, version, items, scores FROM headrace.publish_posts_v1(:ids::text[]);

-- name: delete_posts
-- Delete posts. Return each as it was.
SELECT id, author, score, state = 1 AS is_waiting, visible_at, ref, kind, version
FROM headrace.delete_posts_v1(:ids::text[]);

-- name: find_posts
-- Posts by id.
SELECT id, author, score, state = 1 AS is_waiting, visible_at, ref, kind
FROM headrace.feed_post
WHERE id = ANY (:ids::text[]);

-- name: author_posts
-- An author's visible posts before a position, newest first; with kinds, only of these.
SELECT id, author, score, state = 1 AS is_waiting, visible_at, ref, kind
FROM headrace.feed_post
WHERE author = :author AND state = 0 AND (score, id) < (:score, :id::text)
    AND (:kinds::text[] IS NULL OR kind = ANY (:kinds::text[]))
ORDER BY score DESC, id DESC LIMIT :rows_max;

-- name: page
-- A viewer's page between two positions, merged from the newest posts of each shown author; with
-- kinds, only of these.
SELECT p.id, p.author, p.score, p.kind FROM headrace.feed_follow f CROSS JOIN LATERAL (
    SELECT q.id, q.author, q.score, q.kind FROM headrace.feed_post q
    WHERE q.author = f.author AND q.state = 0 AND (q.score, q.id) < (:score, :id::text)
        AND (q.score, q.id) > (:end_score, :end_id::text)
        AND (:kinds::text[] IS NULL OR q.kind = ANY (:kinds::text[]))
    ORDER BY q.score DESC, q.id DESC LIMIT :rows_max
) p
WHERE f.viewer = :viewer AND f.is_shown
ORDER BY p.score DESC, p.id DESC LIMIT :rows_max;

-- name: why_post
-- A post, and the follow, mute and blocks between its author and a viewer.
SELECT p.author, p.score, p.state, p.visible_at, f.followed_at,
    m.made_at AS muted_at, b.made_at AS blocked_at, o.made_at AS blocked_by_at
FROM headrace.feed_post p
LEFT JOIN headrace.feed_follow f ON f.viewer = :viewer AND f.author = p.author
LEFT JOIN headrace.feed_mute_block m
    ON m.viewer = :viewer AND m.author = p.author AND m.kind = 'mute'
LEFT JOIN headrace.feed_mute_block b
    ON b.viewer = :viewer AND b.author = p.author AND b.kind = 'block'
LEFT JOIN headrace.feed_mute_block o
    ON o.viewer = p.author AND o.author = :viewer AND o.kind = 'block'
WHERE p.id = :id::text;

-- name: drop_posts
-- Delete an author's visible posts below a score. Return their number.
DELETE FROM headrace.feed_post WHERE author = :author AND state = 0 AND score < :score;

-- name: follow
-- Follow authors.
SELECT changed, entity, version, items, scores FROM headrace.follow_v1(
    :viewer::bigint, :authors::bigint[], :ats::timestamptz[], :follows_max::integer);

-- name: unfollow
-- Unfollow authors.
SELECT changed, entity, version, items, scores
FROM headrace.unfollow_v1(:viewer::bigint, :authors::bigint[]);

-- name: unfollow_all
-- Unfollow everyone.
SELECT changed, entity, version, items, scores FROM headrace.unfollow_all_v1(:viewer::bigint);

-- name: mute_block
-- Set or end mutes or blocks.
SELECT changed, entity, version, items, scores FROM headrace.mute_block_v1(
    :viewer::bigint, :authors::bigint[], :kind::text, :is_set::boolean, :rows_max::integer);

-- name: muted_blocked
-- Muted or blocked authors, latest first, after a position.
SELECT author AS id, made_at AS since_at FROM headrace.feed_mute_block
WHERE viewer = :entity AND kind = :kind::text
    AND (made_at, author) < (:before_at::timestamptz, :before_id::bigint)
ORDER BY made_at DESC, author DESC LIMIT :rows_max;

-- name: count_muted_blocked
-- Number of muted or blocked authors.
SELECT count(*) FROM headrace.feed_mute_block WHERE viewer = :entity AND kind = :kind::text;

-- name: following
-- Followed authors, latest first, after a position.
SELECT author AS id, followed_at AS since_at FROM headrace.feed_follow
WHERE viewer = :entity AND (followed_at, author) < (:before_at::timestamptz, :before_id::bigint)
ORDER BY followed_at DESC, author DESC LIMIT :rows_max;

-- name: followers
-- Followers of an author, latest first, after a position.
SELECT viewer AS id, followed_at AS since_at FROM headrace.feed_follow
WHERE author = :entity AND (followed_at, viewer) < (:before_at::timestamptz, :before_id::bigint)
ORDER BY followed_at DESC, viewer DESC LIMIT :rows_max;

-- name: count_following
-- Number of followed authors.
SELECT count(*) FROM headrace.feed_follow WHERE viewer = :entity;

-- name: count_followers
-- Number of followers.
SELECT count(*) FROM headrace.feed_follow WHERE author = :entity;

-- name: marker
-- The read marker of a viewer.
SELECT score, id, set_at FROM headrace.feed_marker WHERE viewer = :viewer;

-- name: set_marker
-- Move a read marker forward, never back.
INSERT INTO headrace.feed_marker AS m (viewer, score, id, set_at)
VALUES (:viewer, :score, :id::text, now())
ON CONFLICT (viewer) DO UPDATE SET score = excluded.score, id = excluded.id, set_at = now()
WHERE (m.score, m.id) < (excluded.score, excluded.id);

-- name: unswept
-- The oldest unswept changes: older than a delay, or in the future because the clock was set back.
SELECT id, kind, entity, version, items, scores FROM headrace.feed_outbox
WHERE NOT is_swept AND (made_at < now() - :older_s * interval '1 second' OR made_at > now())
ORDER BY id LIMIT :rows_max;

-- name: unswept_of
-- The unswept changes of viewers or authors, in order.
SELECT id, kind, entity, version, items, scores FROM headrace.feed_outbox
WHERE kind = :kind AND entity = ANY (:entities::bigint[]) AND NOT is_swept ORDER BY id;

-- name: unswept_of_posts
-- The unswept changes of posts, in order.
SELECT o.id, o.kind, o.entity, o.version, o.items, o.scores FROM headrace.feed_outbox o
WHERE o.kind = 1 AND NOT o.is_swept AND EXISTS (
    SELECT FROM unnest(o.items) i (item)
    WHERE split_part(i.item, chr(31), 1) = ANY (:ids::text[]))
ORDER BY o.id;

-- name: mark_swept
-- Mark changes as present in the index.
UPDATE headrace.feed_outbox SET is_swept = true WHERE id = ANY (:ids::bigint[]);

-- name: mark_unswept
-- Mark changes after one, or made shortly before it, as unswept: the index may have lost them.
UPDATE headrace.feed_outbox SET is_swept = false
WHERE is_swept AND (id > :swept OR made_at >= coalesce(
    (SELECT o.made_at FROM headrace.feed_outbox o WHERE o.id = :swept)
        - :late_s * interval '1 second', '-infinity'));

-- name: purge_swept
-- Delete old swept changes and record the last one deleted. Return their number.
WITH old AS (
    SELECT o.id FROM headrace.feed_outbox o
    WHERE o.made_at < now() - :older_s * interval '1 second' AND o.is_swept
    ORDER BY o.id LIMIT :rows_max
), gone AS (
    DELETE FROM headrace.feed_outbox o USING old WHERE o.id = old.id RETURNING o.id
), noted AS (
    UPDATE headrace.feed_index SET purged = greatest(purged, (SELECT max(id) FROM gone))
    WHERE EXISTS (SELECT FROM gone)
)
SELECT count(*) FROM gone;

-- name: last_purged
-- The last change that was purged.
SELECT purged FROM headrace.feed_index;

-- name: changes_after
-- The changes of a viewer or author after a version, in order.
SELECT id, kind, entity, version, items, scores FROM headrace.feed_outbox
WHERE kind = :kind AND entity = :entity AND version > :version ORDER BY version;

-- name: epoch
-- The epoch; one begins if PostgreSQL lost it, or if is_new.
SELECT headrace.feed_epoch_v1(:is_new::boolean);

-- name: find_epoch
-- The epoch; -1: none has begun since PostgreSQL lost it.
SELECT coalesce((SELECT base FROM headrace.feed_epoch), -1);

-- name: versions_of
-- Versions of viewers or authors.
SELECT entity, version FROM headrace.feed_version
WHERE kind = :kind AND entity = ANY (:entities::bigint[]);

-- name: raise_version
-- Raise a version to a number.
INSERT INTO headrace.feed_version AS v (kind, entity, version)
VALUES (:kind, :entity, :version)
ON CONFLICT (kind, entity) DO UPDATE SET version = greatest(v.version, excluded.version);

-- name: oldest_unswept
-- Age of the oldest unswept change in seconds.
SELECT extract(epoch FROM now() - min(made_at))::double precision
FROM headrace.feed_outbox WHERE NOT is_swept;

-- name: overdue_posts
-- Waiting posts that should have been published :late_s ago, counted up to :rows_max.
SELECT count(*) AS posts, min(visible_at) AS since_at FROM (
    SELECT visible_at FROM headrace.feed_post
    WHERE state = 1 AND visible_at < now() - :late_s::double precision * interval '1 second'
    ORDER BY visible_at LIMIT :rows_max
) p;

-- name: recent_entities
-- The viewers or authors among the newest :looked_at changes, latest first.
SELECT o.entity FROM (
    SELECT id, kind, entity FROM headrace.feed_outbox ORDER BY id DESC LIMIT :looked_at
) o WHERE o.kind = :kind GROUP BY o.entity ORDER BY max(o.id) DESC LIMIT :rows_max;

-- name: ids_like
-- Text ids from one text to another.
SELECT id, name FROM headrace.feed_id_map WHERE name BETWEEN :part AND :last
ORDER BY name LIMIT :rows_max;

-- name: kinds_of
-- Which of the entities are viewers (kind 0) or authors (kind 1).
SELECT entity, kind FROM headrace.feed_version
WHERE kind IN (0, 1) AND entity = ANY (:entities::bigint[]) ORDER BY entity, kind;

-- name: entities_after
-- Viewers or authors with a version, in order, after one of them.
SELECT entity FROM headrace.feed_version WHERE kind = :kind AND entity > :after
ORDER BY entity LIMIT :rows_max;

-- name: sample_entities
-- A random sample of viewers or authors.
SELECT entity FROM headrace.feed_version WHERE kind = :kind ORDER BY random() LIMIT :rows_max;

-- name: count_entities
-- Number of viewers and authors with a version.
SELECT count(*) FROM headrace.feed_version;

-- name: has_entities
-- Whether there are more viewers and authors than a number.
SELECT count(*) > :rows FROM (SELECT FROM headrace.feed_version LIMIT :rows + 1) v;

-- name: snapshot_posts
-- Version and posts of authors from a floor on, and their last posts below it, as of one moment.
SELECT v.entity, v.version, coalesce(p.items, '{}') AS items, coalesce(p.scores, '{}') AS scores
FROM headrace.feed_version v LEFT JOIN LATERAL (
    SELECT array_agg(headrace.feed_entry_v1(q.id, q.kind)) AS items,
        array_agg(q.score) AS scores
    FROM headrace.feed_post q
    WHERE q.author = v.entity AND q.state = 0 AND q.score >= coalesce((
        SELECT max(r.score) FROM headrace.feed_post r
        WHERE r.author = v.entity AND r.state = 0 AND r.score < :floor), :floor)
) p ON true
WHERE v.kind = 1 AND v.entity = ANY (:entities::bigint[]);

-- name: snapshot_follows
-- Version and shown authors of viewers, as of one moment.
SELECT v.entity, v.version, coalesce(f.items, '{}') AS items,
    array_fill(0::bigint, ARRAY[coalesce(cardinality(f.items), 0)]) AS scores
FROM headrace.feed_version v LEFT JOIN LATERAL (
    SELECT array_agg(g.author::text) AS items
    FROM headrace.feed_follow g WHERE g.viewer = v.entity AND g.is_shown
) f ON true
WHERE v.kind = 0 AND v.entity = ANY (:entities::bigint[]);

-- name: now_ms
-- Milliseconds since 1970 by the database's clock.
SELECT floor(extract(epoch FROM now()) * 1000)::bigint;
