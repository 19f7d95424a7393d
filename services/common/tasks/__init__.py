"""Tasks and their files, for every service that reads them: `task_format.py` is what a task is, and
`task_files.py` reads files of them."""
