"""Slots: where handlers run, one queue at a time per slot.

A slot is a forked process of the agent, or part of `headrace work`. `process` is the forked
process, `runner` receives work and sends acks, `agent_client` sends requests of handlers,
`executor` runs handler calls and collects the outcomes of a lease, `isolation` has the threads and
forks of handlers, `status_board` is the memory shared with the agent. Agent and slot exchange the
messages of `jobs.messages`.
"""
