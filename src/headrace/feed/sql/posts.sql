-- name: post
-- Add posts; each as it is then.
SELECT id, author, score, state, visible_at, is_new, version FROM headrace.post_v1(
    :ids::text[], :authors::bigint[], :ats::timestamptz[], :refs::text[]);

-- name: publish
-- Show posts whose moment has come.
SELECT entity, version, items, scores FROM headrace.publish_posts_v1(:ids::text[]);

-- name: delete_posts
-- Remove posts; each as it was.
SELECT id, author, state, ref, version FROM headrace.delete_posts_v1(:ids::text[]);

-- name: find_posts
-- Posts by id.
SELECT id, author, score, state, visible_at, ref FROM headrace.feed_post WHERE id = ANY (:ids::text[]);

-- name: author_posts
-- An author's shown posts before a place, newest first.
SELECT id, author, score, state, visible_at, ref FROM headrace.feed_post
WHERE author = :author AND state = 0 AND (score, id) < (:score, :id::text)
ORDER BY score DESC, id DESC LIMIT :rows_max;

-- name: page
-- A viewer's page between two places, newest first: the newest posts of each author that he is to see.
SELECT p.id, p.author, p.score FROM headrace.feed_follow f CROSS JOIN LATERAL (
    SELECT q.id, q.author, q.score FROM headrace.feed_post q
    WHERE q.author = f.author AND q.state = 0 AND (q.score, q.id) < (:score, :id::text)
        AND (q.score, q.id) > (:end_score, :end_id::text)
    ORDER BY q.score DESC, q.id DESC LIMIT :rows_max
) p
WHERE f.viewer = :viewer AND f.is_shown
ORDER BY p.score DESC, p.id DESC LIMIT :rows_max;

-- name: why_post
-- A post, and what stands between its author and a viewer.
SELECT p.author, p.score, p.state, p.visible_at, f.followed_at, m.made_at AS muted_at, b.made_at AS blocked_at,
    o.made_at AS blocked_by_at
FROM headrace.feed_post p
LEFT JOIN headrace.feed_follow f ON f.viewer = :viewer AND f.author = p.author
LEFT JOIN headrace.feed_bar m ON m.viewer = :viewer AND m.author = p.author AND m.kind = 'mute'
LEFT JOIN headrace.feed_bar b ON b.viewer = :viewer AND b.author = p.author AND b.kind = 'block'
LEFT JOIN headrace.feed_bar o ON o.viewer = p.author AND o.author = :viewer AND o.kind = 'block'
WHERE p.id = :id::text;

-- name: drop_posts
-- Remove an author's shown posts from before a score; how many.
DELETE FROM headrace.feed_post WHERE author = :author AND state = 0 AND score < :score;
