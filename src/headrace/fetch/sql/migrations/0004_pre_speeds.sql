-- What is measured of the hosts of each customer's links, and what they asked of us.

-- `photos` and `seconds` fade like the weights of fetch_speed; their quotient is the mean time of a photo.
CREATE TABLE headrace.fetch_host (
    customer text NOT NULL,
    host text NOT NULL,
    requests bigint NOT NULL DEFAULT 0,
    photos double precision NOT NULL DEFAULT 0,
    seconds double precision NOT NULL DEFAULT 0,
    left_share double precision NOT NULL DEFAULT 1,
    paused_until timestamptz,
    first_seen_at timestamptz NOT NULL DEFAULT now(),
    last_seen_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (customer, host)
) WITH (fillfactor = 70);
CREATE INDEX fetch_host_host ON headrace.fetch_host (host, customer);

-- How much of what is remembered of a host needed a class of this length.
CREATE TABLE headrace.fetch_speed (
    customer text NOT NULL,
    host text NOT NULL,
    class_s double precision NOT NULL,
    weight double precision NOT NULL,
    PRIMARY KEY (customer, host, class_s)
) WITH (fillfactor = 70);

CREATE TABLE headrace.fetch_host_outcome (
    customer text NOT NULL,
    host text NOT NULL,
    outcome text NOT NULL,
    photos bigint NOT NULL,
    last_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (customer, host, outcome)
) WITH (fillfactor = 70);

-- What a host's robots.txt asks, for all customers: `next_at` is when the next request may be sent.
CREATE TABLE headrace.fetch_robots (
    host text PRIMARY KEY,
    crawl_delay_s double precision,
    begun_at timestamptz NOT NULL,
    read_at timestamptz,
    next_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70);

-- Add what a slot measured: one entry a host (p_), one a host and class (s_), one a host and outcome (o_). The rows
-- of hosts are written first and in order, which keeps two slots apart. What was remembered fades by age and by the
-- number of new downloads, as `faded` of fetch/routing.py says.
CREATE FUNCTION headrace.note_hosts_v1(
    p_customers text[], p_hosts text[], p_requests integer[], p_photos integer[],
    p_seconds double precision[], p_pauses_s double precision[],
    s_customers text[], s_hosts text[], s_classes_s double precision[], s_photos integer[],
    o_customers text[], o_hosts text[], o_outcomes text[], o_photos integer[],
    p_half_life_s double precision, p_recent double precision
) RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    INSERT INTO headrace.fetch_host AS h
        (customer, host, requests, photos, seconds, paused_until)
    SELECT g.customer, g.host, g.requests, g.photos, g.seconds,
           CASE WHEN g.pause_s > 0 THEN now() + g.pause_s * interval '1 s' END
    FROM unnest(p_customers, p_hosts, p_requests, p_photos, p_seconds, p_pauses_s)
        AS g(customer, host, requests, photos, seconds, pause_s)
    ORDER BY g.customer, g.host
    ON CONFLICT (customer, host) DO UPDATE SET
        requests = h.requests + excluded.requests,
        left_share = power(0.5, extract(epoch FROM now() - h.last_seen_at) / p_half_life_s)
            * greatest(0, 1 - excluded.photos / p_recent),
        photos = excluded.photos + h.photos
            * power(0.5, extract(epoch FROM now() - h.last_seen_at) / p_half_life_s)
            * greatest(0, 1 - excluded.photos / p_recent),
        seconds = excluded.seconds + h.seconds
            * power(0.5, extract(epoch FROM now() - h.last_seen_at) / p_half_life_s)
            * greatest(0, 1 - excluded.photos / p_recent),
        paused_until = greatest(h.paused_until, excluded.paused_until),
        last_seen_at = now();
    UPDATE headrace.fetch_speed s SET weight = s.weight * h.left_share
    FROM (
        SELECT t.ctid, r.left_share FROM unnest(p_customers, p_hosts) AS g(customer, host)
        CROSS JOIN LATERAL (SELECT r.left_share FROM headrace.fetch_host r
                            WHERE r.customer = g.customer AND r.host = g.host OFFSET 0) r
        CROSS JOIN LATERAL (SELECT t.ctid FROM headrace.fetch_speed t
                            WHERE t.customer = g.customer AND t.host = g.host OFFSET 0) t
    ) h WHERE s.ctid = h.ctid;
    INSERT INTO headrace.fetch_speed AS s (customer, host, class_s, weight)
    SELECT g.customer, g.host, g.class_s, g.photos
    FROM unnest(s_customers, s_hosts, s_classes_s, s_photos) AS g(customer, host, class_s, photos)
    ORDER BY 1, 2, 3
    ON CONFLICT (customer, host, class_s) DO UPDATE SET weight = s.weight + excluded.weight;
    INSERT INTO headrace.fetch_host_outcome AS o (customer, host, outcome, photos)
    SELECT g.customer, g.host, g.outcome, g.photos
    FROM unnest(o_customers, o_hosts, o_outcomes, o_photos) AS g(customer, host, outcome, photos)
    ORDER BY 1, 2, 3
    ON CONFLICT (customer, host, outcome) DO UPDATE SET
        photos = o.photos + excluded.photos, last_at = now();
END $$;
