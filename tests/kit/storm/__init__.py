"""A storm: real roles under faults, the workload and the checkers of each room.

fleet       processes of an application, the jobs they work on, and the history of both sides
storm       roles on engines of their own, the table of faults and the supervisor
room_*      one room: its workload, its counts, its round trip and its checkers
*_app       the applications that the processes run
bucket      an S3 bucket in the test's process, for media nodes; media_cluster has the nodes

`tests/promises` and `verification/torture` use it.
"""
