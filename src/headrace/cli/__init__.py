"""The command line: noun, verb, `--json` everywhere, documented exit codes.

main        the command `headrace`: global options, the rooms' commands, errors -> exit codes
terminal    what a room's command is given: its service, and a way to show
roles       `api`, `work`, `scheduler`, `flusher`, `media serve`: one process each
up          `headrace up`: engines and roles under one supervisor
supervisor  starts, watches, restarts and ends processes
upkeep      `migrate`, `config show`, `doctor`

Exit codes: 0 done; 1 a fault of ours; 2 wrong input; 3 not allowed; 4 not found; 5 in conflict with the
present state; 6 over a limit; 7 something needed is down; 8 stored data is corrupt; 130 interrupted.
"""
