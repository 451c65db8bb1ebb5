-- A room that sets the limits of a lane leaves what a person said of it: a customer's new rate ended the pause of its lane.

-- Set a lane's own limits, its pause and its weight; NULL for these two: as they are. is_own false: it follows its limiter
-- again.
CREATE FUNCTION headrace.set_lane_v4(
    p_limiter text, p_name text, p_is_own boolean, p_starts_max integer, p_window_s double precision,
    p_concurrency integer, p_paused boolean, p_weight integer
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v headrace.limiter%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        SELECT * INTO v FROM headrace.limiter m WHERE m.name = p_limiter FOR SHARE;
        UPDATE headrace.lane SET is_own = p_is_own, paused = coalesce(p_paused, paused), weight = coalesce(p_weight, weight)
        WHERE limiter = p_limiter AND name = p_name;
        EXIT WHEN FOUND;
    END LOOP;
    IF p_is_own THEN
        PERFORM headrace.limit_lanes_v1(
            p_limiter, ARRAY[p_name], p_starts_max, p_window_s,
            greatest(coalesce(v.slack_s, 0.25), least(1, p_window_s / 60)), p_concurrency);
    ELSE
        PERFORM headrace.limit_lanes_v1(
            p_limiter, ARRAY[p_name], v.starts_max, v.window_s, coalesce(v.slack_s, 0.25),
            v.concurrency);
    END IF;
END $$;
