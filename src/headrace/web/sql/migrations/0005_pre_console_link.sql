-- One-time links into the console, each for a token and gone with it. Of a link only the SHA-256 of its code is kept.
CREATE TABLE headrace.console_link (
    sha256 bytea PRIMARY KEY CHECK (length(sha256) = 32),
    token_id bigint NOT NULL REFERENCES headrace.token (id) ON DELETE CASCADE,
    expires_at timestamptz NOT NULL
);
