-- Changes: what each flush, move and deletion changed, in the order of their commits.

-- A shard's numbers have no gap: they are assigned under the lock of its row, which is held until
-- the commit. class -1: the entity was deleted. `at` distinguishes a change from another one that
-- got the same number after PostgreSQL lost the first commit.
CREATE TABLE headrace.views_change (
    shard integer,
    number bigint,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    size integer NOT NULL DEFAULT 0,
    ids text[] NOT NULL DEFAULT '{}',
    classes smallint[] NOT NULL DEFAULT '{}',
    hours timestamptz[] NOT NULL DEFAULT '{}',
    views bigint[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (shard, number)
);

-- Record changes of a shard, whose row the transaction has locked.
CREATE FUNCTION headrace.note_view_changes_v1(
    p_shard integer, p_ids text[], p_classes smallint[], p_hours timestamptz[], p_views bigint[]
) RETURNS void LANGUAGE sql AS $$
    WITH numbered AS (
        UPDATE headrace.views_shard SET changes = changes + 1
        WHERE shard = p_shard AND cardinality(p_ids) > 0 RETURNING changes
    )
    INSERT INTO headrace.views_change (shard, number, size, ids, classes, hours, views)
    SELECT p_shard, n.changes, cardinality(p_ids), p_ids, p_classes, p_hours, p_views
    FROM numbered n;
$$;

-- Turn the changes on or off (p_kept_s = 0), and drop old ones. Return how many were dropped.
-- The newest change of each shard stays, so that a reader's position can be checked.
CREATE FUNCTION headrace.keep_view_changes_v1(p_kept_s double precision, p_rows_max integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_dropped integer;
BEGIN
    IF (SELECT s.keeps_changes FROM headrace.views_history s) <> (p_kept_s > 0) THEN
        PERFORM FROM headrace.views_history FOR UPDATE;
        PERFORM FROM headrace.views_shard ORDER BY shard FOR UPDATE;
        UPDATE headrace.views_history SET keeps_changes = p_kept_s > 0;
        DELETE FROM headrace.views_change;
        -- A new first number: a reader of the time before notices that changes are missing.
        UPDATE headrace.views_shard SET changes = changes + 1;
        INSERT INTO headrace.views_change (shard, number)
        SELECT s.shard, s.changes FROM headrace.views_shard s WHERE p_kept_s > 0;
    END IF;
    DELETE FROM headrace.views_change c WHERE (c.shard, c.number) IN (
        SELECT o.shard, o.number FROM headrace.views_shard s CROSS JOIN LATERAL (
            SELECT k.shard, k.number FROM headrace.views_change k
            WHERE k.shard = s.shard AND k.number < s.changes
                AND k.at < now() - p_kept_s * interval '1 second'
            ORDER BY k.number LIMIT p_rows_max) o);
    GET DIAGNOSTICS v_dropped = ROW_COUNT;
    RETURN v_dropped;
END $$;
