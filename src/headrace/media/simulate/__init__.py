"""Simulations without I/O.

cluster     the load of nodes before and after losses and in a roll-out; plots as SVG
eviction    hit ratios of SIEVE in sets, LRU and the best static choice
"""

from __future__ import annotations
