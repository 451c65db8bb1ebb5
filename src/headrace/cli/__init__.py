"""The command line: noun and verb, `--json` on every command, documented exit codes.

`main` parses global options and finds commands, `root` has the first page of help and advice for
wrong names, `examples` an example of each command, `app_context` loads the application and prints
results, `screen` draws them on a terminal, `roles` has one command per process, `up` starts them
under the `supervisor`. `doctor` and `doctor_engines` check an installation, `setup` creates and
migrates it and shows its settings, `console` prints login links, `completion` completes commands.

Exit codes: 0 success; 1 internal error; 2 invalid input; 3 forbidden; 4 not found; 5 conflict;
6 limit exceeded; 7 dependency unavailable; 8 corrupt data; 130 interrupted.
"""
