"""Sellers' hosts for the measurements of fetch, on loopback.

Nginx where only speed counts, hosts of our own making where they are slow, silent, failing or
jammed, and a name server for both.

photos.py   real JPEG files, each with content of its own
nginx.py    nginx with those files and an access log
plan.py     how a simulated host behaves: what it answers to a path, and when
hosts.py    a process that is all simulated hosts and their name server
started.py  that process, as the bench starts and steers it
log.py      its access log, and what a seller would read in it

"""
