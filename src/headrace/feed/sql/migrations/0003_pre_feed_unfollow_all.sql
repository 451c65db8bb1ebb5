-- Feed: to unfollow all costs what deleting the rows costs; the change names none of them.

-- Unfollow all. changed: how many were followed. The change has no items, which says that nothing is left at its version.
CREATE FUNCTION headrace.unfollow_all_v1(p_viewer bigint, OUT changed integer, OUT version bigint) LANGUAGE plpgsql
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_shown boolean;
BEGIN
    PERFORM headrace.lock_feed_viewers_v1(ARRAY[p_viewer]);
    SELECT count(*), bool_or(f.is_shown) INTO changed, v_shown FROM headrace.feed_follow f WHERE f.viewer = p_viewer;
    DELETE FROM headrace.feed_follow f WHERE f.viewer = p_viewer;
    IF v_shown THEN
        version := headrace.log_feed_v1(0::smallint, p_viewer, '{}', '{}');
    END IF;
END $$;
