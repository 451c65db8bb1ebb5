"""Test program: run `headrace` commands as a user without access.

other_user.py UID   imports all modules first, as that user may lack access to them; reads a JSON
list of commands from its standard input, and prints a JSON list of [exit code, output, errors]
"""

from __future__ import annotations

import contextlib
import io
import json
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
    ran = []
    for words in json.load(sys.stdin):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        ran.append([code, out.getvalue(), err.getvalue()])
    print(json.dumps(ran))
