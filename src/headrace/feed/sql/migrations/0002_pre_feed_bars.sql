-- Feed: how many a viewer may mute or block is bounded, as his follows are.

-- Mute or block authors, or end it. A row for each viewer whose index changes; `changed` is the same in all of them, and
-- there is one row at least. -1: more than p_bars_max would be muted or blocked; nothing was done.
CREATE FUNCTION headrace.bar_v2(
    p_viewer bigint, p_authors bigint[], p_kind text, p_is_set boolean, p_bars_max integer)
RETURNS TABLE (changed integer, entity bigint, version bigint, items text[], scores bigint[]) LANGUAGE plpgsql
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
        SELECT count(*) INTO v_old FROM headrace.feed_bar b WHERE b.viewer = p_viewer AND b.kind = p_kind;
        SELECT count(DISTINCT u.author) INTO v_new FROM unnest(p_authors) u (author)
        WHERE NOT EXISTS (
            SELECT FROM headrace.feed_bar b WHERE b.viewer = p_viewer AND b.author = u.author AND b.kind = p_kind);
        IF v_new > 0 AND v_old + v_new > p_bars_max THEN
            RETURN QUERY SELECT -1, p_viewer, NULL::bigint, NULL::text[], NULL::bigint[];
            RETURN;
        END IF;
        INSERT INTO headrace.feed_bar (viewer, author, kind)
        SELECT DISTINCT p_viewer, u.author, p_kind FROM unnest(p_authors) u (author) ORDER BY 2
        ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM headrace.feed_bar b WHERE b.viewer = p_viewer AND b.author = ANY (p_authors) AND b.kind = p_kind;
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
            headrace.log_feed_v1(0::smallint, v_row.viewer, v_row.items, v_row.scores), v_row.items, v_row.scores;
    END LOOP;
END $$;
