"""The fleet: how many slots each queue has, on which hosts, decided every few seconds.

`plan.py` decides: a pure function from needs, hosts and the current map to a new map, with the reason
for every slot that moves; it shares slots out with `fill.py` and puts them on hosts with
`placement.py`. `rates.py` estimates from cumulative readings how many jobs become due and how much
slot time each takes. Slots that no plan has bound float: they take from any queue.

Around it: `facts.py` makes its question out of what hosts report, `scheduler.py` asks it and writes the answer while
it leads, and runs crons and sweeps, `alerts.py` watches over what was seen, `webhook.py` tells others.
"""
