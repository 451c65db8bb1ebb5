-- Waits are summed over the jobs that were claimed, so their mean needs that number: over those that ended it came out greater
-- than the longest of them, wherever more was claimed than ended.

ALTER TABLE headrace.queue_minute ADD COLUMN claimed bigint NOT NULL DEFAULT 0;

-- Add what a host's slots did since its last call. Rows are taken in order of queue, so that hosts cannot lock each
-- other out.
CREATE FUNCTION headrace.add_counts_v2(
    p_host bigint, p_queues integer[], p_done bigint[], p_failed bigint[], p_retried bigint[],
    p_lost bigint[], p_calls bigint[], p_claimed bigint[], p_run_s double precision[], p_wait_s double precision[],
    p_wait_max_s double precision[], p_slot_s double precision[]
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.queue_minute AS m
        (queue, minute, done, failed, retried, lost, calls, claimed, run_s, wait_s, wait_max_s, slot_s)
    SELECT r.queue, date_trunc('minute', now()), sum(r.done), sum(r.failed), sum(r.retried), sum(r.lost),
           sum(r.calls), sum(r.claimed), sum(r.run_s), sum(r.wait_s), max(r.wait_max_s), sum(r.slot_s)
    FROM unnest(p_queues, p_done, p_failed, p_retried, p_lost, p_calls, p_claimed, p_run_s, p_wait_s,
                p_wait_max_s, p_slot_s)
        AS r(queue, done, failed, retried, lost, calls, claimed, run_s, wait_s, wait_max_s, slot_s)
    GROUP BY r.queue ORDER BY r.queue
    ON CONFLICT (queue, minute) DO UPDATE SET
        done = m.done + excluded.done, failed = m.failed + excluded.failed,
        retried = m.retried + excluded.retried, lost = m.lost + excluded.lost,
        calls = m.calls + excluded.calls, claimed = m.claimed + excluded.claimed,
        run_s = m.run_s + excluded.run_s, wait_s = m.wait_s + excluded.wait_s,
        slot_s = m.slot_s + excluded.slot_s, wait_max_s = greatest(m.wait_max_s, excluded.wait_max_s);
    INSERT INTO headrace.queue_total AS t
        (queue, done, failed, retried, lost, calls, run_s, wait_s, slot_s)
    SELECT r.queue, sum(r.done), sum(r.failed), sum(r.retried), sum(r.lost), sum(r.calls),
           sum(r.run_s), sum(r.wait_s), sum(r.slot_s)
    FROM unnest(p_queues, p_done, p_failed, p_retried, p_lost, p_calls, p_run_s, p_wait_s, p_slot_s)
        AS r(queue, done, failed, retried, lost, calls, run_s, wait_s, slot_s)
    GROUP BY r.queue ORDER BY r.queue
    ON CONFLICT (queue) DO UPDATE SET
        done = t.done + excluded.done, failed = t.failed + excluded.failed,
        retried = t.retried + excluded.retried, lost = t.lost + excluded.lost,
        calls = t.calls + excluded.calls, run_s = t.run_s + excluded.run_s,
        wait_s = t.wait_s + excluded.wait_s, slot_s = t.slot_s + excluded.slot_s;
    UPDATE headrace.host SET jobs_ended = jobs_ended + r.ended
    FROM (SELECT sum(done + failed) AS ended FROM unnest(p_done, p_failed) AS c(done, failed)) r
    WHERE id = p_host AND r.ended > 0;
END $$;
