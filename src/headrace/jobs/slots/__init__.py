"""Slots: where handlers run, one queue at a time per slot.

A slot is a forked process of the agent, or part of `headrace work`. `process` is the forked
process, `runner` receives work and sends acks, `executor` runs one handler call, `lease_run`
collects the outcomes of a lease, `agent_client` sends requests of running jobs, `status_board` is
the memory shared with the agent. Agent and slot exchange the messages of `jobs.messages`.
"""
