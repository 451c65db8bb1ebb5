"""The agent: one process a host that claims jobs for all its slots, forks the slots and watches them.

    agent (asyncio, the only one with PostgreSQL connections for claims)
      |  control socket                 | socket pair a slot: work down, outcomes up
      zygote (single-threaded, the app imported once) --fork--> slot, slot, ... (heap shared copy-on-write)

**Files.** `dispatcher.py` is the heart: which queue for which slot; `choosing.py` (the decisions), `lines.py` (a queue as it
sees it), `seats.py` (a slot as it sees it) and `blame.py` (what a death means) are its parts. `core.py` is a host row's life: register,
renew, listen, fence. `crew.py` keeps the forked slots (`forked.py` is one), `keeper.py` the zygote, `zygote.py` is that process, `control.py` what
agent and zygote say to each other, `declaring.py` how queues are declared, `links.py` a slot's socket, `board.py` what slots are doing, `capacity.py` how many
fit, `succession.py` the lock that outlives a dead agent, `agent.py` puts it together.

**Promise.** A slot that dies costs its own jobs a run and nobody else anything: they are ready again at once. A call over
its timeout is ended even in C code. An agent that dies takes its slots with it, and the next one of that
host waits for them before it gives their jobs to others.
"""
