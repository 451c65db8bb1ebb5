-- name: note_hosts
-- Add the host measurements of a worker.
SELECT headrace.fetch_note_hosts_v1(
    :customers::text[], :hosts::text[], :requests::integer[], :photos::integer[],
    :seconds::double precision[], :pauses_s::double precision[],
    :speed_customers::text[], :speed_hosts::text[], :speed_classes_s::double precision[],
    :speed_photos::integer[],
    :outcome_customers::text[], :outcome_hosts::text[], :outcomes::text[],
    :outcome_photos::integer[],
    :attempt_classes_s::double precision[], :attempt_outcomes::text[],
    :attempt_buckets::smallint[], :attempts::integer[],
    :half_life_s::double precision, :recent::double precision);

-- name: host_states
-- Known state per (customer, host): weights by class, their age, remaining pause.
SELECT g.position, extract(epoch FROM now() - h.last_seen_at)::double precision AS age_s,
       extract(epoch FROM h.paused_until - now())::double precision AS paused_s,
       ARRAY(SELECT s.class_s FROM headrace.fetch_speed s
             WHERE s.customer = h.customer AND s.host = h.host ORDER BY s.class_s) AS classes_s,
       ARRAY(SELECT s.weight FROM headrace.fetch_speed s
             WHERE s.customer = h.customer AND s.host = h.host ORDER BY s.class_s) AS weights
FROM unnest(:customers::text[], :hosts::text[]) WITH ORDINALITY AS g(customer, host, position)
JOIN headrace.fetch_host h ON h.customer = g.customer AND h.host = g.host;

-- name: hosts
-- A page of hosts with their outcomes, by host and customer.
SELECT h.customer, h.host, h.requests, h.photos, h.seconds, h.first_seen_at, h.last_seen_at,
       CASE WHEN h.paused_until > now() THEN h.paused_until END AS paused_until,
       ARRAY(SELECT s.class_s FROM headrace.fetch_speed s
             WHERE s.customer = h.customer AND s.host = h.host ORDER BY s.class_s) AS classes_s,
       ARRAY(SELECT s.weight * power(
                 0.5, extract(epoch FROM now() - h.last_seen_at) / :half_life_s::double precision)
             FROM headrace.fetch_speed s
             WHERE s.customer = h.customer AND s.host = h.host ORDER BY s.class_s) AS weights,
       (SELECT json_object_agg(o.outcome, o.photos ORDER BY o.outcome)::text
        FROM headrace.fetch_host_outcome o
        WHERE o.customer = h.customer AND o.host = h.host) AS by_outcome,
       (SELECT r.crawl_delay_s FROM headrace.fetch_robots r WHERE r.host = h.host) AS crawl_delay_s
FROM headrace.fetch_host h
WHERE (:customer::text IS NULL OR h.customer = :customer::text)
  AND (:host::text IS NULL OR h.host = :host::text)
  AND (h.host, h.customer) > (:after_host, :after_customer)
ORDER BY h.host, h.customer LIMIT :rows_max;

-- name: forget_hosts
-- Delete hosts without recent requests, a batch at a time; return the deleted ones.
WITH old AS (
    DELETE FROM headrace.fetch_host WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM headrace.fetch_host
        WHERE last_seen_at < now() - :kept_s::double precision * interval '1 s'
        LIMIT :rows_max FOR UPDATE SKIP LOCKED))
    RETURNING customer, host
), speeds AS (
    DELETE FROM headrace.fetch_speed s USING old
        WHERE s.customer = old.customer AND s.host = old.host
), outcomes AS (
    DELETE FROM headrace.fetch_host_outcome o USING old
    WHERE o.customer = old.customer AND o.host = old.host
)
SELECT customer, host FROM old;

-- name: attempts_by_week
-- Attempts of the last weeks, this one included, by week, class, outcome and bucket.
SELECT date_trunc('week', day::timestamp)::date AS week, class_s, outcome, bucket,
    sum(attempts)::bigint AS attempts
FROM headrace.fetch_attempt
WHERE day >= date_trunc('week', now() AT TIME ZONE 'UTC')::date - 7 * (:weeks::integer - 1)
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4;

-- name: forget_attempts
-- Delete the counts of old days.
DELETE FROM headrace.fetch_attempt
WHERE day < (now() AT TIME ZONE 'UTC')::date - :days_kept::integer;

-- name: begin_robots
-- Claim the reading of a host's robots.txt; no row if it was read recently or another process reads
-- it.
INSERT INTO headrace.fetch_robots AS r (host, begun_at) VALUES (:host, now())
ON CONFLICT (host) DO UPDATE SET begun_at = now()
WHERE coalesce(r.read_at, '-infinity') < now() - :kept_s::double precision * interval '1 s'
  AND r.begun_at < now() - interval '15 seconds'
RETURNING host;

-- name: leave_robots
-- Release the claim on a host's robots.txt after a failed read.
UPDATE headrace.fetch_robots SET begun_at = '-infinity' WHERE host = :host;

-- name: note_robots
-- Store the Crawl-delay of a host; NULL: none.
UPDATE headrace.fetch_robots SET crawl_delay_s = :crawl_delay_s::double precision, read_at = now()
WHERE host = :host;

-- name: take_turn_of_host
-- Reserve the next request to a host with a Crawl-delay within :wait_max_s; return the wait.
UPDATE headrace.fetch_robots SET
    next_at = greatest(next_at, clock_timestamp()) + crawl_delay_s * interval '1 s'
WHERE host = :host AND crawl_delay_s > 0
  AND next_at <= clock_timestamp() + :wait_max_s::double precision * interval '1 s'
RETURNING greatest(0, extract(epoch FROM next_at - crawl_delay_s * interval '1 s'
                                         - clock_timestamp()))::double precision AS wait_s;

-- name: find_robots
-- A host's Crawl-delay, whether robots.txt was read, and the wait until its next request.
SELECT crawl_delay_s, read_at IS NOT NULL AS is_read,
    extract(epoch FROM next_at - clock_timestamp())::double precision AS wait_s
FROM headrace.fetch_robots WHERE host = :host;
