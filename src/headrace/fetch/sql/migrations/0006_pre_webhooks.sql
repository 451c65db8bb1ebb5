-- Webhooks of customers, deliveries whose consumer is away, and the values that sentences about rows show.

-- `taken_seq`: the last result that the receiver took. `turn` is the fence: a job of another turn does
-- nothing, and the row's lock decides whether a result finds a job at work or makes the next one.
-- The secrets are readable: they sign. Whoever reads this table can speak to the receivers in our name.
CREATE TABLE headrace.fetch_webhook (
    customer text PRIMARY KEY REFERENCES headrace.fetch_customer,
    id bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    url text NOT NULL,
    secret text NOT NULL,
    old_secret text,
    old_until timestamptz,
    taken_seq bigint NOT NULL,
    turn bigint NOT NULL DEFAULT 0,
    failures integer NOT NULL DEFAULT 0,
    failing_since timestamptz,
    next_at timestamptz,
    last_at timestamptz,
    last_status integer,
    last_error text,
    disabled_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX fetch_result_customer ON headrace.fetch_result (customer, seq);

-- Deliveries that found nobody to call; a worker that has the handler enqueues them anew when it begins.
CREATE TABLE headrace.fetch_absent (
    consumer text NOT NULL,
    seq bigint NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, seq)
);

-- JSON object of what the sentence of `code` shows; rows of older releases have their `problem` alone.
ALTER TABLE headrace.fetch_problem ADD parameters text NOT NULL DEFAULT '{}';
