-- Put jobs that ended in one of p_states back with all their retries; they have left their groups.
-- A job whose key another unfinished job has stays, and of several with one key all but the
-- newest. The headers keep when a job failed and the begin of its error; version 1 lost both.
CREATE FUNCTION headrace.retry_jobs_v2(p_ids bigint[], p_states text[])
RETURNS TABLE (retried bigint[], taken bigint[])
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_ids bigint[];
    v_queues integer[];
BEGIN
    SELECT array_agg(f.id) INTO v_ids FROM (
        SELECT o.id FROM headrace.job_failed o WHERE o.id = ANY(p_ids) AND o.state = ANY(p_states)
        ORDER BY o.id FOR UPDATE) f;
    WITH keyed AS (
        INSERT INTO headrace.job_unique (queue, key, job_id)
        SELECT DISTINCT ON (f.queue, f.unique_key) f.queue, f.unique_key, f.id
        FROM headrace.job_failed f WHERE f.id = ANY(v_ids) AND f.unique_key IS NOT NULL
        ORDER BY f.queue, f.unique_key, f.id DESC
        ON CONFLICT DO NOTHING RETURNING job_id
    )
    SELECT array_agg(f.id) FILTER (WHERE f.unique_key IS NULL OR k.job_id IS NOT NULL),
           array_agg(f.id) FILTER (WHERE f.unique_key IS NOT NULL AND k.job_id IS NULL)
    INTO retried, taken
    FROM headrace.job_failed f LEFT JOIN keyed k ON k.job_id = f.id WHERE f.id = ANY(v_ids);
    DELETE FROM headrace.job_cancel c WHERE c.job_id = ANY(retried);
    WITH back AS (
        DELETE FROM headrace.job_failed f WHERE f.id = ANY(retried) RETURNING *
    ), put AS (
        INSERT INTO headrace.job_ready
            (id, queue, run_at, priority, lane, unique_key, headers, payload, version)
        SELECT b.id, b.queue, now(), b.priority, b.lane, b.unique_key,
            regexp_replace(b.headers, ' (expires|chain|failed)=\S+', '', 'g')
                || CASE WHEN b.state = 'cancelled' THEN '' ELSE
                    format(' failed=%s:%s', extract(epoch FROM b.ended_at),
                           encode(convert_to(left(b.error, 200), 'UTF8'), 'hex')) END,
            b.payload, b.version
        FROM back b
    )
    SELECT array_agg(DISTINCT b.queue) INTO v_queues FROM back b;
    PERFORM pg_notify('headrace_jobs', q::text) FROM unnest(v_queues) AS q;
    RETURN NEXT;
END $$;
