"""Simulations without I/O.

cluster     the load of nodes before and after losses and in a roll-out
eviction    hit ratios of SIEVE in sets, LRU and the best static choice
plot        both as SVG
"""

from __future__ import annotations
