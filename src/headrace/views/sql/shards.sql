-- name: ensure_shards
-- Set the shards up where there are none; how many there are.
SELECT headrace.ensure_view_shards_v1(:shards::integer);

-- name: shards
-- Offset and corrections of every shard, and who flushes it.
SELECT s.shard, s.through, s.corrections,
    CASE WHEN l.expires_at > now() THEN l.flusher END AS flusher
FROM headrace.views_shard s JOIN headrace.views_lease l USING (shard) ORDER BY s.shard;

-- name: shard
-- Offset and corrections of one shard.
SELECT through, corrections FROM headrace.views_shard WHERE shard = :shard;

-- name: lease_shards
-- Say that this flusher is alive; its shards with their offsets.
SELECT shard, through, corrections FROM headrace.lease_view_shards_v1(:name::text, :lease_s);

-- name: leave_shards
-- Let go of a flusher's shards.
SELECT headrace.leave_view_shards_v1(:name::text);

-- name: flush
-- Count a part of a stream and move the offset; NULL where it was not the expected one.
SELECT headrace.flush_views_v1(
    :shard::integer, :from_id::text, :to_id::text,
    :ids::text[], :classes::smallint[], :hours::timestamptz[], :views::bigint[]);

-- name: write_uniques
-- Keep numbers of viewers; they only grow, so an emptied Valkey takes none away.
INSERT INTO headrace.views_unique AS u (id, day, viewers)
SELECT DISTINCT ON (g.id, g.day) g.id, g.day, g.viewers
FROM unnest(:ids::text[], :days::date[], :viewers::bigint[]) g (id, day, viewers)
WHERE NOT EXISTS (SELECT FROM headrace.views_tombstone t WHERE t.id = g.id AND t.until_at > now())
ORDER BY g.id, g.day, g.viewers DESC
ON CONFLICT (id, day) DO UPDATE SET viewers = greatest(u.viewers, excluded.viewers);

-- name: drop_tombstones
-- Forget tombstones that are over.
DELETE FROM headrace.views_tombstone WHERE until_at < now();

-- name: drop_uniques
-- Remove some numbers of viewers of days before one.
DELETE FROM headrace.views_unique WHERE (id, day) IN (
    SELECT id, day FROM headrace.views_unique WHERE day < :before::date ORDER BY day LIMIT :rows_max);
