-- name: report_host
-- Store a host's report. No row: the host expired.
UPDATE headrace.host SET capacity = :capacity, load_per_core = :load_per_core,
    cpu_pressure = :cpu_pressure, slots = :slots::jsonb, reported_at = now(),
    reports_from = CASE WHEN reported_at >= now() - :gap_s::double precision * interval '1 s'
        THEN coalesce(reports_from, now()) ELSE now() END
WHERE id = :host AND expires_at > now() RETURNING is_draining;

-- name: add_counts
-- Add the counts that only a host has, and fold the counts of all hosts.
SELECT headrace.add_counts_v1(:host, :ended, :counts::json);

-- name: planned_slots
-- A host's planned slots as JSON by queue name. No row: there is no plan yet.
SELECT p.version,
       coalesce(json_object_agg(q.name, s.slots) FILTER (WHERE q.id IS NOT NULL),
           '{}')::text AS slots,
       EXISTS (SELECT FROM headrace.host h WHERE h.name = :host AND h.is_draining) AS is_draining
FROM headrace.fleet_plan p
LEFT JOIN headrace.fleet_slot s ON s.host = :host
LEFT JOIN headrace.queue q ON q.id = s.queue
WHERE p.version > 0 GROUP BY p.version;

-- name: set_draining
-- Start or stop draining a host. No row: no such host.
UPDATE headrace.host SET is_draining = :is_draining
WHERE name = :host AND kind <> 'taker' RETURNING pg_notify('headrace_fleet', '');

-- name: forget_host
-- Delete the rows of a lost host. No row: it is unknown, or it runs.
DELETE FROM headrace.host h WHERE h.name = :host AND h.kind <> 'taker' AND NOT EXISTS (
    SELECT FROM headrace.host n
    WHERE n.name = :host AND n.kind <> 'taker' AND n.expires_at > now())
RETURNING pg_notify('headrace_fleet', '');

-- name: knows_host
-- Whether a host of this name runs handlers or was lost.
SELECT EXISTS (SELECT FROM headrace.host WHERE name = :host AND kind <> 'taker');

-- name: fleet_hosts
-- The newest row of every host that runs handlers. is_silent: it missed its reports. lost_at: last
-- report of a host whose lease has expired. While PostgreSQL was down no host could report, so both
-- also need writes of others for :silent_s: reports without gaps, or a lead if no host reports.
-- is_written: there are such writes now.
WITH writes AS (
    SELECT coalesce(
        (SELECT min(o.reports_from) FROM headrace.host o WHERE o.kind <> 'taker'
            AND o.reported_at >= now() - :gap_s::double precision * interval '1 s'),
        (SELECT p.led_from FROM headrace.fleet_plan p WHERE p.leads_until > now())) AS from_at
)
SELECT DISTINCT ON (h.name) h.name, h.kind, h.queues, h.tags, h.cores, h.capacity, h.load_per_core,
    h.cpu_pressure,
       h.is_draining, h.slots::text AS slots, h.started_at, h.reported_at, h.jobs_ended,
       w.from_at IS NOT NULL AS is_written,
       j.is_due AND (h.expires_at <= now() OR coalesce(h.reported_at < j.before_at, false))
           AS is_silent,
       CASE WHEN j.is_due AND h.expires_at <= now()
           THEN coalesce(h.reported_at, h.expires_at) END AS lost_at
FROM headrace.host h CROSS JOIN writes w
CROSS JOIN LATERAL (
    SELECT b.at AS before_at, coalesce(w.from_at < b.at, true) AS is_due
    FROM (SELECT now() - :silent_s::double precision * interval '1 s' AS at) b
) j
WHERE h.kind <> 'taker' ORDER BY h.name, h.id DESC;

-- name: fleet_queues
-- Every queue with its settings in force, its totals and leased jobs.
SELECT q.id, q.name, q.paused, q.batch, q.tag,
       q.importance, q.slots_min, q.slots_max,
       coalesce(t.done, 0) AS done, coalesce(t.failed, 0) AS failed,
       coalesce(t.cancelled, 0) AS cancelled,
       coalesce(t.retried, 0) AS retried, coalesce(t.lost, 0) AS lost,
       coalesce(t.calls, 0) AS calls, coalesce(t.run_s, 0) AS run_s,
       coalesce(t.wait_s, 0) AS wait_s, coalesce(t.slot_s, 0) AS slot_s,
       coalesce(l.jobs, 0) AS leased
FROM headrace.queue_setting q
LEFT JOIN headrace.queue_total t ON t.queue = q.id
LEFT JOIN (
    SELECT queue, sum(cardinality(ids) - cardinality(settled))::bigint AS jobs
    FROM headrace.job_lease GROUP BY queue
) l ON l.queue = q.id
WHERE NOT q.is_removed ORDER BY q.name;

-- name: fleet_waiting
-- Due jobs by queue, counted up to :count_max, and the age of the oldest. Paused queues are left
-- out.
SELECT queue, jobs, oldest_age_s FROM headrace.count_waiting_v1(:count_max);

-- name: lead_fleet
-- Become or stay leader for :lead_s seconds. No row: another process leads.
UPDATE headrace.fleet_plan SET leader = :leader,
    term = CASE WHEN leader = :leader THEN term ELSE term + 1 END,
    led_from = CASE WHEN leads_until > now() THEN coalesce(led_from, now()) ELSE now() END,
    leads_until = now() + :lead_s::double precision * interval '1 s'
WHERE leader = :leader OR leads_until <= now() RETURNING term;

-- name: stop_leading
-- Give up the lead, so that another process can take it at once.
UPDATE headrace.fleet_plan SET leads_until = '-infinity' WHERE leader = :leader;

-- name: find_plan
-- The plan's head.
SELECT leader, leads_until, term, version, planned_at, leads_until > now() AS is_led
FROM headrace.fleet_plan;

-- name: slot_map
-- The plan's map.
SELECT s.host, s.queue, s.slots, q.name FROM headrace.fleet_slot s
JOIN headrace.queue q ON q.id = s.queue;

-- name: write_plan
-- Replace the map and store the decisions. Return the version; NULL: this process no longer leads.
SELECT headrace.write_plan_v1(:leader, :term, :slots::json, :moves::json);

-- name: decisions
-- Decisions, newest first; with :before only those with smaller ids.
SELECT id, at, version, host, queue, before, after, code, why FROM headrace.fleet_decision
WHERE :before::bigint IS NULL OR id < :before::bigint ORDER BY id DESC LIMIT :decisions_max;

-- name: allow_slots
-- Change how many slots of its queues a host may work at once. NULL: no maximum.
SELECT queue, slots FROM headrace.allow_slots_v1(:host, :call, :requests::json);

-- name: raise_alert
-- Open an alert. No row: it is open already.
INSERT INTO headrace.alert (rule, subject, text) VALUES (:rule, :subject, :text)
ON CONFLICT (rule, subject) WHERE cleared_at IS NULL DO NOTHING RETURNING id, raised_at;

-- name: clear_alert
-- Clear an alert. No row: it is not open.
UPDATE headrace.alert SET cleared_at = now()
WHERE rule = :rule AND subject = :subject AND cleared_at IS NULL
RETURNING id, text, raised_at, cleared_at;

-- name: alerts
-- Alerts, newest first; with :is_open only open ones.
SELECT id, rule, subject, text, raised_at, cleared_at FROM headrace.alert
WHERE NOT :is_open OR cleared_at IS NULL ORDER BY raised_at DESC, id DESC LIMIT :alerts_max;

-- name: count_open_alerts
-- Number of open alerts.
SELECT count(*) AS alerts FROM headrace.alert WHERE cleared_at IS NULL;

-- name: unsent_alerts
-- Events of the last :age_s seconds that the webhook has not accepted; a clear only after its
-- raise.
SELECT id, rule, subject, text, raised_at, cleared_at, is_raise_sent FROM headrace.alert
WHERE (NOT is_raise_sent AND raised_at > now() - :age_s::double precision * interval '1 s')
   OR (is_raise_sent AND NOT is_clear_sent
       AND cleared_at > now() - :age_s::double precision * interval '1 s')
ORDER BY id LIMIT :alerts_max;

-- name: mark_sent
-- Record that the webhook accepted the raise of an alert, or else its clear.
UPDATE headrace.alert SET is_raise_sent = true, is_clear_sent = is_clear_sent OR NOT :is_raise
WHERE id = :alert;

-- name: queue_minutes
-- Counts of a queue per minute, oldest first. Minutes with only idle slots are left out.
SELECT m.* FROM headrace.queue_minute m
WHERE m.queue = :queue AND m.minute >= :from_at AND m.minute < :to_at
  AND m.done + m.failed + m.cancelled + m.retried + m.lost + m.calls + m.claimed
      + coalesce(m.ready + m.scheduled + m.running + m.failed_kept, 0) > 0
ORDER BY m.minute;

-- name: queue_hours
-- The same per hour.
SELECT h.* FROM headrace.queue_hour h
WHERE h.queue = :queue AND h.hour >= :from_at AND h.hour < :to_at
  AND h.done + h.failed + h.cancelled + h.retried + h.lost + h.calls + h.claimed
      + coalesce(h.ready + h.scheduled + h.running + h.failed_kept, 0) > 0
ORDER BY h.hour;

-- name: record_backlog
-- Store the backlog of each queue in the current minute. Return it with the totals.
SELECT * FROM headrace.record_backlog_v1(:count_max);

-- name: sum_hours
-- Sum minutes to hours.
SELECT headrace.sum_hours_v1();

-- name: recent_outcomes
-- Done and failed jobs by queue in the last :minutes whole minutes and the current one.
SELECT m.queue, sum(m.done)::bigint AS done, sum(m.failed)::bigint AS failed
    FROM headrace.queue_minute m
WHERE m.minute >= date_trunc('minute', now()) - :minutes::integer * interval '1 minute'
    GROUP BY m.queue;

-- name: queue_loads
-- Counts of each queue in the last :minutes whole minutes and the current one.
SELECT q.name AS queue, sum(m.done)::bigint AS done, sum(m.failed)::bigint AS failed,
    sum(m.cancelled)::bigint AS cancelled, sum(m.retried)::bigint AS retried,
    sum(m.lost)::bigint AS lost, sum(m.calls)::bigint AS calls, sum(m.claimed)::bigint AS claimed,
        sum(m.run_s)::float8 AS run_s,
    coalesce(sum(m.wait_s) FILTER (WHERE m.claimed > 0), 0)::float8 AS wait_s,
    max(m.wait_max_s)::float8 AS wait_max_s, sum(m.slot_s)::float8 AS slot_s
FROM headrace.queue_minute m JOIN headrace.queue q ON q.id = m.queue
WHERE m.minute >= date_trunc('minute', now()) - :minutes::integer * interval '1 minute'
GROUP BY q.name ORDER BY q.name;

-- name: load_span
-- Seconds covered by queue_loads, at most those since the schema was created.
SELECT greatest(1.0, extract(epoch FROM now() - greatest(
    date_trunc('minute', now()) - :minutes::integer * interval '1 minute',
        min(applied_at)))::float8)
FROM headrace.migration WHERE room = 'jobs';

-- name: fleet_minutes
-- Counts of all queues in each of the last :minutes minutes, oldest first.
SELECT m.minute, sum(m.done)::bigint AS done, sum(m.failed)::bigint AS failed,
    sum(m.cancelled)::bigint AS cancelled, sum(m.retried)::bigint AS retried,
    sum(m.run_s)::float8 AS run_s, max(m.wait_max_s)::float8 AS wait_max_s,
        sum(m.slot_s)::float8 AS slot_s
FROM headrace.queue_minute m
WHERE m.minute > date_trunc('minute', now()) - :minutes::integer * interval '1 minute'
GROUP BY m.minute ORDER BY m.minute;

-- name: queue_steps
-- Counts of queues in steps of :step_s, oldest first: of the :queues_max that ended most jobs and
-- the :queues_max with most waiting jobs, with all others together as queue ''. Waiting jobs are
-- the highest count of the step.
WITH rows AS MATERIALIZED (
    SELECT m.queue, m.minute AS at, m.done, m.failed, m.cancelled, m.retried, m.lost, m.ready
    FROM headrace.queue_minute m
    WHERE NOT :is_hourly::boolean AND m.minute >= :from_at AND m.minute < :to_at
    UNION ALL
    SELECT h.queue, h.hour, h.done, h.failed, h.cancelled, h.retried, h.lost, h.ready
    FROM headrace.queue_hour h
    WHERE :is_hourly::boolean AND h.hour >= :from_at AND h.hour < :to_at
), busiest AS MATERIALIZED (
    SELECT t.queue FROM (
        SELECT s.*, row_number() OVER (ORDER BY s.ended DESC, s.queue) AS by_ended,
            row_number() OVER (ORDER BY s.waiting DESC, s.queue) AS by_waiting
        FROM (
            SELECT r.queue, sum(r.done + r.failed + r.cancelled + r.retried + r.lost) AS ended,
                sum(coalesce(r.ready, 0)) AS waiting
            FROM rows r GROUP BY r.queue
        ) s
    ) t
    WHERE (t.ended > 0 AND t.by_ended <= :queues_max)
        OR (t.waiting > 0 AND t.by_waiting <= :queues_max)
), steps AS (
    SELECT date_bin(:step_s::float8 * interval '1 second', r.at, timestamptz 'epoch') AS at,
           r.queue, max(b.queue) AS shown, sum(r.done)::bigint AS done,
           sum(r.failed)::bigint AS failed, sum(r.cancelled)::bigint AS cancelled,
           sum(r.retried)::bigint AS retried, sum(r.lost)::bigint AS lost, max(r.ready) AS ready
    FROM rows r LEFT JOIN busiest b ON b.queue = r.queue GROUP BY 1, 2
)
SELECT s.at, coalesce(q.name, '') AS queue, sum(s.done)::bigint AS done,
    sum(s.failed)::bigint AS failed, sum(s.cancelled)::bigint AS cancelled,
    sum(s.retried)::bigint AS retried, sum(s.lost)::bigint AS lost,
    coalesce(sum(s.ready), 0)::bigint AS ready
FROM steps s LEFT JOIN headrace.queue q ON q.id = s.shown
GROUP BY 1, 2 ORDER BY 1, 2;

-- name: recent_failures
-- Causes of failed and quarantined jobs by queue and state, of which a job ended in the last
-- :span_s seconds. Jobs of a cause are all that are kept, older ones too, so their number does not
-- fall while time passes. The newest :jobs_max of all causes are counted. A cause is the beginning
-- of the error up to a colon, number or line break.
WITH newest AS MATERIALIZED (
    SELECT queue, state, ended_at, left(error, 200) AS error,
        rtrim(substring(left(error, 60) FROM '^[^:0-9\r\n]*')) AS cause
    FROM headrace.job_failed WHERE state <> 'cancelled' ORDER BY ended_at DESC LIMIT :jobs_max
)
SELECT q.name AS queue, f.state, f.cause, count(*)::bigint AS jobs,
    (SELECT count(*) FROM newest) >= :jobs_max AS jobs_is_capped,
    min(f.ended_at) AS first_at, max(f.ended_at) AS last_at,
    (array_agg(f.error ORDER BY f.ended_at DESC))[1] AS last_error
FROM newest f JOIN headrace.queue q ON q.id = f.queue
GROUP BY q.name, f.state, f.cause
HAVING max(f.ended_at) > now() - :span_s::double precision * interval '1 s'
ORDER BY jobs DESC, q.name, f.cause;

-- name: fold_counts
-- Fold up to :rows_max rows of counts into minutes and totals. Return how many.
SELECT headrace.fold_counts_v1(:rows_max);
