-- The slack of a lane with limits of its own grows with its window: where a window of a minute grants many starts at once, a
-- busy process needs longer than a quarter of a second to begin them, and what is late goes back (a fifth to a half of
-- all photos of 100 customers under load). A second of a minute costs 1.6 % of the rate.

-- Set a lane's own limits, its pause and its weight. is_own false: it follows its limiter again.
CREATE FUNCTION headrace.set_lane_v3(
    p_limiter text, p_name text, p_is_own boolean, p_starts_max integer, p_window_s double precision,
    p_concurrency integer, p_paused boolean, p_weight integer
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v headrace.limiter%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        SELECT * INTO v FROM headrace.limiter m WHERE m.name = p_limiter FOR SHARE;
        UPDATE headrace.lane SET is_own = p_is_own, paused = p_paused, weight = p_weight
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

-- Pause or resume a lane; its limits and its weight stay. The limiter's row is locked before the lane's, as by
-- whoever lets lanes follow their limiter.
CREATE FUNCTION headrace.pause_lane_v2(p_limiter text, p_name text, p_paused boolean)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v headrace.lane%ROWTYPE;
BEGIN
    FOR i IN 1..3 LOOP
        PERFORM headrace.make_lanes_v1(ARRAY[p_limiter], ARRAY[p_name]);
        PERFORM 1 FROM headrace.limiter m WHERE m.name = p_limiter FOR SHARE;
        SELECT * INTO v FROM headrace.lane l WHERE l.limiter = p_limiter AND l.name = p_name
        FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
    END LOOP;
    PERFORM headrace.set_lane_v3(
        p_limiter, p_name, v.is_own, v.starts_max, v.window_s, v.concurrency, p_paused, v.weight);
END $$;
