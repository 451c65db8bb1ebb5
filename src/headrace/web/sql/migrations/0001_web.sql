-- API tokens, console sessions, the audit log, idempotency keys and the object store's id.

-- API tokens. Only the SHA-256 is stored: a token is 256 random bits, so a slow hash adds nothing.
-- Two valid tokens never share a name; a revoked token gives its name back.
CREATE TABLE headrace.token (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL CHECK (length(name) BETWEEN 1 AND 128),
    sha256 bytea NOT NULL UNIQUE CHECK (length(sha256) = 32),
    scopes text[] NOT NULL CHECK (cardinality(scopes) > 0),
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    last_used_at timestamptz
);
CREATE UNIQUE INDEX token_name_taken ON headrace.token (name) WHERE revoked_at IS NULL;

-- Sign-ins of the console, deleted with their token. Only the SHA-256 of the cookie is stored.
CREATE TABLE headrace.console_session (
    sha256 bytea PRIMARY KEY CHECK (length(sha256) = 32),
    token_id bigint NOT NULL REFERENCES headrace.token (id) ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL
);
CREATE INDEX console_session_expires ON headrace.console_session (expires_at);

-- One-time sign-in links of the console, deleted with their token. Only the SHA-256 is stored.
CREATE TABLE headrace.console_link (
    sha256 bytea PRIMARY KEY CHECK (length(sha256) = 32),
    token_id bigint NOT NULL REFERENCES headrace.token (id) ON DELETE CASCADE,
    expires_at timestamptz NOT NULL
);

-- The audit log of the console. A row is inserted before its action and updated with the outcome.
-- A row that stays 'begun' belongs to a process that died during the action.
CREATE TABLE headrace.audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    actor text NOT NULL,
    address text NOT NULL,
    action text NOT NULL,
    command text NOT NULL,
    outcome text NOT NULL DEFAULT 'begun'
        CHECK (outcome IN ('begun', 'done', 'refused', 'failed')),
    detail text
);
CREATE INDEX audit_at ON headrace.audit (at);

-- Idempotency keys of requests, with the stored responses. A row commits together with the effect
-- of its request, so other transactions never see a row without a response.
-- caller is the id of a token; 0 means a route without authentication.
CREATE TABLE headrace.idempotency_key (
    caller bigint NOT NULL,
    key text NOT NULL CHECK (length(key) BETWEEN 1 AND 128),
    sha256 bytea NOT NULL CHECK (length(sha256) = 32),
    status smallint,
    body bytea,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (caller, key)
);
CREATE INDEX idempotency_key_created ON headrace.idempotency_key (created_at);

-- The id in the marker file of the object store's folder, which several hosts may mount.
-- At most one row: of two hosts that start at the same time, the first insert wins.
CREATE TABLE headrace.object_store (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    mark text NOT NULL,
    since timestamptz NOT NULL DEFAULT now()
);
