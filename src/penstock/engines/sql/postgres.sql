-- name: allow_long_statements
-- Let statements run for :milliseconds until the transaction, or else the session, ends.
SELECT set_config('statement_timeout', :milliseconds, :is_local);
