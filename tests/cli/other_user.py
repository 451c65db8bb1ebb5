"""Test program: run one `headrace` command as a user without access.

other_user.py UID ARGUMENT...   imports all modules first, as that user may lack access to them
"""

from __future__ import annotations

import os
import sys

from headrace.__main__ import main
from headrace.app import sections
from headrace.cli.main import build_group

if __name__ == "__main__":
    build_group()
    sections()
    uid = int(sys.argv[1])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    sys.exit(main(sys.argv[2:]))
