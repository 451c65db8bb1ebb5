-- Functions that steer: cancel a job, retry one by hand, set a lane.

-- Cancel a waiting job; true where it was waiting. Its key is released, its group counts it.
CREATE FUNCTION headrace.cancel_v1(p_id bigint)
RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    -- Twice, since a job may move from job_ready to its lane between the two looks.
    FOR i IN 1..2 LOOP
        DELETE FROM headrace.job_ready WHERE id = p_id RETURNING * INTO v;
        EXIT WHEN FOUND;
        DELETE FROM headrace.lane_job WHERE id = p_id RETURNING * INTO v;
        IF FOUND THEN
            INSERT INTO headrace.lane_event (limiter, lane, queue, k)
            SELECT q.limiter, v.lane, v.queue, -1 FROM headrace.queue q WHERE q.id = v.queue;
            EXIT;
        END IF;
    END LOOP;
    IF v.id IS NULL THEN
        RETURN false;
    END IF;
    INSERT INTO headrace.job_failed
        (id, queue, state, run_at, group_id, priority, attempt, losses, lane, unique_key,
         traceparent, error, traceback, payload)
    VALUES (v.id, v.queue, 'cancelled', v.run_at, v.group_id, v.priority, v.attempt, v.losses,
            v.lane, v.unique_key, v.traceparent, 'cancelled', '', v.payload);
    IF v.unique_key IS NOT NULL THEN
        DELETE FROM headrace.job_unique
        WHERE queue = v.queue AND key = v.unique_key AND job_id = p_id;
    END IF;
    IF v.group_id IS NOT NULL THEN
        PERFORM headrace.finish_members_v1(ARRAY[v.group_id], ARRAY['cancelled']);
    END IF;
    RETURN true;
END $$;

-- Give an ended job another life with all its retries; true where there was one. It has left its group.
-- A key that another job took meanwhile violates job_unique's key.
CREATE FUNCTION headrace.retry_ended_v1(p_id bigint)
RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    DELETE FROM headrace.job_failed WHERE id = p_id RETURNING * INTO v;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF v.unique_key IS NOT NULL THEN
        INSERT INTO headrace.job_unique (queue, key, job_id) VALUES (v.queue, v.unique_key, p_id);
    END IF;
    INSERT INTO headrace.job_ready
        (id, queue, run_at, priority, lane, unique_key, traceparent, payload)
    VALUES (v.id, v.queue, now(), v.priority, v.lane, v.unique_key, v.traceparent, v.payload);
    PERFORM pg_notify('headrace_jobs', v.queue::text);
    RETURN true;
END $$;

-- Set a lane's limits, live. A window that got longer, or a limit where there was none, starts with an entry that
-- blocks the lane until the starts which were forgotten could not matter any more.
CREATE FUNCTION headrace.set_lane_v1(
    p_limiter text, p_name text, p_starts_max integer, p_window_s double precision,
    p_concurrency integer, p_paused boolean, p_weight integer
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v headrace.lane%ROWTYPE;
    v_now timestamptz;
    v_block_at timestamptz;
BEGIN
    INSERT INTO headrace.lane (limiter, name) VALUES (p_limiter, p_name) ON CONFLICT DO NOTHING;
    SELECT * INTO v FROM headrace.lane WHERE limiter = p_limiter AND name = p_name
    FOR NO KEY UPDATE;
    v_now := clock_timestamp();
    IF p_window_s IS NOT NULL AND v.started_at IS NOT NULL THEN
        IF v.window_s IS NULL THEN
            v_block_at := v.started_at;
        ELSIF p_window_s > v.window_s THEN
            v_block_at := least(v.started_at, v_now - (v.window_s + v.slack_s) * interval '1 s');
        END IF;
    END IF;
    UPDATE headrace.lane SET
        starts_max = p_starts_max, window_s = p_window_s, concurrency = p_concurrency,
        paused = p_paused, weight = p_weight, free_at = '-infinity',
        at = CASE WHEN p_window_s IS NULL THEN '{}' WHEN v_block_at IS NULL THEN v.at
                  ELSE v_block_at || v.at END,
        n = CASE WHEN p_window_s IS NULL THEN '{}' WHEN v_block_at IS NULL THEN v.n
                 ELSE 1000000000 || v.n END
    WHERE limiter = p_limiter AND name = p_name;
    UPDATE headrace.lane_queue SET ready_at = v_now
    WHERE limiter = p_limiter AND lane = p_name AND waiting > 0;
    PERFORM pg_notify('headrace_jobs', q.queue::text) FROM headrace.lane_queue q
    WHERE q.limiter = p_limiter AND q.lane = p_name AND q.waiting > 0;
END $$;
