"""Tasks and their files, for every service that reads them: `task_format.py` is what a task is,
`task_files.py` reads files of them, `task_digests.py` tells which tasks are equal, and
`task_checks.py` which were found valid."""
