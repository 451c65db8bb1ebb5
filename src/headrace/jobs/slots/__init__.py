"""Slots: where handlers run, one queue at a time a slot; a forked process of the agent, or part of `headrace work`."""
