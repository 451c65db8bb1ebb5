"""The fleet: how many slots each queue has, on which hosts, decided every few seconds.

`plan.py` decides: a pure function from needs, hosts and the current map to a new map, with a reason
for every slot that moves; `placement.py` puts the slots on hosts. `rates.py` estimates from
cumulative readings how many jobs become due and how much slot time each takes. Slots that no plan
has bound float: they take jobs of any queue.

`state.py` holds the reported state and derives the plan's input. `scheduler.py` runs the loops: it
plans while it leads, fires crons and sweeps. `alerts.py` evaluates rules.
"""
