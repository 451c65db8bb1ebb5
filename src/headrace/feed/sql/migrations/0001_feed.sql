-- Feed: posts, follows, mutes, blocks, a version per viewer and author, and the index's outbox.

-- One row: the fixed number of shards, and the last outbox row that was purged.
CREATE TABLE headrace.feed_index (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    shards integer NOT NULL,
    purged bigint NOT NULL DEFAULT 0
);

-- Viewers and authors are positive numbers. Ids that are text map to negative numbers.
CREATE SEQUENCE headrace.feed_mapped_id AS bigint
    INCREMENT -1 MINVALUE -9007199254740991 MAXVALUE -1 START -1;
CREATE TABLE headrace.feed_id_map (
    id bigint PRIMARY KEY DEFAULT nextval('headrace.feed_mapped_id'),
    name text COLLATE "C" NOT NULL UNIQUE
);

-- score: milliseconds since 1970 times 2048, plus a tick that separates posts of one millisecond.
-- state: 0 visible, 1 waiting until visible_at.
CREATE SEQUENCE headrace.feed_tick AS integer MINVALUE 0 MAXVALUE 2047 START 0 CYCLE;
CREATE TABLE headrace.feed_post (
    id text COLLATE "C" PRIMARY KEY,
    author bigint NOT NULL,
    score bigint NOT NULL,
    state smallint NOT NULL,
    visible_at timestamptz NOT NULL,
    ref text,
    kind text COLLATE "C"
);
CREATE INDEX feed_post_author ON headrace.feed_post (author, score, id) WHERE state = 0;
CREATE INDEX feed_post_waiting ON headrace.feed_post (visible_at) WHERE state = 1;

-- is_shown: not muted by the viewer, and not blocked in either direction.
-- Every change of it locks the viewer's version row.
CREATE TABLE headrace.feed_follow (
    viewer bigint,
    author bigint,
    followed_at timestamptz NOT NULL,
    is_shown boolean NOT NULL,
    PRIMARY KEY (viewer, author)
);
CREATE INDEX feed_follow_author ON headrace.feed_follow (author, followed_at, viewer);

-- kind: mute, block.
CREATE TABLE headrace.feed_mute_block (
    viewer bigint,
    author bigint,
    kind text,
    made_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (viewer, author, kind)
);
CREATE INDEX feed_mute_block_author ON headrace.feed_mute_block (author, viewer)
    WHERE kind = 'block';

-- The last post that a viewer has read.
CREATE TABLE headrace.feed_marker (
    viewer bigint PRIMARY KEY,
    score bigint NOT NULL,
    id text COLLATE "C" NOT NULL,
    set_at timestamptz NOT NULL
);

-- kind: 0 follows of a viewer, 1 posts of an author. Raised in the transaction of the change, by 1
-- or to the epoch. The index applies changes in this order only.
CREATE TABLE headrace.feed_version (
    kind smallint,
    entity bigint,
    version bigint NOT NULL,
    PRIMARY KEY (kind, entity)
) WITH (fillfactor = 70);

-- One row: the lowest version of new changes. Unlogged: PostgreSQL empties the table after a crash,
-- a failover and a restore of files, and may have lost commits then. The next epoch is the time in
-- microseconds, so it is higher than all versions of lost changes.
CREATE UNLOGGED TABLE headrace.feed_epoch (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    base bigint NOT NULL
);
INSERT INTO headrace.feed_epoch (base) VALUES (0);

-- A change of the index: authors or post ids, each with a score. A negative score removes.
CREATE TABLE headrace.feed_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind smallint NOT NULL,
    entity bigint NOT NULL,
    version bigint NOT NULL,
    items text[] NOT NULL,
    scores bigint[] NOT NULL,
    made_at timestamptz NOT NULL DEFAULT now(),
    is_swept boolean NOT NULL DEFAULT false,
    UNIQUE (kind, entity, version)
);
CREATE INDEX feed_outbox_unswept ON headrace.feed_outbox (id) WHERE NOT is_swept;

-- A post as the index stores it: the id, and after a separator its kind.
CREATE FUNCTION headrace.feed_entry_v1(p_id text, p_kind text)
RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
$$ SELECT p_id || coalesce(chr(31) || p_kind, '') $$;

-- Functions are planned without sequential scans: a plan made for an empty table stays in use.

-- Store the number of shards if there is none. Return the stored number.
CREATE FUNCTION headrace.ensure_feed_shards_v1(p_shards integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_shards integer;
BEGIN
    SELECT i.shards INTO v_shards FROM headrace.feed_index i;
    IF NOT FOUND THEN
        INSERT INTO headrace.feed_index (shards) VALUES (p_shards) ON CONFLICT DO NOTHING;
        SELECT i.shards INTO v_shards FROM headrace.feed_index i;
    END IF;
    RETURN v_shards;
END $$;

-- Return the number of each text id. Create missing ones.
CREATE FUNCTION headrace.map_feed_ids_v1(p_names text[])
RETURNS TABLE (id bigint, name text) LANGUAGE plpgsql
SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO headrace.feed_id_map (name)
    SELECT u.name FROM unnest(p_names) u (name)
    WHERE NOT EXISTS (SELECT FROM headrace.feed_id_map n WHERE n.name = u.name)
    GROUP BY 1 ORDER BY 1 ON CONFLICT DO NOTHING;
    RETURN QUERY SELECT n.id, n.name FROM headrace.feed_id_map n WHERE n.name = ANY (p_names);
END $$;

-- Lock viewers in order of their ids against other changes of their follows.
CREATE FUNCTION headrace.lock_feed_viewers_v1(p_viewers bigint[]) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.feed_version (kind, entity, version)
    SELECT 0, u.viewer, 0 FROM unnest(p_viewers) u (viewer)
    WHERE NOT EXISTS (
        SELECT FROM headrace.feed_version v WHERE v.kind = 0 AND v.entity = u.viewer)
    GROUP BY u.viewer ORDER BY u.viewer ON CONFLICT DO NOTHING;
    PERFORM FROM headrace.feed_version v WHERE v.kind = 0 AND v.entity = ANY (p_viewers)
    ORDER BY v.entity FOR UPDATE;
END $$;

-- Return the epoch. Begin one if there is none, or with p_is_new.
CREATE FUNCTION headrace.feed_epoch_v1(p_is_new boolean DEFAULT false)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_base bigint;
    v_next bigint := floor(extract(epoch FROM clock_timestamp()) * 1000000);
BEGIN
    IF p_is_new THEN
        INSERT INTO headrace.feed_epoch AS e (base) VALUES (v_next)
        ON CONFLICT (is_only) DO UPDATE SET base = greatest(e.base + 1, excluded.base);
    END IF;
    SELECT e.base INTO v_base FROM headrace.feed_epoch e;
    IF NOT FOUND THEN
        INSERT INTO headrace.feed_epoch (base) VALUES (v_next) ON CONFLICT DO NOTHING;
        SELECT e.base INTO v_base FROM headrace.feed_epoch e;
    END IF;
    RETURN v_base;
END $$;

-- Raise a version and store its change in the outbox. Return the version.
CREATE FUNCTION headrace.log_feed_v1(
    p_kind smallint, p_entity bigint, p_items text[], p_scores bigint[]
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_version bigint;
BEGIN
    INSERT INTO headrace.feed_version AS v (kind, entity, version)
    VALUES (p_kind, p_entity, greatest(1, headrace.feed_epoch_v1()))
    ON CONFLICT (kind, entity) DO UPDATE SET version = greatest(v.version + 1, excluded.version)
    RETURNING v.version INTO v_version;
    INSERT INTO headrace.feed_outbox (kind, entity, version, items, scores)
    VALUES (p_kind, p_entity, v_version, p_items, p_scores);
    RETURN v_version;
END $$;

-- Follow authors. p_ats: the moment of each follow, NULL for now.
-- changed: number of new follows; -1: the limit would be exceeded, and nothing was done.
CREATE FUNCTION headrace.follow_v1(
    p_viewer bigint, p_authors bigint[], p_ats timestamptz[], p_follows_max integer,
    OUT changed integer, OUT entity bigint, OUT version bigint,
    OUT items text[], OUT scores bigint[]
) LANGUAGE plpgsql
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_old integer;
    v_new integer;
BEGIN
    entity := p_viewer;
    PERFORM headrace.lock_feed_viewers_v1(ARRAY[p_viewer]);
    SELECT count(*) INTO v_old FROM headrace.feed_follow f WHERE f.viewer = p_viewer;
    SELECT count(DISTINCT u.author) INTO v_new FROM unnest(p_authors) u (author)
    WHERE NOT EXISTS (
        SELECT FROM headrace.feed_follow f WHERE f.viewer = p_viewer AND f.author = u.author);
    IF v_new > 0 AND v_old + v_new > p_follows_max THEN
        changed := -1;
        RETURN;
    END IF;
    WITH placed AS (
        INSERT INTO headrace.feed_follow (viewer, author, followed_at, is_shown)
        SELECT p_viewer, u.author, coalesce(min(u.at), now()), count(b.author) = 0
        FROM unnest(p_authors, p_ats) u (author, at)
        LEFT JOIN (
            SELECT m.author FROM headrace.feed_mute_block m WHERE m.viewer = p_viewer
            UNION ALL
            SELECT k.viewer FROM headrace.feed_mute_block k
            WHERE k.author = p_viewer AND k.kind = 'block'
        ) b ON b.author = u.author
        GROUP BY u.author ORDER BY u.author
        ON CONFLICT DO NOTHING
        RETURNING author, is_shown
    ) SELECT count(*), array_agg(p.author::text) FILTER (WHERE p.is_shown)
    INTO changed, items FROM placed p;
    IF items IS NOT NULL THEN
        scores := array_fill(0::bigint, ARRAY[cardinality(items)]);
        version := headrace.log_feed_v1(0::smallint, p_viewer, items, scores);
    END IF;
END $$;

-- Unfollow authors. changed: number of removed follows.
CREATE FUNCTION headrace.unfollow_v1(
    p_viewer bigint, p_authors bigint[],
    OUT changed integer, OUT entity bigint, OUT version bigint,
    OUT items text[], OUT scores bigint[]
) LANGUAGE plpgsql
SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    entity := p_viewer;
    PERFORM headrace.lock_feed_viewers_v1(ARRAY[p_viewer]);
    WITH gone AS (
        DELETE FROM headrace.feed_follow f
        WHERE f.viewer = p_viewer AND f.author = ANY (p_authors)
        RETURNING f.author, f.is_shown
    ) SELECT count(*), array_agg(g.author::text) FILTER (WHERE g.is_shown)
    INTO changed, items FROM gone g;
    IF items IS NOT NULL THEN
        scores := array_fill(-1::bigint, ARRAY[cardinality(items)]);
        version := headrace.log_feed_v1(0::smallint, p_viewer, items, scores);
    END IF;
END $$;

-- Unfollow everyone. changed: number of removed follows.
-- The change has no items, which means an empty follow set. So it costs what the deletion costs.
CREATE FUNCTION headrace.unfollow_all_v1(
    p_viewer bigint,
    OUT changed integer, OUT entity bigint, OUT version bigint,
    OUT items text[], OUT scores bigint[]
) LANGUAGE plpgsql
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_shown boolean;
BEGIN
    entity := p_viewer;
    items := '{}';
    scores := '{}';
    PERFORM headrace.lock_feed_viewers_v1(ARRAY[p_viewer]);
    SELECT count(*), bool_or(f.is_shown) INTO changed, v_shown
    FROM headrace.feed_follow f WHERE f.viewer = p_viewer;
    DELETE FROM headrace.feed_follow f WHERE f.viewer = p_viewer;
    IF v_shown THEN
        version := headrace.log_feed_v1(0::smallint, p_viewer, items, scores);
    END IF;
END $$;

-- Whether neither a mute nor a block hides an author from a follower.
CREATE FUNCTION headrace.is_feed_shown_v1(p_viewer bigint, p_author bigint)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (
            SELECT FROM headrace.feed_mute_block b
            WHERE b.viewer = p_viewer AND b.author = p_author)
        AND NOT EXISTS (
            SELECT FROM headrace.feed_mute_block b
            WHERE b.viewer = p_author AND b.author = p_viewer AND b.kind = 'block');
$$;

-- Set or end mutes or blocks. One row per viewer whose follow set changes, and at least one row.
-- changed is the same in all rows; -1: the limit would be exceeded, and nothing was done.
CREATE FUNCTION headrace.mute_block_v1(
    p_viewer bigint, p_authors bigint[], p_kind text, p_is_set boolean, p_rows_max integer)
RETURNS TABLE (changed integer, entity bigint, version bigint, items text[], scores bigint[])
LANGUAGE plpgsql
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_changed integer;
    v_old integer;
    v_new integer;
    v_row record;
BEGIN
    PERFORM headrace.lock_feed_viewers_v1(
        CASE WHEN p_kind = 'block' THEN array_append(p_authors, p_viewer) ELSE ARRAY[p_viewer] END);
    IF p_is_set THEN
        SELECT count(*) INTO v_old FROM headrace.feed_mute_block b
        WHERE b.viewer = p_viewer AND b.kind = p_kind;
        SELECT count(DISTINCT u.author) INTO v_new FROM unnest(p_authors) u (author)
        WHERE NOT EXISTS (
            SELECT FROM headrace.feed_mute_block b
            WHERE b.viewer = p_viewer AND b.author = u.author AND b.kind = p_kind);
        IF v_new > 0 AND v_old + v_new > p_rows_max THEN
            RETURN QUERY SELECT -1, p_viewer, NULL::bigint, NULL::text[], NULL::bigint[];
            RETURN;
        END IF;
        INSERT INTO headrace.feed_mute_block (viewer, author, kind)
        SELECT DISTINCT p_viewer, u.author, p_kind FROM unnest(p_authors) u (author) ORDER BY 2
        ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM headrace.feed_mute_block b
        WHERE b.viewer = p_viewer AND b.author = ANY (p_authors) AND b.kind = p_kind;
    END IF;
    GET DIAGNOSTICS v_changed = ROW_COUNT;
    RETURN QUERY SELECT v_changed, p_viewer, NULL::bigint, NULL::text[], NULL::bigint[];
    FOR v_row IN
        WITH moved AS (
            UPDATE headrace.feed_follow f SET is_shown = NOT f.is_shown
            WHERE ((f.viewer = p_viewer AND f.author = ANY (p_authors))
                    OR (p_kind = 'block' AND f.author = p_viewer AND f.viewer = ANY (p_authors)))
                AND f.is_shown <> headrace.is_feed_shown_v1(f.viewer, f.author)
            RETURNING f.viewer, f.author, f.is_shown
        ) SELECT m.viewer, array_agg(m.author::text) AS items,
            array_agg(CASE WHEN m.is_shown THEN 0 ELSE -1 END::bigint) AS scores
        FROM moved m GROUP BY 1 ORDER BY 1
    LOOP
        RETURN QUERY SELECT v_changed, v_row.viewer,
            headrace.log_feed_v1(0::smallint, v_row.viewer, v_row.items, v_row.scores),
            v_row.items, v_row.scores;
    END LOOP;
END $$;

-- Add posts. p_ats: the moment of each, NULL for now; later ones wait. One row per id as stored.
-- is_new: added by this call. version: of the author, if the post is new and visible.
CREATE FUNCTION headrace.post_v1(
    p_ids text[], p_authors bigint[], p_ats timestamptz[], p_refs text[], p_kinds text[])
RETURNS TABLE (
    id text, author bigint, score bigint, state smallint, visible_at timestamptz,
    ref text, kind text, is_new boolean, version bigint
) LANGUAGE plpgsql
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_new text[];
    v_first bigint := greatest(1, headrace.feed_epoch_v1());
BEGIN
    WITH given AS MATERIALIZED (
        SELECT u.id, u.author, coalesce(u.at, now()) AS at, u.ref, u.kind,
            CASE WHEN u.at IS NULL THEN nextval('headrace.feed_tick') ELSE 0 END AS tick
        FROM unnest(p_ids, p_authors, p_ats, p_refs, p_kinds)
            WITH ORDINALITY u (id, author, at, ref, kind, n)
        ORDER BY u.n
    ), placed AS (
        INSERT INTO headrace.feed_post (id, author, score, state, visible_at, ref, kind)
        SELECT g.id, g.author, (floor(extract(epoch FROM g.at) * 1000)::bigint << 11) + g.tick,
            CASE WHEN g.at > now() THEN 1 ELSE 0 END, g.at, g.ref, g.kind
        FROM given g ORDER BY g.id
        ON CONFLICT DO NOTHING RETURNING id
    ) SELECT array_agg(p.id) INTO v_new FROM placed p;
    WITH shown AS MATERIALIZED (
        SELECT p.author, array_agg(headrace.feed_entry_v1(p.id, p.kind)) AS items,
            array_agg(p.score) AS scores
        FROM headrace.feed_post p WHERE p.id = ANY (v_new) AND p.state = 0 GROUP BY 1
    ), raised AS (
        INSERT INTO headrace.feed_version AS v (kind, entity, version)
        SELECT 1, s.author, v_first FROM shown s ORDER BY s.author
        ON CONFLICT (kind, entity) DO UPDATE SET version = greatest(v.version + 1, excluded.version)
        RETURNING v.entity, v.version
    )
    INSERT INTO headrace.feed_outbox (kind, entity, version, items, scores)
    SELECT 1, r.entity, r.version, s.items, s.scores
    FROM raised r JOIN shown s ON s.author = r.entity;
    RETURN QUERY SELECT p.id, p.author, p.score, p.state, p.visible_at, p.ref, p.kind,
            n.id IS NOT NULL, v.version
        FROM headrace.feed_post p
        LEFT JOIN unnest(v_new) n (id) ON n.id = p.id
        LEFT JOIN headrace.feed_version v
            ON v.kind = 1 AND v.entity = p.author AND n.id IS NOT NULL AND p.state = 0
        WHERE p.id = ANY (p_ids);
END $$;

-- Make due posts visible, with a score of now.
CREATE FUNCTION headrace.publish_posts_v1(p_ids text[])
RETURNS TABLE (entity bigint, version bigint, items text[], scores bigint[]) LANGUAGE plpgsql
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_row record;
BEGIN
    PERFORM FROM headrace.feed_post p WHERE p.id = ANY (p_ids) ORDER BY p.id FOR UPDATE;
    FOR v_row IN
        WITH shown AS (
            UPDATE headrace.feed_post p SET state = 0,
                score = (floor(extract(epoch FROM now()) * 1000)::bigint << 11)
                    + nextval('headrace.feed_tick')
            WHERE p.id = ANY (p_ids) AND p.state = 1 AND p.visible_at <= now()
            RETURNING p.id, p.author, p.score, p.kind
        ) SELECT s.author, array_agg(headrace.feed_entry_v1(s.id, s.kind)) AS items,
            array_agg(s.score) AS scores
        FROM shown s GROUP BY 1 ORDER BY 1
    LOOP
        RETURN QUERY SELECT v_row.author,
            headrace.log_feed_v1(1::smallint, v_row.author, v_row.items, v_row.scores),
            v_row.items, v_row.scores;
    END LOOP;
END $$;

-- Delete posts. One row per post that existed; version: of the author, if the post was visible.
CREATE FUNCTION headrace.delete_posts_v1(p_ids text[])
RETURNS TABLE (
    id text, author bigint, score bigint, state smallint, visible_at timestamptz,
    ref text, kind text, version bigint
) LANGUAGE plpgsql
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_gone headrace.feed_post[];
    v_row record;
BEGIN
    PERFORM FROM headrace.feed_post p WHERE p.id = ANY (p_ids) ORDER BY p.id FOR UPDATE;
    WITH gone AS (DELETE FROM headrace.feed_post p WHERE p.id = ANY (p_ids) RETURNING p.*)
    SELECT array_agg(ROW (g.*)::headrace.feed_post) INTO v_gone FROM gone g;
    FOR v_row IN
        SELECT g.author, array_agg(headrace.feed_entry_v1(g.id, g.kind)) AS items
        FROM unnest(v_gone) g
        WHERE g.state = 0 GROUP BY 1 ORDER BY 1
    LOOP
        PERFORM headrace.log_feed_v1(1::smallint, v_row.author, v_row.items,
            array_fill(-1::bigint, ARRAY[cardinality(v_row.items)]));
    END LOOP;
    RETURN QUERY SELECT g.id, g.author, g.score, g.state, g.visible_at, g.ref, g.kind, v.version
        FROM unnest(v_gone) g
        LEFT JOIN headrace.feed_version v ON v.kind = 1 AND v.entity = g.author AND g.state = 0;
END $$;
