-- Logins of the console, each by a token and gone with it, and what was done there. Of a session only the SHA-256 of its cookie
-- is kept. A line of the audit is written before its action and told the outcome after: one that stays 'begun' had its process
-- die in the middle.
CREATE TABLE headrace.console_session (
    sha256 bytea PRIMARY KEY CHECK (length(sha256) = 32),
    token_id bigint NOT NULL REFERENCES headrace.token (id) ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL
);

CREATE INDEX console_session_expires ON headrace.console_session (expires_at);

CREATE TABLE headrace.audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    actor text NOT NULL,
    place text NOT NULL,
    action text NOT NULL,
    command text NOT NULL,
    outcome text NOT NULL DEFAULT 'begun' CHECK (outcome IN ('begun', 'done', 'refused', 'failed')),
    told text
);

CREATE INDEX audit_at ON headrace.audit (at);
