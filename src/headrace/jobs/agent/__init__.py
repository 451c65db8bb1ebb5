"""The agent: one process per host that claims jobs for its slots, forks and watches the slots.

    agent (asyncio; its PostgreSQL connections serve all slots)
      |  control socket                 | one socket pair per slot: work out, acks back
      zygote (single-threaded, imported the app once) --fork--> slot, slot, ... (heap copy-on-write)

**Files**: `dispatcher` is the main part: it claims jobs, assigns them to slots and takes their
acks. Its parts are `queue_state` (a queue), `worker_proxy` (a slot), `assignment` (which slot may
work which queue), `token_batcher` (lane tokens) and `crash_attribution` (which job a crash is
attributed to). `slot_statements` runs statements of handlers. `host_loop` is the life of a host
row. `worker_pool` keeps the forked slots, `worker_process` is one of them, `capacity` computes how
many fit. `zygote` is the forking process, `zygote_client` its agent's side, `zygote_protocol` their
messages. `host_lock` outlives a dead agent, `agent` starts everything.

**Leftover processes.** Each slot leads a process group, which is killed before the dead slot is
reaped: until then no other process can get its pid, which names the group. A process of a handler
that made its own session keeps running. The agent adopts it and kills it at its own end.

**Promise.** A slot that dies costs its own jobs one run and affects no other slot: its jobs are
ready again at once. A call over its timeout is ended even in C code. An agent that dies takes its
slots with it. The host's next agent waits for them before it returns their jobs.
"""
