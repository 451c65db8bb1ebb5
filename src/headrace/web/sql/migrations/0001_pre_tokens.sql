-- Tokens of callers of the HTTP API. Only the SHA-256 of a token is kept: it is 256 random bits, so a
-- slow hash would add nothing. A name is taken by one token that is not revoked.
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
