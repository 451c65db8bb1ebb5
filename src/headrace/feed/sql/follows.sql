-- name: ensure_shards
-- Set the number of shards where there is none; how many there are.
SELECT headrace.ensure_feed_shards_v1(:shards::integer);

-- name: make_names
-- The numbers of names, made where they are missing.
SELECT id, name FROM headrace.feed_names_v1(:names::text[]);

-- name: find_names
-- The numbers of names that have one.
SELECT id, name FROM headrace.feed_name WHERE name = ANY (:names::text[]);

-- name: names_of
-- Names by their numbers.
SELECT id, name FROM headrace.feed_name WHERE id = ANY (:ids::bigint[]);

-- name: follow
-- Follow authors.
SELECT changed, entity, version, items, scores FROM headrace.follow_v1(
    :viewer::bigint, :authors::bigint[], :ats::timestamptz[], :follows_max::integer);

-- name: unfollow
-- Unfollow authors.
SELECT changed, entity, version, items, scores FROM headrace.unfollow_v1(:viewer::bigint, :authors::bigint[]);

-- name: unfollow_all
-- Unfollow all.
SELECT changed, version FROM headrace.unfollow_all_v1(:viewer::bigint);

-- name: bar
-- Mute or block authors, or end it.
SELECT changed, entity, version, items, scores FROM headrace.bar_v2(
    :viewer::bigint, :authors::bigint[], :kind::text, :is_set::boolean, :bars_max::integer);

-- name: bars
-- Whom a viewer mutes or blocks, latest first, after a place.
SELECT author AS id, made_at AS since_at FROM headrace.feed_bar
WHERE viewer = :viewer AND kind = :kind::text
    AND (made_at, author) < (:before_at::timestamptz, :before_id::bigint)
ORDER BY made_at DESC, author DESC LIMIT :rows_max;

-- name: count_bars
-- How many a viewer mutes or blocks.
SELECT count(*) FROM headrace.feed_bar WHERE viewer = :viewer AND kind = :kind::text;

-- name: following
-- Whom a viewer follows, latest first, after a place.
SELECT author AS id, followed_at AS since_at FROM headrace.feed_follow
WHERE viewer = :entity AND (followed_at, author) < (:before_at::timestamptz, :before_id::bigint)
ORDER BY followed_at DESC, author DESC LIMIT :rows_max;

-- name: followers
-- Who follows an author, latest first, after a place.
SELECT viewer AS id, followed_at AS since_at FROM headrace.feed_follow
WHERE author = :entity AND (followed_at, viewer) < (:before_at::timestamptz, :before_id::bigint)
ORDER BY followed_at DESC, viewer DESC LIMIT :rows_max;

-- name: count_following
-- How many a viewer follows.
SELECT count(*) FROM headrace.feed_follow WHERE viewer = :entity;

-- name: count_followers
-- How many follow an author.
SELECT count(*) FROM headrace.feed_follow WHERE author = :entity;

-- name: marker
-- Up to where a viewer has read.
SELECT score, id, set_at FROM headrace.feed_marker WHERE viewer = :viewer;

-- name: set_marker
-- Note up to where a viewer has read; never back.
INSERT INTO headrace.feed_marker AS m (viewer, score, id, set_at) VALUES (:viewer, :score, :id::text, now())
ON CONFLICT (viewer) DO UPDATE SET score = excluded.score, id = excluded.id, set_at = now()
WHERE (m.score, m.id) < (excluded.score, excluded.id);
