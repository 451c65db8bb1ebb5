"""What would happen: to the load of nodes when others are lost, to hits when a cache is larger. No I/O.

loads       each node's part before and after a change
cluster     a made-up cluster through losses and a roll-out
plot        either as an SVG
eviction    hits of SIEVE in sets, LRU and the best static choice on a stated popularity
"""

from __future__ import annotations
