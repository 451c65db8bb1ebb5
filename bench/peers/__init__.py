"""The systems measured, one module each, run as processes of their own: `python -m bench.peers.NAME
COMMAND`.

Commands are `prepare`, `single JOBS`, `bulk JOBS` and `work`; see `driver.py`. Each peer runs in
the best configuration that its documentation gives, with what was measured better here, as noted
in `systems.py`. They live in an environment of their own (`bench/requirements.txt`), so
nothing here imports the product.
"""
