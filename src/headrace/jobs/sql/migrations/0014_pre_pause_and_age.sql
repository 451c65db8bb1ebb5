-- A pause that leaves a lane's limits alone, limiters that know what code says of them, the age of open groups.

-- What code last declared, so that a person's word can be taken back. No slack: code has not declared it since.
ALTER TABLE headrace.limiter
    ADD declared_starts_max integer,
    ADD declared_window_s double precision,
    ADD declared_slack_s double precision,
    ADD declared_concurrency integer;

-- Write a limiter's limits; true where they changed and its lanes are still to follow. p_is_set: a person's word;
-- what code declares is kept beside it and changes nothing.
CREATE FUNCTION headrace.set_limiter_v2(
    p_name text, p_starts_max integer, p_window_s double precision, p_slack_s double precision,
    p_concurrency integer, p_is_set boolean
) RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    IF NOT p_is_set AND NOT EXISTS (
        SELECT FROM headrace.limiter m WHERE m.name = p_name AND (
            m.declared_starts_max, m.declared_window_s, m.declared_slack_s, m.declared_concurrency
        ) IS NOT DISTINCT FROM (p_starts_max, p_window_s, p_slack_s, p_concurrency)
    ) THEN
        INSERT INTO headrace.limiter
            (name, declared_starts_max, declared_window_s, declared_slack_s, declared_concurrency)
        VALUES (p_name, p_starts_max, p_window_s, p_slack_s, p_concurrency)
        ON CONFLICT (name) DO UPDATE SET
            declared_starts_max = p_starts_max, declared_window_s = p_window_s,
            declared_slack_s = p_slack_s, declared_concurrency = p_concurrency;
    END IF;
    RETURN headrace.set_limiter_v1(
        p_name, p_starts_max, p_window_s, p_slack_s, p_concurrency, p_is_set);
END $$;

-- Pause or resume a lane; its limits and its weight stay. The limiter's row is locked before the lane's, as by
-- whoever lets lanes follow their limiter.
CREATE FUNCTION headrace.pause_lane_v1(p_limiter text, p_name text, p_paused boolean)
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
    PERFORM headrace.set_lane_v2(
        p_limiter, p_name, v.is_own, v.starts_max, v.window_s, v.concurrency, p_paused, v.weight);
END $$;

-- Since when a group's block is open; NULL: it has ended, or there was none.
ALTER TABLE headrace.job_group ADD opened_at timestamptz;
CREATE INDEX job_group_opened ON headrace.job_group (opened_at) WHERE opened_at IS NOT NULL;
