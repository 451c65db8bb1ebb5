-- Fingerprints of the root secret that each role of each host uses, to find one that differs.

-- One row per host and role, written by the host's recorder each minute. `fingerprint` is derived
-- from the secret by HMAC-SHA256, `accepted` has those of media.accepted_secrets, with commas.
CREATE TABLE headrace.role_secret (
    host text COLLATE "C",
    role text COLLATE "C",
    fingerprint text NOT NULL,
    accepted text NOT NULL,
    seen_at timestamptz NOT NULL,
    PRIMARY KEY (host, role)
);
