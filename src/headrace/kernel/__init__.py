"""Pure code that every room uses: no sockets, no SQL, no drivers.

errors      error kinds and the error table        config    settings, with all faults reported
ids         validated names, UUIDv7                signing   derived keys and signed cursors
clock       wall, monotonic and virtual time       logs      JSON log lines and trace context
resilience  backoff, cancellation, crash points    metrics   bounded Prometheus series
routes      limits, idempotency and fast paths     terminal  the interface of CLI commands
batching    concurrent calls in one statement      ipc       framed messages between processes
single_flight  concurrent identical calls share one execution
sandbox     child processes without privileges
faults      every fault of a document              storable  values that PostgreSQL can store
"""
